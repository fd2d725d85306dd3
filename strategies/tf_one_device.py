"""`tf.distribute.OneDeviceStrategy`: the floor that every other plan for TensorFlow is held against."""

from __future__ import annotations

from trainwright.core.cluster import Cluster
from trainwright.core.job import Job
from trainwright.core.plan import Infeasible, Plan
from trainwright.core.profile import ModelProfile
from trainwright.strategies.one_device import one_worker

ENGINES = {"tensorflow": "trainwright.strategies.tensorflow.one_device:OneDevice"}
FIT = "trainwright.strategies.tensorflow.fit:FitOneDevice"


def propose(profile: ModelProfile, cluster: Cluster, job: Job) -> Plan | Infeasible:
    """The whole global batch on one device of one worker."""
    engine = FIT if job.run == "fit" else ENGINES[profile.framework]
    return one_worker("tf_one_device", engine, profile, cluster, job)
