"""What a doctor finds: of a machine, of a cluster's nodes, of a file that describes a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["good", "doubtful", "bad"]
"""As it should be; works, but slower or less safely than it could; will not work."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Args:
        subject: what was looked at, in a word or two: `Ray`, `storage`, `clock`.
        verdict: what it comes to.
        what: what was found, with its figures.
        where: node, file and line, or field; empty for the machine that asks.
        remedy: what to do about it; empty only where nothing is to be done.
    """

    subject: str
    verdict: Verdict
    what: str
    where: str = ""
    remedy: str = ""

    def __post_init__(self) -> None:
        assert self.remedy or self.verdict == "good", f"{self.subject}: a finding that is not good has a remedy"
