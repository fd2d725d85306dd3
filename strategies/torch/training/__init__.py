"""The training step in torch: objective, batches, precision, evaluation."""
