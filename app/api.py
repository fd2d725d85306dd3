"""The Python API: plan, fit, start, tune, distill, generate, load_model, export, chaos and doctor.

Each takes a Job or the path of a job file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, overload

from trainwright.core.cluster import Cluster

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from trainwright.chaos_testing.chaos_report import ChaosReport
    from trainwright.core.engine import CheckpointChoice
    from trainwright.core.job import Job
    from trainwright.diagnostics.diagnosis_report import Diagnosis
    from trainwright.distillation.distillation_spec import Distillation
    from trainwright.distillation.distilled_run import DistilledRun
    from trainwright.distillation.hyperparameter_search import Search
    from trainwright.distillation.multi_stage import MultiStage
    from trainwright.integrations.ray_train import Processes
    from trainwright.planning.decision import Decision
    from trainwright.planning.what_if import Goal, Price, WhatIf
    from trainwright.runtime.run_handle import Run
    from trainwright.tuning.tuner import TuneResult


@overload
def plan(job: Job | Distillation | str) -> Decision: ...


@overload
def plan(job: MultiStage, *, cluster: Cluster | str | None = None) -> Decision | WhatIf: ...


@overload
def plan(
    job: Job | str,
    *,
    cluster: Cluster | str,
    aim: Goal = "fastest",
    price: Price = "on-demand",
    mtbf_hours: float | None = None,
    critical_batch: float | None = None,
    batch_sizes: Sequence[int] = (),
) -> WhatIf: ...


def plan(
    job: Job | Distillation | MultiStage | str,
    *,
    cluster: Cluster | str | None = None,
    aim: Goal = "fastest",
    price: Price = "on-demand",
    mtbf_hours: float | None = None,
    critical_batch: float | None = None,
    batch_sizes: Sequence[int] = (),
) -> Decision | WhatIf:
    """Return the plan for a job and the rejected plans, with reasons; notes say where a distillation's teachers run.

    For a recipe of several stages, it is the plan of the next stage: later stages depend on its result. As in `fit`,
    the job's functions are tried first, and on CPUs a step is timed, for half a second in processes of its own, unless
    the job has `preflight=False`; what they raise is raised. They are not tried with `cluster`, nor in a process that
    is connected to a Ray cluster, whose packages may be others.

    Args:
        cluster: a hypothetical cluster such as `128x8xH100-80GB`: returns the best plan on it or on a part of it, with
            time and cost. By default the plan for the connected cluster, or this machine. The arguments below need it.
        aim: `fastest`, `cheapest` (dollars of the run) or `smallest` (accelerators on which it fits).
        price: of its accelerators: on demand, `spot`, or dollars an hour of one.
        mtbf_hours: mean time between failures of one accelerator; adds goodput and the best checkpoint interval.
        critical_batch: the gradient noise scale in samples, from which the steps of other batch sizes to the same loss
            follow.
        batch_sizes: other batch sizes to compare with the job's own; need `critical_batch`.

    Raises:
        JobError, UserCodeError, DataError: the job, its functions or its data are wrong.
        PlanError: no plan fits.
        ResourceError: the cluster cannot be reached or is too small, or an accelerator or its price is unknown.
    """
    from trainwright.distillation.distillation_spec import Distillation
    from trainwright.distillation.multi_stage import next_stage
    from trainwright.distillation.teacher_delivery import plan_distillation
    from trainwright.planning.job_preparation import decide_plan, needs_cluster_to_open, prepare, profile_of
    from trainwright.planning.what_if import SizingRequest, what_if
    from trainwright.ray_cluster.discovery import connect, has_cluster
    from trainwright.runtime.function_trial import Preflight

    stage = next_stage(job)
    if isinstance(stage, Distillation):
        return plan_distillation(stage, cluster)
    job = _job(stage)
    if cluster is None and (needs_cluster_to_open(job) or has_cluster()):
        connect()
    prepared = prepare(job, resume=True, connect=connect if cluster is None else None)
    if cluster is not None:
        request = SizingRequest(
            batch_size=job.batch_size, precision=job.training.precision, steps=prepared.total_steps, aim=aim,
            price=price, mtbf_hours=mtbf_hours, critical_batch=critical_batch, batch_sizes=tuple(batch_sizes),
        )  # fmt: skip
        there = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
        return what_if(profile_of(prepared), there, request)
    with Preflight(prepared, resume=True) as trial:
        connect()
        decision = decide_plan(prepared, trial.time_step)
        return replace(decision, chosen=decision.chosen.noted(*trial.settle(decision)))


def start(
    job: Job | str,
    *,
    resume: bool = False,
    fresh: bool = False,
    verbose: bool = False,
    detached: bool = False,
    processes: Processes | None = None,
) -> Run:
    """Plan, start workers and train in the background. Returns a handle at once.

    Args:
        resume: continue a run of this name although the job was changed.
        fresh: start the run of this name from the beginning.
        verbose: show Ray's own output.
        detached: put the driver in an actor of the cluster, which outlives this process; Ray restarts it. It needs
            a cluster that outlives this process; its output is in Ray's logs.
        processes: inside a train function of Ray Train, train in its own processes (`ray_train`), or in others beside
            them (`own`), of which a lost one is replaced. By default in its own, unless the plan or the recovery
            options of the job need others. See `docs/ray-train.md`.

    Raises:
        TrainwrightError: the job, its data, its storage or the cluster is wrong; nothing was started.
    """
    from trainwright.integrations.ray_train import inside_ray_train, refuse_outside_ray_train, start_inside_ray_train
    from trainwright.runtime.launch import prepare_run
    from trainwright.runtime.run_handle import Run

    job = _job(job)
    if inside_ray_train():
        driver, decision = start_inside_ray_train(
            job, resume=resume, fresh=fresh, verbose=verbose, detached=detached, processes=processes
        )
    else:
        refuse_outside_ray_train(processes)
        driver, decision = prepare_run(job, resume=resume, fresh=fresh, verbose=verbose, detached=detached)
    return Run(job, driver, decision)


def fit(
    job: Job | str,
    *,
    resume: bool = False,
    fresh: bool = False,
    verbose: bool = False,
    processes: Processes | None = None,
) -> Run:
    """Plan, start workers, train, recover and report. Returns when the run has ended.

    The first Ctrl-C takes a checkpoint and stops, the second stops at once; SIGTERM, a preemption notice, acts like the
    first. The run's `state` is then `stopped`, and the same call resumes it.

    Args:
        resume, fresh, verbose, processes: as for `tw.start`.

    Raises:
        TrainwrightError: the run could not start, or failed; the first failing rank's own error.
    """
    from trainwright.runtime.run_handle import wait_for_run

    run = start(job, resume=resume, fresh=fresh, verbose=verbose, processes=processes)
    wait_for_run(run)
    return run


def tune(
    job: Job | str | Callable[..., Job],
    space: Mapping[str, Any],
    *,
    metric: str = "-loss",
    trials: int = 20,
    scheduler: Any = "asha",
    concurrent: int | None = None,
    seed: int = 0,
    resume: bool = False,
    fresh: bool = False,
    verbose: bool = False,
) -> TuneResult:
    """Train a job with several settings, stop bad ones early, and return all of them with the best.

    Each trial is an ordinary run in the job's storage, named `<name>-0`, `<name>-1` and so on. Some train at a time,
    each on a share of the cluster and with one worker, unless the job gives a layout such as `workers=2`. The same call
    continues where an earlier one was stopped or killed: finished trials are not trained again, and those that were
    stopped early stay so. A trial that fails is noted in the result, and the others continue; the same call tries it
    again.

    Args:
        job: a job, a job file, or a function of the varied parameters that returns a job.
        space: what is varied. The names are options of the job (`batch_size`), parameters of its functions
            (`optimizer.lr`, `model.width`), or parameters of the function given as `job`. The values are search spaces
            of Ray Tune, such as `ray.tune.loguniform(1e-4, 1e-1)` or `ray.tune.grid_search([1, 2])`, or lists, of which
            one value is drawn.
        metric: `loss` or one of the job's metrics, on its evaluation set; with a `-` in front, and for `loss`,
            smaller is better.
        trials: times that settings are drawn. With `grid_search`, each time all combinations of its values are.
            A setting that is drawn twice is trained once. More trials extend an earlier search.
        scheduler: `asha` stops a trial after its first, 4th, 16th evaluation and so on, where it is not among the best
            quarter so far (https://arxiv.org/abs/1810.05934); an `ASHAScheduler` of Ray Tune has other numbers; None
            trains all trials to their end.
        concurrent: most trials at a time; by default 8, and at most as many as the cluster has accelerators, or CPUs,
            for.
        seed: of the draws.
        resume: continue the trials of a search although the job was changed.
        fresh: delete the runs of all trials, and start again.
        verbose: show Ray's own output.

    Raises:
        JobError: the space, the metric or the job of a setting is wrong; nothing was started.
        RunConflict: a run of a trial's name was started with another job, or another driver has it.
        Stopped: a signal came; the runs have taken a checkpoint.
        TrainwrightError: all trials failed, or the first three failed before any was evaluated: the error of a trial.
    """
    from trainwright.integrations.ray_train import refuse_inside_ray_train
    from trainwright.tuning import tuner

    refuse_inside_ray_train("tw.tune", "call it from the driver")
    return tuner.tune(
        _job(job) if isinstance(job, str) else job, space, metric=metric, trials=trials, scheduler=scheduler,
        concurrent=concurrent, seed=seed, resume=resume, fresh=fresh, verbose=verbose,
    )  # fmt: skip


@overload
def distill(
    distillation: Distillation, *, resume: bool = False, fresh: bool = False, verbose: bool = False, judge: bool = True
) -> DistilledRun: ...


@overload
def distill(
    distillation: MultiStage | Search, *, resume: bool = False, fresh: bool = False, verbose: bool = False
) -> Any: ...


def distill(
    distillation: Any, *, resume: bool = False, fresh: bool = False, verbose: bool = False, judge: bool = True
) -> Any:
    """Train one or more students on teacher outputs: `fit` of the student's job with these outputs added to its data.

    Teachers with `train=True` are trained first, in parallel. Without `way=`, the delivery of teacher outputs is chosen
    and reported in a line. Offline, the outputs for all rows are computed first, unless they are stored already. Then
    `fit` trains, recovers, reports and resumes as usual. At the end, the students are compared with their teachers on
    the evaluation set: the result has a verdict, and the report a section. A recipe consists of several such runs;
    finished ones are skipped.

    Args:
        distillation: a distillation, or a recipe of several, whose own `distill` is called.
        judge: compare students with their teachers at the end.

    Raises:
        JobError: students, teachers and their layers do not match.
        Stopped: a signal came while teachers were trained.
        RunConflict: the folder of stored targets has outputs of another teacher.
        TrainwrightError: as `fit`.
    """
    from trainwright.distillation.distillation_spec import Distillation
    from trainwright.distillation.distilled_run import run_distillation
    from trainwright.integrations.ray_train import refuse_inside_ray_train

    refuse_inside_ray_train("tw.distill", "call it from the driver, or train each student's job with tw.fit")
    if not isinstance(distillation, Distillation):
        return distillation.distill(resume=resume, fresh=fresh, verbose=verbose)
    return run_distillation(distillation, resume=resume, fresh=fresh, verbose=verbose, judge=judge)


def generate(
    job: Job | str,
    prompts: Any,
    *,
    count: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    output: str | None = None,
    step: CheckpointChoice = None,
    here: bool = False,
    verbose: bool = False,
) -> npt.NDArray[np.int64]:
    """Continue prompts with the language model of a run.

    The job's model must be causal, take one column of tokens, and return logits (rows, tokens, vocabulary).

    Where the run divided its model over workers, one replica runs on as many workers in the same layout. A lost worker
    is replaced, up to the job's `failures=` times in a row, without loss of text. Otherwise it runs in this process on
    one device.

    A torch model can keep keys and values of earlier tokens, so that a new token needs a forward pass over one token.
    The signature of its forward says so: `cache=` (or `past_key_values=`) and `use_cache=`, as Hugging Face's models
    have them, or `cache=None` alone. That is a dict, empty in the first call, which has the prompts; the model stores
    in it what it needs for the later calls, which have one token of each row. The text is the same without a cache.
    Pipelines use none, and neither does a text that is longer than the rows of the training data: each new token moves
    the others to another place.

    Args:
        prompts: (rows, tokens) integers.
        count: tokens to add to each.
        temperature: divides the logits before a token is drawn; 0 takes the most likely token.
        top_k: draw among this many of the most likely tokens; by default all.
        seed: of the draws; the same seed gives the same tokens.
        output: name of the logits among several outputs, such as "logits".
        step: the checkpoint at this step, or "best" (see `tw.Checkpointing`); by default the newest.
        here: in this process on one CPU in any case.
        verbose: show Ray's own output.

    Returns:
        (rows, tokens + count).

    Raises:
        TrainwrightError: the prompts or numbers are wrong, there is no checkpoint, it does not fit the model, or the
            cluster has no room for the layout.
    """
    from trainwright.inference.run_inference import Sampling
    from trainwright.inference.run_inference import generate as continued

    sampling = Sampling(temperature=temperature, top_k=top_k, seed=seed)
    return continued(
        _job(job), prompts, count=count, sampling=sampling, output=output, step=step, here=here, verbose=verbose
    )


def load_model(job: Job | str, *, step: CheckpointChoice = None) -> Any:
    """Return the job's model with the weights of the newest checkpoint of its run, or of the one at `step`.

    `step="best"` is the checkpoint of the best evaluation; see `tw.Checkpointing`.

    Raises:
        TrainwrightError: there is no checkpoint, or it does not fit the model.
    """
    from trainwright.runtime import run_handle

    return run_handle.load_model(_job(job), step)


def export(job: Job | str, path: str, *, step: CheckpointChoice = None) -> str:
    """Write the trained model for use without trainwright, in the format of the path's ending. Returns the path.

    torch:

    - `.safetensors`, `.pt`: the weights.
    - `.pt2`, `.onnx`: the forward pass, by `torch.export`. It takes any number of rows. A `.pt2` file is called as the
      job calls the model. An ONNX model's inputs are named as the columns, its outputs as those of `tw.predict`. ONNX
      needs `pip install onnx onnxscript`.
    - a folder that ends in `/`: what the model's `save_pretrained` writes (Hugging Face).

    Keras on TensorFlow: `.keras`, `.weights.h5`, or a path without an ending for the folder of a SavedModel. With `/`
    at the end, Keras-hub models write their preset.

    Args:
        step: the checkpoint at this step, or "best" (see `tw.Checkpointing`); by default the newest.

    Raises:
        TrainwrightError: there is no checkpoint, it does not fit the model, the path's ending names no format, the
            model cannot be written in it, or a package that the format needs is not installed.
    """
    from trainwright.runtime import run_handle

    return run_handle.export(_job(job), path, step)


def chaos(
    job: Job | str,
    *,
    faults: Iterable[str] = (),
    seed: int = 0,
    every_s: float | None = None,
    twice: bool = False,
    keep: bool = False,
    say: Callable[[str], object] = lambda _: None,
) -> ChaosReport:
    """Train the job without and with injected faults, in scratch storage below its own, and compare both bitwise.

    The verdict is true where at least one fault was injected, no loss and no file of the last checkpoint differs, and
    no process or file is left behind. After a difference, a second run without faults shows whether the job itself is
    repeatable.

    Args:
        faults: names in `trainwright.chaos_testing.fault_schedule`, such as ("kill", "driver"); by default all that
            fit the job.
        seed: of the schedule of faults.
        every_s: seconds between faults, drawn at random until the run ends; by default each is given once.
        twice: make the second run without faults in any case.
        keep: keep the storage of the runs.
        say: called with progress lines.

    Raises:
        JobError: the job, or the name of a fault, is wrong.
        TrainwrightError: the run without faults cannot start, or failed.
    """
    from trainwright.chaos_testing import experiment

    options = experiment.ChaosOptions(seed=seed, faults=tuple(faults), every_s=every_s, keep=keep, twice=twice)
    job = _job(job)
    return experiment.run_experiment(job, plan(job).chosen, options, say)


def doctor(
    file: str | None = None,
    *,
    address: str | None = None,
    storage: str | None = None,
    job: Job | str | None = None,
    imports: bool = True,
    deadline_s: float = 60.0,
) -> Diagnosis:
    """Diagnose every node of the connected or named cluster, or else this machine, or check a cluster file.

    Args:
        file: a cluster file (`.yaml`, `.sbatch`) to check instead of machines.
        address: of a Ray cluster, HOST:PORT; by default `RAY_ADDRESS`, or what `ray.init` connected.
        storage: URI to write to, read and delete from; by default the job's, if one is given.
        job: its storage and data are checked too.
        imports: also import Ray and the frameworks, each in its own process.
        deadline_s: seconds for a node to answer.

    Raises:
        TrainwrightError: the file is not a cluster file, or the job or the storage URI is wrong.
    """
    from trainwright.diagnostics.diagnosis_report import diagnose, diagnose_file, probe_options

    if file is not None:
        return diagnose_file(file)
    wanted = probe_options(storage or "", None if job is None else _job(job), imports=imports, deadline_s=deadline_s)
    return diagnose(wanted, address or "")


def _job(job: Job | str) -> Job:
    """Return the job itself, or the job of a file."""
    from trainwright.planning.job_file import load_job

    return load_job(job) if isinstance(job, str) else job
