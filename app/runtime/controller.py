"""One driver's life: decisions carried out until the run is finished."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial

from trainwright.core import events
from trainwright.core.errors import StorageError
from trainwright.core.frameworks import package_versions
from trainwright.core.plan import Plan
from trainwright.core.topology import Capabilities
from trainwright.datasets.loading.batch_loader import make_schedule
from trainwright.datasets.sample_order import StepSchedule
from trainwright.driver import messages as m
from trainwright.driver.messages import PlanSelector
from trainwright.driver.run_policy import RunPolicy
from trainwright.driver.state_machine import begin_run, decide
from trainwright.planning.alternative_layouts import MEASURING_SHARE, alternative_plans
from trainwright.planning.decision import Decision, other_plans
from trainwright.planning.job_description import state_relevant_fields
from trainwright.planning.job_preparation import PreparedJob, store_metadata
from trainwright.planning.planner import apply_plan_file
from trainwright.ray_cluster.autoscaling import PendingNodeWatcher
from trainwright.ray_cluster.placement_groups import WorkerPlacement, device_names
from trainwright.ray_cluster.ray_compat import dashboard_link
from trainwright.runtime.effect_executor import EffectExecutor
from trainwright.runtime.ray_data_delivery import RayDataFeeder
from trainwright.storage.event_files import EventCompactor
from trainwright.storage.event_log import EventListener, EventLog
from trainwright.storage.object_store import Store
from trainwright.storage.run_store import RunStore
from trainwright.strategies import engine_class
from trainwright.strategies.search.plan_request import PlanRequest
from trainwright.worker.worker_config import WorkerConfig, pickle_job

CALL_DEADLINE_S = 180.0  # to form a group and to load a checkpoint, at least
_COLLECT_AFTER = 100_000  # new objects


@contextlib.contextmanager
def collecting_rarely() -> Iterator[None]:
    """Let the garbage collector run rarely: with 10,000 workers it would take half of a recovery's time."""
    before = gc.get_threshold()
    gc.set_threshold(max(_COLLECT_AFTER, before[0]) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


class RunController:
    """Drives one run. `run` blocks; `stop` may be called from any thread.

    Args:
        fresh: begin the run of this name again.
        notes: of what happened before, to be told in the run.
        room: for the workers; by default it is asked of Ray.
    """

    def __init__(
        self,
        prepared: PreparedJob,
        decision: Decision,
        *,
        fresh: bool = False,
        notes: Sequence[str] = (),
        room: WorkerPlacement | None = None,
    ) -> None:
        self._prepared, self._decision, self._fresh, self._notes = prepared, decision, fresh, notes
        self._room = room
        job = prepared.job
        self._layouts = _layouts(prepared, decision)
        compactor = EventCompactor(prepared.store.impatient(), job.name)
        self._journal = EventLog(prepared.store, job.name, compact=compactor.compact)
        self._ledger = RunStore(
            prepared.store,
            job.name,
            job=prepared.description,
            keep=job.keep,
            fresh=fresh,
            cursor=_schedule(prepared).cursor,
            facts={"strategy": decision.chosen.strategy, "workers": decision.chosen.workers},
            note=self.say,
            begin=self._open_journal,
            tell=self.flush,
        )
        # First: the feeder's actors take what a look at a row needs.
        self._row = job.train.row(prepared.train, job.columns) if job.train.stateful else None
        self._feeding = self._fed()
        self._journal.listen(self._feeding)
        if decision.cluster.grows:
            self._journal.listen(PendingNodeWatcher(self._journal.write))
        order, write = self._order(), self._journal.write
        self._world = EffectExecutor(order, self._ledger, write, elastic=job.elastic, fresh=fresh, room=room)

    @property
    def store(self) -> Store:
        """Where the run lives."""
        return self._prepared.store

    def listen(self, listener: EventListener) -> None:
        """Add somebody who hears every event, those so far first."""
        self._journal.listen(listener)

    def say(self, text: str) -> None:
        """Tell something in the run."""
        self._journal.write(events.Noted(text=text))

    def stop(self, now: bool = False) -> None:
        """Ask the run to end: after a checkpoint, or at once."""
        self._world.put(m.StopRequested(now=now))

    def flush(self) -> None:
        """Write the events so far, so that readers see them."""
        self._journal.flush()

    def run(self) -> m.FinishRun:
        """Decide and carry out until the end; workers, files and timers are gone when it returns."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(collecting_rarely())
            stack.callback(self._journal.close)
            stack.callback(self._ledger.close)
            stack.callback(self._feeding.close)
            stack.callback(self._world.close)
            try:
                return self._drive()
            except BaseException:
                self._ledger.give_up()
                raise

    def _drive(self) -> m.FinishRun:
        event: m.DriverEvent | None = None
        state, effects = begin_run(self._settings(), time.monotonic())
        while True:
            for effect in effects:
                if isinstance(effect, m.FinishRun):
                    return effect
                self._world.carry_out(effect)
                if isinstance(effect, m.EmitEvent) and isinstance(effect.event, events.Probed | events.Replanned):
                    self._ledger.say(strategy=effect.event.plan["strategy"])
                    self._journal.flush_soon()  # so that nothing is measured again
            if isinstance(event, m.CheckpointCommitted):
                self._journal.flush_soon(committed=True)  # what was told of the checkpoint included
            for text in self._feeding.news():
                self._journal.write(events.Noted(text=text))
            event = self._world.next()
            state, effects = decide(state, event, time.monotonic())

    def _settings(self) -> RunPolicy:
        job, plan, per_epoch = self._prepared.job, self._decision.chosen, self._prepared.steps_per_epoch
        capabilities = engine_class(plan).capabilities
        others = plan.processes - plan.workers
        fewest = 1 if capabilities.topology == "independent" else plan.workers  # those who are late join by themselves
        return RunPolicy(
            workers=plan.processes,
            servers=plan.servers,
            tolerates=capabilities.tolerates,
            stride=plan.local_steps,
            min_workers=others + min(plan.workers, job.min_workers or fewest),
            last_resort=1 if self._layouts and not (job.workers or job.elastic) else None,
            max_workers=others + max(plan.workers, job.max_workers or job.workers or 0),
            spares=job.spares if job.spares is not None else _spares(plan, capabilities),
            spares_stay=bool(plan.placement.accelerators),
            reform=capabilities.reform,
            topology=capabilities.topology,
            total_steps=self._prepared.total_steps,
            steps_per_epoch=per_epoch,
            checkpoint_steps=job.checkpoint_steps if isinstance(job.checkpoint_steps, int) else None,
            checkpoint_auto=job.checkpoint_steps == "auto",
            keep_s=None if job.keeper_s == 0 else job.keeper_s,
            evaluate_steps=per_epoch * job.evaluate_epochs if job.evaluate is not None else None,
            failures=job.failures,
            failures_an_hour=job.failures_an_hour,
            max_loss_ratio=job.max_loss_ratio,
            spike_limit=job.skip_limit if job.on_spike == "rollback" else 0,
            pass_limit=job.skip_limit if job.on_crash_loop == "skip" else 0,
            samples_of=partial(_samples_of, _schedule(self._prepared), plan),
            layouts=self._layouts,
            probe_share=MEASURING_SHARE,
            place_deadline_s=job.patience_s(self._decision.cluster),
            shrink_s=job.shrink_s,
            replace_stragglers=job.replace_stragglers,
            preemption_s=job.preemption_s,
            call_deadline_s=max(CALL_DEADLINE_S, job.hang_deadline_s or 0.0),
            hang_deadline_s=job.hang_deadline_s,
            threads=plan.placement.threads,
            devices=device_names(plan),
            mesh=plan.mesh if capabilities.topology == "collective" and not job.elastic else None,
            secret=secrets.token_bytes(),
        )

    def _order(self) -> WorkerConfig:
        prepared, job = self._prepared, self._prepared.job
        return WorkerConfig(
            job=pickle_job(job.replace(trackers=())),  # they are the driver's, and may hold a secret
            plan=self._decision.chosen,
            storage=prepared.store.uri,
            run=job.name,
            train=prepared.train,
            evaluate=prepared.evaluate,
            identity=_identity(prepared, self._decision.chosen, self._layouts, self._room),
            preemption_s=job.preemption_s,
            fetcher=self._feeding.train,
            evaluate_fetcher=self._feeding.evaluate,
            row=self._row,
        )

    def _fed(self) -> RayDataFeeder:
        """Ray Data's delivery of data sets with heavy transforms."""
        prepared, plan, cluster = self._prepared, self._decision.chosen, self._decision.cluster
        used = plan.workers * plan.placement.accelerators
        gpus = cluster.accelerators - used if cluster.accelerator == "GPU" else 0
        return RayDataFeeder(prepared.job, prepared.train, prepared.evaluate, cpus=plan.placement.data_cpus, gpus=gpus)

    def _open_journal(self, token: int) -> None:
        plan = self._decision.chosen
        self._journal.open(token)
        self._journal.write(
            events.RunStarted(
                run=self._prepared.job.name,
                token=token,
                job=self._prepared.description,
                plan=asdict(plan),
                rejected=other_plans(self._decision),
                cluster=str(self._decision.cluster),
                dashboard=dashboard_link(),
                timeline=self._decision.timeline,
                versions=package_versions(),
                total_steps=self._prepared.total_steps,
                steps_per_epoch=self._prepared.steps_per_epoch,
                fresh=self._fresh,
            )
        )
        for text in self._notes:
            self._journal.write(events.Noted(text=text))
        self._journal.flush()
        try:
            store_metadata(self._prepared)
        except StorageError as error:  # a resume elsewhere looks at the files again
            self.say(f"what is known of the data's files is not kept: {error.what}")


def _schedule(prepared: PreparedJob) -> StepSchedule:
    """The order of the run's samples, for the cursors of its checkpoints."""
    return make_schedule(prepared.train, **prepared.job.ordering())


def _layouts(prepared: PreparedJob, decision: Decision) -> PlanSelector | None:
    job = apply_plan_file(prepared.job, decision.profile, decision.cluster)
    question = PlanRequest.of(job, decision.profile, decision.used)
    return alternative_plans(job, question, decision.contenders or (decision.chosen,))


def _identity(prepared: PreparedJob, plan: Plan, layouts: PlanSelector | None, room: WorkerPlacement | None) -> str:
    """Of job, data, plan and room that is another's, as far as a worker process is good for nothing else."""
    known = asdict(replace(plan, estimate=None, notes=()))
    lasting = ("batch_size", "precision", "keras_backend", "devices_per_worker", "placement")
    facts = {
        "job": state_relevant_fields(prepared.description),
        "plan": {name: known[name] for name in lasting} if layouts else known,
        "room": room.name if room is not None else "",
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def _samples_of(
    schedule: StepSchedule, first: Plan, step: int, rank: int, workers: int, plan: Plan | None
) -> tuple[int, ...]:
    """Rows of the training set that a worker is fed in a step, which is counted from 1."""
    own = plan or (first.resized(workers) if first.topology == "collective" else first)
    feeding, steps = own.feed_of(rank), range(step - 1, step)
    shares = [schedule.share(steps, data_rank, feeding.total) for data_rank in feeding.data_ranks]
    return tuple(int(sample) for share in shares if share.real[0] for sample in share.samples)


def _spares(plan: Plan, capabilities: Capabilities) -> int:
    """One where there are several workers; for all of them where every failure needs new processes."""
    if plan.processes == 1:
        return 0
    return plan.processes if capabilities.reform == "new_process" else 1
