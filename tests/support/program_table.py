"""The table of `docs/programs.md`: the programs of `examples/programs`, their lines, and what the tests show of each.

`python -m tests.support.program_table` prints it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "examples" / "programs"
LIBRARIES = {"lightning": "Lightning", "hf_trainer": "Trainer"}
EXACT, SINGLE = 1e-9, 1e-6  # the models of transformers compute their loss in float32
_EVERY, _WHOLE = ("data_parallel", "sharded"), ("data_parallel",)


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program, and what holds of it.

    Attributes:
        name: of its module.
        what: it is, in the table.
        own: the function that makes its job.
        other: its version for another library, `lightning` or `hf_trainer`.
        layouts: plans of two workers that equal the plain loop.
        rtol: largest relative difference of a loss from the plain loop's.
    """

    name: str
    what: str
    own: str = "job"
    other: str = "lightning"
    layouts: tuple[str, ...] = _EVERY
    rtol: float = EXACT


PROGRAMS = (
    Program(name="mnist", what="MNIST: `StepLR` by epoch, Adadelta"),
    Program(name="imagenet", what="ImageNet: ResNet, batch norm, top-1 and top-5", layouts=_WHOLE),
    Program(name="dcgan", what="DCGAN: two optimizers, batch norm", layouts=_WHOLE),
    Program(name="vae", what="variational auto-encoder"),
    Program(
        name="word_language_model",
        what="word language model: LSTM, carried hidden state",
        layouts=_WHOLE,
    ),
    Program(name="super_resolution", what="super resolution, PSNR"),
    Program(name="siamese_network", what="siamese network"),
    Program(name="time_sequence", what="time sequences: LBFGS", layouts=_WHOLE),
    Program(name="regression", what="regression: `ReduceLROnPlateau`"),
    Program(name="graph_attention", what="graph attention network"),
    Program(name="vision_transformer", what="vision transformer: warm-up, average of weights, label smoothing"),
    Program(
        name="forward_forward",
        what="forward-forward: a loss for each layer",
        layouts=_WHOLE,
    ),
    Program(
        name="text_classification",
        what="text classifier: BERT, `outputs.loss`",
        other="hf_trainer",
        layouts=_EVERY,
        rtol=SINGLE,
    ),
    Program(name="causal_language_model", what="causal language model, packed", other="hf_trainer", rtol=SINGLE),
    Program(name="sft", what="SFT: the loss of answers", other="hf_trainer", rtol=SINGLE),
    Program(name="lora", what="LoRA, `save_frozen=False`", other="hf_trainer", rtol=SINGLE),
    Program(name="knowledge_distillation", what="knowledge distillation", own="distillation"),
    Program(name="simclr", what="SimCLR: `tw.gather`"),
    Program(name="segmentation", what="segmentation: class weights, IoU"),
    Program(
        name="translation",
        what="translation: length buckets, clipping, early stopping",
    ),
)


# --- Lines ------------------------------------------------------------------------------------------------------------


def lines(name: str, versions: Iterable[str]) -> dict[str, int]:
    """Return the lines of code of each version of a program.

    They are those of its function and of the definitions beside it which it uses and not all versions do. Blank lines,
    comments, docstrings and imports do not count.
    """
    text = (FOLDER / f"{name}.py").read_text()
    found = _definitions(ast.parse(text), text)
    used = {version: _used(version, found) for version in versions}
    shared = set.intersection(*used.values())
    return {version: sum(found[each][1] for each in names - shared) for version, names in used.items()}


Definitions = dict[str, tuple[ast.AST, int]]


def _definitions(module: ast.Module, text: str) -> Definitions:
    """The functions, classes and constants of a module by name, each with its lines of code."""
    found: Definitions = {}
    for node in module.body:
        if isinstance(node, ast.ImportFrom) and (FOLDER / f"{node.module}.py").exists() and node.module != "toy_data":
            other = (FOLDER / f"{node.module}.py").read_text()
            theirs = _definitions(ast.parse(other), other)
            found |= {each: theirs[each] for name in node.names for each in _used(name.name, theirs)}
        named = [node] if isinstance(node, ast.FunctionDef | ast.ClassDef) else getattr(node, "targets", [])
        for target in named:
            for each in ast.walk(target) if node is not target else [target]:
                name = getattr(each, "name", None) or getattr(each, "id", None)
                if name:
                    found[name] = node, _count(node, text)
    return found


def _used(name: str, found: Definitions) -> set[str]:
    """The definitions that one of them uses, itself included."""
    used, open_names = set[str](), {name}
    while open_names:
        used |= open_names
        walked = [each.id for one in open_names for each in ast.walk(found[one][0]) if isinstance(each, ast.Name)]
        open_names = set(walked) & found.keys() - used
    return used


def _count(node: ast.stmt, text: str) -> int:
    left_out = set[int]()
    for each in ast.walk(node):
        docstring = isinstance(each, ast.Expr) and isinstance(getattr(each.value, "value", None), str)
        if docstring or isinstance(each, ast.Import | ast.ImportFrom):
            left_out |= set(range(each.lineno, (each.end_lineno or 0) + 1))
    numbered = enumerate(text.splitlines()[node.lineno - 1 : node.end_lineno], node.lineno)
    return sum(number not in left_out and line.strip()[:1] not in ("", "#") for number, line in numbered)


# --- The table --------------------------------------------------------------------------------------------------------


def table() -> str:
    """Return the rows, and below them how many programs are no longer than the other library's."""
    rows, shorter = [], 0
    for number, program in enumerate(PROGRAMS, 1):
        counts = lines(program.name, (program.own, program.other, "plain"))
        shorter += counts[program.own] <= counts[program.other]
        rows.append(f"| {number} | {_cells(program, counts)} |")
    columns = ("", "program", "trainwright", "library", "plain", "equal to", "plans of 2 workers")
    head = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    summary = f"{shorter} of {len(PROGRAMS)} have no more lines than with Lightning or the Trainer."
    return "\n".join([*head, *rows, "", summary])


def _cells(program: Program, counts: Mapping[str, int]) -> str:
    cells = (
        f"[{program.what}](../examples/programs/{program.name}.py)", counts[program.own],
        f"{counts[program.other]} ({LIBRARIES[program.other]})", counts["plain"], f"{program.rtol:.0e}",
        ", ".join(f"`{layout}`" for layout in program.layouts),
    )  # fmt: skip
    return " | ".join(map(str, cells))


if __name__ == "__main__":
    print(table())
