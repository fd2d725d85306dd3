"""State of a torch replica: files, layouts, comparison of replicas."""
