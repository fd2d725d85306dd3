"""What accelerators can do, as their makers state it. Extend it: `ACCELERATORS["MINE"] = Accelerator(...)`.

Rates are dense, without sparsity, of one device; links count one direction. Sources are the data sheets named with each
entry; prices are list prices on demand of the named offer, for one device, and change with time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

GB = 10**9
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One kind of accelerator.

    Attributes:
        name: as it is known, with its memory: `A100-80GB`.
        memory_bytes: of one device.
        flops_per_s: peak rate by precision (`fp32`, `tf32`, `fp16`, `bf16`).
        memory_bytes_per_s: of the device's own memory.
        sustained: of the peak rate that its power lets large matrix products keep up, against an A100.
        link_bytes_per_s: to the others of the same node, one direction.
        network_bytes_per_s: its share of the node's network, one direction, where the cluster says nothing else.
        host: seconds that its host needs for each operation and step, against those of a GPU's.
        unsure: standard deviation of the logarithm of its speed, where that is assumed.
        node: devices of one node, usually.
        price: of one hour, in US dollars; None where there is no usual offer.
        spot_price: of one hour that may be taken back.
        source: of the figures.
        aliases: other names, such as Ray's `accelerator_type` or what a driver reports.
        resource: Ray's name for it.
    """

    name: str
    memory_bytes: int
    flops_per_s: Mapping[str, float] = field(hash=False)
    memory_bytes_per_s: float
    link_bytes_per_s: float
    network_bytes_per_s: float
    sustained: float = 1.0
    host: float = 1.0
    unsure: float = 0.0
    node: int = 8
    price: float | None = None
    spot_price: float | None = None
    source: str = ""
    aliases: tuple[str, ...] = field(default=())
    resource: str = "GPU"

    @property
    def apart(self) -> bool:
        """Whether it has memory of its own, and is no share of the host's CPUs."""
        return self.resource != "CPU"

    def rate(self, precision: str) -> float:
        """Peak operations a second; half precisions stand in for each other, anything else computes in fp32."""
        for name in (precision, *_STAND_INS.get(precision, ()), "fp32"):
            if name in self.flops_per_s:
                return self.flops_per_s[name]
        raise KeyError(precision)


_STAND_INS = {"fp16": ("bf16",), "bf16": ("fp16",)}


def _nvidia(
    name: str,
    memory_gb: int,
    rates: Mapping[str, float],
    memory: float,
    link: float,
    network: float,
    *,
    price: tuple[float, float] | None = None,
    node: int = 8,
    sustained: float = 1.0,
    aliases: tuple[str, ...] = (),
) -> Accelerator:
    """Rates in Tflop/s, bandwidths in GB/s, prices (on demand, spot) in dollars."""
    return Accelerator(
        name=name,
        memory_bytes=memory_gb * GIB,
        flops_per_s={precision: rate * 1e12 for precision, rate in rates.items()},
        memory_bytes_per_s=memory * GB,
        link_bytes_per_s=link * GB,
        network_bytes_per_s=network * GB,
        node=node,
        sustained=sustained,
        price=price[0] if price else None,
        spot_price=price[1] if price else None,
        source=f"NVIDIA {name} data sheet" + ("; AWS list prices of June 2025" if price else ""),
        aliases=aliases,
    )


def _tpu(
    name: str, memory_gb: int, bf16: float, memory: float, link: float, price: float, aliases: tuple[str, ...] = ()
) -> Accelerator:
    return Accelerator(
        name=name,
        memory_bytes=memory_gb * GIB,
        flops_per_s={"bf16": bf16 * 1e12, "fp32": bf16 * 1e12 / 2},
        memory_bytes_per_s=memory * GB,
        link_bytes_per_s=link * GB,
        network_bytes_per_s=link * GB,  # the interconnect joins the chips of all hosts of a slice
        node=4,
        price=price,
        source="Google Cloud TPU system architecture and list prices, 2025; fp32 as two passes of bf16",
        aliases=aliases,
        resource="TPU",
    )


_AMPERE = {"fp16": 312, "bf16": 312, "tf32": 156, "fp32": 19.5}
_HOPPER = {"fp16": 989, "bf16": 989, "tf32": 494, "fp32": 67}
_LISTED = (
    _nvidia("P40-24GB", 24, {"fp32": 11.8}, 346, 16, 1.25, node=8),
    _nvidia("P100-16GB", 16, {"fp16": 21.2, "fp32": 10.6}, 732, 80, 1.25, aliases=("P100",)),
    _nvidia("V100-16GB", 16, {"fp16": 125, "fp32": 15.7}, 900, 150, 0.39, price=(3.06, 0.92), aliases=("V100",)),
    _nvidia("V100-32GB", 32, {"fp16": 125, "fp32": 15.7}, 900, 150, 1.56, price=(3.90, 1.17)),
    _nvidia("T4-16GB", 16, {"fp16": 65, "fp32": 8.1}, 320, 16, 1.5, node=4, price=(0.98, 0.33), aliases=("T4",)),
    _nvidia("A10G-24GB", 24, {"fp16": 70, "bf16": 70, "tf32": 35, "fp32": 31.2}, 600, 32, 1.56, price=(2.04, 0.82)),
    _nvidia("L4-24GB", 24, {"fp16": 121, "bf16": 121, "tf32": 60, "fp32": 30.3}, 300, 32, 1.56, price=(1.67, 0.66)),
    _nvidia("L40S-48GB", 48, {"fp16": 362, "bf16": 362, "tf32": 183, "fp32": 91.6}, 864, 32, 6.25, price=(3.77, 1.51)),
    _nvidia("RTX4090-24GB", 24, {"fp16": 165, "bf16": 165, "tf32": 82.6, "fp32": 82.6}, 1008, 32, 1.25, node=4),
    _nvidia(
        "A100-40GB", 40, _AMPERE, 1555, 300, 6.25, price=(2.74, 1.10), aliases=("A100-PCIE-40GB", "A100-SXM4-40GB")
    ),
    _nvidia(
        "A100-80GB", 80, _AMPERE, 2039, 300, 25, price=(3.43, 1.37), aliases=("A100", "A100-SXM4-80GB", "A100-80G")
    ),
    _nvidia(
        "H100-80GB", 80, _HOPPER, 3352, 450, 50, price=(6.88, 2.75), sustained=0.8, aliases=("H100", "H100-80GB-HBM3")
    ),
    _nvidia("H200-141GB", 141, _HOPPER, 4800, 450, 50, price=(7.91, 3.16), sustained=0.8, aliases=("H200",)),
    _nvidia(
        "B200-180GB",
        180,
        {"fp16": 2250, "bf16": 2250, "tf32": 1125, "fp32": 75},
        7700,
        900,
        50,
        price=(14.24, 5.70),
        sustained=0.8,
        aliases=("B200",),
    ),
    _tpu("TPU-V3", 32, 123, 900, 82, 2.20, ("TPU-v3",)),
    _tpu("TPU-V4", 32, 275, 1228, 150, 3.22, ("TPU-v4",)),
    _tpu("TPU-V5E", 16, 197, 819, 100, 1.20, ("TPU-V5LITEPOD", "TPU-v5e")),
    _tpu("TPU-V5P", 95, 459, 2765, 300, 4.20, ("TPU-v5p",)),
    _tpu("TPU-V6E", 32, 918, 1640, 224, 2.70, ("TPU-v6e",)),
)
ACCELERATORS: dict[str, Accelerator] = {item.name: item for item in _LISTED}


def accelerator(kind: str) -> Accelerator | None:
    """The accelerator of that name, however it is spelt; None where it is not in the table."""
    wanted = _plain(kind)
    for item in ACCELERATORS.values():
        if wanted in map(_plain, (item.name, *item.aliases)):
            return item
    sizes = [item for item in ACCELERATORS.values() if _plain(item.name.rpartition("-")[0]) == wanted]
    return sizes[0] if len(sizes) == 1 else None


def _plain(kind: str) -> str:
    """Without what makers and Ray put around a name."""
    text = kind.upper().removeprefix("NVIDIA").removeprefix("TESLA")
    return "".join(character for character in text if character.isalnum()).removeprefix("GOOGLE")
