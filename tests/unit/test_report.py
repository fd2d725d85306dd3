"""The report and the TensorBoard files, from events alone."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from dataclasses import replace
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
from trainwright.reporting.html.run_charts import smooth
from trainwright.reporting.html.run_report import ReportListener, render_report, step_bars, summary_html, time_parts
from trainwright.reporting.html.templates import render_template, sanitized_svg
from trainwright.reporting.plan_view import plan_from
from trainwright.reporting.run_history import RunHistory
from trainwright.storage.event_log import EventLog
from trainwright.storage.object_store import open_store
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


@pytest.mark.parametrize("case", CASES)
def test_is_whole_and_self_contained_in_every_case(case: str) -> None:
    html = render_report(RunHistory.fold(CASES[case]), **FACTS)
    page = Balance()
    page.feed(html)
    assert page.open == []
    assert "script" not in page.tags and "link" not in page.tags and "img" not in page.tags
    assert all(target.startswith("#") for target in page.fetched)
    assert {target[1:] for target in page.fetched} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert len(html) < 300_000
    said = re.sub(r"<[^>]*>", " ", html.split("</style>")[1])
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


def test_logged_values_have_a_chart_each() -> None:
    logging = replace(stepped([21, 22], time_s=140), logged={"kl<1>": [-0.5, float("nan")]})
    assert "kl&lt;1&gt;" in render_report(RunHistory.fold([*whole_run(), logging]), **FACTS)


def test_what_comes_from_the_job_is_escaped() -> None:
    html = render_report(RunHistory.fold([*whole_run()[:9], FAILED]), **FACTS)
    assert "&lt;script&gt;" in html and "<script" not in html
    assert "&lt;shapes&gt;" in html


def test_an_interrupted_run_names_its_remedy() -> None:
    assert "same command continues" in render_report(RunHistory.fold(whole_run()[:8], owner_alive=False), **FACTS)


def test_a_long_run_stays_small() -> None:
    long = [started(total=30_000), events.Formed(time_s=101), stepped(range(1, 30_001), time_s=3000)]
    assert len(render_report(RunHistory.fold(long), **FACTS)) < 300_000


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


def test_the_listener_writes_the_report_when_the_journal_closes() -> None:
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


def test_every_page_forbids_scripts_and_fetching() -> None:
    policy = "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline';"
    assert policy in render_report(RunHistory.fold(whole_run()), **FACTS)
    assert policy in render_template("page.html.j2", title="any other", body="")
