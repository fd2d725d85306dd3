"""Readers that keep a worker supplied with batches."""
