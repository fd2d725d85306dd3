"""The report and the TensorBoard files, from events alone."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from base64 import b64encode
from dataclasses import replace
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from tests.support.html_pages import Balance
from tests.support.processes import wait_for
from tests.support.sample_run import DECISION, started, stepped, whole_run
from trainwright.core import events
from trainwright.core.callbacks import encode_image
from trainwright.core.errors import StorageError
from trainwright.reporting.html.chart_data import smooth
from trainwright.reporting.html.recovery_timeline import recoveries, run_segments
from trainwright.reporting.html.run_report import ReportListener, render_report, step_bars, summary_html, time_parts
from trainwright.reporting.html.templates import render_page, report_policy, sanitized_svg
from trainwright.reporting.plan_view import plan_from
from trainwright.reporting.run_history import RunHistory
from trainwright.storage.event_log import EventLog
from trainwright.storage.object_store import open_store
from trainwright.storage.run_summary import RunSummary
from trainwright.tracking import listeners
from trainwright.tracking.listeners import TensorBoardWriter

FACTS: dict[str, Any] = {"uri": "memory://x/demo", "now_s": 1000.0}
FAILED = events.RunEnded(time_s=108, outcome="failed", step=12, error="ValueError: <shapes> differ")
CASES: dict[str, list[events.Event]] = {
    "done": whole_run(),
    "running": whole_run()[:8],
    "failed": [*whole_run()[:9], FAILED],
    "one step": [started(total=1), events.Formed(time_s=101), stepped([1], time_s=102)],
    "no step": [started()],
    "no evaluation": [event for event in whole_run() if not isinstance(event, events.Evaluated)],
    "no clipping": [started(), events.Formed(time_s=101), stepped(range(1, 9), time_s=102, norm=None)],
    "nan": [started(), events.Formed(time_s=101), stepped(range(1, 9), time_s=102, loss=float("nan"))],
    "nothing": [],
}


def data_of(html: str) -> dict[str, Any]:
    """The values that the script of the page draws."""
    data: dict[str, Any] = json.loads(html.split('id="run-data">')[1].split("</script>")[0])
    return data


@pytest.mark.parametrize("case", CASES)
def test_is_whole_and_self_contained_in_every_case(case: str) -> None:
    html = render_report(RunHistory.fold(CASES[case]), **FACTS)
    page = Balance()
    page.feed(html)
    assert page.open == []
    assert "link" not in page.tags and "img" not in page.tags and " style=" not in html.split("<script>")[0]
    assert all(target.startswith("#") for target in page.fetched)
    assert {target[1:] for target in page.fetched} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert len(html) < 200_000
    said = re.sub(r"<script.*?</script>|<[^>]*>", " ", html.split("</style>")[2], flags=re.DOTALL)
    assert ("nan" in said.split()) == (case == "nan")


def test_says_what_a_reader_looks_for() -> None:
    html = render_report(RunHistory.fold(whole_run()), **FACTS)
    for said in (
        "demo", "done", "0.9000", "2,560", "12.0 s", "2 steps lost", "data_parallel: 2 workers x 1 thread on CPU",
        "one_device", "no stages; give it as a sequence", "killed by SIGKILL", "checkpoints/00000010-1",
        "waiting for data", "recovery and repeated steps", "batch norm is local", "python", "3.11",
        "tw.load_model", "memory://x/demo/checkpoints", "prefers-color-scheme: dark",
        "Ranks and nodes", "node-a, node-b",
    ):  # fmt: skip
        assert said in html, said


def test_options_at_their_defaults_are_folded() -> None:
    first = replace(started(), job={"name": "demo", "clip_norm": "None", "pad": "", "failures": "7", "old": "x"})
    html = render_report(RunHistory.fold([first, *whole_run()[1:]]), **FACTS)
    shown, _, rest = (
        html.partition("<h2>Configuration</h2>")[2].partition("<h2>Versions</h2>")[0].partition("<details>")
    )
    assert [name for name in first.job if f"<th>{name}</th>" in shown] == ["name", "failures", "old"]
    assert [name for name in first.job if f"<th>{name}</th>" in rest] == ["clip_norm", "pad"]


def test_logged_values_have_a_chart_each() -> None:
    logging = replace(stepped([21, 22], time_s=140), logged={"kl<1>": [-0.5, float("nan")]})
    charts = data_of(render_report(RunHistory.fold([*whole_run(), logging]), **FACTS))["charts"]
    (chart,) = [chart for chart in charts if chart["title"] == "kl<1>"]
    assert chart["tables"] == [["steps", [*[None] * 20, -0.5, None]]]


def test_the_first_logged_values_are_drawn_and_the_page_says_how_many_are_not() -> None:
    names = [f"value {number}" for number in range(20, 0, -1)]
    logging = replace(stepped([21], time_s=140), logged={name: [0.5] for name in names})
    judged = events.Evaluated(time_s=141, step=21, metrics=dict.fromkeys("abcde", 1.0))
    html = render_report(RunHistory.fold([*whole_run(), logging, judged]), **FACTS)
    assert [chart["title"] for chart in data_of(html)["charts"] if "value" in chart["title"]] == names[:12]
    assert "Not drawn: 2 more metrics in run.evaluations, 8 more logged values in run.history." in html
    assert "Not drawn" not in render_report(RunHistory.fold(whole_run()), **FACTS)


def test_what_comes_from_the_job_is_escaped() -> None:
    html = render_report(RunHistory.fold([*whole_run()[:9], FAILED]), **FACTS)
    assert "&lt;script&gt;" in html and "<script>alert" not in html
    assert "&lt;shapes&gt;" in html


def test_no_name_ends_the_data() -> None:
    hostile = "</script><script>alert(1)</script>\u2028<!--"
    logging = replace(stepped([21], time_s=140), logged={hostile: [0.5]})
    judged = events.Evaluated(time_s=141, step=21, metrics={hostile: 1.0})
    html = render_report(RunHistory.fold([replace(started(), run=hostile), *whole_run()[1:], logging, judged]), **FACTS)
    assert html.count("<script") == 3 and "<!--" not in html and "\u2028" not in html.split("run-data")[1]
    data = data_of(html)
    assert data["title"] == f"{hostile}: done"
    assert hostile in {chart["title"] for chart in data["charts"]}


def test_an_interrupted_run_names_its_remedy() -> None:
    assert "same command continues" in render_report(RunHistory.fold(whole_run()[:8], owner_alive=False), **FACTS)


def test_a_long_run_stays_small() -> None:
    long = [started(total=1_000_000), events.Formed(time_s=101)]
    logged = {f"value {number}": [number / 7] * 50_000 for number in range(12)}
    for first in range(1, 1_000_000, 50_000):
        long.append(replace(stepped(range(first, first + 50_000), time_s=101 + first / 10), logged=logged))
    html = render_report(RunHistory.fold(long), **FACTS)
    assert len(html) < 600_000
    assert 900 <= len(data_of(html)["steps"]) <= 2001


def test_the_same_history_gives_the_same_page() -> None:
    history = RunHistory.fold(whole_run())
    assert render_report(history, **FACTS) == render_report(history, **FACTS)


def test_time_parts_fill_the_bar() -> None:
    parts = time_parts(RunHistory.fold(whole_run()))
    assert sum(part.percent for part in parts) == pytest.approx(100)
    assert parts[0].seconds == max(part.seconds for part in parts)


def test_predicted_and_measured_step_share_a_scale() -> None:
    history = RunHistory.fold(whole_run())
    bars = step_bars(history, plan_from(history.summary.start.plan))
    assert [name for name, _, _ in bars] == ["predicted", "measured, median"]
    predicted, measured = ([part.percent for part in parts] for _, _, parts in bars)
    assert sum(measured) == pytest.approx(100) and sum(predicted) == pytest.approx(14)
    assert step_bars(history, None) == []


def test_smoothing_is_centred_and_passes_over_gaps() -> None:
    assert smooth([1.0, 2.0, 3.0, 4.0, 5.0], 3) == pytest.approx([1.0, 2.0, 3.0, 4.0, 4.5])
    assert smooth([1.0, float("nan"), 3.0], 3) == pytest.approx([1.0, 2.0, 3.0])


def test_summary_for_notebooks() -> None:
    html = summary_html(RunHistory.fold(whole_run()))
    assert "<svg" in html and "0.9000" in html and "<html" not in html


def test_the_listener_writes_the_report_when_the_event_log_closes() -> None:
    store = open_store("memory://report-listener")
    with EventLog(store, "demo", flush_s=3600) as journal:
        journal.open(1)
        journal.listen(ReportListener(store, "demo", clock=lambda: 1000.0))
        for event in whole_run()[:8]:
            journal.write(event)
    html = store.get("demo/report.html").decode()
    assert 'class="state interrupted"' in html and "step 12 of 20" in html


# --- TensorBoard ------------------------------------------------------------------------------------------


def read_records(data: bytes) -> list[bytes]:
    """The records of an event file, their checksums verified by another implementation."""
    import struct

    from tensorboardX.crc32c import crc32c

    def masked(part: bytes) -> int:
        crc = crc32c(part) & 0xFFFFFFFF
        return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF

    records, place = [], 0
    while place < len(data):
        (length,) = struct.unpack_from("<Q", data, place)
        body = data[place + 12 : place + 12 + length]
        assert struct.unpack_from("<I", data, place + 8)[0] == masked(data[place : place + 8])
        assert struct.unpack_from("<I", data, place + 12 + length)[0] == masked(body)
        records.append(body)
        place += 16 + length
    return records


def scalars(data: bytes) -> tuple[dict[str, list[tuple[int, float]]], list[int]]:
    """Points by tag, and steps at which readers forget what comes after."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    points: dict[str, list[tuple[int, float]]] = {}
    starts = []
    for number, body in enumerate(read_records(data)):
        event = Event.FromString(body)
        if number == 0:
            assert event.file_version == "brain.Event:2"
        if event.session_log.status == SessionLog.START:
            starts.append(event.step)
        for value in event.summary.value:
            points.setdefault(value.tag, []).append((event.step, value.simple_value))
    return points, starts


def test_tensorboard_in_a_folder_grows_with_the_run(tmp_path: Path) -> None:
    board = TensorBoardWriter(open_store(str(tmp_path)), "demo")
    for event in whole_run()[:5]:
        board.on(event)
    file = tmp_path / "demo" / "tensorboard" / "events.out.tfevents.0000000001.000000"
    wait_for(lambda: file.exists() and len(scalars(file.read_bytes())[0].get("train/loss", [])) == 10)
    for event in whole_run()[5:]:
        board.on(event)
    board.close()
    points, starts = scalars(file.read_bytes())
    assert starts == [1, 11]
    assert points["train/loss"][:2] == [(1, 1.0), (2, 0.5)]
    assert [step for step, _ in points["train/loss"]] == [*range(1, 13), *range(11, 21)]
    assert points["evaluation/accuracy"] == [(10, pytest.approx(0.8)), (20, pytest.approx(0.9))]
    assert points["speed/samples_per_s"][0] == (1, pytest.approx(2560))
    assert set(points) == {
        "train/loss", "train/learning_rate", "train/gradient_norm", "speed/samples_per_s", "speed/wait_share",
        "evaluation/accuracy", "evaluation/loss",
    }  # fmt: skip


def test_a_folder_that_hangs_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network folder that is mounted hard may never answer, and the driver's thread tells of events."""
    answers, append = threading.Event(), listeners._append
    monkeypatch.setattr(listeners, "_append", lambda *given: answers.wait(30) and append(*given))
    monkeypatch.setattr(listeners, "MAX_WAITING_BYTES", 1_000)
    board = TensorBoardWriter(open_store(str(tmp_path)), "demo")
    for event in whole_run()[:5]:
        board.on(event)
    with pytest.raises(StorageError, match="too many TensorBoard records wait"):
        board.on(whole_run()[7])
    answers.set()
    board.close()
    data = (tmp_path / "demo" / "tensorboard" / "events.out.tfevents.0000000001.000000").read_bytes()
    assert len(scalars(data)[0]["train/loss"]) == 12


def test_tensorboard_in_an_object_store_adds_a_file_at_each_checkpoint_and_the_end() -> None:
    store = open_store("memory://tensorboard-parts")
    board = TensorBoardWriter(store, "demo")
    for event in [*whole_run(), started(token=4), events.Formed(step=20), stepped([21], time_s=1)]:
        board.on(event)
    board.close()
    paths = [path for path, _ in store.list("demo/tensorboard")]
    names = [path.rsplit("tfevents.")[1] for path in paths]
    assert names == ["0000000001.000000", "0000000001.000001", "0000000004.000000"]
    steps = [step for path in paths for step, _ in scalars(store.get(path))[0].get("train/loss", [])]
    assert steps == [*range(1, 13), *range(11, 21), 21]


def test_tensorboard_has_the_images_and_texts_of_callbacks(tmp_path: Path) -> None:
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.types_pb2 import DT_STRING

    board = TensorBoardWriter(open_store(str(tmp_path)), "demo")
    image = encode_image("digits", np.eye(3))
    board.on(started())
    board.on(events.MediaLogged(time_s=1.0, step=4, name="digits", **image))
    board.on(events.MediaLogged(time_s=2.0, step=4, name="sample", text="in the beginning"))
    board.on(events.MediaLogged(time_s=2.0, step=5, name="an image that the log left out", width=3))
    board.close()
    file = tmp_path / "demo/tensorboard/events.out.tfevents.0000000001.000000"
    read = map(Event.FromString, read_records(file.read_bytes()))
    shown, said = (event for event in read if event.summary.value)
    (value,) = shown.summary.value
    assert (shown.step, value.tag, value.image.width, value.image.height) == (4, "digits", 3, 3)
    assert value.image.encoded_image_string == image["image"]
    (value,) = said.summary.value
    assert (said.step, value.metadata.plugin_data.plugin_name) == (4, "text")
    assert (value.tensor.dtype, [*value.tensor.string_val]) == (DT_STRING, [b"in the beginning"])


def test_tensorboard_leaves_out_what_is_no_number(tmp_path: Path) -> None:
    board = TensorBoardWriter(open_store(str(tmp_path)), "demo")
    logged = {"kl": [0.5], "sometimes": [float("nan")]}
    for event in (started(), replace(stepped([1], time_s=1, loss=float("nan"), norm=None), logged=logged)):
        board.on(event)
    board.close()
    points, _ = scalars((tmp_path / "demo/tensorboard/events.out.tfevents.0000000001.000000").read_bytes())
    assert "train/loss" not in points and "train/gradient_norm" not in points and "train/learning_rate" in points
    assert points["train/kl"] == [(1, 0.5)] and "train/sometimes" not in points


def test_what_users_see_imports_no_framework_and_no_ray() -> None:
    modules = ("storage.event_log", "tracking.listeners", "reporting.run_history", "reporting.progress_bar",
               "reporting.html.run_report", "reporting.run_views", "reporting.plan_view")  # fmt: skip
    imports = "; ".join(f"import trainwright.{name}" for name in modules)
    heavy = {"ray", "torch", "tensorflow", "keras", "tensorboardX", "pandas", "matplotlib"}
    code = f"import sys; import trainwright.lr_schedules; {imports}\nprint(sorted(sys.modules.keys() & {heavy}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_a_drawing_that_was_stored_is_shown() -> None:
    shown = ElementTree.canonicalize(str(sanitized_svg(DECISION.timeline)))
    assert shown == ElementTree.canonicalize(DECISION.timeline) and "<rect" in shown and "var(--" in shown
    namespaced = DECISION.timeline.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1)
    assert sanitized_svg(namespaced) == sanitized_svg(DECISION.timeline)


@pytest.mark.parametrize(
    "hole",
    [
        "<script>alert(1)</script>",
        "<!--><script>alert(1)</script>-->",
        "<g><!--><img src=x onerror=alert(1)>--></g>",
        "<![CDATA[<script>alert(1)</script>]]>",
        "<text>&lt;script>alert(1)&lt;/script></text>",
        '<a href="javascript:alert(1)"><text>y</text></a>',
        '<g onclick="alert(1)"></g>',
        '<g ONCLICK="alert(1)"></g>',
        '<g style="fill:url(https://example.org/alert)"></g>',
        '<g style="position:fixed;inset:0;background:red"></g>',
        "<style>*{background:url(https://example.org/alert)}</style>",
        "<foreignObject><iframe src='https://example.org/alert'/></foreignObject>",
        '<path style="fill:var(--x,url(alert))"/>',
        "<?xml-stylesheet href='https://example.org/alert'?>",
        "<g>" * 20_000 + "</g>" * 20_000,
    ],
)
def test_what_a_stored_drawing_could_do_stays_out_of_the_page(hole: str) -> None:
    html = str(sanitized_svg(DECISION.timeline.replace("</svg>", f"{hole}</svg>")))
    page = Balance()
    page.feed(html)
    assert page.tags <= {"svg", "g", "path", "rect", "text", "title"} and len(page.tags) > 4
    unsafe = re.findall(r"<!|<\?|(?i:onclick|onerror|href|url\(|position|inset)", html)
    assert not unsafe and html.count("<g>") < 20


def test_what_is_no_drawing_is_left_out() -> None:
    entities = '<!DOCTYPE svg [<!ENTITY a "aaaaaaaaaa">]><svg><text>&a;</text></svg>'
    for none in (DECISION.timeline[:-9], "", "<html></html>", entities):
        assert sanitized_svg(none) == ""


def test_every_page_forbids_all_but_its_own_styles_and_scripts() -> None:
    report = render_report(RunHistory.fold(whole_run()), **FACTS)
    other = render_page("any other", "<style>p { margin: 0; }</style><p>text</p>")
    for html, scripts in ((report, 2), (other, 0)):
        (policy,) = re.findall('<meta http-equiv="Content-Security-Policy" content="([^"]*)">', html)
        assert policy.startswith("default-src 'none'; style-src 'sha256-") and "unsafe" not in policy
        assert ("script-src" in policy, "connect-src" in policy) == (scripts > 0, False)
        blocks = re.findall(r"<(?:style|script)>(.*?)</(?:style|script)>", html, re.DOTALL)
        assert len(blocks) == 2 + scripts
        hashes = {b64encode(sha256(block.encode()).digest()).decode() for block in blocks}
        assert hashes == set(re.findall("'sha256-([^']*)'", policy))
    assert "; connect-src 'self';" in report_policy(live=True)


def test_the_copy_of_uplot_is_the_published_one() -> None:
    """Version 1.6.32 of the npm package `uplot`, whose files are not changed."""
    folder = files("trainwright.reporting.html") / "uplot"
    assert {file.name: sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()} == {
        "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
        "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
        "LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
    }
    assert (
        files("trainwright.reporting.html")
        .joinpath("uplot/uPlot.iife.min.js")
        .read_text()
        .startswith("/*! https://github.com/leeoniya/uPlot (v1.6.32) */")
    )


# --- timeline of recoveries -------------------------------------------------------------------------------------------


def recovering() -> list[events.Event]:
    """A run whose rank 1 is killed at 107.3 and whose standby has its rank at 107.4."""
    return [
        *whole_run()[:9],
        events.Promoted(time_s=107.4, worker=2, rank=1, node="node-b"),
        events.Placed(time_s=107.5, worker=3, node="node-b", pid=14, spare=True),
    ]


def test_a_recovery_that_lasts_is_drawn_to_now() -> None:
    history = RunHistory.fold(recovering())
    (drawn,) = recoveries(history, now_s=110.3)
    assert (drawn.title, drawn.ended) == ("rank 1 (node-a, pid 12) failed at about step 12", False)
    assert [(each.name, round(each.after_s, 6)) for each in drawn.milestones] == [
        ("failure detected", 0.0), ("spare joined", 0.1), ("recovering", 3.0),
    ]  # fmt: skip
    assert drawn.summary == "recovering for 3.0 s"
    assert sum(segment.width for segment in drawn.segments) == pytest.approx(100)
    html = render_report(history, uri="", now_s=110.3)
    assert "Now: recovering from the failure of rank 1, node-a: killed by SIGKILL" in html


def test_a_recovery_has_its_moments_and_durations() -> None:
    lost = [*recovering(), *whole_run()[9:]]
    lost[8] = replace(lost[8], time_s=107.8)  # type: ignore[type-var]
    lost[9] = replace(lost[9], time_s=107.9)  # type: ignore[type-var]
    lost[11] = replace(lost[11], seconds=1.5)  # type: ignore[call-arg]
    history = RunHistory.fold(lost)
    (drawn,) = recoveries(history, now_s=1000.0)
    assert [(each.name, round(each.after_s, 6)) for each in drawn.milestones] == [
        ("last step", -0.5), ("failure detected", 0.0), ("spare joined", 0.1), ("resumed", 1.5), ("first step", 1.6),
    ]  # fmt: skip
    assert drawn.summary == "back after 1.5 s, first step after 1.6 s, 2 steps lost (11 to 12)" and drawn.ended
    strip = run_segments(history, now_s=1000.0)
    assert [(segment.left, round(segment.width, 3)) for segment in strip[:1]] == [(0.0, 100.0)]
    assert strip[1].colour == "bad" and 50 < strip[1].left < 80


def test_a_member_that_nobody_waited_for_ends_its_failure_by_joining() -> None:
    joined = events.Joined(time_s=107.9, worker=2, rank=1, node="node-b", former=3, seconds=0.6)
    history = RunHistory.fold([*recovering(), joined])
    assert recoveries(history, now_s=500.0) == [] and "Now: training" in render_report(history, uri="", now_s=500.0)
    assert "nobody waited for it" in history.summary.notes[-1].text
    other = RunHistory.fold([*recovering(), replace(joined, rank=0)])
    assert not recoveries(other, now_s=500.0)[0].ended


def test_the_first_step_of_a_later_driver_ends_no_older_recovery() -> None:
    ended = [*recovering(), whole_run()[9]]
    later = [replace(event, time_s=event.time_s + 100_000) for event in (started(), events.Formed(time_s=101))]
    history = RunHistory.fold([*ended, *later, stepped([11], time_s=100_105)])
    (drawn,) = recoveries(history, now_s=100_200.0)
    assert "first step" not in [each.name for each in drawn.milestones]


def test_what_recoveries_need_is_stored() -> None:
    for count in range(len(whole_run()) + 1):
        whole = RunSummary()
        for event in [*recovering(), *whole_run()[9:]][:count]:
            whole.add(event)
        again = RunSummary.of(json.loads(json.dumps(whole.facts())))
        assert again.facts() == whole.facts()
        kept = [recoveries(RunHistory(summary=each), 200.0) for each in (whole, again)]
        assert kept[0] == kept[1]


def test_a_run_keeps_its_newest_messages() -> None:
    summary = RunSummary()
    for number in range(500):
        summary.add(events.Printed(time_s=number, rank=0, line=f"line {number}"))
        summary.add(stepped([number + 1], time_s=number))
    assert len(summary.newest) == 200 and summary.newest[-1] == events.Printed(time_s=499, rank=0, line="line 499")
    html = render_report(RunHistory(summary=summary), **FACTS)
    assert "[rank 0] line 499" in html and "line 299<" not in html
