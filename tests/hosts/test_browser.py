"""The live page and the report in a browser: what a user sees and does, and that nothing leaves the page."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import trainwright as tw
from tests.support.browser import Watched, chromium, opened
from tests.support.live_pages import served
from tests.support.run_views import ALIVE, record, storage
from tests.support.sample_run import DECISION, started, stepped, whole_run
from trainwright.core import events
from trainwright.core.cluster import Cluster
from trainwright.planning.what_if import SizingRequest, what_if
from trainwright.reporting.html.run_report import render_report
from trainwright.reporting.html.templates import render_page
from trainwright.reporting.run_history import RunHistory
from trainwright.storage.event_log import EventLog
from trainwright.storage.object_store import open_store
from trainwright.storage.run_log import RunLog

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.hosts
SHOWN_S, TRIES = 2.0, 10  # from the moment that an event is stored; tries, since other tests keep the cores busy
WAIT_MS = 20_000
HOSTILE = "</script><script>hacked=1</script><img src=x onerror=hacked=2>"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("browser")) as started_browser:
        yield started_browser


class Run:
    """A run whose events are stored one by one, as its driver would, at the present time."""

    def __init__(self) -> None:
        self.uri, self.shift_s = storage(), time.time() - 110
        store = open_store(self.uri)
        self.log = RunLog(store, "demo")
        self.token = self.log.acquire(ALIVE, {"name": "demo"}).token
        self.journal = EventLog(store, "demo", flush_s=3600)
        self.journal.open(self.token)

    def tell(self, *happened: events.Event) -> None:
        for event in happened:
            self.journal.write(replace(event, time_s=event.time_s + self.shift_s))
        assert self.journal.flush()

    def end(self) -> None:
        self.tell(events.RunEnded(time_s=112, outcome="done", step=20))
        self.journal.close()
        self.log.release(self.token, "done")


@pytest.fixture
def run() -> Iterator[Run]:
    made = Run()
    made.tell(*whole_run()[:7])
    yield made
    made.journal.close()


def drag(watched: Watched, title: str) -> None:
    """Zoom into the middle half of a chart."""
    box = watched.page.locator(f'.chart:has-text("{title}") .u-over').bounding_box()
    assert box is not None
    y = box["y"] + box["height"] / 2
    watched.page.mouse.move(box["x"] + box["width"] / 4, y)
    watched.page.mouse.down()
    watched.page.mouse.move(box["x"] + 3 * box["width"] / 4, y, steps=4)
    watched.page.mouse.up()


def first_step(watched: Watched) -> float:
    """The step at the left end of the chart of the loss, as its legend says it."""
    chart = watched.page.locator('.chart:has-text("Loss")')
    chart.locator(".u-over").hover(position={"x": 1, "y": 50})
    step = float(chart.locator(".u-value").first.inner_text())
    watched.page.mouse.move(0, 0)
    return step


def picture(watched: Watched, title: str = "Loss") -> str:
    """The pixels of a chart, once they stay the same."""
    before = ""
    while before != (now := pixels(watched, title)):
        before = now
        watched.page.wait_for_timeout(50)
    return now


def pixels(watched: Watched, title: str) -> str:
    canvas = watched.page.locator(f'.chart:has-text("{title}") canvas')
    return str(canvas.evaluate("(canvas) => canvas.toDataURL()"))


def test_a_kill_and_its_recovery_are_shown_and_zoom_and_scroll_stay(browser: Browser, run: Run) -> None:
    _, _, killed, formed, after, evaluated = [whole_run()[place] for place in (0, 7, 8, 9, 10, 11)]
    with served(run.uri) as page, opened(browser, page.url) as watched:
        at = watched.page
        at.wait_for_selector(".chart canvas")
        assert watched.charts().keys() >= {"Loss", "Metrics on the evaluation set", "Samples/s"}
        assert "Now: training" in at.inner_text("main")
        assert first_step(watched) == 1
        drag(watched, "Loss")
        zoomed = first_step(watched)
        assert zoomed > 2
        at.evaluate("scrollTo(0, 400)")
        run.tell(killed)
        at.wait_for_selector("article.lasting", timeout=WAIT_MS)
        shown = at.inner_text("article.lasting")
        assert (
            "rank 1 (node-a, pid 12) failed at about step 12" in shown
            and "killed by SIGKILL" in shown
            and "recovering" in shown
        )
        run.tell(events.Promoted(time_s=107.4, worker=2, rank=1, node="node-b"), formed, after, evaluated)
        at.wait_for_selector("article:not(.lasting)", timeout=WAIT_MS)
        shown = at.inner_text("article")
        for moment in ("failure detected", "spare joined", "resumed", "first step"):
            assert moment in shown
        assert at.evaluate("scrollY") == 400
        assert first_step(watched) == zoomed
        at.dblclick('.chart:has-text("Loss") .u-over')
        assert first_step(watched) == 1
        run.end()
        at.wait_for_selector(".state.done", timeout=WAIT_MS)
        asked = len(watched.requests)
        at.wait_for_timeout(1500)
        assert len(watched.requests) == asked, "an ended run is not asked for again"
        assert watched.errors == [] and {*watched.requests} == {page.url, f"{page.url}body"}


def test_a_kill_is_shown_within_two_seconds(browser: Browser, run: Run) -> None:
    killed, formed = whole_run()[8:10]
    took_s = []
    with served(run.uri) as page, opened(browser, page.url) as watched:
        watched.page.wait_for_selector(".chart canvas")
        while not took_s or (took_s[-1] >= SHOWN_S and len(took_s) < TRIES):
            run.tell(formed)
            watched.page.wait_for_selector("article.lasting", state="detached", timeout=WAIT_MS)
            run.tell(killed)
            stored_s = time.monotonic()
            watched.page.wait_for_selector("article.lasting", timeout=WAIT_MS)
            took_s.append(time.monotonic() - stored_s)
    assert took_s[-1] < SHOWN_S, took_s


def test_a_server_that_is_gone_is_said(browser: Browser, run: Run) -> None:
    with served(run.uri) as page, opened(browser, page.url) as watched:
        page.close()
        watched.page.wait_for_selector("#status:has-text('tries again')", timeout=WAIT_MS)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Address of a stored report, with a steep loss."""
    steps = stepped(range(1, 101), time_s=105)
    happened = [*whole_run()[:4], replace(steps, loss=[2.0 ** -(step / 10) for step in steps.step]), *whole_run()[8:]]
    file = tmp_path_factory.mktemp("report") / "report.html"
    file.write_text(render_report(RunHistory.fold(happened), uri="runs/demo", now_s=1000.0), encoding="utf-8")
    return file.as_uri()


def test_a_stored_report_is_alive_without_any_request(browser: Browser, report: str) -> None:
    with opened(browser, report) as watched:
        at = watched.page
        at.hover('.chart:has-text("Loss") .u-over')
        value = at.locator('.chart:has-text("Loss") .u-value').nth(1)
        assert float(value.inner_text()) > 0
        assert at.locator('.chart:has-text("Samples/s") .u-value').first.inner_text() != "-", "all charts follow"
        at.mouse.move(0, 0)
        linear = picture(watched)
        at.click("text=log scale")
        assert at.get_attribute("button", "aria-pressed") == "true" and picture(watched) != linear
        at.click("text=log scale")
        assert picture(watched) == linear
        drag(watched, "Loss")
        at.mouse.move(0, 0)
        assert picture(watched) != linear
        at.dblclick('.chart:has-text("Loss") .u-over')
        at.mouse.move(0, 0)
        assert picture(watched) == linear
        light = at.evaluate("getComputedStyle(document.body).backgroundColor")
        at.emulate_media(color_scheme="dark")
        assert at.evaluate("getComputedStyle(document.body).backgroundColor") != light and picture(watched) != linear
        assert watched.requests == [report] and watched.errors == []


class Fingers:
    """Touches a chart at shares of its width."""

    def __init__(self, watched: Watched, title: str) -> None:
        self._over = watched.page.locator(f'.chart:has-text("{title}") .u-over')
        self._over.scroll_into_view_if_needed()
        self._session = watched.page.context.new_cdp_session(watched.page)

    def touch(self, kind: str, *places: float) -> None:
        box = self._over.bounding_box()
        assert box is not None
        points = [{"x": box["x"] + place * box["width"], "y": box["y"] + 50, "id": n} for n, place in enumerate(places)]
        self._session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    def pinch(self, *reaches: float) -> None:
        """Move two fingers from these distances to the middle."""
        self.touch("touchStart", 0.5 - reaches[0], 0.5 + reaches[0])
        for reach in reaches[1:]:
            self.touch("touchMove", 0.5 - reach, 0.5 + reach)
        self.touch("touchEnd")

    def tap(self) -> None:
        self.touch("touchStart", 0.5)
        self.touch("touchEnd")


def test_two_fingers_zoom_all_charts_of_steps_and_two_taps_show_all_again(browser: Browser, report: str) -> None:
    phone = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
    with opened(browser, report, **phone) as watched:
        fingers = Fingers(watched, "Loss")
        loss, samples = picture(watched), picture(watched, "Samples/s")
        fingers.pinch(0.1, 0.2, 0.3, 0.4)
        assert picture(watched) != loss and picture(watched, "Samples/s") != samples
        fingers.tap()
        assert picture(watched) != loss, "one tap keeps the zoom"
        watched.page.wait_for_timeout(400)
        fingers.tap()
        fingers.tap()
        assert picture(watched) == loss and picture(watched, "Samples/s") == samples
        fingers.pinch(0.1, 0.3)
        assert picture(watched) != loss
        Fingers(watched, "Metrics on the evaluation set").pinch(0.4, 0.2, 0.1)
        assert picture(watched) == loss, "out of a chart with fewer points: all of the others, too"
        assert picture(watched, "Samples/s") == samples
        assert watched.errors == [] and watched.requests == [report]


def test_a_report_without_scripts_has_its_tables_and_recoveries(browser: Browser, report: str) -> None:
    with opened(browser, report, java_script_enabled=False) as watched:
        shown = watched.page.inner_text("main")
        for said in ("The curves need JavaScript", "failure detected", "killed by SIGKILL", "Where time went", "demo"):
            assert said in shown
        assert watched.page.locator("svg.phases rect").count() == 3


def whatif_page() -> str:
    answer = what_if(
        DECISION.profile, Cluster.parse("2x4xA100-40GB"), SizingRequest(batch_size=64, precision="bf16", steps=1000)
    )
    return render_page("trainwright plan", answer._repr_html_())


def comparison_page() -> str:
    uri = storage()
    for name in ("one", "two"):
        record(uri, whole_run(), name=name, outcome="done")
    return tw.compare("one", "two", storage=uri).page()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("kind", ["report", "plan", "comparison"])
def test_pages_fit_a_phone_and_obey_their_policy(
    browser: Browser, report: str, tmp_path: Path, kind: str, scheme: Any
) -> None:
    url = report
    if kind != "report":
        (tmp_path / "page.html").write_text(whatif_page() if kind == "plan" else comparison_page(), encoding="utf-8")
        url = (tmp_path / "page.html").as_uri()
    with opened(browser, url, viewport={"width": 390, "height": 844}, color_scheme=scheme) as watched:
        assert watched.page.evaluate("document.documentElement.scrollWidth") == 390
        assert watched.errors == [] and watched.requests == [url]


def hostile_run() -> list[events.Event]:
    return [
        replace(started(), run=HOSTILE, cluster=HOSTILE),
        events.Formed(time_s=104, workers=2, nodes={HOSTILE: "0-1"}),
        replace(stepped(range(1, 9), time_s=105), logged={HOSTILE: [1.0] * 8}),
        events.Evaluated(time_s=106, step=8, metrics={HOSTILE: 0.5, "loss": 0.5}),
        events.Printed(time_s=106, rank=0, line=HOSTILE),
        events.Failed(time_s=107, rank=1, node=HOSTILE, cause=HOSTILE, detail=HOSTILE, step=8),
        events.RunEnded(time_s=108, outcome="failed", step=8, error=HOSTILE),
    ]


def test_hostile_names_are_text(browser: Browser, run: Run) -> None:
    run.tell(*hostile_run()[:-1])
    with served(run.uri) as page, opened(browser, page.url) as watched:
        at = watched.page
        at.wait_for_selector(".chart canvas")
        run.tell(hostile_run()[-1])
        at.wait_for_selector(".state.failed", timeout=WAIT_MS)
        assert at.title() == f"{HOSTILE}: failed" and at.inner_text("h1") == HOSTILE
        assert (
            HOSTILE in watched.charts()
            and HOSTILE in at.inner_text("pre.scroll")
            and HOSTILE in at.inner_text("article")
        )
        assert at.evaluate("typeof hacked") == "undefined" and at.locator("img").count() == 0
        assert watched.errors == [] and {*watched.requests} == {page.url, f"{page.url}body"}


def test_a_script_that_gets_into_the_page_does_not_run(browser: Browser, report: str) -> None:
    with opened(browser, report) as watched:
        script = "document.createElement('script')"
        watched.page.evaluate(f"document.body.append(Object.assign({script}, {{textContent: 'hacked = 1'}}))")
        watched.page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"hacked=2\">')")
        watched.page.wait_for_timeout(200)
        assert watched.page.evaluate("typeof hacked") == "undefined"
        assert any("policy: script-src" in error for error in watched.errors)
        assert all(url.endswith("/x") for url in watched.requests[1:])


NOTEBOOK_RULES = """
body { color: green; background: white; text-align: right; }
.jp-RenderedHTMLCommon { line-height: 3; }
.jp-RenderedHTMLCommon table { table-layout: fixed; margin: 0 auto 1em; border: none; width: 100%; }
:not(.jp-RenderedMarkdown).jp-RenderedHTMLCommon :is(td, th, tr) {
  text-align: right; vertical-align: middle; padding: .5em; white-space: normal; max-width: 3em; background: pink;
}
.jp-RenderedHTMLCommon dl dt { float: left; clear: left; width: 20%; font-weight: bold; }
.jp-RenderedHTMLCommon dl dd { margin-left: 20%; padding: 1em; }
.jp-RenderedHTMLCommon :is(h3, h4) { color: green; }
"""
# What is wrong of tables, labels and colours that a user sees.
NOTEBOOK_LOOK = """() => [...document.querySelectorAll('.tw-output')].flatMap((output) => {
  const wrong = [], style = (of) => getComputedStyle(of);
  const light = (color) => {
    const [r, g, b] = color.match(/[\\d.]+/g).map((part) => (part / 255) ** 2.2);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
  };
  const ratio = light(style(output).color) / light(style(output).backgroundColor);
  if (Math.max(ratio, 1 / ratio) < 7) wrong.push(`contrast ${ratio}`);
  if (style(output).textAlign !== 'left') wrong.push('not at the left');
  if ((ratio > 1) !== (document.body.dataset.jpThemeLight === 'false')) wrong.push('the other theme');
  for (const cell of output.querySelectorAll('th, td')) {
    const wanted = cell.classList.contains('number') ? 'right' : 'left';
    if (style(cell).textAlign !== wanted) wrong.push(`${cell.textContent}: ${style(cell).textAlign}`);
    if (style(cell).backgroundColor !== 'rgba(0, 0, 0, 0)') wrong.push(`${cell.textContent}: filled`);
    const next = cell.nextElementSibling;
    if (next && cell.getBoundingClientRect().right > next.getBoundingClientRect().left + 1) wrong.push('cells overlap');
  }
  const labels = [...output.querySelectorAll('dt, dd')].map((one) => [one, one.getBoundingClientRect()]);
  for (const [one, box] of labels) {
    if (style(one).float !== 'none') wrong.push(`${one.textContent}: floats`);
    for (const [other, at] of labels)
      if (one !== other && box.left < at.right - 1 && at.left < box.right - 1 && box.top < at.bottom - 1
          && at.top < box.bottom - 1) wrong.push(`${one.textContent} lies on ${other.textContent}`);
  }
  return wrong;
})"""


@pytest.mark.parametrize(("theme", "system"), [("light", "dark"), ("dark", "light")])
def test_outputs_of_a_notebook_look_right_under_its_own_styles(
    browser: Browser, tmp_path: Path, theme: str, system: Any
) -> None:
    uri = storage()
    for name in ("one", "two"):
        record(uri, whole_run(), name=name, outcome="done")
    answer = what_if(
        DECISION.profile, Cluster.parse("2x4xA100-40GB"), SizingRequest(batch_size=64, precision="bf16", steps=1000)
    )
    shown = [tw.open_run("one", uri), tw.compare("one", "two", storage=uri, price=2.5), DECISION, answer]
    cells = "".join(f'<div class="jp-RenderedHTMLCommon">{each._repr_html_()}</div>' for each in shown)
    body = f'<body data-jp-theme-light="{str(theme == "light").lower()}">{cells}</body>'
    page = tmp_path / "notebook.html"
    page.write_text(f'<!doctype html><meta charset="utf-8"><style>{NOTEBOOK_RULES}</style>{body}', encoding="utf-8")
    with opened(browser, page.as_uri(), color_scheme=system) as watched:
        outputs = watched.page.locator(".tw-output")
        assert outputs.count() == len(shown) and watched.page.locator(".tw-output :is(td, dt)").count() > 40
        assert watched.page.evaluate(NOTEBOOK_LOOK) == []
        watched.page.screenshot(path=tmp_path / "notebook.png", full_page=True)
    assert watched.requests == [page.as_uri()] and watched.errors == []
