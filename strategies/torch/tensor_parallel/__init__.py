"""Layers that are divided over ranks."""
