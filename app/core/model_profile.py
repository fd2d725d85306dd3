"""The costs of a model layer by layer: parameters, operations, activations. Numbers only, no framework."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """Cost of one layer for one sample, forward. A number is an element of a tensor of any type.

    Attributes:
        name: the module's name.
        parameters: number of parameters.
        parameter_bytes: their size as stored.
        flops: floating-point operations of one forward pass of one sample.
        fused_flops: of these, those of a fused attention kernel, which runs slower than other products.
        output_numbers: size of its output for one sample.
        cut_numbers: sent to the next pipeline stage by a cut behind it, for one sample: everything that later layers
            need; 0 where that is its output.
        kept_numbers: kept of one sample for backward, the output included.
        traffic_numbers: read and written by operations other than matrix products.
        scores_numbers: attention scores, kept and written unless a kernel is fused; not part of the two above.
        loss_numbers: of its output for one sample, read by the loss; not part of `kept_numbers`. The loss keeps them,
            and its backward makes two gradients of them, all in full precision.
        block_place: its place, from 1, in a block whose inside `recompute=full` recomputes; 0 outside of such blocks.
        matmuls: number of matrix products.
        launches: number of operations that the host launches.
        splits: whether tensor parallelism divides it.
        shared_kept: share of `kept_numbers` that every tensor rank holds whole.
        shared_traffic: share of `traffic_numbers` that every tensor rank has whole.
        reductions: all-reduces of its output in forward, where tensor parallelism divides it.
        leads: tensor parallelism leaves its output divided: no cut may follow it.
        tied_parameters: parameters of another layer, held twice where that layer is on another stage.
        trained: some of its own parameters are trained.
    """

    name: str = field(compare=False)  # layers that cost the same are the same to every estimate
    parameters: int
    parameter_bytes: int
    flops: float
    fused_flops: float = 0.0
    output_numbers: float = 0.0
    cut_numbers: float = 0.0
    kept_numbers: float = 0.0
    traffic_numbers: float = 0.0
    scores_numbers: float = 0.0
    loss_numbers: float = 0.0
    block_place: int = 0
    matmuls: int = 1
    launches: int = 1
    splits: bool = False
    shared_kept: float = 0.0
    shared_traffic: float = 0.0
    reductions: int = 0
    leads: bool = False
    tied_parameters: int = 0
    trained: bool = True


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """A model's layers in order.

    Attributes:
        framework: `torch`, `tensorflow`, `reference`, or empty for a profile without a model.
        layers: in the order in which they run.
        inexact: parts that are not equal across layouts, such as `batch_norm`.
        keras_backend: of a Keras model.
        heads: attention heads, which tensor parallelism divides; 0 without attention.
        tokens: of one sample; 1 where a sample is no sequence.
        indivisible: why tensor parallelism cannot divide any layer of the model as it is written.
        divides_tokens: whether tensor-parallel ranks can divide the tokens between divided layers (`sequence=1`).
        recounted: a buffer of the state inside a part that recompute=full recomputes; empty without one.
        trained: rows (of the first dimension) and bytes of each trained parameter; empty where unknown.
        narrow: name of a trained parameter of 16 bits; empty without one.
        evaluating: names of dropouts and batch norms that stay in evaluation mode when the model is trained.
        uncut: why the model's forward cannot be divided into pipeline stages; empty where it can.
        untraced: the error that stopped the model's trace; its layers then have two operations for each parameter.
        least_rows: rows that a forward takes at least while training: 2 where a batch norm normalizes vectors.
        loss_scale: whether it computes in float16 with a scaled loss, as Keras' policy `mixed_float16` does.
        guests: untrained models that run forward in the loss, such as teachers; no layout divides them, since their
            inputs are targets.
        weight_copies: copies of the trained parameters that a job keeps beside those of its steps; with
            `weight_average=` 2, the average and, during an evaluation, the parameters that it replaces.
        trains: false for a model that predicts: it has no gradients, optimizer and kept activations.
    """

    framework: str
    layers: tuple[LayerCost, ...]
    inexact: tuple[str, ...] = ()
    keras_backend: str = ""
    heads: int = 0
    tokens: int = 1
    indivisible: str = ""
    divides_tokens: bool = False
    recounted: str = ""
    trained: tuple[tuple[int, int], ...] = ()
    narrow: str = ""
    evaluating: tuple[str, ...] = ()
    uncut: str = ""
    untraced: str = ""
    least_rows: int = 1
    loss_scale: bool = False
    guests: tuple[ModelProfile, ...] = ()
    weight_copies: int = 0
    trains: bool = True

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.framework, self.layers, self.heads, self.tokens))  # of thousands of fields: once

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def parameter_bytes(self) -> int:
        """Size of the parameters."""
        return sum(layer.parameter_bytes for layer in self.layers)

    @property
    def flops(self) -> float:
        """Floating-point operations of one forward pass of one sample."""
        return sum(layer.flops for layer in self.layers)

    @property
    def training_flops(self) -> float:
        """Operations of forward and backward for one sample: backward has two products for one of forward.

        Frozen layers need no gradient of their parameters, and those before the first trained one need no backward.
        """
        flops, trained = 0.0, False
        for layer in self.layers:
            trained = trained or layer.trained
            flops += layer.flops * (3 if layer.trained else 2 if trained else 1)
        return flops

    @property
    def most_stages(self) -> int:
        """Number of layers that can be pipeline stages: in training, the trained ones."""
        return sum(layer.trained or not self.trains for layer in self.layers)

    @property
    def working_numbers(self) -> float:
        """Largest memory of a layer for one sample in a forward pass without gradients."""
        return max(layer.kept_numbers + layer.output_numbers + layer.scores_numbers for layer in self.layers)


def merge_plain_layers(costs: Iterable[LayerCost]) -> tuple[LayerCost, ...]:
    """Merge layers without parameters and products, such as activations, into the layer before them."""
    layers: list[LayerCost] = []
    for cost in costs:
        if cost.parameters or cost.flops:
            layers.append(cost)
        elif layers and cost.launches:
            layers[-1] = _merge_layers(layers[-1], cost)
    return tuple(layers)


def _merge_layers(layer: LayerCost, after: LayerCost) -> LayerCost:
    """Merge a layer with the layer after it."""
    # An undivided layer is whole on every tensor rank.
    kept_share, traffic_share = (after.shared_kept, after.shared_traffic) if after.splits else (1.0, 1.0)
    return replace(
        layer,
        output_numbers=after.output_numbers,
        cut_numbers=after.cut_numbers,
        kept_numbers=layer.kept_numbers + after.kept_numbers,
        traffic_numbers=layer.traffic_numbers + after.traffic_numbers,
        scores_numbers=layer.scores_numbers + after.scores_numbers,
        launches=layer.launches + after.launches,
        shared_kept=_mean_share(layer, after, "kept_numbers", (layer.shared_kept, kept_share)),
        shared_traffic=_mean_share(layer, after, "traffic_numbers", (layer.shared_traffic, traffic_share)),
    )


def _mean_share(layer: LayerCost, after: LayerCost, weight: str, shares: tuple[float, float]) -> float:
    """Return the weighted mean of two layers' shares; 0 if the first layer is not divided."""
    weights = getattr(layer, weight), getattr(after, weight)
    if not layer.splits or not sum(weights):
        return 0.0
    return float((weights[0] * shares[0] + weights[1] * shares[1]) / sum(weights))


def append_loss(layers: tuple[LayerCost, ...], outputs: float) -> tuple[LayerCost, ...]:
    """Add a loss after the last layer, as `transformer_profile` has it: it keeps what it reads and passes over it.

    Args:
        outputs: numbers of the model's output for one sample.
    """
    if not layers:
        return layers
    *others, last = layers
    loss = replace(last, kept_numbers=0.0, traffic_numbers=16.0 * outputs, scores_numbers=0.0, launches=2)
    joined = _merge_layers(last, replace(loss, shared_kept=0.0, shared_traffic=0.0))
    return *others, replace(joined, loss_numbers=outputs)
