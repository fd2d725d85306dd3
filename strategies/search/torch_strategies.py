"""The strategies for torch models: what each proposes for a model on a cluster, and why other plans are impossible."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from trainwright.core.plan import STREAMED_SCHEDULES, InfeasiblePlan, Mesh, Plan
from trainwright.core.topology import Consistency, GradientCompression
from trainwright.strategies.ps.parameter_shards import count_busy_servers
from trainwright.strategies.search.plan_request import PlanRequest, divisors
from trainwright.strategies.search.strategy import Proposals, Strategy

_ENGINES = "trainwright.strategies.torch.engines"
_FSDP = f"{_ENGINES}.fsdp:Sharded"


def one_worker_plan(
    strategy: Strategy, request: PlanRequest, *, engine: str = "", devices: int = 1
) -> Plan | InfeasiblePlan:
    """Return a plan for one worker that drives some devices, one data rank each."""
    if request.elastic:
        return strategy.refusal("the number of workers may change", "leave min_workers and max_workers out")
    if request.workers not in (None, 1):
        return strategy.refusal(f"workers={request.workers} is pinned", "set workers=1 or leave it out")
    refusal = request.refuse_inexact(strategy.name, devices) or request.refuse_tpu(strategy.name)
    named = engine or strategy.engine(request)
    return refusal or request.plan(strategy.name, named, Mesh(data=devices), devices=devices)


def replicas_plan(
    strategy: Strategy, request: PlanRequest, *, engine: str = "", devices: int = 1
) -> Plan | InfeasiblePlan:
    """Return a plan for several workers, each with some devices and a replica on each device."""
    workers = request.workers_of(devices)
    ranks = workers * devices
    if workers == 1 and not request.elastic:
        why = "workers=1 is pinned" if request.workers else "there is room for one worker only"
        return strategy.refusal(why, "give the job two workers or more")
    refusal = request.refuse_inexact(strategy.name, ranks) or request.refuse_tpu(strategy.name)
    named = engine or strategy.engine(request)
    return refusal or request.plan(strategy.name, named, Mesh(data=ranks), devices=devices)


# --- One device and data parallelism ----------------------------------------------------------------------------------


def _propose_one_device(strategy: Strategy, request: PlanRequest) -> Proposals:
    """Propose the whole global batch on one device: no communication, the plan that all others are compared with."""
    yield one_worker_plan(strategy, request)


def _propose_data_parallel(strategy: Strategy, request: PlanRequest) -> Proposals:
    """Propose a replica for each worker slot of the cluster, or for each worker that the job pins."""
    yield replicas_plan(strategy, request)


ONE_DEVICE = Strategy(name="one_device", engines={"torch": f"{_ENGINES}.base:OneDevice"}, propose=_propose_one_device)
DATA_PARALLEL = Strategy(
    name="data_parallel", engines={"torch": f"{_ENGINES}.data_parallel:DataParallel"}, propose=_propose_data_parallel
)


# --- Sharded data parallelism (ZeRO; Rajbhandari et al., 2020) --------------------------------------------------------


def _propose_sharded(strategy: Strategy, request: PlanRequest) -> Proposals:
    """Propose each stage of ZeRO over all ranks, and hybrid shard: ZeRO-3 inside a node, replicas between nodes.

    No engine shards the optimizer state alone (ZeRO-1). Host memory can hold the state of ZeRO-2 and ZeRO-3 (Ren et
    al., 2021).
    """
    name, ranks, engine = strategy.name, request.ranks, strategy.engine(request)
    refusal = request.refuse_single_rank(name) or request.refuse_inexact(name, ranks) or request.refuse_tpu(name)
    if refusal:
        yield refusal
        return
    if ranks == 1:
        yield strategy.refusal("there is room for one worker only now", "wait until there is room for two")
        return
    for zero in (2, 3) if request.offload else (1, 2, 3):
        named = engine if zero > 1 else ""
        yield request.plan(name, named, Mesh(shard=ranks), zero=zero, offload=request.offload)
    for mesh in _hybrid_meshes(request):
        yield request.plan(name, engine, mesh, zero=3, offload=request.offload)


def _hybrid_meshes(request: PlanRequest) -> Iterator[Mesh]:
    """Yield the mesh that the job pins, or the one with its shards inside a node."""
    pinned, inside = request.pins.mesh, request.per_node
    mesh = pinned or Mesh(data=request.ranks // inside, shard=inside)
    if mesh.data > 1 and mesh.shard > 1 and mesh.size == mesh.data_ranks == request.ranks:
        yield mesh


SHARDED = Strategy(name="sharded", engines={"torch": _FSDP}, propose=_propose_sharded, offloads=True)


# --- Tensor parallelism (Shoeybi et al., 2019) ------------------------------------------------------------------------


def _propose_tensor_parallel(strategy: Strategy, request: PlanRequest) -> Proposals:
    """Propose degrees that divide the heads and fit a node: alone, with replicas, and with ZeRO over the replicas.

    No engine shards the optimizer state alone (ZeRO-1).
    """
    name, ranks, engine = strategy.name, request.ranks, strategy.engine(request)
    refusal = request.refuse_tpu(name) or _across_nodes_refusal(strategy, request)
    if refusal:
        yield refusal
        return
    sharded = _FSDP if engine else ""
    found = [degree for degree in _tensor_degrees(request) if degree > 1 and not ranks % degree]
    if not found:
        yield request.refuse_single_rank(name) or _no_degree_refusal(strategy, request)
    for tensor in found:
        data = ranks // tensor
        yield request.refuse_inexact(name, data) or request.plan(name, engine, Mesh(data=data, tensor=tensor))
        if data > 1 and not request.refuse_inexact(name, data):
            for zero in (1, 2, 3):
                named = sharded if zero > 1 else ""
                yield request.plan(name, named, Mesh(shard=data, tensor=tensor), zero=zero)
            pinned = request.pins.mesh
            if (
                pinned
                and min(pinned.data, pinned.shard) > 1
                and pinned == Mesh(data=pinned.data, shard=data // pinned.data, tensor=tensor)
            ):
                yield request.plan(name, sharded, pinned, zero=3)


def _tensor_degrees(request: PlanRequest) -> Iterator[int]:
    """Yield the tensor degrees that the model, its compiler and a node allow."""
    profile = request.profile
    if request.compile == "inductor" or profile.indivisible or not any(layer.splits for layer in profile.layers):
        yield 1
        return
    yield from (each for each in divisors(request.per_node) if not profile.heads % each)


def _no_degree_refusal(strategy: Strategy, request: PlanRequest) -> InfeasiblePlan:
    heads, per_node = request.profile.heads, request.per_node
    reason = "no layer of this model is known to be divisible"
    hint = "use data parallelism or a pipeline"
    if any(layer.splits for layer in request.profile.layers):
        reason = f"no degree from 2 divides {heads} heads and the {per_node} devices of a node"
        hint = "use a number of workers on each node that shares a divisor with the heads"
    if request.profile.indivisible:
        reason, hint = request.profile.indivisible, "use sharded or data parallelism, or a pipeline"
    if request.compile == "inductor":
        reason, hint = 'compile="inductor" was not tried with it', "leave compile out, or use tp=1"
    return strategy.refusal(reason, hint)


def _across_nodes_refusal(strategy: Strategy, request: PlanRequest) -> InfeasiblePlan | None:
    """Refuse tensor ranks on several nodes: they communicate in every layer, and the network is too slow for that."""
    tensor, per_node = request.pins.mesh.tensor if request.pins.mesh else 1, request.per_node
    if tensor <= per_node:
        return None
    reason = f"tp={tensor} is more than the {per_node} devices of a node"
    return strategy.refusal(reason, f"use tp={per_node} or less, and a pipeline or ZeRO over the nodes")


TENSOR_PARALLEL = Strategy(
    name="tensor_parallel",
    engines={"torch": f"{_ENGINES}.tensor_parallel:TensorParallel"},
    propose=_propose_tensor_parallel,
)


# --- Pipelines (Huang et al., 2019), and stages without micro-batches -------------------------------------------------


STALE_WEIGHTS = (
    "gradients are one step stale (2BW): each step's are taken at the weights that the last update started from"
)
_SCHEDULES = (("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1), ("zbv", 2), ("gpipe", 1), ("pipedream", 1))


def _propose_pipeline(strategy: Strategy, request: PlanRequest) -> Proposals:
    """Propose numbers of stages that divide the ranks, with each tensor degree, plain or with ZeRO, in each schedule.

    No engine shards the optimizer state alone (ZeRO-1).
    """
    meshes = list(_stage_meshes(request))
    refusal = _no_stages_refusal(strategy, request)
    if refusal or not meshes:
        yield refusal or _indivisible_refusal(strategy, request)
        return
    for mesh in meshes:
        refusal = request.refuse_inexact(strategy.name, mesh.data)
        if refusal:
            yield refusal
            continue
        for schedule, chunks in _schedules(request):
            if chunks * mesh.pipeline <= request.profile.most_stages:
                yield from _pipeline_plans(strategy, request, mesh, schedule, chunks)


def _propose_model_parallel(strategy: Strategy, request: PlanRequest) -> Proposals:
    """Propose numbers of stages that work one after the other, without micro-batches, and replicas of that."""
    meshes = [mesh for mesh in _stage_meshes(request) if mesh.tensor == 1]
    refusal = _no_stages_refusal(strategy, request)
    if refusal or not meshes:
        yield refusal or _indivisible_refusal(strategy, request)
        return
    for mesh in meshes:
        refusal = request.refuse_inexact(strategy.name, mesh.data)
        yield refusal or request.plan(strategy.name, strategy.engine(request), mesh)


def _schedules(request: PlanRequest) -> Iterator[tuple[str, int]]:
    """Yield each schedule with its chunks; schedules with stale gradients only if the job asks for them."""
    choices = request.pins.choices
    for schedule, chunks in _SCHEDULES:
        if schedule not in STREAMED_SCHEDULES or schedule == choices.get("schedule"):
            yield schedule, choices.get("chunks", chunks) if schedule == "interleaved" else chunks


def _stage_meshes(request: PlanRequest) -> Iterator[Mesh]:
    """Yield the meshes with several stages over all ranks."""
    ranks, layers = request.ranks, request.profile.most_stages
    for tensor in _tensor_degrees(request):
        for stages in divisors(ranks // tensor):
            if 1 < stages <= layers and not ranks % (tensor * stages):
                yield Mesh(pipeline=stages, data=ranks // tensor // stages, tensor=tensor)


def _no_stages_refusal(strategy: Strategy, request: PlanRequest) -> InfeasiblePlan | None:
    """Return why a model cannot run in stages at all; None where it can."""
    refusal = request.refuse_single_rank(strategy.name) or request.refuse_tpu(strategy.name)
    if refusal:
        return refusal
    profile, mesh = request.profile, request.pins.mesh
    if request.own_step:
        hint = "give the job inputs=, targets= and loss= instead"
        return strategy.refusal("step= calls the model as a whole", hint)
    if profile.keras_backend:
        reason = "the calls of Keras layers cannot be traced and cut"
        return strategy.refusal(reason, 'use strategy="sharded" or "data_parallel"')
    if profile.untraced:
        reason = "the forward of the model cannot be traced, so it is unknown where it can be cut"
        return strategy.refusal(reason, f"it raised {profile.untraced}")
    if profile.uncut:
        reason, _, hint = profile.uncut.rpartition(": ")
        return strategy.refusal(reason, hint)
    if mesh and mesh.pipeline > profile.most_stages:
        reason = f"{mesh.pipeline} stages for {_layer_count_text(request)}"
        return strategy.refusal(reason, f"use pp={profile.most_stages} or fewer")
    return None


def _indivisible_refusal(strategy: Strategy, request: PlanRequest) -> InfeasiblePlan:
    """Refuse ranks of which no number of stages can be made of the layers."""
    reason = f"a model of {_layer_count_text(request)} cannot be divided for {request.ranks} ranks"
    return strategy.refusal(reason, "build the model of more modules, or use fewer workers")


def _layer_count_text(request: PlanRequest) -> str:
    """Return in words how many layers can become stages."""
    most, layers = request.profile.most_stages, len(request.profile.layers)
    counted = "one layer" if most == 1 else f"{most} layers"
    return counted if most == layers else f"{counted} that {'is' if most == 1 else 'are'} trained, of {layers}"


def _pipeline_plans(strategy: Strategy, request: PlanRequest, mesh: Mesh, schedule: str, chunks: int) -> Iterator[Plan]:
    name, engine = strategy.name, strategy.engine(request)
    plain = request.plan(name, engine, mesh, schedule=schedule, chunks=chunks)
    yield replace(plain, notes=(*plain.notes, STALE_WEIGHTS)) if plain.streamed else plain
    if mesh.data > 1:
        divided = Mesh(pipeline=mesh.pipeline, shard=mesh.data, tensor=mesh.tensor)
        for zero in (1, 2):
            named = engine if zero == 2 else ""
            yield request.plan(name, named, divided, zero=zero, schedule=schedule, chunks=chunks)
    pinned = request.pins.mesh
    if pinned and pinned.shard > 1 and pinned.data > 1 and replace(pinned, data=pinned.data_ranks, shard=1) == mesh:
        yield request.plan(name, engine, pinned, zero=2, schedule=schedule, chunks=chunks)


PIPELINE = Strategy(name="pipeline", engines={"torch": f"{_ENGINES}.pipeline:Pipeline"}, propose=_propose_pipeline)
MODEL_PARALLEL = Strategy(name="model_parallel", engines=PIPELINE.engines, propose=_propose_model_parallel)


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
_COMPRESSED = {
    "topk": "only the largest numbers of a gradient are pushed, the rest with later ones: not equal to one device",
    **{kind: f"gradients are rounded to {kind}: not equal to one device" for kind in ("fp16", "bf16", "int8")},
}
_DRIFT = (
    "workers drift apart for {0} local steps at a time: not equal to one device; the optimizer's state stays with each "
    "worker and is lost with it"
)


def _propose_parameter_server(strategy: Strategy, request: PlanRequest) -> Proposals:
    """Propose a worker on each rank; one server on each node, and more, while each could hold a part of its own.

    Where the job does not say how far apart workers may be: not at all, by three steps, and by any number.
    """
    if request.pins.choices.get("local_steps", 1) > 1:
        hint = "use strategy='local_sgd', or leave local_steps out"
        yield strategy.refusal("its workers push each step", hint)
        return
    refusal = _asynchronous_refusal(strategy, request)
    if refusal:
        yield refusal
        return
    pinned = request.pins.choices.get("consistency")
    for consistency in (pinned,) if pinned else _CONSISTENCIES:
        yield from _server_plans(strategy, request, consistency)


def _propose_local_sgd(strategy: Strategy, request: PlanRequest) -> Proposals:
    """Propose the job's number of local steps; without one, several numbers where the network between nodes is slow.

    Local SGD averages parameters (Stich, ICLR 2019). DiLoCo (Douillard et al., 2023) takes their mean difference as a
    gradient for an outer Nesterov step.
    """
    refusal = _asynchronous_refusal(strategy, request)
    if refusal:
        yield refusal
        return
    pinned = request.pins.choices.get("local_steps", 1)
    if pinned == 1 and not request.cluster.far:
        reason = "the nodes are near each other: gradients of each step are quick to send"
        yield strategy.refusal(reason, "set local_steps=8, for one")
        return
    consistency = request.pins.choices.get("consistency", "sync")
    for steps in (pinned,) if pinned > 1 else _LOCAL_STEPS:
        outer = request.pins.choices.get("outer", "average" if pinned > 1 else "nesterov(0.7,0.9)")
        for plan in _server_plans(strategy, request, consistency, local_steps=steps, outer=outer):
            yield plan.noted(_DRIFT.format(steps))


def _asynchronous_refusal(strategy: Strategy, request: PlanRequest) -> InfeasiblePlan | None:
    """Return why workers cannot train against servers; None where they can."""
    name, ranks, pins = strategy.name, request.ranks, request.pins
    if request.profile.keras_backend:
        hint = "use data_parallel, or for a model of TensorFlow tf_parameter_server"
        return strategy.refusal("the model is Keras': servers hold no such variables", hint)
    refusal = request.refuse_single_rank(name) or request.refuse_inexact(name, ranks) or request.refuse_tpu(name)
    if refusal:
        return refusal
    if pins.mesh and pins.mesh != Mesh(data=ranks):
        reason = "each worker holds the whole model: dp alone divides"
        return strategy.refusal(reason, "leave the other degrees out")
    backup = Consistency.parse(pins.choices.get("consistency", "sync")).backup
    if backup >= ranks:
        reason = f"sync(backup={backup}) waits for none of {ranks} workers"
        return strategy.refusal(reason, f"use backup={ranks - 1} or less, or more workers")
    servers = pins.choices.get("servers", 1)
    most = _busy_servers(request, servers)
    if most < servers:
        idle = servers - count_busy_servers(request.profile.trained, servers)
        reason = f"{idle} of {servers} servers would hold nothing to train"
        return strategy.refusal(reason, f"use plan='servers={most}'")
    return None


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
    ranks, engine = request.ranks, strategy.engine(request)
    wire = request.pins.choices.get("wire", "full")
    for servers in _server_counts(request):
        plan = request.plan(
            strategy.name, engine, Mesh(data=ranks), servers=servers, topology="independent", consistency=consistency,
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
    if wire.kind in _COMPRESSED:
        yield _COMPRESSED[wire.kind]
    yield _BARRIER
    yield _FAULTS


PARAMETER_SERVER = Strategy(
    name="parameter_server", engines={"torch": f"{_ENGINES}.parameter_server:ParameterServer"},
    propose=_propose_parameter_server, no_fit=_NO_FIT, asynchronous=True,
)  # fmt: skip
LOCAL_SGD = Strategy(
    name="local_sgd", engines=PARAMETER_SERVER.engines, propose=_propose_local_sgd, no_fit=_NO_FIT, asynchronous=True
)
