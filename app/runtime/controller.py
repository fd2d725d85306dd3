"""The driver's loop: take an event, decide, carry out the effects, until the run has ended."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator, Sequence

from trainwright.core import events
from trainwright.core.errors import StorageError
from trainwright.datasets.dataset import first_batch
from trainwright.driver import messages as m
from trainwright.driver.state_machine import begin_run, decide
from trainwright.planning.decision import Decision
from trainwright.planning.job_preparation import PreparedJob, store_metadata
from trainwright.ray_cluster.autoscaling import PendingNodeWatcher
from trainwright.ray_cluster.placement_groups import WorkerPlacement
from trainwright.runtime.effect_executor import EffectExecutor
from trainwright.runtime.run_setup import RunSetup
from trainwright.storage.event_files import EventCompactor
from trainwright.storage.event_log import EventListener, EventLog
from trainwright.storage.object_store import Store
from trainwright.storage.run_store import RunStore

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
        fresh: start the run of this name again.
        notes: for the user, written as events of the run.
        room: placement of the workers; by default placement groups of Ray.
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
        self._prepared, self._fresh, self._notes = prepared, fresh, notes
        self._setup = RunSetup(prepared=prepared, decision=decision, room=room)
        job = prepared.job
        compactor = EventCompactor(prepared.store.impatient(), job.name)
        self._journal = EventLog(prepared.store, job.name, compact=compactor.compact)
        self._ledger = RunStore(
            prepared.store,
            job.name,
            job=prepared.description,
            keep=job.checkpointing.keep,
            fresh=fresh,
            cursor=self._setup.schedule.cursor,
            facts={"strategy": decision.chosen.strategy, "workers": decision.chosen.workers},
            note=self.say,
            begin=self._open_journal,
            tell=self.flush,
        )
        # First: the feeder's actors take what a look at a row needs.
        row = first_batch(job.train, prepared.train, job.columns) if job.train.stateful else None
        self._feeding = self._setup.start_feeder()
        self._journal.listen(self._feeding)
        if decision.cluster.grows:
            self._journal.listen(PendingNodeWatcher(self._journal.write))
        config, write = self._setup.worker_config(self._feeding, row), self._journal.write
        self._world = EffectExecutor(config, self._ledger, write, elastic=job.scaling.elastic, fresh=fresh, room=room)

    @property
    def store(self) -> Store:
        """Where the run lives."""
        return self._prepared.store

    def listen(self, listener: EventListener) -> None:
        """Add a listener for every event, those so far first."""
        self._journal.listen(listener)

    def say(self, text: str) -> None:
        """Write a note for the user."""
        self._journal.write(events.Noted(text=text))

    def stop(self, now: bool = False) -> None:
        """Ask the run to end: after a checkpoint, or at once."""
        self._world.put(m.StopRequested(now=now))

    def flush(self) -> None:
        """Write the events so far, so that readers see them."""
        self._journal.flush()

    def run(self) -> m.FinishRun:
        """Drive the run to its end; workers, files and timers are gone when it returns."""
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
        state, effects = begin_run(self._setup.policy(), time.monotonic())
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

    def _open_journal(self, token: int) -> None:
        self._journal.open(token)
        self._journal.write(self._setup.started(token, fresh=self._fresh))
        for text in self._notes:
            self._journal.write(events.Noted(text=text))
        self._journal.flush()
        try:
            store_metadata(self._prepared)
        except StorageError as error:  # a resume elsewhere looks at the files again
            self.say(f"what is known of the data's files is not kept: {error.what}")
