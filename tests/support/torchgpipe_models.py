"""The networks of torchgpipe's benchmarks, layer by layer as its balances count them, and what they cost.

ResNet-101 after He et al. (2016), U-Net after Ronneberger et al. (2015) with the widths and depths of that benchmark,
and AmoebaNet-D after Real et al. (2019); kakaobrain/torchgpipe at a1b4ee2 says how many layers each has.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from tests.support.torch_profile import profile_model
from trainwright.core.model_profile import LayerCost, ModelProfile
from trainwright.strategies.torch.tracing.op_trace import count_elements

Pair = tuple[Tensor, Tensor]


@dataclass(eq=False)
class Skip:
    """A tensor on its way round some layers."""

    value: Tensor | None = None


class Stash(nn.Module):
    """Lets a tensor through and keeps it."""

    def __init__(self, skip: Skip) -> None:
        super().__init__()
        self.skip = skip

    def forward(self, x: Tensor) -> Tensor:
        self.skip.value = x
        return x


class Add(nn.Module):
    """Adds what was kept, in its new shape."""

    def __init__(self, skip: Skip, shape: nn.Module | None) -> None:
        super().__init__()
        self.skip, self.shape = skip, shape

    def forward(self, x: Tensor) -> Tensor:
        kept = self.skip.value
        assert kept is not None
        return x + (kept if self.shape is None else self.shape(kept))


class Concatenate(nn.Module):
    """Puts what was kept beside it."""

    def __init__(self, skip: Skip) -> None:
        super().__init__()
        self.skip = skip

    def forward(self, x: Tensor) -> Tensor:
        assert self.skip.value is not None
        return torch.cat((x, self.skip.value), 1)


def resnet101() -> nn.Sequential:
    """370 layers for 224 x 224 images."""
    layers: list[nn.Module] = [*_normed(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    width = 64
    for inner, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 23, 2), (512, 3, 2)):
        for block in range(blocks):
            by, skip, outer = stride if block == 0 else 1, Skip(), 4 * inner
            shape = nn.Sequential(*_normed(width, outer, 1, by)) if block == 0 else None
            layers += [Stash(skip), *_normed(width, inner), nn.ReLU(), *_normed(inner, inner, 3, by), nn.ReLU()]
            layers += [*_normed(inner, outer), Add(skip, shape), nn.ReLU()]
            width = outer
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1000))


def unet() -> nn.Sequential:
    """241 layers for 192 x 192 images: five levels of five convolutions."""
    widths = [64 * 2**level for level in range(5)]
    skips = [Skip() for _ in widths]
    layers: list[nn.Module] = []
    before = 3
    for width, skip in zip(widths, skips, strict=True):
        layers += [*_convolutions(before, width, width), Stash(skip), nn.MaxPool2d(2)]
        before = width
    layers += _convolutions(before, 2 * before, before)
    for width, skip in reversed(list(zip(widths, skips, strict=True))):
        layers += [nn.Upsample(scale_factor=2), Concatenate(skip), *_convolutions(2 * width, width // 2, width // 2)]
    return nn.Sequential(*layers, nn.Conv2d(32, 1, 1, bias=False))


def amoebanet() -> nn.Sequential:
    """AmoebaNet-D (18, 256): 24 layers for 224 x 224 images."""
    channels, widths, shrunk = 64, (64, 64), False
    layers: list[nn.Module] = [nn.Sequential(nn.ReLU(), *_normed(3, 64, 3, 2))]
    for kind in "RR" + "N" * 6 + "R" + "N" * 6 + "R" + "N" * 6:
        shrinks = kind == "R"
        channels *= 2 if shrinks else 1
        layers.append(Cell(widths, channels, shrinks, shrunk))
        widths, shrunk = (widths[1], channels * (3 if shrinks else 4)), shrinks
    return nn.Sequential(*layers, Classifier(widths[1]))


class Cell(nn.Module):
    """Five sums of two operations each, on the outputs of the two cells before; gives its own and the last one's."""

    def __init__(self, widths: tuple[int, int], channels: int, shrinks: bool, shrunk: bool) -> None:
        super().__init__()
        operations, self.joined = _SHRINKING if shrinks else _NORMAL
        self.near, self.far = _mixed(widths[1], channels), nn.Identity()
        if shrunk:
            self.far = Halved(widths[0], channels)
        elif widths[0] != channels:
            self.far = _mixed(widths[0], channels)
        self.places = [place for place, _ in operations]
        made = [operation(channels, 2 if shrinks and place < 2 else 1) for place, operation in operations]
        self.operations = nn.ModuleList(made)

    def forward(self, given: Tensor | Pair) -> Pair:
        last, far = given if isinstance(given, tuple) else (given, given)
        states = [self.near(last), self.far(far)]
        for first in range(0, len(self.places), 2):
            pair = (self.operations[at](states[self.places[at]]) for at in (first, first + 1))
            states.append(sum(pair))  # type: ignore[arg-type]
        return torch.cat([states[place] for place in self.joined], 1), last


class Halved(nn.Module):
    """Half as many rows and columns: two convolutions that look at every other one of them."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.even, self.odd = (nn.Conv2d(before, after // 2, 1, 2, bias=False) for _ in range(2))
        self.norm = nn.BatchNorm2d(after)

    def forward(self, x: Tensor) -> Tensor:
        x = x.relu()
        moved = nn.functional.pad(x[:, :, 1:, 1:], (0, 1, 0, 1))
        found: Tensor = self.norm(torch.cat((self.even(x), self.odd(moved)), 1))
        return found


class Classifier(nn.Module):
    """Means of all places, and logits of a thousand classes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.logits = nn.Linear(width, 1000)

    def forward(self, given: Pair) -> Tensor:
        found: Tensor = self.logits(given[0].mean((2, 3)))
        return found


def _normed(before: int, after: int, size: int = 1, stride: int = 1) -> list[nn.Module]:
    convolution = nn.Conv2d(before, after, size, stride, size // 2, bias=False)
    return [convolution, nn.BatchNorm2d(after)]


def _convolutions(before: int, inner: int, after: int) -> list[nn.Module]:
    """Five, each with dropout, a norm and a ReLU."""
    widths = [before, *[inner] * 4, after]
    layers: list[nn.Module] = []
    for one, other in pairwise(widths):
        convolution = nn.Conv2d(one, other, 3, padding=1, bias=False)
        layers += [convolution, nn.Dropout2d(0.1), nn.InstanceNorm2d(other), nn.LeakyReLU()]
    return layers


def _mixed(before: int, after: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.ReLU(), *_normed(before, after, 1, stride))


def _narrowed(channels: int, *inner: tuple[tuple[int, int], tuple[int, int]]) -> nn.Sequential:
    """Convolutions of a quarter of the channels, each (size, stride), between two that narrow and widen."""
    quarter = channels // 4
    layers: list[nn.Module] = [_mixed(channels, quarter)]
    for size, stride in inner:
        padding = (size[0] // 2, size[1] // 2)
        convolution = nn.Conv2d(quarter, quarter, size, stride, padding, bias=False)
        layers += [nn.ReLU(), convolution, nn.BatchNorm2d(quarter)]
    return nn.Sequential(*layers, _mixed(quarter, channels))


def _long(channels: int, stride: int) -> nn.Module:
    return _narrowed(channels, ((1, 7), (1, stride)), ((7, 1), (stride, 1)))


def _three(channels: int, stride: int) -> nn.Module:
    return _narrowed(channels, ((3, 3), (stride, stride)))


def _one(channels: int, stride: int) -> nn.Module:
    return _mixed(channels, channels, stride)


def _mean(channels: int, stride: int) -> nn.Module:
    return nn.AvgPool2d(3, stride, 1, count_include_pad=False)


def _most(channels: int, stride: int) -> nn.Module:
    return nn.MaxPool2d(2, stride)


def _same(channels: int, stride: int) -> nn.Module:
    return nn.Identity() if stride == 1 else Halved(channels, channels)


Operations = tuple[tuple[int, Callable[[int, int], nn.Module]], ...]
_NORMAL_PAIRS: Operations = (
    *((1, _one), (1, _mean)),
    *((1, _same), (0, _long)),
    *((0, _one), (0, _long)),
    *((2, _mean), (2, _same)),
    *((1, _mean), (5, _one)),
)
_SHRINKING_PAIRS: Operations = (
    *((0, _most), (0, _mean)),
    *((2, _same), (1, _three)),
    *((2, _long), (2, _mean)),
    *((3, _same), (1, _most)),
    *((2, _mean), (3, _one)),
)
_NORMAL = _NORMAL_PAIRS, (0, 3, 4, 6)
_SHRINKING = _SHRINKING_PAIRS, (4, 5, 6)


@cache
def layered(build: Callable[[], nn.Sequential], pixels: int) -> ModelProfile:
    """The profile with one layer for each child, as torchgpipe counts them; what skips a cut goes over it too."""
    with torch.device("meta"):
        model = build()
    traced = profile_model(model, {"x": np.zeros((1, 3, pixels, pixels), np.float32)}, ("x",))
    assert not traced.untraced
    parts: dict[int, list[LayerCost]] = defaultdict(list)
    for layer in traced.layers:
        if layer.name != type(model).__name__:
            parts[int(layer.name.partition(".")[0])].append(layer)
    outputs = _outputs(model, pixels)
    layers = (_joined(str(number), parts[number], outputs[number]) for number in range(len(model)))
    return replace(traced, layers=tuple(layers))


def _joined(name: str, parts: list[LayerCost], output: float) -> LayerCost:
    """Several layers as one."""
    sums = {field: sum(getattr(part, field) for part in parts) for field in _SUMMED}
    return LayerCost(name=name, output_numbers=output, **sums)


_SUMMED = ("parameters", "parameter_bytes", "flops", "kept_numbers", "traffic_numbers", "matmuls", "launches")


def _outputs(model: nn.Sequential, pixels: int) -> list[float]:
    """Numbers that pass from each child to any later one."""
    x: Tensor | Pair = torch.empty(1, 3, pixels, pixels, device="meta")
    kept: dict[Skip, int] = {}
    found = []
    for child in model:
        x = child(x)
        if isinstance(child, Stash):
            kept[child.skip] = count_elements(x)
        elif isinstance(child, Add | Concatenate):
            del kept[child.skip]
        found.append(float(count_elements(x) + sum(kept.values())))
    return found
