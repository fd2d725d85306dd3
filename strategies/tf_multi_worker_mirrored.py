"""`tf.distribute.MultiWorkerMirroredStrategy`: one worker for each node, a replica on each of its devices."""

from __future__ import annotations

from trainwright.core.cluster import Cluster
from trainwright.core.job import Job
from trainwright.core.plan import Infeasible, Plan
from trainwright.core.profile import ModelProfile
from trainwright.strategies import costs
from trainwright.strategies.data_parallel import replicas

ENGINES = {"tensorflow": "trainwright.strategies.tensorflow.multi_worker:MultiWorkerMirrored"}
NO_FIT = "Keras' fit raises on several workers: it takes values of several replicas for tensors"
GIVEN = "trainwright.strategies.tensorflow.multi_worker:AtGivenAddresses"


def propose(profile: ModelProfile, cluster: Cluster, job: Job) -> Plan | Infeasible:
    """A data rank for each device of each worker."""
    devices = costs.devices_of(cluster, job)
    if devices > 1 and not cluster.accelerators:
        reason = "MultiWorkerMirroredStrategy has one device in each worker of a CPU cluster"
        return Infeasible(strategy="tf_multi_worker_mirrored", reason=reason, hint="leave devices out, set workers=")
    engine = GIVEN if job.tf_config == "environment" else ENGINES[profile.framework]
    return replicas("tf_multi_worker_mirrored", engine, profile, cluster, job, devices)
