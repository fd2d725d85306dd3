"""Divided states: rows as torch cuts them, any layout read from any other, and what of a model is gathered together."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.conformance.rank import Files
from trainwright.core.errors import CheckpointError, JobError
from trainwright.strategies.torch import files
from trainwright.strategies.torch.dividing import blocks, divide
from trainwright.strategies.torch.parts import WHOLE, Part
from trainwright.strategies.torch.state import HostState

parts = st.integers(1, 5)


@given(size=st.integers(0, 40), of=parts)
def test_rows_are_those_of_torch_chunk(size: int, of: int) -> None:
    chunks = [chunk.tolist() for chunk in torch.arange(size).chunk(of)] if size else []
    expected = chunks + [[]] * (of - len(chunks))
    assert [list(Part(index=index, of=of).rows(size)) for index in range(of)] == expected


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 3)), min_size=1, max_size=4), parts, parts, st.booleans())
def test_any_layout_is_read_from_any_other(shapes: list[tuple[int, int]], of: int, wanted: int, momentum: bool) -> None:
    whole = state_of(shapes, momentum)
    written = written_in(whole, of)
    for index in range(wanted):
        part = Part(index=index, of=wanted)
        found = files.read(written, part, list(whole.model.keys() - {"buffer"}))
        assert_equal(found, sliced(whole, part))
    weights = files.load_weights(written)
    assert weights.keys() == whole.model.keys()
    assert all(torch.equal(weights[name], value) for name, value in whole.model.items())


def test_of_its_own_layout_a_rank_reads_its_own_files_alone() -> None:
    class Noting(Files):
        def __init__(self, files: Mapping[str, bytes]) -> None:
            super().__init__(files)
            self.seen: list[str] = []

        def read(self, name: str) -> bytes:
            self.seen.append(name)
            return super().read(name)

    noting = Noting(written_in(state_of([(8, 2), (12, 1)], True), 4).files)
    files.read(noting, Part(index=2, of=4))
    assert all("shard-2-of-4" in name for name in noting.seen)
    noting.seen.clear()
    files.read(noting, Part(index=1, of=2))
    assert not any(name.startswith(("model.shard-1", "optimizer.shard-1")) for name in noting.seen), noting.seen


def test_a_part_says_what_it_holds() -> None:
    facts = json.loads(written_in(state_of([(5, 3)], True), 2).files["state.shard-1-of-2.json"])
    assert facts["tensors"]["w0"] == {"shape": [5, 3], "dtype": "float32", "rows": [3, 5]}
    assert facts["tensors"]["w0/momentum"] == {"shape": [5, 3], "dtype": "float32", "rows": [3, 5]}
    assert facts["tensors"]["w0/step"] == {"shape": [], "dtype": "float32", "rows": None}


def test_a_lost_part_and_parts_of_two_states_are_named() -> None:
    written = written_in(state_of([(4, 2)], False), 2)
    lost = Files({name: data for name, data in written.files.items() if "shard-1" not in name})
    with pytest.raises(CheckpointError, match=r"no state\.shard-1-of-2\.json"):
        files.read(lost)
    other = json.loads(written.files["state.shard-1-of-2.json"])
    mixed = Files(written.files | {"state.shard-1-of-2.json": json.dumps(other | {"step": 8}).encode()})
    with pytest.raises(CheckpointError, match="another state"):
        files.read(mixed)


class Tied(nn.Module):
    """An embedding, two blocks and a head that shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight


def shared() -> nn.Module:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    return nn.Sequential(first, second, nn.Linear(3, 3))


def nested() -> nn.Module:
    return nn.Sequential(nn.Embedding(5, 4), nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), nn.LayerNorm(4))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (Tied, ["layers.0", "layers.1"]),
        (shared, ["2"]),
        (nested, ["1.0", "1.1", "1.2"]),
        (lambda: nn.Linear(2, 2), []),
        (lambda: nn.Sequential(*[nn.Linear(2, 2)] * 3), []),
        (
            lambda: nn.ModuleList(nn.ModuleList(nn.Linear(2, 2) for _ in "ab") for _ in "ab"),
            ["0.0", "0.1", "1.0", "1.1"],
        ),
    ],
    ids=["tied", "shared", "nested", "single", "repeated", "lists"],
)
def test_repeated_layers_are_gathered_by_themselves(make: Callable[[], nn.Module], expected: list[str]) -> None:
    model = make()
    names = {module: name for name, module in model.named_modules()}
    assert [names[block] for block in blocks(model)] == expected


class Odd(nn.Module):
    """Everything that FSDP2 cannot divide."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.turned = nn.Parameter(torch.ones(2, 3).t())
        self.short = nn.Parameter(torch.ones(2, dtype=torch.float16))


def test_a_model_that_cannot_be_divided_is_refused_by_parameter() -> None:
    with pytest.raises(JobError) as caught:
        divide(Odd(), None, zero=3, offload=False, where="rank 0")  # type: ignore[arg-type]
    said = str(caught.value)
    assert "'scale' is a single number" in said and "'turned' is not contiguous" in said
    assert "the parameters of Odd are gathered together, but of the types float16 and float32" in said


def state_of(shapes: list[tuple[int, int]], momentum: bool) -> HostState:
    """A whole state of parameters of these shapes, and a buffer."""
    model = {f"w{number}": torch.randn(shape) for number, shape in enumerate(shapes)}
    slots = {
        name: {"step": torch.tensor(7.0), "calls": 3} | ({"momentum": torch.randn_like(value)} if momentum else {})
        for name, value in model.items()
    }
    model["buffer"] = torch.randn(4)
    return HostState(step=7, model=model, slots=slots, options=[{"lr": 0.5}], optimizer="X")


def sliced(whole: HostState, part: Part) -> HostState:
    """What a rank holds of it."""
    if part == WHOLE:
        return whole

    def cut(value: Tensor) -> Tensor:
        rows = part.rows(len(value))
        return value[rows.start : rows.stop]

    divided = {name: value for name, value in whole.model.items() if name != "buffer"}
    slots = {
        name: {key: cut(value) if key == "momentum" else value for key, value in entries.items()}
        for name, entries in whole.slots.items()
    }
    held = [f"{name}/momentum" for name, entries in slots.items() if "momentum" in entries]
    rows = {name: len(divided[name.partition("/")[0]]) for name in [*divided, *held]}
    model = {name: cut(value) if name in divided else value for name, value in whole.model.items()}
    return replace(whole, model=model, slots=slots, part=part, rows=rows)


def written_in(whole: HostState, of: int) -> Files:
    """The files of a checkpoint in so many parts."""
    written = Files()
    for index in range(of):
        files.write(sliced(whole, Part(index=index, of=of)), written)
    return written


def assert_equal(found: HostState, expected: HostState) -> None:
    """Two states are the same, bit by bit."""
    assert (found.step, found.options, found.part, found.rows) == (7, [{"lr": 0.5}], expected.part, expected.rows)
    assert found.model.keys() == expected.model.keys() and found.slots.keys() == expected.slots.keys()
    assert all(torch.equal(value, expected.model[name]) for name, value in found.model.items())
    for name, entries in expected.slots.items():
        assert found.slots[name].keys() == entries.keys()
        for key, value in entries.items():
            held = found.slots[name][key]
            assert torch.equal(held, value) if isinstance(value, Tensor) else held == value, (name, key)
