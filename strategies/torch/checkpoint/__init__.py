"""State of a torch replica: copies in host memory, checkpoint files, comparison of replicas."""
