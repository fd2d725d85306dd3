"""What a server answers to a push that comes again, since the answer to the first was lost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trainwright.core.topology import Consistency
from trainwright.strategies.ps.call_headers import PushCall
from trainwright.strategies.ps.update_applier import ServerConfig, UpdateApplier


def push(worker: str, share: int) -> PushCall:
    return PushCall(do="push", worker=worker, unit=(0, share, 1), at=0, seen=0, weight=0.0, keep=False)


@pytest.mark.parametrize("consistency", ["async", "sync"])
def test_a_repeated_push_is_answered_as_the_first(consistency: str) -> None:
    applier = UpdateApplier(lambda at, norm: None)
    store: Any = SimpleNamespace(shard=SimpleNamespace(pulled_bytes=0, trained_bytes=0), apply=lambda *_, **__: None)
    config = ServerConfig(
        shares=2, consistency=Consistency.parse(consistency), local_steps=1, clip_norm=None, clips=False
    )
    applier.open(store, config)
    applier._apply = lambda *_, **__: None  # type: ignore[method-assign]
    applier.restart()
    first = push("a", 0)
    for call, counts in ((first, True), (push("b", 1), True), (first, False), (push("c", 0), False)):
        answer, new = applier.push(call, memoryview(b""))
        assert new is counts
        assert answer["taken"] is (call.worker != "c"), "another worker's gradient of the unit was taken"
