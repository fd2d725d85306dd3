"""Callbacks of torch jobs: the user's objects that rank 0 calls after steps, epochs, evaluations and recoveries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import cached_property
from typing import Any

from trainwright.core.data import StepReport
from trainwright.core.errors import JobError, user_code
from trainwright.core.random_state import GENERATORS_LOCK

_METHODS = ("after_step", "after_epoch", "after_evaluation", "after_recovery")
_REMEDY = "mend the callback, then resume the run (resume=True): it goes on from the last checkpoint"


class CallbackContext:
    """What the methods of a callback are given.

    Attributes:
        step: completed steps.
        epoch: completed epochs.
        metrics: in `after_step` the `loss`, `learning_rate` and `gradient_norm` (where it is measured) of the step, and
            the values of `tw.log`; in `after_epoch` those of its last step; in `after_evaluation` the evaluated loss
            and metrics; in `after_recovery` nothing.
    """

    def __init__(self, *, step: int, epoch: int, metrics: Mapping[str, float], show_model: Callable[[], Any]) -> None:
        self.step, self.epoch, self.metrics = step, epoch, dict(metrics)
        self._show_model = show_model

    @cached_property
    def model(self) -> Any:
        """The user's module as evaluations see it: in evaluation mode, without gradients, with averaged weights.

        It is that of the run: use it inside the method alone, and change nothing.

        Raises:
            JobError: the plan divides the model.
        """
        return self._show_model()


class Callbacks:
    """The callbacks of rank 0's process.

    Args:
        make: `callbacks=` of the job.
        show_model: gives a context with the user's module.
        epoch_steps: steps of an epoch.

    Raises:
        JobError: `make` does not return callbacks.
        UserCodeError: it raised.
    """

    def __init__(
        self,
        make: Callable[[], Sequence[Any]],
        show_model: Callable[[], AbstractContextManager[Any]],
        epoch_steps: int,
    ) -> None:
        with user_code("callbacks()", "mend the function"):
            self._callbacks = _checked(make())
        self._show_model, self._epoch_steps = show_model, epoch_steps
        self._called = 0  # newest step whose calls have returned

    def after_step(self, report: StepReport) -> None:
        """Call what follows a step. Raises UserCodeError."""
        metrics = {"loss": report.loss, "learning_rate": report.learning_rate, **report.logged.means()}
        if report.gradient_norm is not None:
            metrics["gradient_norm"] = report.gradient_norm
        self._call("after_step", report.step, metrics)
        if report.step % self._epoch_steps == 0:
            self._call("after_epoch", report.step, metrics)
        self._called = report.step

    def after_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Call what follows an evaluation. Raises UserCodeError."""
        self._call("after_evaluation", step, metrics)

    def after_recovery(self, step: int, report: StepReport | None) -> None:
        """Call what follows a recovery at `step`; nothing at the start of a run. Raises UserCodeError.

        Args:
            report: of that step, where another process than this one may have ended before it had made its calls.
        """
        self._called = min(self._called, step)
        if step:
            self._call("after_recovery", step, {})
        if report is not None and self._called < step:
            self.after_step(report)

    def _call(self, method: str, step: int, metrics: Mapping[str, float]) -> None:
        """Call a method of all callbacks that have it, in their order."""
        calls = [(each, call) for each in self._callbacks if callable(call := getattr(each, method, None))]
        if not calls:
            return
        with GENERATORS_LOCK, ExitStack() as shown:
            context = CallbackContext(
                step=step, epoch=step // self._epoch_steps, metrics=metrics,
                show_model=lambda: shown.enter_context(self._show_model()),
            )  # fmt: skip
            for each, call in calls:
                what = f"{type(each).__name__}.{method}() of callbacks="
                with user_code(what, _REMEDY, where=f"rank 0, after step {step}"):
                    call(context)


def _checked(made: Any) -> list[Any]:
    """Return the callbacks. Raises JobError where one is none."""
    if not isinstance(made, list | tuple):
        raise JobError([f"callbacks() returned a {type(made).__name__}: return a list of objects"])
    problems = []
    for each in made:
        if isinstance(each, type):
            problems.append(f"callbacks() returned the class {each.__name__}: return objects, {each.__name__}()")
        elif not any(callable(getattr(each, method, None)) for method in _METHODS):
            problems.append(
                f"callbacks() returned a {type(each).__name__}, which has none of the methods that are called: give it "
                f"one of {', '.join(f'{method}(context)' for method in _METHODS)}"
            )
    if problems:
        raise JobError(problems)
    return list(made)
