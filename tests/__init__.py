"""Tests: unit (no Ray), conformance (engines), ray (a local cluster), faults (kills as data), e2e (the commands).

Helpers of several folders are in `support`; no test module is imported by another.
"""
