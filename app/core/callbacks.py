"""Callbacks of torch jobs: the user's objects that rank 0 calls after steps, evaluations and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import cached_property
from typing import Any

from trainwright.core.data import StepReport
from trainwright.core.errors import JobError, user_code
from trainwright.core.events import MediaLogged
from trainwright.core.media import checked_text, encode_image
from trainwright.core.random_state import GENERATORS_LOCK

_METHODS = ("after_step", "after_epoch", "after_evaluation", "after_checkpoint", "after_recovery")
_REMEDY = "mend the callback, then resume the run (resume=True): it goes on from the last checkpoint"


class CallbackContext:
    """What the methods of a callback are given.

    Attributes:
        step: completed steps.
        epoch: completed epochs.
        metrics: in `after_step` the `loss`, `learning_rate` and `gradient_norm` (where it is measured) of the step, and
            the values of `tw.log`; in `after_epoch` those of its last step; in `after_evaluation` the evaluated loss
            and metrics; in `after_checkpoint` and `after_recovery` nothing.
        checkpoint: URI of the checkpoint's folder, in `after_checkpoint`; empty elsewhere.
    """

    def __init__(
        self,
        *,
        step: int,
        epoch: int,
        metrics: Mapping[str, float],
        checkpoint: str,
        show_model: Callable[[], Any],
        emit: Callable[[MediaLogged], object],
    ) -> None:
        self.step, self.epoch, self.metrics, self.checkpoint = step, epoch, dict(metrics), checkpoint
        self._show_model, self._emit = show_model, emit
        self._logged = set[str]()

    @cached_property
    def model(self) -> Any:
        """The user's module as evaluations see it: in evaluation mode, without gradients, with averaged weights.

        It is that of the run: use it inside the method alone, and change nothing.

        Raises:
            JobError: the plan divides the model; or, in `after_checkpoint`, it is already that of a later step.
        """
        if self.checkpoint:
            problem = "context.model: training went on while the checkpoint was written"
            raise JobError([f"{problem}: use tw.load_model(job, step=context.step) in after_checkpoint"])
        return self._show_model()

    def log_image(self, name: str, image: Any) -> None:
        """Send an image to TensorBoard and the trackers, under this step.

        Args:
            image: array or tensor (height, width), (height, width, 1, 3 or 4) or (1, 3 or 4, height, width), of uint8
                or of floats from 0 to 1; or an image of Pillow, a figure of matplotlib, or the bytes of an image file.
                Where both orders are possible, a tensor of torch has its channels first, an array last.

        Raises:
            JobError: it is none of these, or has more than 4 MiB as PNG; the name was logged in this call; or Pillow
                is not installed.
        """
        self._log(name, **encode_image(name, image))

    def log_text(self, name: str, text: str) -> None:
        """Send a text to TensorBoard and the trackers, under this step.

        Raises:
            JobError: it is no text, or has more than 100,000 characters; or the name was logged in this call.
        """
        self._log(name, text=checked_text(name, text))

    def _log(self, name: str, **content: Any) -> None:
        if not isinstance(name, str) or not name.strip():
            raise JobError([f"log_image and log_text take a name of letters first, not {name!r}"])
        if name in self._logged:
            raise JobError([f"{name!r} is logged twice after step {self.step}: give each image and text its own name"])
        self._logged.add(name)
        self._emit(MediaLogged(step=self.step, name=name, **content))


class Callbacks:
    """The callbacks of rank 0's process.

    Args:
        make: `callbacks=` of the job.
        show_model: gives a context with the user's module.
        epoch_steps: steps of an epoch.
        emit: takes images and texts.

    Raises:
        JobError: `make` does not return callbacks.
        UserCodeError: it raised.
    """

    def __init__(
        self,
        make: Callable[[], Sequence[Any]],
        show_model: Callable[[], AbstractContextManager[Any]],
        epoch_steps: int,
        emit: Callable[[MediaLogged], object],
    ) -> None:
        with user_code("callbacks()", "mend the function"):
            self._callbacks = _checked(make())
        self._show_model, self._epoch_steps, self._emit = show_model, epoch_steps, emit
        self._called = 0  # newest step whose calls have returned
        self._checkpoints = set[str]()  # of which they were told

    @property
    def announces(self) -> bool:
        """Whether one of them wants to be told of checkpoints."""
        return any(callable(getattr(each, "after_checkpoint", None)) for each in self._callbacks)

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

    def after_checkpoint(self, step: int, uri: str) -> None:
        """Call what follows a committed checkpoint, once for each. Raises UserCodeError.

        Args:
            step: of the checkpoint.
            uri: of its folder.
        """
        if uri not in self._checkpoints:
            self._call("after_checkpoint", step, {}, uri)
            self._checkpoints.add(uri)

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

    def _call(self, method: str, step: int, metrics: Mapping[str, float], checkpoint: str = "") -> None:
        """Call a method of all callbacks that have it, in their order."""
        calls = [(each, call) for each in self._callbacks if callable(call := getattr(each, method, None))]
        if not calls:
            return
        with GENERATORS_LOCK, ExitStack() as shown:
            context = CallbackContext(
                step=step, epoch=step // self._epoch_steps, metrics=metrics, checkpoint=checkpoint, emit=self._emit,
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
