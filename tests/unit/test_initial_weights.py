"""Weights that a model starts from (`initial_weights=`): files, of which each rank reads what it holds."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import trainwright as tw
from tests.support.planner_cases import decide
from tests.support.torch_engines import Files, adam, feed, loss, one_device, plan, saved, spec
from trainwright.core.errors import CheckpointError, JobError, PlanError
from trainwright.core.frameworks import keep_freed_memory
from trainwright.core.initial_weights import InitialWeights
from trainwright.core.job import Job
from trainwright.planning.job_description import description_changes
from trainwright.planning.job_preparation import prepare, profile_of
from trainwright.runtime.function_trial import run_trial, task_of
from trainwright.storage.object_store import open_store
from trainwright.storage.weight_files import WeightFiles, open_weights
from trainwright.strategies.torch.checkpoint.initial_weights import check_weights, load_slices, match_names
from trainwright.strategies.torch.checkpoint.safetensors_files import take_weights
from trainwright.strategies.torch.shard_layout import ShardSlice
from trainwright.strategies.torch.training.train_state import TorchReplica


class Tied(nn.Module):
    """A tied pair, a buffer and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8, bias=False)
        self.again = nn.Linear(4, 8, bias=False)
        self.again.weight = self.first.weight
        self.register_buffer("seen", torch.zeros(3))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.first(x) + self.again(x)) + self.seen.sum())


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Tied()


def frozen() -> nn.Module:
    """All but the head is frozen; the head is drawn."""
    model = on_meta()
    model.first.weight.requires_grad_(False)  # type: ignore[union-attr,operator]
    model.head = nn.Linear(8, 3)
    return model


def values(seed: int = 1, **changes: Tensor) -> dict[str, Tensor]:
    """Names as Hugging Face writes them: of tied parameters, one."""
    random = torch.Generator().manual_seed(seed)
    made = Tied().state_dict()
    del made["again.weight"]
    return {name: torch.randn(value.shape, generator=random) for name, value in made.items()} | changes


def folder(place: Path, tensors: Mapping[str, Tensor], shards: int = 1) -> str:
    """Write a folder as Hugging Face does; with several shards, an index too."""
    place.mkdir(parents=True, exist_ok=True)
    if shards == 1:
        save_file(dict(tensors), place / "model.safetensors", {"format": "pt"})
        return str(place)
    names = sorted(tensors)
    files = {name: f"model-{number % shards + 1:05}-of-{shards:05}.safetensors" for number, name in enumerate(names)}
    for file in {*files.values()}:
        save_file({name: tensors[name] for name in names if files[name] == file}, place / file, {"format": "pt"})
    (place / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return str(place)


def opened(path: str, **options: Any) -> WeightFiles:
    return open_weights(InitialWeights(path, **options))


def starting(path: str, model: Any = Tied, **changes: Any) -> Any:
    """The job of the engine with these weights."""
    options = {name: changes.pop(name) for name in ("new", "unused", "rename") if name in changes}
    files = opened(path, **options)
    return spec(model=model, weights=files, initial_weights=files.options, **changes)


def trained(engine: Any, first: int = 0, last: int = 4) -> Any:
    for step in range(first, last):
        engine.train_step(feed(step=step))
    return engine


def by_hand(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A plain loop from these weights."""
    model = Tied()
    model.load_state_dict({**tensors, "again.weight": tensors["first.weight"]})
    optimizer = adam(model.parameters())
    for step in range(4):
        (given,) = feed(step=step).parts[0]
        x, y = (torch.from_numpy(given.columns[name]) for name in "xy")
        optimizer.zero_grad()
        loss(model(x), y).mean().backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("model", [Tied, on_meta])
@pytest.mark.parametrize("shards", [1, 3])
def test_training_equals_a_plain_loop_from_the_loaded_state(tmp_path: Path, model: Any, shards: int) -> None:
    tensors = values()
    engine = trained(one_device(starting(folder(tmp_path, tensors, shards), model)))
    found = engine.replica.model.state_dict()
    for name, value in by_hand(tensors).items():
        torch.testing.assert_close(found[name], value, msg=name)
    assert engine.replica.model.first.weight is engine.replica.model.again.weight


def test_a_file_an_index_and_a_bucket(tmp_path: Path) -> None:
    tensors = values()
    one, many = folder(tmp_path / "one", tensors), folder(tmp_path / "many", tensors, 2)
    store = open_store("memory://initial-weights/base")
    store.put("model.safetensors", (tmp_path / "one" / "model.safetensors").read_bytes())
    paths = (one, f"{one}/model.safetensors", many, f"{many}/model.safetensors.index.json", store.uri)
    found = [opened(path) for path in paths]
    assert len({each.digest for each in found}) == 1, "the same values, however they are stored"
    for each in found[-2:]:
        model = Tied()
        load_slices(model, each, match_names(model, each, ""), {})
        assert torch.equal(model.head.weight, tensors["head.weight"])
    again = pickle.loads(pickle.dumps(found[0]))
    assert again == replace(found[0], store=again.store) and again.store.uri == found[0].store.uri


class Counting:
    """A source that counts what is read."""

    def __init__(self, files: WeightFiles) -> None:
        self.options, self.tensors, self.digest, self.uri_of = files.options, files.tensors, files.digest, files.uri_of
        self.check, self._read, self.read_bytes = files.check, files.read, 0

    def read(self, file: str, start: int, end: int) -> memoryview:
        self.read_bytes += end - start
        return self._read(file, start, end)


def test_a_rank_reads_its_rows_alone_and_its_columns_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainwright.strategies.torch.checkpoint.initial_weights._CHUNK_BYTES", 1000)
    whole = torch.arange(64.0 * 32).view(64, 32).bfloat16()
    files = opened(folder(tmp_path, {"weight": whole}))
    for start, stop, read_bytes in (((16, 0), (32, 32), 16 * 64), ((0, 8), (64, 24), 64 * 64)):
        part = nn.Linear(stop[1] - start[1], stop[0] - start[0], bias=False)
        counting = Counting(files)
        boxes = {"weight": ShardSlice(shape=(64, 32), start=start, stop=stop)}
        load_slices(part, counting, files.tensors, boxes)
        expected = whole[start[0] : stop[0], start[1] : stop[1]].float()
        assert torch.equal(part.weight, expected) and counting.read_bytes == read_bytes


def test_names_and_shapes_that_do_not_fit_are_named_with_their_file(tmp_path: Path) -> None:
    tensors = values(**{"head.weight": torch.zeros(5, 8), "extra.bias": torch.zeros(2)})
    del tensors["seen"]
    files = opened(folder(tmp_path, tensors, 2))
    with pytest.raises(JobError) as caught:
        check_weights(Tied(), files)
    shape, missing, unused = caught.value.problems
    where = files.uri_of(files.tensors["head.weight"].file)
    assert f"'head.weight' of the model has shape (3, 8), and 'head.weight' of {where} has (5, 8)" in shape
    assert "has no 'seen' (in the files 'seen')" in missing and "InitialWeights(new=...)" in missing
    assert f"the model has no 'extra.bias' of {files.uri_of(files.tensors['extra.bias'].file)}" in unused
    chosen = replace(files, options=InitialWeights(str(tmp_path), new=("head.*", "seen"), unused=("extra.*",)))
    assert match_names(Tied(), chosen, "").keys() == {"first.weight", "again.weight"}


def test_new_parameters_keep_what_the_model_gives_them(tmp_path: Path) -> None:
    tensors = values(**{"head.weight": torch.zeros(5, 8), "head.bias": torch.zeros(5)})
    engine = one_device(starting(folder(tmp_path, tensors), frozen, new=("head.*",)))
    plain = one_device(spec(model=Tied)).replica.model
    assert torch.equal(engine.replica.model.first.weight, tensors["first.weight"])
    assert engine.replica.model.head.weight.shape == plain.head.weight.shape
    assert engine.replica.model.head.weight.abs().max() > 0
    with pytest.raises(JobError, match=r"'head.weight' of the model is on the meta device, and no file gives its"):
        one_device(starting(str(tmp_path), on_meta, new=("head.*",)))
    with pytest.raises(JobError, match=r"InitialWeights\(new=\) names 'haed.\*', which fits no tensor"):
        check_weights(Tied(), opened(str(tmp_path), new=("haed.*", "head.*")))


def test_names_may_differ(tmp_path: Path) -> None:
    tensors = {f"base.{name}": value for name, value in values().items()}
    files = opened(folder(tmp_path, tensors), rename=lambda name: f"base.{name}")
    assert match_names(Tied(), files, "")["head.bias"] is files.tensors["base.head.bias"]
    with pytest.raises(JobError, match=r"has no 'first.weight' \(in the files 'first.weight'\)"):
        check_weights(Tied(), opened(str(tmp_path)))


def damage(place: Path, how: str) -> None:
    file = place / "model.safetensors"
    data = file.read_bytes()
    if how == "cut":
        file.write_bytes(data[:-4])
    elif how == "text":
        file.write_bytes(b"<html>not found</html>")
    elif how == "pickled":
        file.rename(place / "pytorch_model.bin")
    elif how == "other":
        file.rename(place / "weights.safetensors")
    else:
        file.unlink()


@pytest.mark.parametrize(
    "how, message",
    [
        ("cut", "is not inside its .* bytes: it is incomplete"),
        ("text", "do not begin with the header of a safetensors file"),
        ("pickled", "its weights are pickled"),
        ("other", "name one of its files, such as 'weights.safetensors'"),
        ("gone", "has no model.safetensors and no model.safetensors.index.json: give the folder"),
    ],
)
def test_folders_without_whole_weights(tmp_path: Path, how: str, message: str) -> None:
    folder(tmp_path, values())
    damage(tmp_path, how)
    with pytest.raises(JobError, match=message):
        opened(str(tmp_path))


def test_a_shard_that_is_missing_is_named(tmp_path: Path) -> None:
    folder(tmp_path, values(), 2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(JobError, match=r"there is no file .*model-00002-of-00002.safetensors"):
        opened(str(tmp_path))


def test_files_that_change_after_the_start_are_refused(tmp_path: Path) -> None:
    job = starting(folder(tmp_path, values()))
    folder(tmp_path, values(seed=2))
    with pytest.raises(JobError, match="the files have other values here than where the run was started"):
        one_device(job)


# --- The job ----------------------------------------------------------------------------------------------------------


def job(tmp_path: Path, path: str | InitialWeights, **options: Any) -> Job:
    columns = {name: feed().parts[0][0].columns[name] for name in "xy"}
    fields: dict[str, Any] = {
        "name": "tuned", "model": Tied, "optimizer": adam, "loss": loss, "inputs": "x", "targets": "y",
        "train": tw.datasets.table(columns), "batch_size": 4, "storage": str(tmp_path / "runs"),
        "initial_weights": path, **options,
    }  # fmt: skip
    return Job(**fields)


def test_other_weights_are_another_job_and_the_same_ones_elsewhere_are_not(tmp_path: Path) -> None:
    tensors = values()
    here, there = folder(tmp_path / "here", tensors), folder(tmp_path / "there", tensors, 2)
    changed = tensors["head.bias"].clone()
    changed[1] += 1e-3
    other = folder(tmp_path / "other", {**tensors, "head.bias": changed})
    first, moved, another = (prepare(job(tmp_path, path)).description for path in (here, there, other))
    assert not description_changes(first, moved)
    (line,) = description_changes(first, another)
    assert line.startswith("initial_weights: ") and "here" in line and "other" in line
    (line,) = description_changes(first, prepare(job(tmp_path, InitialWeights(here, new=("seen",)))).description)
    assert "new=(seen)" in line
    without = prepare(job(tmp_path, here).replace(initial_weights=None)).description
    assert len(description_changes(without, first)) == 1
    assert not description_changes({k: v for k, v in without.items() if k != "initial_weights"}, without)


def test_weights_that_do_not_fit_are_refused_before_workers_start(tmp_path: Path) -> None:
    tensors = values(**{"head.weight": torch.zeros(5, 8)})
    prepared = prepare(job(tmp_path, folder(tmp_path / "base", tensors)))
    with pytest.raises(JobError, match=r"'head.weight' of the model has shape \(3, 8\)"):
        profile_of(prepared)


def test_a_model_on_the_meta_device_is_tried_before_workers_start(tmp_path: Path) -> None:
    prepared = prepare(job(tmp_path, folder(tmp_path / "base", values()), model=on_meta))
    assert profile_of(prepared).framework == "torch"
    found = run_trial(task_of(prepared))
    assert found.error is None and not found.untried


def test_parameter_servers_refuse_it(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="its servers do not have initial_weights="):
        decide(initial_weights="base", strategy="parameter_server", workers=2)
    with pytest.raises(JobError, match="give the path or URI as a str"):
        tw.InitialWeights(Path("base"))  # type: ignore[arg-type]
    with pytest.raises(JobError, match="initial_weights= is empty"):
        job(tmp_path, InitialWeights(" "))


# --- Adapters on loaded weights ---------------------------------------------------------------------------------------


def adapted(path: str, **changes: Any) -> Any:
    return starting(path, frozen, new=("head.*",), save_frozen=False, **changes)


def test_an_adapter_on_loaded_weights_is_stored_without_them(tmp_path: Path) -> None:
    base = folder(tmp_path / "base", values())
    unbroken = trained(one_device(adapted(base)))
    files = saved(unbroken)
    assert json.loads(files.files["state.json"])["tensors"]["model"].keys() == {"seen", "head.weight", "head.bias"}
    resumed = one_device(adapted(base))
    resumed.load(saved(trained(one_device(adapted(base)), 0, 2)))
    assert saved(trained(resumed, 2, 4)).files == files.files
    model = frozen()
    take_weights(model, files, opened(base, new=("head.*",)))
    for name, value in unbroken.replica.model.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_another_base_is_refused(tmp_path: Path) -> None:
    files: Files = saved(trained(one_device(adapted(folder(tmp_path / "base", values())))))
    other = folder(tmp_path / "other", values(seed=2))
    with pytest.raises(CheckpointError, match=r"frozen parameters: [0-9a-f]{16} when it was trained, [0-9a-f]{16} as"):
        one_device(adapted(other)).load(files)
    with pytest.raises(CheckpointError, match=r"let model.. make the parameters that it made"):
        take_weights(frozen(), files, opened(other, new=("head.*",)))


# --- Memory -----------------------------------------------------------------------------------------------------------


LAYERS, WIDTH = 16, 2048  # 16 MiB each


def large_on_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(LAYERS)))


def memory_bytes(name: str) -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1]) * 1024


def kept_half(model: nn.Module) -> dict[str, ShardSlice]:
    """Keep the first half of each layer's rows, as an engine does."""
    slices = {}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear):
            slices[f"{name}.weight"] = ShardSlice.share(layer.weight.shape, 0, 0, 2)
            layer.weight = nn.Parameter(layer.weight.detach()[: WIDTH // 2].clone())
    return slices


def test_a_rank_never_has_all_of_the_weights_in_memory(tmp_path: Path) -> None:
    files = Counting(opened(folder(tmp_path, {f"{n}.0.weight": torch.ones(WIDTH, WIDTH) for n in range(LAYERS)})))
    job = spec(model=large_on_meta, initial_weights=files.options, weights=files)
    size_bytes = LAYERS * WIDTH * WIDTH * 4
    keep_freed_memory()  # as in a worker
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = memory_bytes("VmRSS")
    replica = TorchReplica(job, plan(), torch.device("cpu"), "rank 0", place=kept_half)
    peak = memory_bytes("VmHWM") - before
    assert files.read_bytes == size_bytes // 2 and all(each.min() == 1.0 for each in replica.model.parameters())
    assert peak < 0.75 * size_bytes, f"{peak:,} bytes at most, for half of {size_bytes:,}"
