"""What a run's driver and workers get, as it follows from the prepared job and its plan."""

from __future__ import annotations

import hashlib
import json
import math
import secrets
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from trainwright.core import events, formatting
from trainwright.core.data import Batch
from trainwright.core.events import Event, Steps
from trainwright.core.frameworks import package_versions
from trainwright.core.job import Job
from trainwright.core.plan import Plan
from trainwright.core.topology import Capabilities
from trainwright.datasets.dataset import Dataset, Index, delivery_of, first_batch
from trainwright.datasets.loading.batch_loader import Fetcher, make_schedule
from trainwright.datasets.sample_order import StepSchedule
from trainwright.driver.messages import PlanSelector
from trainwright.driver.run_policy import (
    CALL_DEADLINE_S,
    CheckpointPolicy,
    Deadlines,
    FailureLimits,
    RunLength,
    RunPolicy,
    WorldPolicy,
)
from trainwright.planning.alternative_layouts import MEASURING_SHARE, alternative_plans, explain_out_of_memory
from trainwright.planning.decision import Decision, other_plans
from trainwright.planning.job_description import state_relevant_fields
from trainwright.planning.job_preparation import PreparedJob, store_metadata
from trainwright.planning.planner import apply_plan_file
from trainwright.ray_cluster.discovery import PendingNodeWatcher
from trainwright.ray_cluster.placement_groups import WorkerPlacement, device_names
from trainwright.ray_cluster.ray_compat import dashboard_link
from trainwright.storage.event_files import EventCompactor
from trainwright.storage.event_log import EventLog
from trainwright.strategies import engine_class
from trainwright.strategies.search.plan_request import PlanRequest
from trainwright.worker.worker_config import WorkerConfig, pickle_job


class RunSetup:
    """A prepared job with its plan, and what the driver and the workers get of them.

    Args:
        placement: placement of the workers; None for placement groups of Ray.
    """

    def __init__(self, prepared: PreparedJob, decision: Decision, placement: WorkerPlacement | None = None) -> None:
        self.prepared, self.decision, self.placement = prepared, decision, placement
        job = apply_plan_file(prepared.job, decision.profile, decision.cluster)
        self._request = PlanRequest.of(job, decision.profile, decision.used)
        self._layouts = alternative_plans(job, self._request, decision.contenders or (decision.chosen,))
        self._schedule = make_schedule(prepared.train, **prepared.job.ordering())

    def policy(self) -> RunPolicy:
        """Return what the driver gets."""
        job, plan, per_epoch = self.prepared.job, self.decision.chosen, self.prepared.steps_per_epoch
        capabilities = engine_class(plan).capabilities
        others = plan.processes - plan.workers
        fewest = 1 if capabilities.topology == "independent" else plan.workers  # late ones join by themselves
        return RunPolicy(
            world=WorldPolicy(
                workers=plan.processes,
                servers=plan.servers,
                tolerates=capabilities.tolerates,
                min_workers=others + min(plan.workers, job.scaling.min_workers or fewest),
                shrinks_at_once=job.recovery.on_loss == "shrink",
                last_resort=1 if self._layouts and not (job.scaling.workers or job.scaling.elastic) else None,
                max_workers=others + max(plan.workers, job.scaling.max_workers or job.scaling.workers or 0),
                spares=job.recovery.spares if job.recovery.spares is not None else _spares(plan, capabilities),
                spares_stay=bool(plan.placement.accelerators),
                reform=capabilities.reform,
                topology=capabilities.topology,
                layouts=self._layouts,
                threads=plan.placement.threads,
                devices=device_names(plan),
                mesh=plan.mesh if capabilities.topology == "collective" and not job.scaling.elastic else None,
                secret=secrets.token_bytes(),
            ),
            length=RunLength(
                stride=plan.local_steps,
                total_steps=self.prepared.total_steps,
                steps_per_epoch=per_epoch,
                profile=job.training.profile or range(0),
                evaluate_steps=per_epoch * job.checkpointing.evaluate_epochs if job.evaluate is not None else None,
                samples_of=partial(_samples_of, self._schedule, plan),
                early_stop=job.checkpointing.early_stop,
                max_time_s=job.checkpointing.max_time,
            ),
            saving=CheckpointPolicy(
                checkpoint_steps=job.checkpointing.checkpoint_steps
                if isinstance(job.checkpointing.checkpoint_steps, int)
                else None,
                checkpoint_auto=job.checkpointing.checkpoint_steps == "auto",
                keep_s=None if job.checkpointing.keeper_s == 0 else job.checkpointing.keeper_s,
                best=job.checkpointing.best or "",
            ),
            limits=self._limits(),
            deadlines=Deadlines(
                place_deadline_s=job.start_deadline_s(self.decision.cluster),
                shrink_s=job.scaling.shrink_s,
                preemption_s=job.recovery.preemption_s,
                call_deadline_s=max(CALL_DEADLINE_S, job.recovery.hang_deadline_s or 0.0),
                hang_deadline_s=job.recovery.hang_deadline_s,
            ),
        )

    def _limits(self) -> FailureLimits:
        """Return which failures the run recovers from."""
        job = self.prepared.job
        return FailureLimits(
            failures=job.recovery.failures,
            failures_an_hour=job.recovery.failures_an_hour,
            max_loss_ratio=job.recovery.max_loss_ratio,
            spike_limit=job.recovery.skip_limit if job.recovery.on_spike == "rollback" else 0,
            pass_limit=job.recovery.skip_limit if job.recovery.on_crash_loop == "skip" else 0,
            probe_share=MEASURING_SHARE,
            replace_stragglers=job.recovery.replace_stragglers,
            replan_memory=job.recovery.on_oom == "replan",
            explain_memory=partial(explain_out_of_memory, self._request, self.decision.chosen),
        )

    def event_log(self) -> EventLog:
        """Return the log of the run's events, which reports nodes that the cluster starts too."""
        store, run = self.prepared.store, self.prepared.job.name
        log = EventLog(store, run, compact=EventCompactor(store.impatient(), run).compact)
        if self.decision.cluster.grows:
            log.listen(PendingNodeWatcher(log.write))
        return log

    def store_metadata(self) -> None:
        """Store the metadata of the data files. Raises StorageError."""
        store_metadata(self.prepared)

    def example_row(self) -> Batch | None:
        """Return a row of the training set if workers should not open what computes it; otherwise None."""
        job = self.prepared.job
        return first_batch(job.train, self.prepared.train, job.columns) if job.train.stateful else None

    def worker_config(self, feeder: RayDataFeeder, row: Batch | None) -> WorkerConfig:
        """Return what every worker gets; `row` is an example of the training set."""
        prepared, job = self.prepared, self.prepared.job
        return WorkerConfig(
            job=pickle_job(job.replace(trackers=())),  # only the driver needs them; they may hold a secret
            plan=self.decision.chosen,
            storage=prepared.store.uri,
            run=job.name,
            train=prepared.train,
            evaluate=prepared.evaluate,
            identity=_identity(prepared, self.decision.chosen, self._layouts, self.placement),
            preemption_s=job.recovery.preemption_s,
            profile=job.training.profile or range(0),
            fetcher=feeder.train,
            evaluate_fetcher=feeder.evaluate,
            rows=feeder.rows,
            row=row,
            weights=prepared.weights,
        )

    def start_feeder(self) -> RayDataFeeder:
        """Start the delivery of data sets with heavy transforms by Ray Data."""
        prepared, plan, decision = self.prepared, self.decision.chosen, self.decision
        accelerators = plan.workers * plan.placement.accelerators
        gpus = decision.cluster.accelerators - accelerators if decision.cluster.accelerator == "GPU" else 0
        return RayDataFeeder(
            prepared.job, prepared.train, prepared.evaluate, cpus=decision.data_cpus, gpus=gpus,
            delivery=decision.delivery,
        )  # fmt: skip

    def started(self, token: int, *, fresh: bool) -> events.RunStarted:
        """Return the first event of a driver."""
        return events.RunStarted(
            run=self.prepared.job.name,
            token=token,
            job=self.prepared.description,
            plan=asdict(self.decision.chosen),
            rejected=other_plans(self.decision),
            cluster=str(self.decision.cluster),
            dashboard=dashboard_link(),
            timeline=self.decision.timeline,
            versions=package_versions(),
            total_steps=self.prepared.total_steps,
            steps_per_epoch=self.prepared.steps_per_epoch,
            fresh=fresh,
        )


def _identity(
    prepared: PreparedJob, plan: Plan, layouts: PlanSelector | None, placement: WorkerPlacement | None
) -> str:
    """Return a hash of job, data, plan and placement; a surviving worker process must have the same hash."""
    fields = asdict(replace(plan, estimate=None, notes=()))
    lasting = ("batch_size", "precision", "keras_backend", "devices_per_worker", "placement")
    facts = {
        "job": state_relevant_fields(prepared.description),
        "plan": {name: fields[name] for name in lasting} if layouts else fields,
        "placement": placement.name if placement is not None else "",
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def _samples_of(
    schedule: StepSchedule, first_plan: Plan, step: int, rank: int, workers: int, plan: Plan | None
) -> tuple[int, ...]:
    """Return the rows of the training set that a worker gets in a step (from 1)."""
    plan_of_step = plan or (first_plan.resized(workers) if first_plan.topology == "collective" else first_plan)
    feeding, steps = plan_of_step.feed_of(rank), range(step - 1, step)
    shares = [schedule.share(steps, data_rank, feeding.total) for data_rank in feeding.data_ranks]
    return tuple(int(sample) for share in shares if share.real[0] for sample in share.samples)


def _spares(plan: Plan, capabilities: Capabilities) -> int:
    """Return the default number of warm standbys: one, or all if every failure needs new processes."""
    if plan.processes == 1:
        return 0
    return plan.processes if capabilities.reform == "new_process" else 1


# --- Delivery by Ray Data ---------------------------------------------------------------------------------------------


_WARMUP_STEPS = 10  # steps whose waiting does not count, because the delivery has just started
_MIN_STEPS = 30  # counted steps before a warning
_MIN_WAIT_SHARE = 0.2  # of the steps' time


class RayDataFeeder:
    """Starts the delivery of a run's heavy and streamed data sets, and warns once if the steps wait for data.

    Args:
        train, evaluate: indexes of the data sets.
        cpus, gpus: resources that the workers do not use.
        delivery: of the training set; by default the delivery of the job and its data.

    Raises:
        ResourceError: the transforms need more resources.
    """

    def __init__(
        self, job: Job, train: Index, evaluate: Index | None, *, cpus: float, gpus: float, delivery: str = ""
    ) -> None:
        self._fetchers: dict[str, Any] = {}
        self.rows: dict[str, Any] = {}  # by data set, the reader of its streamed rows
        self._steps = self._counted = 0
        self._step_s = self._wait_s = 0.0
        self._warned, self._cpus = False, cpus
        self._any_order = not train.in_order
        data_sets: dict[str, tuple[Dataset, Index, dict[str, Any]]] = {"train": (job.train, train, job.ordering())}
        if job.evaluate is not None and evaluate is not None:
            data_sets["evaluate"] = job.evaluate, evaluate, job.ordering(evaluate=True)
        how = {"train": delivery or job.data.delivery, "evaluate": job.data.delivery}
        delivered = {name: item for name, item in data_sets.items() if delivery_of(item[0], how[name])[0] == "ray_data"}
        heavy = {name: parts for name, parts in delivered.items() if parts[0].heavy or not parts[0].streamed}
        if heavy:
            from trainwright.datasets.ray_data.ray_fetcher import DEADLINE_S, make_pipeline_spec, start_delivery

            hang_s = job.recovery.hang_deadline_s or DEADLINE_S
            recipes = [
                make_pipeline_spec(data, index, columns=job.columns, **order) for data, index, order in heavy.values()
            ]
            fetchers = start_delivery(recipes, cpus=cpus, gpus=gpus, deadline_s=max(hang_s, DEADLINE_S), hang_s=hang_s)
            self._fetchers = dict(zip(heavy, fetchers, strict=True))
        streamed = {name: parts for name, parts in delivered.items() if name not in heavy}
        if streamed:
            from trainwright.datasets.ray_data.block_stream import start_streams

            sources = [(data, index, make_schedule(index, **order).passes) for data, index, order in streamed.values()]
            least_s, free = job.recovery.hang_deadline_s or 0.0, {"CPU": cpus, "GPU": float(gpus)}
            self.rows = dict(zip(streamed, start_streams(sources, job.columns, free, least_s), strict=True))

    @property
    def train(self) -> Fetcher | None:
        """The fetcher of the training set; None if the workers read it themselves."""
        return self._fetchers.get("train")

    @property
    def evaluate(self) -> Fetcher | None:
        """The fetcher of the evaluation set."""
        return self._fetchers.get("evaluate")

    def on(self, event: Event) -> None:
        """Note how long steps waited."""
        if isinstance(event, Steps):
            for step_s, wait_s in zip(event.step_s, event.wait_s, strict=True):
                self._steps += 1
                if self._steps > _WARMUP_STEPS and math.isfinite(wait_s):
                    self._counted += 1
                    self._step_s, self._wait_s = self._step_s + step_s, self._wait_s + wait_s

    def news(self) -> list[str]:
        """Return new lines for the user; wait for nothing."""
        lines = [self.verdict()]
        for fetcher in list(self._fetchers.values())[:1]:  # all belong to one delivery
            lines += fetcher.news()
        return [line for line in lines if line]

    def verdict(self) -> str:
        """Return a warning, once, if steps wait for data: the cause and a remedy. Otherwise an empty text."""
        share = self._wait_s / self._step_s if self._step_s > 0 else 0.0
        if self._warned or self._counted < _MIN_STEPS or share < _MIN_WAIT_SHARE:
            return ""
        self._warned = True
        why = ""
        if "train" in self._fetchers:
            stages = self._fetchers["train"].stages()
            why = _bottleneck_text(stages) if stages else ""
        elif "train" in self.rows:
            why = (
                f", which Ray Data delivers with {self._cpus:g} CPUs; leave it more (fewer workers), or store what the "
                "data set computes"
            )
        elif self._any_order and self._cpus >= 1:
            why = (
                ", which the workers read and transform themselves; delivery='ray_data' would do that with the "
                f"{self._cpus:g} CPUs that they leave free"
            )
        return f"steps wait for data {formatting.percent(share)} of their time{why}" if why else ""

    def close(self) -> None:
        """End the delivery and its processes. Safe to call twice."""
        for readers in (self._fetchers, self.rows):
            for reader in list(readers.values())[:1]:  # all belong to one delivery
                reader.close()
        self._fetchers, self.rows = {}, {}


def _bottleneck_text(stages: Any) -> str:
    """Return the slowest stage of a delivery, and a remedy."""
    slowest = max(stages, key=lambda stage: stage.seconds / stage.slots)
    processes = "1 process" if slowest.slots == 1 else f"{slowest.slots} processes"
    busy = f"{slowest.name}: {processes}, {formatting.percent(slowest.busy)} busy"
    if slowest is stages[0]:
        helps = "make the functions before the first heavy one heavy too, or store what they make"
    else:
        helps = "give it more (fewer CPUs or GPUs each, or fewer workers), or compute what it adds once and store it"
    return f", for {busy}; {helps}"
