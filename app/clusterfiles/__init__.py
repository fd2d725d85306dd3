"""Files that describe a cluster: for `ray up`, Slurm and Kubernetes; writing one, and looking one over."""

from trainwright.clusterfiles.check import check
from trainwright.clusterfiles.need import Need

__all__ = ["Need", "check"]
