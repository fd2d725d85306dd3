"""A world for the driver: virtual clock, processes, groups and store, with faults drawn from a seed."""
