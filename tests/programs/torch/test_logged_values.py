"""Values of `tw.log` and metrics with state: on any layout they are those of a plain loop over all rows."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import trainwright as tw
from tests.support.rank_processes import Exchange, formed, run_ranks
from tests.support.torch_engines import adam, batch, double, feed, one_device, plan, spec
from tests.support.torch_jobs import F1
from trainwright.core.data import Batch, Feed, MetricSums, Terms, fold_seed, zero_weight
from trainwright.core.engine import ModelSpec
from trainwright.core.errors import JobError, UserCodeError
from trainwright.core.metric_states import compute_states, is_stateful, metric_states, with_states
from trainwright.core.plan import Mesh, Plan
from trainwright.strategies.torch.engines.data_parallel import DataParallel
from trainwright.strategies.torch.engines.fsdp import Sharded
from trainwright.strategies.torch.engines.pipeline import Pipeline
from trainwright.strategies.torch.engines.tensor_parallel import TensorParallel

ROWS = (12, 1, 11)  # of each global batch: in the second, the other ranks have none
RANKS = 2
LAYOUTS: dict[str, tuple[Any, Plan]] = {
    "data_parallel": (DataParallel, plan(RANKS)),
    "sharded": (Sharded, plan(mesh=Mesh(shard=RANKS))),
    "tensor_parallel": (TensorParallel, plan(mesh=Mesh(tensor=RANKS))),
    "pipeline": (Pipeline, plan(mesh=Mesh(pipeline=RANKS), cuts=("second",), schedule="1f1b", accumulation=2)),
}


class Auc:
    """Area under the ROC curve of the second class, from all scores."""

    def __init__(self, *, cls: int = 1) -> None:
        self.cls, self.scores, self.labels = cls, list[Tensor](), list[Tensor]()

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.scores.append(outputs.softmax(1)[:, self.cls])
        self.labels.append(targets == self.cls)

    def merge(self, other: Auc) -> None:
        self.scores += other.scores
        self.labels += other.labels

    def compute(self) -> Tensor:
        return auc(torch.cat(self.scores), torch.cat(self.labels))


def auc(scores: Tensor, labels: Tensor) -> Tensor:
    """The share of pairs of a positive and a negative row that are in order."""
    pairs = scores[labels][:, None] - scores[~labels][None, :]
    return ((pairs > 0).double() + 0.5 * (pairs == 0)).mean()


def logging_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    losses = functional.cross_entropy(outputs, targets, reduction="none")
    tw.log("entropy", entropies(outputs))
    tw.log("loss_again", losses.mean())
    tw.log("of_class_1", Terms(losses, (targets == 1).double()))
    return losses


def entropies(outputs: Tensor) -> Tensor:
    return -(outputs.softmax(1) * outputs.log_softmax(1)).sum(1)


def logging_step(model: nn.Module, columns: Any) -> dict[str, Any]:
    outputs, targets = model(columns["x"]), columns["y"]
    losses = functional.cross_entropy(outputs, targets, reduction="none")
    return {"loss": losses, "entropy": entropies(outputs), "loss_again": losses.mean(),
            "of_class_1": Terms(losses, (targets == 1).double())}  # fmt: skip


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    tw.log("spread", outputs.std(1))
    return outputs.argmax(1) == targets


METRICS = {"accuracy": accuracy, "f1": F1, "auc": functools.partial(Auc, cls=1), "perplexity": lambda: Perplexity()}


class Perplexity:
    def __init__(self) -> None:
        self.total, self.rows = 0.0, 0

    def update(self, targets: Tensor, outputs: Tensor) -> None:  # in Keras' order, by their names
        self.total += float(functional.cross_entropy(outputs, targets, reduction="sum"))
        self.rows += len(targets)

    def merge(self, other: Perplexity) -> None:
        self.total, self.rows = self.total + other.total, self.rows + other.rows

    def compute(self) -> float:
        return math.exp(self.total / self.rows)


def job(*, by_step: bool = False, **changes: Any) -> ModelSpec:
    named = {"loss": None, "step": logging_step} if by_step else {"loss": logging_loss}
    layers = {"second": "gathered"}  # whose outputs are divided in training
    return spec(**{"model": double, "metrics": METRICS, "sample": one_row, "tensor_plan": layers, **named, **changes})


def one_row() -> Batch:
    return batch(1, dtype=np.float64)


def share(step: int, rank: int, of: int, micro_batches: int = 1) -> Feed:
    """A rank's part of a global batch, in turn; a row with weight 0 where it has none."""
    whole = batch(ROWS[step], first=100 * step, dtype=np.float64)
    own = np.arange(ROWS[step])[rank::of]
    parts = []
    for part in np.array_split(own, micro_batches):
        rows = part if len(part) else np.zeros(1, np.int64)
        weights = np.full(len(rows), float(len(part) > 0))
        columns = {name: column[rows] for name, column in whole.columns.items()}
        parts.append(replace(whole, columns=columns, weights=weights, samples=whole.samples[rows]))
    return feed(*parts, step=step, rank=rank, total=of, rows=ROWS[step])


def plain() -> tuple[list[dict[str, float]], dict[str, float]]:
    """A loop without any of ours: what each step logs, and the metrics of all rows at its end."""
    torch.manual_seed(fold_seed(3, -1))
    model, logged = double(), []
    optimizer = adam(model.parameters())
    given = []
    for step in range(len(ROWS)):
        columns = {name: torch.from_numpy(column) for name, column in share(step, 0, 1).parts[0][0].columns.items()}
        given.append(columns)
        outputs, targets = model(columns["x"]), columns["y"]
        losses = functional.cross_entropy(outputs, targets, reduction="none")
        of_1 = losses[targets == 1].mean().item()
        logged.append(
            {"entropy": entropies(outputs).mean().item(), "loss_again": losses.mean().item(), "of_class_1": of_1}
        )
        optimizer.zero_grad()
        losses.mean().backward()
        optimizer.step()
    with torch.no_grad():
        targets = torch.cat([columns["y"] for columns in given])
        outputs = model(torch.cat([columns["x"] for columns in given]))
        said, losses = outputs.argmax(1), functional.cross_entropy(outputs, targets, reduction="none")
        hits = float(((said == 1) & (targets == 1)).sum())
        precision, recall = hits / float((said == 1).sum()), hits / float((targets == 1).sum())
        metrics = {
            "accuracy": (said == targets).double().mean().item(), "loss": losses.mean().item(),
            "f1": 2 * precision * recall / (precision + recall),
            "auc": float(auc(outputs.softmax(1)[:, 1], targets == 1)),
            "perplexity": math.exp(losses.mean().item()), "spread": outputs.std(1).mean().item(),
            "entropy": entropies(outputs).mean().item(), "loss_again": losses.mean().item(),
            "of_class_1": losses[targets == 1].mean().item(),
        }  # fmt: skip
    return logged, metrics


def trained(engine: Any, rank: int, of: int, micro_batches: int) -> tuple[list[dict[str, float]], MetricSums]:
    """What each step of a rank reports as logged, and its sums of an evaluation."""
    engine.warm(zero_weight(share(0, rank, of, micro_batches)))
    steps = range(len(ROWS))
    logged = [engine.train_step(share(step, rank, of, micro_batches)).logged.means() for step in steps]
    states = metric_states(METRICS)
    sums = [engine.evaluate_step(share(step, rank, of, micro_batches), states) for step in steps]
    return logged, with_states(sum(sums, MetricSums()), states)


def _on_ranks(rank: int, world: int, exchange: Exchange) -> Any:
    found = {}
    for name, (make, how) in LAYOUTS.items():
        for by_step in (False, True) if name != "pipeline" else (False,):
            engine = formed(rank, exchange, job(by_step=by_step), engine=make(), how=how)
            data = how.mesh.data * how.mesh.shard
            found[name, by_step] = trained(engine, rank if data > 1 else 0, data, how.accumulation)
            engine.leave()
    return found


def same(found: dict[str, float], expected: dict[str, float], what: str) -> None:
    assert found.keys() == expected.keys(), what
    values = [found[name] for name in expected]
    np.testing.assert_allclose(values, [*expected.values()], rtol=1e-12, err_msg=what)


def test_two_ranks_log_and_evaluate_as_a_plain_loop() -> None:
    logged, metrics = plain()
    results = run_ranks(_on_ranks, RANKS)
    for name in results[0]:
        for own, _ in (result[name] for result in results):
            for step, (values, expected) in enumerate(zip(own, logged, strict=True)):
                same(values, expected, f"{name}, step {step}")
        total = compute_states(sum((result[name][1] for result in results), MetricSums()))
        same(total.means(), metrics, str(name))


@pytest.mark.parametrize(("by_step", "micro_batches"), [(False, 3), (True, 1)])
def test_one_device_logs_and_evaluates_as_a_plain_loop(by_step: bool, micro_batches: int) -> None:
    logged, metrics = plain()
    own, sums = trained(one_device(job(by_step=by_step), plan(accumulation=micro_batches)), 0, 1, micro_batches)
    for step, (values, expected) in enumerate(zip(own, logged, strict=True)):
        same(values, expected, f"step {step}")
    same(compute_states(sums).means(), metrics, "evaluation")


def test_names_that_cannot_be_logged_are_refused() -> None:
    def logs(name: Any, value: Any) -> Any:
        def loss(outputs: Tensor, targets: Tensor) -> Tensor:
            tw.log(name, value(outputs) if callable(value) else value)
            return functional.cross_entropy(outputs, targets, reduction="none")

        return loss

    for name, value, words in (
        ("accuracy", 1.0, "has the name of a metric"),
        ("learning_rate", 1.0, "has the name of a metric or of a column of the history"),
        (3, 1.0, "use a text"),
        ("kl", "high", "was given str: give a number or a tensor"),
        ("kl", lambda outputs: outputs[:-1], r"was given shape \(11, 3\) for 12 rows"),
    ):
        with pytest.raises(JobError, match=words):
            one_device(job(loss=logs(name, value))).train_step(feed(batch(dtype=np.float64)))
    with pytest.raises(JobError, match="returned a dict with the keys 'entropy': add \"loss\""):
        made = job(by_step=True)
        made = replace(made, step=lambda model, columns: {"entropy": model(columns["x"]).sum(1)})
        one_device(made).train_step(feed(batch(dtype=np.float64)))


def test_a_name_that_the_first_micro_batch_did_not_log_is_refused_and_one_left_out_does_not_count() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        tw.log("rows", float(len(targets)))
        if len(targets) > 4:
            tw.log("many", 1.0)
        return functional.cross_entropy(outputs, targets, reduction="none")

    few, many = feed(batch(4, dtype=np.float64)), feed(batch(8, dtype=np.float64), step=1)
    engine = one_device(job(loss=loss))
    engine.warm(zero_weight(many))
    logged = engine.train_step(few).logged.means()
    assert logged["rows"] == 4.0 and math.isnan(logged["many"])
    assert engine.train_step(many).logged.means() == {"rows": 8.0, "many": 1.0}
    engine = one_device(job(loss=loss))
    engine.warm(zero_weight(few))
    with pytest.raises(JobError, match=r"tw.log\('many'\) was not called for the first micro-batch"):
        engine.train_step(replace(many, step=0))


def test_outside_of_a_run_nothing_is_logged() -> None:
    tw.log("anything", torch.ones(3))
    assert logging_loss(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)).shape == (2,)


# --- Metrics with state ---------------------------------------------------------------------------------------------


def dim_zero_sum(stacked: Tensor) -> Tensor:
    return stacked.sum(0)


def dim_zero_mean(stacked: Tensor) -> Tensor:
    return stacked.mean(0)


class Reduced(nn.Module):
    """Stands in for torchmetrics: states, each with the function that reduces it over processes."""

    def __init__(self, reduction: Any = dim_zero_sum) -> None:
        super().__init__()
        self._reductions = {"right": reduction, "scores": None}
        self.right: Any = torch.zeros(())
        self.scores: list[Tensor] = []
        self.distributed_available_fn: Any = None

    def update(self, preds: Tensor, target: Tensor) -> None:
        self.right = self.right + (preds.argmax(1) == target).sum()
        self.scores.append(preds.amax(1))

    def compute(self) -> Tensor:
        assert not self.distributed_available_fn()
        return self.right / torch.cat(self.scores).numel()


def evaluated(metric: Any, parts: int = 2) -> MetricSums:
    """Sums as of several ranks, each with some rows."""
    total = MetricSums()
    for part in range(parts):
        states = metric_states({"wanted": metric})
        rows = batch(4 + part, first=part).columns
        outputs = torch.from_numpy(rows["x"][:, :3])
        states["wanted"].update(outputs, torch.from_numpy(rows["y"]))
        total += with_states(MetricSums(), states)
    return total


def test_states_of_torchmetrics_are_merged_by_their_reductions() -> None:
    rows = [batch(4 + part, first=part).columns for part in range(3)]
    right = sum(int((each["x"][:, :3].argmax(1) == each["y"]).sum()) for each in rows)
    for metric in (Reduced, Reduced(), lambda: Reduced()):
        assert compute_states(evaluated(metric, parts=3)).means()["wanted"] == pytest.approx(right / 15)
    with pytest.raises(JobError, match="keeps 'right', which is not a sum, minimum, maximum or list"):
        compute_states(evaluated(lambda: Reduced(dim_zero_mean)))


def library_cases() -> dict[str, tuple[Any, list[tuple[Any, Any]]]]:
    """Metrics of torchmetrics, each with outputs and targets of three ranks, of which the second has one row."""
    from torchmetrics import classification, regression, text

    parts = [batch(rows, first=rows, dtype=np.float64).columns for rows in ROWS]
    logits = [(torch.from_numpy(part["x"][:, :3]), torch.from_numpy(part["y"])) for part in parts]
    binary = [(outputs[:, 0].sigmoid(), (targets > 0).long()) for outputs, targets in logits]
    words = [(outputs.unsqueeze(0), targets.unsqueeze(0)) for outputs, targets in logits]
    numbers = [(outputs[:, 0], outputs[:, 0] + outputs[:, 1]) for outputs, _ in logits]
    texts = [
        (["there is a cat on the mat today"] * n, [["there is a cat on the mat", "a cat is there"]] * n) for n in (2, 1)
    ]
    return {
        "F1": (functools.partial(classification.MulticlassF1Score, num_classes=3, average="macro"), logits),
        "AUROC": (functools.partial(classification.MulticlassAUROC, num_classes=3), logits),
        "average precision": (classification.BinaryAveragePrecision, binary),
        "mean IoU": (functools.partial(classification.MulticlassJaccardIndex, num_classes=3), logits),
        "kappa": (functools.partial(classification.MulticlassCohenKappa, num_classes=3), logits),
        "perplexity": (text.Perplexity, words),
        "BLEU": (text.BLEUScore, texts),
        "R2": (regression.R2Score, numbers),
    }


@pytest.mark.filterwarnings("ignore")  # the library's own
@pytest.mark.parametrize("name", ["F1", "AUROC", "average precision", "mean IoU", "kappa", "perplexity", "BLEU", "R2"])
def test_metrics_of_torchmetrics_over_ranks_are_those_of_all_rows(name: str) -> None:
    make, parts = library_cases()[name]
    whole, total = make(), MetricSums()
    for outputs, targets in parts:
        states = metric_states({"wanted": make})
        states["wanted"].update(outputs, targets)
        total += with_states(MetricSums(), states)
        whole.update(outputs, targets)
    expected = float(whole.compute())
    assert expected not in (0.0, 1.0)
    assert compute_states(total).means()["wanted"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_metrics_of_torchmetrics_that_cannot_be_merged_are_refused() -> None:
    from torchmetrics import MetricCollection, classification, regression

    for make, problem in (
        (regression.PearsonCorrCoef, "which is not a sum, minimum, maximum or list"),
        (lambda: MetricCollection([classification.BinaryAccuracy()]), "has metrics inside|has no merge|is no metric"),
    ):
        total = MetricSums()
        for first in range(2):
            states = metric_states({"wanted": make})
            states["wanted"].update(torch.rand(5), ((torch.arange(5) + first) % 2).double())
            total += with_states(MetricSums(), states)
        with pytest.raises(JobError, match=problem):
            compute_states(total)


def test_metrics_of_torcheval_are_merged_by_themselves() -> None:
    class Evaluated(F1):
        merge: Any = None

        def merge_state(self, others: list[F1]) -> None:
            for other in others:
                self.counts += other.counts

    found, expected = (compute_states(evaluated(metric, parts=3)).means() for metric in (Evaluated, F1))
    assert found == expected and 0 < found["wanted"] < 1


def test_what_has_no_single_value_or_cannot_be_merged_is_refused() -> None:
    class Unmerged:
        def update(self, outputs: Any, targets: Any) -> None: ...

        def compute(self) -> Any:
            return np.zeros(3)

    with pytest.raises(JobError, match=r"has no merge\(other\)"):
        compute_states(evaluated(Unmerged))

    class Several(Unmerged):
        def merge(self, other: Any) -> None: ...

    with pytest.raises(JobError, match=r"returned a ndarray of shape \(3,\): return one number"):
        compute_states(evaluated(Several))
    with pytest.raises(JobError, match=r"made a list, which has no update\(\) and compute\(\)"):
        metric_states({"wanted": list})
    with pytest.raises(UserCodeError, match="metric 'wanted' raised ZeroDivisionError"):
        metric_states({"wanted": lambda: 1 / 0})
    assert not any(map(is_stateful, (accuracy, torch.nn.functional.mse_loss, lambda o, t=None: o, lambda *both: both)))
