"""One module writes each part of the driver's state."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from trainwright.driver import driver_state

FOLDER = Path(driver_state.__file__).parent
OWNERS = {
    "membership": "membership",
    "dynamic": "dynamic_members",
    "epoch": "rendezvous",
    "handover": "preemption",
    "position": "driver_state",
    "segment": "segments",
    "recovery": "failure_policy",
    "checkpoints": "checkpointing",
    "memory": "checkpointing",
    "traces": "step_traces",
    "shutdown": "driver_state",
    "trials": "rendezvous",
}
"""The module that writes each part; `driver_state` writes all other fields of `DriverState`."""
WRITERS = frozenset({"change", "enter"})
"""Methods of `Transition` whose keywords are fields."""


def owner_of_field() -> dict[str, str]:
    """The owner of each field."""
    owners = {field.name: OWNERS.get(field.name, "driver_state") for field in fields(driver_state.DriverState)}
    for part, value in vars(driver_state.DriverState(settings=None)).items():  # type: ignore[arg-type]
        if part in OWNERS and part != "trials":
            owners |= {field.name: OWNERS[part] for field in fields(value)}
    return owners


def writes(source: str) -> Iterator[str]:
    """Fields that a module writes in calls of `WRITERS`; `*` for those that cannot be read from its source."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WRITERS:
            yield from (keyword.arg or "*" for keyword in node.keywords)
        if isinstance(node, ast.Assign):
            yield from ("*" for target in node.targets if ast.unparse(target).endswith(".state"))


def test_one_module_writes_each_part_of_the_state() -> None:
    owners, foreign = owner_of_field(), []
    for path in sorted(FOLDER.glob("*.py")):
        for field in writes(path.read_text(encoding="utf-8")):
            owner = "driver_state" if field == "*" else owners[field]
            if owner != path.stem:
                foreign.append(f"{path.stem} writes {field}, which belongs to {owner}")
    assert not foreign


def test_each_owner_writes_its_part() -> None:
    """No owner is listed for a part that another module, or none, writes."""
    owners = owner_of_field()
    written = {(path.stem, field) for path in FOLDER.glob("*.py") for field in writes(path.read_text(encoding="utf-8"))}
    assert set(OWNERS.values()) == {owners[field] for _, field in written if field != "*"}


def test_a_foreign_write_is_found() -> None:
    owners = owner_of_field()
    assert [owners[field] for field in writes("transition.change(head=None)\ntransition.enter(phase, blame=None)")] == [
        "checkpointing",
        "failure_policy",
    ]
    assert [*writes("transition.change(**changes)"), *writes("transition.state = state")] == ["*", "*"]
