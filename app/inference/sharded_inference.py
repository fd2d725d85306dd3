"""Evaluate and predict with a model that several workers hold together, in the layout of its training."""

from __future__ import annotations

import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from trainwright.core.data import Columns, MetricSums
from trainwright.core.errors import HangError, PeerLost, ResourceError, TrainwrightError, WorkerLost
from trainwright.core.plan import Plan, assign_slots
from trainwright.core.topology import Generation, Group, Peer
from trainwright.datasets.loading.batch_loader import make_schedule
from trainwright.driver.failure_policy import backoff_s
from trainwright.driver.messages import CallFailure, Decoding, PredictRequest, ReserveRequest
from trainwright.driver.run_policy import CALL_DEADLINE_S
from trainwright.inference.inference_model import gather_outputs, split_into_feeds
from trainwright.ray_cluster.discovery import discover
from trainwright.ray_cluster.placement_groups import PlacementGroups, device_names, worker_resources
from trainwright.runtime.takeover import BEAT_S, run_name
from trainwright.runtime.worker_actor import WORKER_ACTOR, ArgumentPickler, WorkerSlot
from trainwright.runtime.worker_registry import exit_reason
from trainwright.worker.worker_config import WorkerConfig, pickle_job

if TYPE_CHECKING:
    from trainwright.core.engine import CheckpointRef
    from trainwright.core.initial_weights import WeightSource
    from trainwright.core.job import Job
    from trainwright.datasets.data_source import Index
    from trainwright.storage.object_store import Store

_HANG_S = 900.0  # for a call of all ranks, by default
_BATCHES_A_CALL = 16
_EXPLAIN_S = 5.0  # for the stack traces of hanging ranks
_CAUSE_S = 15.0  # for the error of the rank that failed first, after another rank has lost the connection to it
TOKEN = 0  # of a driver that owns no run


def _print_line(text: str) -> None:
    """Print a line on stderr."""
    print(text, file=sys.stderr)


class ShardedModel:
    """A model on workers of the cluster that hold it together. One thread; calls block. Use it in a `with`.

    Where a worker is lost or hangs, all workers start again and repeat the call, at most `failures=` times in a row.

    Args:
        job: whose `train` is a data set with rows as the model is given them.
        plan: that fits the cluster.
        store: of the run; for a model without a run, the folder of the results.
        checkpoint: whose weights are used; None where model() brings them.
        train: index of `job.train`.
        evaluate: index of `job.evaluate`, to evaluate on.
        outputs: names of the outputs to return; empty for all.
        base: files of the parameters that the checkpoint does not hold; None where it holds all.
        total_steps: of the run of the checkpoint, for a loss that takes it.
        note: called with the layout, and with problems that were repaired.
    """

    def __init__(
        self,
        job: Job,
        plan: Plan,
        store: Store,
        checkpoint: CheckpointRef | None,
        *,
        train: Index,
        evaluate: Index | None = None,
        outputs: tuple[str, ...] = (),
        base: WeightSource | None = None,
        total_steps: int = 1,
        note: Callable[[str], object] = _print_line,
    ) -> None:
        self._plan, self._job, self._checkpoint, self._note = plan, job, checkpoint, note
        served = job.replace(drop_last=False)  # or a few rows would be no batch
        order = WorkerConfig(
            job=pickle_job(served), plan=self._plan, storage=store.uri, run=job.name, train=train, evaluate=evaluate,
            outputs=outputs, weights=base, total_steps=total_steps,
        )  # fmt: skip
        self._config, self._evaluated = ray.put(order), evaluate
        self._run = run_name(store.uri_of(job.name))
        self._placement = PlacementGroups(self._plan, elastic=False, lasting=False)
        self._actors: list[Any] = []
        self._nodes: list[str] = []
        self._number = self._failures = 0
        self._hang_s = job.recovery.hang_deadline_s or _HANG_S
        self._closed = threading.Event()
        where = "" if checkpoint is None else " that it was trained in"
        how = f"in the layout{where}: {plan.name}" if plan.mesh.size > plan.mesh.data else "each with the whole model"
        who = job.name if checkpoint is None else f"{job.name} at step {checkpoint.step:,}"
        self._note(f"{who} on {plan.workers} workers, {how}")

    def __enter__(self) -> ShardedModel:
        threading.Thread(target=self._send_heartbeats, name="trainwright-beat", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._end()
        self._placement.give_back()

    def evaluate(self) -> MetricSums:
        """Return sums over the evaluation set. Each data rank reads its share, some batches at a time.

        Raises:
            WorkerLost, HangError: workers were lost, or hung, again and again with the same batches.
            ResourceError: the cluster did not start them in time.
            TrainwrightError: an error of the user's code, the data or the store.
        """
        assert self._evaluated is not None, "asked for only where there is an evaluation set"
        total, steps = MetricSums(), make_schedule(self._evaluated, **self._job.ordering(evaluate=True)).total_steps
        for start in range(0, steps, _BATCHES_A_CALL):
            some = range(start, min(start + _BATCHES_A_CALL, steps))
            total = sum(self._call_all("evaluate_some", [some] * self._plan.workers), total)
        return total

    def predict(self, columns: Columns, place: int | None = None, decoding: Decoding = "") -> list[Columns]:
        """Return the model's outputs for rows, in their order, in pieces.

        Args:
            columns: of the rows, which may have more than the model is given.
            place, decoding: see `PredictRequest`.

        Returns:
            nothing where the model cannot decode, or the workers no longer have the tokens of earlier requests.

        Raises:
            WorkerLost, HangError, ResourceError, TrainwrightError: as `evaluate`.
        """
        wanted = self._job.columns
        given = {name: column for name, column in columns.items() if wanted is None or name in wanted}
        feeds = split_into_feeds(self._plan, given)
        answers = self._call_all(
            "predict", [PredictRequest(feeds=own, place=place, decoding=decoding) for own in feeds]
        )
        return list(gather_outputs(self._plan, answers, feeds[0]))

    def _call_all(self, verb: str, arguments: Sequence[Any]) -> list[Any]:
        """Call a method of each rank, and return the answers. After a failure all workers start again."""
        while True:
            try:
                if not self._actors:
                    self._start_group()
                answers = self._ask(verb, arguments, self._hang_s)
            except (WorkerLost, HangError) as error:
                self._end()
                self._failures += 1
                if self._failures > self._job.recovery.failures:
                    raise
                self._note(f"begins again on new workers: {error.what} ({error.where})")
                self._closed.wait(backoff_s(self._failures))
                self._placement.give_back()  # workers that had not heard of us for long gave it back themselves
                self._placement = PlacementGroups(self._plan, elastic=False, lasting=False)
            else:
                self._failures = 0
                return answers

    def _start_group(self) -> None:
        """Start the workers, form a group and load the checkpoint."""
        self._number += 1
        generation, size = Generation(token=TOKEN, number=self._number), self._plan.workers
        self._place()
        addresses = self._ask("reserve", [ReserveRequest(generation=generation)] * size)
        peers = tuple(
            Peer(rank=rank, address=address, node=node)
            for rank, (address, node) in enumerate(zip(addresses, self._nodes, strict=True))
        )
        about: dict[str, Any] = {
            "generation": generation, "peers": (), "key": secrets.token_bytes(), "devices": device_names(self._plan),
            "threads": self._plan.placement.threads, "deadline_s": max(CALL_DEADLINE_S, self._hang_s),
        }  # fmt: skip
        common = ArgumentPickler().common(peers)
        self._ask("form", [Group(rank=rank, slot=rank, **about) for rank in range(size)], common=common)
        if self._checkpoint is not None:
            self._ask("load", [self._checkpoint] * size)

    def _place(self) -> None:
        """Start a process for each rank, on the node of the plan."""
        options = worker_resources(self._plan.placement)
        self._nodes = ["a node that is not known yet"] * self._plan.workers
        for slot in range(self._plan.workers):
            placed = WORKER_ACTOR.options(scheduling_strategy=self._placement.of(slot), **options)
            # The actor is not detached: Ray ends it with this process.
            own = WorkerSlot(worker=slot, slot=slot, bundle=slot, run=self._run)
            self._actors.append(placed.remote(self._config, own, TOKEN))
        limit_s = self._job.start_deadline_s(discover(possible=True))
        late = ResourceError(
            f"the cluster did not start {self._plan.workers} workers within {limit_s:g} s",
            where=self._job.name,
            remedy="wait until other jobs have ended, raise place_deadline_s, or use here=True",
        )
        hellos = self._answers([actor.hello.remote() for actor in self._actors], limit_s, late)
        for slot, hello in enumerate(hellos):
            self._placement.found(slot, hello.home)
        order = assign_slots(self._plan.mesh, [hello.home for hello in hellos], self._plan.devices_per_worker)
        self._actors = [self._actors[place] for place in order]
        self._nodes = [hellos[place].node for place in order]

    def _ask(
        self, verb: str, arguments: Sequence[Any], limit_s: float | None = None, *, common: Any = b""
    ) -> list[Any]:
        limit_s = limit_s or max(CALL_DEADLINE_S, self._hang_s)
        asked = [
            actor.call.remote(verb, argument, TOKEN, common)
            for actor, argument in zip(self._actors, arguments, strict=True)
        ]
        late = HangError(
            f"the workers did not {verb.replace('_', ' ')} within {limit_s:g} s", remedy="raise hang_deadline_s"
        )
        return self._answers(asked, limit_s, late)

    def _answers(self, asked: Sequence[Any], limit_s: float, late: TrainwrightError) -> list[Any]:
        """Return all ranks' answers, or raise the cause of a failure: not a lost peer if a rank has an error."""
        ranks: Mapping[Any, int] = {ref: rank for rank, ref in enumerate(asked)}
        until_s, waiting, answers = time.monotonic() + limit_s, list(asked), dict[int, Any]()
        lost: TrainwrightError | None = None
        while waiting:
            ready, waiting = ray.wait(waiting, num_returns=1, timeout=max(until_s - time.monotonic(), 0.0))
            if not ready:
                raise lost or self._explained(late, sorted(ranks[ref] for ref in waiting))
            rank = ranks[ready[0]]
            answers[rank] = _answer(ready[0], f"rank {rank}, {self._nodes[rank]}")
            if isinstance(answers[rank], PeerLost):
                lost = lost or WorkerLost(answers[rank].what, where=answers[rank].where)
                until_s = min(until_s, time.monotonic() + _CAUSE_S)
            elif isinstance(answers[rank], TrainwrightError):
                raise answers[rank]
        if lost is not None:
            raise lost
        return [answers[rank] for rank in range(len(asked))]

    def _explained(self, late: TrainwrightError, silent: Sequence[int]) -> TrainwrightError:
        """Return the error for late ranks, with the stack traces of those that answer."""
        if isinstance(late, HangError):
            late.where = "; ".join(f"rank {rank}, {self._nodes[rank]}" for rank in silent)
            told = {rank: self._actors[rank].interrupt.remote(self._number, True, TOKEN) for rank in silent}
            ready, _ = ray.wait(list(told.values()), num_returns=len(told), timeout=_EXPLAIN_S)
            answers = {rank: _answer(ref, late.where) for rank, ref in told.items() if ref in ready}
            late.detail = "\n".join(
                f"stack traces of rank {r}:\n{text}" for r, text in answers.items() if isinstance(text, str)
            )
        return late

    def _end(self) -> None:
        """End the processes; the placement group stays."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []

    def _send_heartbeats(self) -> None:
        """Send heartbeats to the workers, however long a call takes."""
        while not self._closed.wait(BEAT_S):
            for actor in [*self._actors]:
                actor.beat.remote(TOKEN)


def _answer(ready: Any, where: str) -> Any:
    """Return a rank's answer, or the error of its process."""
    try:
        answer = ray.get(ready)
    except RayError as error:
        return WorkerLost(exit_reason(error), where=where, remedy="look at the memory of the nodes")
    return answer.error if isinstance(answer, CallFailure) else answer
