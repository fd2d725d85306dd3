"""Runs side by side: which share each has, which run waits, and what ends them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from trainwright.core.cluster import Cluster
from trainwright.core.errors import JobError, ResourceError, WorkerLost
from trainwright.tuning import parallel_runs
from trainwright.tuning.parallel_runs import ParallelRuns, split_cluster, train_in_parallel


@pytest.mark.parametrize(
    ("cluster", "wanted", "expected"),
    [
        ("4x8xH100-80GB", 2, [(8, 8), (8, 8)]),
        ("3x8xH100-80GB", 2, [(8, 8), (8,)]),
        ("2x8xH100-80GB", 3, [(4,), (4,), (8,)]),
        ("1x8xH100-80GB", 3, [(2,), (2,), (2,)]),
        ("1x2xH100-80GB", 3, [(1,), (1,)]),
        ("1x8xH100-80GB", 1, [(8,)]),
    ],
)
def test_a_share_is_whole_nodes_or_a_part_of_one(cluster: str, wanted: int, expected: list[tuple[int, ...]]) -> None:
    found = split_cluster(Cluster.parse(cluster), wanted)
    assert [tuple(node.accelerators for node in share.nodes) for share in found] == expected
    assert sum(share.cpus for share in found) <= Cluster.parse(cluster).cpus


def test_without_accelerators_a_share_has_a_cpu_or_more() -> None:
    assert [share.cpus for share in split_cluster(Cluster.parse("1x2xCPU"), 3)] == [1, 1]
    assert [share.cpus for share in split_cluster(Cluster.parse("1x7xCPU"), 2)] == [3.5, 3.5]


@pytest.mark.parametrize(
    ("cluster", "job", "shares"),
    [
        ("1x16xCPU", {}, [2] * 8),
        ("1x4xCPU", {}, [1] * 4),
        ("1x8xCPU", {"workers": 2}, [2] * 4),
        ("1x8xCPU", {"min_workers": 3}, [4, 4]),
        ("1x8xCPU", {"strategy": "data_parallel"}, [2] * 4),
        ("1x8xCPU", {"strategy": "one_device"}, [1] * 8),
        ("2x3xCPU", {"workers": 2}, [3, 3]),
        ("2x2xCPU", {"workers": 4}, [4]),
        ("1x2xCPU", {"workers": 4}, [2]),
        ("2x3xH100-80GB", {"workers": 2}, [3, 3]),
        ("1x4xH100-80GB", {}, [1] * 4),
        ("1x8xH100-80GB+1x2xH100-80GB", {"workers": 2}, [2] * 5),
    ],
)
def test_as_many_runs_at_a_time_as_have_an_accelerator_or_a_cpu_for_each_worker(
    cluster: str, job: dict[str, Any], shares: list[int]
) -> None:
    runs = ParallelRuns([Wanted("a", **job)], Cluster.parse(cluster), parts=8)  # type: ignore[list-item]
    assert [share.accelerators or int(share.cpus) for share in runs._free] == shares


@dataclass(frozen=True)
class Wanted:
    """A job that needs so many CPUs, and ends after so many looks at it, or fails."""

    name: str
    cpus: float = 1.0
    looks: int = 1
    error: Exception | None = None
    stopped: bool = False  # from elsewhere
    accelerator: str = "auto"

    workers: int | None = None
    min_workers: int | None = None
    strategy: str | None = None
    trackers: tuple[Any, ...] = ()

    @property
    def job(self) -> Wanted:
        return self

    @property
    def planning(self) -> Wanted:
        return self

    @property
    def scaling(self) -> Wanted:
        return self


@dataclass(eq=False)
class Played:
    """A run of it."""

    job: Wanted
    looked: int = 0
    stops: list[bool] = field(default_factory=list)

    def wait(self, timeout_s: float) -> bool:
        self.looked += 1
        if self.job.error is not None:
            raise self.job.error
        return self.looked >= self.job.looks or bool(self.stops)

    def stop(self, now: bool = False) -> None:
        self.stops.append(now)

    @property
    def state(self) -> str:
        return "stopped" if self.stops or self.job.stopped else "done"

    @property
    def stop_asked(self) -> bool:
        return bool(self.stops)


class Plays(ParallelRuns):
    """Runs that take no time, on two CPUs."""

    def __init__(self, *wanted: Wanted, parts: int | None = None) -> None:
        self.ended: list[str] = []
        cluster = Cluster.parse("1x2xCPU")
        super().__init__(list(wanted), cluster, parts=parts, on_end=lambda job: self.ended.append(job.name))  # type: ignore[arg-type]
        self.played: list[tuple[str, float, list[str]]] = []

    def _launch(self, prepared: Any, share: Cluster) -> None:
        if share.cpus < prepared.cpus:
            raise ResourceError(f"needs {prepared.cpus:g} CPUs, the cluster has {share.cpus:g}")
        beside = [run.job.name for run in self._running]
        self.played.append((prepared.name, share.cpus, beside))
        self._running[Played(prepared)] = share  # type: ignore[index]

    @property
    def runs(self) -> list[Any]:
        return list(self._running)


class Checked:
    """A tracker without its package."""

    def __init__(self, missing: bool = False) -> None:
        self.missing, self.checks = missing, 0

    def check(self) -> None:
        self.checks += 1
        if self.missing:
            raise JobError(["the package is missing"])


def test_the_trackers_of_all_runs_are_checked_before_anything_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    started = list[str]()
    monkeypatch.setattr(parallel_runs, "connect", lambda verbose: started.append("cluster"))
    monkeypatch.setattr(parallel_runs, "_unfinished", lambda jobs, *_: started.extend(job.name for job in jobs))
    shared, missing = Checked(), Checked(missing=True)
    jobs = [Wanted("a", trackers=(shared,)), Wanted("b", trackers=(shared,))]
    train_in_parallel(jobs, what="runs")  # type: ignore[arg-type]
    assert started == ["cluster", "a", "b"] and shared.checks == 1
    with pytest.raises(JobError, match="the package is missing"):
        train_in_parallel([*jobs, Wanted("c", trackers=(missing,))], what="runs")  # type: ignore[arg-type, list-item]
    assert started == ["cluster", "a", "b"] and missing.checks == 1


def test_who_has_no_share_waits_for_one() -> None:
    plays = Plays(Wanted("a", looks=3), Wanted("b"), Wanted("c"))
    plays.train()
    assert plays.played == [("a", 1, []), ("b", 1, ["a"]), ("c", 1, ["a"])]


def test_a_run_that_is_left_has_the_share_that_it_had_beside_others() -> None:
    plays = Plays(Wanted("a"), parts=2)
    plays.train()
    assert plays.played == [("a", 1, [])] and plays.ended == ["a"]


def test_for_whom_a_share_is_too_little_has_all_after_the_others() -> None:
    plays = Plays(Wanted("large", cpus=2), Wanted("a", looks=2), Wanted("larger", cpus=2), Wanted("b"))
    plays.train()
    assert plays.played == [("a", 1, []), ("b", 1, ["a"]), ("large", 2, []), ("larger", 2, [])]


def test_what_is_too_large_for_the_cluster_is_told() -> None:
    with pytest.raises(ResourceError, match="needs 4 CPUs, the cluster has 2"):
        Plays(Wanted("a"), Wanted("huge", cpus=4)).train()


def test_one_that_fails_stops_the_others_and_starts_none() -> None:
    lost = WorkerLost("the process ended")
    plays = Plays(Wanted("a", error=lost), Wanted("b", looks=100), Wanted("c"))
    with pytest.raises(WorkerLost) as caught:
        plays.train()
    assert caught.value is lost and "run 'a'" in str(lost)
    assert [name for name, _, _ in plays.played] == ["a", "b"]
    assert plays.ended == [], "the other was stopped, and is not finished"


def test_a_signal_stops_all_and_starts_none() -> None:
    plays = Plays(Wanted("a", looks=100), Wanted("b", looks=100), Wanted("c"))
    plays._start()
    plays.stop()
    assert [run.stops for run in plays.runs] == [[False], [False]]
    plays.train()
    assert plays.stopped and len(plays.played) == 2


def test_one_that_is_stopped_from_elsewhere_is_not_finished_and_stops_the_others() -> None:
    plays = Plays(Wanted("a", stopped=True), Wanted("b", looks=100), Wanted("c"))
    plays.train()
    assert plays.stopped and plays.ended == [] and [name for name, _, _ in plays.played] == ["a", "b"]


def test_one_that_is_stopped_here_such_as_a_bad_trial_stops_no_other() -> None:
    plays = Plays(Wanted("a", looks=100), Wanted("b", looks=3))
    plays._start()
    plays.runs[0].stop()
    plays.train()
    assert not plays.stopped and plays.ended == ["a", "b"]
