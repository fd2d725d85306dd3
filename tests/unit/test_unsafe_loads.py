"""Nothing that comes from storage can execute: no unsafe loader is called, and planted pickles are refused."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.processes import ROOT
from trainwright.core.errors import CheckpointError
from trainwright.strategies.torch.distillation.model_backend import take_file

# Pickles that never lie in storage: they go from a process of the run to another, over Ray.
WITHIN_THE_RUN = {
    "app/runtime/worker_actor.py", "app/runtime/function_trial.py",
    "app/core/pickling.py", "app/integrations/rank_channel.py", "app/worker/worker_config.py",
    "datasets/formats/ray_dataset.py", "datasets/formats/user_loaders.py", "datasets/ray_data/block_stream.py",
    "datasets/ray_data/delivery_pipeline.py", "datasets/ray_data/delivery_actor.py",
    "datasets/ray_data/piece_blocks.py",
    "datasets/metadata_cache.py", "datasets/dataset.py",
}  # fmt: skip
LOADERS = ("cloudpickle.loads", "cloudpickle.load", "loads")  # the last is that of core.byvalue
UNSAFE = {
    "pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.load", "marshal.loads", "shelve.open", "joblib.load",
    "dill.load", "dill.loads", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "eval", "os.system",
    "pd.read_pickle", "pandas.read_pickle", "keras.config.enable_unsafe_deserialization",
}  # fmt: skip
ONLY_WITH = {"torch.load": ("weights_only", True), "np.load": ("allow_pickle", False)}


def calls(source: str) -> list[tuple[str, ast.Call]]:
    return [(ast.unparse(node.func), node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]


def unsafe(source: str, *, within: bool) -> list[str]:
    """Calls that can execute what they read."""
    found = []
    for name, call in calls(source):
        options = {one.arg: ast.literal_eval(one.value) for one in call.keywords if isinstance(one.value, ast.Constant)}
        wanted = ONLY_WITH.get(name)
        safe = wanted is None or options.get(wanted[0]) is wanted[1]
        shell = name.startswith("subprocess.") and options.get("shell") is True
        if name in UNSAFE or not safe or shell or options.get("safe_mode") is False:
            found.append(f"{name} in line {call.lineno}")
        if name in LOADERS and not within:
            found.append(f"{name} in line {call.lineno}")
    return found


def test_no_unsafe_loader_is_called() -> None:
    sources = {
        str(path.relative_to(ROOT)): path
        for top in ("app", "strategies", "datasets")
        for path in (ROOT / top).rglob("*.py")
    }
    found = {name: unsafe(path.read_text(), within=name in WITHIN_THE_RUN) for name, path in sources.items()}
    assert {name: bad for name, bad in found.items() if bad} == {}
    used = {name: {called for called, _ in calls(sources[name].read_text())} for name in WITHIN_THE_RUN}
    assert not {name for name, called in used.items() if called.isdisjoint(LOADERS)}


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(path)", "torch.load(path, weights_only=False)", "np.load(x, allow_pickle=True)", "np.load(x)",
        "pickle.loads(x)", "cloudpickle.loads(x)", "loads(x)", "eval(x)", "keras.models.load_model(x, safe_mode=False)",
        "subprocess.run(x, shell=True)", "yaml.load(x)",
    ],
)  # fmt: skip
def test_the_check_sees_them(source: str) -> None:
    assert unsafe(source, within=False)


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.mark),)


def test_a_pickle_in_the_place_of_weights_is_refused(tmp_path: Path) -> None:
    mark, model = tmp_path / "executed", nn.Linear(2, 2)
    for name in ("weights.pt", "weights.safetensors"):
        torch.save({"weight": Bomb(mark), "bias": torch.zeros(2)}, tmp_path / name)
        with pytest.raises(CheckpointError, match="weights do not fit"):
            take_file(model, str(tmp_path / name))
    assert not mark.exists()
