"""Flame graphs of a worker's loop and of a run's start, for docs/performance.md, by py-spy (`pip install py-spy`).

    python benchmarks/flame_graphs.py FOLDER

Writes `flame-step.svg` and `flame-start.svg`, and to stdout a table of each: milliseconds of a step of rank 0, seconds
of the start by process, and the time of each part of a start without py-spy. py-spy needs the right to look into other
processes, such as root's.
"""

from __future__ import annotations

import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from xml.sax.saxutils import escape

from first_step import train_first
from local_ranks import LocalRank, run_ranks
from machine import ray_cluster, settle
from paired_loops import WorkerLoop, worker_config_for
from stamps import read_stamps

from trainwright.core.events import Formed, Placed, RunStarted
from trainwright.storage.event_files import read_events
from trainwright.storage.object_store import open_store

WARM_UP, STEPS, RATE_HZ = 100, 1000, 500
STARTS, UNCOUNTED = 7, 1
PARTS = (
    "reading the data, trying the functions, planning", "the first worker: its process, imports, model",
    "the second worker, on the other core", "rendezvous", "first step",
)  # fmt: skip
START_S = 180.0
WIDTH, ROW, LETTER, LEAST = 1200, 17, 6.1, 2.5  # of a graph, a row, a letter and the narrowest frame, in pixels
ROWS = 26  # of a graph; deeper frames are left out
LOOP = "Worker.run ("  # the outermost frame of a worker's loop
PROCESSES = {  # of a start, by their commands
    r"default_worker": "worker", r"raylet": "Ray: raylet", r"dashboard\.py": "Ray: dashboard",
    r"agent": "Ray: agents of the node", r"monitor|log_monitor": "Ray: monitors", r"-m trainwright": "trainwright fit",
}  # fmt: skip
COLORS = {
    r"\(torch/|\(torchgen/": "#f4a259",
    r"\(ray/": "#8cb3d9",
    r"\((app|strategies|datasets)/": "#8fc49a",
    "": "#d9d6cf",
}
JOB = Path(__file__).resolve().parents[1] / "examples" / "fashion_mnist.py"

# The first pattern that a stack has names what it does.
STEP: Mapping[str, str] = {
    "comparing the replicas, once in 25 steps": r"check_replicas",
    "backward, with the all-reduce of the gradients": r"BackwardRoots|run_backward",
    "forward and loss": r"Objective\.forward",
    "optimizer": r"TorchReplica\.apply",
    "taking the rows of the batch": r"RankFeeds|Lookahead",
    "records of the step": r"StepLog",
}
START: Mapping[str, str] = {
    "importing torch": r"<module> \(torch/",
    "importing Ray": r"<module> \(ray/",
    "importing others": r"<module>|importlib",
    "starting Ray": r"ray/_private/(node|services)|init \(ray/",
    "the process group": r"init_process_group|process_group",
    "the first step": r"run_backward|forward",
    "trying the job's functions": r"function_trial|preflight",
    "planning": r"planning/|search/",
}


def main(folder: Path) -> None:
    """Write both graphs and print both tables."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        config = worker_config_for(place, WARM_UP + STEPS, {"strategy": "data_parallel"})
        step_s = run_ranks(config, partial(_watched_loop, file=place / "step.txt"))[0]
        stacks = _read(place / "step.txt")
        loop = {stack: count for stack, count in stacks.items() if LOOP in stack}
        _draw(loop, folder / "flame-step.svg")
        print(f"A step of rank 0: {1e3 * step_s:.2f} ms")
        for name, share in _shares(loop, STEP):
            print(f"| {name} | {1e3 * step_s * share:.2f} ms |")
        seconds = _watched_start(place, place / "start.txt")
        print(f"From the command to the end of a run of 20 steps: {seconds:.1f} s; seconds with work in all processes")
        stacks = _read(place / "start.txt")
        _draw(stacks, folder / "flame-start.svg")
        for name, share in _shares(stacks, START):
            print(f"| {name} | {share * sum(stacks.values()) / RATE_HZ:.2f} s |")
        print(f"From fit() to the first step on a running cluster, medians of {STARTS}")
        for name, seconds in zip(PARTS, _parts_of_start(place), strict=True):
            print(f"| {name} | {seconds:.2f} s |")


def _watched_loop(local_rank: LocalRank, file: Path) -> float:
    """Run the loop while py-spy samples this process on rank 0. Returns the mean seconds of a step."""
    loop = WorkerLoop(local_rank.worker)
    loop.run(WARM_UP)
    local_rank.wait_for_others()
    spy = None if local_rank.rank else _spy(file, ["--pid", str(os.getpid())])
    local_rank.wait_for_others()
    begun = time.perf_counter()
    for _ in range(STEPS // 25):
        loop.run(25)
    seconds = (time.perf_counter() - begun) / STEPS
    if spy is not None:
        spy.send_signal(signal.SIGINT)
        spy.wait(START_S)
    return seconds


def _watched_start(place: Path, file: Path) -> float:
    """Run a short job under py-spy, its children included. Returns the seconds that it took."""
    run = [sys.executable, "-m", "trainwright", "fit", str(JOB), "--fresh", "--set", f"storage={place / 'runs'}"]
    run += ["--set", "epochs=1", "--set", f"epoch_samples={20 * 256}"]
    begun = time.perf_counter()
    _spy(file, ["--subprocesses", "--", *run]).wait(START_S)
    return time.perf_counter() - begun


def _parts_of_start(place: Path) -> list[float]:
    """Return the median seconds of each part of a start, by the events of runs as in the benchmark `first_step`."""
    found = []
    with ray_cluster():
        for number in range(UNCOUNTED + STARTS):
            folder = place / f"start-{number}"
            folder.mkdir()
            times = [time.time()]
            train_first(folder)
            told = [*read_events(open_store(str(folder / "runs")), "benchmark")]
            times += [event.time_s for event in told if isinstance(event, RunStarted)]
            times += sorted(event.time_s for event in told if isinstance(event, Placed) and not event.spare)
            times += [event.time_s for event in told if isinstance(event, Formed)]
            found.append([*times, read_stamps(folder)[0].time_s])
            settle()
    return [statistics.median(parts) for parts in zip(*map(_differences, found[UNCOUNTED:]), strict=True)]


def _differences(times: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(times)]


def _spy(file: Path, what: Sequence[str]) -> subprocess.Popen[bytes]:
    command = ["py-spy", "record", "--rate", str(RATE_HZ), "--nonblocking", "--function"]
    command += ["--format", "raw", "--output", str(file)]
    return subprocess.Popen([*command, *what], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _read(file: Path) -> Counter[str]:
    """Return samples by stack, outermost frame first."""
    found: Counter[str] = Counter()
    for line in file.read_text(encoding="utf-8").splitlines():
        stack, _, count = line.rpartition(" ")
        found[stack] += int(count)
    return found


def _shares(stacks: Mapping[str, int], names: Mapping[str, str]) -> list[tuple[str, float]]:
    """Return the share of the samples of each name, the largest first; others under `others`."""
    total, found = sum(stacks.values()), Counter[str]()
    for stack, count in stacks.items():
        found[next((name for name, pattern in names.items() if re.search(pattern, stack)), "others")] += count
    return [(name, count / total) for name, count in found.most_common()]


def _frames(stack: str) -> list[str]:
    """Return the frames of a stack below the name of its process, without those of Python's imports."""
    names = stack.split(";")
    last = max((number for number, name in enumerate(names) if name.startswith("process ")), default=-1)
    first = next((number for number, name in enumerate(names) if name.startswith(LOOP)), 0) if last < 0 else last + 1
    kept = [name for name in names[first:] if "importlib" not in name]
    if last < 0 or not kept:
        return kept
    return [next((role for pattern, role in PROCESSES.items() if re.search(pattern, names[last])), "other"), *kept]


class _Frame(Counter[str]):
    """Samples of what a function called, by its name; `inner` has their own frames."""

    def __init__(self) -> None:
        super().__init__()
        self.inner: dict[str, _Frame] = {}


def _draw(stacks: Mapping[str, int], file: Path) -> None:
    """Draw stacks as an SVG: the outermost frame on top, the widest first, without those that are too narrow to see."""
    root = _Frame()
    for stack, count in stacks.items():
        frame = root
        for name in _frames(stack)[:ROWS]:
            frame[name] += count
            frame = frame.inner.setdefault(name, _Frame())
    shapes: list[tuple[int, str]] = []
    scale = WIDTH / root.total()

    def add(frame: _Frame, left: float, row: int) -> None:
        for name, count in frame.most_common():
            wide = count * scale
            if wide < LEAST:
                return
            color = next(color for pattern, color in COLORS.items() if re.search(pattern, name))
            fits = int((wide - 4) / LETTER)
            shown = escape(name if len(name) <= fits else f"{name[: fits - 1]}…") if fits > 3 else ""
            shapes.append((row, f'<g><title>{escape(name)}: {count * scale / WIDTH:.1%}</title>'
                f'<rect x="{left:.1f}" y="{row * ROW}" width="{wide - 0.5:.1f}" height="{ROW - 1}" fill="{color}"/>'
                f'<text x="{left + 2:.1f}" y="{row * ROW + 12}">{shown}</text></g>'))  # fmt: skip
            add(frame.inner[name], left, row + 1)
            left += wide

    add(root, 0.0, 0)
    height = ROW * (1 + max(row for row, _ in shapes))
    file.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="monospace" font-size="10"><rect width="{WIDTH}" height="{height}" fill="#fff"/>'
        f"{''.join(shape for _, shape in shapes)}</svg>\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
