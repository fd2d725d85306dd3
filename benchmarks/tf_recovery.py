"""SIGKILL of one of two TensorFlow workers, again and again: time to the next completed step."""

from __future__ import annotations

from pathlib import Path

import keras_problem
from figures import Figure
from kills import Recovery, Schedule, measure_kills
from machine import ray_cluster, settle
from problem import WORKERS
from recovery import AFTER_STEPS, CHECKPOINT_STEPS, KILLS, NEXT, PAUSE_S, again, next_s, schedule_of, timed
from recovery_runs import STEPS, RecoveryRuns

TARGET = 1 / 3
AGAINST = "against TensorflowTrainer"
NOTE = (
    f"The job of `tf_step_time` under MultiWorkerMirroredStrategy with a pause of {PAUSE_S:g} s in each step and a "
    f"checkpoint after each {CHECKPOINT_STEPS} steps; otherwise as `recovery`: rank 1 gets SIGKILL {AFTER_STEPS} steps "
    f"past a checkpoint, {KILLS} times. Steps are stamped by the optimizer, in the graph. Both are given a Ray cluster "
    "that is up; trainwright its default of a warm standby for each worker, which has imported TensorFlow and nothing "
    "more, and a copy of the state in shared memory each second (keeper_s=1)."
)


def measure(folder: Path, *, smoke: bool) -> list[Figure]:
    """The figures of this benchmark."""
    schedule = schedule_of(smoke=smoke)
    with ray_cluster(cpus=WORKERS):
        settle()
        ours = _ours(folder / "ours", schedule)
        settle()
        theirs = _ray_train(folder / "ray_train", schedule)
    return [
        timed("tf_recovery", f"{NEXT}, {AGAINST}", next_s(ours), next_s(theirs), TARGET),
        again("tf_recovery", AGAINST, ours, theirs, target=None),
    ]


def _ours(folder: Path, schedule: Schedule) -> list[Recovery]:
    described = {
        **keras_problem.FIELDS,
        "optimizer": keras_problem.stamping(folder, schedule.pause_s),
        "strategy": "tf_multi_worker_mirrored",
        "keeper_s": 1.0,
    }
    return RecoveryRuns(workers=WORKERS, schedule=schedule).run_trainwright(folder, spares=WORKERS, **described)


def _ray_train(folder: Path, schedule: Schedule) -> list[Recovery]:
    from peers import ray_train_tf

    folder.mkdir()
    settings = ray_train_tf.Settings(
        steps=STEPS,
        rows=RecoveryRuns(workers=WORKERS, schedule=schedule).rows,
        stamps=str(folder),
        pause_s=schedule.pause_s,
        checkpoint_steps=schedule.every,
        max_failures=2 * schedule.kills,
    )
    return measure_kills(folder, schedule, lambda: ray_train_tf.fit(folder, settings), lambda kills: True)
