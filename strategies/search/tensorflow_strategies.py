"""The strategies for TensorFlow models, one for each strategy of `tf.distribute`: what each proposes, and why not."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from trainwright.core.plan import InfeasiblePlan, Mesh, Plan
from trainwright.strategies.search.plan_request import PlanRequest
from trainwright.strategies.search.strategy import Proposals, Strategy
from trainwright.strategies.search.torch_strategies import one_worker_plan, replicas_plan

_ENGINES = "trainwright.strategies.tensorflow"
_AT_GIVEN_ADDRESSES = f"{_ENGINES}.strategy_engines:AtGivenAddresses"
_NAMED_TPU = f"{_ENGINES}.tpu:NamedTPU"


# --- One worker -------------------------------------------------------------------------------------------------------


def _propose_one_device(strategy: Strategy, request: PlanRequest) -> Proposals:
    """Propose the whole global batch on one device: the plan that all others are compared with."""
    yield one_worker_plan(strategy, request, engine=strategy.fit if request.run == "fit" else "")


def _propose_mirrored(strategy: Strategy, request: PlanRequest) -> Proposals:
    """Propose a replica on each device of one node."""
    if request.run == "fit" and request.batch_size % request.own_devices:
        reason = f"Keras' fit would weigh the rows of batch_size={request.batch_size} differently on each device"
        yield strategy.refusal(reason, "use a batch_size that the devices divide")
        return
    yield _one_node_plan(strategy, request, engine=strategy.fit if request.run == "fit" else "")


def _propose_central_storage(strategy: Strategy, request: PlanRequest) -> Proposals:
    """Propose a data rank on each device of one node; the variables stay in the memory of the host."""
    yield _one_node_plan(strategy, request)


def _one_node_plan(strategy: Strategy, request: PlanRequest, *, engine: str = "") -> Plan | InfeasiblePlan:
    """Return a plan for one worker with all devices of its node."""
    devices = request.own_devices
    if devices == 1:
        hint = "use tf_one_device; on a CPU, devices=2 makes two logical ones"
        return strategy.refusal("there is one device on a node", hint)
    return one_worker_plan(strategy, request, engine=engine, devices=devices)


TF_ONE_DEVICE = Strategy(
    name="tf_one_device", engines={"tensorflow": f"{_ENGINES}.strategy_engines:TensorFlowOneDevice"},
    propose=_propose_one_device, fit=f"{_ENGINES}.keras_fit:FitOneDevice",
)  # fmt: skip
TF_MIRRORED = Strategy(
    name="tf_mirrored", engines={"tensorflow": f"{_ENGINES}.strategy_engines:Mirrored"}, propose=_propose_mirrored,
    fit=f"{_ENGINES}.keras_fit:FitMirrored",
)  # fmt: skip
TF_CENTRAL_STORAGE = Strategy(
    name="tf_central_storage", engines={"tensorflow": f"{_ENGINES}.strategy_engines:CentralStorage"},
    propose=_propose_central_storage,
    no_fit="Keras' fit trains right with central storage, but reports wrong metrics",
)  # fmt: skip


# --- Several workers --------------------------------------------------------------------------------------------------


def _propose_multi_worker_mirrored(strategy: Strategy, request: PlanRequest) -> Proposals:
    """Propose one worker for each node, with a replica on each of its devices."""
    devices = request.own_devices
    if devices > 1 and not request.cluster.accelerators:
        reason = "MultiWorkerMirroredStrategy has one device in each worker of a CPU cluster"
        yield strategy.refusal(reason, "leave devices out, set workers=")
        return
    engine = _AT_GIVEN_ADDRESSES if request.tf_config == "environment" else ""
    yield replicas_plan(strategy, request, engine=engine, devices=devices)


TF_MULTI_WORKER_MIRRORED = Strategy(
    name="tf_multi_worker_mirrored", engines={"tensorflow": f"{_ENGINES}.strategy_engines:MultiWorkerMirrored"},
    propose=_propose_multi_worker_mirrored,
    no_fit="Keras' fit raises on several workers: it takes values of several replicas for tensors",
)  # fmt: skip

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


def _propose_parameter_server(strategy: Strategy, request: PlanRequest) -> Proposals:
    """Propose a worker on each rank, with a chief and servers on CPUs."""
    refusal = _parameter_server_refusal(strategy, request)
    if refusal:
        yield refusal
        return
    plan = request.plan(
        strategy.name, strategy.engine(request), Mesh(data=request.ranks), servers=_server_count(request),
        topology="coordinator", consistency="async", in_flight=_IN_FLIGHT,
    )  # fmt: skip
    yield plan.noted(_STALE, _CLIPPED, _RETRIED, _ENDS)


def _server_count(request: PlanRequest) -> int:
    """Return the job's number of servers; without one, one for each node while each has enough parameters.

    More servers than workers would wait for each other's requests, and several on a node share its link.
    """
    pinned: int | None = request.pins.choices.get("servers")
    worth = ceil(sum(layer.parameter_bytes for layer in request.profile.layers) / _SERVER_BYTES)
    return pinned or max(1, min(len(request.cluster.nodes), request.ranks, worth))


def _parameter_server_refusal(strategy: Strategy, request: PlanRequest) -> InfeasiblePlan | None:
    """Return why TensorFlow's parameter servers are impossible; None where they are possible."""
    name, choices = strategy.name, request.pins.choices
    if request.devices not in (None, 1):
        return strategy.refusal(f"devices={request.devices} is pinned", "leave devices out: each worker has one")
    if request.tf_config == "environment":
        hint = "leave tf_config out: the chief learns where the others listen"
        return strategy.refusal("its addresses are chosen as processes start", hint)
    if request.compile == "eager":
        return strategy.refusal("its workers run compiled functions", 'leave compile="eager" out')
    if request.profile.loss_scale:
        hint = "use mixed_bfloat16, or another strategy"
        return strategy.refusal("mixed_float16 scales the loss of whole steps", hint)
    if choices.get("consistency", "async") != "async":
        hint = 'set consistency="async" or leave it out; tf_multi_worker_mirrored steps together'
        reason = f"consistency={choices['consistency']!r}: TensorFlow's servers apply each update at once"
        return strategy.refusal(reason, hint)
    if choices.get("wire", "full") != "full" or choices.get("local_steps", 1) > 1:
        hint = "leave wire and local_steps out"
        return strategy.refusal("TensorFlow sends whole gradients of each share", hint)
    inexact = request.refuse_single_rank(name) or request.refuse_inexact(name, request.ranks)
    return inexact or request.refuse_tpu(name)


TF_PARAMETER_SERVER = Strategy(
    name="tf_parameter_server", engines={"tensorflow": f"{_ENGINES}.ps.parameter_server:TensorFlowParameterServer"},
    propose=_propose_parameter_server, asynchronous=True,
    no_fit="Keras' fit raises with parameter servers: it makes a data set on each worker",
)  # fmt: skip


# --- TPUs -------------------------------------------------------------------------------------------------------------


_TWO_CORES = ("TPU-V2", "TPU-V3")  # each chip is two devices to TensorFlow
_UNVERIFIED = "not verified on hardware: its parts were tested without a TPU"
_STATIC_SHAPES = "every micro-batch has the same number of rows: what is short is filled with rows of weight 0"


def _propose_tpu(strategy: Strategy, request: PlanRequest) -> Proposals:
    """Propose a worker on each host of one slice, with a data rank on each chip. Not verified on hardware."""
    refusal = _tpu_refusal(strategy, request)
    if refusal:
        yield refusal
        return
    nodes, chips = request.cluster.nodes, request.own_devices
    hosts = request.workers or len(nodes)
    plan = request.plan(
        strategy.name, _NAMED_TPU if request.tpu else strategy.engines["tensorflow"], Mesh(data=hosts * chips),
        devices=chips, topology="coordinator", tpu=request.tpu or "",
    )  # fmt: skip
    head = next((node.head for node in nodes if node.head), "")
    yield replace(plan, placement=replace(plan.placement, head=head)).noted(_UNVERIFIED, _STATIC_SHAPES)


def _tpu_refusal(strategy: Strategy, request: PlanRequest) -> InfeasiblePlan | None:
    """Return why a plan for TPUs is impossible; None where it is possible."""
    cluster = request.cluster
    if cluster.accelerator != "TPU":
        return strategy.refusal("the cluster has no TPU", "add nodes with Ray's resource TPU")
    old = [kind for kind in cluster.kinds if kind.upper().startswith(_TWO_CORES)]
    if old:
        reason = f"each chip of a {old[0]} is two devices to TensorFlow, and one to Ray"
        return strategy.refusal(reason, "use a TPU v4 or later")
    if request.elastic:
        return strategy.refusal("the number of hosts of a slice is fixed", "leave min_workers and max_workers out")
    hosts = request.workers or len(cluster.nodes)
    if hosts > 1 and not request.tpu:
        hint = "name the slice: tpu=, or set workers=1 for the chips of one host"
        return strategy.refusal(f"the chips of {hosts} hosts are found by the slice's name", hint)
    if hosts > 1 and hosts != len(cluster.nodes):
        reason = f"workers={hosts} is pinned, and the slice has {len(cluster.nodes)} hosts"
        return strategy.refusal(reason, f"set workers={len(cluster.nodes)} or leave it out")
    return request.refuse_inexact(strategy.name, hosts * request.own_devices)


TF_TPU = Strategy(
    name="tf_tpu", engines={"tensorflow": f"{_ENGINES}.tpu:TPU"}, propose=_propose_tpu,
    no_fit="Keras' fit has not been tried on TPUs",
)  # fmt: skip
