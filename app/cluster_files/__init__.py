"""Files that describe a cluster: for `ray up`, Slurm and Kubernetes; writing one, and looking one over."""

from trainwright.cluster_files.check import check
from trainwright.cluster_files.requirement import Need

__all__ = ["Need", "check"]
