"""The training step in TensorFlow: objective, state, evaluation."""
