"""What a recovery costs the driver with a thousand and with ten thousand ranks, and how many bytes it sends."""

from __future__ import annotations

import gc
import pickle
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from figures import Figure, compare
from machine import ray_cluster

from trainwright.runtime.worker_actor import ArgumentPickler

SIZES, TIMES, LIMITS_S = (1024, 10_000), 5, (0.3, 3.0)
SMOKE_SIZES, SMOKE_TIMES = (256, 512), 1
ACTORS, CALLS, SMOKE_CALLS = 4, 2000, 40  # of Ray's own
NOTE = (
    "One of all ranks is lost while they step, is replaced, and all form a group again. Two replicas divide the state "
    "over half of the ranks each (ZeRO-3), so that the lost part comes from the other one. Decisions and effects are "
    "the driver's own, over a stand-in for Ray's calls in this process (`tests/support/fake_ray.py`), which pickles "
    "arguments as Ray does and answers at once. Seconds are CPU time of the driver's thread, since the machine had "
    "other work; objects that were there before are frozen, so that the garbage collector does not look through them. "
    "The first two rows stand beside the limits that were set for them. `all peers to each rank` pickles the whole "
    "argument of each call, as trainwright did before. `bytes` include what is put into Ray's object store. Ray's own "
    f"time is in none of this and comes on top: the last row has the CPU time of the whole process for each of "
    f"{CALLS:,} calls of {ACTORS} real actors that do nothing, answers included, as the peer of ours for each call of "
    "a recovery."
)


class Along(ArgumentPickler):
    """Sends the whole argument of each call along with it."""

    def of(self, argument: Any) -> tuple[Any, Any]:
        """All of it is the worker's own."""
        return None, pickle.dumps(argument)


@dataclass
class Cost:
    """Of recoveries: CPU seconds, bytes and calls of each."""

    seconds: list[float] = field(default_factory=list)
    sent_bytes: list[int] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)


def measure(folder: Path, *, smoke: bool) -> list[Figure]:
    (few, many), times = (SMOKE_SIZES, SMOKE_TIMES) if smoke else (SIZES, TIMES)
    ours, before = recoveries(few, folder / "few", times, ArgumentPickler(), Along())
    (large,) = recoveries(many, folder / "many", times, ArgumentPickler())
    by_rank = [[found / size / 2**10 for found in cost.sent_bytes] for size, cost in ((many, large), (few, ours))]
    call_us = [1e6 * seconds / calls for seconds, calls in zip(ours.seconds, ours.calls, strict=True)]
    with ray_cluster():
        ray_us = [1e6 * call_of_ray_s(SMOKE_CALLS if smoke else CALLS) for _ in range(times)]
    peers = f"{few:,} ranks, against all peers to each rank"
    mib = [[found / 2**20 for found in cost.sent_bytes] for cost in (ours, before)]
    return [
        *(
            _figure(f"CPU of a recovery, {size:,} ranks, against its limit", "s", cost.seconds, [limit_s] * times, 1.0)
            for size, cost, limit_s in zip((few, many), (ours, large), LIMITS_S, strict=True)
        ),
        _figure(f"CPU of a recovery, {peers}", "s", ours.seconds, before.seconds),
        _figure(f"bytes of a recovery, {peers}", "MiB", *mib),
        _figure(f"bytes for each rank, {many:,} ranks, against {few:,}", "KiB", *by_rank, target=1.05),
        _figure("CPU of a call, against what Ray takes for one", "us", call_us, ray_us),
    ]


def _figure(what: str, unit: str, ours: list[float], peers: list[float], target: float | None = None) -> Figure:
    return compare("driver_scale", what, unit, ours, peers, target=target)


def recoveries(size: int, folder: Path, times: int, *ways: ArgumentPickler) -> list[Cost]:
    """Lose one rank after the other; what that cost by each way to send arguments, which take turns."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from tests.support.fake_ray import driving

    found = [Cost() for _ in ways]
    with driving(size, size // 2, folder, failures=times * len(ways)) as driver:
        driver.start()
        gc.collect()
        gc.freeze()
        for number in range(times * len(ways)):
            cost, driver.world._arguments = found[number % len(ways)], ways[number % len(ways)]
            driver.fleet.forget()
            cost.seconds.append(driver.recover(number))
            cost.sent_bytes.append(driver.fleet.total_bytes)
            cost.calls.append(driver.fleet.calls.total())
    gc.unfreeze()
    return found


def call_of_ray_s(calls: int) -> float:
    """CPU seconds of this process for one call of an actor that does nothing, its answer included."""
    import ray

    class Idle:
        def call(self, verb: str, own: Any, token: int, common: bytes) -> None:
            pass

    actors = [ray.remote(num_cpus=0)(Idle).remote() for _ in range(ACTORS)]
    ray.get([actor.call.remote("run", None, 1, b"") for actor in actors])
    common, begun = pickle.dumps(range(1000)), time.process_time()
    asked = [actors[number % ACTORS].call.remote("run", None, 1, common).future() for number in range(calls)]
    for answer in asked:
        answer.result()
    seconds = (time.process_time() - begun) / calls
    for actor in actors:
        ray.kill(actor)
    return seconds
