"""Tensor parallelism: layers divided over the ranks of a group, and the search for what can be divided."""
