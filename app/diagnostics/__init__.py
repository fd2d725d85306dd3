"""`trainwright doctor`: collect facts of machines and clusters, turn them into findings, and show these."""
