"""Batches, copies, checkpoints and profiles of the torch engines."""

from __future__ import annotations

import io
import itertools
import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from tests.support.torch_engines import (
    Chosen,
    Files,
    Net,
    Weighing,
    batch_normed,
    double,
    feed,
    one_device,
    saved,
    spec,
)
from tests.support.torch_profile import profile_model
from trainwright.core.data import fold_seed
from trainwright.core.errors import CheckpointError, DataError, JobError, NonFiniteLoss
from trainwright.strategies.torch.checkpoint import host_state
from trainwright.strategies.torch.checkpoint import safetensors_files as files_module
from trainwright.strategies.torch.checkpoint.safetensors_files import load_weights, to_safetensors
from trainwright.strategies.torch.profiling import take_weights
from trainwright.strategies.torch.training import batch_tensors as batches


def test_columns_share_memory_where_they_may() -> None:
    cpu, array = torch.device("cpu"), np.arange(6.0)
    assert np.shares_memory(batches.to_tensor("x", array, cpu).numpy(), array)
    array.flags.writeable = False
    assert not np.shares_memory(batches.to_tensor("x", array, cpu).numpy(), array)
    assert batches.to_tensor("x", array[::-1], cpu).tolist() == array[::-1].tolist()
    assert batches.to_tensor("x", array.astype(">f4"), cpu).tolist() == array.tolist()


@pytest.mark.parametrize("values", [["a", "b"], [object(), None], [b"a", b"b"], ["2020-01-01"]])
def test_columns_that_are_no_numbers_are_refused(values: list[Any]) -> None:
    dtype = "datetime64[D]" if str(values[0]).startswith("2020") else None
    with pytest.raises(DataError, match=r"(?s)column 'x' holds .*turn it into numbers"):
        batches.to_tensor("x", np.array(values, dtype=dtype), torch.device("cpu"))


def test_parameters_that_are_not_finite_are_never_written() -> None:
    engine, files = one_device(), Files()
    engine.train_step(feed())
    with torch.no_grad():
        engine.replica.model.second.bias[1] = torch.inf
    with pytest.raises(NonFiniteLoss, match=r"parameter 'second\.bias' is not finite after step 1"):
        engine.save(engine.snapshot(), files)
    assert not files.files


def test_a_snapshot_shares_nothing_with_the_training() -> None:
    engine = one_device()
    engine.train_step(feed())
    copy = engine.snapshot()
    files = Files()
    engine.train_step(feed(step=1))
    engine.save(copy, files)
    assert copy.step == 1
    assert copy.size_bytes > sum(value.nbytes for value in load_weights(files).values())
    assert engine.restore(copy).step == 1
    assert saved(engine).files == files.files
    engine.train_step(feed(step=1))
    again = Files()
    engine.save(copy, again)
    assert again.files == files.files
    assert not hasattr(engine.save, "__self__"), "whoever is to write a copy holds no engine"


def test_settings_that_training_changed_are_saved_and_the_jobs_are_not() -> None:
    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step(closure)
            self.param_groups[0]["count"] = self.param_groups[0].get("count", 0) + 1

    engine = one_device(spec(optimizer=lambda p: Counting(p, lr=0.1), schedule=lambda step, total: 0.5))
    engine.train_step(feed())
    files = saved(engine)
    assert json.loads(files.files["state.json"])["options"] == [{"count": 1}]
    other = one_device(spec(optimizer=lambda p: Counting(p, lr=0.7)))
    other.load(files)
    assert other.replica.optimizer.param_groups[0]["count"] == 1
    assert other.replica.optimizer.param_groups[0]["lr"] == 0.7


class Wide(Net):
    """Other shapes and names than Net's."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(8, 5)
        self.third = nn.Linear(5, 3)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model": Wide}, r"second.weight: shape \(3, 8\) of float32 in the checkpoint, shape \(5, 8\) of float32"),
        ({"model": double}, r"first.weight: shape \(8, 4\) of float32 in the checkpoint, shape \(8, 4\) of float64"),
        ({"optimizer": lambda p: torch.optim.SGD(p)}, "optimizer: Adam in the checkpoint, SGD in the job"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_whole(change: Mapping[str, Any], text: str) -> None:
    engine = one_device()
    engine.train_step(feed())
    other = one_device(spec(**change))
    before = saved(other).files
    with pytest.raises(CheckpointError, match=text) as raised:
        other.load(saved(engine))
    assert "start a run under a new name" in raised.value.remedy
    assert saved(other).files == before


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_a_missing_or_damaged_file_is_named(name: str) -> None:
    engine = one_device()
    files = saved(engine)
    files.files[name] = b"garbage"
    with pytest.raises(CheckpointError, match=f"{name} cannot be read"):
        engine.load(files)
    del files.files[name]
    with pytest.raises(CheckpointError, match=f"no {name}"):
        engine.load(files)


def test_the_memory_of_a_copy_is_used_again_once_nobody_holds_it() -> None:
    engine = one_device()
    engine.train_step(feed())
    first, second = engine.snapshot(), engine.snapshot()
    places = [{value.data_ptr() for value in copy.state.memory.values()} for copy in (first, second)]
    assert places[0].isdisjoint(places[1]), "both are held"
    files = Files()
    engine.save(first, files)
    del first
    engine.train_step(feed(step=1))
    third = engine.snapshot()
    assert {value.data_ptr() for value in third.state.memory.values()} == places[0]
    again = Files()
    engine.save(second, again)
    assert again.files == files.files and saved(engine).files != files.files


def test_pieces_are_a_file_of_safetensors() -> None:
    kinds = (torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn)
    tensors = {f"t{kind}": torch.arange(6).reshape(2, 3).to(kind) for kind in kinds}
    tensors |= {"none": torch.empty(0, 4), "one": torch.tensor(2.5), "columns": torch.rand(3, 5).T}
    found = safetensors.torch.load(b"".join(to_safetensors(tensors)))
    assert found.keys() == tensors.keys()
    for name, value in tensors.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
        assert [*map(bytes, to_safetensors({"": found[name]}))] == [*map(bytes, to_safetensors({"": value}))], name
    with pytest.raises(CheckpointError, match="beside holds complex128, which no checkpoint can"):
        to_safetensors({"beside": torch.zeros(1, dtype=torch.complex128)})


def test_layouts_in_memory_do_not_matter() -> None:
    def convolutional() -> nn.Module:
        layers = nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2), nn.Flatten())
        return layers.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    engine, other = one_device(spec(model=convolutional)), one_device(spec(model=convolutional, seed=4))
    engine.train_step(feed())
    other.load(saved(engine))
    assert engine.train_step(feed(step=1)) == other.train_step(feed(step=1))


def test_a_profile_counts_each_layer_for_one_sample() -> None:
    profile = profile_model(Net, {"x": np.zeros((2, 4), np.float32)}, ("x",))
    costs = {layer.name: layer for layer in profile.layers}
    assert set(costs) == {"first", "second"}
    assert (costs["first"].parameters, costs["first"].flops) == (40, 2 * 4 * 8)
    assert (costs["second"].parameter_bytes, costs["second"].output_numbers) == (27 * 4, 3)
    first, second = costs["first"], costs["second"]
    assert (first.matmuls, first.launches, first.traffic_numbers) == (1, 2, 16), (
        "the product and tanh, which is its part"
    )
    assert first.kept_numbers == 8, "tanh keeps its output, which the next layer needs too"
    loss = (3, 2, 16 * 3)  # what it keeps, its operations, what it reads and writes
    assert (second.loss_numbers, second.launches - 1, second.traffic_numbers) == loss and second.matmuls == 1
    assert profile.inexact == () and profile.trained == ((8, 128), (8, 32), (3, 96), (3, 12))
    assert profile_model(batch_normed, {"x": np.zeros((2, 4), np.float32)}, ("x",)).inexact == ("batch_norm",)


def test_a_profile_names_dropouts_and_batch_norms_that_stay_in_evaluation_mode() -> None:
    def half(*, root: bool) -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Dropout(0.0), nn.BatchNorm1d(4)).eval()
        model.training = root
        return model

    rows = {"x": np.zeros((2, 4), np.float32)}
    inner, whole = (profile_model(lambda root=root: half(root=root), rows, ("x",)) for root in (True, False))
    assert (inner.evaluating, inner.inexact) == (("1", "3"), ())
    assert (whole.evaluating, whole.inexact) == ((), ("batch_norm",)), "it is trained in training mode"


def test_a_profile_gives_operations_outside_layers_to_the_module_that_does_them() -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).sum() * (x @ x.T)

    costs = {layer.name: layer.flops for layer in profile_model(Attending, {"x": np.ones((1, 4))}, ("x",)).layers}
    assert costs == {"Attending": 2.0 * 4, "inner": 2.0 * 16}


def test_a_model_that_cannot_be_traced_is_estimated(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="trainwright.strategies.torch.profiling"):
        profile = profile_model(Weighing, {"x": np.zeros((1, 4), np.float32)}, ("x",))
    assert profile.flops == 2.0 * profile.parameters == 2.0 * 67
    assert "estimating operations from parameters" in caplog.text and "item()" in profile.untraced


def test_a_flow_that_depends_on_the_inputs_alone_is_followed() -> None:
    whole, half = (profile_model(Chosen, {"x": np.full((1, 4), x, np.float32)}, ("x",)) for x in (0.0, 60.0))
    assert not whole.untraced and not half.untraced
    assert (whole.flops, half.flops) == (2.0 * (4 * 8 + 8 * 3), 2.0 * 4 * 8)


def test_seeds_of_different_counters_differ() -> None:
    seeds = {fold_seed(3, step, micro, rank, 0) for step, micro, rank in itertools.product(range(4), repeat=3)}
    assert len(seeds) == 64


def test_a_model_that_needs_memory_to_be_built_is_built_with_it() -> None:
    def measured() -> nn.Module:
        model = Net()
        assert model.first.weight.abs().sum().item() > 0.0
        return model

    assert profile_model(measured, {"x": np.zeros((1, 4), np.float32)}, ("x",)).parameters == 67


def test_a_models_weights_are_taken_or_refused() -> None:
    files, model = saved(one_device()), Net()
    take_weights(model, files)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in load_weights(files).items())
    with pytest.raises(CheckpointError, match=r"does not fit the model"):
        take_weights(Wide(), files)


def test_a_state_is_sent_in_blocks_that_follow_from_sizes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU may have no room for all of a state that is kept on the host."""
    told: list[int | str] = []

    def broadcast(bits: torch.Tensor, **_: Any) -> Any:
        told.append(bits.nbytes)
        bits.fill_(1)
        return SimpleNamespace(wait=lambda: told.append("waited for"))

    monkeypatch.setattr(torch.distributed, "broadcast", broadcast)
    monkeypatch.setattr(host_state, "_BLOCK_BYTES", 64)
    sizes = [(2, 4), (0, 3), (2, 4), (8, 4), (1, 4), (3, 4)]
    contiguous = [torch.zeros(size, dtype=torch.int32) for size in sizes]
    permuted = [torch.zeros(size[::-1], dtype=torch.int32).t() for size in sizes]  # these go through copies
    for tensors in (contiguous, permuted):
        told.clear()
        host_state._broadcast_tensors(tensors, 0, torch.device("cpu"), None)
        assert told == [32, 32, *["waited for"] * 2, 128, "waited for", 16, 48, *["waited for"] * 2]
        assert all((tensor == 0x01010101).all() for tensor in tensors)


def test_what_another_rank_says_of_its_state_is_not_executed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """gloo lets in whoever reaches it, so that a description may come from anybody."""
    hostile = io.BytesIO()
    torch.save(Hostile(tmp_path / "executed"), hostile)
    sent = [torch.tensor([len(hostile.getvalue())]), torch.frombuffer(hostile.getbuffer(), dtype=torch.uint8)]
    monkeypatch.setattr(torch.distributed, "broadcast", lambda into, **_: into.copy_(sent.pop(0)))
    pickled = pickle.dumps(Hostile(tmp_path / "executed"))
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", lambda into, **_: pickle.loads(pickled))
    with pytest.raises(pickle.UnpicklingError):
        host_state.broadcast(None, 0, 1, torch.device("cpu"))  # type: ignore[arg-type]
    assert not (tmp_path / "executed").exists()


class Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_large_state_is_written_to_several_files(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = one_device()
    engine.train_step(feed())
    whole = saved(engine)
    monkeypatch.setattr(files_module, "MAX_FILE_BYTES", 200)
    several = saved(engine)
    assert {"model.safetensors", "model-2.safetensors", "optimizer.safetensors", "optimizer-2.safetensors"} < set(
        several.files
    )
    fresh = one_device()
    assert fresh.load(several).step == 1
    again = saved(fresh)
    monkeypatch.setattr(files_module, "MAX_FILE_BYTES", 1 << 30)
    assert saved(fresh).files == whole.files and again.files == several.files
    del several.files["optimizer-2.safetensors"]
    with pytest.raises(CheckpointError, match=r"no optimizer-2\.safetensors"):
        one_device().load(several)


class Counting(Net):
    """Carries a number of batches from one to the next, in evaluations too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("batches", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.batches = self.batches + 1
        return super().forward(x) * self.batches


def test_an_evaluation_leaves_what_a_model_carries_as_it_was() -> None:
    """A checkpoint may be taken before or after it, and a resumed run may leave it out."""
    how = spec(model=Counting)
    without, evaluated, saved_after = one_device(how), one_device(how), one_device(how)
    for engine in (without, evaluated, saved_after):
        engine.train_step(feed(step=0))
    first, second = (saved_after.evaluate_step(feed(step=0)) for _ in range(2))
    assert first.totals["loss"] != second.totals["loss"], "it is carried through the evaluation"
    assert saved(saved_after).files == saved(without).files
    evaluated.evaluate_step(feed(step=0))
    with without.whole_model() as model:  # as a callback looks at it
        model(torch.zeros(2, 4))
    for engine in (without, evaluated, saved_after):
        engine.train_step(feed(step=1))
    assert saved(evaluated).files == saved(saved_after).files == saved(without).files
    assert float(load_weights(saved(without))["batches"]) == 2


class Teaching(Net):
    """Holds a copy of its first layer that follows it, as momentum encoders and mean teachers do."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = nn.Linear(4, 8).requires_grad_(False)
        self.slow.load_state_dict(self.first.state_dict())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            for slow, fast in zip(self.slow.parameters(), self.first.parameters(), strict=True):
                if slow.dim() == 1:
                    slow.data = slow.data + 0.5 * (fast.data - slow.data)
                else:
                    slow.data.add_(0.5 * (fast.data - slow.data))
        return super().forward(x) + self.slow(x).sum(1, keepdim=True).detach() * torch.linspace(0.1, 1.0, 3)


def refusing(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Is not finite for a target of 9."""
    values = nn.functional.cross_entropy(outputs, targets.clamp(max=2), reduction="none")
    return values / (targets != 9).float()


def test_frozen_parameters_that_a_forward_changes_are_as_before_after_a_step_that_is_not_applied() -> None:
    """They are equal to the trained ones until the first step, so that the second is the first that changes them."""
    job = spec(model=Teaching, loss=refusing)
    unbroken, broken = one_device(job), one_device(job)
    bad = feed()
    bad.parts[0][0].columns["y"][3] = 9
    for step in range(6):
        unbroken.train_step(feed(step=step))
        with pytest.raises(NonFiniteLoss):
            broken.train_step(bad)
        broken.warm(feed(step=step))
        broken.train_step(feed(step=step))
    assert saved(broken).files == saved(unbroken).files
    resumed = one_device(job)
    resumed.load(saved(unbroken))
    resumed.warm(feed())
    with pytest.raises(NonFiniteLoss):
        resumed.train_step(bad)
    assert saved(resumed).files == saved(unbroken).files, "a throwaway step, and one that failed, moved them"


def test_frozen_parameters_that_a_forward_changes_must_be_saved() -> None:
    engine = one_device(spec(model=Teaching, save_frozen=False))
    with torch.no_grad():
        engine.replica.model.slow.weight.add_(1.0)
    with pytest.raises(JobError, match=r"'slow.weight' .*changes in the forward pass.*save_frozen=True"):
        engine.warm(feed())


class TeachingLater(Teaching):
    """Lets the copy follow only from some step on."""

    follows = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if self.follows else self.second(self.middle(self.first(x)))


def test_those_that_change_later_are_found_when_a_state_would_be_without_them() -> None:
    engine = one_device(spec(model=TeachingLater, save_frozen=False))
    for step in range(4):
        engine.train_step(feed(step=step))
    engine.check_unsaved()
    engine.replica.model.follows = True
    engine.train_step(feed(step=4))
    engine.snapshot()  # for a copy in memory
    with pytest.raises(JobError, match=r"'slow.weight' .*changes in the forward pass.*save_frozen=True"):
        engine.check_unsaved()


def test_frozen_parameters_that_no_state_holds_may_be_set_before_the_first_step() -> None:
    """As a transfer does, which sends all parameters of another rank."""
    engine = one_device(spec(model=TeachingLater, save_frozen=False))
    engine.check_unsaved()
    with torch.no_grad():
        engine.replica.model.slow.weight.add_(1.0)
    engine.train_step(feed())
    engine.check_unsaved()


class Merging(TeachingLater):
    """Merges an adapter into a frozen weight for evaluations, as loralib does."""

    def train(self, mode: bool = True) -> Merging:
        if mode != self.training:
            self.slow.weight.data += self.first.weight.data * (-0.1 if mode else 0.1)
        return super().train(mode)


def test_a_weight_that_an_evaluation_rounds_is_refused_where_no_state_holds_it() -> None:
    engine = one_device(spec(model=Merging, save_frozen=False))
    engine.train_step(feed())
    engine.evaluate_step(feed())
    with pytest.raises(JobError, match=r"'slow.weight' .*where eval\(\) merges an adapter into it"):
        engine.check_unsaved()
