"""Distillation in torch."""
