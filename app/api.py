"""What a user calls: plan, fit, start, distill, evaluate, predict, generate, load_model, export, chaos, doctor;
with a Job or its file's path."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, overload

from trainwright.core.cluster import Cluster

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from trainwright.chaos_testing.chaos_report import ChaosReport
    from trainwright.core.job import Job
    from trainwright.datasets import Dataset
    from trainwright.diagnostics.diagnosis_report import Diagnosis
    from trainwright.distillation.distillation_spec import Distillation, SupportsDistill
    from trainwright.distillation.distilled_run import DistilledRun
    from trainwright.distillation.teacher_delivery import DeliveryComparison
    from trainwright.inference.batch_inference import Prediction
    from trainwright.planning.cluster_sizing import Goal, Price
    from trainwright.planning.decision import Decision
    from trainwright.planning.what_if import WhatIf
    from trainwright.runtime.run_handle import Run


@overload
def plan(job: Job | str) -> Decision: ...


@overload
def plan(job: Distillation) -> DeliveryComparison: ...


@overload
def plan(job: SupportsDistill, *, cluster: Cluster | str | None = None) -> Decision | WhatIf | DeliveryComparison: ...


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
    job: Job | Distillation | SupportsDistill | str,
    *,
    cluster: Cluster | str | None = None,
    aim: Goal = "fastest",
    price: Price = "on-demand",
    mtbf_hours: float | None = None,
    critical_batch: float | None = None,
    batch_sizes: Sequence[int] = (),
) -> Decision | WhatIf | DeliveryComparison:
    """The plan for this job, and the rejected ones, with reasons; of a distillation, the ways tried on some rows.

    Of a recipe it is the plan of the stage whose turn it is: later ones begin with what it will have learned.

    Args:
        cluster: one that need not be there, such as `128x8xH100-80GB`: what would be best on it or on a part of it,
            how long it would take and cost; by default the plan for the connected cluster, or this machine. What
            follows is about such a cluster.
        aim: `fastest`, `cheapest` (dollars of the run) or `smallest` (accelerators on which it fits).
        price: of its accelerators: on demand, `spot`, or dollars an hour of one.
        mtbf_hours: mean time between failures of one accelerator: adds goodput and the best checkpoint interval.
        critical_batch: samples (the gradient noise scale): how many steps another batch size takes to the same target.
        batch_sizes: to compare beside the job's own; need `critical_batch`.
    """
    from trainwright.distillation.distillation_spec import Distillation
    from trainwright.distillation.multi_stage import next_stage
    from trainwright.distillation.teacher_delivery import compare_deliveries
    from trainwright.planning.cluster_sizing import SizingRequest
    from trainwright.planning.job_preparation import decide_plan, needs_cluster_to_open, prepare, profile_of
    from trainwright.planning.what_if import what_if
    from trainwright.ray_cluster.discovery import connect

    stage = next_stage(job)
    if isinstance(stage, Distillation):
        return compare_deliveries(stage, cluster, always=True)
    job = _job(stage)
    if cluster is None and needs_cluster_to_open(job):
        connect()
    prepared = prepare(job, resume=True, connect=connect if cluster is None else None)
    if cluster is not None:
        request = SizingRequest(
            batch_size=job.batch_size, precision=job.training.precision, steps=prepared.total_steps, aim=aim,
            price=price, mtbf_hours=mtbf_hours, critical_batch=critical_batch, batch_sizes=tuple(batch_sizes),
        )  # fmt: skip
        there = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
        return what_if(profile_of(prepared), there, request)
    connect()
    return decide_plan(prepared)


def start(
    job: Job | str, *, resume: bool = False, fresh: bool = False, verbose: bool = False, detached: bool = False
) -> Run:
    """Plan, provision and train in the background; returns a handle at once.

    Args:
        resume: go on with a run of this name although the job was changed.
        fresh: begin the run of this name again.
        verbose: show Ray's own output.
        detached: drive the run from an actor of the cluster: it outlives this process, and Ray starts it again when it
            dies. It needs a cluster that lives longer than this process; its output is in Ray's logs.

    Raises:
        TrainwrightError: the job, its data, its storage or the cluster is not right; nothing was started.
    """
    from trainwright.runtime.launch import prepare_run
    from trainwright.runtime.run_handle import Run

    job = _job(job)
    return Run(job, *prepare_run(job, resume=resume, fresh=fresh, verbose=verbose, detached=detached))


def fit(job: Job | str, *, resume: bool = False, fresh: bool = False, verbose: bool = False) -> Run:
    """Plan, provision, train, recover, report; returns when the run has ended.

    The first Ctrl-C takes a checkpoint and stops, the second stops at once; SIGTERM counts as a preemption notice and
    does as the first. The run's `state` is then `stopped`, and the same call resumes it.

    Raises:
        TrainwrightError: the run could not start, or failed; the first failing rank's own error.
    """
    from trainwright.runtime.launch import wait_for_run

    run = start(job, resume=resume, fresh=fresh, verbose=verbose)
    wait_for_run(run)
    return run


@overload
def distill(
    distillation: Distillation, *, resume: bool = False, fresh: bool = False, verbose: bool = False, judge: bool = True
) -> DistilledRun: ...


@overload
def distill(
    distillation: SupportsDistill, *, resume: bool = False, fresh: bool = False, verbose: bool = False
) -> Any: ...


def distill(
    distillation: Any, *, resume: bool = False, fresh: bool = False, verbose: bool = False, judge: bool = True
) -> Any:
    """Train one student or several on what teachers say: `fit` of the student's job, with the teachers beside its data.

    Teachers that are to be trained come first, side by side. Which way they are asked is chosen where `way=` says
    nothing, and told in a line. Offline, what they say of all rows is computed then, where it is not kept already. The
    rest is `fit`, which recovers, reports and resumes alike. When it is done, the students are judged beside their
    teachers on the evaluation set: `diagnosis_report.verdict`, and a part of the report. A recipe is several such runs,
    of which those that are finished are passed by.

    Args:
        distillation: or a recipe that is made of several, whose own `distill` is called.
        judge: whether they are judged.

    Raises:
        JobError: students, teachers and their layers do not go together.
        Stopped: a signal came while teachers were trained.
        RunConflict: the folder of kept targets holds what another teacher said.
        TrainwrightError: as `fit`.
    """
    from trainwright.distillation.distillation_spec import Distillation
    from trainwright.distillation.distilled_run import run_distillation
    from trainwright.integrations.ray_train import refuse_inside_ray_train

    refuse_inside_ray_train("tw.distill", "call it from the driver, or train each student's job with tw.fit")
    if not isinstance(distillation, Distillation):
        return distillation.distill(resume=resume, fresh=fresh, verbose=verbose)
    return run_distillation(distillation, resume=resume, fresh=fresh, verbose=verbose, judge=judge)


def evaluate(job: Job | str, *, step: int | None = None, here: bool = False, verbose: bool = False) -> dict[str, float]:
    """Loss and metrics of a checkpoint over the job's evaluation set.

    It runs on workers of the cluster under the plan that the run was trained under last, with fewer replicas where
    there is less room. Where a worker is lost or hangs, all are placed anew and go on from the same batches, up to the
    job's `failures=` times in a row. Where the plan has one worker, it runs in this process on one device.

    Args:
        step: the checkpoint at this step; by default the newest.
        here: in this process on one CPU in any case.
        verbose: show Ray's own output.

    Raises:
        TrainwrightError: there is no evaluation set, no checkpoint, it does not fit the model, or the cluster has no
            room for the plan; some batches took longer than `hang_deadline_s`, by default 15 minutes.
    """
    from trainwright.inference import trained_model as use

    return use.evaluate(_job(job), step, here=here, verbose=verbose)


def predict(
    job: Job | str,
    data: Dataset | str | None = None,
    *,
    to: str,
    columns: Iterable[str] | None = None,
    keep: Iterable[str] = (),
    step: int | None = None,
    workers: int | None = None,
    batch_size: int | None = None,
    range_rows: int | None = None,
    fresh: bool = False,
    verbose: bool = False,
) -> Prediction:
    """The model's outputs for every row of a data set, computed on the cluster, as parquet parts in a folder.

    Where the run divided its model over workers, as many compute it together, in the layout that it was trained in;
    this process reads the rows and stores the parts then. Otherwise, and with `workers`, it is a pool of workers that
    each hold the whole model, read and store.

    The rows of all parts, in the order of their names, are the samples in order: `sample` (int64, the row number), the
    columns kept, then `output`, or one column for each of several outputs. Each part appears when it is whole; the same
    call goes on where an earlier one was ended, and computes only what is missing.

    Args:
        data: a data set, or the path of parquet files; by default the job's evaluation set. It needs no targets.
        to: a folder, or `s3://`, `gs://`, `az://`; every node must be able to write there.
        columns: outputs wanted, such as ("logits",); by default all.
        keep: columns of the data set that go with them.
        step: the checkpoint at this step; by default the newest.
        workers: of a pool; by default one for each accelerator or CPU slot of the cluster.
        batch_size: rows computed at once, by each worker or by all together; by default the job's, at most 1024.
        range_rows: rows of a part, at most; by default by the size of a row.
        fresh: compute again what the folder holds.
        verbose: show Ray's own output.

    Raises:
        RunConflict: the folder holds predictions of another checkpoint, data set or other columns, or other files.
        TrainwrightError: the job, its data, its storage or the cluster is not right, or a range failed again and again.
    """
    from trainwright.inference import batch_inference as predicting

    return predicting.predict(
        _job(job), data, to=to, columns=columns, keep=keep, step=step, workers=workers, batch_size=batch_size,
        range_rows=range_rows, fresh=fresh, verbose=verbose,
    )  # fmt: skip


def generate(
    job: Job | str,
    prompts: Any,
    *,
    count: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    output: str | None = None,
    step: int | None = None,
    here: bool = False,
    verbose: bool = False,
) -> npt.NDArray[np.int64]:
    """Prompts continued by a run's language model.

    The job's model must be causal, take one column of tokens, and give logits (rows, tokens, vocabulary). Each token
    takes a forward over the whole context: keys and values are not kept.

    Where the run divided its model over workers, it runs on as many of the cluster, in the layout that it was trained
    in: one replica. A lost one is replaced, up to the job's `failures=` times in a row, and nothing of the text is
    lost. Otherwise it runs in this process on one device.

    Args:
        prompts: (rows, tokens) integers.
        count: tokens to add to each.
        temperature: that logits are divided by before a token is drawn; 0 takes the likeliest.
        top_k: draw among so many of the likeliest; by default all.
        seed: of the draws: the same gives the same tokens.
        output: name of the logits, where the model gives more, such as "logits".
        step: the checkpoint at this step; by default the newest.
        here: in this process on one CPU in any case.
        verbose: show Ray's own output.

    Returns:
        (rows, tokens + count).

    Raises:
        TrainwrightError: the prompts or numbers are wrong, there is no checkpoint, it does not fit the model, or the
            cluster has no room for the layout.
    """
    from trainwright.inference.text_generation import Sampling
    from trainwright.inference.text_generation import generate as continued

    sampling = Sampling(temperature=temperature, top_k=top_k, seed=seed)
    return continued(
        _job(job), prompts, count=count, sampling=sampling, output=output, step=step, here=here, verbose=verbose
    )


def load_model(job: Job | str, *, step: int | None = None) -> Any:
    """The job's model with the weights of its run's newest checkpoint, or of the one at `step`.

    Raises:
        TrainwrightError: there is no checkpoint, or it does not fit the model.
    """
    from trainwright.inference import trained_model as use

    return use.load_model(_job(job), step)


def export(job: Job | str, path: str, *, step: int | None = None) -> str:
    """Write the trained model for use elsewhere: torch to `.safetensors` or `.pt`, Keras to `.keras`, `.weights.h5` or,
    where the path has no ending, to the folder of a SavedModel. Returns the path.

    Raises:
        TrainwrightError: there is no checkpoint, it does not fit the model, or the path's ending names no form.
    """
    from trainwright.inference import trained_model as use

    return use.export(_job(job), path, step)


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
    """Train the job unbroken and then under faults, each in scratch storage below its own, and compare them bitwise.

    The verdict is true where at least one fault was given, no loss and no file of the last checkpoint differs, and
    nothing is left behind. Where they differ, a second unbroken run tells whether the job itself is repeatable.

    Args:
        faults: names in `trainwright.chaos_testing.fault_schedule`, such as ("kill", "driver"); by default all that
            fit the job.
        seed: of the schedule of faults.
        every_s: seconds between faults, drawn at random until the run ends; by default each is given once.
        twice: make the second unbroken run in any case.
        keep: leave the runs where they are.
        say: takes a line for people, now and then.

    Raises:
        JobError: the job, or a fault, is not right.
        TrainwrightError: the unbroken run cannot start, or failed.
    """
    from trainwright.chaos_testing import experiment

    wish = experiment.ChaosOptions(seed=seed, faults=tuple(faults), every_s=every_s, keep=keep, twice=twice)
    job = _job(job)
    return experiment.run_experiment(job, plan(job).chosen, wish, say)


def doctor(
    file: str | None = None,
    *,
    address: str | None = None,
    storage: str | None = None,
    job: Job | str | None = None,
    imports: bool = True,
    deadline_s: float = 60.0,
) -> Diagnosis:
    """Look at every node of the cluster, where one is connected or named, else at this machine, or at a cluster file.

    Args:
        file: that describes a cluster (`.yaml`, `.sbatch`); no machine is looked at then.
        address: of a Ray cluster, HOST:PORT; by default `RAY_ADDRESS`, or what `ray.init` connected.
        storage: URI to write to, read and delete from; by default the job's, if one is given.
        job: whose storage is tried, and whose data is looked for.
        imports: import Ray and the frameworks too, each in a process of its own.
        deadline_s: for a node to answer.

    Raises:
        TrainwrightError: the file is no cluster file, the job or the storage's URI is wrong.
    """
    from trainwright.diagnostics.diagnosis_report import diagnose, diagnose_file, probe_options

    if file is not None:
        return diagnose_file(file)
    wanted = probe_options(storage or "", None if job is None else _job(job), imports=imports, deadline_s=deadline_s)
    return diagnose(wanted, address or "")


def _job(job: Job | str) -> Job:
    """The job itself, or that of a job file."""
    from trainwright.planning.job_file import load_job

    return load_job(job) if isinstance(job, str) else job
