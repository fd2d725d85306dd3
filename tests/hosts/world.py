"""Three hosts for a cluster, an S3 server on a fourth and the user's laptop, with the main example's data and job."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
from sample_data import fashion_mnist

from tests.hosts import lan, packages, ssh, store
from tests.hosts.lan import HOME, Host
from tests.support import processes
from tests.support.processes import ROOT

CLUSTER = ("head", "one", "two")
ROWS = {"train": 4096, "test": 256}
ENV_FILE = HOME / ".trainwright" / "storage.env"
CHECKOUT = HOME / "checkout"
EXAMPLE = ROOT / "examples" / "fashion_mnist.py"
OWN_DATA = 'sample_data.fashion_mnist("data/fashion-mnist")'
IMPORT = "import sample_data\n"
# What a user changes: where the data is. The test adds: slower steps, no dropout, which depends on the layout, and
# float64, in which sums of other shares differ by 1e-16; Adam's first steps would still make much of such a last bit.
DATA = f'type("Splits", (), {{"train": "s3://{store.BUCKET}/data/train", "test": "s3://{store.BUCKET}/data/test"}})'
CHANGES = """

import time
whole = job

class Double(nn.Module):
    def forward(self, x):
        return x.double()

def still():
    scale, *layers = build_model()
    kept = [layer for layer in layers if not isinstance(layer, nn.Dropout)]
    return nn.Sequential(scale, Double(), *kept).double()

def job(pace_s: float = 0.0) -> tw.Job:
    def paced(step, total):
        time.sleep(pace_s)
        return tw.schedules.one_cycle(step, total)

    def plain(parameters):
        return torch.optim.SGD(parameters, lr=0.1)

    return whole.replace(model=still, optimizer=plain, schedule=paced, epochs=2, storage={storage!r}, **{fields!r})
"""


@dataclass(frozen=True, kw_only=True)
class World:
    """All hosts by name. `shared` is a folder that this machine and all of them see."""

    hosts: dict[str, Host]
    shared: Path

    @property
    def laptop(self) -> Host:
        """The user's."""
        return self.hosts["laptop"]

    @property
    def cluster(self) -> list[Host]:
        """The head and the others."""
        return [self.hosts[name] for name in CLUSTER]

    def wait(self, what: str, run: str, least: int, patience_s: float = 150.0) -> None:
        """Until the run has told of so many steps, workers or recoveries; see `store`."""
        self._ask("wait", what, run, least, patience_s, deadline_s=patience_s + 30)

    def runs(self) -> Path:
        """All runs, copied out of the store into a folder."""
        folder = self.shared / "runs"
        self._ask("copy", folder)
        return folder

    def credentials(self) -> dict[str, str]:
        """What reaches the storage, as a process has it in its environment."""
        lines = (self.shared / store.ENVIRONMENT).read_text().split()
        return dict(line.split("=", 1) for line in lines)

    def _ask(self, *words: object, deadline_s: float = 60.0) -> None:
        at = self.hosts["store"].machine
        at.run(sys.executable, "-m", "tests.hosts.store", *words, env=self.credentials(), deadline_s=deadline_s)


@contextlib.contextmanager
def world(shared: Path) -> Iterator[World]:
    """Hosts that are up, with data in the store, and a laptop that may log in on those of the cluster."""
    unpacked = packages.unpacked(ROOT / "data" / "debian")
    data = shared / "data"
    _subset(Path(fashion_mnist(ROOT / "data" / "fashion-mnist").train).parent, data)
    with lan.lan((*CLUSTER, "store", "laptop"), unpacked, [shared]) as hosts:
        made = World(hosts=hosts, shared=shared)
        at = hosts["store"]
        serving = at.machine.start(sys.executable, "-m", "tests.hosts.store", "serve", at.address, shared, data)
        ssh.connect(made.laptop, made.cluster, shared)
        processes.wait_until((shared / store.ENVIRONMENT).exists, serving)
        yield made


def job_text(**fields: object) -> str:
    """The main example with its data in the store."""
    text = EXAMPLE.read_text()
    assert OWN_DATA in text and IMPORT in text
    return text.replace(IMPORT, "").replace(OWN_DATA, DATA) + CHANGES.format(storage=store.STORAGE, fields=fields)


def checkout(folder: Path) -> None:
    """What is in this checkout and not ignored, in a folder that appears."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True, text=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def _subset(whole: Path, target: Path) -> None:
    """The first rows of both data sets, in row groups as many as give each worker some."""
    for name, rows in ROWS.items():
        (target / name).mkdir(parents=True)
        table = pq.read_table(whole / name / "part-0.parquet").slice(0, rows)
        pq.write_table(table, target / name / "part-0.parquet", row_group_size=rows // 8)
