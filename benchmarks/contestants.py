"""Who takes part in the recovery benchmarks: each trains the same model until it is told the last step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kills import Recovery, Schedule, measured
from peers import ray_train, torchft_ddp, torchrun_ddp
from peers.torchrun_ddp import Settings
from problem import BATCH_SIZE, job
from stamps import stamping

import trainwright as tw
from trainwright.core.events import Event, Formed, Placed
from trainwright.storage.event_files import read_events
from trainwright.storage.object_store import open_store

STEPS = 20_000  # more than any run gets to
DEADLINE_S = 300.0
HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, kw_only=True)
class Contest:
    """What is the same for all: workers, and when one of them is killed; a checkpoint each `schedule.every` steps."""

    workers: int
    schedule: Schedule

    @property
    def rows(self) -> int:
        """An epoch ends with each checkpoint."""
        return self.schedule.every * BATCH_SIZE

    def ours(self, folder: Path, *, spares: int, **fields: Any) -> list[Recovery]:
        """trainwright; a kill waits until spares are ready, and all workers are there again."""
        folder.mkdir()
        runs = folder / "runs"
        described: dict[str, Any] = {
            "workers": self.workers,
            "spares": spares,
            "optimizer": stamping(folder, self.schedule.pause_s),
            "rows": self.rows,
            "epochs": STEPS // self.schedule.every,
            "checkpoint_steps": self.schedule.every,
        }

        def run() -> None:
            started = tw.start(job(runs, **{**described, **fields}))
            while not started.wait(0.1):
                if (folder / "last").exists():
                    started.stop()

        def ready(kills: int) -> bool:
            return min(_spares(runs) - spares * (kills + 1), _whole(runs, self.workers) - (kills + 1)) >= 0

        return measured(folder, self.schedule, run, ready)

    def ray_train(self, folder: Path) -> list[Recovery]:
        """Ray Train."""
        folder.mkdir()
        settings = ray_train.Settings(
            steps=STEPS,
            rows=self.rows,
            workers=self.workers,
            stamps=str(folder),
            pause_s=self.schedule.pause_s,
            checkpoint_steps=self.schedule.every,
            max_failures=2 * self.schedule.kills,
        )
        return measured(folder, self.schedule, lambda: ray_train.fit(folder, settings), _at_once)

    def torchrun(self, folder: Path) -> list[Recovery]:
        """torch's elastic agent around DistributedDataParallel."""
        folder.mkdir()
        agent = ["--standalone", f"--nproc-per-node={self.workers}", f"--max-restarts={self.schedule.kills}"]
        command = _torchrun(agent, torchrun_ddp.__file__, self._settings(folder))
        own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # pytorch#135712: restarts find addresses of the dead
        return measured(folder, self.schedule, lambda: _to_the_end([command], [own_store], folder), _at_once)

    def torchft(self, folder: Path) -> list[Recovery]:
        """torchft: a lighthouse, and for each worker a replica group of one under an agent of its own."""
        folder.mkdir()
        agent = ["--standalone", "--nproc-per-node=1", f"--max-restarts={self.schedule.kills}"]
        command = _torchrun(agent, torchft_ddp.__file__, self._settings(folder))

        def run() -> None:
            with torchft_ddp.lighthouse() as address:
                common = {"TORCHFT_LIGHTHOUSE": address}
                groups = [{**common, "REPLICA_GROUP_ID": str(number)} for number in range(self.workers)]
                _to_the_end([command] * self.workers, groups, folder)

        return measured(folder, self.schedule, run, _at_once)

    def _settings(self, folder: Path) -> str:
        settings = Settings(
            folder=str(folder),
            workers=self.workers,
            rows=self.rows,
            pause_s=self.schedule.pause_s,
            checkpoint_steps=self.schedule.every,
        )
        return json.dumps(asdict(settings))


def _at_once(kills: int) -> bool:
    return True


def _told(runs: Path) -> Sequence[Event]:
    return read_events(open_store(str(runs)), "benchmark") if (runs / "benchmark").exists() else []


def _spares(runs: Path) -> int:
    """How many spares have come to be ready so far."""
    return sum(isinstance(event, Placed) and event.spare for event in _told(runs))


def _whole(runs: Path, workers: int) -> int:
    """How often a group of all workers was formed so far."""
    return sum(isinstance(event, Formed) and event.workers == workers for event in _told(runs))


def _torchrun(agent: Sequence[str], script: str, settings: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *agent, script, settings]


def _to_the_end(commands: Sequence[list[str]], variables: Sequence[dict[str, str]], folder: Path) -> None:
    """Run these commands side by side; raises RuntimeError with what they wrote when one fails or takes too long."""
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    common = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    log = folder / "log.txt"
    with ExitStack() as stack:
        written = stack.enter_context(log.open("w"))
        started = [
            subprocess.Popen(command, env={**common, **own}, stdout=written, stderr=subprocess.STDOUT, cwd=folder)
            for command, own in zip(commands, variables, strict=True)
        ]
        for process in started:
            stack.callback(process.wait)
            stack.callback(process.terminate)  # an agent ends its workers
        late = threading.Timer(DEADLINE_S, lambda: [process.terminate() for process in started])
        stack.callback(late.cancel)
        late.start()
        codes = [process.wait() for process in started]
    if any(codes):
        said = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-40:])
        raise RuntimeError(f"exit codes {codes} within {DEADLINE_S:g} s:\n{said}")
