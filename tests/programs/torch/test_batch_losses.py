"""Losses whose samples are compared with each other: equal to one device by `tw.gather`, else refused."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import trainwright as tw
from tests.support.rank_processes import Exchange, formed, run_ranks
from tests.support.torch_engines import feed, one_device, plan, spec
from trainwright.core.data import Batch, Feed, Terms, fold_seed, zero_weight
from trainwright.core.engine import ModelSpec
from trainwright.core.errors import JobError
from trainwright.core.plan import Mesh
from trainwright.strategies.torch.engines.data_parallel import DataParallel
from trainwright.strategies.torch.engines.fsdp import Sharded

STEPS, RANKS = 4, 3
ROWS = (7, 2, 7, 7)  # of each global batch: in the second, one rank has none


class Towers(nn.Module):
    """CLIP: two towers, and a temperature that is learned in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Linear(4, 8, dtype=torch.float64)
        self.text = nn.Linear(3, 8, dtype=torch.float64)
        self.scale = nn.Parameter(torch.tensor([1.5], dtype=torch.float64))

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found = (functional.normalize(self.image(image)), functional.normalize(self.text(text)))
        return (*found, self.scale)


def clip(outputs: Any, _: Any) -> Tensor:
    """One value for each row of the global batch."""
    image, text = (tw.gather(each) for each in outputs[:2])
    scores, labels = outputs[2].exp() * image @ text.t(), torch.arange(len(image))
    both = [functional.cross_entropy(each, labels, reduction="none") for each in (scores, scores.t())]
    return (both[0] + both[1]) / 2


def simclr(model: nn.Module, columns: Any) -> Terms:
    """One value for each of the rank's own rows, in a step of the job's own; rows are told by a column."""
    (first, text, scale), (second, _, _) = (model(columns[name], columns["text"]) for name in ("image", "other"))
    every, marks = tw.gather(second), tw.gather(columns["mark"])
    labels = (marks[None, :] == columns["mark"][:, None]).double().argmax(1)
    values = functional.cross_entropy(first @ every.t() / 0.5, labels, reduction="none")
    return Terms(values + 0.0 * scale * text.sum(1), 1.0)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)


def job(**changes: Any) -> ModelSpec:
    given = {"model": Towers, "loss": clip, "inputs": ("image", "text"), "targets": ("mark",), "optimizer": sgd}
    return spec(**{**given, **changes})


JOBS = {"clip": job, "simclr": functools.partial(job, loss=None, step=simclr)}


def shares(step: int, rank: int, of: int, micro_batches: int = 1) -> Feed:
    """A rank's part of a global batch, in turn; where it has none, its first row with weight 0."""
    random, rows = np.random.default_rng(step), ROWS[step]
    widths = (("image", 4), ("other", 4), ("text", 3))
    columns: dict[str, Any] = {name: random.normal(size=(rows, width)) for name, width in widths}
    columns["mark"] = np.arange(rows)
    own = np.arange(rows)[rank::of]
    real = len(own) > 0
    parts = [
        Batch(
            columns={name: column[part] for name, column in columns.items()},
            weights=np.full(len(part), float(real)),
            samples=part,
        )
        for part in np.array_split(own if real else np.zeros(1, np.int64), micro_batches)
    ]
    return feed(*parts, step=step, rank=rank, total=of, rows=rows)


def plain(name: str) -> list[float]:
    """A loop without any of ours: the losses of its steps, then that of the second batch again."""
    torch.manual_seed(fold_seed(3, -1))
    model, losses = Towers(), []
    optimizer = sgd(model.parameters())
    for step in (*range(STEPS), 1):
        columns = {key: torch.from_numpy(value) for key, value in shares(step, 0, 1).parts[0][0].columns.items()}
        found = (
            clip(model(columns["image"], columns["text"]), None) if name == "clip" else simclr(model, columns).values
        )
        losses.append(found.mean().item())
        optimizer.zero_grad()
        found.mean().backward()
        optimizer.step()
    return losses


def _trained(rank: int, world: int, exchange: Exchange) -> Any:
    """Losses of each step, and this rank's sums of an evaluation."""
    found = {}
    for make in (DataParallel, Sharded):
        how = plan(ranks=world) if make is DataParallel else replace(plan(), mesh=Mesh(shard=world))
        for kind, made in JOBS.items():
            engine = formed(rank, exchange, made(), engine=make(), how=how)
            engine.warm(zero_weight(shares(0, rank, world)))
            losses = [engine.train_step(shares(step, rank, world)).loss for step in range(STEPS)]
            found[make.__name__, kind] = losses, engine.evaluate_step(shares(1, rank, world)).totals["loss"]
            engine.leave()
    return found


def test_clip_and_simclr_on_several_ranks_equal_one_device() -> None:
    results = run_ranks(_trained, RANKS)
    for (engine, kind), (losses, _) in results[0].items():
        sums = np.sum([result[engine, kind][1] for result in results], axis=0)
        np.testing.assert_allclose([*losses, sums[0] / sums[1]], plain(kind), rtol=1e-12, err_msg=f"{engine} {kind}")


def test_a_gathering_job_on_one_device_is_the_plain_loop() -> None:
    for kind, made in JOBS.items():
        engine = one_device(made())
        losses = [engine.train_step(shares(step, 0, 1)).loss for step in range(STEPS)]
        np.testing.assert_allclose(losses, plain(kind)[:-1], rtol=1e-12)


def contrastive(outputs: Any, _: Any) -> Tensor:
    """SimCLR's on what the rank has."""
    scores = outputs[0] @ outputs[1].t() - 1e9 * torch.eye(len(outputs[0]))
    return functional.cross_entropy(scores, torch.arange(len(scores)).roll(1), reduction="none")


def centred(outputs: Any, _: Any) -> Tensor:
    """Each sample against the batch's mean."""
    return ((outputs[0] - outputs[0].mean(0)) ** 2).sum(1)


def apart(outputs: Any, targets: Tensor) -> Tensor:
    """Changes what it is given in place, which the comparison must not see."""
    targets += 1
    return (outputs[0] ** 2).sum(1) * targets


def noisy(outputs: Any, _: Any) -> Tensor:
    return (outputs[0] + torch.rand(outputs[0].shape)).sum(1)


def in_a_step(model: nn.Module, columns: Any) -> Tensor:
    return centred((model.image(columns["image"]),), None)


def in_float32(model: nn.Module, columns: Any) -> Tensor:
    """Rounded as a float32 model rounds whose products depend on the rows of a batch; the result is in float64."""
    image = columns["image"]
    return model.image(image).sum(1) * (1 + 1e-6 * len(image)) + 0.0 * model.scale


def by_place(outputs: Any, _: Any) -> Tensor:
    """Row i belongs to row n - 1 - i: not told by tw.gather, whose rows come rank by rank."""
    every = tw.gather(outputs[0])
    return (every * every.flip(0)).sum(1)


def warmed(ranks: int = 1, micro_batches: int = 2, **changes: Any) -> None:
    """Warm one rank up for a batch that is cut, which needs no other rank where nothing is gathered."""
    how = plan(accumulation=micro_batches, mesh=Mesh(data=ranks))
    one_device(job(**changes), how).warm(zero_weight(shares(0, 0, ranks, micro_batches)))


@pytest.mark.parametrize("loss", [contrastive, centred])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 1), (1, 2)])
def test_a_loss_that_compares_samples_is_refused_where_the_batch_is_cut(
    loss: Any, ranks: int, micro_batches: int
) -> None:
    cut = f"divides a batch over {ranks} data ranks with {micro_batches} micro-batches each"
    with pytest.raises(JobError, match=f"loss= is not of each sample alone.*{cut}.*tw.gather.*batch_loss"):
        warmed(ranks, micro_batches, loss=loss)
    warmed(ranks, micro_batches, loss=loss, inexact=("batch_loss",))
    warmed(1, 1, loss=loss)


def test_a_step_that_compares_samples_is_refused_and_losses_of_each_sample_are_not() -> None:
    with pytest.raises(JobError, match="step= is not of each sample alone"):
        warmed(loss=None, step=in_a_step)
    warmed(loss=apart)
    warmed(loss=noisy)
    warmed(loss=None, step=in_float32)


def test_a_gathering_loss_is_refused_in_micro_batches_and_where_places_count() -> None:
    with pytest.raises(JobError, match=r"tw.gather sees one of 2 micro-batches.*accumulation=1"):
        warmed(loss=clip)
    with pytest.raises(JobError, match="cannot reach the other 1 parts of the batch in this strategy"):
        warmed(ranks=2, micro_batches=1, loss=clip)
    with pytest.raises(JobError, match=r"depends on the order of the rows.*rank by rank"):
        warmed(loss=by_place)


def test_outside_of_a_run_gather_returns_what_it_is_given() -> None:
    rows = torch.ones(3, 2)
    assert tw.gather(rows) is rows
