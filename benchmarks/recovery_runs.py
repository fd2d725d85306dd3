"""Train one model with trainwright and with each peer library, and measure how each recovers from killed workers.

Each run trains until the file `last` in its folder names the last step.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kills import Recovery, Schedule, measure_kills
from peers import Settings, torchft_ddp, torchrun_ddp
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
class RecoveryRuns:
    """Runs of the recovery benchmarks.

    Attributes:
        workers: of each run.
        schedule: when a worker is killed; each run also writes a checkpoint after every `schedule.every` steps.
    """

    workers: int
    schedule: Schedule

    @property
    def rows(self) -> int:
        """Rows of the data: an epoch ends with each checkpoint."""
        return self.schedule.every * BATCH_SIZE

    def run_trainwright(self, folder: Path, *, spares: int, **fields: Any) -> list[Recovery]:
        """Run trainwright. A kill waits until all workers are in the group again and the spares are ready."""
        runs = folder / "runs"
        job_fields: dict[str, Any] = {
            "workers": self.workers,
            "spares": spares,
            "optimizer": stamping(folder, self.schedule.pause_s),
            "rows": self.rows,
            "epochs": STEPS // self.schedule.every,
            "checkpoint_steps": self.schedule.every,
        }

        def run() -> None:
            started = tw.start(job(runs, **{**job_fields, **fields}))
            while not started.wait(0.1):
                if (folder / "last").exists():
                    started.stop()

        def ready(kills: int) -> bool:
            return _count_spares(runs) >= spares * (kills + 1) and _count_full_groups(runs, self.workers) >= kills + 1

        return measure_kills(folder, self.schedule, run, ready)

    def run_peer(self, folder: Path, fit: Callable[[Path, Settings], None]) -> list[Recovery]:
        """Run a peer: `fit` trains to the end, in a folder and with settings. A kill waits for nothing else."""
        settings = Settings(
            steps=STEPS,
            rows=self.rows,
            workers=self.workers,
            stamps=str(folder),
            pause_s=self.schedule.pause_s,
            checkpoint_steps=self.schedule.every,
            max_failures=2 * self.schedule.kills,
        )
        return measure_kills(folder, self.schedule, lambda: fit(folder, settings), lambda kills: True)


def fit_torchrun(folder: Path, settings: Settings) -> None:
    """Run DistributedDataParallel under torchrun, which restarts its workers."""
    command = _torchrun_command(settings.workers, torchrun_ddp.__file__, settings)
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # pytorch#135712: restarts find stale addresses
    _run_commands([command], [own_store], folder)


def fit_torchft(folder: Path, settings: Settings) -> None:
    """Run torchft: a lighthouse, and for each worker a replica group of one process under its own torchrun."""
    command = _torchrun_command(1, torchft_ddp.__file__, settings)
    with torchft_ddp.lighthouse() as address:
        common = {"TORCHFT_LIGHTHOUSE": address}
        groups = [{**common, "REPLICA_GROUP_ID": str(number)} for number in range(settings.workers)]
        _run_commands([command] * settings.workers, groups, folder)


def _read_run_events(runs: Path) -> Sequence[Event]:
    return read_events(open_store(str(runs)), "benchmark") if (runs / "benchmark").exists() else []


def _count_spares(runs: Path) -> int:
    """Return how many spares have become ready so far."""
    return sum(isinstance(event, Placed) and event.spare for event in _read_run_events(runs))


def _count_full_groups(runs: Path, workers: int) -> int:
    """Return how often all workers have formed a group so far."""
    return sum(isinstance(event, Formed) and event.workers == workers for event in _read_run_events(runs))


def _torchrun_command(processes: int, script: str, settings: Settings) -> list[str]:
    agent = ["--standalone", f"--nproc-per-node={processes}", f"--max-restarts={settings.max_failures}"]
    return [sys.executable, "-m", "torch.distributed.run", *agent, script, json.dumps(asdict(settings))]


def _run_commands(commands: Sequence[list[str]], variables: Sequence[dict[str, str]], folder: Path) -> None:
    """Run commands in parallel until all of them end.

    Args:
        commands: to run, each in `folder`.
        variables: of the environment, for each command.
        folder: for the log.

    Raises:
        RuntimeError: a command failed or ran too long; with the end of the log.
    """
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
            stack.callback(process.terminate)  # torchrun ends its workers
        late = threading.Timer(DEADLINE_S, lambda: [process.terminate() for process in started])
        stack.callback(late.cancel)
        late.start()
        codes = [process.wait() for process in started]
    if any(codes):
        log_tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-40:])
        raise RuntimeError(f"exit codes {codes} within {DEADLINE_S:g} s:\n{log_tail}")
