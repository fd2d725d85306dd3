"""The language model job in its short form: trained in a pipeline, judged in bits per character, and it writes on."""

from __future__ import annotations

import copy
import hashlib
import runpy
from pathlib import Path

import numpy as np
import pytest
import sample_data
import torch
from tokenizers import Tokenizer

import trainwright as tw
from trainwright.planning.job_file import load_job

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


PARTS = {"train.txt": verses(0, 4000), "test.txt": verses(4000, 200)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the text lies already, so that nothing is fetched."""
    home: Path = tmp_path_factory.mktemp("gpt")
    text = home / "data" / "king-james"
    text.mkdir(parents=True)
    for name, content in PARTS.items():
        (text / name).write_text(content)
    return home


@pytest.fixture(autouse=True)
def there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sample_data, "KING_JAMES_SHA256", hashlib.sha256("".join(PARTS.values()).encode()).hexdigest())


def test_every_character_counts_once(folder: Path) -> None:
    """With a model that gives every token the same chance the answer is known."""
    job = load_job(str(EXAMPLES / "gpt.py"), ["size=tiny"])
    columns = {name: torch.from_numpy(column) for name, column in job.evaluate.source.arrays.items()}
    flat = torch.zeros(*columns["tokens"].shape, 512)
    bits = job.metrics["bits_per_character"](flat, (columns["tokens"], columns["new"]))
    rest = (folder / "data" / "king-james" / "test.txt").read_text()
    learnt = Tokenizer.from_file("data/king-james/tokens-512.json")
    tokens = len(learnt.encode(rest).ids)
    assert bits.weights.sum() == len(rest) and (bits.weights > 0).sum() == tokens
    total = float((bits.values * bits.weights).sum())
    assert total / len(rest) == pytest.approx(tokens * 9 / len(rest), rel=1e-5)


def test_two_optimizers_as_one_are_both() -> None:
    """Also where the rate is changed from outside, and from a state that was put in the place of theirs."""
    job = load_job(str(EXAMPLES / "gpt.py"), ["size=tiny"])
    one = job.model()
    other = copy.deepcopy(one)
    joined, rate = job.optimizer(list(one.parameters())), job.optimizer.keywords["rate"]
    inner = [each for name, each in other.named_parameters() if name.startswith("blocks.") and each.dim() == 2]
    rest = [each for name, each in other.named_parameters() if not name.startswith("blocks.") or each.dim() != 2]
    apart = [
        torch.optim.Muon(inner, lr=2 * rate, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.99), weight_decay=0.0, fused=True),
    ]
    tokens = torch.arange(64).view(2, 32)
    for _ in range(3):
        for model, steps in ((one, [joined]), (other, apart)):
            model.zero_grad()
            model(tokens).square().sum().backward()
            for optimizer in steps:
                optimizer.step()
                for group in optimizer.param_groups:
                    group["lr"] *= 0.5
        kept = {parameter: copy.deepcopy(entries) for parameter, entries in joined.state.items()}
        joined.state.clear()
        joined.state.update(kept)
    assert all(torch.equal(mine, its) for mine, its in zip(one.parameters(), other.parameters(), strict=True))


def test_it_is_trained_in_a_pipeline_and_writes_on_in_it(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    size = ["size=tiny", "epochs=1"]
    run = tw.fit(load_job(str(EXAMPLES / "gpt.py"), [*size, "plan=pp=2,schedule=1f1b,accumulation=4", "spares=0"]))
    assert 0.1 < run.metrics["bits_per_character"] < 1.0
    texts = []
    for where in ([], ["--here"]):
        capsys.readouterr()
        wish = ["And God", "--tokens", "40", "--temperature", "0", "--set", size[0], *where]
        monkeypatch.setattr("sys.argv", ["generate.py", *wish])
        runpy.run_path(str(EXAMPLES / "generate.py"), run_name="__main__")
        text, told = capsys.readouterr()
        assert ("on 2 workers, in the layout that it was trained in: pipeline" in told) == (not where)
        texts.append(text)
    assert text.startswith("And God") and "after their kind: and God saw that it was good.\n" in text
    assert texts[0] == texts[1]
