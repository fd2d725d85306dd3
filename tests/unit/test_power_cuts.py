"""A power cut at any write of a run: it opens, loses at most what was being written, and the next driver goes on."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulation.power_cuts import attack, attack_create, record

CUTS = given(seed=st.integers(0, 1_000), strike=st.integers(0, 1_000_000))


@settings(max_examples=60)
@CUTS
def test_a_power_cut_at_any_write_loses_at_most_what_was_being_written(seed: int, strike: int) -> None:
    attack(record(Random(seed)), Random(strike))


@pytest.mark.soak
@settings(max_examples=2_000)
@CUTS
def test_thousands_of_power_cuts_lose_at_most_what_was_being_written(seed: int, strike: int) -> None:
    attack(record(Random(seed)), Random(strike))


def test_an_entry_is_whole_on_disk_before_it_has_its_name(tmp_path: Path) -> None:
    attack_create(tmp_path)
