"""Watching a run from outside: metrics for Prometheus, a link to Ray's dashboard, trackers of experiments."""
