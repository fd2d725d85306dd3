"""Write a trained torch model for use elsewhere: its weights, its traced forward, or a folder of its own library."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.core.engine import MASK_SUFFIX, ModelSpec
from trainwright.core.errors import JobError, MissingFramework
from trainwright.strategies.torch.torch_compat import tree_unflatten
from trainwright.strategies.torch.torch_errors import summarize_error
from trainwright.strategies.torch.training.batch_tensors import to_tensors
from trainwright.strategies.torch.training.evaluation import flat_outputs
from trainwright.strategies.torch.training.objective import evaluation_mode

_FORMATS = "`.safetensors`, `.pt`, `.pt2`, `.onnx`, or a folder that ends in `/`"
_ONNX_PACKAGES = ("onnx", "onnxscript")
_ONE_FILE_BYTES = 1 << 30  # larger ONNX models have their weights in a second file: protobuf's limit is 2 GiB
_REASON = 400  # letters of an error that is shown


def export(model: nn.Module, path: str, spec: ModelSpec) -> None:
    """Write a model in the format of the path's ending.

    | ending         | holds                                                                                  |
    |----------------|----------------------------------------------------------------------------------------|
    | `.safetensors` | the state dict                                                                         |
    | `.pt`          | the state dict, by `torch.save`                                                        |
    | `.pt2`         | the forward pass, by `torch.export`; called as the job calls the model                 |
    | `.onnx`        | the forward pass; inputs are named as the columns, outputs as those of predictions     |
    | `/`            | a folder that the model's own `save_pretrained` writes, as of Hugging Face             |

    A traced forward takes any number of rows and, where the model allows it, any width of a padded column. It computes
    as in evaluation, in the model's own types.

    Args:
        spec: has the inputs; its `sample` is read for `.pt2` and `.onnx` only.

    Raises:
        JobError: the ending is not one of these, or the model cannot be written in this format.
        MissingFramework: a package for ONNX is not installed.
        DataError, UserCodeError: the sample cannot be read.
    """
    if path.endswith("/"):
        save = getattr(model, "save_pretrained", None)
        if save is None:
            what = f"a folder is written by the model's own save_pretrained(), and {type(model).__name__} has none"
            raise JobError([f"{path!r}: {what}: export to {_FORMATS.rpartition(',')[0]}"])
        save(path)
    elif path.endswith(".safetensors"):
        import safetensors.torch  # nothing else in the engines needs it

        safetensors.torch.save_model(model, path)
    elif path.endswith(".pt"):
        torch.save(model.state_dict(), path)
    elif path.endswith(".pt2"):
        torch.export.save(_traced(model, path, spec), path)
    elif path.endswith(".onnx"):
        _write_onnx(model, path, spec)
    else:
        raise JobError([f"{path!r}: a torch model is exported to {_FORMATS}"])


@contextmanager
def _tensor_outputs(model: nn.Module) -> Iterator[None]:
    """Let the model return a tensor, or tensors by the names of predictions; others, such as caches, are left out."""

    def named(_: nn.Module, __: Any, outputs: Any) -> Any:
        if isinstance(outputs, Tensor):
            return outputs
        return {name: value for name, value in flat_outputs(outputs) if isinstance(value, Tensor)}

    handle = model.register_forward_hook(named)
    try:
        yield
    finally:
        handle.remove()


def _traced(model: nn.Module, path: str, spec: ModelSpec) -> torch.export.ExportedProgram:
    """Return the model's forward pass for any number of rows. Raises JobError where it cannot be traced."""
    if not spec.inputs:
        raise JobError([f"{path!r}: inputs= is missing: name the columns given to the model, which its trace needs"])
    assert spec.sample is not None, "a job has data"
    columns = to_tensors(spec.collation(spec.sample()), spec.inputs, torch.device("cpu"))
    given = [torch.cat((columns[name], columns[name])) for name in spec.inputs]  # of a single row, 1 would be fixed
    rows, widths = torch.export.Dim("rows"), _any_width(spec)
    shapes: Any = torch.export.ShapesCollection()  # type: ignore[no-untyped-call]
    for name, value in zip(spec.inputs, given, strict=True):
        shapes[value] = {0: rows, 1: torch.export.Dim.AUTO} if name in widths else {0: rows}
    positional = () if spec.keywords else tuple(given)
    named = dict(zip(spec.keywords, given, strict=True)) if spec.keywords else {}
    try:
        with evaluation_mode(model), _tensor_outputs(model), torch.no_grad():
            return torch.export.export(model, positional, named, dynamic_shapes=shapes)
    except Exception as error:
        told = ", ".join(
            f"{name} {(*value.shape,)} {str(value.dtype).removeprefix('torch.')}"
            for name, value in zip(spec.inputs, given, strict=True)
        )
        raise JobError(
            [
                f"{path!r}: torch.export cannot trace the model for any number of rows, given {told}: "
                f"{summarize_error(error, limit=_REASON)}. Let forward decide by no values and fix no number of rows, "
                "or export to `.safetensors`"
            ]
        ) from error


def _any_width(spec: ModelSpec) -> set[str]:
    """Return the input columns whose width is that of the longest row of a batch."""
    padded = {name for name, pad in spec.collation.pad.items() if pad.length is None}
    return {name for name in spec.inputs if name in padded or name.removesuffix(MASK_SUFFIX) in padded}


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the warnings of torch about itself, such as operators of packages that are not installed."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        log.setLevel(level)


def _write_onnx(model: nn.Module, path: str, spec: ModelSpec) -> None:
    missing = [name for name in _ONNX_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingFramework(
            f"{path!r}: ONNX needs {' and '.join(missing)}: pip install {' '.join(_ONNX_PACKAGES)}", where="export"
        )
    program = _traced(model, path, spec)
    outputs = program.call_spec.out_spec
    assert outputs is not None, "a model has outputs"
    names = [name for name, _ in flat_outputs(tree_unflatten(range(outputs.num_leaves), outputs))]
    try:
        with _quiet():
            written = torch.onnx.export(
                program, input_names=[*spec.inputs], output_names=names, dynamo=True, verbose=False
            )
    except torch.onnx.OnnxExporterError as error:
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error  # its own text is advice
        raise JobError(
            [f"{path!r}: ONNX cannot express the model: {summarize_error(cause, limit=_REASON)}. Export to `.pt2`"]
        ) from error
    assert written is not None, "dynamo=True returns the program"
    size_bytes = sum(each.nbytes for each in program.state_dict.values())
    written.save(path, external_data=size_bytes > _ONE_FILE_BYTES)
