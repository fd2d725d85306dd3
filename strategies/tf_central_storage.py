"""`tf.distribute.experimental.CentralStorageStrategy`: the variables stay in the host's memory, devices share them."""

from __future__ import annotations

from trainwright.core.cluster import Cluster
from trainwright.core.job import Job
from trainwright.core.plan import Infeasible, Plan
from trainwright.core.profile import ModelProfile
from trainwright.strategies.tf_mirrored import one_node

ENGINES = {"tensorflow": "trainwright.strategies.tensorflow.central_storage:CentralStorage"}
NO_FIT = "Keras' fit trains right with central storage, but reports wrong metrics"


def propose(profile: ModelProfile, cluster: Cluster, job: Job) -> Plan | Infeasible:
    """A data rank for each device of one node."""
    return one_node("tf_central_storage", ENGINES[profile.framework], profile, cluster, job)
