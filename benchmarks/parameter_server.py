"""Pushes and pulls against two servers: ours in shared memory and over TCP, Ray's object store, gloo, a memory copy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from exchanges import RATE, SERVERS, WORKERS, ExchangeSettings, start_exchanges
from figures import Figure, compare
from machine import ray_cluster
from processes import SMOKE_ROUNDS, Rounds, run_interleaved

STORE_BYTES, SMOKE_STORE_BYTES = 4 * 2**30, 200 * 2**20
NAMES = {
    "shared": "shared memory",
    "sync": "shared memory, sync",
    "tcp": "TCP",
    "fp16": "TCP, fp16",
    "ray": "Ray's object store",
    "gloo": "gloo point to point",
    "copy": "a memory copy",
}
PAIRS: Mapping[tuple[str, str], float | None] = {  # and what the ratio of times must not exceed
    ("shared", "ray"): 1 / 8,
    ("shared", "copy"): 2.0,
    ("shared", "gloo"): None,
    ("sync", "copy"): None,
    ("tcp", "ray"): None,
    ("tcp", "gloo"): None,
    ("fp16", "tcp"): None,
}
NOTE = (
    f"{WORKERS} workers and {SERVERS} servers, each a process on one machine with 1 thread, float32 parameters in "
    "layers of a million, and no model to run: each push is a step of plain SGD on all parameters. In every way a "
    "worker has its gradient in memory of its own, and the new parameters are in memory of its own at the end. Ours: "
    "the servers of the torch engine and the workers' `ParameterClient`, with leases, reports and exactly-once pushes, "
    "`async`, where it does not say `sync` (one update of both workers' pushes); TCP is the loopback, and fp16 is of "
    "what is pushed. Ray: actors as in Ray's example of an asynchronous parameter server, in shards, with niceness 0. "
    "gloo: `isend` and `irecv` by hand. The memory copy is the limit: as many bytes as are pushed and pulled, by two "
    "processes at once. Time is wall time of a turn over all pushes and pulls in it; MB/s counts a push and a pull as "
    "two times the parameters. All ways take turns, each round begins with another, and the first round is not counted."
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A size, and how many steps of each worker make a turn: `slow_steps` of those that go over sockets and stores."""

    layers: int
    ways: tuple[str, ...]
    steps: int
    slow_steps: int
    rounds: Rounds


CASES = (
    Case(layers=10, ways=("shared", "sync", "tcp", "fp16"), steps=30, slow_steps=6, rounds=Rounds(counted=16)),
    Case(layers=100, ways=("shared", "tcp", "fp16"), steps=4, slow_steps=2, rounds=Rounds(counted=8)),
)
SMOKE_CASE = Case(layers=2, ways=("shared", "sync", "tcp", "fp16"), steps=2, slow_steps=1, rounds=SMOKE_ROUNDS)


def measure(folder: Path, *, smoke: bool) -> list[Figure]:
    store_bytes, cases = (SMOKE_STORE_BYTES, (SMOKE_CASE,)) if smoke else (STORE_BYTES, CASES)
    with ray_cluster(object_store_bytes=store_bytes, cpus=SERVERS + WORKERS):
        return [figure for case in cases for figure in _case(folder, case)]


def _case(folder: Path, case: Case) -> list[Figure]:
    from peers.ray_parameter_server import parameter_server

    settings = ExchangeSettings(layers=case.layers, ways=case.ways, folder=str(folder / str(case.layers)))
    Path(settings.folder).mkdir()
    sizes = [shard.trained_bytes // 4 for shard in settings.shards]
    with start_exchanges(settings) as turn, parameter_server(sizes, WORKERS, RATE) as by_ray:
        ours = {way: partial(turn, way, case.slow_steps) for way in (*case.ways, "gloo")}
        fast = {way: partial(turn, way, case.steps) for way in ("shared", "sync", "copy") if way in (*ours, "copy")}
        found = run_interleaved({**ours, **fast, "ray": partial(by_ray, case.slow_steps)}, case.rounds)
    return list(_figures(case, found))


def _figures(case: Case, found: Mapping[str, Sequence[float]]) -> Iterator[Figure]:
    """Times with their ratios, then what they come to a second."""
    size = 8 * case.layers  # MB of a push and a pull
    for (way, peer), target in PAIRS.items():
        if way in found:
            what = f"{case.layers} M parameters, {NAMES[way]}, against {NAMES[peer]}"
            times = [[1e3 * seconds for seconds in found[name]] for name in (way, peer)]
            yield compare("parameter_server", f"{what}: a push and a pull", "ms", *times, target=target)
            for unit, amount in (("/s", 1), ("MB/s", size)):
                rates = [[amount / seconds for seconds in found[name]] for name in (way, peer)]
                yield compare("parameter_server", f"{what}: pushes and pulls", unit, *rates, ratio=False)
