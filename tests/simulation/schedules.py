"""Many seeded failure schedules, one after the other: `make schedules`, and the first of them in the tests."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.simulation.scenario import draw
from tests.simulation.store import Violation
from tests.simulation.world import simulate
from trainwright.driver.state_machine import POSSIBLE_PHASES

COVERED = 0.97  # share of the possible (phase, event) pairs that must have been seen
ENDS = ("done", "stopped", "failed", "killed")
POSSIBLE_PAIRS = {
    (phase.value, kind.__name__, detail) for (kind, detail), phases in POSSIBLE_PHASES.items() for phase in phases
}


@dataclass
class Tally:
    """What came of schedules.

    Attributes:
        pairs: how often each event came in each phase.
        outcomes: of the drivers.
        events: delivered.
    """

    schedules: int = 0
    events: int = 0
    pairs: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)

    def check(self) -> None:
        """Raises AssertionError where they were too much alike to show anything."""
        missed = sorted(POSSIBLE_PAIRS - self.pairs.keys())
        share = 1 - len(missed) / len(POSSIBLE_PAIRS)
        print(f"{self.schedules} schedules, {self.events} events, {dict(self.outcomes)}")
        print(f"{share:.1%} of {len(POSSIBLE_PAIRS)} (phase, event) pairs seen; missed: {missed}")
        assert not self.pairs.keys() - POSSIBLE_PAIRS
        assert share >= COVERED
        assert min(self.outcomes[end] for end in ENDS) > self.schedules / 100


def tally(seeds: Iterable[int]) -> Tally:
    """Run the schedules of these seeds. Raises Violation, with the seed, at the first that breaks an invariant."""
    found = Tally()
    for seed in seeds:
        try:
            outcome = simulate(draw(seed), pairs=found.pairs)
        except Exception as error:
            raise Violation(f"schedule {seed}: {type(error).__name__}: {error}\n{draw(seed)}") from error
        found.schedules += 1
        found.outcomes.update(outcome.outcomes)
        found.events += outcome.events
    return found


def main(arguments: list[str]) -> int:
    """Run as many as are asked for; 0 when nothing is wrong."""
    parser = argparse.ArgumentParser(prog="make schedules", description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    given = parser.parse_args(arguments)
    begun_s = time.process_time()
    found = tally(range(given.first, given.first + given.count))
    found.check()
    print(f"{given.count / (time.process_time() - begun_s):.0f} schedules a second")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
