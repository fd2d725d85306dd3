"""Checkpoints of FSDP2 by hand: torch.distributed.checkpoint, as torch's tutorials on it have them."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed.checkpoint as dcp
from problem import adam, batches
from torch import distributed, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.nn import functional

from peers.plain_loops import shard_layers


class PlainSaving:
    """One rank's model and optimizer, trained for a step; the process group is there already."""

    def __init__(self, rank: int, folder: Path, build: Callable[[], nn.Module]) -> None:
        self._folder, self._count = folder, 0
        self._model = shard_layers(build())
        self._optimizer = adam(self._model.parameters())
        self._group = distributed.new_group(backend="gloo")
        self._stager = DefaultStager(StagingOptions(False, False, False, False))  # of no device
        inputs, targets = next(batches(1024, rank))
        functional.cross_entropy(self._model(inputs), targets).backward()
        self._optimizer.step()

    def save(self) -> tuple[float, float]:
        """Seconds for which the caller was blocked, and until all was written: the same."""
        writer = self._writer()
        begun = time.perf_counter()
        dcp.save(self._state(), storage_writer=writer, process_group=self._group)
        return (time.perf_counter() - begun,) * 2

    def save_async(self) -> tuple[float, float]:
        """Seconds for which the caller was blocked, and until all was written; memory is kept from time to time."""
        writer = self._writer()
        begun = time.perf_counter()
        future = dcp.async_save(
            self._state(), storage_writer=writer, process_group=self._group, async_stager=self._stager
        )
        blocked_s = time.perf_counter() - begun
        future.result()  # type: ignore[union-attr]
        return blocked_s, time.perf_counter() - begun

    def _state(self) -> dict[str, object]:
        model, optimizer = get_state_dict(self._model, self._optimizer)
        return {"model": model, "optimizer": optimizer}

    def _writer(self) -> dcp.FileSystemWriter:
        """Of a folder of its own, with files forced onto the disk as ours are; the folder before it is gone by then."""
        if distributed.get_rank() == 0:
            shutil.rmtree(self._folder / str(self._count), ignore_errors=True)
        self._count += 1
        distributed.barrier(self._group)
        return dcp.FileSystemWriter(self._folder / str(self._count))
