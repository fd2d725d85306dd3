"""Use of a finished run: evaluate, predict, generate, export."""
