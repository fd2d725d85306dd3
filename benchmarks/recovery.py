"""SIGKILL of one of two workers, again and again: time to the next completed step, and steps done again."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from figures import Figure, compare
from kills import Recovery, Schedule
from machine import ray_cluster
from peers import ray_train, torchft_ddp
from recovery_runs import RecoveryRuns, fit_torchft, fit_torchrun

KILLS, PAUSE_S, CHECKPOINT_STEPS, AFTER_STEPS = 7, 0.1, 20, 13
TARGET, LIMIT_S = 1 / 12, 0.6
NEXT, WHOLE, AGAIN = "SIGKILL to next completed step", "SIGKILL to a step with all workers again", "steps done again"
_OURS = (("one spare", "spare"), ("no spare", "none"), ("no spare, the others continue", "shrink"))
_TARGETS = {"TorchTrainer": 1, "torchrun": 1, "torchft": None}
_PEERS = (
    f"The job of `step_time` with a pause of {PAUSE_S:g} s after each step and a checkpoint after each "
    f"{CHECKPOINT_STEPS} steps, one run for each of them in turn; the same model, batch, threads, data and optimizer. "
    f"When rank 1 has stamped a step that is {AFTER_STEPS} past a checkpoint, its process gets SIGKILL, {KILLS} times "
    "in a run, each time after its replacement has completed 10 steps at least. Every `optimizer.step()` is stamped by "
    "a hook with the clock that also times the kill. `next completed step` is the first stamp, of whatever process, "
    "of a step that was not under way before the kill; `a step with all workers again` the first of the replacement; "
    "`steps done again` counts completed steps that were computed once more, over all kills. The 95th "
    "percentile is interpolated. "
    "What each was given: trainwright a Ray cluster that is up, and one spare (its default; a kill then waits until "
    'the spare is ready), or none, or none and `on_loss="shrink"`: the others continue with the same batch until the '
    "replacement is there. TorchTrainer the same cluster, checkpoints by `ray.train.report` and a FailureConfig "
    "as its guides show. torchrun `--standalone --max-restarts`, a monitor interval of 0.1 s (its default), a snapshot "
    "by rank 0 that is loaded at the start as torch's tutorial on fault tolerance has it, and "
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which its restarts over gloo fail or hang (pytorch#135712). "
)
_TORCHFT = (
    "torchft 0.2 a replica group of one process for each worker, each under a torchrun of its own, a lighthouse with "
    f"the settings of its README and heartbeats that time out after {torchft_ddp.HEARTBEAT_TIMEOUT_MS / 1000:g} s "
    "instead of 5 s; it continues with fewer workers, whose batch is smaller, until the replacement is there, and "
    "takes no checkpoints."
)
_NO_TORCHFT = "torchft was not measured: it was not installed (`pip install torchft`; 0.2 runs with torch 2.13)."
NOTE = _PEERS + (_TORCHFT if torchft_ddp.INSTALLED else _NO_TORCHFT)


def measure(folder: Path, *, smoke: bool) -> list[Figure]:
    return figures_of("recovery", measure_all(folder, workers=2, smoke=smoke))


def schedule_of(*, smoke: bool) -> Schedule:
    """Return when rank 1 is killed."""
    if smoke:
        return Schedule(kills=1, every=4, offset=2, pause_s=PAUSE_S, settled=2)
    return Schedule(kills=KILLS, every=CHECKPOINT_STEPS, offset=AFTER_STEPS, pause_s=PAUSE_S)


def measure_all(folder: Path, *, workers: int, smoke: bool) -> dict[str, list[Recovery]]:
    """Measure how each library recovers from each kill. A library that needs no Ray runs before the cluster starts.

    A smoke run with more than two workers measures only torchrun and one spare: with two, all others run the same code.
    """
    schedule, few = schedule_of(smoke=smoke), smoke and workers > 2
    runs = RecoveryRuns(workers=workers, schedule=schedule)
    found = {"torchrun": runs.run_peer(folder / "torchrun", fit_torchrun)}
    if torchft_ddp.INSTALLED and not few:
        found["torchft"] = runs.run_peer(folder / "torchft", fit_torchft)
    with ray_cluster(cpus=workers):
        found["spare"] = runs.run_trainwright(folder / "spare", spares=1)
        if few:
            return found
        found["TorchTrainer"] = runs.run_peer(folder / "ray_train", ray_train.fit)
        found["none"] = runs.run_trainwright(folder / "none", spares=0)
        found["shrink"] = runs.run_trainwright(folder / "shrink", spares=0, min_workers=1, on_loss="shrink")
    return found


def figures_of(name: str, found: dict[str, list[Recovery]]) -> list[Figure]:
    """trainwright with and without a spare against each peer."""
    figures = [against_limit(name, which, found[own]) for which, own in _OURS if own in found and own != "none"]
    for (which, own), (peer, usual) in itertools.product(_OURS, _TARGETS.items()):
        target = TARGET if (own, peer) == ("spare", "TorchTrainer") else usual
        if peer in found and own in found:
            ours, theirs = found[own], found[peer]
            against = f"{which}, against {peer}"
            figures.append(timed(name, f"{NEXT}, {against}", next_s(ours), next_s(theirs), target))
            if peer == "torchft":
                figures.append(timed(name, f"{WHOLE}, {against}", _whole_s(ours), _whole_s(theirs), None))
            figures.append(again(name, against, ours, theirs))
    return figures


def against_limit(name: str, which: str, items: Sequence[Recovery]) -> Figure:
    ours = next_s(items)
    return timed(name, f"{NEXT}, {which}, against the limit", ours, [LIMIT_S] * len(ours), 1)


def timed(name: str, what: str, ours: list[float], theirs: list[float], target: float | None) -> Figure:
    return compare(name, what, "s", ours, theirs, target=target, tails=True)


def again(
    name: str, against: str, ours: Sequence[Recovery], theirs: Sequence[Recovery], target: float | None = 0
) -> Figure:
    """Over all kills; where the peer does any, none is the target, unless another is given."""
    own, other = (float(sum(item.replayed for item in items)) for items in (ours, theirs))
    return compare(
        name, f"{AGAIN}, {against}", "steps", [own], [other], ratio=other > 0, target=target if other > 0 else None,
        count=True,
    )  # fmt: skip


def next_s(items: Sequence[Recovery]) -> list[float]:
    return [item.next_step_s for item in items]


def _whole_s(items: Sequence[Recovery]) -> list[float]:
    return [item.whole_s for item in items]
