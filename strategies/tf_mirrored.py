"""`tf.distribute.MirroredStrategy`: one worker drives all devices of a node, a replica on each."""

from __future__ import annotations

from trainwright.core.cluster import Cluster
from trainwright.core.job import Job
from trainwright.core.plan import Infeasible, Plan
from trainwright.core.profile import ModelProfile
from trainwright.strategies import costs
from trainwright.strategies.one_device import one_worker

ENGINES = {"tensorflow": "trainwright.strategies.tensorflow.mirrored:Mirrored"}
FIT = "trainwright.strategies.tensorflow.fit:FitMirrored"


def propose(profile: ModelProfile, cluster: Cluster, job: Job) -> Plan | Infeasible:
    """A data rank for each device of one node."""
    if job.run == "fit" and job.batch_size % costs.devices_of(cluster, job):
        reason = f"Keras' fit would weigh the rows of batch_size={job.batch_size} differently on each device"
        return Infeasible(strategy="tf_mirrored", reason=reason, hint="use a batch_size that the devices divide")
    engine = FIT if job.run == "fit" else ENGINES[profile.framework]
    return one_node("tf_mirrored", engine, profile, cluster, job)


def one_node(name: str, engine: str, profile: ModelProfile, cluster: Cluster, job: Job) -> Plan | Infeasible:
    """A plan for one worker with all devices of its node."""
    devices = costs.devices_of(cluster, job)
    if devices == 1:
        hint = "use tf_one_device; on a CPU, devices=2 makes two logical ones"
        return Infeasible(strategy=name, reason="there is one device on a node", hint=hint)
    refusal = costs.unequal(name, profile, job, devices)
    return refusal or one_worker(name, engine, profile, cluster, job, devices)
