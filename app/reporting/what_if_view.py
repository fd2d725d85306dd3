"""The answer about a cluster that is not there as HTML: in a notebook, and as a page of its own."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from markupsafe import Markup

from trainwright.core.accelerators import accelerator
from trainwright.core.plan import Estimate
from trainwright.planning.what_if import NUMBERS, WhatIf, batch_rows, fact_rows, headline, other_rows, size_rows
from trainwright.reporting import formatting
from trainwright.reporting.html.templates import fill
from trainwright.reporting.plan_charts import curve_svg, timeline_svg
from trainwright.strategies.search.ranking import estimate_of


def what_if_html(answer: WhatIf) -> str:
    """Facts, terms and memory as bars, one step as a timeline, time and cost by size, and what was not chosen.

    Styles and pictures inline, no scripts, nothing fetched; light and dark.
    """
    estimate = estimate_of(answer.chosen.plan)
    device = accelerator(answer.cluster.kinds[0])
    assert device is not None
    terms = estimate.terms.items()
    return fill(
        "whatif.html.j2",
        headline=headline(answer),
        facts=fact_rows(answer),
        terms=[(name.replace("_", " "), formatting.duration(s), 100 * s / estimate.step_s) for name, s in terms],
        room=formatting.size(device.memory_bytes),
        memory=list(_memory(estimate, device.memory_bytes)),
        timeline=Markup(timeline_svg(answer.profile, answer.cluster, answer.chosen.plan)),
        curve=Markup(curve_svg(answer.sizes, answer.chosen)),
        sizes=size_rows(answer),
        batches=batch_rows(answer),
        others=(("plan", "", "why"), other_rows(answer)),
        numbers=NUMBERS,
    )


def page(body: str) -> str:
    """HTML of a notebook's cell as a whole page."""
    return fill("page.html.j2", title="trainwright plan", body=Markup(body))


def _memory(estimate: Estimate, room_bytes: int) -> Iterator[tuple[str, str, float]]:
    """Stages with what they hold; neighbours that hold as much together."""
    held = list(enumerate(estimate.stage_memory_bytes))
    for said, same in groupby(held, key=lambda item: formatting.size(item[1])):
        run = list(same)
        first, last = run[0][0], run[-1][0]
        name = f"stage {first}" if first == last else f"stages {first} to {last}"
        yield name if len(held) > 1 else "device", said, 100 * run[0][1] / room_bytes
