"""Draw the pictures of the strategies, and of the growth of compute: `python docs/images/drawings.py`.

They are SVG with colours for light and dark pages. A test compares the files with what this script draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

from trainwright.strategies.cost_model.pipeline_schedules import Operation, required_operation, stage_operations

STYLE = """
text { font: 13px system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', Arial, sans-serif; fill: #1b2430 }
.quiet { fill: #566170; font-size: 12px }
.own { fill: #d6e4fd; stroke: #2563c9 }
.back { fill: #cfeadf; stroke: #12805f }
.server { fill: #ffe9c7; stroke: #b86a00 }
.empty { fill: none; stroke: #8b96a5; stroke-dasharray: 4 3 }
.frame { fill: none; stroke: #8b96a5 }
.arrow { stroke: #566170; stroke-width: 1.6; fill: none }
.head { fill: #566170 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 }
  .quiet { fill: #a3afbd }
  .own { fill: #1d3a6e; stroke: #7fabf8 }
  .back { fill: #16463a; stroke: #5cc9a4 }
  .server { fill: #54390c; stroke: #e5a949 }
  .arrow { stroke: #a3afbd }
  .head { fill: #a3afbd }
}
"""


def svg(title: str, height: int, parts: Iterator[str]) -> str:
    """Return a picture of 640 units of width."""
    size = 'viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto-start-reverse"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 {height}" role="img" aria-label="{title}">',
            f"<title>{title}</title>",
            f"<style>{STYLE}</style>",
            f'<defs><marker id="head" {size}><path class="head" d="M 0 1 L 10 5 L 0 9 z"/></marker></defs>',
            *parts,
            "</svg>\n",
        ]
    )


def box(x: float, y: float, width: float, height: float, kind: str = "own", label: str = "") -> str:
    """Return a rectangle with a label in its middle."""
    shape = f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4"/>'
    return shape + (text(x + width / 2, y + height / 2 + 4.5, label, anchor="middle") if label else "")


def text(x: float, y: float, label: str, *, anchor: str = "start", kind: str = "") -> str:
    """Return a line of text."""
    quiet = f' class="{kind}"' if kind else ""
    return f'<text{quiet} x="{x:g}" y="{y:g}" text-anchor="{anchor}">{label}</text>'


def arrow(x: float, y: float, to_x: float, to_y: float, *, both: bool = False) -> str:
    """Return an arrow."""
    start = ' marker-start="url(#head)"' if both else ""
    return f'<path class="arrow" d="M {x:g} {y:g} L {to_x:g} {to_y:g}" marker-end="url(#head)"{start}/>'


def data_parallel() -> Iterator[str]:
    """Two replicas, each with half of the batch."""
    for rank, x in enumerate((20, 380)):
        yield text(x, 22, f"worker {rank}")
        yield box(x, 32, 240, 34, "server", f"half {rank + 1} of the batch")
        yield box(x, 78, 240, 44, "own", "the whole model")
        yield box(x, 134, 240, 34, "back", "gradients")
    yield arrow(266, 151, 374, 151, both=True)
    yield text(320, 140, "summed", anchor="middle", kind="quiet")


def sharded() -> Iterator[str]:
    """Three workers, each with a third of every layer."""
    for rank, x in enumerate((20, 240, 460)):
        yield text(x, 22, f"worker {rank}")
        for layer in range(3):
            yield text(x, 51 + layer * 34, f"layer {layer}", kind="quiet")
            for part in range(3):
                yield box(x + 52 + part * 36, 34 + layer * 34, 32, 26, "own" if part == rank else "empty")
    for x in (206, 426):
        yield arrow(x, 80, x + 30, 80, both=True)
    label = "before a layer: gather its parameters; after its backward: scatter its gradients"
    yield text(320, 158, label, anchor="middle", kind="quiet")


def tensor_parallel() -> Iterator[str]:
    """Two linear layers, divided by columns and by rows."""
    yield text(20, 84, "input")
    for rank, y in enumerate((30, 100)):
        yield text(92, y - 8, f"device {rank}", kind="quiet")
        yield arrow(62, 80, 88, y + 22)
        yield box(92, y, 150, 44, "own", f"columns {rank + 1} of layer 1")
        yield arrow(242, y + 22, 274, y + 22)
        yield box(278, y, 150, 44, "own", f"rows {rank + 1} of layer 2")
        yield arrow(428, y + 22, 470, 84)
    yield box(474, 66, 60, 36, "back", "sum")
    yield arrow(534, 84, 566, 84)
    yield text(572, 88, "output")


def pipeline() -> Iterator[str]:
    """1F1B with four stages and four micro-batches, forwards and backwards of equal length."""
    unit = 38 * 0.68  # width of a forward
    yield text(20, 18, "time, in units of a forward; a backward takes two", kind="quiet")
    for stage in range(4):
        yield text(20, 48 + stage * 32, f"stage {stage}")
    for stage, start, length, operation in schedule(stages=4, micro_batches=4):
        kind, label = "own" if operation.kind == "forward" else "back", str(operation.micro_batch + 1)
        yield box(76 + start * unit, 30 + stage * 32, length * unit - 2, 26, kind, label)
    yield text(76, 178, "blue: forward of a micro-batch; green: its backward; empty: the bubble", kind="quiet")


def combinations() -> Iterator[str]:
    """Two replicas of two stages: four workers."""
    for stage, x in enumerate((120, 400)):
        yield text(x + 90, 22, f"stage {stage}: {('first', 'second')[stage]} half of the layers", anchor="middle")
    for replica, y in enumerate((36, 124)):
        yield text(20, y + 30, f"half {replica + 1}", kind="quiet")
        yield text(20, y + 46, "of the batch", kind="quiet")
        for stage, x in enumerate((120, 400)):
            yield box(x, y, 180, 52, "own", f"worker {2 * replica + stage}")
        yield arrow(306, y + 26, 394, y + 26, both=True)
        yield text(350, y + 18, "activations", anchor="middle", kind="quiet")
    for x in (210, 490):
        yield arrow(x, 92, x, 120, both=True)
        yield text(x + 10, 110, "gradients, summed", kind="quiet")


def schedule(stages: int, micro_batches: int) -> Iterator[tuple[int, int, int, Operation]]:
    """Yield the operations of 1F1B with their stage, start and length: a forward takes 1, a backward 2."""
    ends: dict[tuple[int, Operation], int] = {}
    left = {
        stage: stage_operations("1f1b", stage=stage, stages=stages, micro_batches=micro_batches)
        for stage in range(stages)
    }
    free = [0] * stages
    while any(left.values()):
        for stage, operations in left.items():
            needed = operations and required_operation(operations[0], schedule="1f1b", stage=stage, stages=stages)
            if operations and (not needed or needed in ends):
                operation = operations.pop(0)
                start = max(free[stage], ends[needed] if needed else 0)
                length = 1 if operation.kind == "forward" else 2
                free[stage] = ends[stage, operation] = start + length
                yield stage, start, length, operation


def parameter_server() -> Iterator[str]:
    """Two servers and three workers."""
    for server, x in enumerate((150, 350)):
        yield box(x, 16, 140, 40, "server", f"server {server}: half")
    yield text(505, 32, "parameters and", kind="quiet")
    yield text(505, 48, "optimizer state", kind="quiet")
    for worker, x in enumerate((30, 250, 470)):
        yield box(x, 122, 140, 40, "own", f"worker {worker}")
        for target in (220, 420):
            yield arrow(x + 70, 118, target + (x - 250) * 0.12, 60, both=True)
    yield text(320, 186, "pull parameters, push gradients, each worker at its own pace", anchor="middle", kind="quiet")


def local_sgd() -> Iterator[str]:
    """Three workers that exchange the result of eight steps."""
    for worker in range(3):
        y = 26 + worker * 34
        yield text(20, y + 18, f"worker {worker}")
        for part in range(2):
            for step in range(8):
                yield box(90 + part * 260 + step * 25, y, 22, 26, "own")
    for part in range(2):
        yield box(292 + part * 260, 20, 52, 106, "server", "outer")
    yield text(90, 150, "eight steps alone", kind="quiet")
    yield text(318, 150, "one update", anchor="middle", kind="quiet")


GROWTH = (  # class, what, last year, months to double
    ("own", "largest runs: doubles in 3.4 months", 2018, 3.4),
    ("back", "all systems: doubles in 5.7 months", 2022, 5.7),
    ("server", "for comparison: doubles in 2 years", 2022, 24.0),
)


def compute_growth() -> Iterator[str]:
    """Growth of training compute since 2012 by the doubling times that were published."""
    left, bottom, year, decade = 60, 250, 34, 26.0
    yield text(left, 16, "training compute, as a multiple of that of 2012", kind="quiet")
    for power in range(0, 9, 2):
        y = bottom - power * decade
        yield f'<path class="frame" opacity="0.4" d="M {left} {y:g} H {left + 10 * year}"/>'
        yield text(left - 6, y + 4, f"{10**power:,}" if power < 4 else f"10^{power}", anchor="end", kind="quiet")
    for number in range(0, 11, 2):
        yield text(left + number * year, bottom + 20, str(2012 + number), anchor="middle", kind="quiet")
    for kind, label, last, months in GROWTH:
        x, y = left + (last - 2012) * year, bottom - math.log10(2) * (last - 2012) * 12 / months * decade
        line = f'd="M {left} {bottom} L {x:g} {y:.1f}"'
        yield f'<path class="{kind}" style="fill: none; stroke-width: 3" {line}/>'
        yield text(x + 8, y - 12 if last < 2022 else y + 4, label)


DRAWINGS: dict[str, tuple[str, int, Callable[[], Iterator[str]]]] = {
    "data-parallel": ("Each worker has the whole model and a part of the batch.", 184, data_parallel),
    "sharded": ("Each worker keeps a part of every layer.", 176, sharded),
    "tensor-parallel": ("Each device computes a part of each layer.", 160, tensor_parallel),
    "pipeline": ("Stages of layers work on several micro-batches at a time.", 190, pipeline),
    "parameter-server": ("Servers hold parameters; workers pull them and push gradients.", 200, parameter_server),
    "local-sgd": ("Workers take several steps alone, then exchange the result.", 166, local_sgd),
    "combinations": ("Two replicas of a model in two stages.", 192, combinations),
    "compute-growth": ("Growth of training compute since 2012.", 284, compute_growth),
}


def drawn(name: str) -> str:
    """Return a picture as SVG."""
    title, height, parts = DRAWINGS[name]
    return svg(title, height, parts())


if __name__ == "__main__":
    for name in DRAWINGS:
        Path(__file__).with_name(f"{name}.svg").write_text(drawn(name), encoding="utf-8")
