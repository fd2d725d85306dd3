"""How fast gloo broadcasts between two processes of this machine."""

from __future__ import annotations

import time
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import torch
from problem import THREADS
from torch import distributed

BROADCAST_BYTES = 256 * 2**20
TIMES = 5
_DEADLINE_S = 60.0


def broadcast_bytes_per_s(folder: Path, size_bytes: int = BROADCAST_BYTES) -> float:
    """Bytes a second of a broadcast of so many bytes of float32, as the receiver saw it: the median of five."""
    context = get_context("spawn")
    answers, answering = context.Pipe(duplex=False)
    ranks = [
        context.Process(target=_broadcast, args=(str(folder / "rendezvous"), size_bytes, rank, answering), daemon=True)
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    answering.close()
    try:
        return size_bytes / median(answers.recv())  # EOFError when a rank has failed; see stderr
    finally:
        for rank in ranks:
            rank.join(10)
            rank.kill()
        (folder / "rendezvous").unlink(missing_ok=True)


def _broadcast(rendezvous: str, size_bytes: int, rank: int, answers: Connection) -> None:
    torch.set_num_threads(THREADS)
    distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2, timeout=timedelta(seconds=_DEADLINE_S)
    )
    tensor = torch.ones(size_bytes // 4)
    seconds = []
    for _ in range(TIMES + 1):
        distributed.barrier()
        begun = time.perf_counter()
        distributed.broadcast(tensor, 0)
        seconds.append(time.perf_counter() - begun)
    if rank == 1:
        answers.send(seconds[1:])  # the first one pays for the memory
    distributed.destroy_process_group()
