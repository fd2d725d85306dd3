"""Makes the picture of a report in docs/images: python .ci/pictures.py [RUN [STORAGE]], the example's run by default.

README shows the run of examples/fashion_mnist.py with one worker killed: `trainwright logs` prints its pid.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.browser import chromium, opened  # noqa: E402
from trainwright.reporting.html.run_report import render_report  # noqa: E402
from trainwright.reporting.run_history import read_history  # noqa: E402
from trainwright.storage.object_store import open_store  # noqa: E402

LOOK = {"viewport": {"width": 1100, "height": 800}, "device_scale_factor": 1, "color_scheme": "light"}


def main(run: str = "fashion-mnist", storage: str = "runs") -> None:
    """Draw the report down to its recoveries."""
    history = read_history(open_store(storage), run)
    html = render_report(history, uri=f"{storage}/{run}", now_s=history.summary.last_s)
    with tempfile.TemporaryDirectory() as name, chromium(Path(name)) as browser:
        file = Path(name) / "report.html"
        file.write_text(html, encoding="utf-8")
        with opened(browser, file.as_uri(), **LOOK) as watched:
            box = watched.page.locator("[data-part=recoveries]").bounding_box()
            assert box is not None and watched.errors == []
            clip = {"x": 0, "y": 0, "width": 1100, "height": box["y"] + box["height"] + 20}
            watched.page.screenshot(path=ROOT / "docs" / "images" / "report.png", full_page=True, clip=clip)


if __name__ == "__main__":
    main(*sys.argv[1:])
