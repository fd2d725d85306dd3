"""A model cut anywhere: its sections one after the other give the outputs and the gradients of the whole."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.conformance.staged_model import Deep
from tests.support.split_model import split
from trainwright.core.errors import JobError
from trainwright.strategies.torch.pipeline.split import SplitModel
from trainwright.strategies.torch.tensor_parallel.layers import shard_layers
from trainwright.strategies.torch.tensor_parallel.tensor_group import TensorParallelGroup

NAMES = [
    "blocks.0", "blocks.0.lift", "blocks.0.back", "blocks.1", "blocks.1.norm", "blocks.1.back", "blocks.2",
    "blocks.2.lift", "blocks.3", "blocks.3.back", "again", "head",
]  # fmt: skip
CALLED = {name: place for place, name in enumerate(NAMES)}  # in the order in which they are called
WIDTH = 6


def called(model: nn.Module, inputs: Sequence[Tensor]) -> Any:
    return model(*inputs)


def made() -> nn.Module:
    torch.manual_seed(3)
    return Deep()


def sections(entries: Sequence[str], sample: Tensor) -> list[tuple[SplitModel, nn.Module]]:
    """Each with the model that holds its parameters."""
    found = []
    for number in range(len(entries) + 1):
        model = made()
        found.append((SplitModel(model, entries, {number}, [sample], called, f"rank {number}"), model))
    return found


def passed(cuts: list[tuple[SplitModel, nn.Module]], inputs: Tensor) -> Tensor:
    """The outputs, with the gradients of their sum of squares in all sections."""
    given: list[Tensor] = []
    sent: list[tuple[list[Tensor], Any]] = []
    for number, (cut, _) in enumerate(cuts):
        metas = cut.taken(number, len(inputs))
        assert [(each.shape, each.dtype) for each in given] == [(meta.shape, meta.dtype) for meta in metas]
        leaves = [each.detach().requires_grad_(meta.requires_grad) for each, meta in zip(given, metas, strict=True)]
        outputs = cut.run(number, leaves, rows=len(inputs), inputs=None if number else [inputs])
        sent.append((leaves, outputs))
        given = outputs if isinstance(outputs, list) else []
    logits: Tensor = sent[-1][1]["logits"]
    logits.square().sum().backward()
    for (_, outputs), (leaves, _) in zip(reversed(sent[:-1]), reversed(sent[1:]), strict=True):
        pairs = [(one, leaf.grad) for one, leaf in zip(outputs, leaves, strict=True) if leaf.grad is not None]
        torch.autograd.backward([one for one, _ in pairs], [slope for _, slope in pairs])
    return logits


CUTS = given(
    entries=st.sets(st.sampled_from(NAMES), min_size=1, max_size=4), rows=st.integers(1, 5), training=st.booleans()
)


@settings(max_examples=4)  # about a second of a core each
@CUTS
def test_outputs_and_gradients_are_those_of_the_whole(entries: set[str], rows: int, training: bool) -> None:
    check_cut(entries, rows, training)


@pytest.mark.soak
@settings(max_examples=60)
@CUTS
def test_many_cuts_give_the_outputs_and_gradients_of_the_whole(entries: set[str], rows: int, training: bool) -> None:
    check_cut(entries, rows, training)


def check_cut(entries: set[str], rows: int, training: bool) -> None:
    """Compare sections that are cut before these entries with the whole model."""
    inputs = torch.linspace(-1, 1, rows * WIDTH, dtype=torch.float64).view(rows, WIDTH)
    ordered = sorted(entries, key=CALLED.__getitem__)
    cuts = sections(ordered, inputs[:1])
    for _, model in cuts:
        model.train(training)
    for cut, _ in cuts:
        cut.look()
    whole = made().train(training)
    expected = whole(inputs)["logits"]
    assert torch.equal(passed(cuts, inputs), expected)
    expected.square().sum().backward()
    gradients = {name: each.grad for name, each in whole.named_parameters()}
    found: dict[str, Tensor] = {}
    for _, model in cuts:
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                found[name] = found.get(name, torch.zeros_like(parameter)) + parameter.grad
    assert found.keys() == {name for name, slope in gradients.items() if slope is not None}
    for name, slope in found.items():
        assert torch.allclose(slope, gradients[name], rtol=1e-12, atol=1e-12), name


def test_each_section_holds_what_it_uses() -> None:
    inputs = torch.zeros(2, WIDTH, dtype=torch.float64)
    cuts = sections(["blocks.2"], inputs)
    first, second = ({*model.state_dict()} for _, model in cuts)
    assert first & second == {"first.weight", "again.weight"}  # which are one parameter
    assert first | second == {*made().state_dict()}
    assert "unused.weight" in first and "seen" in second
    assert cuts[0][0].shared == cuts[1][0].shared == {"first.weight": frozenset({0, 1})}


class Within(nn.Module):
    """A block whose attention is written in it, and no module of its own; half of its heads and its numbers do all."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.size, self.norm = 4, 2, nn.LayerNorm(8)
        self.query, self.key, self.value, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        with torch.no_grad():
            self.out.weight[:, 4:], self.down.weight[:, 6:] = 0.0, 0.0

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.norm(hidden)
        query, key, value = (
            each(normed).view(*hidden.shape[:2], self.heads, self.size).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2)
        hidden = hidden + self.out(mixed.reshape(*hidden.shape[:2], self.heads * self.size))
        outputs: Tensor = hidden + self.down(torch.relu(self.up(hidden)))
        return outputs


class Alone(TensorParallelGroup):
    """The first of two ranks, of which the other one has nothing to add."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor


@pytest.mark.parametrize(
    ("entries", "owned"),
    [(["1.up"], [{0}, {1}]), (["0.up", "1.query"], [{0, 2}, {1}, {0, 2}]), (["1", "1.up"], [{0}, {1}, {2}])],
)
def test_a_block_that_tensor_parallelism_divides_may_be_cut_beside_its_attention(
    entries: list[str], owned: list[set[int]]
) -> None:
    class Blocks(nn.Sequential):
        def forward(self, hidden: Tensor) -> Any:
            return {"logits": super().forward(hidden)}

    def blocks() -> nn.Module:
        torch.manual_seed(3)
        return Blocks(Within(), Within()).double()

    inputs = torch.linspace(-1, 1, 48, dtype=torch.float64).view(2, 3, 8)
    whole = blocks()
    found = split(whole, given=inputs[:1])
    assert found.attributes["1"] == {"heads": 2}, "a cut beside it must not find them divided"
    cuts = {}
    for own in map(frozenset, owned):
        model = blocks()
        parted = partial(shard_layers, split=found, group=Alone(index=0, size=2), where="rank 0")
        cuts[own] = (
            SplitModel(model, entries, own, [inputs], called, "rank 0", lambda each, _, parted=parted: parted(each)),
            model,
        )
    for _ in range(2):
        assert torch.allclose(passed([cuts[frozenset(own)] for own in owned], inputs), whole(inputs)["logits"])


def test_a_forward_that_goes_another_way_is_told() -> None:
    class Turning(nn.Sequential):
        way = 0

        def forward(self, inputs: Tensor) -> Tensor:
            hidden = self[0](inputs)
            if not inputs.is_meta and Turning.way:
                hidden = self[1](hidden)
            outputs: Tensor = self[2](self[1](hidden))
            return outputs

    inputs = torch.zeros(2, 3)
    cut = SplitModel(Turning(*(nn.Linear(3, 3) for _ in range(3))), ["2"], {0}, [inputs], called, "rank 0")
    assert len(cut.run(0, [], rows=2, inputs=[inputs])) == 1
    Turning.way = 1
    with pytest.raises(JobError, match="went another way"):
        cut.run(0, [], rows=2, inputs=[inputs])


class Row(nn.Module):
    """Three layers; what lies between them is a test's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(3, 3) for _ in range(3))
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("count", torch.zeros(()))
        self.extra: Any = 0.0

    def forward(self, inputs: Tensor) -> Tensor:
        raise NotImplementedError


class Keeping(Row):
    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        self.third.extra = hidden.mean()
        outputs: Tensor = self.second(hidden)
        return outputs + self.third.extra


class KeepingInside(Row):
    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.norm(self.first(inputs))
        outputs: Tensor = self.second(hidden)
        return outputs + self.norm.kept

    def __init__(self) -> None:
        super().__init__()

        class Norm(nn.BatchNorm1d):
            def forward(self, input: Tensor) -> Tensor:
                self.kept = input.mean()
                return super().forward(input)

        self.norm = Norm(3)


class OnBothSides(Row):
    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.norm(self.first(inputs))
        outputs: Tensor = self.norm(self.second(hidden))
        return outputs


class Counting(Row):
    def forward(self, inputs: Tensor) -> Tensor:
        self.count = self.count + 1
        hidden = self.first(inputs)
        others = [torch.full((3,), float(number), device=inputs.device) for number in range(6)]
        outputs: Tensor = self.second(hidden + sum(others))
        return outputs


class Recomputing(Row):
    """It computes its layers again by itself."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = checkpoint(self.first, inputs, use_reentrant=False)
        outputs: Tensor = checkpoint(self.second, hidden, use_reentrant=False)
        return outputs


class RecomputingReentrantly(Row):
    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = checkpoint(self.second, self.first(inputs), use_reentrant=True)
        return outputs


class Placing(Row):
    """It makes tensors where its inputs are, or where torch likes."""

    def forward(self, inputs: Tensor) -> Tensor:
        place = inputs.device
        hidden = self.first(inputs)
        hidden = self.second(hidden) + torch.arange(3)
        outputs: Tensor = self.third(hidden + torch.ones(3, device=place))
        return outputs


def cut_at_second(kind: type[Row], own: set[int]) -> SplitModel:
    torch.manual_seed(0)
    return SplitModel(kind(), ["second"], own, [torch.zeros(4, 3)], called, "rank 0")


@pytest.mark.parametrize(
    ("kind", "own", "words"),
    [
        (KeepingInside, {1}, "comes from where it cannot be followed"),
        (Recomputing, {1}, "'first' is called through torch.utils.checkpoint"),
        (RecomputingReentrantly, {1}, 'let the plan compute again: plan="...,recompute=full"'),
        (OnBothSides, {0}, "buffer 'norm.num_batches_tracked' is changed, and used on both sides"),
    ],
)
def test_what_would_be_silently_wrong_is_refused(kind: type[Row], own: set[int], words: str) -> None:
    with pytest.raises(JobError, match=words):
        cut_at_second(kind, own)


@pytest.mark.parametrize("kind", [Keeping, Counting, Placing])
def test_what_lies_between_modules_is_followed(kind: type[Row]) -> None:
    inputs = torch.randn(4, 3)
    first, second = cut_at_second(kind, {0}), cut_at_second(kind, {1})
    assert [each.shape for each in first.taken(1, 4)] == [each.shape for each in second.taken(1, 4)]
    torch.manual_seed(0)
    expected = kind()(inputs)
    given = first.run(0, [], rows=4, inputs=[inputs])
    assert torch.equal(second.run(1, [each.detach() for each in given], rows=4), expected)


def test_a_counter_counts_once_in_two_chunks_of_a_stage() -> None:
    torch.manual_seed(0)
    model, inputs = Counting(), torch.randn(4, 3)
    cut = SplitModel(model, ["first", "second"], {0, 2}, [inputs], called, "rank 0")
    for step in range(3):
        given = cut.run(0, [], rows=4, inputs=[inputs])
        assert model.count == step + 1
        cut.run(2, [torch.zeros(meta.shape) for meta in cut.taken(2, 4)], rows=4)
        assert model.count == step + 1 and given[0] is inputs


def test_a_section_can_be_run_again_and_again() -> None:
    """What has no data is made anew each time: changes in place do not pile up."""

    class Adding(Row):
        def forward(self, inputs: Tensor) -> Tensor:
            hidden = self.first(inputs)
            hidden += self.count
            outputs: Tensor = self.second(hidden)
            return outputs

    cut = cut_at_second(Adding, {1})
    (meta,) = cut.taken(1, 4)
    for _ in range(3):
        cut.run(1, [torch.ones(4, 3)], rows=4)
    (same,) = cut.taken(1, 4)
    assert same.grad_fn is None and (same.shape, same.requires_grad) == (meta.shape, meta.requires_grad) == (
        (4, 3),
        True,
    )
