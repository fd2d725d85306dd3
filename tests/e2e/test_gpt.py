"""The language model job in its short form: trained in a pipeline, judged in bits per character, and it writes on."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
CREATURES = ("fowl", "cattle", "great whales", "creeping things", "beasts of the earth")


def verses(first: int, count: int) -> str:
    """In the manner of the text."""
    random = np.random.default_rng(first)
    kinds = [CREATURES[number] for number in random.integers(0, len(CREATURES), count)]
    return "".join(
        f"Ge{verse // 30}:{1 + verse % 30} And God made the {kind} after their kind: and God saw that it was good.\n"
        for verse, kind in enumerate(kinds, first)
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the text lies already, so that nothing is fetched."""
    home: Path = tmp_path_factory.mktemp("gpt")
    text = home / "data" / "king-james"
    text.mkdir(parents=True)
    (text / "train.txt").write_text(verses(0, 4000))
    (text / "test.txt").write_text(verses(4000, 200))
    return home


@pytest.fixture
def gpt(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The job file as a module."""
    monkeypatch.chdir(folder)
    spec = importlib.util.spec_from_file_location("gpt", EXAMPLES / "gpt.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpt", module)
    spec.loader.exec_module(module)
    return module


def test_every_character_counts_once(gpt: ModuleType, folder: Path) -> None:
    """With a model that gives every token the same chance the answer is known."""
    job = gpt.job("tiny")
    columns = {name: torch.from_numpy(column) for name, column in job.evaluate.source.arrays.items()}
    flat = torch.zeros(*columns["tokens"].shape, gpt.SIZES["tiny"].vocabulary)
    bits = job.metrics["bits_per_character"](flat, (columns["tokens"], columns["new"]))
    rest = (folder / "data" / "king-james" / "test.txt").read_text()
    learnt = Tokenizer.from_file(str(folder / "data" / "king-james" / "tokens-512.json"))
    tokens = len(learnt.encode(rest).ids)
    assert bits.weights.sum() == len(rest) and (bits.weights > 0).sum() == tokens
    total = float((bits.values * bits.weights).sum())
    assert total / len(rest) == pytest.approx(tokens * 9 / len(rest), rel=1e-5)


def command(folder: Path, *arguments: object) -> str:
    """What a Python program prints that must succeed."""
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent)}
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=folder, env=environment, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_is_trained_in_a_pipeline_and_writes_on(folder: Path) -> None:
    size = ("--set", "size=tiny", "--set", "batch_size=64")
    layout = ("--set", "plan=pp=2,schedule=1f1b,accumulation=4", "--set", "spares=0")
    told = command(folder, "-m", "trainwright", "fit", EXAMPLES / "gpt.py", *size, *layout)
    found = re.search(r"bits_per_character (\d\.\d+)", told)
    assert found and 0.1 < float(found[1]) < 1.0, told
    wish = ("And God", "--tokens", 40, "--temperature", 0)
    text = command(folder, EXAMPLES / "generate.py", *wish, *size)
    assert text.startswith("And God") and "after their kind: and God saw that it was good.\n" in text
