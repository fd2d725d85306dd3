"""Callbacks of torch jobs: the user's objects that rank 0 calls after steps, evaluations and checkpoints."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import cached_property
from typing import Any

import numpy as np

from trainwright.core.data import StepReport
from trainwright.core.errors import JobError, user_code
from trainwright.core.events import MediaLogged
from trainwright.core.random_state import GENERATORS_LOCK
from trainwright.core.redaction import redact

_METHODS = ("after_step", "after_epoch", "after_evaluation", "after_checkpoint", "after_recovery")
_REMEDY = "correct the callback, then resume the run (resume=True): it goes on from the last checkpoint"


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
        if not isinstance(text, str):
            raise JobError([f"log_text({name!r}): give a str, not {type(text).__name__}"])
        if len(text) > _MAX_CHARACTERS:
            problem = f"{len(text):,} characters are more than {_MAX_CHARACTERS:,}"
            raise JobError([f"log_text({name!r}): {problem}: log a part"])
        self._log(name, text=redact(text.encode(errors="replace").decode()))  # in characters that UTF-8 has

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
        UserCodeError: `make` raised.
    """

    def __init__(
        self,
        make: Callable[[], Sequence[Any]],
        show_model: Callable[[], AbstractContextManager[Any]],
        epoch_steps: int,
        emit: Callable[[MediaLogged], object],
    ) -> None:
        with user_code("callbacks()", "correct the function"):
            self._callbacks = _check_callbacks(make())
        self._show_model, self._epoch_steps, self._emit = show_model, epoch_steps, emit
        self._called = 0  # newest step whose calls have returned
        self._announced_checkpoints = set[str]()  # URIs

    @property
    def announces(self) -> bool:
        """Whether a callback has the method `after_checkpoint`."""
        return any(callable(getattr(callback, "after_checkpoint", None)) for callback in self._callbacks)

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
        """Call what follows a committed checkpoint, once for each. Raises UserCodeError."""
        if uri not in self._announced_checkpoints:
            self._call("after_checkpoint", step, {}, uri)
            self._announced_checkpoints.add(uri)

    def after_recovery(self, step: int, report: StepReport | None) -> None:
        """Call what follows a recovery at `step`; nothing at the start of a run. Raises UserCodeError.

        Args:
            report: of that step; an earlier process may have ended before its calls.
        """
        self._called = min(self._called, step)
        if step:
            self._call("after_recovery", step, {})
        if report is not None and self._called < step:
            self.after_step(report)

    def _call(self, method: str, step: int, metrics: Mapping[str, float], checkpoint: str = "") -> None:
        """Call a method of all callbacks that have it, in their order."""
        calls = [(callback, call) for callback in self._callbacks if callable(call := getattr(callback, method, None))]
        if not calls:
            return
        with GENERATORS_LOCK, ExitStack() as stack:
            context = CallbackContext(
                step=step, epoch=step // self._epoch_steps, metrics=metrics, checkpoint=checkpoint, emit=self._emit,
                show_model=lambda: stack.enter_context(self._show_model()),
            )  # fmt: skip
            for callback, call in calls:
                source = f"{type(callback).__name__}.{method}() of callbacks="
                with user_code(source, _REMEDY, where=f"rank 0, after step {step}"):
                    call(context)


def _check_callbacks(callbacks: Any) -> list[Any]:
    """Return the callbacks. Raises JobError for an object that is no callback."""
    if not isinstance(callbacks, list | tuple):
        raise JobError([f"callbacks() returned a {type(callbacks).__name__}: return a list of objects"])
    problems = []
    for item in callbacks:
        if isinstance(item, type):
            problems.append(f"callbacks() returned the class {item.__name__}: return objects, {item.__name__}()")
        elif not any(callable(getattr(item, method, None)) for method in _METHODS):
            problems.append(
                f"callbacks() returned a {type(item).__name__}, which has none of the methods that are called: give it "
                f"one of {', '.join(f'{method}(context)' for method in _METHODS)}"
            )
    if problems:
        raise JobError(problems)
    return list(callbacks)


# --- Images and texts that callbacks send to TensorBoard and the trackers ---------------------------------------------


_MAX_IMAGE_BYTES, _MAX_CHARACTERS = 4 << 20, 100_000
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # of Pillow, by channels


def encode_image(name: str, image: Any) -> dict[str, Any]:
    """Return the fields `image` (PNG), `width` and `height` of a MediaLogged. Raises JobError."""
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise JobError([f"log_image({name!r}) needs Pillow on the workers: pip install pillow"]) from error
    if hasattr(image, "savefig"):
        buffer = io.BytesIO()
        image.savefig(buffer, format="png")
        image = buffer.getvalue()
    if isinstance(image, bytes):
        try:
            image = Image.open(io.BytesIO(image))
        except OSError as error:
            raise JobError([f"log_image({name!r}): these bytes are not an image file that Pillow can read"]) from error
    if not isinstance(image, Image.Image):
        image = _from_array(name, image, Image)
    encoded = io.BytesIO()
    image.save(encoded, format="PNG")
    data = encoded.getvalue()
    if len(data) > _MAX_IMAGE_BYTES:
        size = f"{image.width} x {image.height} pixels, {len(data) / 2**20:.1f} MiB as PNG"
        raise JobError([f"log_image({name!r}): {size}, more than {_MAX_IMAGE_BYTES >> 20} MiB: log a smaller one"])
    return {"image": data, "width": image.width, "height": image.height}


def _from_array(name: str, image: Any, pillow: Any) -> Any:
    """Return an array or tensor as an image of Pillow."""
    is_torch = hasattr(image, "detach")
    if is_torch:
        image = image.detach().cpu()
        image = image.float() if image.is_floating_point() else image  # NumPy has no bfloat16
    pixels = np.asarray(image)
    if pixels.ndim == 3 and pixels.shape[0] in _MODES and (is_torch or pixels.shape[2] not in _MODES):
        pixels = np.moveaxis(pixels, 0, 2)
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    if pixels.dtype == object or pixels.ndim != 3 or pixels.shape[2] not in _MODES or not pixels.size:
        shape = f" of shape {tuple(np.shape(image))}" if hasattr(image, "shape") else ""
        shapes = "(height, width), (height, width, 1, 3 or 4) or (1, 3 or 4, height, width)"
        raise JobError([f"log_image({name!r}): {type(image).__name__}{shape} is not an image: give an array {shapes}"])
    if np.issubdtype(pixels.dtype, np.floating):
        lowest, highest = pixels.min(), pixels.max()
        if not (lowest >= -1e-6 and highest <= 1 + 1e-6):
            value_range = f"floats from {lowest:.3g} to {highest:.3g}"
            raise JobError([f"log_image({name!r}): {value_range}: give floats from 0 to 1, or uint8 from 0 to 255"])
        pixels = np.rint(pixels.clip(0.0, 1.0) * 255.0).astype(np.uint8)
    elif pixels.dtype == bool:
        pixels = pixels.astype(np.uint8) * 255
    elif pixels.dtype != np.uint8:
        raise JobError([f"log_image({name!r}): numbers are {pixels.dtype}: give uint8, or floats from 0 to 1"])
    pixels = np.ascontiguousarray(pixels)
    return pillow.frombytes(_MODES[pixels.shape[2]], (pixels.shape[1], pixels.shape[0]), pixels.tobytes())
