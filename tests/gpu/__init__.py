"""Engines on a GPU, as plain processes without Ray. Deselected where there is none."""
