"""Each fault of a store at each moment of a run, against a real S3 server behind a proxy that does them."""

from __future__ import annotations

import itertools
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pytest

from tests.support.faulty_proxy import SKEWED, SLOW_DOWN, Fault, FaultyProxy
from tests.support.finished_runs import log_entries
from tests.support.run_logs import FAR, JOB
from tests.support.s3_server import S3Server
from trainwright.core import retry
from trainwright.core.engine import CheckpointManifest, CheckpointRef, checkpoint_path
from trainwright.core.errors import StorageError, StoreDown
from trainwright.core.events import Noted
from trainwright.driver import messages as m
from trainwright.storage import object_store
from trainwright.storage.checkpoints import CheckpointWriter, delete_unreferenced, newest_intact, write_manifest
from trainwright.storage.event_files import read_events
from trainwright.storage.event_log import EventLog
from trainwright.storage.object_store import RetryPolicy, Store, open_store
from trainwright.storage.run_log import Heartbeat, RunLog
from trainwright.storage.run_store import RunStore

SHORT = RetryPolicy(connect_s=0.5, silence_s=0.45, request_s=5.0, total_s=6.0)
SHARD = os.urandom(300_000)
PART = 5 << 20
LARGE = os.urandom(PART + 1000)
RUN = "run"


@pytest.fixture(scope="module")
def clean(s3_server: S3Server) -> Iterator[str]:
    """A bucket for all tests, with the credentials in the environment."""
    s3_server.make_bucket("faults")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3_server.environment().items():
            patch.setenv(name, value)
        yield "s3://faults"


@pytest.fixture(scope="module")
def proxy(clean: str, s3_server: S3Server) -> Iterator[FaultyProxy]:
    with FaultyProxy(s3_server.endpoint) as proxy:
        yield proxy


def through(proxy: FaultyProxy, uri: str, patience: RetryPolicy) -> Store:
    """A store behind the proxy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", proxy.address)
        return Store(uri, patience)


@dataclass(kw_only=True)
class Scene:
    """One run, its store reached directly and through the proxy."""

    proxy: FaultyProxy
    direct: Store
    store: Store
    token: int = 0
    refs: list[CheckpointRef] = field(default_factory=list)

    def named(self, step: int) -> CheckpointRef:
        """A checkpoint in the clean store, which the log names."""
        path = self.files(step)
        return self.commit(self.direct, step, path)

    def files(self, step: int) -> str:
        path = checkpoint_path(step, self.token)
        CheckpointWriter(self.direct, RUN, path).write("shard", SHARD)
        return path

    def manifest(self, store: Store, step: int, path: str) -> str:
        writer = CheckpointWriter(open_store(f"memory://{self.direct.uri.rpartition('/')[2]}"), RUN, path)
        writer.write("shard", SHARD)
        return write_manifest(store, RUN, path, CheckpointManifest(step=step, files=writer.entries))

    def commit(self, store: Store, step: int, path: str) -> CheckpointRef:
        digest = self.manifest(self.direct, step, path)
        parent = self.refs[-1].path if self.refs else ""
        ref = CheckpointRef(step=step, path=path, manifest_sha256=digest, parent=parent)
        RunLog(store, RUN).commit(self.token, ref, 3)
        self.refs.append(ref)
        return ref

    def impatient(self) -> Store:
        """The store through the proxy, which gives up soon."""
        return through(self.proxy, self.direct.uri, replace(SHORT, total_s=0.3))

    def kinds(self) -> list[str]:
        return [entry.kind for entry in log_entries(self.direct, RUN)]


_numbers = itertools.count()


@pytest.fixture
def scene(clean: str, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> Scene:
    """A run with two checkpoints; pauses are a tenth of the usual ones, parts a third."""
    monkeypatch.setattr("trainwright.core.retry.FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr("trainwright.core.retry.LONGEST_PAUSE_S", 0.2)
    monkeypatch.setattr(object_store, "CHUNK_BYTES", PART)
    uri = f"{clean}/{next(_numbers)}"
    direct = open_store(uri)
    made = Scene(proxy=proxy, direct=direct, store=through(proxy, uri, SHORT))
    made.token = RunLog(direct, RUN).acquire(FAR, JOB).token
    made.named(10)
    made.named(20)
    proxy.clear()
    return made


# --- moments ----------------------------------------------------------------------------------------------------------


def acquire(scene: Scene) -> None:
    entry = RunLog(scene.store, RUN, dead=lambda owner: True).acquire(FAR, JOB)
    assert entry.token == 4 and scene.kinds() == ["acquire", "commit", "commit", "acquire"]


def upload(scene: Scene) -> None:
    writer = CheckpointWriter(scene.store, RUN, "checkpoints/00000030-1")
    writer.write("shard", SHARD)
    assert scene.direct.get(f"{RUN}/checkpoints/00000030-1/shard") == SHARD


def upload_large(scene: Scene) -> None:
    scene.store.put("large", memoryview(LARGE))
    assert scene.direct.get("large") == LARGE


def manifest(scene: Scene) -> None:
    path = scene.files(30)
    digest = scene.manifest(scene.store, 30, path)
    ref = CheckpointRef(step=30, path=path, manifest_sha256=digest)
    assert newest_intact(scene.direct, RUN, [ref]) == (ref, [])


def commit(scene: Scene) -> None:
    ref = scene.commit(scene.store, 30, scene.files(30))
    head = RunLog(scene.direct, RUN).head()
    assert head is not None and head.checkpoints[-1] == ref
    assert scene.kinds() == ["acquire", "commit", "commit", "commit"], "one entry, whatever became of the answers"


def beat(scene: Scene) -> None:
    Heartbeat(scene.store, RUN, scene.token).beat()
    assert scene.direct.get(f"{RUN}/owner/{scene.token}.json") == b'{"count": 1}'


def flush(scene: Scene) -> None:
    with EventLog(scene.store, RUN, flush_s=3600) as journal:
        journal.open(scene.token)
        journal.write(Noted(text="kept"))
        assert journal.flush()
    assert [event.text for event in read_events(scene.direct, RUN) if isinstance(event, Noted)] == ["kept"]


def resume(scene: Scene) -> None:
    head = RunLog(scene.store, RUN).head()
    assert head is not None
    assert newest_intact(scene.store, RUN, head.checkpoints) == (scene.refs[-1], [])


def read_large(scene: Scene) -> None:
    scene.direct.put("large", LARGE)
    assert scene.store.get("large") == LARGE


def delete(scene: Scene) -> None:
    assert delete_unreferenced(scene.store, RUN, scene.refs[1:]) == (scene.refs[0].path,)
    assert {path.split("/")[2] for path, _ in scene.direct.list(f"{RUN}/checkpoints")} == {"00000020-1"}


def release(scene: Scene) -> None:
    RunLog(scene.store, RUN).release(scene.token, "stopped")
    assert scene.kinds() == ["acquire", "commit", "commit", "release"]


MOMENTS: dict[Callable[[Scene], None], str] = {
    acquire: r"PUT .*/log/\d+",
    upload: r"PUT .*/shard",
    upload_large: r"PUT .*partNumber=2",
    manifest: r"PUT .*/MANIFEST",
    commit: r"PUT .*/log/\d+",
    beat: r"PUT .*/owner/",
    flush: r"PUT .*/events/",
    resume: r"GET .*/shard",
    read_large: r"GET .*/large",
    delete: r"POST .*delete",
    release: r"PUT .*/log/\d+",
}
FAULTS: dict[str, Fault] = {
    "throttled": Fault(kind="answer", status=503, body=SLOW_DOWN, times=3),
    "throttled-and-told-when": Fault(
        kind="answer", status=503, body=SLOW_DOWN, times=2, headers=(("Retry-After", "1"),)
    ),
    "too-many": Fault(kind="answer", status=429, times=3),
    "broken-inside": Fault(kind="answer", status=500, times=3),
    "slow": Fault(kind="slow", seconds=0.02),
    "cut-while-sending": Fault(kind="cut_request", times=3),
    "cut-while-answering": Fault(kind="cut_answer", times=2),
    "answer-lost": Fault(kind="lose_answer", times=2),
    "silent": Fault(kind="silence", times=1),
}


# Each moment with the faults that leave in doubt what was done, and with every third of the others.
PAIRS = [
    (moment, fault)
    for row, moment in enumerate(MOMENTS)
    for column, fault in enumerate(FAULTS)
    if fault in ("answer-lost", "silent") or (row + column) % 3 == 0
]


@pytest.mark.parametrize(
    ("moment", "fault"), PAIRS, ids=lambda value: value if isinstance(value, str) else value.__name__
)
def test_a_fault_that_passes_costs_time_alone(scene: Scene, moment: Callable[[Scene], None], fault: str) -> None:
    what = FAULTS[fault]
    scene.proxy.add(Fault(**{**vars(what), "on": MOMENTS[moment]}))
    moment(scene)
    assert scene.proxy.count(MOMENTS[moment]) >= min(what.times, 1)


@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: moment.__name__)
def test_a_network_that_is_lost_for_a_while_costs_time_alone(scene: Scene, moment: Callable[[Scene], None]) -> None:
    scene.proxy.cut()
    mending = threading.Timer(0.3, scene.proxy.mend)
    mending.start()
    began_s = time.monotonic()
    moment(scene)
    mending.join()
    assert time.monotonic() - began_s >= 0.3


# --- doubt ------------------------------------------------------------------------------------------------------------


def test_a_create_that_lands_after_its_second_try_began_was_ours(scene: Scene) -> None:
    """The first put arrives while the second is on its way, so that the second one finds the first."""
    late = Fault(kind="late", on="PUT .*/log/", seconds=0.8, times=1)
    later = Fault(kind="late", on="PUT .*/log/", seconds=0.42, times=1)
    scene.proxy.add(late, later)
    assert scene.store.create(f"{RUN}/log/00000004.json", b"mine")
    assert scene.proxy.count("PUT") == 2 and scene.direct.get(f"{RUN}/log/00000004.json") == b"mine"
    assert not scene.store.create(f"{RUN}/log/00000004.json", b"mine"), "without a doubt it is somebody else's"


def test_an_entry_that_landed_unseen_is_found_by_the_next_one(scene: Scene) -> None:
    """The put of a commit is carried out, and then the network is gone: the driver takes the checkpoint for lost."""
    log = RunLog(scene.impatient(), RUN)
    first, second = (checkpoint_path(step, scene.token) for step in (30, 40))
    digests = [scene.manifest(scene.direct, step, scene.files(step)) for step in (30, 40)]
    parent = scene.refs[-1].path
    lost = Fault(kind="lose_answer", on="PUT .*/log/0", times=1)
    scene.proxy.add(lost, Fault(kind="answer", status=500, on="GET .*/log/00000004"))
    with pytest.raises(StoreDown):
        log.commit(scene.token, CheckpointRef(step=30, path=first, manifest_sha256=digests[0], parent=parent), 3)
    scene.proxy.clear()
    log._store = scene.store  # which is as patient as a slow machine needs
    second_ref = CheckpointRef(step=40, path=second, manifest_sha256=digests[1], parent=parent)
    entry = log.commit(scene.token, second_ref, 3)
    assert scene.kinds() == ["acquire", "commit", "commit", "commit", "commit"] and entry.number == 5
    assert [item.step for item in entry.checkpoints] == [10, 20, 40], "one line of parents"
    delete_unreferenced(scene.direct, RUN, entry.checkpoints)
    assert newest_intact(scene.direct, RUN, entry.checkpoints) == (second_ref, [])


def test_a_conflict_about_a_write_that_came_to_nothing_is_no_lost_race(scene: Scene) -> None:
    conflict = "<Error><Code>ConditionalRequestConflict</Code></Error>"
    scene.proxy.add(Fault(kind="answer", status=409, body=conflict, on="PUT", times=2))
    assert scene.store.create("log/1", b"mine") and scene.direct.get("log/1") == b"mine"


def test_parts_that_were_put_together_unheard_are_written_again(scene: Scene) -> None:
    lost = Fault(kind="lose_answer", on="POST .*uploadId", times=1)
    gone = Fault(kind="answer", status=404, body="<Error><Code>NoSuchUpload</Code></Error>", on="POST .*up", times=1)
    scene.proxy.add(lost, gone)
    scene.store.put("large", LARGE)
    assert scene.direct.get("large") == LARGE


# --- for how long, and in what words ----------------------------------------------------------------------------------


def test_time_ends_the_tries_and_not_their_number(scene: Scene) -> None:
    scene.proxy.add(Fault(kind="answer", status=503, body=SLOW_DOWN, times=14))
    scene.store.put("a", b"1")
    assert scene.direct.get("a") == b"1"
    gaps_s = [after - before for before, after in itertools.pairwise(scene.proxy.times("PUT"))]
    assert len(gaps_s) == 14 and max(gaps_s) < 1.0, "bounded"
    assert max(gaps_s[5:]) > 3 * retry.FIRST_PAUSE_S, "growing"  # one of nine draws from 0 to LONGEST_PAUSE_S
    assert len({round(gap_s, 2) for gap_s in gaps_s}) > 4, "jittered"


def test_two_clients_do_not_pause_alike(clean: str, proxy: FaultyProxy) -> None:
    """The client's own first pause is fixed; ours differs from process to process."""
    first_s = []
    for _ in range(4):
        proxy.clear()
        proxy.add(Fault(kind="answer", status=503, body=SLOW_DOWN, times=1))
        through(proxy, f"{clean}/pauses", SHORT).put("a", b"1")
        first_s.append(proxy.times()[1] - proxy.times()[0])
    assert all(0.1 <= pause_s < 0.5 for pause_s in first_s) and max(first_s) - min(first_s) > 0.005


@pytest.mark.parametrize(
    ("status", "body", "said", "remedy"),
    [
        (403, SKEWED, "the clock of this machine is wrong", "set the clock"),
        (400, "<Error><Code>ExpiredToken</Code></Error>", "the credentials have expired", "renew them"),
        (507, "<Error><Code>XMinioStorageFull</Code></Error>", "no space left", "free space"),
    ],
)
def test_what_does_not_pass_is_told_as_such(scene: Scene, status: int, body: str, said: str, remedy: str) -> None:
    scene.proxy.add(Fault(kind="answer", status=status, body=body))
    quick = scene.impatient()
    for attempt in (lambda: quick.put("a", b"1"), lambda: quick.create("a", b"1"), lambda: quick.get("a")):
        with pytest.raises(StorageError, match=said) as caught:
            attempt()
        assert remedy in caught.value.remedy and not isinstance(caught.value, StoreDown)


@pytest.mark.parametrize(
    ("status", "said"), [(503, "throttles requests"), (429, "throttles requests"), (500, "HTTP status 500")]
)
def test_what_may_pass_is_a_kind_of_its_own(scene: Scene, status: int, said: str) -> None:
    scene.proxy.add(Fault(kind="answer", status=status))
    with pytest.raises(StoreDown, match=said) as caught:
        scene.impatient().put("a", b"1")
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), StoreDown)


def test_an_outage_is_told_once_when_it_begins_and_once_when_it_ends(scene: Scene) -> None:
    notes: list[str] = []
    told, back = threading.Event(), threading.Event()

    def note(text: str) -> None:
        notes.append(text)
        (back if "answers again" in text else told).set()

    heart = Heartbeat(scene.impatient(), RUN, scene.token, every_s=0.02, note=note)
    heart.start()
    while not scene.proxy.count("PUT .*/owner/"):
        time.sleep(0.01)
    scene.proxy.cut()
    assert told.wait(10) and heart.error is not None
    scene.proxy.mend()
    assert back.wait(10)
    heart.stop()
    assert len(notes) == 2
    assert "Training continues in memory" in notes[0] and ("be reached" in notes[0] or "was lost" in notes[0])
    assert notes[1].startswith("the store answers again, after ")


def test_a_run_that_cannot_be_given_back_is_over_all_the_same(scene: Scene) -> None:
    notes: list[str] = []
    run_store = RunStore(
        scene.impatient(), "other", job={}, keep=2, fresh=False,
        note=notes.append, begin=lambda token: None, tell=lambda: None,
    )  # fmt: skip
    run_store.acquire()
    assert run_store.chain() == ()
    scene.proxy.add(Fault(kind="answer", status=500))
    run_store.release(m.ReleaseLease(outcome="done", step=30))
    assert any(
        "the release of the run could not be written" in note and "No checkpoint is lost" in note for note in notes
    )
    scene.proxy.clear()
    assert RunLog(scene.direct, "other", dead=lambda owner: True).acquire(FAR, JOB).token == 2
