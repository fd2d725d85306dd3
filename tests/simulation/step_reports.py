"""News of steps, and of their losses where some are spikes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from tests.simulation.processes import Process
from trainwright.core.topology import Generation
from trainwright.driver import messages as m

if TYPE_CHECKING:
    from tests.simulation.calls import Labour

SPIKE = 100.0  # the loss of a step that is one


class News:
    """Tells drivers of steps: most come a while later. Losses are told once, and all before a segment ends."""

    def __init__(self, labour: Labour) -> None:
        self._labour, self._spikes = labour, labour.scenario.spikes

    def tell(self, process: Process, step: int) -> None:
        """A step is complete; some are told with the next one."""
        labour, call = self._labour, process.call
        assert call is not None, "it steps"
        if labour.rand() < 0.6:
            labour.clock.after(labour.between(0.0, 0.6), self._told, process.driver, call.generation, step)

    def before(self, driver: Any, event: m.DriverEvent) -> None:
        """What must be told before an answer."""
        if not (self._spikes and isinstance(event, m.CallReturned) and event.verb == "run"):
            return
        if event.value.step > driver.told:
            self._told(driver, event.generation, event.value.step)

    def _told(self, driver: Any, generation: Generation, step: int) -> None:
        losses = self._losses(driver, generation, step) if self._spikes else ()
        self._labour.deliver(driver, m.StepsCompleted(generation=generation, step=step, losses=losses))

    def _losses(self, driver: Any, generation: Generation, step: int) -> tuple[float, ...]:
        """Of the steps up to one that were not told of yet; none with news that are out of date."""
        if generation.number != driver.generation or step <= driver.told:
            return ()
        steps, driver.told = range(driver.told + 1, step + 1), step
        usual = {done: SPIKE if done in self._spikes else 1.0 for done in steps}
        return tuple(math.nan if done in driver.facts.passing else loss for done, loss in usual.items())
