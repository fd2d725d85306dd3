"""Studies of a job: runs with other numbers of workers, batch sizes, learning rates and seeds, in one figure."""
