"""Write and check the files that describe a cluster: for `ray up`, for Slurm and for Kubernetes."""
