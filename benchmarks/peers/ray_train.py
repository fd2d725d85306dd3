"""Ray Train's TorchTrainer, as its user guides on PyTorch, checkpoints and fault tolerance have it."""

from __future__ import annotations

import json
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray.train
import torch
from problem import THREADS, adam, batches, build_model
from ray.train import Checkpoint
from ray.train.torch import TorchTrainer, prepare_model
from stamps import is_last, stamping
from torch.nn import functional

from peers import Settings, fit_with_ray


def fit(storage: Path, settings: Settings) -> None:
    """Train to the end; raises what TorchTrainer raises."""
    fit_with_ray(TorchTrainer, train_loop, storage, settings)


def timed_fit(storage: Path, settings: Settings) -> list[float]:
    """Train to the end; returns the seconds of each step."""
    file = storage / "times.json"
    fit(storage, replace(settings, times=str(file)))
    return [float(value) for value in json.loads(file.read_text())]


def train_loop(config: dict[str, Any]) -> None:
    """What each worker runs."""
    settings = Settings(**config)
    torch.set_num_threads(THREADS)
    rank = ray.train.get_context().get_world_rank()
    model = prepare_model(build_model())
    optimizer_of = stamping(settings.stamps, settings.pause_s) if settings.stamps else adam
    optimizer = optimizer_of(model.parameters())
    done = _resume(model, optimizer)
    feed = batches(settings.rows, rank, settings.workers)
    seconds = []
    for step in range(done + 1, settings.steps + 1):
        begun = time.perf_counter()
        inputs, targets = next(feed)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begun)
        if settings.checkpoint_steps and step % settings.checkpoint_steps == 0:
            _report(rank, step, loss.item(), model, optimizer)
        if settings.stamps and is_last(settings.stamps, step):
            break
    if settings.times and rank == 0:
        Path(settings.times).write_text(json.dumps(seconds))


def _resume(model: Any, optimizer: torch.optim.Optimizer) -> int:
    """Load the checkpoint that Ray Train hands over after a failure; returns its step, 0 without one."""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        state = torch.load(os.path.join(folder, "state.pt"))
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def _report(rank: int, step: int, loss: float, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Report a checkpoint; every rank calls it, rank 0 brings the files."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if rank == 0:
            state = {"step": step, "model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, os.path.join(folder, "state.pt"))
            checkpoint = Checkpoint.from_directory(folder)
        ray.train.report({"loss": loss}, checkpoint=checkpoint)
