"""The process of a GPU is killed: a standby continues from the copy in memory; by hand, a new process loads a file."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from figures import Figure, compare
from gpu_step import BATCH, DEVICE, ON_GPU, SMOKE, ByHand, Decoder, Size, adam, losses, sheet, words
from local_ranks import GENERATION, choose_plan, one_node_cluster, worker_config_of
from problem import job

import trainwright as tw
from trainwright.core.topology import Generation, Group, Peer
from trainwright.driver.messages import (
    MemoryCheckpoint,
    MemoryCopyRequest,
    ReserveRequest,
    RestorePlan,
    RunRequest,
    SnapshotRequest,
)
from trainwright.worker.worker import Worker
from trainwright.worker.worker_config import WorkerConfig

ANSWER_S, END_S = 120.0, 20.0
PAIRS, STEPS, MANY = 3, 4, 4000  # pairs, steps before the state is saved, and more than a process gets to
AFTERWARDS = Generation(token=1, number=2)
MEMORY = Path("/dev/shm")
LARGE = Size(words=16384, width=768, layers=12, heads=12, tokens=256)
NOTE = (
    f"A decoder of {LARGE.layers} blocks, {LARGE.width} wide: 110 million parameters in float32 and the state of "
    f"AdamW, 1.3 GB; bf16 autocast, {BATCH} rows of {LARGE.tokens} tokens; one GPU, no Ray and no driver. The process "
    "that trains is killed with SIGKILL after its state was copied to the node's memory. Ours: a standby, which has "
    "imported and built all and rehearsed on the CPU, takes the GPU, loads the copy and trains. By hand: a new process "
    "imports torch, builds the model, loads what `torch.save` wrote to the same memory, and trains. Seconds from the "
    "kill to the end of the next step, when the GPU has finished it. `memory of the GPU` is what is in use there "
    "before the first of these processes and after the last one has been killed."
)


@dataclass(frozen=True, kw_only=True)
class Ordered:
    """What a process does, with its end of a pipe."""

    config: WorkerConfig
    size: Size
    place: str


def measure(folder: Path, *, smoke: bool) -> list[Figure]:
    """The figures of this benchmark; those of a smoke run may be of the CPU."""
    if not (ON_GPU or smoke):
        raise SystemExit("gpu_recovery measures a GPU, and torch finds none; --smoke runs a small model on the CPU")
    size = SMOKE if smoke else LARGE
    wanted = job(
        folder, model=partial(Decoder, size), loss=losses, optimizer=adam, train=tw.datasets.table(words(size)),
        batch_size=BATCH, epochs=MANY // 4, workers=1, strategy="one_device", precision="bf16",
    )  # fmt: skip
    cluster = tw.Cluster.parse(f"1x{sheet().name}") if ON_GPU else one_node_cluster(1)
    with tempfile.TemporaryDirectory(dir=MEMORY) as place:
        ordered = Ordered(config=worker_config_of(wanted, choose_plan(wanted, cluster)), size=size, place=place)
        before = _used_bytes()
        pairs = [(_taken_over(ordered), _started_again(ordered)) for _ in range(1 if smoke else PAIRS)]
        after = _used_bytes()
    ours, theirs = zip(*pairs, strict=True)
    figures = [compare("gpu_recovery", "kill to the end of the next step", "s", ours, theirs)]
    if ON_GPU:
        memory = [[used / 2**30] for used in (after, before)]
        figures.append(compare("gpu_recovery", "memory of the GPU, after and before", "GiB", *memory, ratio=False))
    return figures


def _used_bytes() -> int:
    """Bytes of the GPU in use by all processes."""
    if not ON_GPU:
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


@contextmanager
def _process(act: Callable[[Connection, Ordered], None], ordered: Ordered) -> Iterator[tuple[Any, Connection]]:
    """A process that is killed at the latest when the block ends, and this end of its pipe."""
    near, far = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=act, args=(far, ordered), daemon=True)
    process.start()
    far.close()
    try:
        yield process, near
    finally:
        process.kill()
        process.join(END_S)
        near.close()


def _answer(pipe: Connection) -> Any:
    """The next message. Raises TimeoutError; EOFError where the process has ended."""
    if not pipe.poll(ANSWER_S):
        raise TimeoutError(f"no answer within {ANSWER_S:g} s")
    return pipe.recv()


def _taken_over(ordered: Ordered) -> float:
    """Seconds from the kill to the end of the standby's first step."""
    with _process(_standby, ordered) as (_, standby), _process(_victim, ordered) as (victim, pipe):
        _answer(standby)
        kept = _answer(pipe)
        begun = time.perf_counter()
        victim.kill()
        victim.join(END_S)
        standby.send(kept)
        _answer(standby)
        return time.perf_counter() - begun


def _victim(pipe: Connection, ordered: Ordered) -> None:
    """Train, copy the state to memory, tell which copy, and train until it is killed."""
    worker = Worker(ordered.config, "node")
    worker.form(_group(worker, ordered, GENERATION))
    worker.restore(RestorePlan(step=0, source="initial"))
    worker.run(RunRequest(steps=range(STEPS - 1)))
    worker.snapshot(SnapshotRequest(step=STEPS - 1, verbs=("keep",)))
    taken = worker.keep(MemoryCopyRequest(version=1))
    pipe.send(MemoryCheckpoint(version=1, step=STEPS - 1, files=taken.files))
    worker.run(RunRequest(steps=range(STEPS - 1, MANY)))


def _standby(pipe: Connection, ordered: Ordered) -> None:
    """Rehearse as a spare does, which sees no GPU; take the rank when told."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    worker = Worker(ordered.config, "node")
    worker.rehearse()
    pipe.send(None)
    kept: MemoryCheckpoint = pipe.recv()
    worker.form(_group(worker, ordered, AFTERWARDS))
    worker.restore(RestorePlan(step=kept.step, source="keeper", kept=kept))
    worker.run(RunRequest(steps=range(kept.step, kept.step + 1)))
    pipe.send(None)
    pipe.recv()


def _group(worker: Worker, ordered: Ordered, generation: Generation) -> Group:
    """A group of one rank, on the GPU where the plan is for one."""
    peer = Peer(rank=0, address=worker.reserve(ReserveRequest(generation=generation)))
    placement = ordered.config.plan.placement
    on_gpu = placement.accelerator == "GPU"
    return Group(
        generation=generation,
        rank=0,
        peers=(peer,),
        devices=("cuda:0",) if on_gpu else ("cpu",),
        accelerators=("0",) if on_gpu else (),
        threads=placement.threads,
    )


def _started_again(ordered: Ordered) -> float:
    """Seconds from the kill to the end of a new process's first step."""
    with _process(_trains, ordered) as (victim, pipe):
        _answer(pipe)
        begun = time.perf_counter()
        victim.kill()
        victim.join(END_S)
        with _process(_continues, ordered) as (_, other):
            _answer(other)
            return time.perf_counter() - begun


def _trains(pipe: Connection, ordered: Ordered) -> None:
    """Train by hand and write the state."""
    loop = ByHand(ordered.size)
    loop.run(STEPS - 1)
    torch.save((loop.model.state_dict(), loop.optimizer.state_dict()), f"{ordered.place}/state.pt")
    pipe.send(None)
    loop.run(MANY)


def _continues(pipe: Connection, ordered: Ordered) -> None:
    """Load the state and take a step."""
    loop = ByHand(ordered.size)
    model, optimizer = torch.load(f"{ordered.place}/state.pt", map_location=DEVICE, mmap=True)
    loop.model.load_state_dict(model)
    loop.optimizer.load_state_dict(optimizer)
    loop.run(1)
    pipe.send(None)
    pipe.recv()
