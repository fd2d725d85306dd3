"""Steps with several optimizers in turn (GAN), and with one that takes a closure (LBFGS), as in a plain loop."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, distributed
from torch.optim.lr_scheduler import StepLR

import trainwright as tw
from tests.support.gan_jobs import OPTIMIZERS, Gan, real, step
from tests.support.planner_cases import decide
from tests.support.rank_processes import Exchange, formed, run_ranks
from tests.support.torch_engines import Files, double, feed, loss, one_device, plan, saved, spec
from trainwright.core.data import Batch, Feed, fold_seed, zero_weight
from trainwright.core.errors import JobError, NonFiniteLoss, PlanError
from trainwright.core.plan import Mesh
from trainwright.strategies.torch.checkpoint.safetensors_files import load_weights
from trainwright.strategies.torch.engines.data_parallel import DataParallel
from trainwright.strategies.torch.engines.fsdp import Sharded

ROWS, STEPS, RANKS = (12, 7, 11, 12), 4, 2


def gan(**changes: Any) -> Any:
    fields = {"model": Gan, "optimizer": OPTIMIZERS, "step": step, "loss": None, "inputs": (), "targets": ()}
    return spec(**{**fields, "clip_norm": 0.5, **changes})


def whole(number: int) -> Batch:
    random, rows = np.random.default_rng(number), ROWS[number]
    columns = {"x": random.normal(2.0, 1.0, (rows, 4)), "z": random.normal(size=(rows, 3)), "y": np.arange(rows) % 3}
    return Batch(columns=columns, weights=np.ones(rows), samples=np.arange(rows))


def share(number: int, rank: int = 0, of: int = 1, micro_batches: int = 1) -> Feed:
    """A rank's part of a global batch."""
    batch, parts = whole(number), []
    for rows in np.array_split(np.arange(ROWS[number])[rank::of], micro_batches):
        columns = {name: column[rows] for name, column in batch.columns.items()}
        parts.append(replace(batch, columns=columns, weights=np.ones(len(rows)), samples=rows))
    return feed(*parts, step=number, rank=rank, total=of, rows=ROWS[number])


def columns_of(number: int) -> dict[str, Tensor]:
    return {name: torch.from_numpy(column) for name, column in whole(number).columns.items()}


def plain_gan() -> tuple[dict[str, Tensor], list[tuple[float, float]]]:
    """A loop without any of ours: the trained weights, and the losses of each step."""
    torch.manual_seed(fold_seed(3, -1))
    model, losses = Gan(), []
    made = {name: make(getattr(model, name).parameters()) for name, make in OPTIMIZERS.items()}
    for number in range(STEPS):
        told = {}
        for name, value in step(model, columns_of(number)):
            model.zero_grad()
            value.mean().backward()
            torch.nn.utils.clip_grad_norm_(getattr(model, name).parameters(), 0.5)
            made[name].step()
            told[name] = value.mean().item()
        losses.append((told["discriminator"], told["generator"]))
    return model.state_dict(), losses


def plain_lbfgs() -> dict[str, Tensor]:
    torch.manual_seed(fold_seed(3, -1))
    model = double()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5, line_search_fn="strong_wolfe")
    for number in range(STEPS):
        columns = columns_of(number)

        def closure(columns: dict[str, Tensor] = columns) -> Tensor:
            optimizer.zero_grad()
            mean = loss(model(columns["x"]), columns["y"]).mean()
            mean.backward()
            return mean

        optimizer.step(closure)
    return model.state_dict()


def lbfgs(**changes: Any) -> Any:
    make = partial(torch.optim.LBFGS, lr=0.5, max_iter=5, line_search_fn="strong_wolfe")
    return spec(**{"model": double, "optimizer": make, **changes})


JOBS = {"gan": gan, "lbfgs": lbfgs}


def trained(engine: Any, first: int = 0, last: int = STEPS, **where: int) -> list[Any]:
    return [engine.train_step(share(number, **where)) for number in range(first, last)]


def same(found: Any, expected: dict[str, Tensor]) -> None:
    for name, value in load_weights(found).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_one_device_is_a_plain_loop(micro_batches: int) -> None:
    weights, losses = plain_gan()
    engine = one_device(gan(), plan(accumulation=micro_batches))
    reports = trained(engine, micro_batches=micro_batches)
    same(saved(engine), weights)
    for report, (first, second) in zip(reports, losses, strict=True):
        told = report.logged.means()
        assert (told["discriminator"], told["generator"]) == pytest.approx((first, second), rel=1e-9)
        assert report.loss == pytest.approx(first + second, rel=1e-9) and "score" in told
    sums = engine.evaluate_step(share(0)).means()
    assert sums["loss"] == pytest.approx(sums["discriminator"] + sums["generator"], rel=1e-12)
    engine = one_device(lbfgs(), plan(accumulation=micro_batches))
    trained(engine, micro_batches=micro_batches)
    same(saved(engine), plain_lbfgs())


def test_a_checkpoint_goes_on_bit_by_bit() -> None:
    for make in (partial(gan, schedule=lambda optimizer: StepLR(optimizer, 2, 0.5)), lbfgs):
        unbroken, stopped, resumed, restored = (one_device(make()) for _ in range(4))
        trained(unbroken)
        trained(stopped, last=2)
        resumed.load(saved(stopped))
        restored.restore(stopped.snapshot())
        for engine in (resumed, restored):
            trained(engine, first=2)
            ours, theirs = saved(engine).files, saved(unbroken).files
            assert json.loads(ours.pop("state.json")) == json.loads(theirs.pop("state.json"))
            assert ours == theirs


def test_an_error_in_the_middle_of_a_step_changes_nothing() -> None:
    """The first optimizer has made its update when the second one's loss is not finite."""

    def breaking(model: Any, batch: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for name, value in step(model, batch):
            yield name, value / (1.0 - float(name == "generator" and len(value) == 11))

    how = partial(gan, schedule=lambda optimizer: StepLR(optimizer, 1, 0.5))
    engine, other = one_device(how(step=breaking)), one_device(how())
    trained(engine, last=2)
    before = saved(engine).files
    for _ in range(2):  # what was set back is not the memory that the next step copies into
        with pytest.raises(NonFiniteLoss, match="in samples 0, 1, 2"):
            trained(engine, first=2, last=3)
        assert saved(engine).files == before
    trained(engine, first=3)
    trained(other, last=2)
    trained(other, first=3)
    assert saved(engine).files == saved(other).files


def test_the_copies_of_a_step_take_the_memory_of_those_before() -> None:
    engine = one_device(gan())

    def places(last: int) -> list[int]:
        trained(engine, first=last - 1, last=last)
        return [each.data_ptr() for each in engine.replica.undo._copies if isinstance(each, Tensor)]

    first, second, third = places(1), places(2), places(3)
    assert len(first) == len(engine.replica.trainable) < len(second), (
        "the optimizers had no state before the first step"
    )
    assert second[: len(first)] == first and third == second


def _on_ranks(rank: int, world: int, exchange: Exchange) -> Any:
    found: list[Any] = []
    where = {"rank": rank, "of": world}
    for make in (gan, lbfgs):
        engine = formed(rank, exchange, make())
        engine.warm(zero_weight(share(0, **where)))
        found += [[report.loss for report in trained(engine, **where)], saved(engine).files]
        engine.verify()
        engine.leave()
    found.append(_words(rank, exchange, gan(step=_other_order)))
    found.append(_words(rank, exchange, gan(step=_means)))
    found.append(_words(rank, exchange, lbfgs(), engine=Sharded(), how=plan(mesh=Mesh(shard=world))))
    return found


def _words(rank: int, exchange: Exchange, job: Any, engine: Any = None, how: Any = None) -> str:
    engine = engine or DataParallel()
    try:
        formed(rank, exchange, job, engine=engine, how=how)
        engine.warm(zero_weight(share(0, rank=rank, of=RANKS)))
        trained(engine, rank=rank, of=RANKS)
    except JobError as error:
        return str(error)
    finally:
        engine.leave()
    return ""


def _other_order(model: Any, batch: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    yield from reversed([*step(model, batch)]) if distributed.get_rank() else step(model, batch)


def _means(model: Any, batch: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, value in step(model, batch):
        yield name, value.mean()


def test_two_ranks_are_a_plain_loop_and_refuse_what_differs() -> None:
    weights, losses = plain_gan()
    for result in run_ranks(_on_ranks, RANKS):
        for files, expected in ((result[1], weights), (result[3], plain_lbfgs())):
            found = Files()
            found.files = files
            same(found, expected)
        assert result[0] == pytest.approx([sum(each) for each in losses], rel=1e-9)
        assert "step= yielded other names" in result[4]
        assert "step= yielded one number for 'discriminator'" in result[5]
        assert "LBFGS, whose step() takes a closure, needs all of the model on each worker" in result[6]


def _relativistic(model: Any, batch: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Compares each sample with the mean of the others, which a rank has its part of; with a gradient penalty."""
    x = batch["x"].requires_grad_()
    fake = model.generator(batch["z"])
    scores = 9.0 * model.discriminator(x)
    (slope,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
    yield "discriminator", real(scores - model.discriminator(fake.detach()).mean(), 1.0) + slope.square().sum(1)
    yield "generator", real(model.discriminator(fake) - scores.detach().mean(), 1.0)


def test_several_losses_that_compare_samples_are_refused_where_the_batch_is_divided() -> None:
    given = zero_weight(share(0, of=RANKS))
    with pytest.raises(JobError, match=r"step= is not of each sample alone.*2 data ranks.*batch_loss"):
        one_device(gan(step=_relativistic)).warm(given)
    one_device(gan(step=_relativistic, inexact=("batch_loss",))).warm(given)
    one_device(gan(step=_relativistic)).warm(zero_weight(share(0)))
    one_device(gan()).warm(given)


def unknown(model: Any, batch: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    yield "diskriminator", model.discriminator(batch["x"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"step": lambda model, batch: model.generator(batch["z"]).sum(1)}, 'write `yield "generator", losses`'),
        ({"step": unknown}, "step= yielded 'diskriminator': did you mean 'discriminator'"),
        ({"optimizer": {"generator": OPTIMIZERS["generator"]}}, "'discriminator.0.weight' belongs to no optimizer"),
        ({"optimizer": {**OPTIMIZERS, "critic": torch.optim.SGD}}, "names 'critic', and no trained parameter begins"),
        ({"optimizer": {**OPTIMIZERS, "generator": torch.optim.LBFGS}}, "takes a closure: it must be the only one"),
        ({"optimizer": {**OPTIMIZERS, "generator": lambda parameters: 3}}, "optimizer 'generator' returned int"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError) as refused:
        trained(one_device(gan(**changes)), last=1)
    assert words in str(refused.value)


def test_plans_and_options_without_it() -> None:
    with pytest.raises(PlanError, match="optimizer= as a dict needs all of the model on each worker"):
        decide(optimizer=OPTIMIZERS, step=step, loss=None, strategy="sharded", workers=2)
    data = tw.datasets.table({"x": [[0.0] * 4], "z": [[0.0] * 3]})
    fields: dict[str, Any] = {"name": "gan", "model": Gan, "optimizer": OPTIMIZERS, "train": data, "batch_size": 1}
    with pytest.raises(JobError, match="several optimizers need step="):
        tw.Job(**fields, loss=loss, inputs="x", targets="z")
    with pytest.raises(JobError, match="have no loss scale"):
        tw.Job(**fields, step=step, precision="fp16")


def test_a_gan_runs_as_a_job(tmp_path: Path) -> None:
    """Through the trial before workers start, which needs no worker."""
    from trainwright.runtime.function_trial import TrialTask, run_trial

    batch = replace(whole(0), columns=whole(0).columns)
    data = tw.datasets.table({name: column.tolist() for name, column in batch.columns.items()})
    job = tw.Job(name="gan", model=Gan, optimizer=OPTIMIZERS, step=step, train=data, evaluate=data, batch_size=6,
                 storage=str(tmp_path))  # fmt: skip
    assert run_trial(TrialTask(job=job, train=batch, evaluate=batch, total_steps=12)).error is None
