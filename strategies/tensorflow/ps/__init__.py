"""TensorFlow's parameter servers and their coordinator."""
