"""Losses as people write them: means of torch's own, one number for a batch, and outputs with a loss of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import trainwright as tw
from tests.support.conformance import problems
from tests.support.rank_processes import Exchange, formed, run_ranks
from tests.support.torch_engines import batch, feed, one_device, plan, saved, spec
from trainwright.core.data import Batch, Feed, Terms, fold_seed, zero_weight
from trainwright.core.engine import ModelSpec
from trainwright.core.errors import JobError, UserCodeError
from trainwright.core.loss_api import outputs_first
from trainwright.core.plan import Mesh, Plan
from trainwright.core.topology import StateTransfer
from trainwright.strategies.torch.engines.data_parallel import DataParallel
from trainwright.strategies.torch.engines.fsdp import Sharded
from trainwright.strategies.torch.training.batch_losses import per_sample
from trainwright.strategies.torch.training.objective import JobFunctions

RANKS, STEPS, TOKENS, CLASSES = 2, 4, 6, 5
PROBLEM = problems.Problem(name="reduced", batch_size=17, rows=53)  # the last batch has 2 rows: shares without a row
Net = partial(nn.Linear, 4, CLASSES, dtype=torch.float64)
WEIGHT = torch.linspace(0.5, 2.0, CLASSES, dtype=torch.float64)


class Tagger(nn.Module):
    """A model that computes its loss itself, as those of Hugging Face do."""

    @dataclass
    class Output:
        loss: Tensor | None
        logits: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.head = Net()

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Output:
        logits = self.head(tokens)
        loss = None if labels is None else functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return self.Output(loss, logits)


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs - targets) ** 2).mean()


def tagged(model: nn.Module, columns: Any) -> Any:
    return model(columns["tokens"], labels=columns["tags"])


def counted(columns: Any) -> Tensor:
    """How many labels count, of which each row has another number."""
    found: Tensor = (columns["tags"] != -100).sum()
    return found


def masked(outputs: Tensor, targets: Any) -> Tensor:
    """A mean over a mask; a micro-batch may have none of it."""
    wanted, mask = targets
    return ((outputs - wanted) ** 2 * mask).sum() / mask.sum().clamp(min=1) / CLASSES


def job(**changes: Any) -> ModelSpec:
    given = {"model": Net, "targets": ("y",), "optimizer": partial(torch.optim.SGD, lr=0.3, momentum=0.9)}
    return spec(**{**given, **changes})


JOBS: dict[str, Callable[[], ModelSpec]] = {
    "module": partial(job, loss=nn.CrossEntropyLoss()),
    "weighted": partial(job, loss=nn.CrossEntropyLoss(WEIGHT, ignore_index=1, label_smoothing=0.1)),
    "function": partial(job, loss=functional.mse_loss, targets=("t",)),
    "own": partial(job, loss=squares, targets=("t",)),
    "step": partial(job, model=Tagger, loss=None, step=tagged, weight=counted),
    "masked": partial(job, loss=masked, targets=("t", "m"), weight="m"),
}


ENGINES: dict[Any, Any] = {DataParallel: JOBS, Sharded: ("own", "step")}


def columns() -> dict[str, Any]:
    random, rows = np.random.default_rng(5), PROBLEM.rows
    tags = random.integers(0, CLASSES, (rows, TOKENS))
    tags[np.arange(TOKENS) > random.integers(0, TOKENS, (rows, 1))] = -100
    return {
        "x": random.normal(size=(rows, 4)), "y": random.integers(0, CLASSES, rows), "tags": tags,
        "tokens": random.normal(size=(rows, TOKENS, 4)), "t": random.normal(size=(rows, CLASSES)),
        "m": (random.random((rows, 1)) > 0.5).astype(np.float64),
    }  # fmt: skip


def feeds(layout: Plan, rank: int) -> list[Feed]:
    data, ids = columns(), problems.batches(PROBLEM, STEPS)
    return [problems.feeds(PROBLEM, layout, step, ids[step], data)[rank] for step in range(STEPS)]


def plain(made: ModelSpec) -> list[float]:
    """A loop without any of ours: the losses of its steps, then that of the last batch again."""
    torch.manual_seed(fold_seed(3, -1))
    assert made.optimizer is not None
    model: Any = made.model()
    optimizer, losses, data = made.optimizer(model.parameters()), [], columns()
    for rows in (*problems.batches(PROBLEM, STEPS), problems.batches(PROBLEM, STEPS)[-1]):
        given = {name: torch.from_numpy(column[rows]) for name, column in data.items()}
        targets = tuple(given[name] for name in made.targets)
        if made.step is not None:
            loss = made.step(model, given).loss
        else:
            assert made.loss is not None
            loss = made.loss(model(given["x"]), targets[0] if len(targets) == 1 else targets)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


def _trained(rank: int, world: int, exchange: Exchange) -> Any:
    """Losses of each step, and this rank's sums of an evaluation of the last batch."""
    found = {}
    for make, names in ENGINES.items():
        layout = plan(mesh=Mesh(data=world) if make is DataParallel else Mesh(shard=world), accumulation=2)
        for name in names:
            engine = formed(rank, exchange, JOBS[name](), engine=make(), how=layout)
            given = feeds(layout, rank)
            engine.warm(zero_weight(given[0]))
            losses = [engine.train_step(each).loss for each in given]
            found[make.__name__, name] = losses, engine.evaluate_step(given[-1]).totals["loss"]
            engine.leave()
    return found


def test_losses_on_two_ranks_in_micro_batches_equal_a_plain_loop() -> None:
    results = run_ranks(_trained, RANKS)
    for (engine, name), (losses, _) in results[0].items():
        sums = np.sum([result[engine, name][1] for result in results], axis=0)
        found = [*losses, sums[0] / sums[1]]
        np.testing.assert_allclose(found, plain(JOBS[name]()), rtol=1e-12, err_msg=f"{engine} {name}")


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("name", JOBS)
def test_losses_on_one_device_equal_a_plain_loop(name: str, accumulation: int) -> None:
    layout = plan(accumulation=accumulation)
    engine = one_device(JOBS[name](), layout)
    given = feeds(layout, 0)
    losses = [engine.train_step(each).loss for each in given]
    sums = engine.evaluate_step(given[-1]).totals["loss"]
    np.testing.assert_allclose([*losses, sums[0] / sums[1]], plain(JOBS[name]()), rtol=1e-12)


LOGITS = torch.randn(6, CLASSES, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
LABELS = torch.tensor([[0, 1], [4, 4], [-100, 2], [3, 1], [2, -100], [1, 1]])
PROBABLE = LOGITS.softmax(1).flip(0)
SKEWED = torch.tensor([0.0, 1.0, 2.0, 1.0, 0.5], dtype=torch.float64)


@pytest.mark.parametrize(
    ("loss", "targets"),
    [
        (nn.CrossEntropyLoss(), LABELS),
        (nn.CrossEntropyLoss(WEIGHT, label_smoothing=0.2), LABELS),
        (nn.CrossEntropyLoss(SKEWED), LABELS),
        (nn.CrossEntropyLoss(WEIGHT), PROBABLE),
        (functional.cross_entropy, LABELS),
        (partial(functional.cross_entropy, ignore_index=1), LABELS.clamp(min=0)),
        (partial(functional.nll_loss, weight=WEIGHT), LABELS),
        (nn.BCEWithLogitsLoss(pos_weight=WEIGHT[:, None]), PROBABLE),
        (functional.smooth_l1_loss, PROBABLE),
        (nn.KLDivLoss(), PROBABLE),
    ],
)
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss")
def test_a_mean_of_torchs_own_is_that_of_its_terms(loss: Any, targets: Tensor) -> None:
    found = outputs_first(per_sample(loss))(LOGITS, targets)
    values, weights = found if isinstance(found, Terms) else (found, torch.ones_like(found))
    assert len(values) == len(LOGITS)
    torch.testing.assert_close((values * weights).sum() / weights.sum(), loss(LOGITS, targets), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(SKEWED, label_smoothing=0.1),
        nn.MSELoss(reduction="sum"),
        partial(functional.mse_loss, weight=SKEWED),
        nn.CTCLoss(),
        squares,
    ],
)
def test_what_is_no_plain_mean_is_left_as_it_is(loss: Any) -> None:
    assert per_sample(loss) is loss


class Focal(nn.Module):
    """A loss of a user, with a weight of each class."""

    def __init__(self, *, trained: bool = False) -> None:
        super().__init__()
        self.register_buffer("alpha", WEIGHT.clone())
        self.scale = nn.Parameter(torch.ones(()), requires_grad=trained)

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs, targets, weight=self.alpha, reduction="none") * self.scale


@pytest.mark.parametrize(
    "loss",
    [
        Focal(),
        partial(Focal()),
        nn.CrossEntropyLoss(weight=WEIGHT),
        partial(functional.cross_entropy, weight=WEIGHT),
        partial(functional.cross_entropy, weight=WEIGHT, reduction="none"),
    ],
    ids=["module", "partial of a module", "torch's own", "partial", "unreduced"],
)
def test_the_tensors_of_a_loss_are_moved_to_the_device(loss: Any) -> None:
    """On the meta device, torch refuses tensors of another device as on a GPU."""
    job = spec(loss=loss)
    caller = replace(JobFunctions.on_host(job, plan(), "rank 0"), device=torch.device("meta"))
    columns = {"y": LABELS.to("meta")}
    values, weights = caller.loss_of(LOGITS.to("meta"), columns, batch(len(LABELS)))
    assert values.device.type == weights.device.type == "meta" and len(values) == len(LABELS)


def test_a_loss_whose_own_parameters_would_not_be_trained_is_refused() -> None:
    for loss in (Focal(trained=True), partial(Focal(trained=True))):
        with pytest.raises(JobError, match=r"'scale' of loss=.* requires a gradient.*hold it in the model, or freeze"):
            one_device(spec(model=Net, loss=loss))
    one_device(spec(model=Net, loss=Focal()))

    class Holding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.loss = Net(), Focal(trained=True)

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.net(x.double())
            return made

    model = Holding()
    engine = one_device(spec(model=lambda: model, loss=model.loss))
    engine.train_step(feed())
    assert model.loss.scale.detach().item() != 1.0, "its loss is trained with the model"


def test_a_skipped_sample_does_not_reach_model_or_loss() -> None:
    whole = batch(8, dtype=np.float64, t=np.random.default_rng(2).normal(size=(8, CLASSES)))
    weights = np.ones(8)
    weights[[0, 5]] = 0.0
    kept = np.flatnonzero(weights)
    less = Batch(
        columns={name: column[kept] for name, column in whole.columns.items()}, weights=np.ones(6), samples=kept
    )
    found = []
    for given in (replace(whole, weights=weights), less):
        engine = one_device(JOBS["own"]())
        given = replace(feed(given), rows=8)
        found.append((engine.train_step(given), engine.evaluate_step(given), engine.train_step(zero_weight(given))))
    assert found[0] == found[1] and found[0][0].weight == 6 and found[0][2].weight == 0


# --- What is refused --------------------------------------------------------------------------------------------------


def rows_of(columns: Any) -> int:
    return len(columns["tags"])


def texts(model: nn.Module, columns: Any) -> Any:
    return tagged(model, columns).loss


def noisy(model: nn.Module, columns: Any) -> Tensor:
    return (model(columns["x"]) + torch.rand(1)).mean()


def averaged(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.mean(0) ** 2).mean()


def first_rows(rows: int) -> Batch:
    held = {name: column[:rows] for name, column in columns().items()}
    return Batch(columns=held, weights=np.ones(rows), samples=np.arange(rows))


def warmed(rows: int = 8, **changes: Any) -> None:
    """Warm one rank up for a batch that two ranks share, which needs no other rank."""
    one_device(job(**changes), plan(ranks=2)).warm(zero_weight(feed(first_rows(rows), total=2)))


OF_TOKENS: dict[str, Any] = {"model": Tagger, "loss": None, "step": texts}
NOISY: dict[str, Any] = {"loss": None, "step": noisy}
GIVEN: dict[str, Any] = {
    "model": Tagger, "inputs": ("tokens", "tags"), "keywords": ("tokens", "labels"), "loss": lambda o, _: o.loss,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"loss": lambda o, t: functional.mse_loss(o, t, reduction="sum"), "targets": ("t",)}, "it is .* for 8 rows"),
        (OF_TOKENS, "the mean of 2 parts of them is"),
        ({"loss": averaged}, "the mean of 2 parts of them is"),
        (NOISY, "it draws random numbers"),
        (GIVEN, "outputs hold values without rows"),
        ({"loss": squares, "targets": ("t",), "rows": 1}, "micro-batches of one row"),
        ({**OF_TOKENS, "weight": rows_of}, "the mean of 2 parts of them is"),
        ({**OF_TOKENS, "weight": lambda b: b["tags"].max() + 1}, "weight= counts 5 items in 8 rows, and 10 in 2 parts"),
    ],
    ids=["sum", "tokens", "of the batch", "random", "model's own", "one row", "wrong weight", "no count"],
)
def test_a_number_that_is_no_mean_is_refused_where_the_batch_is_divided(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(JobError, match=f"returned one number for the batch.*2 data ranks.*{why}.*set weight="):
        warmed(**changes)
    warmed(**changes, inexact=("batch_loss",))


def shuffled(model: nn.Module, columns: Any) -> Tensor:
    """Draws an order, by which the loss differs in rounding alone."""
    order = torch.randperm(len(columns["x"]))
    return ((model(columns["x"][order]) - columns["t"][order]) ** 2).mean()


def test_a_draw_that_changes_nothing_is_compared_as_others() -> None:
    warmed(loss=None, step=shuffled)
    with pytest.raises(JobError, match="the mean of 2 parts of them is"):
        warmed(loss=None, step=lambda model, columns: shuffled(model, columns) * len(columns["x"]))


def forces(model: nn.Module, columns: Any) -> Tensor:
    """The squared error of a derivative of the outputs, as of a potential or in a physics-informed network."""
    x = columns["x"].requires_grad_()
    (slope,) = torch.autograd.grad((model(x) ** 2).sum(), x, create_graph=True)
    return ((slope - 1.0) ** 2).sum()


class Auxiliary(nn.Module):
    """A model that returns a second output in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, CLASSES, dtype=torch.float64), nn.Dropout(0.5))
        self.norm = nn.BatchNorm1d(CLASSES, dtype=torch.float64)

    def forward(self, x: Tensor) -> Any:
        found = self.norm(self.layers(x))
        return (found, found.mean(1)) if self.training else found


def with_auxiliary(model: nn.Module, columns: Any) -> Tensor:
    outputs, second = model(columns["x"])
    return functional.cross_entropy(outputs, columns["y"], reduction="sum") + second.sum()


def of_rows(step: Callable[[nn.Module, Any], Tensor]) -> Callable[[nn.Module, Any], Tensor]:
    return lambda model, columns: step(model, columns) / len(columns["x"])


UNSEEN: dict[str, dict[str, Any]] = {
    "gradients": {"loss": None, "step": forces},
    "training mode": {"loss": None, "step": with_auxiliary, "model": Auxiliary, "inexact": ("batch_norm",)},
}


@pytest.mark.parametrize("name", UNSEEN)
def test_a_loss_that_needs_gradients_or_training_mode_is_checked(name: str) -> None:
    changes = UNSEEN[name]
    for layout in (plan(ranks=2), plan(accumulation=2)):
        parts, total = (layout.accumulation, layout.mesh.data)
        given = zero_weight(feed(*(first_rows(8),) * parts, total=total))
        with pytest.raises(JobError, match=r"it is .* for 8 rows, and the mean of 2 parts of them is"):
            one_device(job(**changes), layout).warm(given)
        engine = one_device(job(**{**changes, "step": of_rows(changes["step"])}), layout)
        before = {key: value.clone() for key, value in engine.replica.model.state_dict().items()}
        engine.warm(given)
        assert all(module.training for module in engine.replica.model.modules())
        assert all(torch.equal(value, before[key]) for key, value in engine.replica.model.state_dict().items())


def test_a_number_that_could_not_be_compared_is_refused_with_its_error() -> None:
    def needs_dropout(model: Any, columns: Any) -> Tensor:
        if not model.layers[1].training:
            raise LookupError("no dropout")
        return with_auxiliary(model, columns)

    changes = {**UNSEEN["training mode"], "step": needs_dropout}
    with pytest.raises(JobError, match=r"but it could not be compared: LookupError: no dropout\. For a mean"):
        warmed(**changes)
    warmed(**changes, weight=lambda columns: len(columns["x"]))
    warmed(**{**changes, "step": lambda model, columns: needs_dropout(model, columns).repeat(8)})


class Unwritten(Tagger):
    """A language model whose head is zero at first, so that each token has the same loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.unused = nn.Linear(4, 4, dtype=torch.float64), nn.Linear(2, 2, dtype=torch.complex64)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        found = super().forward(self.body(tokens), labels)
        return found.logits if labels is None else found


def of_outputs(outputs: Any, tags: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.flatten(0, 1), tags.flatten())


OF_EQUAL: dict[str, dict[str, Any]] = {
    "step": {"loss": None, "step": texts},
    "loss": {"inputs": ("tokens",), "targets": ("tags",), "loss": of_outputs},
}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", OF_EQUAL)
def test_the_gradient_shows_what_equal_values_do_not(name: str, precision: str) -> None:
    changes = {"model": Unwritten, "targets": ("tags",), **OF_EQUAL[name]}
    given = zero_weight(feed(first_rows(8), total=2))

    def warm(**more: Any) -> None:
        one_device(job(**changes, **more), plan(ranks=2, precision=precision)).warm(given)

    with pytest.raises(JobError, match="but its gradient for 8 rows is not the mean of those of 2 parts of them"):
        warm()
    warm(weight=counted)
    even = replace(given.parts[0][0], columns={**columns_of_even_length()})
    given = zero_weight(feed(even, total=2))
    warm()


class Blank(nn.Linear):
    """Outputs of zeros, of the type that is computed in."""

    def __init__(self) -> None:
        super().__init__(4, CLASSES)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


def test_gradients_of_a_mean_over_many_pixels_do_not_vanish_in_fp16() -> None:
    def step(model: Any, columns: Any, rows: float = 1.0) -> Tensor:
        pixels = model(columns["x"].float())[..., None].expand(-1, -1, 1 << 17)
        weights = rows ** torch.arange(len(pixels))[:, None, None]  # by the place in the batch, if not all 1
        return ((pixels.float() - 1.0) ** 2 * weights).sum() / weights.expand_as(pixels).sum()

    def warm(own: Any) -> None:
        changes = {"model": Blank, "loss": None, "step": own}
        one_device(job(**changes), plan(ranks=2, precision="fp16")).warm(zero_weight(feed(first_rows(8), total=2)))

    warm(step)
    with pytest.raises(JobError, match="its gradient for 8 rows is not the mean of those of 2 parts"):
        warm(partial(step, rows=2.0))


class Recurrent(torch.autograd.Function):
    """Refuses to be differentiated, as an LSTM on a GPU in evaluation mode."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeError("cudnn RNN backward can only be called in training mode")


def test_gradients_that_cannot_be_computed_are_told_and_refuse_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def step(model: Any, columns: Any) -> Any:
        found = model(columns["tokens"]).flatten(0, 1)
        found = found if model.training else Recurrent.apply(found)
        return functional.cross_entropy(found, columns["tags"].clamp(min=0).flatten())

    one_device(job(model=Unwritten, loss=None, step=step), plan(ranks=2)).warm(
        zero_weight(feed(first_rows(8), total=2))
    )
    assert "gradients of step= were not compared, and its values are nearly equal: RuntimeError: cudnn" in caplog.text


@pytest.mark.parametrize("fails", [1, 2], ids=["all rows", "half of them"])
def test_a_check_without_enough_memory_is_told_and_refuses_nothing(
    fails: int, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []

    def step(model: Any, columns: Any) -> Tensor:
        calls.append(len(columns["x"]))
        if len(calls) == fails:
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")
        return (model(columns["x"]) ** 2).mean()

    warmed(loss=None, step=step)
    assert "step= was not compared with its parts: OutOfMemoryError: tried to allocate 2 GiB" in caplog.text


def columns_of_even_length() -> dict[str, Any]:
    held = dict(first_rows(8).columns)
    held["tags"] = np.where(np.arange(TOKENS) < TOKENS - 2, np.abs(held["tags"]) % CLASSES, -100)
    return held


def test_a_state_whose_run_passed_the_check_is_not_checked_again() -> None:
    """Later values may differ more by rounding, and a recovery must not end a run that trains."""
    broken: list[bool] = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return squares(outputs, targets) * (len(outputs) if broken else 1)

    made, given = job(loss=loss, targets=("t",)), zero_weight(feed(first_rows(8), total=2))
    passed, undivided, fresh, resumed, restored = (one_device(made, plan(ranks=2)) for _ in range(5))
    for engine, total in ((passed, 2), (undivided, 1)):
        engine.train_step(feed(first_rows(8), total=total))
    broken.append(True)
    passed.warm(given)
    resumed.load(saved(passed))
    restored.restore(passed.snapshot())
    for engine in (resumed, restored):
        engine.warm(given)
    for engine in (fresh, undivided):
        with pytest.raises(JobError, match=r"it is .* for 8 rows"):
            engine.warm(given)


def test_a_check_of_one_sample_that_is_repeated_is_made_again_with_others() -> None:
    one = first_rows(1)
    repeated = Batch(
        columns={name: column.repeat(8, 0) for name, column in one.columns.items()},
        weights=np.ones(8), samples=one.samples.repeat(8),
    )  # fmt: skip
    engine = one_device(job(loss=averaged), plan(ranks=2))
    engine.warm(zero_weight(feed(repeated, total=2)))
    with pytest.raises(JobError, match="the mean of 2 parts of them is"):
        engine.warm(zero_weight(feed(first_rows(8), total=2)))


def _later(rank: int, world: int, exchange: Exchange) -> Any:
    """The numbers of rows of each call, on ranks of which the last one comes after the first steps."""
    called: list[int] = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        called.append(len(outputs))
        return squares(outputs, targets)

    found = []
    for make in (DataParallel, Sharded):
        mesh = Mesh(data=world) if make is DataParallel else Mesh(shard=world)
        engine = make()
        for _ in range(2):
            called.clear()
            formed(rank, exchange, job(loss=loss, targets=("t",)), engine=engine, how=plan(mesh=mesh))
            engine.transfer([StateTransfer(source=0, target=2, piece="state")] if make is DataParallel else [])
            given = feed(first_rows(8), rank=rank, total=world)
            engine.warm(zero_weight(given))
            found.append([*called])
            engine.train_step(given)
            engine.leave()
            if rank == world - 1 and make is DataParallel:
                engine = make()
    return found


def test_ranks_check_once_and_those_that_join_do_not() -> None:
    for first, again, sharded, once in run_ranks(_later, 3):
        assert first == [8, 4, 4, 8, 8] and again == [8], "checked in the first formation, and in none later"
        assert sharded == [8, 4, 4, 8] and once == [8]


@pytest.mark.parametrize("changes", [OF_TOKENS, NOISY, GIVEN])
def test_weight_says_what_the_mean_is_over(changes: dict[str, Any]) -> None:
    warmed(**{"targets": ("tags",), **changes}, weight=rows_of if changes is NOISY else counted)


@pytest.mark.parametrize(
    ("changes", "error", "what"),
    [
        ({"step": lambda m, b: b["tags"].sum()}, JobError, "the loss has no gradient"),
        ({"weight": lambda b: b["tags"] != -100}, JobError, r"weight= returned shape \(8, 6\): return one number"),
        ({"weight": lambda b: b["z"].sum()}, UserCodeError, "weight= raised KeyError: 'z'"),
        ({"weight": "tag"}, JobError, "weight='tag' is not a column of the batch: did you mean 'tags'"),
        ({"step": lambda m, b: m(b["tokens"])}, JobError, "returned Output without a loss: give the model its labels"),
        (
            {"step": lambda m, b: texts(m, b).repeat(8), "weight": counted},
            JobError,
            "step= returned more: leave weight=",
        ),
    ],
)
def test_a_wrong_weight_or_output_is_refused(changes: dict[str, Any], error: Any, what: str) -> None:
    with pytest.raises(error, match=what):
        one_device(job(**{**OF_TOKENS, **changes})).warm(feed(first_rows(8)))


def test_a_job_refuses_a_weight_that_its_loss_or_framework_does_not_have() -> None:
    data = tw.datasets.table({"x": [[1.0]], "y": [0], "m": [1]})
    given: dict[str, Any] = {
        "name": "n", "model": Net, "train": data, "loss": squares, "inputs": "x", "targets": "y", "batch_size": 4,
        "optimizer": torch.optim.SGD,
    }  # fmt: skip
    with pytest.raises(JobError, match="weight='m' is not in targets="):
        tw.Job(**given, weight="m")
    with pytest.raises(JobError, match=r'weight= cannot be used with run="fit"'):
        tw.Job(**given, weight=len, run="fit")
    assert tw.Job(**given, weight="y").model_spec(1).weight == "y"


# --- The step's number, and modules as steps --------------------------------------------------------------------------


def alone(exchanged: Any) -> list[Any]:
    """Exchange values in a group of this process alone."""
    return [exchanged]


class CountingStep(nn.Module):
    """A step whose buffer changes with each call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, model: nn.Module, columns: Any, *, step: int) -> Tensor:
        self.calls += 1
        return functional.cross_entropy(model(columns["x"]), columns["y"], reduction="none") * (step + 1)


def test_a_sharded_step_gets_its_number_and_must_not_change_buffers_of_its_own() -> None:
    def step(model: nn.Module, columns: Any, *, step: int) -> Tensor:
        return functional.cross_entropy(model(columns["x"]), columns["y"], reduction="none") * (step + 1)

    losses, given, made = [], feed(first_rows(8), step=3), job(loss=None, step=step)
    for engine in (one_device(made), formed(0, alone, made, engine=Sharded())):
        losses.append(engine.train_step(given).loss)
        engine.leave()
    assert losses[0] == pytest.approx(losses[1]), "step= under FSDP gets the number"
    engine = formed(0, alone, job(loss=None, step=CountingStep()), engine=Sharded())
    with pytest.raises(JobError, match=r"buffer 'calls' of step=CountingStep\(...\) changes when it is called"):
        engine.warm(zero_weight(given))
    engine.leave()


def test_a_loss_whose_weights_change_is_checked_as_in_the_last_step_too() -> None:
    def annealed(outputs: Tensor, targets: Tensor, *, step: int) -> Tensor:
        return squares(outputs, targets) + step / 100 * averaged(outputs, targets)

    def in_step(model: nn.Module, columns: Any, *, step: int) -> Tensor:
        return annealed(model(columns["x"]), columns["t"], step=step)

    made: tuple[dict[str, Any], ...] = ({"loss": annealed, "targets": ("t",)}, {"loss": None, "step": in_step})
    for changes in made:
        with pytest.raises(JobError, match=r"in the last step, 100, returned one number.*the mean of 2 parts of them"):
            warmed(**changes)
        warmed(**changes, total_steps=1)


def test_the_check_leaves_no_weights_behind_that_autocast_has_cast() -> None:
    """In torch 2.9, the loss of the next call with gradients would have none."""

    def step(model: nn.Module, columns: Any) -> Tensor:
        return (model(columns["x"].float()).float() ** 2).mean()

    engine = one_device(
        job(model=partial(nn.Linear, 4, CLASSES), loss=None, step=step), plan(ranks=2, precision="bf16")
    )
    engine.warm(zero_weight(feed(first_rows(8), total=2)))
