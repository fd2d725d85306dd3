"""Servers that hold a model in shards, and workers that step alone against them. Free of Ray and of frameworks."""
