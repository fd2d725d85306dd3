"""Headers of the calls that workers make to parameter servers."""

from __future__ import annotations

import json

import pytest

from trainwright.strategies.ps.call_headers import MalformedCallError, PushCall, parse_header

PUSH = {"do": "push", "worker": "w", "unit": [3, 0, 1], "at": 3, "seen": 2, "weight": 4.0, "keep": True}


def test_logged_values_may_have_long_names() -> None:
    """As the path of a module in a large model."""
    name = ".".join(["layers"] * 40)
    found = parse_header(json.dumps({**PUSH, "logged": [{name: [1.0, 2.0]}]}).encode())
    assert isinstance(found, PushCall) and found.logged == ({name: (1.0, 2.0)},)


def test_a_header_that_no_worker_sends_is_refused() -> None:
    with pytest.raises(MalformedCallError, match="weight"):
        parse_header(json.dumps({**PUSH, "weight": -1.0}).encode())
