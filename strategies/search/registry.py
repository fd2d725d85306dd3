"""All strategies: what each proposes for a model on a cluster, and why it has no plan. `STRATEGIES` lists them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import TypeAlias

from trainwright.core.plan import STREAMED_SCHEDULES, InfeasiblePlan, Mesh, Plan
from trainwright.core.topology import Consistency, GradientCompression
from trainwright.strategies.ps.parameter_shards import count_busy_servers
from trainwright.strategies.search.plan_request import REPLICATED, PlanRequest, Refusal

_TORCH = "trainwright.strategies.torch.engines"
_FSDP = f"{_TORCH}.fsdp:Sharded"
_TENSORFLOW = "trainwright.strategies.tensorflow"
_AT_GIVEN_ADDRESSES = f"{_TENSORFLOW}.strategy_engines:AtGivenAddresses"
_FIT_AT_GIVEN_ADDRESSES = f"{_TENSORFLOW}.fit_workers:FitAtGivenAddresses"
_NAMED_TPU = f"{_TENSORFLOW}.tpu:NamedTPU"

_Proposals: TypeAlias = Iterator[Plan | InfeasiblePlan]

TABLES = (
    {
        "name": "strategy", "does": "what it does", "when": "use it when", "like": "equivalent", "layout": "`plan=`",
    },
    {
        "name": "strategy", "equal": "equal to one device", "fit": "Keras `fit`", "step": "`step=`",
        "evaluate": "evaluate", "predict": "predict", "verified": "verified on",
    },
)  # fmt: skip
"""The tables of strategies, for choosing one and of what each supports: headings by key of `Strategy.row`."""
_OWN, _REPLICAS, _ALONE = "in its layout", "in replicas", "on one device"  # where a trained model is used


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A way to divide training over workers.

    The number of micro-batches, the recomputation and sequence parallelism are left to the ranking.
    """

    name: str  # as in a job's `strategy=`
    # `module:class` of the engine for models of each framework; a profile without a framework counts as one of torch
    engines: Mapping[str, str]
    propose: Callable[[Strategy, PlanRequest], _Proposals]  # yields plans; raises `Refusal` where there is none
    fit: str = ""  # engine that runs Keras' `fit`; empty where there is none
    no_fit: str = ""  # the reason why there is none
    offloads: bool = False  # whether it can keep the model's state in host memory
    asynchronous: bool = False  # whether its workers step without waiting for each other
    no_step: str = ""  # the reason why it does not take the job's own `step=`; empty where it does
    # does, when, like, equal, verified: cells of the tables of strategies; see `TABLES`
    does: str
    when: str
    like: str
    layout: str = ""  # an example of `plan=` that only this strategy can carry out; empty where there is none
    equal: str = "yes"
    # evaluate, predict: how workers hold the trained model
    evaluate: str = _OWN
    predict: str = _REPLICAS
    verified: str

    @property
    def row(self) -> dict[str, str]:
        """The strategy's cells in the tables of strategies, by key."""
        step = "no" if self.no_step else "yes" if self.name in REPLICATED else "one optimizer"
        derived = {"fit": "yes" if self.fit else "no", "step": step}
        return {key: derived.get(key) or getattr(self, key) for columns in TABLES for key in columns}

    def proposals(self, request: PlanRequest) -> _Proposals:
        """Yield the plans for a request, and reasons why others are impossible."""
        return self.attempt(self._propose(request))

    def attempt(self, plans: _Proposals) -> _Proposals:
        """Yield plans; a refusal ends them, with its reason."""
        try:
            yield from plans
        except Refusal as refusal:
            yield InfeasiblePlan(strategy=self.name, reason=refusal.reason, hint=refusal.hint)

    def plan(self, request: PlanRequest, mesh: Mesh, *, engine: str | None = None, **choices: object) -> Plan:
        """Return a plan with the strategy's engine, or another one; see `PlanRequest.plan`."""
        chosen = request.plan(self.name, self.engine(request) if engine is None else engine, mesh, **choices)  # type: ignore[arg-type]
        return chosen.noted(_COMPRESSED[chosen.wire]) if chosen.zero and chosen.wire != "full" else chosen

    def engine(self, request: PlanRequest) -> str:
        """Return the engine for a request."""
        return self.fit if request.run == "fit" else self.engines[request.profile.framework or "torch"]

    def _propose(self, request: PlanRequest) -> _Proposals:
        request.check_replicas(self.name)
        request.check_torch_option(asynchronous=self.asynchronous)
        request.check_sums(self.name)
        if request.run == "fit" and not self.fit:
            framework = request.profile.framework
            no_fit = "and it has no such strategy" if framework == "tensorflow" else f"and this model is of {framework}"
            reason = self.no_fit or f'run="fit" is Keras\' own, {no_fit}'
            raise Refusal(reason, "leave run= out: trainwright's steps train any model")
        if request.own_step and self.no_step:
            raise Refusal(self.no_step, "give the job inputs=, targets= and loss= instead")
        if request.offload and not self.offloads:
            hint = "leave offload out, or use a strategy that divides the model's state"
            raise Refusal("it keeps the model's state on the device", hint)
        yield from self.propose(self, request)


# --- One device and data parallelism ----------------------------------------------------------------------------------


def _propose_one_worker(strategy: Strategy, request: PlanRequest, devices: int = 1) -> Iterator[Plan]:
    """Propose one worker that drives some devices, one data rank each.

    With one device, the whole global batch without communication: the plan that all others are compared with.
    """
    if request.elastic:
        raise Refusal("the number of workers may change", "leave min_workers and max_workers out")
    if request.workers not in (None, 1):
        raise Refusal(f"workers={request.workers} is pinned", "set workers=1 or leave it out")
    request.check_inexact(strategy.name, devices)
    request.check_tpu()
    yield strategy.plan(request, Mesh(data=devices), devices=devices)


def _propose_replicas(
    strategy: Strategy, request: PlanRequest, *, engine: str | None = None, devices: int = 1
) -> Iterator[Plan]:
    """Propose a worker for each slot of the cluster, or each that the job pins, with a replica on each device."""
    workers = request.workers_of(devices)
    if workers == 1:
        request.check_several(workers)
    request.check_inexact(strategy.name, workers * devices)
    request.check_tpu()
    yield strategy.plan(request, Mesh(data=workers * devices), engine=engine, devices=devices)


# --- Sharded data parallelism (ZeRO; Rajbhandari et al., 2020) --------------------------------------------------------


def _propose_sharded(strategy: Strategy, request: PlanRequest) -> Iterator[Plan]:
    """Propose each stage of ZeRO over all ranks, and hybrid shard: ZeRO-3 inside a node, replicas between nodes.

    ZeRO-1 differs from ZeRO-2 where a step has several micro-batches. Host memory can hold the state of ZeRO-2 and
    ZeRO-3 (Ren et al., 2021).
    """
    _check_ranks(strategy, request)
    if request.ranks == 1:
        raise Refusal("there is room for one worker only now", "wait until there is room for two")
    for zero in (2, 3) if request.offload else (1, 2, 3):
        yield strategy.plan(request, Mesh(shard=request.ranks), zero=zero, offload=request.offload)
    pinned, inside = request.pins.mesh, request.per_node
    mesh = pinned or Mesh(data=request.ranks // inside, shard=inside)
    if mesh.data > 1 and mesh.shard > 1 and mesh.size == mesh.data_ranks == request.ranks:
        yield strategy.plan(request, mesh, zero=3, offload=request.offload)


def _check_ranks(strategy: Strategy, request: PlanRequest) -> None:
    """Refuse one rank, a model that several cannot train exactly, and TPUs."""
    request.check_several(request.ranks)
    request.check_inexact(strategy.name, request.ranks)
    request.check_tpu()


# --- Tensor parallelism (Shoeybi et al., 2019) ------------------------------------------------------------------------


def _propose_tensor_parallel(strategy: Strategy, request: PlanRequest) -> _Proposals:
    """Propose degrees that divide the heads and fit a node: alone, with replicas, and with ZeRO over the replicas."""
    request.check_tpu()
    tensor, per_node = request.pins.mesh.tensor if request.pins.mesh else 1, request.per_node
    if tensor > per_node:  # they communicate in every layer, and the network is too slow for that
        hint = f"use tp={per_node} or less, and a pipeline or ZeRO over the nodes"
        raise Refusal(f"tp={tensor} is more than the {per_node} devices of a node", hint)
    found = [degree for degree in _tensor_degrees(request) if degree > 1 and request.replicas_of(degree)]
    if not found:
        request.check_several(request.most_ranks)
        raise _no_degree(request)
    for tensor in found:
        yield from strategy.attempt(_tensor_plans(strategy, request, tensor))


def _tensor_plans(strategy: Strategy, request: PlanRequest, tensor: int) -> Iterator[Plan]:
    data = request.replicas_of(tensor)
    request.check_inexact(strategy.name, data)
    meshes: dict[Mesh, tuple[int, ...]] = {Mesh(data=data, tensor=tensor): (0,)}
    if data > 1:
        meshes[Mesh(shard=data, tensor=tensor)] = (1, 2, 3)
    pinned = request.pins.mesh
    if (
        pinned
        and min(pinned.data, pinned.shard) > 1
        and pinned == Mesh(data=pinned.data, shard=data // pinned.data, tensor=tensor)
    ):
        meshes[pinned] = (3,)
    for mesh, stages in meshes.items():
        for zero in stages:
            yield strategy.plan(request, mesh, engine=_FSDP if zero else None, zero=zero)


def _tensor_degrees(request: PlanRequest) -> Iterator[int]:
    """Yield the tensor degrees that the model, its compiler and a node allow."""
    profile = request.profile
    if request.compile == "inductor" or profile.indivisible or not any(layer.splits for layer in profile.layers):
        yield 1
        return
    yield from (each for each in _divisors(request.per_node) if not profile.heads % each)


def _divisors(number: int) -> Iterator[int]:
    yield from (each for each in range(1, number + 1) if number % each == 0)


def _no_degree(request: PlanRequest) -> Refusal:
    if request.compile == "inductor":
        return Refusal('compile="inductor" was not tried with it', "leave compile out, or use tp=1")
    if request.profile.indivisible:
        return Refusal(request.profile.indivisible, "use sharded or data parallelism, or a pipeline")
    if any(layer.splits for layer in request.profile.layers):
        reason = f"no degree from 2 divides {request.profile.heads} heads and the {request.per_node} devices of a node"
        return Refusal(reason, "use a number of workers on each node that shares a divisor with the heads")
    return Refusal("no layer of this model is known to be divisible", "use data parallelism or a pipeline")


# --- Pipelines (Huang et al., 2019), and stages without micro-batches -------------------------------------------------


STALE_WEIGHTS = (
    "gradients are one step stale (2BW): each step's are taken at the weights that the last update started from"
)
_INTERLEAVED = (2, 4, 8)  # chunks that are tried
_SCHEDULES: tuple[tuple[str, tuple[int, ...]], ...] = (  # with their chunks; empty where several are possible
    ("1f1b", (1,)), ("interleaved", ()), ("zero_bubble", (1,)), ("zbv", (2,)), ("gpipe", (1,)),
    ("pipedream", (1,)),
)  # fmt: skip


def _propose_pipeline(strategy: Strategy, request: PlanRequest) -> _Proposals:
    """Propose numbers of stages that divide the ranks, for each tensor degree and schedule, plain or with ZeRO."""
    for mesh in _stage_meshes(request, _tensor_degrees(request)):
        yield from strategy.attempt(_pipeline_plans(strategy, request, mesh))


def _propose_model_parallel(strategy: Strategy, request: PlanRequest) -> _Proposals:
    """Propose numbers of stages that work one after the other, without micro-batches, and replicas of that."""
    for mesh in _stage_meshes(request, (1,)):
        yield from strategy.attempt(_unscheduled_plans(strategy, request, mesh))


def _unscheduled_plans(strategy: Strategy, request: PlanRequest, mesh: Mesh) -> Iterator[Plan]:
    request.check_inexact(strategy.name, mesh.data)
    yield strategy.plan(request, mesh)


def _pipeline_plans(strategy: Strategy, request: PlanRequest, mesh: Mesh) -> Iterator[Plan]:
    """Yield the plans of each schedule; of one with stale gradients only if the job asks for it."""
    request.check_inexact(strategy.name, mesh.data)
    choices, pinned = request.pins.choices, request.pins.mesh
    divided = replace(mesh, data=1, shard=mesh.data)
    hybrid = (
        pinned and pinned.shard > 1 and pinned.data > 1 and replace(pinned, data=pinned.data_ranks, shard=1) == mesh
    )
    interleaved = (choices["chunks"],) if "chunks" in choices else _INTERLEAVED
    each = [(schedule, chunks) for schedule, usual in _SCHEDULES for chunks in usual or interleaved]
    for schedule, chunks in each:
        asked = schedule not in STREAMED_SCHEDULES or schedule == choices.get("schedule")
        if not asked or chunks * mesh.pipeline > request.profile.most_stages:
            continue
        plain = strategy.plan(request, mesh, schedule=schedule, chunks=chunks)
        yield plain.noted(STALE_WEIGHTS) if plain.streamed else plain
        if mesh.data > 1:
            yield strategy.plan(request, divided, zero=1, schedule=schedule, chunks=chunks)
        if pinned and hybrid:
            yield strategy.plan(request, pinned, zero=1, schedule=schedule, chunks=chunks)


def _stage_meshes(request: PlanRequest, tensor_degrees: Iterable[int]) -> list[Mesh]:
    """Return the meshes with several stages over all ranks. Raises Refusal where the model cannot run in stages."""
    _check_stages(request)
    ranks, layers = request.most_ranks, request.profile.most_stages
    found = [
        Mesh(pipeline=stages, data=data, tensor=tensor)
        for tensor in tensor_degrees
        for stages in _divisors(ranks // tensor)
        if 1 < stages <= layers and (data := request.replicas_of(tensor * stages))
    ]
    if not found:
        reason = f"a model of {_layer_count_text(request)} cannot be divided for {ranks} ranks"
        raise Refusal(reason, "build the model of more modules, or use fewer workers")
    return found


def _check_stages(request: PlanRequest) -> None:
    """Refuse a model that cannot run in stages at all."""
    request.check_several(request.most_ranks)
    request.check_tpu()
    profile, mesh = request.profile, request.pins.mesh
    if profile.keras_backend:
        hint = 'use strategy="sharded" or "data_parallel"'
        raise Refusal("the calls of Keras layers cannot be traced and cut", hint)
    if profile.untraced:
        reason = "the forward of the model cannot be traced, so it is unknown where it can be cut"
        raise Refusal(reason, f"it raised {profile.untraced}")
    if profile.uncut:
        reason, _, hint = profile.uncut.rpartition(": ")
        raise Refusal(reason, hint)
    if mesh and mesh.pipeline > profile.most_stages:
        reason = f"{mesh.pipeline} stages for {_layer_count_text(request)}"
        raise Refusal(reason, f"use pp={profile.most_stages} or fewer")


def _layer_count_text(request: PlanRequest) -> str:
    """Return in words how many layers can become stages."""
    most, layers = request.profile.most_stages, len(request.profile.layers)
    counted = "one layer" if most == 1 else f"{most} layers"
    return counted if most == layers else f"{counted} that {'is' if most == 1 else 'are'} trained, of {layers}"


# --- Asynchronous workers: parameter servers (Dean et al., 2012; Li et al., 2014) and local SGD -----------------------


_NO_FIT = "Keras' fit has all workers step together"
_CONSISTENCIES = ("sync", "ssp(3)", "async")  # the others are proposed only where the job asks for them
_LOCAL_STEPS = (8, 32, 128)  # where the job does not say
_BARRIER = "workers wait for each other at checkpoints and evaluations alone"
_FAULTS = (
    "a worker may die, join or be slow; a server's death sends all back to the last copy (keeper_s, else a "
    "checkpoint), and what came since is computed again"
)
_STALE_GRADIENTS = (
    "gradients are of old parameters{0}, of which a part may be newer (as in Hogwild): no run is like another"
)
_BACKUP = (
    "a step leaves out its {0} slowest parts, which are computed again later: that helps only against delays that are "
    "rare and large, and no run is like another"
)
_GATHERED = (
    "an update is the mean of the next {0} pushes, whoever they come from; at checkpoints and evaluations fewer can "
    "make one"
)
_COMPRESSED = {
    "topk": "only the largest numbers of a gradient are pushed, the rest with later ones: not equal to one device",
    **{kind: f"gradients are rounded to {kind}: not equal to one device" for kind in ("fp16", "bf16", "int8")},
}
_DRIFT = (
    "workers drift apart for {0} local steps at a time: not equal to one device; the optimizer's state stays with each "
    "worker and is lost with it"
)


def _propose_parameter_server(strategy: Strategy, request: PlanRequest) -> Iterator[Plan]:
    """Propose a worker on each rank; one server on each node, and more, while each could hold a part of its own.

    Where the job does not say how far apart workers may be: not at all, by three steps, and by any number.
    """
    if request.pins.choices.get("local_steps", 1) > 1:
        raise Refusal("its workers push each step", "use strategy='local_sgd', or leave local_steps out")
    _check_asynchronous(strategy, request)
    pinned = request.pins.choices.get("consistency")
    for consistency in (pinned,) if pinned else _CONSISTENCIES:
        yield from _server_plans(strategy, request, consistency)


def _propose_local_sgd(strategy: Strategy, request: PlanRequest) -> Iterator[Plan]:
    """Propose the job's number of local steps; without one, several numbers where the network between nodes is slow.

    Local SGD averages parameters (Stich, ICLR 2019). DiLoCo (Douillard et al., 2023) takes their mean difference as a
    gradient for an outer Nesterov step.
    """
    _check_asynchronous(strategy, request)
    pinned = request.pins.choices.get("local_steps", 1)
    if pinned == 1 and not request.cluster.far:
        reason = "the nodes are near each other: gradients of each step are quick to send"
        raise Refusal(reason, "set local_steps=8, for one")
    consistency = request.pins.choices.get("consistency", "sync")
    for steps in (pinned,) if pinned > 1 else _LOCAL_STEPS:
        outer = request.pins.choices.get("outer", "average" if pinned > 1 else "nesterov(0.7,0.9)")
        for plan in _server_plans(strategy, request, consistency, local_steps=steps, outer=outer):
            yield plan.noted(_DRIFT.format(steps))


def _check_asynchronous(strategy: Strategy, request: PlanRequest) -> None:
    """Refuse workers that cannot train against servers."""
    ranks, pins = request.ranks, request.pins
    if request.profile.keras_backend:
        hint = "use data_parallel, or for a model of TensorFlow tf_parameter_server"
        raise Refusal("the model is Keras': servers hold no such variables", hint)
    _check_ranks(strategy, request)
    if pins.mesh and pins.mesh != Mesh(data=ranks):
        raise Refusal("each worker holds the whole model: dp alone divides", "leave the other degrees out")
    backup = Consistency.parse(pins.choices.get("consistency", "sync")).backup
    if backup >= ranks:
        hint = f"use backup={ranks - 1} or less, or more workers"
        raise Refusal(f"sync(backup={backup}) waits for none of {ranks} workers", hint)
    if backup and GradientCompression.parse(pins.choices.get("wire", "full")).kind == "topk":
        reason = "what wire=topk adds to later pushes is lost with the parts of a step that backup= leaves out"
        raise Refusal(reason, "use wire='fp16' or 'int8', or another consistency")
    servers = pins.choices.get("servers", 1)
    most = _busy_servers(request, servers)
    if most < servers:
        idle = servers - count_busy_servers(request.profile.trained, servers)
        raise Refusal(f"{idle} of {servers} servers would hold nothing to train", f"use plan='servers={most}'")


def _busy_servers(request: PlanRequest, servers: int) -> int:
    """Return the most servers, up to a number, that would all hold trained parameters; the number if unknown."""
    trained = request.profile.trained
    if not trained:
        return servers
    return next((count for count in range(servers, 0, -1) if count_busy_servers(trained, count) == count), 1)


def _server_plans(
    strategy: Strategy, request: PlanRequest, consistency: str, *, local_steps: int = 1, outer: str = ""
) -> Iterator[Plan]:
    """Yield plans that differ in the number of servers."""
    wire = request.pins.choices.get("wire", "full")
    for servers in _server_counts(request):
        plan = strategy.plan(
            request, Mesh(data=request.ranks), servers=servers, topology="independent", consistency=consistency,
            wire=wire, local_steps=local_steps, outer=outer,
        )  # fmt: skip
        yield plan.noted(*_asynchronous_notes(Consistency.parse(consistency), GradientCompression.parse(wire)))


def _server_counts(request: PlanRequest) -> list[int]:
    """Return the job's number of servers; without one, one for each node, doubled up to the number of ranks.

    On preemptible nodes also fewer: if a node with a server is lost, all workers go back. Never more than the model
    fills.
    """
    pinned = request.pins.choices.get("servers")
    if pinned:
        return [pinned]
    nodes = min(len(request.cluster.nodes), request.ranks)
    counts = [1] if request.cluster.preemptible else [nodes]
    while 2 * counts[-1] <= request.ranks:
        counts.append(2 * counts[-1])
    return sorted({_busy_servers(request, count) for count in counts})


def _asynchronous_notes(consistency: Consistency, wire: GradientCompression) -> Iterator[str]:
    """Yield what a user must know of asynchronous workers."""
    if not consistency.waits:
        yield _STALE_GRADIENTS.format("")
    elif consistency.bound:
        yield _STALE_GRADIENTS.format(f", by {consistency.bound} steps at most")
    if consistency.backup:
        yield _BACKUP.format(consistency.backup)
    if consistency.pushes > 1:
        yield _GATHERED.format(consistency.pushes)
    if wire.kind in _COMPRESSED:
        yield _COMPRESSED[wire.kind]
    yield _BARRIER
    yield _FAULTS


# --- TensorFlow: one strategy for each of `tf.distribute` -------------------------------------------------------------


def _propose_mirrored(strategy: Strategy, request: PlanRequest) -> Iterator[Plan]:
    """Propose a replica on each device of one node."""
    if request.run == "fit" and request.batch_size % request.own_devices:
        reason = f"Keras' fit would weigh the rows of batch_size={request.batch_size} differently on each device"
        raise Refusal(reason, "use a batch_size that the devices divide")
    return _propose_one_node(strategy, request)


def _propose_one_node(strategy: Strategy, request: PlanRequest) -> Iterator[Plan]:
    """Propose one worker with a data rank on each device of its node."""
    if request.own_devices == 1:
        hint = "use tf_one_device; on a CPU, devices=2 makes two logical ones"
        raise Refusal("there is one device on a node", hint)
    yield from _propose_one_worker(strategy, request, request.own_devices)


def _propose_multi_worker_mirrored(strategy: Strategy, request: PlanRequest) -> Iterator[Plan]:
    """Propose one worker for each node, with a replica on each of its devices; for Keras' `fit` one for each device."""
    given, fit = request.tf_config == "environment", request.run == "fit"
    engine = (_FIT_AT_GIVEN_ADDRESSES if fit else _AT_GIVEN_ADDRESSES) if given else None
    if fit and request.compile == "xla":
        raise Refusal("XLA has no sums over processes, and Keras' fit is one function", 'leave compile="xla" out')
    if fit and request.devices not in (None, 1):
        reason = f"devices={request.devices}: Keras' fit has one in each worker"
        raise Refusal(reason, "leave devices out, set workers=")
    devices = 1 if fit else request.own_devices
    if devices > 1 and not request.cluster.accelerators:
        reason = "MultiWorkerMirroredStrategy has one device in each worker of a CPU cluster"
        raise Refusal(reason, "leave devices out, set workers=")
    yield from _propose_replicas(strategy, request, engine=engine, devices=devices)


_SERVER_BYTES = 1 << 20  # of parameters; a server with less spends its time on messages, not on bytes
_IN_FLIGHT = 3  # steps: while one ends, its workers are busy with the next, and no gradient is older
_STALE = (
    "each part of a step is an update of its own, from old parameters: not equal to one device, nor twice the same; at "
    f"most {_IN_FLIGHT} steps are under way"
)
_CLIPPED = "clip_norm is of a share's gradient; learning rates go by steps, an optimizer's own counts go by shares"
_RETRIED = (
    "a worker may die: its part is computed again, and where it was applied already, whole or not, is applied twice; "
    "another joins on the same host, once no other is missing"
)
_ENDS = "a server's or the chief's death sends all back to the last checkpoint"


def _propose_tf_parameter_server(strategy: Strategy, request: PlanRequest) -> Iterator[Plan]:
    """Propose a worker on each rank, with a chief and servers on CPUs."""
    _check_tf_parameter_server(strategy, request)
    plan = strategy.plan(
        request, Mesh(data=request.ranks), servers=_tf_server_count(request), topology="coordinator",
        consistency="async", in_flight=_IN_FLIGHT,
    )  # fmt: skip
    yield plan.noted(_STALE, _CLIPPED, _RETRIED, _ENDS)


def _tf_server_count(request: PlanRequest) -> int:
    """Return the job's number of servers; without one, one for each node while each has enough parameters.

    More servers than workers would wait for each other's requests, and several on a node share its link.
    """
    pinned: int | None = request.pins.choices.get("servers")
    worth = ceil(sum(layer.parameter_bytes for layer in request.profile.layers) / _SERVER_BYTES)
    return pinned or max(1, min(len(request.cluster.nodes), request.ranks, worth))


def _check_tf_parameter_server(strategy: Strategy, request: PlanRequest) -> None:
    """Refuse what TensorFlow's parameter servers cannot do."""
    choices = request.pins.choices
    if request.devices not in (None, 1):
        raise Refusal(f"devices={request.devices} is pinned", "leave devices out: each worker has one")
    if request.tf_config == "environment":
        hint = "leave tf_config out: the chief learns where the others listen"
        raise Refusal("its addresses are chosen as processes start", hint)
    if request.compile == "eager":
        raise Refusal("its workers run compiled functions", 'leave compile="eager" out')
    if request.profile.loss_scale:
        raise Refusal("mixed_float16 scales the loss of whole steps", "use mixed_bfloat16, or another strategy")
    if choices.get("consistency", "async") != "async":
        hint = 'set consistency="async" or leave it out; tf_multi_worker_mirrored steps together'
        reason = f"consistency={choices['consistency']!r}: TensorFlow's servers apply each update at once"
        raise Refusal(reason, hint)
    if choices.get("wire", "full") != "full" or choices.get("local_steps", 1) > 1:
        raise Refusal("TensorFlow sends whole gradients of each share", "leave wire and local_steps out")
    _check_ranks(strategy, request)


_TWO_CORES = ("TPU-V2", "TPU-V3")  # each chip is two devices to TensorFlow
_UNVERIFIED = "not verified on hardware: its parts were tested without a TPU"
_STATIC_SHAPES = "every micro-batch has the same number of rows: what is short is filled with rows of weight 0"


def _propose_tpu(strategy: Strategy, request: PlanRequest) -> Iterator[Plan]:
    """Propose a worker on each host of one slice, with a data rank on each chip. Not verified on hardware."""
    nodes, chips = request.cluster.nodes, request.own_devices
    hosts = request.workers or len(nodes)
    _check_slice(request, hosts)
    request.check_inexact(strategy.name, hosts * chips)
    plan = strategy.plan(
        request, Mesh(data=hosts * chips), engine=_NAMED_TPU if request.tpu else None, devices=chips,
        topology="coordinator", tpu=request.tpu or "",
    )  # fmt: skip
    head = next((node.head for node in nodes if node.head), "")
    yield replace(plan, placement=replace(plan.placement, head=head)).noted(_UNVERIFIED, _STATIC_SHAPES)


def _check_slice(request: PlanRequest, hosts: int) -> None:
    """Refuse clusters that are no slice of TPUs, and hosts that it does not have."""
    cluster = request.cluster
    if cluster.accelerator != "TPU":
        raise Refusal("the cluster has no TPU", "add nodes with Ray's resource TPU")
    old = [kind for kind in cluster.kinds if kind.upper().startswith(_TWO_CORES)]
    if old:
        reason = f"each chip of a {old[0]} is two devices to TensorFlow, and one to Ray"
        raise Refusal(reason, "use a TPU v4 or later")
    if request.elastic:
        raise Refusal("the number of hosts of a slice is fixed", "leave min_workers and max_workers out")
    if hosts > 1 and not request.tpu:
        hint = "name the slice: tpu=, or set workers=1 for the chips of one host"
        raise Refusal(f"the chips of {hosts} hosts are found by the slice's name", hint)
    if hosts > 1 and hosts != len(cluster.nodes):
        reason = f"workers={hosts} is pinned, and the slice has {len(cluster.nodes)} hosts"
        raise Refusal(reason, f"set workers={len(cluster.nodes)} or leave it out")


# --- The strategies, in the order in which plans are compared ---------------------------------------------------------


_PIPELINE = {"torch": f"{_TORCH}.pipeline:Pipeline"}
_NO_STEP = "step= calls the model as a whole"
_PARAMETER_SERVER = {"torch": f"{_TORCH}.parameter_server:ParameterServer"}
_ALL = (
    Strategy(
        name="one_device", engines={"torch": f"{_TORCH}.base:OneDevice"}, propose=_propose_one_worker,
        does="the whole batch on one device",
        when="the model is small",
        like="a plain loop",
        equal="it is the reference",
        evaluate=_ALONE,
        verified="CPU; Ray; one H100",
    ),
    Strategy(
        name="data_parallel", engines={"torch": f"{_TORCH}.data_parallel:DataParallel"}, propose=_propose_replicas,
        does="a replica on each worker; gradients are summed",
        when="the model fits one device",
        like="DDP",
        layout="dp=4",
        verified="CPU, 1 to 4 processes; Ray; one H100, one worker over NCCL",
    ),
    Strategy(
        name="sharded", engines={"torch": _FSDP}, propose=_propose_sharded, offloads=True,
        does="divides parameters, gradients and optimizer state: ZeRO-1 to 3, hybrid shard",
        when="state or parameters do not fit",
        like="FSDP2",
        layout="dp=4,zero=2",
        predict=_OWN,
        verified="CPU, 2 to 4 processes; Ray",
    ),
    Strategy(
        name="tensor_parallel", engines={"torch": f"{_TORCH}.tensor_parallel:TensorParallel"},
        propose=_propose_tensor_parallel,
        does="divides each layer over devices of a node; with `sequence=1` also activations between layers",
        when="layers or activations do not fit, and devices share a node",
        like="torch's `parallelize_module`",
        layout="dp=2,tp=2",
        predict=_OWN,
        verified="CPU, 2 to 4 processes; Ray",
    ),
    Strategy(
        name="pipeline", engines=_PIPELINE, propose=_propose_pipeline, no_step=_NO_STEP,
        does="stages of layers work on several micro-batches: GPipe, 1F1B, interleaved, zero-bubble, ZB-V, PipeDream",
        when="the model does not fit, and nodes are linked slowly",
        like="`torch.distributed.pipelining`",
        layout="pp=2,dp=2,schedule=1f1b,accumulation=8",
        equal="yes, except PipeDream",
        predict=_OWN,
        verified="CPU, 2 to 4 processes; Ray",
    ),
    Strategy(
        name="model_parallel", engines=_PIPELINE, propose=_propose_model_parallel, no_step=_NO_STEP,
        does="stages of layers work one after the other, without micro-batches",
        when="the model does not fit, and a batch cannot be divided",
        like="modules on several devices, by hand",
        equal="as `pipeline`",
        predict=_OWN,
        verified="not alone: it is `pipeline` with one micro-batch",
    ),
    Strategy(
        name="parameter_server", engines=_PARAMETER_SERVER, propose=_propose_parameter_server, no_fit=_NO_FIT,
        asynchronous=True,
        does="servers hold parameters and optimizer; workers pull parameters and push gradients",
        when="workers differ in speed or are preemptible",
        like="none in torch",
        layout="dp=8,servers=2",
        equal="`sync`, `ssp(0)`",
        evaluate=_REPLICAS,
        verified="CPU; Ray; one H100, two workers, servers in host memory",
    ),
    Strategy(
        name="local_sgd", engines=_PARAMETER_SERVER, propose=_propose_local_sgd, no_fit=_NO_FIT, asynchronous=True,
        does="workers push the result of many local steps: local SGD, DiLoCo",
        when="nodes are far apart",
        like="`PostLocalSGDOptimizer`",
        layout="dp=8,servers=2,local_steps=32",
        equal="no",
        evaluate=_REPLICAS,
        verified="CPU; Ray",
    ),
    Strategy(
        name="tf_one_device", engines={"tensorflow": f"{_TENSORFLOW}.strategy_engines:TensorFlowOneDevice"},
        propose=_propose_one_worker, fit=f"{_TENSORFLOW}.keras_fit:FitOneDevice",
        does="the whole batch on one device",
        when="the model is small",
        like="`OneDeviceStrategy`",
        evaluate=_ALONE,
        verified="CPU; Ray",
    ),
    Strategy(
        name="tf_mirrored", engines={"tensorflow": f"{_TENSORFLOW}.strategy_engines:Mirrored"},
        propose=_propose_mirrored, fit=f"{_TENSORFLOW}.keras_fit:FitMirrored",
        does="one worker with a replica on each device of its node; `devices=2` makes logical devices of a CPU",
        when="the devices of one node are enough",
        like="`MirroredStrategy`",
        evaluate=_ALONE,
        verified="CPU, 2 logical devices; Ray",
    ),
    Strategy(
        name="tf_multi_worker_mirrored", engines={"tensorflow": f"{_TENSORFLOW}.strategy_engines:MultiWorkerMirrored"},
        propose=_propose_multi_worker_mirrored, fit=f"{_TENSORFLOW}.fit_workers:FitMultiWorker",
        does="a worker for each node, with a replica on each device; without accelerators, one for each CPU slot",
        when="one node is not enough",
        like="`MultiWorkerMirroredStrategy`",
        verified="CPU, 2 to 4 processes; Ray",
    ),
    Strategy(
        name="tf_central_storage", engines={"tensorflow": f"{_TENSORFLOW}.strategy_engines:CentralStorage"},
        propose=_propose_one_node,
        no_fit="Keras' fit trains right with central storage, but reports wrong metrics",
        does="as `tf_mirrored`, but the variables stay in host memory",
        when="variables do not fit the devices",
        like="`CentralStorageStrategy`",
        evaluate=_ALONE,
        verified="CPU, 2 logical devices; Ray",
    ),
    Strategy(
        name="tf_parameter_server",
        engines={"tensorflow": f"{_TENSORFLOW}.ps.parameter_server:TensorFlowParameterServer"},
        propose=_propose_tf_parameter_server, asynchronous=True,
        no_fit="Keras' fit raises with parameter servers: it makes a data set on each worker",
        does="servers hold the variables; a chief assigns shares of steps to workers, which apply them asynchronously",
        when="workers differ in speed or are preemptible",
        like="`ParameterServerStrategy`",
        equal="no",
        evaluate=_ALONE,
        verified="CPU; Ray",
    ),
    Strategy(
        name="tf_tpu", engines={"tensorflow": f"{_TENSORFLOW}.tpu:TPU"}, propose=_propose_tpu,
        no_fit="Keras' fit has not been tried on TPUs",
        does="a worker for each host of a TPU slice; the first steps for all; `tpu=` names a slice of several hosts",
        when="the cluster has TPUs",
        like="`TPUStrategy`",
        equal="not tried",
        evaluate=_ALONE,
        verified=_UNVERIFIED,
    ),
)  # fmt: skip
STRATEGIES: Mapping[str, Strategy] = {strategy.name: strategy for strategy in _ALL}


def strategies_for(framework: str) -> Mapping[str, Strategy]:
    """Return the strategies for models of a framework, by name; without a framework, those for torch."""
    return {name: strategy for name, strategy in STRATEGIES.items() if (framework or "torch") in strategy.engines}
