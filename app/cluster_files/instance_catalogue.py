"""Machines to rent, with their accelerators and list prices: machines.txt, and TPU slices by their names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib import resources

from trainwright.core.accelerators import ACCELERATORS, accelerator

_HOST_CHIPS = {"v5litepod": 4, "v6e": 4}  # of slices of several hosts; single hosts have up to 8
_KINDS = {"v3": "TPU-V3", "v4": "TPU-V4", "v5litepod": "TPU-V5E", "v5p": "TPU-V5P", "v6e": "TPU-V6E"}
_BY_CHIP = ("v5litepod", "v6e")  # the others count two cores for each chip


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine, or a TPU slice of several.

    Attributes:
        name: of the offer.
        cpus: virtual ones.
        memory_gib: of all of it.
        kind: of accelerator, as in trainwright.core.accelerators; empty without one.
        accelerators: how many.
        price: US dollars an hour on demand, by the list; None where it is not known.
        spot_price: that of one which may be taken away, roughly.
        hosts: machines that it is made of.
    """

    name: str
    cpus: int = 0
    memory_gib: float = 0.0
    kind: str = ""
    accelerators: int = 0
    price: float | None = None
    hosts: int = 1

    @property
    def resource(self) -> str:
        """Ray's name for what it computes with."""
        return ACCELERATORS[self.kind].resource if self.kind else "CPU"

    @property
    def spot_price(self) -> float | None:
        """By the share of the price that the accelerator's spot price is; a third without one."""
        if self.price is None:
            return None
        known = ACCELERATORS.get(self.kind)
        share = known.spot_price / known.price if known and known.price and known.spot_price else 1 / 3
        return self.price * share


@cache
def machines(cloud: str) -> dict[str, Machine]:
    """By name, of `aws`, `gcp`, or `gpu`: what is added to machines of Google Cloud."""
    text = (resources.files("trainwright.cluster_files") / "machines.txt").read_text(encoding="utf-8")
    rows = [line.split() for line in text.splitlines() if not line.startswith("#")]
    return {row[1]: _machine(row) for row in rows if row[0] == cloud}


def _machine(row: list[str]) -> Machine:
    _, name, cpus, memory, kind, count, price = row
    return Machine(
        name=name,
        cpus=int(cpus),
        memory_gib=float(memory),
        kind="" if kind == "-" else kind,
        accelerators=int(count),
        price=None if price == "-" else float(price),
    )


def tpu_slice(name: str) -> Machine | None:
    """The slice of an accelerator type such as `v5litepod-16` or `v4-8`; None where there is no such generation.

    The number counts chips from v5e on (not v5p), before two cores for each chip (cloud.google.com/tpu/docs).
    """
    found = re.fullmatch(r"(v\d[a-z]*)-([1-9]\d*)", name)
    if found is None or found[1] not in _KINDS:
        return None
    kind = accelerator(_KINDS[found[1]])
    assert kind is not None and kind.price is not None, "TPUs are in the table with their prices"
    chips = int(found[2]) if found[1] in _BY_CHIP else int(found[2]) // 2
    if not chips:
        return None
    single = 8 if found[1] in _BY_CHIP else 4
    hosts = 1 if chips <= single else -(-chips // _HOST_CHIPS.get(found[1], 4))
    return Machine(name=name, kind=kind.name, accelerators=chips, price=kind.price * chips, hosts=hosts)


def generations() -> list[str]:
    """Of TPUs, by the name that Google Cloud gives them."""
    return list(_KINDS)
