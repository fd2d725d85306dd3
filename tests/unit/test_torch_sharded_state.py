"""Divided states: rows as torch cuts them, any layout read from any other, and what of a model is gathered together."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from tests.support.conformance.rank import Files
from tests.support.torch_engines import plan, spec
from trainwright.core.engine import ModelSpec
from trainwright.core.errors import CheckpointError, JobError, PeerLost
from trainwright.core.plan import Plan
from trainwright.strategies.torch.checkpoint import safetensors_files
from trainwright.strategies.torch.checkpoint.host_state import HostState
from trainwright.strategies.torch.distributed import fsdp_wrap
from trainwright.strategies.torch.distributed.fsdp_wrap import fully_shard_model
from trainwright.strategies.torch.engines import sharded_model_engine
from trainwright.strategies.torch.engines.fsdp import Sharded
from trainwright.strategies.torch.engines.pipeline import Pipeline
from trainwright.strategies.torch.engines.sharded_model_engine import ShardedModelEngine, _KeptState
from trainwright.strategies.torch.shard_layout import ModelPart, ShardSlice
from trainwright.strategies.torch.training.model_blocks import repeated_blocks
from trainwright.strategies.torch.training.train_state import DataRank, LocalState, TorchReplica

layouts = st.builds(ModelPart, stages=st.integers(1, 3), shards=st.integers(1, 4), tensors=st.integers(1, 3))


@given(size=st.integers(0, 40), of=st.integers(1, 5))
def test_rows_are_those_of_torch_chunk(size: int, of: int) -> None:
    chunks = [chunk.tolist() for chunk in torch.arange(size).chunk(of)] if size else []
    expected = chunks + [[]] * (of - len(chunks))
    shares = [ShardSlice.share((size,), 0, index, of) for index in range(of)]
    assert [list(range(*share.start, *share.stop)) for share in shares] == expected


@given(layout=layouts)
def test_a_part_is_read_from_its_suffix(layout: ModelPart) -> None:
    assert [ModelPart.read(part.suffix) for part in layout.every] == [*layout.every]
    assert len({part.name for part in layout.every}) == layout.stages * layout.shards * layout.tensors


shapes = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5)), min_size=1, max_size=4)


@given(shapes, layouts, layouts, st.booleans())
def test_any_layout_is_read_from_any_other(
    shapes: list[tuple[int, int]], writing: ModelPart, reading: ModelPart, momentum: bool
) -> None:
    whole = state_of(shapes, momentum)
    written = written_in(whole, writing)
    for part in reading.every:
        expected = sliced(whole, part)
        assert_equal(safetensors_files.read(written, wanted_of(expected), part), expected)
    weights = safetensors_files.load_weights(written)
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

    whole = state_of([(8, 2), (12, 1)], True)
    noting = Noting(written_in(whole, ModelPart(shards=4)).files)
    own = ModelPart(shard=2, shards=4)
    safetensors_files.read(noting, wanted_of(sliced(whole, own)), own)
    assert all("shard-2-of-4" in name for name in noting.seen)
    noting.seen.clear()
    other = ModelPart(shard=1, shards=2)
    safetensors_files.read(noting, wanted_of(sliced(whole, other)), other)
    assert not any(name.startswith(("model.shard-1", "optimizer.shard-1")) for name in noting.seen), noting.seen


def test_a_part_says_what_it_holds() -> None:
    written = written_in(state_of([(5, 3)], True), ModelPart(shards=2))
    facts = json.loads(written.files["state.shard-1-of-2.json"])
    assert facts["tensors"]["model"]["w0"] == {"dtype": "float32", "shape": [5, 3], "held": [[3, 5], [0, 3]]}
    assert facts["tensors"]["optimizer"]["w0/momentum"] == facts["tensors"]["model"]["w0"]
    assert facts["tensors"]["optimizer"]["w0/step"] == {"dtype": "float32", "shape": [], "held": []}


def test_what_is_whole_is_no_part_though_another_ones_part_is_as_large() -> None:
    """Of a bias of one number the first shard has all; a buffer of one number is not divided."""
    box = ShardSlice.share((1,), 0, 0, 2)
    model, slots = {"bias": torch.ones(1), "count": torch.ones(1)}, {"bias": {"momentum": torch.ones(1)}}
    state = HostState(step=7, model=model, slots=slots, options=[{}], optimizer="X")
    boxes = {"bias": box, "bias/momentum": box}
    written, own = Files(), ModelPart(shards=2)
    safetensors_files.write(replace(state, part=own, boxes=boxes), written)
    empty = ShardSlice.share((1,), 0, 1, 2)
    second = replace(state, model=model | {"bias": torch.ones(0)}, slots={"bias": {"momentum": torch.ones(0)}})
    safetensors_files.write(
        replace(second, part=ModelPart(shard=1, shards=2), boxes=dict.fromkeys(boxes, empty)), written
    )
    assert safetensors_files.read(written, {"bias": box, "count": None}, own).boxes == boxes


def test_a_lost_part_and_parts_of_two_states_are_named() -> None:
    written = written_in(state_of([(4, 2)], False), ModelPart(shards=2))
    lost = Files({name: data for name, data in written.files.items() if "shard-1" not in name})
    with pytest.raises(CheckpointError, match=r"no state\.shard-1-of-2\.json"):
        safetensors_files.read(lost)
    other = json.loads(written.files["state.shard-1-of-2.json"])
    mixed = Files(written.files | {"state.shard-1-of-2.json": json.dumps(other | {"step": 8}).encode()})
    with pytest.raises(CheckpointError, match="another state"):
        safetensors_files.read(mixed)


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
    assert [names[block] for block in repeated_blocks(model)] == expected


class Odd(nn.Module):
    """Everything that FSDP2 cannot divide."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.turned = nn.Parameter(torch.ones(2, 3).t())
        self.watched = nn.Parameter(torch.ones(2))
        self.watched.register_hook(lambda slope: slope)
        self.short = nn.Parameter(torch.ones(2, dtype=torch.float16))


def test_a_model_that_cannot_be_divided_is_refused_by_parameter() -> None:
    with pytest.raises(JobError) as caught:
        fully_shard_model(Odd(), None, zero=3, offload=False, where="rank 0")  # type: ignore[arg-type]
    said = str(caught.value)
    assert "'watched' has a hook" in said
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


def sliced(whole: HostState, part: ModelPart) -> HostState:
    """What a rank holds of it: the stages take the parameters by turns, and the first has the buffer."""
    names = [*whole.model]
    own = [name for number, name in enumerate(names) if (name == "buffer" and not part.stage)
           or (name != "buffer" and number % part.stages == part.stage)]  # fmt: skip
    boxes = {name: box for name in own if name != "buffer" and (box := box_of(names.index(name), whole, part))}

    def cut(name: str, value: Tensor) -> Tensor:
        return value[boxes[name].inside(ShardSlice.all_of(value.shape))].contiguous() if name in boxes else value

    slots = {
        name: {key: cut(name, value) if key == "momentum" else value for key, value in whole.slots[name].items()}
        for name in own
        if name in whole.slots
    }
    of_slots = {f"{name}/momentum": box for name, box in boxes.items() if "momentum" in slots[name]}
    model = {name: cut(name, whole.model[name]) for name in own}
    return replace(whole, model=model, slots=slots, part=part, boxes=boxes | of_slots)


def box_of(number: int, whole: HostState, part: ModelPart) -> ShardSlice | None:
    """Tensor parallelism divides by rows, by columns or not at all, and FSDP2 the rows of that."""
    shape = tuple(whole.model[f"w{number}"].shape)
    box = ShardSlice.all_of(shape)
    if number % 3 < 2:
        box = ShardSlice.share(shape, number % 3, part.tensor, part.tensors)
    held = ShardSlice.share(box.size, 0, part.shard, part.shards).within(box)
    return held if part.shards > 1 or (part.tensors > 1 and number % 3 < 2) else None


def wanted_of(state: HostState) -> dict[str, ShardSlice | None]:
    """What a rank asks for that is to hold a state."""
    return {name: state.boxes.get(name) for name in state.model}


def written_in(whole: HostState, layout: ModelPart) -> Files:
    """The files of a checkpoint in so many parts."""
    written = Files()
    for part in layout.every:
        safetensors_files.write(sliced(whole, part), written)
    return written


def assert_equal(found: HostState, expected: HostState) -> None:
    """Two states are the same, bit by bit."""
    assert (found.step, found.options, found.part) == (7, [{"lr": 0.5}], expected.part)
    assert found.boxes == expected.boxes
    assert found.model.keys() == expected.model.keys() and found.slots.keys() == expected.slots.keys()
    assert all(torch.equal(value, expected.model[name]) for name, value in found.model.items())
    for name, entries in expected.slots.items():
        assert found.slots[name].keys() == entries.keys()
        for key, value in entries.items():
            held = found.slots[name][key]
            assert torch.equal(held, value) if isinstance(value, Tensor) else held == value, (name, key)


@pytest.mark.parametrize("engine", [Pipeline, Sharded])
def test_of_two_parts_one_is_held_at_a_time(engine: type[ShardedModelEngine]) -> None:
    held: list[Callable[[], nn.Module | None]] = []

    class Moving(engine):  # type: ignore[misc, valid-type]
        """Another part each time."""

        def _join_mesh(self, plan: Plan) -> None:
            self._part = ModelPart(shard=len(held), shards=2)

        def _build_replica(self, spec: ModelSpec, plan: Plan) -> TorchReplica:
            self._join_mesh(plan)
            assert not any(each() is not None for each in held)
            replica = TorchReplica(spec, plan, self._device, self._where)
            model = replica.model
            vars(self).update(dict.fromkeys(vars(self).keys() & {"_calls", "_shards", "_cut"}, model))
            model.itself = [model]  # as modules and their hooks hold each other
            held.append(weakref.ref(model))
            return replica

    moving: Any = Moving()
    gc.freeze()  # as the worker does
    try:
        moving.build(spec(), plan())
        moving._release()
        moving._rejoin(*moving._job)
    finally:
        gc.unfreeze()
    assert [each() is None for each in held] == [True, False]


@pytest.mark.parametrize(("free", "where"), [(63, "cpu"), (64, "cuda")])
def test_a_part_on_a_gpu_waits_in_host_memory_where_the_gpu_has_no_room_for_the_next(
    free: int, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four tensors of 16 bytes are on the GPU."""
    part, restored, left = ModelPart(shard=0, shards=2), list[_KeptState](), list[bool]()

    class Again(ShardedModelEngine):
        """The same part again."""

        def _join_mesh(self, plan: Plan) -> None:
            self._part = part

        def _build_replica(self, spec: ModelSpec, plan: Plan) -> Any:
            left.extend(each() is not None for each in held)
            return SimpleNamespace(part=part)

    with FakeTensorMode():
        weight, momentum, buffer, local = (torch.empty(4, device="cuda") for _ in range(4))
        offloaded = torch.empty(4)
    state = HostState(
        step=3, model={"weight": weight, "offloaded": offloaded}, slots={"weight": {"momentum": momentum, "step": 3}},
        options=[], optimizer="SGD", part=part,
        local=LocalState(data_rank=DataRank(rank=0, ranks=1), tensors={"local": local}),
    )  # fmt: skip
    held = [weakref.ref(each) for each in (weight, momentum, buffer, local)]
    engine: Any = Again()
    engine._kept_state = _KeptState(state=state, buffers={"buffer": buffer}, sound=True)
    del weight, momentum, buffer, local, state
    monkeypatch.setattr(_KeptState, "restore_into", lambda kept, replica: restored.append(kept))
    monkeypatch.setattr(sharded_model_engine, "_free_bytes", lambda device: free)
    engine._rejoin(spec(), plan())
    assert left == [where == "cuda"] * 4
    (kept,) = restored
    moved = {name: each for name, each in kept.state.memory.items() if name != ("offloaded",)}
    assert {each.device.type for each in (*moved.values(), *kept.buffers.values())} == {where}
    assert len(kept.state.memory) == 4 and kept.state.model["offloaded"] is offloaded, "it was copied for nothing"


def test_a_part_that_was_given_and_not_built_is_not_taken_for_the_one_that_is_held() -> None:
    first, second = ModelPart(stage=0, stages=2), ModelPart(stage=1, stages=2)

    class Moved(ShardedModelEngine):
        """Its group fails once, after it has told this rank its part."""

        fails = True

        def _join_mesh(self, plan: Plan) -> None:
            self._part, fails = second, self.fails
            self.fails = False
            if fails:
                raise PeerLost("gone")

        def _build_replica(self, spec: ModelSpec, plan: Plan) -> Any:
            return SimpleNamespace(part=self._part)

    moved: Any = Moved()
    moved._part, moved._replica = first, SimpleNamespace(part=first)
    with pytest.raises(PeerLost):
        moved._rejoin(spec(), plan())
    moved._rejoin(spec(), plan())
    assert moved._replica.part == second


def test_integers_that_an_older_torch_does_not_divide_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.places = nn.Parameter(torch.arange(4), requires_grad=False)

    def refusing(*_: Any, **__: Any) -> None:
        raise RuntimeError("only Tensors of floating point dtype can require gradients")

    monkeypatch.setattr(fsdp_wrap, "fully_shard", refusing)
    mesh: Any = SimpleNamespace(device_type="cpu")
    with pytest.raises(JobError, match=r"'places' has no floating-point numbers.* 2\.12 or newer, or make it a buffer"):
        fully_shard_model(Counting(), mesh, zero=3, where="rank 0")
    with pytest.raises(RuntimeError, match="only Tensors"):
        fully_shard_model(nn.Linear(4, 4), mesh, zero=3, where="rank 0")
