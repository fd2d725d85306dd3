"""Learning rates of the torch engines: every scheduler of torch counts as in a plain loop, and goes on from a state."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import pytorch_optimizer
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

import trainwright as tw
from tests.support.planner_cases import PROFILE, decide
from tests.support.torch_engines import Files, Net, adam, batch, feed, loss, one_device, saved, spec
from trainwright.core.engine import takes_optimizer
from trainwright.core.errors import JobError, PlanError, UserCodeError
from trainwright.core.job import Job

STEPS = 12  # four epochs of three


def groups(parameters: Any) -> torch.optim.Optimizer:
    """Weights and biases in a group each, by their shapes."""
    kinds = [[each for each in parameters if (each.dim() > 1) == matrix] for matrix in (True, False)]
    return torch.optim.SGD([{"params": kinds[0], "lr": 0.3}, {"params": kinds[1], "lr": 0.1}], momentum=0.9)


def in_sequence(optimizer: Any) -> schedulers.LRScheduler:
    parts = [schedulers.LinearLR(optimizer, total_iters=3), schedulers.CosineAnnealingLR(optimizer, 9)]
    return schedulers.SequentialLR(optimizer, parts, milestones=[3])


def chained(optimizer: Any) -> schedulers.LRScheduler:
    return schedulers.ChainedScheduler(
        [schedulers.ConstantLR(optimizer, 0.5, total_iters=4), schedulers.ExponentialLR(optimizer, 0.9)],
        optimizer=optimizer,
    )


def by_group(optimizer: Any) -> schedulers.LRScheduler:
    return schedulers.LambdaLR(optimizer, [lambda step: 0.9**step, lambda step: 1.0 / (1 + step)])


MAKERS: dict[str, Callable[..., Any]] = {
    "lambda": by_group,
    "multiplicative": lambda optimizer: schedulers.MultiplicativeLR(optimizer, lambda step: 0.95),
    "step": lambda optimizer: schedulers.StepLR(optimizer, 5, 0.5),
    "milestones": partial(schedulers.MultiStepLR, milestones=[2, 5, 5, 7], gamma=0.5),
    "polynomial": partial(schedulers.PolynomialLR, total_iters=10, power=2.0),
    "cosine": partial(schedulers.CosineAnnealingLR, T_max=7),
    "restarts": partial(schedulers.CosineAnnealingWarmRestarts, T_0=3, T_mult=2),
    "cyclic": partial(schedulers.CyclicLR, base_lr=0.01, max_lr=0.1, step_size_up=3, mode="exp_range", gamma=0.9),
    "custom cycle": partial(schedulers.CyclicLR, base_lr=0.01, max_lr=0.1, step_size_up=2, scale_fn=lambda x: 0.8**x),
    "one cycle": partial(schedulers.OneCycleLR, max_lr=[0.5, 0.2], total_steps=STEPS),
    "sequential": in_sequence,
    "chained": chained,
}


def job(**changes: Any) -> Any:
    return spec(**{"optimizer": groups, "total_steps": STEPS, "epochs": 4, **changes})


def lower(parameters: Any) -> torch.optim.Optimizer:
    """As `groups`, with a fifth of the rates."""
    made = groups(parameters)
    for group in made.param_groups:
        group["lr"] /= 5
    return made


def plain(
    make: Callable[..., Any], by: str = "step", steps: int = STEPS, make_optimizer: Callable[..., Any] = groups
) -> list[list[float]]:
    """The rates of each step of a loop as torch's documentation has it."""
    optimizer = make_optimizer(list(Net().parameters()))
    scheduler, rates = make(optimizer), []
    for step in range(steps):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        if by == "step" or (step + 1) % 3 == 0:
            scheduler.step()
    return rates


def rates_of(engine: Any, first: int = 0, steps: int = STEPS, **given: Any) -> list[list[float]]:
    """The rates of an engine's steps; the first group's are what it reports."""
    found = []
    for step in range(first, steps):
        groups, told = engine.replica.optimizer.param_groups, []
        engine.replica.optimizer.register_step_pre_hook(
            lambda *_, groups=groups, told=told: told.append([g["lr"] for g in groups])
        )
        report = engine.train_step(feed(step=step, **given))
        found.append(told[-1])
        assert report.learning_rate == told[-1][0]
    return found


@pytest.mark.parametrize("by", ["step", "epoch"])
@pytest.mark.parametrize("name", MAKERS)
def test_a_scheduler_counts_as_in_a_plain_loop_and_goes_on_from_files_and_copies(name: str, by: str) -> None:
    how = job(schedule=MAKERS[name], schedule_by=by)
    unbroken, stopped = one_device(how), one_device(how)
    assert rates_of(unbroken) == plain(MAKERS[name], by)
    rates_of(stopped, steps=5)
    files, copy = saved(stopped), stopped.snapshot()
    assert json.loads(files.files["state.json"])["scheduler"]
    for resumed in (loaded(how, files), restored(how, copy)):
        assert rates_of(resumed, first=5) == plain(MAKERS[name], by)[5:]
        assert saved(resumed).files == saved(unbroken).files


def loaded(how: Any, files: Files) -> Any:
    engine = one_device(how)
    engine.load(files)
    return engine


def restored(how: Any, copy: Any) -> Any:
    engine = one_device(how)
    engine.restore(copy)
    return engine


def test_a_scheduler_that_takes_a_metric() -> None:
    """It gets the evaluation before a step with that step; a state from before the step needs it again."""
    make = partial(schedulers.ReduceLROnPlateau, patience=0, factor=0.5)
    how = job(schedule=make, schedule_metric="loss")
    told = {3: 1.0, 6: 2.0, 9: 3.0}

    def train(engine: Any, first: int, last: int) -> list[list[float]]:
        each = (
            rates_of(engine, step, step + 1, metrics={"loss": told[step]} if step in told else None)
            for step in range(first, last)
        )
        return [rates for (rates,) in each]

    unbroken, stopped = one_device(how), one_device(how)
    rates = train(unbroken, 0, STEPS)
    assert rates == [[0.3, 0.1]] * 6 + [[0.15, 0.05]] * 3 + [[0.075, 0.025]] * 3
    train(stopped, 0, 9)
    resumed = loaded(how, saved(stopped))
    assert train(resumed, 9, STEPS) == rates[9:]
    assert saved(resumed).files == saved(unbroken).files


def test_a_run_with_more_steps_or_another_scheduler_has_the_rates_of_the_new_one() -> None:
    cycle = partial(schedulers.OneCycleLR, max_lr=[0.5, 0.2])
    shorter = one_device(job(schedule=cycle, total_steps=6, epochs=2))
    rates_of(shorter, steps=6)
    longer = loaded(job(schedule=cycle), saved(shorter))
    assert rates_of(longer, first=6) == plain(partial(cycle, total_steps=STEPS))[6:]
    for by, before in (("step", lambda step, total: 0.1), ("epoch", MAKERS["step"]), ("step", MAKERS["one cycle"])):
        files, whole = saved(trained(before, 6)), one_device(job(schedule=MAKERS["chained"], schedule_by=by))
        changed = loaded(job(schedule=MAKERS["chained"], schedule_by=by), files)
        assert rates_of(changed, first=6) == rates_of(whole)[6:]
        own, other = (each.replica.optimizer.param_groups for each in (changed, whole))
        assert [group["momentum"] for group in own] == [group["momentum"] for group in other] == [0.9, 0.9]
        assert (
            saved(loaded(job(schedule=MAKERS["chained"], schedule_by=by), saved(changed))).files == saved(changed).files
        )


def to_zero(optimizer: Any, num_training_steps: int) -> Any:
    """As the linear schedule of transformers: the number of steps is in a function, which no state holds."""
    return schedulers.LambdaLR(optimizer, partial(left, num_training_steps))


def left(steps: int, step: int) -> float:
    return max(0.0, 1 - step / steps)


def test_a_length_that_is_filled_in_counts_where_epochs_are_added() -> None:
    shorter = one_device(job(schedule=to_zero, total_steps=6, epochs=2))
    rates_of(shorter, steps=6)
    longer = loaded(job(schedule=to_zero), saved(shorter))
    assert rates_of(longer, first=6) == plain(partial(to_zero, num_training_steps=STEPS))[6:]


class Relaxing(schedulers.LRScheduler):
    """Changes a setting that torch's schedulers do not."""

    def get_lr(self) -> list[float]:  # type: ignore[override]
        for group in self.optimizer.param_groups:
            group["weight_decay"] *= 0.5
        return [group["lr"] for group in self.optimizer.param_groups]


def test_another_setting_that_a_scheduler_multiplies_is_counted_again_and_those_of_the_optimizer_are_kept() -> None:
    def prodigy(parameters: Any, lr: float = 1.0) -> torch.optim.Optimizer:
        return pytorch_optimizer.Prodigy(parameters, lr=lr, weight_decay=0.5)

    stopped = one_device(job(schedule=Relaxing, optimizer=prodigy))
    rates_of(stopped, steps=6)
    resumed = loaded(job(schedule=Relaxing, optimizer=partial(prodigy, lr=0.5)), saved(stopped))
    (before,), (after,) = (each.replica.optimizer.param_groups for each in (stopped, resumed))
    assert before["d"] > before["d0"], "the optimizer changes it"
    assert {**after, "params": [], "lr": 1.0, "initial_lr": 1.0} == {**before, "params": []}


@pytest.mark.parametrize("name", MAKERS)
def test_an_edited_rate_counts_in_a_run_that_is_resumed(name: str) -> None:
    changed = loaded(job(schedule=MAKERS[name], optimizer=lower), saved(trained(MAKERS[name], 6)))
    assert rates_of(changed, first=6) == plain(MAKERS[name], make_optimizer=lower)[6:]


def test_without_its_scheduler_a_run_that_is_resumed_has_the_rates_and_momenta_of_its_optimizer() -> None:
    for now in (None, lambda step, total: 1.0):
        changed = loaded(job(schedule=now), saved(trained(MAKERS["one cycle"], 10)))
        assert rates_of(changed, first=10) == [[0.3, 0.1]] * 2
        assert [group["momentum"] for group in changed.replica.optimizer.param_groups] == [0.9, 0.9]


def test_a_scheduler_that_follows_a_metric_keeps_its_reductions_of_another_rate() -> None:
    plateau = partial(schedulers.ReduceLROnPlateau, patience=0, factor=0.5)
    stopped = one_device(job(schedule=plateau, schedule_metric="loss"))
    for step, told in enumerate((1.0, 2.0, 3.0)):
        rates_of(stopped, step, step + 1, metrics={"loss": told})
    files = saved(stopped)
    resumed = loaded(job(schedule=plateau, schedule_metric="loss", optimizer=lower), files)
    assert rates_of(resumed, first=3, steps=4, metrics={"loss": 2.0}) == [
        [pytest.approx(0.3 / 40), pytest.approx(0.0025)]
    ]
    started = loaded(job(schedule=plateau, schedule_metric="accuracy"), files)
    assert rates_of(started, first=3, steps=4, metrics={"accuracy": 9.0}) == [[0.3, 0.1]]


def test_a_checkpoint_that_does_not_say_how_its_scheduler_was_made_is_restored_as_it_is() -> None:
    unbroken, stopped = (trained(MAKERS["chained"], steps) for steps in (0, 5))
    files = saved(stopped)
    facts = json.loads(files.files["state.json"])
    del facts["scheduler"]["made as"]
    files.files["state.json"] = json.dumps(facts).encode()
    rates_of(unbroken)
    resumed = loaded(job(schedule=MAKERS["chained"]), files)
    assert rates_of(resumed, first=5) == plain(MAKERS["chained"])[5:]
    assert saved(resumed).files == saved(unbroken).files


def trained(schedule: Any, steps: int) -> Any:
    engine = one_device(job(schedule=schedule))
    rates_of(engine, steps=steps)
    return engine


def test_a_rank_that_goes_back_has_the_counts_of_that_step() -> None:
    how = job(schedule=partial(schedulers.ReduceLROnPlateau, patience=1, factor=0.5), schedule_metric="loss")
    engine = one_device(how)
    rates_of(engine, steps=1, metrics={"loss": 1.0})
    copy = engine.snapshot()
    for _ in range(2):
        assert rates_of(engine, first=1, steps=2, metrics={"loss": 2.0}) == [[0.3, 0.1]], "the first bad evaluation"
        engine.restore(copy)


def test_a_skipped_step_counts() -> None:
    engine = one_device(job(schedule=MAKERS["step"]))
    nothing = feed(batch(), step=0, rows=12)
    for part in nothing.parts[0]:
        part.weights[:] = 0.0
    engine.train_step(nothing)
    assert engine.replica.step == 1
    assert rates_of(engine, first=1) == plain(MAKERS["step"])[1:]


def test_functions_for_each_group_and_by_epoch() -> None:
    first, second = (lambda step, total: 1.0 - step / total), (lambda step, total: 0.5)
    assert rates_of(one_device(job(schedule=(first, second)))) == [[0.3 * (1 - n / STEPS), 0.05] for n in range(STEPS)]
    with pytest.raises(JobError, match="schedule= gives 1 of the 2 rates"):
        one_device(job(schedule=(first,)))
    by_epoch = described(schedule=first, schedule_by="epoch", epochs=4).model_spec(STEPS).schedule
    assert [by_epoch(step, STEPS) for step in range(STEPS)] == [1 - step // 3 / 4 for step in range(STEPS)]  # type: ignore[operator, misc]


def test_the_length_of_the_run_is_filled_in() -> None:
    def warmed(optimizer: Any, num_warmup_steps: int, num_training_steps: int) -> Any:
        assert num_training_steps == STEPS
        return schedulers.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / num_warmup_steps))

    rates = rates_of(one_device(job(schedule=partial(warmed, num_warmup_steps=4))))
    assert [first for first, _ in rates[:5]] == pytest.approx([0.075, 0.15, 0.225, 0.3, 0.3])
    one_cycle = partial(schedulers.OneCycleLR, max_lr=0.1)
    assert rates_of(one_device(job(schedule=one_cycle))) == plain(partial(one_cycle, total_steps=STEPS))
    fixed = partial(one_cycle, epochs=2, steps_per_epoch=STEPS)
    assert rates_of(one_device(job(schedule=fixed))) == plain(fixed)


@pytest.mark.parametrize(
    ("schedule", "by_optimizer"),
    [
        (lambda step, total: 1.0, False),
        (tw.schedules.cosine, False),
        (partial(tw.schedules.cosine, warmup=0.1), False),
        (lambda *given: 1.0, False),
        (schedulers.StepLR, True),
        (partial(schedulers.StepLR, step_size=3), True),
        (lambda made: schedulers.StepLR(made, 3), True),
        (None, False),
    ],
)
def test_which_functions_make_schedulers(schedule: Any, by_optimizer: bool) -> None:
    assert takes_optimizer(schedule) is by_optimizer


class Remembering(schedulers.LRScheduler):
    """Keeps what no file can hold."""

    def get_lr(self) -> list[float]:  # type: ignore[override]
        self.seen = object()
        return [group["lr"] for group in self.optimizer.param_groups]


def other_optimizer(optimizer: Any) -> Any:
    return schedulers.StepLR(adam([nn.Parameter(torch.ones(1))]), 3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schedule": lambda optimizer: 0.5}, r"takes one argument, the optimizer, and returned float"),
        (
            {"schedule": schedulers.ReduceLROnPlateau},
            "ReduceLROnPlateau, which takes a metric: set schedule_metric=",
        ),
        ({"schedule": MAKERS["step"], "schedule_metric": "loss"}, "made StepLR, which takes no metric"),
        ({"schedule": Remembering}, "the state of Remembering cannot be saved: 'seen' is a object"),
        ({"schedule": other_optimizer}, "a scheduler of another optimizer"),
    ],
)
def test_schedules_that_do_not_fit_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError, match=words):
        one_device(job(**changes))


def test_a_scheduler_that_cannot_be_made() -> None:
    with pytest.raises(UserCodeError, match=r"schedule= raised TypeError: .*step_size"):
        one_device(job(schedule=schedulers.StepLR))


DATA = tw.datasets.table({"x": [[0.0] * 4] * 12, "y": [0] * 12})
BY_LOSS: dict[str, Any] = {"schedule": MAKERS["step"], "schedule_metric": "loss", "evaluate": DATA}


def described(**changes: Any) -> Job:
    fields = {"name": "rates", "model": Net, "optimizer": groups, "loss": loss, "train": DATA, "inputs": "x"}
    return Job(**{**fields, "targets": "y", "batch_size": 4, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schedule": other_optimizer(None)}, "lambda optimizer: StepLR(optimizer, ...)"),
        ({"schedule_by": "epoch"}, 'schedule_by="epoch" needs schedule='),
        ({"schedule": MAKERS["step"], "schedule_metric": "loss"}, "computed on the evaluation set: set evaluate="),
        ({**BY_LOSS, "schedule_metric": "acuracy", "metrics": {"accuracy": loss}}, "'accuracy'"),
        ({**BY_LOSS, "schedule": lambda step, total: 1.0}, "partial(ReduceLROnPlateau"),
        ({"schedule": (MAKERS["step"],)}, "has a scheduler for one parameter group"),
        ({**BY_LOSS, "schedule_by": "epoch"}, "counts evaluations"),
    ],
)
def test_options_that_contradict_each_other(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError) as refused:
        described(**changes)
    assert words in str(refused.value)


def test_parameter_servers_and_keras_models_refuse_a_scheduler() -> None:
    with pytest.raises(PlanError, match="its servers do not have schedule= with a scheduler"):
        decide(schedule=MAKERS["step"], strategy="parameter_server", workers=2)
    with pytest.raises(PlanError, match="is for torch models"):
        decide(profile=replace(PROFILE, framework="tensorflow"), schedule=(lambda step, total: 1.0,))
    assert decide(schedule=MAKERS["step"], strategy="data_parallel", workers=2).chosen.strategy == "data_parallel"


class Preconditioned(torch.optim.Optimizer):
    """Keeps lists and dicts of tensors."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                own = self.state[each]
                if not own:
                    sides = (
                        [torch.eye(size, dtype=each.dtype) for size in each.shape] if each.dim() == 2 else [[], None]
                    )
                    own.update(step=0, GG=sides, more={"mean": torch.zeros_like(each), "decay": 0.9})
                own["step"] += 1
                own["more"]["mean"].mul_(own["more"]["decay"]).add_(each.grad)
                update = own["more"]["mean"]
                if each.dim() == 2:
                    left, right = own["GG"]
                    left.add_(each.grad @ each.grad.T)
                    right.add_(each.grad.T @ each.grad)
                    update = torch.linalg.solve(left, update) @ torch.linalg.inv(right)
                each.sub_(update, alpha=group["lr"])


def by_name(named_parameters: Any) -> torch.optim.Optimizer:
    """Weights decay, biases do not."""
    kinds: dict[bool, list[Any]] = {True: [], False: []}
    for name, parameter in named_parameters:
        kinds[name.endswith("weight")].append(parameter)
    return torch.optim.AdamW(
        [{"params": kinds[True], "weight_decay": 0.1}, {"params": kinds[False], "weight_decay": 0.0}], lr=0.01
    )


def muon(named_parameters: Any) -> torch.optim.Optimizer:
    """As many use it: matrices alone; the model has no others."""
    return torch.optim.Muon([parameter for _, parameter in named_parameters], lr=0.02)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "by name": by_name,
    "named": lambda named_parameters: torch.optim.Adam(named_parameters, lr=0.01),
    "fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "for each": partial(torch.optim.AdamW, lr=0.01, foreach=True, amsgrad=True),
    "tensor rate": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.01), foreach=False),
    "nested": Preconditioned,
    "adafactor": torch.optim.Adafactor,
    "shampoo": lambda parameters: pytorch_optimizer.Shampoo(parameters, lr=0.01),
    "soap": lambda parameters: pytorch_optimizer.SOAP(parameters, lr=0.01, precondition_frequency=2),
    "lion": lambda parameters: pytorch_optimizer.Lion(parameters, lr=0.001),
    "prodigy": lambda parameters: pytorch_optimizer.Prodigy(parameters),
    "ademamix": lambda parameters: pytorch_optimizer.AdEMAMix(parameters, lr=0.01),
    **({"muon": muon} if hasattr(torch.optim, "Muon") else {}),
}


def matrices() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(4, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_of_the_ecosystem_equal_a_plain_loop_and_go_on_bit_by_bit(name: str) -> None:
    make, model = OPTIMIZERS[name], matrices if name == "muon" else seeded
    how = spec(optimizer=make, model=model)
    unbroken, stopped, own = one_device(how), one_device(how), model()
    optimizer = make([*own.named_parameters()] if name in ("by name", "named", "muon") else [*own.parameters()])
    for step in range(6):
        unbroken.train_step(feed(step=step))
        one = batch(first=step * 100).columns
        optimizer.zero_grad()
        loss(own(torch.from_numpy(one["x"])), torch.from_numpy(one["y"])).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    for ours, theirs in zip(unbroken.replica.model.parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    for step in range(3):
        stopped.train_step(feed(step=step))
    for resumed in (loaded(how, saved(stopped)), restored(how, stopped.snapshot())):
        for step in range(3, 6):
            resumed.train_step(feed(step=step))
        assert saved(resumed).files == saved(unbroken).files


def seeded() -> nn.Module:
    torch.manual_seed(4)
    return Net()
