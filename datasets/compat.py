"""Differences between the versions of Ray Data that are supported."""

from __future__ import annotations

try:
    from ray.data import TaskPoolStrategy as TaskPoolStrategy
except ImportError:  # Ray 2.50
    from ray.data._internal.compute import TaskPoolStrategy as TaskPoolStrategy
