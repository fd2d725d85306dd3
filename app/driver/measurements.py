"""What the ranks have measured of their steps, told where they stand idle."""

from __future__ import annotations

from collections.abc import Sequence

from trainwright.core.events import Measured, Noted
from trainwright.core.step_phases import slowest
from trainwright.driver import messages as m
from trainwright.driver.transition import Turn


def tell(turn: Turn, reports: Sequence[m.SegmentReport]) -> None:
    """Emit the phases of the slowest rank and the best known noise scale; say once that the batch is far above it."""
    phases = slowest(report.phases for report in reports if report.phases)
    if phases is None:
        return
    sampler = max(reports, key=lambda report: (report.noise is not None, report.sampled))
    noise, roles = sampler.noise, [turn.settings.role_of(rank) for rank in range(len(turn.state.members))]
    turn.emit(
        Measured(
            step=turn.state.step, steps=phases.steps, workers=roles.count("worker"), phases=dict(phases.medians),
            data_s=phases.data_s, sampled=sampler.sampled, noise=vars(noise) if noise else {},
        )
    )  # fmt: skip
    if noise is not None and noise.advice and not turn.state.advised:
        turn.change(advised=True)
        turn.emit(Noted(text=noise.advice))
