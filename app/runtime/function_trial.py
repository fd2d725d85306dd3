"""Preflight: run a job's functions on a few rows in a process of their own, before any worker starts.

Model, loss, step, optimizer, schedule and metrics run once on the CPU, through the engine of one device. What they
raise ends the start in a second or two, before a run of that name has begun. Where the plan is for the CPUs of this
machine, steps are then timed for a moment, to predict those of the run.

The process is forked where that is safe, so that it shares the imports of this one, and it starts before the plan is
chosen, so that `fit` seldom waits for it. Rows are read here: the other process touches neither the data nor the store.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import itertools
import math
import os
import pickle
import re
import resource
import signal
import socket
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from statistics import median
from typing import Any, Literal

import cloudpickle
import numpy as np

from trainwright.core.data import Batch, single_rank_feed, zero_weight
from trainwright.core.engine import Engine, ModelSpec, takes_optimizer
from trainwright.core.errors import DataError, JobError, NonFiniteLoss, TrainwrightError, UserCodeError, headline
from trainwright.core.frameworks import keep_freed_memory, load_module
from trainwright.core.job import Job
from trainwright.core.metric_states import compute_states, metric_states, with_states
from trainwright.core.plan import Mesh, Plan, WorkerResources
from trainwright.core.redaction import redact
from trainwright.datasets.dataset import Dataset, Index, first_row, table
from trainwright.planning.decision import Decision
from trainwright.planning.job_preparation import PreparedJob
from trainwright.planning.profiler import build_model, framework_of, profiler_of
from trainwright.strategies import STRATEGIES, engine_class, single_rank_engine
from trainwright.strategies.distillation.distillation_loss import DistillationLoss
from trainwright.worker.worker_config import pickle_job, unpickle_job

ROWS = 5  # of the batch: few, and seldom the size of another dimension, for which it could be taken
CPU_S = 5  # of the process, at most; its imports come on top where it shares none
_IMPORTS_S = 12
_DIVIDED_S = 1.0  # of CPU time for the rest of a trial, at most, before a loss is tried where the batch is divided
_TIMED_S = 0.4  # of steps that are timed
_BUSY = 0.1  # the share of that time without a CPU from which on a machine counts as busy
_MOST_TIMED = 16  # processes that take steps for it
_READ_S, _READ_ROWS, _READ_BYTES = 0.2, 16, 32 * 2**20  # to read rows for it, at a time, and at most
_WAIT_S = 30  # for its answer, on a machine that does other things too
MOST_BYTES = 1 << 30  # of the model's weights
_DEVICE = re.compile(r"cuda|nvidia|\bgpu|\btpu|triton|kernel|driver|not implemented for", re.IGNORECASE)
_StartMethod = Literal["fork", "fresh", "later"]
_FORKED = re.compile(r"fork-based multiprocessing|forked subprocess")
_GROUP = re.compile(r"process.group|TF_CONFIG|\bRANK\b|get_rank|world_size|get_world", re.IGNORECASE)
_MAIN = "from trainwright.runtime.function_trial import main; main()"


@dataclass(frozen=True, kw_only=True)
class TrialTask:
    """What the other process tries."""

    job: Job
    train: Batch  # the first rows of the training set
    evaluate: Batch | None  # of the evaluation set; None where there is none
    total_steps: int  # of the run


@dataclass(frozen=True, kw_only=True)
class _Retry:
    """A trial that is asked for."""

    rows: int = 0  # that the functions are tried on; 0 for those of the task
    layout: tuple[int, int] = (2, 1)  # data ranks and micro-batches of the plan
    timed: int = 0  # processes that take steps while those of one are timed, and nothing else is tried
    batch: Batch | None = None  # rows of the steps that are timed


@dataclass(frozen=True, kw_only=True)
class PreflightResult:
    """What came of it."""

    error: TrainwrightError | None = None  # of the job's; None where nothing was wrong
    divided: TrainwrightError | None = None  # of a loss that depends on how the batch is divided, for plans that do so
    untried: str = ""  # why nothing can be said, or not of everything
    step_s: float = 0.0  # of a step on one CPU, where it was asked for
    busy: bool = False  # other processes had that CPU for much of the time


class Preflight:
    """A trial that runs beside the start of a run. Use as a context manager: the process ends with it.

    Args:
        prepared: the job.
        resume: as of `tw.fit`.

    Raises:
        JobError: the job cannot be sent to another process.
        DataError, UserCodeError: no row can be read.
    """

    def __init__(self, prepared: PreparedJob, *, resume: bool = False) -> None:
        self._prepared = prepared
        self._why = _left_out(prepared, resume=resume)
        self._child: _TrialProcess | None = None
        self._task: TrialTask | None = None
        self._answer: PreflightResult | None = None
        if self._why is None:
            self._task = task_of(prepared)
            self._start(self._task, start_method())

    def __enter__(self) -> Preflight:
        return self

    def __exit__(self, *_: object) -> None:
        if self._child is not None:
            self._child.close()

    def _start(self, task: TrialTask, method: _StartMethod) -> None:
        try:
            if method != "later":
                self._child = _fork_trial(task) if method == "fork" else _start_fresh_trial(task)
        except OSError as error:  # no memory for a fork, no room for a process
            self._why = f"a process for it could not be started: {error}"

    def settle(self, decision: Decision) -> tuple[str, ...]:
        """Wait for the answer; return notes for the user.

        After an error, the functions are tried again on as many rows as a worker will get: the job may be written for
        that number. An error that the place of the trial may explain is left to the workers.

        Raises:
            TrainwrightError: the error of the job's functions.
        """
        if self._task is not None and self._child is None and not self._why:
            self._start(self._task, start_method(decision.profile.framework))
        if self._task is None or self._child is None:
            return (f"the job's functions are not tried before the workers start: {self._why}",) if self._why else ()
        plan = decision.chosen
        answer = self._first_answer(self._child)
        micro_batches, rows = plan.micro_batches(plan.batch_size)
        layout = (plan.mesh.data_ranks, micro_batches)
        divided = answer.divided is not None and layout != (1, 1)
        if divided or (answer.error is not None and rows != self._task.train.rows):
            answer = self._child.answer(_Retry(rows=rows, layout=layout))
        if divided and answer.divided is not None:
            raise answer.divided
        if answer.error is not None and not needs_second_trial(answer.error, plan):
            raise answer.error
        why = answer.untried or (headline(answer.error) if answer.error is not None else "")
        return (f"the job's functions could not be tried before the workers start: {why}",) if why else ()

    def time_step(self, rows: int, workers: int) -> tuple[float, bool]:
        """Return the seconds of a step while `workers` processes of this machine take one; 0 where it was not timed.

        Args:
            rows: of each process, which has one thread.

        Returns:
            The seconds, and whether the machine was busy with other work.
        """
        if self._child is None or start_method() != "fork":  # another process would import a framework first
            return 0.0, False
        answer = self._first_answer(self._child)
        if answer.error is not None or answer.divided is not None or answer.untried:  # a second trial may follow
            return 0.0, False
        batch = _many_rows(self._prepared.job, self._prepared.train, rows)
        timing = self._child.answer(_Retry(rows=rows, timed=workers, batch=batch))
        if timing.untried:
            self._child.close()
        return timing.step_s, timing.busy

    def _first_answer(self, child: _TrialProcess) -> PreflightResult:
        """Return the result for the task's rows."""
        if self._answer is None:
            self._answer = child.answer()
        return self._answer


def _left_out(prepared: PreparedJob, *, resume: bool) -> str | None:
    """Return why nothing is tried, empty if the user need not know; None if the functions are tried."""
    job = prepared.job
    if (
        not job.planning.preflight
        or (prepared.begun and not resume)
        or (isinstance(job.loss, DistillationLoss) and job.loss.inline)
    ):
        return ""
    if ray_is_connected():
        return ""
    if any(data is not None and data.stateful for data in (job.train, job.evaluate)):
        return "a transform of the data is slow to open"
    return None


def task_of(prepared: PreparedJob) -> TrialTask:
    """Return the task of a trial. Raises as `first_rows`."""
    job, index = prepared.job, prepared.evaluate
    evaluate = None if index is None else first_rows(job, job.evaluate, index)
    return TrialTask(
        job=job, train=first_rows(job, job.train, prepared.train), evaluate=evaluate, total_steps=prepared.total_steps
    )


def first_rows(job: Job, data: Dataset, index: Index) -> Batch:
    """Return the first rows of a data set as a batch; one row several times where they cannot be read, or take long.

    Raises DataError, UserCodeError: no row can be read.
    """
    rows = np.arange(min(ROWS, index.rows, job.batch_size))
    try:
        columns = None if data.heavy else data.read(index, rows, job.columns)
    except (DataError, UserCodeError):
        columns = None
    if columns is None:
        rows[:] = 0
        columns = {name: array[rows] for name, array in first_row(data, index, job.columns).items()}
    return Batch(columns=columns, weights=np.ones(len(rows)), samples=rows)


def _many_rows(job: Job, index: Index, count: int) -> Batch | None:
    """Return the first rows of the training set, as many as are read in a moment; None where they cannot be read.

    A step on a few repeated rows is quicker by a seventh than a step on as many different rows (measured): the
    processor learns which number is the largest.
    """
    if job.train.heavy:
        return None
    began_s, parts = time.perf_counter(), list[dict[str, Any]]()
    rows = np.arange(min(count, index.rows, max(_READ_BYTES // max(index.row_bytes, 1), ROWS)))
    try:
        while len(parts) * _READ_ROWS < len(rows) and time.perf_counter() - began_s < _READ_S:
            parts.append(job.train.read(index, rows[len(parts) * _READ_ROWS :][:_READ_ROWS], job.columns))
    except (DataError, UserCodeError):  # the workers report or skip such rows, as the job says
        return None
    shapes = {tuple((name, array.shape[1:]) for name, array in part.items()) for part in parts}
    if len(shapes) != 1:
        return None
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    size = len(next(iter(columns.values())))
    return Batch(columns=columns, weights=np.ones(size), samples=rows[:size])


def needs_second_trial(error: TrainwrightError, plan: Plan) -> bool:
    """Whether the place of the trial may explain an error: a CPU, and a process without a group."""
    if isinstance(error, JobError | DataError):
        return False
    text = f"{error.what}\n{error.detail}"
    if _FORKED.search(text):  # autograd's, where CUDA's threads had been started before
        return True
    on_device = plan.placement.accelerators > 0 and _DEVICE.search(text) is not None
    return on_device or (plan.processes > 1 and _GROUP.search(text) is not None)


# --- The process ------------------------------------------------------------------------------------------------------


class _TrialProcess:
    """A handle of the trial process in this process.

    Args:
        reap: waits for its end, and returns its exit status as `subprocess` does.
    """

    def __init__(self, pid: int, connection: Connection, reap: Callable[[], int]) -> None:
        self._pid, self._connection, self._reap = pid, connection, reap
        self._status: int | None = None

    def answer(self, retry: _Retry | None = None) -> PreflightResult:
        """Return the result of the trial, or of another one."""
        try:
            if retry is not None:
                self._connection.send(retry)
            if not self._connection.poll(_WAIT_S):
                return PreflightResult(untried=f"no answer within {_WAIT_S} s")
            result: PreflightResult = self._connection.recv()
        except (EOFError, OSError):
            return PreflightResult(untried=_describe_exit(self.close()))
        return result

    def close(self) -> int:
        """End the process, if it has not ended; return its exit status. Safe to call twice."""
        if self._status is None:
            self._connection.close()
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            self._status = self._reap()
        return self._status


def _describe_exit(status: int) -> str:
    """Describe why the process ended by itself."""
    if -status in (signal.SIGXCPU, signal.SIGKILL):
        return f"they take more than {CPU_S} s of CPU time, or more memory than there is"
    ending = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit code {status}"
    return f"the process that tried them {ending}"


def ray_is_connected() -> bool:
    """Whether this process is connected to a Ray cluster.

    A fork may then end the notifications that it gets, so that new actors seem never to start (seen with Ray 2.60), and
    a fresh process would take longer than the workers need to start.
    """
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def start_method(framework: str = "") -> _StartMethod:
    """How the process is started: a fork cannot use TensorFlow or CUDA once they have started threads in this process.

    Returns:
        `later` where that depends on the model's framework, which is not given.
    """
    torch = sys.modules.get("torch")
    if not sys.platform.startswith("linux") or (torch is not None and torch.cuda.is_initialized()):
        return "fresh"
    busy = "tensorflow" in sys.modules and load_module("trainwright.strategies.tensorflow.tensorflow_compat").in_use()
    if not busy or framework not in ("", "tensorflow"):
        return "fork"
    return "later" if torch is not None and not framework else "fresh"


def _fork_trial(task: TrialTask) -> _TrialProcess:
    ours, theirs = Pipe()
    with warnings.catch_warnings(action="ignore"):  # Python's, that other threads may hold locks: none is taken below
        pid = os.fork()
    if pid == 0:
        try:
            ours.close()
            _serve(theirs, lambda: task)
        finally:
            os._exit(0)
    theirs.close()
    return _TrialProcess(pid, ours, lambda: _status(pid))


def _status(pid: int) -> int:
    """Wait for the end of a forked process, and return its exit status; 0 if another call has collected it."""
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:
        return 0


def _start_fresh_trial(task: TrialTask) -> _TrialProcess:
    placeholder = table({"row": [0]})  # only rows for the trial are sent, not all data
    job = task.job.replace(train=placeholder, evaluate=None if task.evaluate is None else placeholder, trackers=())
    packed = pickle.dumps((sys.path, pickle_job(job), task.train, task.evaluate, task.total_steps))
    ours, theirs = Pipe()
    command = [sys.executable, "-c", _MAIN, str(theirs.fileno())]
    process = subprocess.Popen(
        command, pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    theirs.close()
    ours.send_bytes(packed)
    return _TrialProcess(process.pid, ours, process.wait)


def main() -> None:
    """Entry of a fresh process, whose argument is the number of its end of the pipe."""
    connection = Connection(int(sys.argv[1]))

    def read_task() -> TrialTask:
        sys.path[:], job, train, evaluate, total_steps = cloudpickle.loads(connection.recv_bytes())
        return TrialTask(job=unpickle_job(job), train=train, evaluate=evaluate, total_steps=total_steps)

    _serve(connection, read_task, _IMPORTS_S)


def _serve(connection: Connection, read_task: Callable[[], TrialTask], imports_s: int = 0) -> None:
    """Try the functions and answer, then again for each request, until the other process closes the connection."""
    gc.disable()  # objects that other threads held at the fork must not be released here
    _limit(CPU_S + imports_s)
    task, retry = read_task(), _Retry()
    with contextlib.suppress(EOFError, OSError):
        while True:
            signal.alarm(2 * _WAIT_S)  # none while the other process is busy, which may take minutes to start Ray
            if retry.timed:
                timed = replace(task, train=retry.batch or task.train)
                answer = _time_steps(timed, retry.rows, retry.timed)
            else:
                answer = run_trial(task, retry.rows, retry.layout)
            signal.alarm(0)
            connection.send(answer)
            retry = connection.recv()


def _limit(cpu_s: int) -> None:
    """Bound the time of this process; if memory is short, it ends first. It is silent, and has one thread and CPU."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the other side, which ends this one
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")
    faulthandler.disable()  # the other side's writes to a terminal
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    silent = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  for as long as the process lives
    for number in (1, 2):
        os.dup2(silent.fileno(), number)
    sys.stdout = sys.stderr = silent
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)  # the threads of OpenMP stay behind in a fork


# --- Inside the process -----------------------------------------------------------------------------------------------


def run_trial(task: TrialTask, rows: int = 0, layout: tuple[int, int] = (2, 1)) -> PreflightResult:
    """Try a job's functions on the task's rows, or on `rows` of them, repeated where there are fewer.

    Args:
        layout: data ranks and micro-batches of a batch that is divided.
    """
    train, evaluate = (
        batch if batch is None or not rows else _repeated(batch, rows) for batch in (task.train, task.evaluate)
    )
    assert train is not None, "every job has a training set"
    try:
        result = _try_functions(replace(task, train=train, evaluate=evaluate), layout)
    except TrainwrightError as error:
        result = PreflightResult(error=error)
    except Exception as error:  # in our own code: the workers may succeed
        return PreflightResult(untried=redact(f"{type(error).__name__}: {error}"))
    for problem in filter(None, (result.error, result.divided)):
        problem.hide(redact)
        place = f"tried on {train.rows} rows before any worker started"
        problem.where = place if problem.where in ("", "rank 0") else f"{problem.where}; {place}"
    return result


def _time_steps(task: TrialTask, rows: int, workers: int) -> PreflightResult:
    """Time steps of the job on `rows` rows, repeated where there are fewer, while other processes take steps too.

    CPUs that share a core or its memory are slower together, and each step lasts until the slowest has taken it.
    """
    others: list[tuple[int, socket.socket]] = []
    keep_freed_memory()
    try:
        model = build_model(task.job.model)
        framework, size = framework_of(model), profiler_of(model).weight_bytes(model)
        if size * workers > MOST_BYTES or workers > _MOST_TIMED:
            return PreflightResult(untried="a step of so many processes would take too much memory")
        engine, batch = _engine_of(task.job, _spec(task), framework, rows), _repeated(task.train, rows)
        engine.warm(single_rank_feed(batch))
        for _ in range(workers - 1):
            others.append(_fork_stepper(engine, batch, [line for _, line in others]))
        waited_s, began_s = _waited_s(), time.perf_counter()
        spent = _step_times(engine, batch, [line for _, line in others])
        busy = _waited_s() - waited_s > _BUSY * (time.perf_counter() - began_s)
        return PreflightResult(step_s=median(spent[1:]), busy=busy)
    except Exception as error:  # a real error will appear in the run's steps
        return PreflightResult(untried=f"{type(error).__name__}: {error}")
    finally:
        for pid, line in others:
            line.close()
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _waited_s() -> float:
    """Return the seconds for which this process could have run and had no CPU; 0 where the system does not count."""
    with contextlib.suppress(OSError), open("/proc/self/schedstat", encoding="ascii") as file:
        return int(file.read().split()[1]) / 1e9
    return 0.0


def _fork_stepper(engine: Engine, batch: Batch, others: Sequence[socket.socket]) -> tuple[int, socket.socket]:
    """Fork a process that takes a step for each byte it gets, and sends one back; return its id and its socket.

    The process ends when this process closes the socket, so it closes inherited sockets to the other processes.
    """
    line, child_end = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        try:
            for inherited in (line, *others):
                inherited.close()
            for step in itertools.count():
                if not child_end.recv(1):
                    break
                engine.train_step(replace(single_rank_feed(batch), step=step))
                child_end.send(b".")
        finally:
            os._exit(0)
    child_end.close()
    return pid, line


def _step_times(engine: Engine, batch: Batch, lines: Sequence[socket.socket]) -> list[float]:
    """Return the times of steps of this and the other processes, for `_TIMED_S` in all, two steps at least."""
    began_s = time.perf_counter()
    spent: list[float] = []
    for step in itertools.count():
        at_s = time.perf_counter()
        if len(spent) > 1 and at_s - began_s > _TIMED_S:
            break
        for line in lines:
            line.send(b".")
        engine.train_step(replace(single_rank_feed(batch), step=step))
        for line in lines:
            if not line.recv(1):
                raise ChildProcessError("another process of the trial ended")
        spent.append(time.perf_counter() - at_s)
    return spent


def _try_functions(task: TrialTask, layout: tuple[int, int]) -> PreflightResult:
    began_s, job, model = time.process_time(), task.job, build_model(task.job.model)
    size = profiler_of(model).weight_bytes(model)
    if size > MOST_BYTES:
        return PreflightResult(untried=f"the model has {size / 2**30:.1f} GiB of weights, more than 1 GiB")
    framework = framework_of(model)
    del model
    spec = _spec(task)
    _try_schedule(spec)
    engine = _engine_of(job, spec, framework, task.train.rows)
    feed = single_rank_feed(task.train)
    engine.warm(feed)
    with contextlib.suppress(NonFiniteLoss):  # other rows and later steps may have a finite loss
        engine.train_step(feed)
    if task.evaluate is not None:
        states = metric_states(job.metrics)
        sums = with_states(engine.evaluate_step(single_rank_feed(task.evaluate), states), states)
        metrics = compute_states(sums + sums)  # as those of two ranks
        job.checkpointing.check_goals(metrics.totals)
    if framework == "tensorflow":
        try:
            engine.warm(replace(feed, total=math.prod(layout)))
        except JobError as error:
            return PreflightResult(divided=error)
        return PreflightResult()
    if time.process_time() - began_s > _DIVIDED_S:
        return PreflightResult()
    return PreflightResult(divided=_divided_problem(job, spec, task.train, layout))


def _divided_problem(job: Job, spec: ModelSpec, batch: Batch, layout: tuple[int, int]) -> JobError | None:
    """Return the error of a loss that depends on how the batch is divided; None where `inexact=` would not help."""
    ranks, micro_batches = layout
    feed = zero_weight(replace(single_rank_feed(batch), parts=((batch,) * micro_batches,), total=ranks))
    problem: JobError | None = None
    for inexact in (spec.inexact, (*spec.inexact, "batch_loss")):
        try:
            _engine_of(job, replace(spec, inexact=inexact), "torch", batch.rows).warm(feed)
            return problem
        except JobError as error:
            problem = error
        except UserCodeError:  # perhaps because there is no group: the workers may succeed
            return None
    return None


def _spec(task: TrialTask) -> ModelSpec:
    """Return the engine's model spec without callbacks, which may have side effects, and without slow compilation."""
    row = _repeated(task.train, 1)
    spec = task.job.model_spec(task.total_steps, lambda: row)
    return replace(spec, callbacks=None, compile=spec.compile if spec.compile == "eager" else "auto")


def _engine_of(job: Job, spec: ModelSpec, framework: str, rows: int) -> Engine:
    """Return the one-device engine for a model of this framework, built on one CPU. Raises as `Engine.build`."""
    name = "tf_one_device" if framework == "tensorflow" else "one_device"
    strategy = STRATEGIES[name]
    plan = Plan(
        strategy=name, engine=strategy.fit if job.tensorflow.run == "fit" else strategy.engines[framework], mesh=Mesh(),
        batch_size=rows, placement=WorkerResources(cpus=1.0),
        precision="bf16" if job.training.precision == "bf16" else "fp32",
    )  # fmt: skip
    replace(spec, compile=job.training.compile).check(engine_class(plan).capabilities)
    return single_rank_engine(spec, plan, guest=True)


def _try_schedule(spec: ModelSpec) -> None:
    """Call the schedule for the first and the last step. Raises UserCodeError, JobError."""
    if spec.schedule is None or takes_optimizer(spec.schedule):
        return  # a scheduler is made with the optimizer
    schedules = spec.schedule if isinstance(spec.schedule, tuple) else (spec.schedule,)
    for step, schedule in itertools.product((0, spec.total_steps - 1), schedules):
        try:
            factor = float(schedule(step, spec.total_steps))
        except Exception as error:
            what = f"schedule= raised {type(error).__name__}: {error}, for step {step} of {spec.total_steps}"
            remedy = "give (step, total_steps) -> a factor on the optimizer's learning rate; see tw.schedules"
            raise UserCodeError(what, remedy=remedy, detail=traceback.format_exc()) from None
        if not math.isfinite(factor):
            raise JobError([f"schedule= returned {factor} for step {step} of {spec.total_steps}: return a number"])


def _repeated(batch: Batch, rows: int) -> Batch:
    """Return `rows` rows of a batch, which is repeated where it has fewer."""
    indices = np.arange(rows) % batch.rows
    columns: dict[str, Any] = {name: array[indices] for name, array in batch.columns.items()}
    return Batch(columns=columns, weights=np.ones(rows), samples=batch.samples[indices])
