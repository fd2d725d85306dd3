"""Distillation in TensorFlow."""
