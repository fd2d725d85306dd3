"""Makes the pictures of pages in docs/images.

python .ci/pictures.py report [RUN [STORAGE]]: of a run's report, by default that of examples/fashion_mnist.py. README
shows it with one worker killed: `trainwright logs` prints its pid.
python .ci/pictures.py study FILE NAME: of a page that `trainwright study ... --html FILE` made (docs/studies.md has the
commands); NAME is that of the picture, such as study-batch.
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

WIDTH, MARGIN = 1100, 20
LOOK = {"viewport": {"width": WIDTH, "height": 800}, "device_scale_factor": 1, "color_scheme": "light"}


def report(run: str = "fashion-mnist", storage: str = "runs") -> None:
    """Draw a report down to its recoveries."""
    history = read_history(open_store(storage), run)
    html = render_report(history, uri=f"{storage}/{run}", now_s=history.summary.last_s)
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "report.html"
        file.write_text(html, encoding="utf-8")
        _draw(file, "[data-part=recoveries]", "report")


def study(file: str, name: str) -> None:
    """Draw the page of a study down to its chart."""
    _draw(Path(file).resolve(), "svg", name)


def _draw(file: Path, last: str, name: str) -> None:
    """Draw a page from its top to the end of the first element of a selector."""
    with (
        tempfile.TemporaryDirectory() as folder,
        chromium(Path(folder)) as browser,
        opened(browser, file.as_uri(), **LOOK) as watched,
    ):
        box = watched.page.locator(last).first.bounding_box()
        assert box is not None and watched.errors == []
        clip = {"x": 0, "y": 0, "width": WIDTH, "height": box["y"] + box["height"] + MARGIN}
        watched.page.screenshot(path=ROOT / "docs" / "images" / f"{name}.png", full_page=True, clip=clip)


if __name__ == "__main__":
    {"report": report, "study": study}[sys.argv[1]](*sys.argv[2:])
