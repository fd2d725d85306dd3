"""All facts of the machine that this runs on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trainwright.diagnostics.devices import accelerators
from trainwright.diagnostics.facts import Machine
from trainwright.diagnostics.host_resources import clock, room
from trainwright.diagnostics.network import network
from trainwright.diagnostics.software import software
from trainwright.diagnostics.storage_probe import looked_for, tried


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What is to be looked at.

    Attributes:
        storage: URI of it, absolute; empty for none.
        places: of data.
        imports: import Ray and the frameworks, which takes some seconds.
        deadline_s: for a node to answer.
    """

    storage: str = ""
    places: tuple[str, ...] = ()
    imports: bool = True
    deadline_s: float = 60.0


def visit(wish: Wish, *, ray_address: str = "", believed: Mapping[str, float] | None = None) -> Machine:
    """Look at this machine.

    Args:
        ray_address: by which Ray reaches it.
        believed: Ray's resources of it.
    """
    found = accelerators()
    return Machine(
        software=software(imports=wish.imports, gpus=bool(found.devices)),
        accelerators=found,
        network=network(ray_address),
        room=room(believed),
        clock=clock(),
        stored=tried(wish.storage) if wish.storage else None,
        places=looked_for(wish.places),
    )
