"""Files that describe a cluster: for `ray up`, Slurm and Kubernetes; writing one, and looking one over."""

from trainwright.cluster_files.node_groups import Need
from trainwright.cluster_files.validation import check

__all__ = ["Need", "check"]
