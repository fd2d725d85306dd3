"""Chaos tests of a job: train it without faults, then with faults, and compare the two runs bitwise.

`fault_schedule` (pure) lists the faults and says when each is due. `run_observer` follows a run and injects its faults.
The driver is a process of its own (`driver_main`), and `store_outage` makes a store fail.
`chaos_report` compares two runs and shows the result, and `experiment` puts these together.
"""
