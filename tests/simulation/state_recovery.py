"""How a fake group gets its state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulation.processes import Process, Team
from tests.simulation.store import Violation
from trainwright.driver import messages as m

if TYPE_CHECKING:
    from tests.simulation.calls import Labour


def restore(labour: Labour, team: Team, arrived: list[Process]) -> None:
    """All ranks of a group get their state, which is the run's right one."""
    wanted: m.RestorePlan = team.argument
    by_rank = {process.rank: process for process in arrived}
    known = max((process.step for process in arrived if process.sound and process.trained), default=0)
    spike, missing = arrived[0].driver.facts.back, arrived[0].driver.facts.missing
    if wanted.step > missing:
        raise Violation(f"restored at step {wanted.step}, although the evaluation of step {missing} is missing")
    needless = known > wanted.step and not (wanted.step < spike <= known or missing < known)
    if needless and labour.scenario.layout == "replicated":
        raise Violation(f"restored at step {wanted.step}, although a sound rank stands at {known}")
    if wanted.kept is not None:
        if not labour.is_whole(list({item.file.name for item in wanted.kept.files})):
            raise Violation(f"restored from parts of a state: {wanted.kept}")
        for process in arrived:
            process.take(*labour.memory.kept[wanted.kept.version, wanted.kept.files[0].file.name])
    if wanted.source == "checkpoint":
        assert wanted.checkpoint is not None
        if wanted.checkpoint.path not in labour.store.committed:
            raise Violation(f"{wanted.checkpoint.path} was never committed")
        for process in arrived:
            process.take(wanted.checkpoint.step, labour.right[wanted.checkpoint.step])
    held = {rank: (process.step, process.lineage, process.piece) for rank, process in by_rank.items()}
    for move in wanted.moves:
        step, lineage, piece = held[move.source]
        if piece != move.piece or by_rank[move.target].piece != move.piece:
            raise Violation(f"rank {move.source} sent {move.piece} to rank {move.target}, but holds {piece}")
        by_rank[move.target].take(step, lineage)
    for process in arrived:  # each reads its data from the agreed step on, wherever its state stands
        right = process.lineage == labour.right[wanted.step]
        if not right or not process.sound or (wanted.source == "initial" and process.step):
            raise Violation(f"rank {process.rank}: steps lost or applied twice by {wanted.source} at {wanted.step}")
        process.take(wanted.step, process.lineage)
    team.step, team.lineage = wanted.step, arrived[0].lineage
    team.passing = frozenset(passed.step for passed in wanted.passing)
    settings, spikes = labour.scenario.settings, team.passing & labour.scenario.spikes
    if len(spikes) > settings.limits.spike_limit or len(team.passing - spikes) > settings.limits.pass_limit:
        raise Violation(f"too many steps are passed by: {team.passing}")
