"""Ranks that divide a model build it without all of it in memory, and hold the bits of one device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.support.conformance.attention_model import TORCH
from tests.support.conformance.harness import Pool, World
from tests.support.conformance.problems import CLASSES, FEATURES
from tests.support.conformance.staged_model import plan, spec
from trainwright.core.engine import ModelSpec
from trainwright.core.plan import Mesh, Plan
from trainwright.strategies.torch.checkpoint.tensor_digests import digests
from trainwright.strategies.torch.training.train_state import TorchReplica

WIDTH, BLOCKS = 1024, 24
BLOCK_BYTES = 2 * 4 * WIDTH * WIDTH
PART_BYTES = BLOCKS * BLOCK_BYTES // 4
HELD_BYTES = 1 << 26  # that may be in memory beside what a rank keeps
HIDDEN, INNER, WORDS = 4096, 11008, 32000  # of Llama 7 B, which has 32 layers
SLOW_S = 5400.0  # for eight ranks on two cores, each of which draws seven billion numbers three times


class Block(nn.Module):
    """Two layers that tensor parallelism divides: one by rows of its weight, one by columns."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, hidden: Tensor) -> Tensor:
        outputs: Tensor = hidden + self.down(torch.tanh(self.up(hidden)))
        return outputs


def large(blocks: int = BLOCKS) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, WIDTH), *(Block() for _ in range(blocks)), nn.Linear(WIDTH, CLASSES))


def job(blocks: int) -> ModelSpec:
    roles = {
        f"{number}.{name}": role
        for number in range(1, blocks + 1)
        for name, role in (("up", "column"), ("down", "row"))
    }
    return replace(spec(functools.partial(large, blocks)), tensor_plan=roles)


def cut(blocks: int) -> tuple[str, ...]:
    return tuple(str(1 + blocks * stage // 4) for stage in (1, 2, 3))


SHARDED = plan(engine=f"{TORCH}.engines.fsdp:Sharded", mesh=Mesh(shard=4), zero=3)
LAYOUTS: dict[str, Callable[[int], Plan]] = {
    "sharded": lambda _: SHARDED,
    "shards of tensor parts": lambda _: replace(SHARDED, mesh=Mesh(shard=2, tensor=2)),
    "tensor": lambda _: plan(engine=f"{TORCH}.engines.tensor_parallel:TensorParallel", mesh=Mesh(tensor=4)),
    "stages": lambda blocks: plan(4, cuts=cut(blocks), schedule="1f1b"),
}


def expected(blocks: int) -> dict[str, Tensor]:
    """The tensors of one device."""
    device = torch.device("cpu")
    return TorchReplica(job(blocks), plan(), device, "rank 0").model.state_dict()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_has_its_part_and_a_layer_in_memory(pool: Pool, layout: str) -> None:
    warm = warmed(pool, LAYOUTS[layout](4), job(4))
    with World(pool, "torch", LAYOUTS[layout](BLOCKS), job(BLOCKS)) as world:
        assert {*world.pids} == warm
        world.every("begin_peak")
        world.form()
        peaks = world.every("peak_bytes")
        held = world.every("held_digests")[1]
    assert max(peaks) < PART_BYTES + HELD_BYTES + 4 * BLOCK_BYTES, f"{peaks} bytes for a part of {PART_BYTES:,}"
    whole = expected(BLOCKS)
    for name, (inside, digest) in held.items():
        assert digests([whole[name][inside]])[0] == digest, name


@pytest.mark.parametrize("layout", ["sharded", "stages"])
def test_a_checkpoint_of_another_layout_is_loaded_in_parts(pool: Pool, tmp_path: Path, layout: str) -> None:
    other = LAYOUTS["tensor"](BLOCKS)
    with World(pool, "torch", other, job(BLOCKS)) as world:
        world.start()
        world.every("save_in", lambda _: (tmp_path,))
        sizes = [each.stat().st_size for each in tmp_path.iterdir()]
    assert sum(sizes) > 4 * PART_BYTES
    warmed(pool, LAYOUTS[layout](4), job(4))
    changed = replace(job(BLOCKS), seed=4)
    with World(pool, "torch", LAYOUTS[layout](BLOCKS), changed) as world:
        world.start()
        world.every("begin_peak")
        world.every("load_from", lambda _: (tmp_path,))
        peaks = world.every("peak_bytes")
        held = world.every("held_digests")[1]
    assert max(peaks) < PART_BYTES + 4 * BLOCK_BYTES, f"{peaks} bytes for a part of {PART_BYTES:,}"
    whole = expected(BLOCKS)
    for name, (inside, digest) in held.items():
        assert digests([whole[name][inside]])[0] == digest, name


def test_the_state_of_a_peer_is_taken_without_another_copy(pool: Pool) -> None:
    hybrid = replace(SHARDED, mesh=Mesh(data=2, shard=2))
    with World(pool, "torch", hybrid, job(BLOCKS)) as world:
        world.form()
        world.every("begin_peak")
        world.settle(0, None)
        assert max(world.every("peak_bytes")) < 4 * BLOCK_BYTES


class LlamaLayer(nn.Module):
    """The parameters of a layer."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"q": (HIDDEN, HIDDEN), "k": (HIDDEN, HIDDEN), "v": (HIDDEN, HIDDEN), "o": (HIDDEN, HIDDEN)}
        sizes |= {"gate": (HIDDEN, INNER), "up": (HIDDEN, INNER), "down": (INNER, HIDDEN)}
        self.projections = nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})
        self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN) for _ in range(2))


def llama(layers: int) -> nn.Module:
    """In bfloat16, initialized twice as transformers does: by the layers themselves, and then by a normal one."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        ends = nn.Embedding(WORDS, HIDDEN), nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, WORDS, bias=False)
        model = nn.Sequential(ends[0], *(LlamaLayer() for _ in range(layers)), *ends[1:])
    finally:
        torch.set_default_dtype(torch.float32)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
    return model


@pytest.mark.soak
@pytest.mark.timeout(2 * SLOW_S)
@pytest.mark.parametrize(("layers", "room_bytes"), [(4, 8 << 30), (32, 24 << 30)], ids=["1B", "7B"])
def test_eight_ranks_build_a_large_model_on_one_machine(pool: Pool, layers: int, room_bytes: int) -> None:
    eight = replace(SHARDED, mesh=Mesh(shard=8))
    with World(pool, "torch", eight, spec(functools.partial(llama, layers))) as world:
        before = world.every("begin_peak")
        world.form(SLOW_S, answer_s=SLOW_S)
        peaks = world.every("peak_bytes")
    print(f"{sum(before) / 2**30:.1f} GiB before, then at most {sum(peaks) / 2**30:.1f} GiB more: {peaks}")
    assert sum(before) + sum(peaks) < room_bytes


def warmed(pool: Pool, layout: Plan, small: ModelSpec) -> set[int]:
    """Processes that have imported what the layout needs. Their bits are those of one device."""
    with World(pool, "torch", layout, small) as world:
        world.start()
        held = world.every("held_digests")
    whole = expected(4)
    assert {name for each in held for name in each} == whole.keys()
    for each in held:
        for name, (inside, digest) in each.items():
            assert digests([whole[name][inside]])[0] == digest, name
    return {*world.pids}
