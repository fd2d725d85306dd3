"""The torch engines on one device: their numbers, and torch's own ways to go wrong."""

from __future__ import annotations

import dataclasses
import math
import os
import pickle
import random
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.torch_engines import (
    Net,
    accuracy,
    adam,
    batch,
    batch_normed,
    crash,
    double,
    dropping,
    feed,
    loss,
    one_device,
    plan,
    saved,
    spec,
)
from trainwright.core.data import Batch, Feed, Terms, fold_seed
from trainwright.core.errors import JobError, NonFiniteLoss, UserCodeError
from trainwright.strategies.torch.checkpoint.safetensors_files import load_weights
from trainwright.strategies.torch.engines.base import OneDevice


def test_a_plain_loop_gives_the_same_parameters() -> None:
    engine = one_device(spec(model=double))
    torch.manual_seed(fold_seed(3, -1))
    model = double()
    optimizer = adam(model.parameters())
    for step in range(5):
        given = batch(first=step, dtype=np.float64)
        report = engine.train_step(feed(given, step=step))
        optimizer.zero_grad()
        expected = loss(model(torch.from_numpy(given.columns["x"])), torch.from_numpy(given.columns["y"])).mean()
        expected.backward()
        optimizer.step()
        assert report.loss == pytest.approx(expected.item(), abs=1e-12)
    weights = load_weights(saved(engine))
    for name, value in model.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=0.0, atol=1e-12)


def test_float32_losses_are_reported_to_1e_6() -> None:
    given = batch(1000, weights=None)
    heavy = dataclasses.replace(given, weights=np.random.default_rng(0).uniform(0.1, 10.0, 1000))
    report = one_device().train_step(feed(heavy))
    torch.manual_seed(fold_seed(3, -1))
    outputs = Net()(torch.from_numpy(given.columns["x"])).double()
    values = loss(outputs, torch.from_numpy(given.columns["y"])).detach().numpy()
    assert report.loss == pytest.approx(float(np.average(values, weights=heavy.weights)), rel=1e-6)
    assert report.weight == pytest.approx(float(heavy.weights.sum()), rel=1e-6)


def test_values_of_weight_zero_do_not_count_even_if_they_are_not_finite() -> None:
    def masked(outputs: torch.Tensor, targets: torch.Tensor) -> Terms:
        values = loss(outputs, targets)
        broken = torch.cat((values[:6], values[6:].detach() * math.nan))
        return Terms(values=broken, weights=torch.cat((torch.ones(6), torch.zeros(6))))

    given = batch()
    half = {name: column[:6] for name, column in given.columns.items()}
    whole = one_device(spec(loss=masked)).train_step(feed(given))
    first = one_device().train_step(feed(Batch(columns=half, weights=np.ones(6), samples=given.samples[:6])))
    assert whole.weight == 6.0
    assert whole.loss == pytest.approx(first.loss, rel=1e-6)


def test_functions_in_keras_order_are_called_in_it() -> None:
    def swapped_loss(y_true: torch.Tensor, y_pred: torch.Tensor) -> torch.Tensor:
        return loss(y_pred, y_true)

    def swapped_accuracy(y_true: torch.Tensor, y_pred: torch.Tensor) -> torch.Tensor:
        return accuracy(y_pred, y_true)

    usual = one_device(spec(metrics={"accuracy": accuracy}))
    other = one_device(spec(loss=swapped_loss, metrics={"accuracy": swapped_accuracy}))
    assert other.train_step(feed()) == usual.train_step(feed())
    assert other.evaluate_step(feed()) == usual.evaluate_step(feed())


def column_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs[:, :1] - targets) ** 2


@pytest.mark.parametrize("function", [{"loss": column_of}, {"metrics": {"mse": column_of}}])
def test_outputs_and_targets_that_broadcast_to_all_pairs_are_refused(function: dict[str, Any]) -> None:
    class Column(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)[:, :1]

    engine = one_device(spec(model=Column, **{"loss": lambda outputs, targets: outputs[:, 0] - targets, **function}))
    with pytest.raises(JobError, match=r"outputs of shape \(12, 1\) and targets of shape \(12,\) to \(12, 12\)"):
        engine.train_step(feed()) if "loss" in function else engine.evaluate_step(feed())


def test_no_weight_at_all_applies_nothing_and_counts_the_step() -> None:
    engine = one_device(spec(model=lambda: Net(middle=lambda: nn.BatchNorm1d(8))))
    before = saved(engine).files["model.safetensors"]
    given = dataclasses.replace(batch(), weights=np.zeros(12))
    report = engine.train_step(feed(given, rows=12))
    assert (report.step, report.loss, report.weight) == (1, 0.0, 0.0)
    assert saved(engine).files["model.safetensors"] == before


def test_the_schedule_sets_each_groups_rate_and_never_builds_up() -> None:
    def two_groups(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": parameters[:1], "lr": 0.4}, {"params": parameters[1:], "lr": 0.2}])

    job = spec(optimizer=two_groups, schedule=lambda step, total: (step + 1) / total, total_steps=4)
    engine = one_device(job)
    rates = [engine.train_step(feed(step=step)).learning_rate for step in (0, 1, 3)]
    assert rates == pytest.approx([0.1, 0.2, 0.4])
    assert engine.replica.optimizer.param_groups[1]["lr"] == pytest.approx(0.2)


def test_clipping_bites_after_the_weights_and_reports_the_norm_before() -> None:
    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1.0)

    job = spec(model=double, optimizer=sgd, clip_norm=1e-3)
    engine = one_device(job, plan(accumulation=2))
    given = batch(12, dtype=np.float64)
    heavy = dataclasses.replace(given, weights=np.full(12, 5.0))
    before = {name: value.clone() for name, value in load_weights(saved(engine)).items()}
    report = engine.train_step(feed(heavy, heavy))
    after = load_weights(saved(engine))
    moved = math.sqrt(sum(float(((after[name] - before[name]) ** 2).sum()) for name in before))
    assert report.gradient_norm is not None
    assert report.gradient_norm > 1e-3
    assert moved == pytest.approx(1e-3 * report.gradient_norm / (report.gradient_norm + 1e-6), rel=1e-9)


def test_bf16_computes_in_bf16_and_keeps_parameters() -> None:
    seen = []

    def noting(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        seen.append(outputs.dtype)
        return loss(outputs, targets)

    engine = one_device(spec(loss=noting), plan(precision="bf16"))
    report = engine.train_step(feed())
    assert math.isfinite(report.loss)
    assert set(seen) == {torch.bfloat16}
    assert {value.dtype for value in load_weights(saved(engine)).values()} == {torch.float32}


def test_parameters_of_16_bits_are_trained_in_float32_under_autocast() -> None:
    """As a model of Hugging Face is loaded: small updates are not lost, and what is frozen takes no more memory."""

    def born(kind: torch.dtype) -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)).bfloat16().to(kind)
        model[0].requires_grad_(False)
        return model

    def small(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1e-5)

    found = []
    for kind in (torch.bfloat16, torch.float32):
        engine = one_device(spec(model=lambda kind=kind: born(kind), optimizer=small), plan(precision="bf16"))
        start = engine.replica.model[1].weight.detach().clone()
        for step in range(3):
            engine.train_step(feed(step=step))
        assert (start - engine.replica.model[1].weight).abs().max() > 0
        found.append([each.detach() for each in engine.replica.model.parameters()])
    assert [each.dtype for each in found[0]] == [torch.bfloat16] * 2 + [torch.float32] * 2
    assert all(torch.equal(one.float(), other) for one, other in zip(*found, strict=True))
    alone = one_device(spec(model=lambda: born(torch.bfloat16), optimizer=small), plan())
    assert alone.replica.model[1].weight.dtype == torch.bfloat16, "the model's own types"


def test_dropout_depends_on_step_micro_batch_and_rank_alone() -> None:
    def outputs_of(engine: OneDevice, given: Feed) -> float:
        return engine.train_step(given).loss

    engine = one_device(spec(model=dropping, optimizer=lambda p: torch.optim.SGD(p, lr=0.0)))
    same = batch()
    first = outputs_of(engine, feed(same))
    torch.rand(100)
    assert outputs_of(engine, feed(same)) == first
    assert outputs_of(engine, feed(same, step=1)) != first
    assert outputs_of(engine, feed(same, rank=1, total=2, rows=12)) != first


def test_a_step_of_ones_own_gets_all_columns() -> None:
    seen: dict[str, torch.Size] = {}

    def step(model: nn.Module, columns: Mapping[str, torch.Tensor]) -> Terms:
        seen.update({name: value.shape for name, value in columns.items()})
        return Terms(loss(model(columns["x"]), columns["y"]), columns["w"])

    engine = one_device(spec(loss=None, step=step, inputs=(), targets=()))
    report = engine.train_step(feed(batch(w=np.full(12, 2.0, np.float32))))
    assert set(seen) == {"x", "y", "w"}
    assert report.weight == 24.0
    assert engine.evaluate_step(feed(batch(w=np.ones(12)))).totals["loss"][1] == 12.0


class Annealed:
    """A loss whose weight grows with the step."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def __call__(self, y_true: torch.Tensor, y_pred: torch.Tensor, *, step: int, total_steps: int) -> torch.Tensor:
        self.seen.append((step, total_steps))
        return loss(y_pred, y_true) * min(1.0, (step + 1) / 3)

    def as_step(self, model: nn.Module, columns: Any, *, step: int, total_steps: int) -> torch.Tensor:
        return self(columns["y"], model(columns["x"]), step=step, total_steps=total_steps)

    def in_turn(self, model: nn.Module, columns: Any, *, step: int, total_steps: int) -> Any:
        for name in ("first", "second"):
            yield name, self.as_step(model, columns, step=step, total_steps=total_steps)


@pytest.mark.parametrize("how", ["loss", "step", "in turn", "closure"])
def test_a_loss_or_step_gets_the_number_of_its_step(how: str) -> None:
    """In micro-batches, a warm-up, evaluations, of a loaded state too, and each call of an optimizer's closure."""
    annealed = Annealed()
    changes: dict[str, Any] = {"loss": annealed}
    if how in ("step", "in turn"):
        function = annealed.as_step if how == "step" else annealed.in_turn
        changes = {"loss": None, "step": function, "inputs": (), "targets": ()}
    if how == "in turn":
        changes["optimizer"] = {"first": adam, "second": adam}
    if how == "closure":
        changes["optimizer"] = lambda parameters: torch.optim.LBFGS(parameters, max_iter=3)
    engine, halves = one_device(spec(**changes, total_steps=7)), (batch(6), batch(6))
    engine.warm(feed(*halves, step=4))
    assert {*annealed.seen} == {(4, 7), (6, 7)}, "the check of a divided batch is made as in the last step too"
    for step in range(2):
        annealed.seen.clear()
        report = engine.train_step(feed(*halves, step=step))
        assert {*annealed.seen} == {(step, 7)}
        assert how == "closure" or len(annealed.seen) == (4 if how == "in turn" else 2)
    loaded = one_device(spec(**changes, total_steps=7))
    loaded.load(saved(engine))
    for each in (engine, loaded):
        annealed.seen.clear()
        each.evaluate_step(feed(batch(), step=9))
        assert {*annealed.seen} == {(2, 7)}
    assert report.loss > 0


class Centered(nn.Module):
    """A loss that subtracts the running mean of the outputs."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.register_buffer("center", torch.zeros(3))

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.center = self.center.lerp(outputs.detach().mean(0), self.rate)
        return loss(outputs - self.center, targets)


class Holding(Net):
    """Holds the loss, so that its buffers are saved."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = Centered(0.1)


def test_a_loss_with_a_buffer_that_changes_is_refused_unless_the_model_holds_it() -> None:
    for changing in (Centered(0.1), partial(Centered(0.1))):
        with pytest.raises(JobError, match=r"buffer 'center' of loss=Centered.* changes.*: hold it in the model"):
            one_device(spec(loss=changing)).warm(feed())
    model = Holding()
    for kept in (Centered(0.0), Centered(0.1).eval()):
        one_device(spec(loss=kept)).warm(feed())
    one_device(spec(model=lambda: model, loss=model.loss)).warm(feed())


def test_warm_keeps_every_bit_and_the_batch() -> None:
    def in_place(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        targets.clamp_(max=1)
        return loss(outputs, targets)

    engine = one_device(spec(model=batch_normed, loss=in_place))
    given, drawn, python = feed(), torch.get_rng_state(), random.getstate()
    numpy = np.random.get_state(legacy=False)
    before, y = saved(engine).files, given.parts[0][0].columns["y"].copy()
    engine.warm(given)
    assert saved(engine).files == before
    assert torch.equal(torch.get_rng_state(), drawn) and random.getstate() == python
    assert np.array_equal(np.random.get_state(legacy=False)["state"]["key"], numpy["state"]["key"])
    assert np.array_equal(given.parts[0][0].columns["y"], y)


def test_what_numpy_and_python_draw_in_a_step_follows_from_its_seed() -> None:
    drawn = []
    for _ in range(2):
        random.seed()
        one_device(spec()).train_step(feed())
        drawn.append((random.random(), np.random.rand()))
    assert drawn[0] == drawn[1]


def test_evaluation_sums_and_leaves_each_module_in_its_mode() -> None:
    def frozen() -> nn.Module:
        model = Net(middle=lambda: nn.Dropout(0.5))
        model.first.eval()
        return model

    engine = one_device(spec(model=frozen, metrics={"accuracy": accuracy}))
    parts = batch(8), batch(4, first=8)
    sums = engine.evaluate_step(feed(*parts))
    outputs = engine.predict_step(feed(*parts))["output"]
    targets = np.concatenate([part.columns["y"] for part in parts])
    assert sums.totals["accuracy"] == (float((outputs.argmax(1) == targets).sum()), 12.0)
    assert sums.totals["loss"][1] == 12.0
    assert [module.training for module in engine.replica.model.children()] == [False, True, True]


def test_a_model_in_evaluation_mode_is_trained_in_training_mode_and_parts_of_another_stay() -> None:
    whole, parts = one_device(spec(model=lambda: dropping().eval())), one_device(spec(model=_frozen_middle))
    whole.train_step(feed())
    assert all(module.training for module in whole.replica.model.modules())
    assert [module.training for module in parts.replica.model.children()] == [True, False, True]


def _frozen_middle() -> nn.Module:
    model = dropping()
    model.middle.eval()
    return model


class Merging(nn.Linear):
    """Holds an adapter that evaluation mode adds to the weight, as loralib's layers do."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.adapter = nn.Parameter(torch.ones(8))
        self.merged = False

    def train(self, mode: bool = True) -> nn.Module:
        if mode == self.merged:
            self.weight.data += -self.adapter.data if mode else self.adapter.data
            self.merged = not mode
        return super().train(mode)


def test_an_evaluation_ends_with_the_models_own_train() -> None:
    def held() -> nn.Module:
        model = Net(middle=Merging)
        model.first.eval()
        return model

    engine = one_device(spec(model=held))
    before = engine.replica.model.middle.weight.detach().clone()
    engine.evaluate_step(feed())
    middle = engine.replica.model.middle
    assert not middle.merged
    torch.testing.assert_close(middle.weight.detach(), before)
    assert [module.training for module in engine.replica.model.children()] == [False, True, True]


class Carrying(Net):
    """Gives a state too, by layers and not by samples, as an LSTM does."""

    def forward(self, x: torch.Tensor) -> Any:
        return {"logits": super().forward(x), "state": torch.zeros(2, len(x), 3), "cache": object()}


def test_predictions_of_outputs_that_are_not_row_by_row_say_which_can_be_asked_for() -> None:
    with pytest.raises(JobError, match=r"model's state has shape \(2, 12, 3\) .*columns=\('logits',\)"):
        one_device(spec(model=Carrying)).predict_step(feed())
    found = one_device(spec(model=Carrying, outputs=("logits",))).predict_step(feed())
    assert list(found) == ["logits"] and found["logits"].shape == (12, 3)


def test_losses_whose_sum_overflows_are_named() -> None:
    def large(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return outputs.sum(1) * 0.0 + torch.where(targets == 2, 3e38, 1.0)

    engine, data = one_device(spec(loss=large)), batch()
    expected = ", ".join(map(str, data.samples[data.columns["y"] == 2]))
    with pytest.raises(NonFiniteLoss, match=f"the loss became inf in step 1, in samples {expected}"):
        engine.train_step(feed(data))


def test_a_loss_that_is_not_finite_names_step_and_samples_and_changes_nothing() -> None:
    engine = one_device(spec(model=batch_normed, loss=lambda o, t: loss(o, t.clamp(max=2)) / (t != 7).float()))
    engine.train_step(feed())
    before = saved(engine).files
    given = batch(first=40)
    given.columns["y"][[3, 5]] = 7
    with pytest.raises(NonFiniteLoss, match=r"step 2, in samples 43, 45 .*data rank 0") as raised:
        engine.train_step(feed(given, step=1))
    assert "nothing of this step was applied" in raised.value.remedy
    assert saved(engine).files == before
    assert engine.train_step(feed(step=1)).step == 2


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model": lambda: "net"}, "model.. returned str: return a torch.nn.Module"),
        ({"model": lambda: nn.Tanh()}, "no parameter that requires a gradient"),
        ({"model": lambda: nn.LazyLinear(3)}, "has no shape yet"),
        ({"optimizer": lambda parameters: None}, "return a torch.optim.Optimizer"),
        ({"optimizer": lambda p: torch.optim.SGD([nn.Parameter(torch.ones(1))])}, "not a parameter of the model"),
    ],
)
def test_build_refuses(change: Mapping[str, Any], text: str) -> None:
    with pytest.raises(JobError, match=text):
        one_device(spec(**change))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"loss": lambda o, t: Terms(loss(o, t).mean(), 1.0)}, 'one loss per sample: use reduction="none"'),
        ({"loss": lambda o, t: loss(o, t)[:5]}, r"shape \(5,\) for a batch of 12"),
        ({"loss": lambda o, t: loss(o, t).detach()}, "no gradient"),
        ({"loss": lambda o, t: 1.0}, "returned float"),
        ({"loss": lambda o, t: Terms(loss(o, t), torch.ones(5))}, r"weights of shape \(5,\) for values of shape"),
        ({"inputs": ("xs",)}, "column 'xs', but there is none: did you mean 'x'"),
        ({"targets": ("labels",)}, "column 'labels', but there is none"),
    ],
)
def test_a_step_refuses(change: Mapping[str, Any], text: str) -> None:
    engine = one_device(spec(**change))
    before = saved(engine).files
    for call in (engine.warm, engine.train_step):
        with pytest.raises(JobError, match=text):
            call(feed())
    assert saved(engine).files == before


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"model": crash}, r"model\(\) raised LookupError"),
        ({"optimizer": crash}, r"optimizer\(\) raised LookupError"),
        ({"loss": crash}, "loss= raised LookupError"),
        ({"step": crash, "loss": None}, "step= raised LookupError"),
        ({"schedule": crash}, "schedule= raised LookupError"),
        ({"metrics": {"odd": crash}}, "metric 'odd' raised LookupError"),
    ],
)
def test_user_code_that_raises_shows_its_own_frames(change: Mapping[str, Any], what: str) -> None:
    with pytest.raises(UserCodeError, match=what) as raised:
        engine = one_device(spec(**change))
        engine.train_step(feed())
        engine.evaluate_step(feed())
    assert raised.value.where == "rank 0"
    assert 'raise LookupError("crashed on purpose")' in raised.value.detail
    assert f"{os.sep}strategies{os.sep}torch" not in raised.value.detail
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


def test_a_model_that_differentiates_is_told_how_to_in_evaluations() -> None:
    class Forces(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.requires_grad_()
            (slope,) = torch.autograd.grad(super().forward(x).sum(), x, create_graph=torch.is_grad_enabled())
            return slope[:, :3]

    engine = one_device(spec(model=Forces))
    engine.train_step(feed())
    for call in (engine.evaluate_step, engine.predict_step):
        with pytest.raises(UserCodeError, match=r"the model raised RuntimeError: .*does not require grad") as raised:
            call(feed())
        assert "wrap that part in torch.enable_grad()" in raised.value.remedy


def test_an_error_inside_backward_is_the_users() -> None:
    class Refusing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
            return values.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            raise LookupError("no way back")

    engine = one_device(spec(loss=lambda o, t: Refusing.apply(loss(o, t))))
    with pytest.raises(UserCodeError, match="the backward pass raised LookupError: no way back"):
        engine.train_step(feed())


def test_an_error_inside_the_optimizer_leaves_an_unsound_state() -> None:
    class Half(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise LookupError("half way")

    engine = one_device(spec(optimizer=lambda parameters: Half(parameters, lr=0.1)))
    good = engine.snapshot()
    with pytest.raises(UserCodeError, match="half way"):
        engine.train_step(feed())
    assert not engine.transfer(()).sound
    assert engine.restore(good).sound


def test_batch_norm_is_refused_where_it_would_differ() -> None:
    for how in (plan(ranks=2), plan(accumulation=2)):
        with pytest.raises(JobError, match=r"'middle' is a batch norm.*GroupNorm or LayerNorm"):
            one_device(spec(model=batch_normed), how)
    accepted = one_device(spec(model=batch_normed, inexact=("batch_norm",)), plan(ranks=2))
    assert accepted.transfer(()).sound
    assert (
        one_device(spec(model=lambda: Net(middle=lambda: nn.BatchNorm1d(8).eval())), plan(ranks=2)).transfer(()).sound
    )


def test_a_blocked_call_cannot_be_interrupted() -> None:
    assert one_device().interrupt(0.1) is False
