"""Predicted step time and memory of a plan."""
