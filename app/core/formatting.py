"""Numbers as text, the same in the terminal, in reports and in notebooks."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

_BLOCKS = "▁▂▃▄▅▆▇█"


def duration(seconds: float) -> str:
    """A duration in the unit that suits it: `14 ms`, `2.1 s`, `1 min 53 s`, `3 h 05 min`, `12 d 04 h`; `-` for NaN."""
    if not math.isfinite(seconds):
        return "-"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest_s = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest_s:02d} s"
    hours, rest_minutes = divmod(minutes, 60)
    return f"{hours} h {rest_minutes:02d} min" if hours < 100 else f"{hours // 24} d {hours % 24:02d} h"


def sparkline(values: Sequence[float]) -> str:
    """A curve of at most 40 block characters, each the mean of several values: `█▆▃▂▁`; without values empty."""
    finite = [value for value in values if math.isfinite(value)]
    per_block = max(1, math.ceil(len(finite) / 40))
    means = [sum(part) / len(part) for part in (finite[n : n + per_block] for n in range(0, len(finite), per_block))]
    low, high = min(means, default=0.0), max(means, default=0.0)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((value - low) * scale)] for value in means)


def clock_time(seconds: float) -> str:
    """A duration as on a clock, `0:42`, `1:05:09`; `-:--` for NaN."""
    if not math.isfinite(seconds):
        return "-:--"
    minutes, rest_s = divmod(max(round(seconds), 0), 60)
    return f"{minutes}:{rest_s:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest_s:02d}"


def size(size_bytes: float) -> str:
    """A size in binary units: `812 B`, `1.2 MiB`."""
    amount, units = float(size_bytes), ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
    for unit in units[:-1]:
        if amount < 999.5:
            return f"{amount:.0f} B" if unit == "B" else f"{amount:.3g} {unit}"
        amount /= 1024
    return f"{amount:.3g} {units[-1]}"


def count(number: float, word: str) -> str:
    """A number with its noun: `1 worker`, `2 workers`, `12,000 steps`."""
    return f"{number:,} {word}" + ("" if number == 1 else "s")


def worker_count(workers: int, servers: int = 0) -> str:
    """The processes of a run: `2 workers`, `2 workers and 1 server`."""
    return " and ".join(
        count(number, word) for number, word in ((workers, "worker"), (servers, "server")) if number or word == "worker"
    )


def dollars(amount: float) -> str:
    """A price: `$2.41`, `$12,345`."""
    return f"${amount:,.2f}" if amount < 1000 else f"${amount:,.0f}"


def throughput(samples_per_s: float) -> str:
    """Throughput: `8,412 samples/s`, `3.2 samples/s`."""
    if not math.isfinite(samples_per_s):
        return "- samples/s"
    return f"{samples_per_s:,.0f} samples/s" if samples_per_s >= 99.5 else f"{samples_per_s:.3g} samples/s"


def percent(part: float) -> str:
    """A share in per cent: `3%`; `-` for NaN."""
    return f"{part:.0%}" if math.isfinite(part) else "-"


def metric(value: float) -> str:
    """A loss or metric to four digits: `0.9134`, `12.35`, `1.2e-05`."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:.4g}" if value == 0 or abs(value) < 1e-3 or abs(value) >= 1 else f"{value:.4f}"


def finite(value: float) -> float | None:
    """A number for JSON, which has no NaN and no infinity: None for these."""
    return value if math.isfinite(value) else None


def metrics(values: Mapping[str, float | None]) -> str:
    """Metrics in one order everywhere, the loss first: `loss 0.3312, accuracy 0.8812`; `-` where one is not known."""
    names = sorted(values, key=lambda name: (name != "loss", name))
    pairs = ((name, values[name]) for name in names)
    return ", ".join(f"{name} {'-' if value is None else metric(value)}" for name, value in pairs)


def timestamp(time_s: float, *, utc: bool = False) -> str:
    """A time in seconds since the epoch as `2026-11-24 14:17:05`, local or `... UTC`; `-` where it is 0 (not known)."""
    if not time_s:
        return "-"
    moment = datetime.fromtimestamp(time_s, UTC if utc else None)
    return moment.strftime("%Y-%m-%d %H:%M:%S UTC" if utc else "%Y-%m-%d %H:%M:%S")


def plain_text(table: RenderableType, width: int = 110) -> str:
    """A table of rich as plain text without colours, in lines of at most `width` characters."""
    from rich.console import Console

    out = io.StringIO()
    Console(file=out, width=width, color_system=None, force_terminal=False, force_jupyter=False).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())
