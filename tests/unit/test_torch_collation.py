"""Collation in the torch engines: keyword arguments, models that return objects, padding that changes no result."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.torch_engines import adam, feed, loss, one_device, plan, saved, spec
from tests.support.torch_profile import profile_model
from trainwright.core.data import Batch, Terms, fold_seed
from trainwright.core.engine import Collation, Pad
from trainwright.core.errors import DataError, JobError
from trainwright.core.topology import Capabilities
from trainwright.strategies.torch.checkpoint.safetensors_files import load_weights
from trainwright.strategies.torch.engines.base import OneDevice
from trainwright.strategies.torch.training.batch_tensors import to_tensor

WORDS, WIDTH, CLASSES = 11, 4, 3
CPU = torch.device("cpu")


@dataclass
class Output:
    """What models in the style of Hugging Face return."""

    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...] = ()
    cache: Any = None


class Reader(nn.Module):
    """Averages the embeddings of the real tokens, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH, dtype=torch.float64)
        self.head = nn.Linear(WIDTH, CLASSES, dtype=torch.float64)

    def forward(self, *, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Output:
        real = attention_mask[..., None].double()
        states = self.embedding(input_ids) * real
        return Output(logits=self.head(states.sum(1) / real.sum(1)), hidden=(states.sum(1), states.amax(1)))


def tokens(rows: int = 12, seed: int = 0) -> Batch:
    """Rows of 1 to 9 tokens."""
    random = np.random.default_rng(seed)
    column = np.empty(rows, dtype=object)
    column[:] = [random.integers(0, WORDS, random.integers(1, 10)) for _ in range(rows)]
    columns = {"tokens": column, "y": random.integers(0, CLASSES, rows)}
    return Batch(columns=columns, weights=np.ones(rows), samples=np.arange(rows))


def logits_loss(outputs: Output, targets: torch.Tensor) -> torch.Tensor:
    return loss(outputs.logits, targets)


def reading(**changes: Any) -> Any:
    fields: dict[str, Any] = {
        "model": Reader,
        "loss": logits_loss,
        "inputs": ("tokens", "tokens_mask"),
        "keywords": ("input_ids", "attention_mask"),
        "collation": Collation(pad={"tokens": Pad(value=7, multiple=4)}),
        "metrics": {"right": lambda outputs, targets: outputs.logits.argmax(1) == targets},
    }
    return spec(**{**fields, **changes})


def one_by_one(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Logits of each row alone, without any padding."""
    rows = [torch.from_numpy(row)[None] for row in batch.columns["tokens"]]
    return torch.cat([model(input_ids=row, attention_mask=torch.ones_like(row)).logits for row in rows])


def test_padded_training_equals_rows_one_by_one() -> None:
    engine = one_device(reading())
    engine.warm(feed(tokens()))
    torch.manual_seed(fold_seed(3, -1))
    model = Reader()
    optimizer = adam(model.parameters())
    for step in range(4):
        given = tokens(seed=step)
        report = engine.train_step(feed(given, step=step))
        optimizer.zero_grad()
        expected = loss(one_by_one(model, given), torch.from_numpy(given.columns["y"])).mean()
        expected.backward()
        optimizer.step()
        assert report.loss == pytest.approx(expected.item(), abs=1e-12)
    weights = load_weights(saved(engine))
    for name, value in model.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=0.0, atol=1e-12)


def test_masks_are_weights_of_a_loss_over_tokens() -> None:
    """Every token counts once: sums over micro-batches of different widths are those of the tokens alone."""

    def per_token(outputs: torch.Tensor, targets: Any) -> Terms:
        _, mask = targets
        return Terms(values=outputs, weights=mask)

    class Values(nn.Embedding):
        def __init__(self) -> None:
            super().__init__(WORDS, 1, dtype=torch.float64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)[..., 0]

    job = spec(
        model=Values,
        loss=per_token,
        inputs=("tokens",),
        targets=("tokens", "tokens_mask"),
        collation=Collation(pad={"tokens": Pad()}),
    )
    engine = one_device(job)
    parts = (tokens(5, seed=1), tokens(9, seed=2))
    sums = engine.evaluate_step(feed(*parts)).totals["loss"]
    flat = np.concatenate([row for part in parts for row in part.columns["tokens"]])
    torch.manual_seed(fold_seed(3, -1))
    expected = Values()(torch.from_numpy(flat)).sum().item()
    assert sums == (pytest.approx(expected, abs=1e-12), float(len(flat)))
    assert engine.train_step(feed(*parts)).weight == len(flat)


def test_evaluation_and_metrics_see_the_output_object() -> None:
    given = tokens()
    engine = one_device(reading())
    torch.manual_seed(fold_seed(3, -1))
    logits = one_by_one(Reader(), given)
    means = engine.evaluate_step(feed(given)).means()
    targets = torch.from_numpy(given.columns["y"])
    assert means["loss"] == pytest.approx(loss(logits, targets).mean().item(), abs=1e-12)
    assert means["right"] == pytest.approx((logits.argmax(1) == targets).double().mean().item())


def test_predictions_of_an_object_have_its_names_and_need_no_targets() -> None:
    given = tokens()
    bare = replace(given, columns={"tokens": given.columns["tokens"]})
    engine = one_device(reading())
    found = engine.predict_step(feed(bare))
    torch.manual_seed(fold_seed(3, -1))
    expected = one_by_one(Reader(), given).detach().numpy()
    assert list(found) == ["logits", "hidden_0", "hidden_1"]
    np.testing.assert_allclose(found["logits"], expected, rtol=0, atol=1e-12)
    chosen = one_device(reading(outputs=("hidden_1",))).predict_step(feed(bare))
    assert list(chosen) == ["hidden_1"] and np.array_equal(chosen["hidden_1"], found["hidden_1"])
    with pytest.raises(JobError, match="no output 'logit': did you mean 'logits'"):
        one_device(reading(outputs=("logit",))).predict_step(feed(bare))


class Items:
    """Neither a mapping nor a tuple."""

    def __init__(self, **values: Any) -> None:
        self._values = values

    def items(self) -> Any:
        return self._values.items()


class Tupled:
    def __init__(self, *values: Any) -> None:
        self._values = values

    def to_tuple(self) -> tuple[Any, ...]:
        return self._values


Pair = namedtuple("Pair", ["a", "b"])


@pytest.mark.parametrize(
    ("wrap", "names"),
    [
        (lambda x: x, ["output"]),
        (lambda x: (x, x), ["output_0", "output_1"]),
        (lambda x: Tupled(x, None, x), ["output_0", "output_2"]),
        (lambda x: Pair(x, (x, x)), ["a", "b_0", "b_1"]),
        (lambda x: OrderedDict(logits=x, more={"deep": x}), ["logits", "more_deep"]),
        (lambda x: Items(logits=x, loss=None), ["logits"]),
    ],
)
def test_outputs_of_every_kind_are_named(wrap: Any, names: list[str]) -> None:
    class Wrapped(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 2)

        def forward(self, x: torch.Tensor) -> Any:
            return wrap(super().forward(x))

    found = one_device(spec(model=Wrapped)).predict_step(
        feed(Batch(columns={"x": np.ones((3, 4), np.float32)}, weights=np.ones(3), samples=np.arange(3)))
    )
    assert list(found) == names and all(value.shape == (3, 2) for value in found.values())


def test_a_collate_function_may_return_tensors_and_other_names() -> None:
    def collate(columns: dict[str, Any]) -> dict[str, Any]:
        rows = [torch.from_numpy(row) for row in columns["tokens"]]
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)
        return {"ids": ids.clamp(min=0), "real": ids >= 0, "labels": columns["y"]}

    job = reading(inputs=("ids", "real"), targets=("labels",), collation=Collation(function=collate))
    one, other = one_device(job), one_device(reading())
    for step in range(3):
        given = feed(tokens(seed=step), step=step)
        assert one.train_step(given).loss == pytest.approx(other.train_step(given).loss, abs=1e-12)
    with pytest.raises(JobError, match="name the column 'idss', but there is none: did you mean 'ids'"):
        one_device(replace(job, inputs=("idss", "real"))).train_step(feed(tokens()))


def test_a_step_of_ones_own_gets_the_padded_columns_and_no_text() -> None:
    seen: dict[str, tuple[int, ...]] = {}

    def step(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        seen.update({name: tuple(value.shape) for name, value in batch.items()})
        outputs = model(input_ids=batch["tokens"], attention_mask=batch["tokens_mask"])
        return loss(outputs.logits, batch["y"])

    one = one_device(reading(loss=None, step=step, inputs=(), keywords=(), targets=(), metrics={}))
    texts = {"file": np.array([f"{row}.png" for row in range(12)], dtype=object), "key": np.full(12, b"x")}
    given = replace(tokens(), columns={**tokens().columns, **texts})
    assert one.train_step(feed(given)).loss == pytest.approx(
        one_device(reading()).train_step(feed(tokens())).loss, abs=1e-12
    )
    assert seen == {"tokens": (12, 12), "y": (12,), "tokens_mask": (12, 12)}
    columns = {**Collation(pad={"tokens": Pad()})(tokens()), **texts}
    assert not profile_model(Reader(), columns, (), step=step).untraced


def test_ragged_rows_without_padding_are_refused_and_equal_ones_are_stacked() -> None:
    with pytest.raises(DataError, match="column 'tokens' is ragged") as caught:
        one_device(reading(collation=Collation(), inputs=("tokens", "y"))).train_step(feed(tokens()))
    assert "tw.Pad()" in caught.value.remedy
    column = np.empty(2, dtype=object)
    column[:] = [np.arange(3), np.arange(3)]
    assert to_tensor("x", column, CPU).tolist() == [[0, 1, 2], [0, 1, 2]]


def test_static_shapes_demand_a_length_when_the_engine_is_built() -> None:
    class Static(OneDevice):
        capabilities = Capabilities(static_shapes=True)

    engine = Static()
    with pytest.raises(JobError, match=r"give Pad\(length=\.\.\.\)"):
        engine.build(reading(), plan())


def test_arrays_and_masks_reach_torch_without_a_copy() -> None:
    collated = Collation(pad={"tokens": Pad()})(tokens())
    for name in ("tokens", "tokens_mask", "y"):
        assert to_tensor(name, collated[name], CPU).data_ptr() == collated[name].ctypes.data


def test_a_model_that_takes_keywords_is_profiled_by_them() -> None:
    sample = Collation(pad={"tokens": Pad(length=9)})(tokens(1))
    profile = profile_model(Reader, sample, ("tokens", "tokens_mask"), keywords=("input_ids", "attention_mask"))
    assert {layer.name: layer.flops for layer in profile.layers}["head"] == 2 * WIDTH * CLASSES
