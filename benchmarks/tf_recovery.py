"""SIGKILL of one of two TensorFlow workers, again and again: time to the next completed step."""

from __future__ import annotations

from pathlib import Path

import keras_problem
from figures import Figure
from machine import ray_cluster
from problem import WORKERS
from recovery import AFTER_STEPS, CHECKPOINT_STEPS, KILLS, NEXT, PAUSE_S, again, next_s, schedule_of, timed
from recovery_runs import RecoveryRuns

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
    schedule = schedule_of(smoke=smoke)
    runs = RecoveryRuns(workers=WORKERS, schedule=schedule)
    fields = {
        **keras_problem.FIELDS,
        "optimizer": keras_problem.stamping(folder / "ours", schedule.pause_s),
        "strategy": "tf_multi_worker_mirrored",
        "keeper_s": 1.0,
    }
    with ray_cluster(cpus=WORKERS):
        ours = runs.run_trainwright(folder / "ours", spares=WORKERS, **fields)
        from peers import ray_train_tf  # TensorFlow would slow ours down

        theirs = runs.run_peer(folder / "ray_train", ray_train_tf.fit)
    return [
        timed("tf_recovery", f"{NEXT}, {AGAINST}", next_s(ours), next_s(theirs), TARGET),
        again("tf_recovery", AGAINST, ours, theirs, target=None),
    ]
