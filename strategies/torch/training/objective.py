"""The objective: the loss of a micro-batch as terms, and the sums that are reduced with the gradients.

A step's gradient is that of sum(values * weights) / W over the whole global batch, with W the sum of all weights. Each
rank's micro-batches contribute sum(values * weights) * world / rows, so that DDP's average over `world` ranks is
already right where all weights are 1 (W = rows); otherwise one pass scales the gradients by rows / W.

W, the sum of losses and the stop request must be summed over the ranks too, before anything is applied. DDP reduces
them with the gradients: `sums_parameter` is one more parameter, whose gradient is set to these sums. DDP averages, so
they are multiplied by the world size first. The fourth entry counts ranks where a parameter got no gradient. Three sums
of the gradient noise of the previous step, or zeros, follow, so that each step reduces the same number of entries. The
last entries are the sums and weights of the values that `tw.log` records.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from trainwright.core.data import Batch, Feed, Terms
from trainwright.core.engine import ModelSpec
from trainwright.core.errors import JobError, TrainwrightError, nearest
from trainwright.core.loss_api import BATCH_LOSS, gather_with, log, log_name_problem, log_with, outputs_first
from trainwright.core.metric_states import is_stateful
from trainwright.core.plan import Plan
from trainwright.strategies.common.user_code_errors import loss_broadcast_problem
from trainwright.strategies.torch.tensor_parallel.sharded_tensor import full_tensor
from trainwright.strategies.torch.torch_compat import accumulate_gradients, version_of
from trainwright.strategies.torch.torch_errors import TorchUserCode
from trainwright.strategies.torch.training import batch_tensors as batches
from trainwright.strategies.torch.training.batch_losses import (
    WHOLE_BATCH,
    BatchLayout,
    BatchMean,
    BatchRows,
    GroupFactory,
    LossCall,
    batch_mean,
    check_divisible,
    mean_message,
    per_sample,
    to_device,
    unchanged_buffers,
)
from trainwright.strategies.torch.training.batch_tensors import to_tensor
from trainwright.strategies.torch.training.model_blocks import SelectiveRecompute
from trainwright.strategies.torch.training.new_model import AUTOCAST_DTYPES

_Function = Callable[[Any, Any], Any]
_FunctionAt = Callable[[int], _Function]  # by the number of completed steps
_LOSS = "loss"  # key of the loss in a dict that step= returned
_UNUSED_INDEX = 3  # of the sums: whether a parameter got no gradient


@dataclass(frozen=True, kw_only=True)
class MicroBatchShare:
    """One micro-batch with its place in the global batch."""

    batch: Batch  # the micro-batch
    data_rank: int  # the data rank that computes it
    rows: int  # real samples in the global batch
    stop_requested: bool = False  # the rank requests to stop; set in one of its micro-batches
    zero_weight: bool = False  # all weights count as 0
    layout: BatchLayout = WHOLE_BATCH  # how the global batch is divided


_MAX_PREFETCHED_BYTES = 256 << 20  # of a feed; larger feeds are copied when a micro-batch needs them


@dataclass(frozen=True, kw_only=True)
class JobFunctions:
    """Calls the functions of a job."""

    spec: ModelSpec  # the job's functions and columns
    device: torch.device  # where the tensors are
    # the type to compute in where that is safe (`torch.autocast`); None for the model's own
    autocast: torch.dtype | None
    where: str  # the rank, for errors
    selective_recompute: bool = False  # whether backward computes attention's scores again
    group: GroupFactory | None = None  # makes the process group of a batch's data ranks; None where there is none
    divided: bool = False  # ranks hold parts of the model
    checking: bool = False  # refuse a loss that would depend on how the batch is divided
    # takes the name and the terms of each logged value; None where nothing is recorded
    record: Callable[[str, Terms], None] | None = None

    @classmethod
    def on_host(cls, spec: ModelSpec, plan: Plan, where: str) -> JobFunctions:
        """Return the functions as they are called in host memory, before there is a replica."""
        autocast = AUTOCAST_DTYPES.get(plan.precision)
        return cls(spec=spec, device=torch.device("cpu"), autocast=autocast, where=where)

    def precision(self) -> AbstractContextManager[Any]:
        """Return the autocast context of forward and loss."""
        return torch.autocast(self.device.type, self.autocast) if self.autocast else nullcontext()

    def saved_tensor_context(self) -> AbstractContextManager[Any]:
        """Return the context in which activations are saved for backward."""
        return SelectiveRecompute() if self.selective_recompute else nullcontext()

    def tensors(self, batch: Batch) -> batches.Tensors:
        """Return the columns that the job's functions take; for `step=`, all columns that can be tensors."""
        if batch.on_device is not None and (tensors := batch.on_device.take()) is not None:
            return cast(batches.Tensors, tensors)
        names = None if self.spec.step else dict.fromkeys((*self.spec.inputs, *self.spec.targets))
        return batches.to_tensors(self.spec.collation(batch), names, self.device)

    def inputs(self, batch: Batch) -> batches.Tensors:
        """Return the columns that the model takes."""
        return batches.to_tensors(self.spec.collation(batch), self.spec.inputs, self.device)

    def target_columns(self, batch: Batch) -> batches.Tensors:
        """Return the columns that loss and metrics take."""
        return batches.to_tensors(self.spec.collation(batch), dict.fromkeys(self.spec.targets), self.device)

    def call_model(self, model: nn.Module, inputs: Sequence[Tensor], **options: Any) -> Any:
        """Call the model with the input columns, in their order, and with more keyword arguments."""
        if self.spec.keywords:
            return model(**dict(zip(self.spec.keywords, inputs, strict=True)), **options)
        return model(*inputs, **options)

    def outputs(self, model: nn.Module, columns: batches.Tensors, **options: Any) -> Any:
        """Return the model's outputs for the input columns."""
        with TorchUserCode("the model", self.where):
            return self.call_model(model, [columns[name] for name in self.spec.inputs], **options)

    def targets(self, columns: batches.Tensors) -> Any:
        """Return the target column, or a tuple where there are several."""
        targets = tuple(columns[name] for name in self.spec.targets)
        return targets[0] if len(targets) == 1 else targets

    def loss(
        self, model: nn.Module, columns: batches.Tensors, batch: Batch, layout: BatchLayout = WHOLE_BATCH
    ) -> Terms:
        """Return the loss terms of a micro-batch, sample weights included; weights never require a gradient."""
        with self.precision(), self.saved_tensor_context():
            if not self.spec.step:
                return self.loss_of(self.outputs(model, columns), columns, batch, layout)
            return self._terms(
                "step=", partial(partial, _step_loss, self, model), dict(columns), (), batch, layout, model
            )

    def _check(
        self,
        what: str,
        function_at: _FunctionAt,
        given: Any,
        targets: Any,
        batch: Batch,
        layout: BatchLayout,
        model: nn.Module | None,
    ) -> str:
        """Return why a loss could not be checked; empty where it was. Raises as `check_divisible`.

        A loss that takes the step number is also checked at the last step: one of its parts may have the weight 0 at
        first.
        """
        parameters = () if model is None else tuple(model.parameters())
        last = max(layout.step, self.spec.total_steps - 1) if self.spec.takes_step else layout.step
        calls = [
            LossCall(
                what=what if step == layout.step else f"{what} in the last step, {step + 1},",
                function=partial(self._measured, what, function_at(step)), given=given, targets=targets,
                rows=batch.rows, parameters=parameters, divided=self.divided,
            )
            for step in dict.fromkeys((layout.step, last))
        ]  # fmt: skip
        modes = (nullcontext,) if model is None else (partial(evaluation_mode, model), partial(_eval_layers, model))
        compiled = self.spec.compile == "inductor"  # it would compile again for each number of rows
        with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
            problems = [check_divisible(call, layout, self.where, modes) for call in calls]
        return next(filter(None, problems), "")

    def update_losses(
        self, model: nn.Module, columns: batches.Tensors, batch: Batch, layout: BatchLayout, names: Sequence[str]
    ) -> Iterator[tuple[str, Terms]]:
        """Yield the optimizer name and the loss terms of each update of a step; the step goes on after the update."""
        assert self.spec.step is not None, "several optimizers need step="
        if self.checking:  # the sum of the losses
            with self.precision():
                self._check("step=", partial(partial, _step_loss, self, model), dict(columns), (), batch, layout, model)
        rows = BatchRows(batch, layout, self.group, self.where)
        with TorchUserCode("step=", self.where):
            updates = self.spec.numbered(self.spec.step, layout.step)(model, dict(columns))
        if not inspect.isgenerator(updates):
            problem = f"step= returned {type(updates).__name__}, and the job has several optimizers: {_YIELD}"
            raise JobError([problem], where=self.where)
        while True:
            with (
                self.precision(),
                TorchUserCode("step=", self.where),
                gather_with(rows.gather),
                self._logging(rows, batch),
            ):
                item = next(updates, None)
            if item is None:
                return
            name, loss = _named_loss(item, self.where)
            if name not in names:
                raise JobError([f"step= yielded {name!r}: {nearest(name, names)}"], where=self.where)
            result = batch_mean("step=", loss, self.spec.weight, columns, self.where)
            if isinstance(result, BatchMean):
                if not layout.whole and self.spec.weight is None and BATCH_LOSS not in self.spec.inexact:
                    problem = (
                        f"step= yielded one number for {name!r}, and workers or micro-batches have parts of the batch: "
                        'yield one loss per sample (reduction="none"), or accept inexact=("batch_loss",)'
                    )
                    raise JobError([problem], where=self.where)
                result = result.of_rows(batch.rows)
            yield name, _loss_terms("step=", rows.own(result), batch, self.where)

    def metric(
        self, name: str, outputs: Any, columns: batches.Tensors, batch: Batch, layout: BatchLayout = WHOLE_BATCH
    ) -> Terms:
        """Return the terms of a metric."""
        what = f"metric {name!r}"
        return self._terms(what, lambda _: self._functions[what], outputs, self.targets(columns), batch, layout)

    def loss_of(self, outputs: Any, columns: batches.Tensors, batch: Batch, layout: BatchLayout = WHOLE_BATCH) -> Terms:
        """Return the loss terms of some outputs."""
        function_at = partial(self.spec.numbered, self._functions["loss="])
        return self._terms("loss=", function_at, outputs, self.targets(columns), batch, layout)

    @cached_property
    def mean_metrics(self) -> frozenset[str]:
        """Names of the metrics that are means over samples; all other metrics have state."""
        return frozenset(name for name, metric in self.spec.metrics.items() if not is_stateful(metric))

    @cached_property
    def _functions(self) -> dict[str, _Function]:
        """The job's loss and metrics as functions of (outputs, targets), by their names in errors."""
        metrics = {f"metric {name!r}": self.spec.metrics[name] for name in self.mean_metrics}
        functions = {"loss=": self.spec.loss, **metrics}
        has_weight = self.spec.weight is not None
        return {
            what: outputs_first(function if has_weight and what == "loss=" else per_sample(function))
            for what, function in ((what, to_device(each, self.device)) for what, each in functions.items())
            if function is not None
        }

    def _terms(
        self,
        what: str,
        function_at: _FunctionAt,
        given: Any,
        targets: Any,
        batch: Batch,
        layout: BatchLayout,
        model: nn.Module | None = None,
    ) -> Terms:
        """Call a loss, a metric or, with its `model`, a step; return the terms of this rank's rows."""
        unchecked_reason = self._check(what, function_at, given, targets, batch, layout, model) if self.checking else ""
        function = function_at(layout.step)
        if what in ("loss=", "step="):
            function = partial(self._measured, what, function)
        rows = BatchRows(batch, layout, self.group, self.where)
        with TorchUserCode(what, self.where), gather_with(rows.gather), self._logging(rows, batch):
            result = function(given, targets)
        if isinstance(result, BatchMean):
            if unchecked_reason and result.count is None:
                problem = f"it could not be compared: {unchecked_reason}"
                raise JobError([mean_message(what, problem, layout)], where=self.where)
            result = result.of_rows(batch.rows)
        compared = (given, targets, result.values if isinstance(result, Terms) else result)
        comparable = all(isinstance(each, Tensor) for each in compared)
        if comparable and (problem := loss_broadcast_problem(what, *(each.shape for each in compared))):
            raise JobError([problem], where=self.where)
        return _loss_terms(what, rows.own(result), batch, self.where)

    def _logging(self, rows: BatchRows, batch: Batch) -> AbstractContextManager[Any]:
        """Return the context in which `tw.log` records values of a micro-batch."""
        record = self.record

        def record_value(name: str, value: Any) -> None:
            assert record is not None, "the context is for a recorder"
            if problem := log_name_problem(name, self.spec.metrics):
                raise JobError([problem], where=self.where)
            record(name, _logged_terms(f"tw.log({name!r})", rows.own(value), batch, self.where))

        return nullcontext() if record is None else log_with(record_value)

    def _measured(self, what: str, function: _Function, given: Any, targets: Any) -> Any:
        """Call a loss or a step; one number for the batch is returned as BatchMean."""
        names = self.spec.targets
        columns = (
            given if what == "step=" else dict(zip(names, (targets,) if len(names) == 1 else targets, strict=True))
        )
        return batch_mean(what, function(given, targets), self.spec.weight, columns, self.where)


@dataclass(frozen=True, kw_only=True)
class BackwardRoots:
    """The roots of a micro-batch's backward and their gradients."""

    values: Tensor  # losses, with their graph
    slopes: Tensor  # derivative of the objective by each loss
    sums_parameter: Tensor  # a view of `Objective.sums_parameter` in the graph
    sums: Tensor  # its gradient

    def backward(self) -> None:
        """Add to the gradients of all parameters; in DDP, outside no_sync(), reduce them."""
        accumulate_gradients((self.values, self.sums_parameter), (self.slopes, self.sums))

    def backward_losses_first(self, find_unused: Callable[[], Sequence[nn.Parameter]]) -> None:
        """Run `backward` for the losses, then for the sums, which tell all ranks of parameters without a gradient.

        DDP waits for the gradients of the parameters that `find_unused` returns: they get zeros.
        """
        accumulate_gradients((self.values,), (self.slopes,))
        unused = find_unused()
        if unused:
            self.sums[_UNUSED_INDEX] = 1.0
        accumulate_gradients((self.sums_parameter, *unused), (self.sums, *map(torch.zeros_like, unused)))


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and restore the mode of each module at the end.

    Both call `train()`, which a module may override, such as to merge and split weights.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        model.train(modes[0][1])
        for module, training in modes:
            module.training = training


@contextmanager
def _eval_layers(model: nn.Module) -> Iterator[None]:
    """Put layers of torch, such as dropout and batch norm, into evaluation mode; other modules keep their mode."""
    layers = [each for each in model.modules() if each.training and type(each).__module__.startswith("torch.nn.")]
    for layer in layers:
        layer.training = False
    try:
        yield
    finally:
        for layer in layers:
            layer.training = True


def sums_of(terms: Terms) -> Tensor:
    """Return the sum of weighted values and that of the weights, in float64: (2,)."""
    weights = terms.weights.double()
    return torch.stack(((terms.values.double() * weights).sum(), weights.sum()))


class _LoggedValues:
    """Sums of the values that `tw.log` recorded in a micro-batch.

    Attributes:
        names: of the values, in the order of their sums; None until the first micro-batch has ended.
        first_names: names in the first micro-batch.
    """

    def __init__(self, where: str) -> None:
        self.names: tuple[str, ...] | None = None
        self.first_names: set[str] = set()
        self._where = where
        self._sums: dict[str, Tensor] = {}

    def add(self, name: str, terms: Terms) -> None:
        """Add the terms of a value. Raises JobError for a name that is not among `names`."""
        if self.names is None:
            self.first_names.add(name)
            return
        if name not in self.names:
            problem = (
                f"tw.log({name!r}) was not called for the first micro-batch, whose names are those of all steps: call "
                "it for every batch, with tw.Terms(values, weights) and weights of 0 where nothing is to count"
            )
            raise JobError([problem], where=self._where)
        sums = sums_of(terms)
        self._sums[name] = self._sums[name] + sums if name in self._sums else sums

    def take(self, like: Tensor) -> list[Tensor]:
        """Return the sum and the weight of each value, in the type and on the device of a tensor, and forget them."""
        sums, self._sums = self._sums, {}
        zero = like.new_zeros(2)
        return [sums[name].to(like) if name in sums else zero for name in self.names or ()]

    def forget(self) -> None:
        """Forget the sums of a micro-batch that an error ended."""
        self._sums.clear()


class DevicePrefetcher:
    """Copies the batches of feeds to the device, on a GPU during the step before theirs. For one thread."""

    def __init__(self, caller: JobFunctions, device: torch.device) -> None:
        self._caller = caller
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def __call__(self, feed: Feed) -> Feed:
        """Return the feed with its tensors; without them where they would be large, or the step will raise an error.

        A collate function of the user is called in the step, which seeds its random numbers.
        """
        arrays = [array for part in feed.parts for batch in part for array in batch.columns.values()]
        if self._caller.spec.collation.function or sum(map(batches.size_bytes, arrays)) > _MAX_PREFETCHED_BYTES:
            return feed
        try:
            return replace(feed, parts=tuple(tuple(map(self._copy_batch, part)) for part in feed.parts))
        except (TrainwrightError, torch.OutOfMemoryError):
            return feed

    def _copy_batch(self, batch: Batch) -> Batch:
        if self._stream is None:
            return replace(batch, on_device=batches.DeviceColumns(self._caller.tensors(batch), None))
        with torch.cuda.stream(self._stream):
            tensors = self._caller.tensors(batch)
            return replace(batch, on_device=batches.DeviceColumns(tensors, self._stream.record_event()))


class Objective(nn.Module):
    """Model, loss and `sums_parameter` as one module, so that DDP sees every use of every parameter.

    Args:
        world: ranks over which the gradients are averaged.

    Attributes:
        sums_parameter: always zero; its gradient is (sum of weights, sum of weighted losses, stop requests, ranks with
            a parameter without a gradient, noise sums, sum and weight of each logged value).
        logged: the values that the job logs.
        micro_losses: the step's micro-batches so far, with their losses.
        changed: columns of these micro-batches that the job's functions changed in place, so that the step cannot be
            repeated. A change of a copy of the columns, as on a GPU, does not count.
        noise_sums: three sums of gradient noise that the next micro-batch adds, once.
        scale: the factor of the gradients.
    """

    def __init__(self, model: nn.Module, caller: JobFunctions, world: int) -> None:
        super().__init__()
        self.model = model
        self.logged = _LoggedValues(caller.where)
        self.caller = replace(caller, record=self.logged.add)
        self.world = world
        # In float64 where parameters in float64 are trained, so that the sums share their buckets.
        trained = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
        kind = torch.float64 if torch.float64 in trained else torch.float32
        self.sums_parameter = nn.Parameter(torch.zeros(7, dtype=kind, device=caller.device))
        self.scale = 1.0
        self.micro_losses: list[tuple[MicroBatchShare, Tensor]] = []
        self.changed: set[str] = set()
        self._no_noise_sums = torch.zeros(3, dtype=kind, device=caller.device).unbind()
        self.noise_sums: tuple[Tensor, ...] = self._no_noise_sums
        self._stop_values = torch.tensor([0.0, 1.0], dtype=kind, device=caller.device).unbind()

    @contextmanager
    def checking(self, division: bool) -> Iterator[None]:
        """Refuse, inside this context, a loss with state and, with `division`, one that depends on the layout."""
        caller, spec = self.caller, self.caller.spec
        self.caller = replace(caller, checking=division)
        try:
            what, function = ("step=", spec.step) if spec.step else ("loss=", spec.loss)
            with unchanged_buffers(what, function, self.model, caller.where):
                yield
        finally:
            self.caller = caller

    def begin(self) -> None:
        """Forget the sums and losses of the previous step."""
        self.sums_parameter.grad = None
        self.micro_losses.clear()
        self.changed.clear()
        self.logged.forget()

    def add_logged_names(self, names: Collection[str]) -> None:
        """Add logged values to the sums of all later steps. Call it before DDP wraps this module."""
        self.logged.names = tuple(names)
        if names:
            self.sums_parameter = nn.Parameter(self.sums_parameter.new_zeros(7 + 2 * len(names)))

    def forward(self, share: MicroBatchShare) -> tuple[Tensor, Tensor, Tensor]:
        """Return losses and weights, both (samples,) or (samples, k), and `sums_parameter`.

        Raises:
            JobError: the loss is of the wrong shape or has no gradient.
            UserCodeError: the user's code raised.
        """
        columns = self.caller.tensors(share.batch)
        versions = {name: (tensor, version_of(tensor)) for name, tensor in columns.items()}
        values, weights = self.caller.loss(self.model, columns, share.batch, share.layout)
        for name, (tensor, version) in versions.items():
            if version_of(tensor) != version and batches.shares_memory(tensor, share.batch):
                self.changed.add(name)
        self._check(values)
        return values, weights, self.sums_parameter.view(-1)

    def output_roots(self, share: MicroBatchShare, outputs: Any) -> BackwardRoots:
        """Return the roots of backward, given a micro-batch's outputs. Raises as `forward`."""
        columns = self.caller.target_columns(share.batch)
        with self.caller.precision():
            values, weights = self.caller.loss_of(outputs, columns, share.batch, share.layout)
        self._check(values)
        return self.backward_roots(share, values, weights, self.sums_parameter)

    def add_sums(self, roots: BackwardRoots) -> None:
        """Add a micro-batch's sums to the gradient of `sums_parameter` where no backward does."""
        earlier_sums = self.sums_parameter.grad
        self.sums_parameter.grad = roots.sums if earlier_sums is None else earlier_sums + roots.sums

    def add_stop_request(self, stop_requested: bool) -> None:
        """Set the sums of a rank without losses: only its stop request."""
        sums = torch.stack((*self._no_noise_sums[:2], self._stop_values[stop_requested])) * self.world
        self.sums_parameter.grad = nn.functional.pad(sums, (0, len(self.sums_parameter) - len(sums)))

    def _check(self, values: Tensor) -> None:
        if not values.requires_grad:
            raise JobError(
                ["the loss has no gradient: compute it from the model's outputs without detach(), item() or no_grad()"],
                where=self.caller.where,
            )

    def backward_roots(
        self, share: MicroBatchShare, values: Tensor, weights: Tensor, sums_parameter: Tensor
    ) -> BackwardRoots:
        """Return the roots of backward, given the result of `forward`, and record the losses."""
        losses = values.detach()
        self.micro_losses.append((share, losses))
        dtype = self.sums_parameter.dtype
        weight, loss = weights.sum(), torch.dot(losses.reshape(-1), weights.reshape(-1))
        noise_sums = self.noise_sums
        if noise_sums is not self._no_noise_sums:
            self.noise_sums = self._no_noise_sums
        stop_requested, unused = self._stop_values[share.stop_requested], self._no_noise_sums[0]
        sums = torch.stack((weight, loss, stop_requested, unused, *noise_sums)).to(dtype)
        if self.logged.names:
            sums = torch.cat((sums, *self.logged.take(sums)))
        sums.mul_(self.world)
        factor = 0.0 if share.zero_weight else self.scale * self.world / max(share.rows, 1)
        return BackwardRoots(values=values, slopes=weights * factor, sums_parameter=sums_parameter, sums=sums)


_YIELD = 'write `yield "generator", losses` for each update, with the name of the optimizer'


def _named_loss(item: Any, where: str) -> tuple[str, Any]:
    """Return the name and the loss that a step yielded. Raises JobError."""
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str):
        return item
    raise JobError([f"step= yielded {type(item).__name__}: {_YIELD}"], where=where)


def _step_loss(caller: JobFunctions, model: nn.Module, step: int, columns: Any, _: Any) -> Any:
    """Call the job's step; return its loss, or the sum of the losses that it yields, and log its other values."""
    assert caller.spec.step is not None, "the job has step="
    result = _sum_of_losses(caller.spec.numbered(caller.spec.step, step)(model, dict(columns)), caller.where)
    if type(result) is not dict:  # outputs of Hugging Face models are of subclasses of dict
        return result
    if _LOSS not in result:
        problem = f'step= returned a dict with the keys {", ".join(map(repr, result))}: add "loss", one per sample'
        raise JobError([problem], where=caller.where)
    for name, value in result.items():
        if name != _LOSS:
            log(name, value)
    return result[_LOSS]


def _sum_of_losses(result: Any, where: str) -> Any:
    """Return the sum of the losses that a step yields, for an evaluation; any other result unchanged."""
    if not inspect.isgenerator(result):
        return result
    losses = []
    for name, loss in (_named_loss(item, where) for item in result):
        log(name, loss)
        losses.append(loss)
    shapes = {tuple(getattr(loss, "shape", ())) if isinstance(loss, Tensor) else type(loss).__name__ for loss in losses}
    if len(shapes) != 1 or not isinstance(losses[0], Tensor):
        problem = "step= yields losses of different kinds, which an evaluation cannot add: yield tensors of one shape"
        raise JobError([problem], where=where)
    return torch.stack(losses).sum(0)


# --- Results of losses and metrics ------------------------------------------------------------------------------------


def _loss_terms(what: str, result: Any, batch: Batch, where: str) -> Terms:
    """Return the values of a loss or metric with their weights, the weights of the samples included.

    Values of weight 0 do not count, even if they are not finite.

    Args:
        what: names the function, such as `loss=`.
        result: its result: (samples,) or (samples, ...) values, or Terms.
        batch: the micro-batch, with (samples,) weights.

    Raises:
        JobError: the result is not a tensor, was reduced, or has another first dimension than the batch.
    """
    values = result.values if isinstance(result, Terms) else result
    if problem := _values_problem(what, values, batch.rows):
        raise JobError([problem], where=where)
    values = full_tensor(values)
    values = values if values.dtype in (torch.float32, torch.float64) else values.float()
    weights = to_tensor("weights", batch.weights, values.device).to(values.dtype)
    if values.dim() > 1:
        weights = _rowwise(weights, values).expand_as(values)
    if isinstance(result, Terms):
        user_weights = full_tensor(torch.as_tensor(result.weights, device=values.device).detach()).to(values.dtype)
        weights = weights * _expanded(what, user_weights, values, where)
    if isinstance(result, Terms) or np.count_nonzero(batch.weights) < batch.rows:
        values = values.masked_fill(weights == 0.0, 0.0)
    return Terms(values, weights)


def _logged_terms(what: str, value: Any, batch: Batch, where: str) -> Terms:
    """Return a logged value as terms: a single number counts once for each row. Raises JobError where it cannot be."""
    values, weights = value if isinstance(value, Terms) else (value, None)
    try:
        values = full_tensor(torch.as_tensor(values).detach())
    except (TypeError, ValueError, RuntimeError):
        raise JobError([f"{what} was given {type(values).__name__}: give a number or a tensor"], where=where) from None
    if values.dim() == 0:
        values = values.expand(batch.rows)
    if len(values) != batch.rows:
        shape = f"shape {tuple(values.shape)} for {batch.rows} rows"
        raise JobError([f"{what} was given {shape}: give one number, or a value for each sample"], where=where)
    return _loss_terms(what, values if weights is None else Terms(values, weights), batch, where)


def _values_problem(what: str, values: Any, rows: int) -> str:
    """Return why values are not one or more for each sample; empty where they are."""
    if getattr(values, "loss", values) is None:
        return f"{what} returned {type(values).__name__} without a loss: give the model its labels"
    if not isinstance(values, Tensor):
        return f"{what} returned {type(values).__name__}: return a tensor with one value per sample"
    if values.dim() == 0:
        per_sample_loss = 'one loss per sample: use reduction="none"'
        advice = "one value per sample, without a mean" if what.startswith("metric") else per_sample_loss
        return f"{what} returned a single number: return {advice}, or Terms(values, weights)"
    if values.shape[0] == rows:
        return ""
    return (
        f"{what} returned shape {tuple(values.shape)} for a batch of {rows} rows: the first dimension must be the "
        "batch, one loss per sample; for tokens or pixels return (samples, k) or Terms(values, weights)"
    )


def _expanded(what: str, weights: Tensor, values: Tensor, where: str) -> Tensor:
    """Return the user's weights in the shape of the values. Raises JobError where they do not fit."""
    has_leading_shape = weights.shape == values.shape[: weights.dim()]
    try:
        return (_rowwise(weights, values) if has_leading_shape else weights).expand_as(values)
    except RuntimeError:
        shapes = f"{tuple(weights.shape)} for values of shape {tuple(values.shape)}"
        problem = f"{what} has weights of shape {shapes}: give each value its weight"
        raise JobError([problem], where=where) from None


def _rowwise(weights: Tensor, values: Tensor) -> Tensor:
    """Return weights of the leading dimensions with dimensions of 1 appended, so that they broadcast to the values."""
    return weights.reshape(*weights.shape, *(1 for _ in range(values.dim() - weights.dim())))
