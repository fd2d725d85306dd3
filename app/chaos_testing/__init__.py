"""Chaos tests of a job: train it unbroken, then under faults, and compare the two runs.

`fault_catalogue` lists the faults, `fault_schedule` (pure) says when each is due, `run_state` (pure) follows the run,
`run_observer` drives one run in a process of its own, `fault_injector` gives the faults, `verdict` (pure) compares the
runs, `experiment` puts these together, and `verdict_view` shows the result.
"""

from __future__ import annotations
