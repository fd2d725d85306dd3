"""A run in object storage: log, owner, events, checkpoints, retries."""
