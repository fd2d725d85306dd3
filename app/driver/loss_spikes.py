"""Loss spikes: a loss far above those before it ends the run, or takes it back to before it, without that batch. Pure.

As PaLM was trained (Chowdhery et al., 2022, 5.1): begin again from a checkpoint before the spike, and pass its batch
by. The driver looks, from the news of the steps: no rank waits for it, and all decide alike. Steps that were taken
meanwhile are undone.
"""

from __future__ import annotations

import math
from statistics import median

from trainwright.core.errors import LossSpike
from trainwright.core.events import Failed, Noted
from trainwright.driver import memory_checkpointing
from trainwright.driver import messages as m
from trainwright.driver.membership import pause
from trainwright.driver.shutdown import close
from trainwright.driver.state import State
from trainwright.driver.transition import Turn

WINDOW, LEAST = 100, 20  # steps that say what is usual, at most and at least
_REMEDY = "look at the batch, lower the learning rate, take checkpoints more often, or raise max_loss_ratio"


def look(turn: Turn, event: m.Progressed) -> None:
    """Steps were completed while all ranks step."""
    limit = turn.settings.max_loss_ratio
    if limit is None or turn.state.spiked:
        return
    for step, loss in enumerate(event.losses, event.step - len(event.losses) + 1):
        usual = usual_loss(turn.state)
        if usual is not None and loss > limit * usual:
            many = f"{loss / usual:.1f} times the usual {usual:.4g}"
            _spiked(turn, step, f"the loss of step {step} is {loss:.4g}, {many}")
            return
        if math.isfinite(loss):
            turn.change(losses=(*turn.state.losses, (step, loss))[-WINDOW:])


def usual_loss(state: State) -> float | None:
    """The median of the last losses; None where there are too few, or where it is no measure of size."""
    usual = median(loss for _, loss in state.losses) if len(state.losses) >= LEAST else 0.0
    return usual if usual > 0 else None


def rolled_back(state: State, step: int) -> tuple[tuple[int, float], ...]:
    """The losses that are left when all stand at a step again."""
    return tuple((done, loss) for done, loss in state.losses if done <= step)


def _spiked(turn: Turn, step: int, what: str) -> None:
    state, settings = turn.state, turn.settings
    turn.emit(Failed(generation=state.generation.number, cause=what, step=state.progress))
    if settings.spike_limit == 0:
        close(turn, "failed", LossSpike(what, remedy='on_spike="rollback" goes back to before it and passes it by'))
    elif state.committed >= step:
        close(turn, "failed", LossSpike(f"{what}, and the newest checkpoint is not from before it", remedy=_REMEDY))
    elif len(state.passing) >= settings.spike_limit:
        close(turn, "failed", LossSpike(f"{what}; {len(state.passing)} batches were passed by before", remedy=_REMEDY))
    else:
        memory_checkpointing.forget_from(turn, step)
        turn.change(spiked=step, passing=(*state.passing, m.Passed(step=step, why=what)))
        turn.emit(Noted(text=f"{what}: going back to before it; its batch is passed by"))
        pause(turn)
