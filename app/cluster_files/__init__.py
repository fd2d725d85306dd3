"""Write and check the files that describe a cluster: for `ray up`, for Slurm and for Kubernetes."""

from trainwright.cluster_files.validation import check

__all__ = ["check"]
