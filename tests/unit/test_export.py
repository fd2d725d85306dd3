"""Exported models compute what the trained model computes, for any number of rows; what cannot be exported is said."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import trainwright as tw
from tests.support.prediction_jobs import columns_of, job, train
from tests.support.torch_engines import Net, spec
from trainwright.core.data import Batch
from trainwright.core.errors import JobError, MissingFramework
from trainwright.strategies.torch import model_files

ROWS = 5


class Several(Net):
    """Two inputs, given by name, one of them ragged; outputs by name, one of which is not a tensor."""

    def forward(self, *, x: Tensor, words: Tensor, mask: Tensor) -> dict[str, Any]:
        mean = (words * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
        return {"logits": self.second(self.middle(self.first(x + mean))), "more": {"mean": mean}, "cache": object()}


def several(folder: Path) -> tuple[tw.Job, nn.Module]:
    """A job with a checkpoint, and its model."""
    words = np.empty(ROWS, object)
    words[:] = [np.arange(length, dtype=np.float32) for length in (3, 1, 2, 5, 4)]
    columns = {"x": np.random.default_rng(1).normal(size=(ROWS, 4)).astype(np.float32), "words": words}
    chosen = job(
        folder, model=Several, inputs={"x": "x", "words": "words", "mask": "words_mask"}, pad={"words": tw.Pad()},
        loss=lambda outputs, targets: nn.functional.cross_entropy(outputs["logits"], targets, reduction="none"),
        train=tw.datasets.table({**columns, "y": np.zeros(ROWS, np.int64)}),
    )  # fmt: skip
    held = {**columns, "y": np.zeros(ROWS, np.int64)}
    return chosen, train(chosen, 2, lambda _: Batch(columns=held, weights=np.ones(ROWS), samples=np.arange(ROWS)))


def given(rows: int, width: int) -> dict[str, Tensor]:
    random = np.random.default_rng(rows)
    real = np.arange(width) < random.integers(1, width + 1, (rows, 1))
    return {
        "x": torch.from_numpy(random.normal(size=(rows, 4)).astype(np.float32)),
        "words": torch.from_numpy((random.normal(size=(rows, width)) * real).astype(np.float32)),
        "mask": torch.from_numpy(real),
    }


def test_a_traced_forward_takes_any_number_of_rows_and_is_called_as_the_model(tmp_path: Path) -> None:
    chosen = job(tmp_path)
    model, path = train(chosen, 3, columns_of), str(tmp_path / "m.pt2")
    assert tw.export(chosen, path) == path
    loaded = torch.export.load(path).module()
    for rows in (1, 5):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(loaded(x), model(x))


def test_inputs_by_name_stay_so_and_a_padded_column_has_any_width(tmp_path: Path) -> None:
    chosen, model = several(tmp_path)
    loaded = torch.export.load(tw.export(chosen, str(tmp_path / "m.pt2"))).module()
    for rows, width in ((1, 5), (5, 2)):
        columns = given(rows, width)
        found, expected = loaded(**columns), model(**columns)
        assert list(found) == ["logits", "more_mean"]
        torch.testing.assert_close(found["logits"], expected["logits"])
        torch.testing.assert_close(found["more_mean"], expected["more"]["mean"])


def test_torch_warns_of_nothing_while_an_onnx_file_is_written(tmp_path: Path) -> None:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.onnx._internal.exporter._registration")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always", FutureWarning)
            tw.export(several(tmp_path)[0], str(tmp_path / "m.onnx"))
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
    assert not told and not [each for each in warned if issubclass(each.category, FutureWarning)]


@pytest.mark.parametrize("most_bytes", [1 << 30, 0], ids=["one file", "two files"])
def test_onnx_names_inputs_as_columns_and_outputs_as_predictions(
    most_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onnx.reference import ReferenceEvaluator

    monkeypatch.setattr(model_files, "_ONE_FILE_BYTES", most_bytes)
    chosen, model = several(tmp_path)
    loaded = ReferenceEvaluator(tw.export(chosen, str(tmp_path / "m.onnx")))
    assert loaded.input_names == ["x", "words", "words_mask"] and loaded.output_names == ["logits", "more_mean"]
    files = ["m.onnx"] if most_bytes else ["m.onnx", "m.onnx.data"]
    assert sorted(path.name for path in tmp_path.glob("m*")) == files
    for rows, width in ((1, 5), (5, 2)):
        columns = given(rows, width)
        fed = {"x": columns["x"].numpy(), "words": columns["words"].numpy(), "words_mask": columns["mask"].numpy()}
        expected = model(**columns)
        for found, value in zip(loaded.run(None, fed), (expected["logits"], expected["more"]["mean"]), strict=True):
            np.testing.assert_allclose(found, value.detach().numpy(), atol=1e-5)


def test_a_model_with_save_pretrained_writes_its_own_folder(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    rows = {"tokens": np.arange(24).reshape(4, 6) % 11}
    chosen = job(
        tmp_path, model=lambda: LlamaForCausalLM(config), inputs={"input_ids": "tokens"}, targets="tokens",
        loss=lambda outputs, tokens: outputs.logits.square().mean(-1), train=tw.datasets.table(rows),
    )  # fmt: skip
    model = train(chosen, 1, lambda _: Batch(columns=rows, weights=np.ones(4), samples=np.arange(4)))
    tw.export(chosen, f"{tmp_path}/llama-1.2/")
    again = LlamaForCausalLM.from_pretrained(tmp_path / "llama-1.2").eval()
    tokens = torch.arange(10).view(2, 5)
    torch.testing.assert_close(again(tokens).logits, model(tokens).logits, rtol=0, atol=0)
    traced = torch.export.load(tw.export(chosen, str(tmp_path / "m.pt2"))).module()
    told = traced(input_ids=torch.from_numpy(rows["tokens"][:3]))
    torch.testing.assert_close(told["logits"], model(torch.from_numpy(rows["tokens"][:3])).logits)


class Deciding(Net):
    """Its flow depends on values."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else super().forward(-x)


def test_what_cannot_be_exported_is_said_with_the_input_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = job(tmp_path, model=Deciding)
    train(chosen, 1, columns_of)
    for path, told in (
        ("m.pt2", r"'m.pt2': torch.export cannot trace .* given x \(2, 4\) float32: .* or export to `.safetensors`"),
        ("folder/", r"'folder/': .*save_pretrained\(\), and Deciding has none: export to `.safetensors`"),
        ("m.bin", r"exported to `.safetensors`, `.pt`, `.pt2`, `.onnx`, or a folder that ends in `/`"),
    ):
        with pytest.raises(JobError, match=told):
            tw.export(chosen, path)
    with pytest.raises(JobError, match="inputs= is missing: name the columns given to the model"):
        tw.export(chosen.replace(inputs=(), targets=(), loss=None, step=lambda model, batch: model(batch["x"]).sum(1)),
                  "m.pt2")  # fmt: skip
    find = importlib.util.find_spec
    monkeypatch.setattr(model_files.importlib.util, "find_spec", lambda name: None if name == "onnx" else find(name))
    with pytest.raises(MissingFramework, match=r"'m.onnx': ONNX needs onnx.*: pip install onnx onnxscript"):
        tw.export(chosen, "m.onnx")


def test_keras_models_write_their_preset_and_say_how_they_become_onnx(tmp_path: Path) -> None:
    import keras

    from trainwright.strategies.tensorflow.training import checkpoint_files

    class Preset(keras.Sequential):  # type: ignore[misc]
        """As those of Keras-hub."""

        def save_to_preset(self, path: str) -> None:
            Path(path, "config.json").write_text("{}")

    model = Preset([keras.Input((4,)), keras.layers.Dense(1)])
    checkpoint_files.export(model, f"{tmp_path}/", spec())
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    with pytest.raises(JobError, match=r"'m.onnx': .* or none for the folder of a SavedModel; then python -m tf2onnx"):
        checkpoint_files.export(model, "m.onnx", spec())
