"""The process of one rank: its loop, data, timing, prints and preemption notices."""
