"""`tw.gather`: a loss or step sees the rows of the whole global batch, wherever its parts are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from trainwright.core.errors import JobError

Value = TypeVar("Value")
_gather: ContextVar[Callable[[Any], Any] | None] = ContextVar("gather", default=None)


def gather(tensor: Value) -> Value:
    """Return the rows of the whole global batch, of which each data rank computes a part; gradients flow back.

    For losses whose samples are compared with each other, such as CLIP's and SimCLR's. It may be called in `loss=`,
    `step=` and metrics. Rows come rank by rank, the ranks' own in their order, so that several gathered tensors fit
    each other; samples of weight 0 are left out. The function then returns one value for each row of the global batch,
    of which each rank takes its own, or one for each of its own rows. On one device, and outside of a run, it returns
    the tensor as it is.

        def clip(outputs, targets):
            image, text = (tw.gather(each) for each in outputs)
            scores, labels = image @ text.t(), torch.arange(len(image))
            return sum(cross_entropy(each, labels, reduction="none") for each in (scores, scores.t())) / 2

    Args:
        tensor: a torch tensor (rows, ...), with this rank's rows of the micro-batch.

    Raises:
        JobError: the batch is cut into micro-batches, which never see each other, or this strategy cannot gather.
    """
    current = _gather.get()
    if type(tensor).__module__.partition(".")[0] in ("tensorflow", "keras"):
        raise JobError(["tw.gather is for torch tensors: it has no counterpart for TensorFlow models"])
    return tensor if current is None else current(tensor)


@contextmanager
def gathering(by: Callable[[Any], Any]) -> Iterator[None]:
    """Within, `gather` is done by a function."""
    token = _gather.set(by)
    try:
        yield
    finally:
        _gather.reset(token)
