"""The store against a real S3 server; the log's tests in tests/unit/test_run_log.py run against it too."""

from __future__ import annotations

import os
import pickle
import socket
import threading
import urllib.parse
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress

import pytest

from tests.support.s3_server import KEY, SECRET, S3Bucket
from trainwright.core.engine import CheckpointManifest, CheckpointRef, checkpoint_path
from trainwright.core.errors import StorageError
from trainwright.storage.checkpoints import CheckpointWriter, delete_unreferenced, newest_intact, write_manifest
from trainwright.storage.object_store import RetryPolicy, Store, open_store
from trainwright.storage.run_log import Owner, RunLog
from trainwright.storage.store_errors import MissingFile


@pytest.fixture
def store(s3_bucket: S3Bucket) -> Store:
    return open_store(s3_bucket.uri)


def test_files_below_a_prefix(store: Store, s3_bucket: S3Bucket) -> None:
    store.check()
    store.put("run/a", b"1")
    store.put("run/b", memoryview(b"22"))
    store.put("runs/c", b"333")
    assert list(store.list("run")) == [("run/a", 1), ("run/b", 2)]
    assert list(store.list("run", after="run/a")) == [("run/b", 2)]
    assert store.folders() == ("run", "runs")
    bucket = open_store(s3_bucket.uri.rpartition("/")[0])
    assert [path for path, _ in bucket.list()] == ["runs/run/a", "runs/run/b", "runs/runs/c"]
    store.delete(["run/a", "run/nothing"])
    assert not store.exists("run/a")
    store.delete_folder("run")
    assert list(store.list("run")) == [] and store.get("runs/c") == b"333"
    with pytest.raises(MissingFile):
        store.get("run/a")


def test_a_file_of_several_parts(store: Store) -> None:
    data = os.urandom(20 << 20)
    store.put("large", memoryview(data))
    assert store.size("large") == len(data) and store.get("large") == data


def test_of_sixteen_that_create_one_file_one_wins(store: Store) -> None:
    barrier = threading.Barrier(16)

    def create(number: int) -> bool:
        barrier.wait(10)
        return store.create("log/1", b"%d" % number)

    with ThreadPoolExecutor(16) as pool:
        won = list(pool.map(create, range(16)))
    assert won.count(True) == 1 and store.get("log/1") == b"%d" % won.index(True)


def test_a_checkpoint_is_committed_read_and_retained(store: Store) -> None:
    log = RunLog(store, "run")
    token = log.acquire(Owner.here(), {}).token
    refs: list[CheckpointRef] = []
    for step in (10, 20, 30):
        path = checkpoint_path(step, token)
        writer = CheckpointWriter(store, "run", path)
        writer.write("shard", b"%d" % step)
        manifest = CheckpointManifest(step=step, files=writer.entries)
        digest = write_manifest(store, "run", path, manifest)
        parent = refs[-1].path if refs else ""
        refs.append(CheckpointRef(step=step, path=path, manifest_sha256=digest, parent=parent))
        delete_unreferenced(store, "run", log.commit(token, refs[-1], 2).checkpoints)
    left = {path.rpartition("/")[0] for path, _ in store.list("run/checkpoints")}
    assert left == {f"run/{ref.path}" for ref in refs[1:]}
    store.put(f"run/{refs[2].path}/shard", b"31")
    head = RunLog(open_store(store.uri), "run").head()
    assert head is not None
    ref, notes = newest_intact(store, "run", head.checkpoints)
    assert ref == refs[1] and "step 30 is skipped" in notes[0]


# --- what can be wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"])
def test_wrong_credentials_are_refused(s3_bucket: S3Bucket, monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    monkeypatch.setenv(wrong, "wrong-and-secret")
    store = open_store(s3_bucket.uri)
    for attempt in (store.check, lambda: store.get("a"), lambda: list(store.list())):
        with pytest.raises(StorageError, match="refuses the credentials") as caught:
            attempt()
        said = f"{caught.value}{pickle.dumps(caught.value)!r}"
        assert s3_bucket.uri in said and "access key" in caught.value.remedy
        assert not any(secret in said for secret in ("wrong-and-secret", SECRET, KEY))
        assert caught.value.__suppress_context__


def test_a_missing_bucket_is_named(s3_bucket: S3Bucket) -> None:
    store = open_store(f"s3://missing-{uuid.uuid4().hex[:8]}/runs")
    for attempt in (store.check, lambda: store.get("a"), lambda: store.put("a", b""), lambda: list(store.list())):
        with pytest.raises(StorageError, match="bucket does not exist"):
            attempt()


def test_another_process_opens_a_pickled_store_with_its_own_credentials(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("a", b"1")
    pickled = pickle.dumps(store)
    assert SECRET.encode() not in pickled and KEY.encode() not in pickled
    assert pickle.loads(pickled).get("a") == b"1"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(StorageError, match="refuses the credentials"):
        pickle.loads(pickled).get("a")


def test_nobody_at_the_address(s3_bucket: S3Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: every connection is refused
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(StorageError, match="cannot be reached") as caught:
            open_store(s3_bucket.uri).check()
    assert os.environ["AWS_ENDPOINT_URL"] in caught.value.where and "AWS_ENDPOINT_URL" in caught.value.remedy


def test_a_server_that_says_nothing(s3_bucket: S3Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        store = Store(s3_bucket.uri, RetryPolicy(connect_s=1, silence_s=0.3, request_s=0.3, total_s=0.5))
        with pytest.raises(StorageError, match="did not answer in time"):
            store.create("a", b"1")


# --- answers that are lost --------------------------------------------------------------------------------------------


@contextmanager
def cutting_proxy(endpoint: str, cuts: int) -> Iterator[str]:
    """Passes requests on to a server; the first `cuts` connections are cut when the server has answered."""
    host = urllib.parse.urlsplit(endpoint)
    left = [cuts]

    def pump(source: socket.socket, target: socket.socket, answers: bool) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if answers and left[0]:
                    left[0] -= 1
                    break
                target.sendall(data)
        for item in (source, target):
            with suppress(OSError):
                item.shutdown(socket.SHUT_RDWR)

    def serve(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                client = listener.accept()[0]
                server = socket.create_connection((host.hostname or "", host.port or 0))
                sockets.extend((client, server))
                for ends in ((client, server, False), (server, client, True)):
                    threads.append(threading.Thread(target=pump, args=ends))
                    threads[-1].start()

    sockets: list[socket.socket] = []
    threads: list[threading.Thread] = []
    listener = socket.create_server(("127.0.0.1", 0))
    accepting = threading.Thread(target=serve, args=(listener,))
    accepting.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        accepting.join(10)
        listener.close()
        for item in sockets:
            with suppress(OSError):
                item.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(10)
        for item in sockets:
            item.close()


def test_a_create_whose_answer_was_lost_was_ours(
    store: Store, s3_bucket: S3Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cutting_proxy(s3_bucket.server.endpoint, cuts=1) as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        through = open_store(s3_bucket.uri)
        assert through.create("log/1", b"mine")
        assert store.get("log/1") == b"mine"
        assert not through.create("log/1", b"mine")
    with cutting_proxy(s3_bucket.server.endpoint, cuts=1) as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        assert not open_store(s3_bucket.uri).create("log/1", b"theirs")
    assert store.get("log/1") == b"mine"
