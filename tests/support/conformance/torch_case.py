"""What the suite needs of torch: the jobs, a loop written by hand, and a look into the files."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from tests.support.conformance.problems import CLASSES, CLIP, HIDDEN, RATE, Ids, Problem, columns, schedule
from trainwright.core.data import Batch, Columns, Terms
from trainwright.core.engine import ModelSpec
from trainwright.strategies.torch.checkpoint.initial_weights import stream_safetensors

Arrays = Mapping[str, npt.NDArray[Any]]
torch.set_num_threads(1)  # the tensors are tiny, and the ranks share the cores


def spec(problem: Problem) -> ModelSpec:
    """The job."""
    losses = {"cross_entropy": cross_entropy, "weighted": weighted, "tokens": tokens}
    return ModelSpec(
        model=functools.partial(Net, problem),
        loss=_flat if problem.flat else losses[problem.loss],
        optimizer=functools.partial(optimizer, problem.optimizer),
        total_steps=problem.steps,
        inputs=problem.inputs,
        targets=problem.targets,
        metrics={"accuracy": accuracy} if problem.loss == "cross_entropy" else {},
        schedule=schedule if problem.schedule else None,
        clip_norm=CLIP if problem.clip else None,
        seed=problem.seed,
        sample=functools.partial(sample, problem),
    )


def sample(problem: Problem) -> Batch:
    """The first row."""
    row = {name: column[:1] for name, column in columns(problem).items()}
    return Batch(columns=row, weights=np.ones(1), samples=np.zeros(1, np.int64))


class Net(nn.Module):
    """Two layers on the joined inputs."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        dtype = getattr(torch, problem.dtype)
        self.first = nn.Linear(problem.features, HIDDEN, dtype=dtype)
        self.drop = nn.Dropout(problem.dropout)
        self.second = nn.Linear(HIDDEN, CLASSES, dtype=dtype)
        self.flat = problem.flat

    def forward(self, *inputs: Tensor) -> Tensor:
        outputs = self.second(self.drop(torch.tanh(self.first(torch.cat(inputs, dim=1)))))
        return outputs.reshape(-1) if self.flat else outputs


def optimizer(name: str, parameters: Any) -> torch.optim.Optimizer:
    if name == "adam":
        return torch.optim.Adam(parameters, lr=RATE)
    if name == "plain":
        return torch.optim.SGD(parameters, lr=RATE)
    return torch.optim.SGD(parameters, lr=RATE, momentum=0.9)


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def weighted(outputs: Tensor, targets: Sequence[Tensor]) -> Terms:
    return Terms(cross_entropy(outputs, targets[0]), targets[1])


def tokens(outputs: Tensor, targets: Sequence[Tensor]) -> Terms:
    return Terms((outputs - targets[0]) ** 2, targets[1])


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(dim=1) == targets).double()


def _flat(outputs: Tensor, targets: object) -> Tensor:
    return outputs**2


def parameters(files: Mapping[str, bytes]) -> dict[str, npt.NDArray[Any]]:
    """Parameters by name."""
    return {
        f"model/{name}": value
        for file, arrays in _joined(files).items()
        if file == "model.safetensors"
        for name, value in arrays.items()
    }


def state(files: Mapping[str, bytes]) -> dict[str, npt.NDArray[Any]]:
    """All arrays of a checkpoint by name, and its plain values as one."""
    arrays = {f"{file}/{name}": value for file, held in _joined(files).items() for name, value in held.items()}
    for file, data in files.items():
        if file.endswith(".json"):
            facts = json.loads(data)
            facts.pop("tensors")  # which boxes a part holds
            plain = np.array(json.dumps(facts, sort_keys=True))
            assert arrays.setdefault("state.json", plain) == plain, "parts of different states"
    return arrays


def _joined(files: Mapping[str, bytes]) -> dict[str, dict[str, npt.NDArray[Any]]]:
    """The arrays of each kind of file; of a divided model all parts' boxes, which agree where they overlap."""
    joined: dict[str, dict[str, npt.NDArray[Any]]] = {}
    filled: dict[str, npt.NDArray[Any]] = {}
    for file in sorted(file for file in files if file.endswith(".safetensors")):
        kind, _, part = file.removesuffix(".safetensors").partition(".")
        facts = json.loads(files[f"state.{part}.json" if part else "state.json"])["tensors"][kind]
        arrays = joined.setdefault(f"{kind}.safetensors", {})
        for name, tensor in stream_safetensors([memoryview(files[file])]):
            value = tensor.numpy()
            whole = arrays.setdefault(name, np.zeros(facts[name]["shape"], value.dtype))
            there = filled.setdefault(f"{kind}/{name}", np.zeros(whole.shape, bool))
            box = tuple(slice(start, stop) for start, stop in facts[name]["held"])
            assert np.array_equal(whole[box][there[box]], value[there[box]]), name
            whole[box], there[box] = value, True
    assert all(each.all() for each in filled.values())
    return joined


def by_hand(
    problem: Problem, start: Arrays, steps: Sequence[Ids], data: Columns
) -> tuple[list[float], list[float], Arrays]:
    """Losses, gradient norms and last parameters of a plain loop over whole global batches, in torch."""
    net = Net(problem)
    net.load_state_dict({name.removeprefix("model/"): torch.from_numpy(value.copy()) for name, value in start.items()})
    rule, losses, norms = optimizer(problem.optimizer, net.parameters()), [], []
    for step, ids in enumerate(steps):
        batch = {name: torch.from_numpy(np.asarray(array[ids])) for name, array in data.items()}
        values, weights = _terms(problem, net(*(batch[name] for name in problem.inputs)), batch)
        if float(weights.sum()) == 0:
            losses.append(0.0)
            norms.append(0.0)
            continue
        loss = (values * weights).sum() / weights.sum()
        rule.zero_grad()
        loss.backward()
        gradients = [parameter.grad for parameter in net.parameters()]
        norm = float(torch.sqrt(sum((gradient**2).sum() for gradient in gradients)))
        if problem.clip:
            nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        for group in rule.param_groups:
            group["lr"] = RATE * (schedule(step, problem.steps) if problem.schedule else 1.0)
        rule.step()
        losses.append(loss.item())
        norms.append(norm)
    return losses, norms, {f"model/{name}": value.numpy() for name, value in net.state_dict().items()}


def _terms(problem: Problem, outputs: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    if problem.loss == "tokens":
        return (outputs - batch["t"]) ** 2, batch["m"]
    values = -torch.log_softmax(outputs, dim=1)[torch.arange(len(outputs)), batch["y"]]
    return values, batch["w"] if problem.loss == "weighted" else torch.ones_like(values)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """It decays weights and moments of all that it is given a gradient for, and skips what has none."""
    return torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1)
