"""The store on a folder and in memory; tests/e2e/test_s3.py has the same on a real object store."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import obstore
import pytest
from obstore.exceptions import GenericError

from trainwright.core import retry
from trainwright.core.errors import StorageError, StoreDown
from trainwright.storage import object_store
from trainwright.storage.object_store import RetryPolicy, Store, open_store
from trainwright.storage.store_errors import MissingFile, classify_error, storage_error_for


@pytest.fixture(params=["folder", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    uri = str(tmp_path / "runs") if request.param == "folder" else f"memory://{uuid.uuid4().hex}"
    return open_store(uri)


def files_of(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_what_was_put_is_read_listed_and_deleted(store: Store) -> None:
    store.put("a/two", b"22")
    store.put("a/one", memoryview(b"1"))
    store.put("ab/three", b"")
    store.put("a/two", b"222")

    assert store.get("a/two") == b"222"
    assert store.size("a/two") == 3 and store.exists("ab/three") and not store.exists("a/four")
    assert list(store.list()) == [("a/one", 1), ("a/two", 3), ("ab/three", 0)]
    assert list(store.list("a")) == list(store.list("a/")) == [("a/one", 1), ("a/two", 3)]
    assert list(store.list("a", after="a/one")) == [("a/two", 3)]
    assert list(store.list("nothing")) == []
    assert store.folders() == ("a", "ab") and store.folders("a") == ()

    store.delete(["a/two", "a/four", "ab/three"])
    assert list(store.list()) == [("a/one", 1)]


def test_pieces_are_one_file_whatever_their_sizes(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "CHUNK_BYTES", 100)
    monkeypatch.setattr(object_store, "MIN_PIECE_BYTES", 10)
    for sizes in ((), (0, 5), (5, 60), (9, 9, 9, 200, 3), (250,), (10, 0, 101, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 99)):
        pieces = [bytes([number]) * size for number, size in enumerate(sizes, 65)]
        store.put("file", *(memoryview(piece) if len(piece) % 2 else piece for piece in pieces))
        assert store.get("file") == b"".join(pieces), sizes


def test_a_file_is_created_once(store: Store) -> None:
    assert store.create("log/1", b"first")
    assert not store.create("log/1", b"second")
    assert not store.create("log/1", b"first")
    assert store.get("log/1") == b"first"


def test_of_sixteen_threads_that_create_one_file_one_wins(store: Store) -> None:
    barrier = threading.Barrier(16)

    def create(number: int) -> bool:
        barrier.wait(10)
        return store.create("log/1", b"%d" % number)

    with ThreadPoolExecutor(16) as pool:
        won = list(pool.map(create, range(16)))
    assert won.count(True) == 1
    assert store.get("log/1") == b"%d" % won.index(True)


def test_a_missing_file_is_an_error_of_its_own(store: Store) -> None:
    with pytest.raises(MissingFile, match="no such file") as caught:
        store.get("run/nothing")
    assert store.uri_of("run/nothing") in str(caught.value)
    assert store.find("run/nothing") is None
    with pytest.raises(MissingFile):
        store.size("run/nothing")


@pytest.mark.parametrize("path", ["", "/a", "a/", "a//b", "../a", "a/../../b", "a/.", "a\\b", "a\nb", "a\0b"])
def test_no_path_leaves_the_store(store: Store, path: str) -> None:
    for attempt in (store.get, store.size, lambda p: store.put(p, b""), lambda p: store.create(p, b"")):
        with pytest.raises(StorageError, match="not inside the store"):
            attempt(path)
    with pytest.raises(StorageError, match="not inside the store"):
        store.delete([path])


def test_check_leaves_nothing_behind(store: Store) -> None:
    store.check()
    assert list(store.list()) == []


def test_check_refuses_a_store_that_overwrites_on_create(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    put = obstore.put
    monkeypatch.setattr(obstore, "put", lambda *args, mode=None, **more: put(*args, **more))
    monkeypatch.setattr(os, "link", os.rename)
    with pytest.raises(StorageError, match="did not happen exactly once"):
        store.check()


def test_a_deleted_folder_takes_the_rest_of_killed_writers_along(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.put("a/b/file", b"1")
    store.put("ab/file", b"1")
    (tmp_path / "a/b/shard#1").write_bytes(b"half")
    assert list(store.list("a")) == [("a/b/file", 1)]
    store.delete_folder("a")
    store.delete_folder("a")
    assert files_of(tmp_path) == ["ab/file"] and not (tmp_path / "a").exists()


# --- folders ----------------------------------------------------------------------------------------------------------


def test_reading_creates_no_folder_and_writing_does(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "new" / "runs"))
    assert list(store.list()) == [] and store.folders() == () and store.find("a") is None
    store.delete(["a"])
    assert not (tmp_path / "new").exists()
    store.put("a", b"1")
    assert (tmp_path / "new" / "runs" / "a").read_bytes() == b"1"


def test_a_relative_folder_is_taken_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_store("runs")
    monkeypatch.chdir("/")
    store.put("a", b"1")
    assert store.uri == str(tmp_path / "runs") == open_store(f"file://{tmp_path}/runs").uri
    assert (tmp_path / "runs" / "a").read_bytes() == b"1"


def test_a_store_pickles_as_its_uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(str(tmp_path))
    store.put("a", b"1")
    assert pickle.loads(pickle.dumps(store)).get("a") == b"1"

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key-of-mine")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-mine")
    remote = open_store("s3://bucket/prefix/")
    assert remote.uri == "s3://bucket/prefix"
    assert b"of-mine" not in pickle.dumps(remote) and "of-mine" not in repr(remote)


def test_a_folder_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for uri in (tmp_path / "file", tmp_path / "file" / "runs"):
        store = open_store(str(uri))
        for attempt in (store.check, lambda s=store: s.put("a", b""), lambda s=store: s.create("a", b"")):
            with pytest.raises(StorageError, match="is a file, not a folder") as caught:
                attempt()
            assert str(uri) in caught.value.where and "storage=" in caught.value.remedy


@pytest.mark.parametrize(
    ("code", "said"), [(28, "no space left"), (122, "no space left"), (30, "read-only"), (13, "permission denied")]
)
def test_a_full_or_forbidden_disk_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, said: str
) -> None:
    store = open_store(str(tmp_path))

    def fail(*_: object, **__: object) -> None:
        raise GenericError(f"Generic LocalFileSystem error: Unable to copy data to file: x (os error {code})")

    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(obstore, "put", fail)
    monkeypatch.setattr(os, "link", refuse)
    for attempt in (lambda: store.put("run/a", b"1"), lambda: store.create("run/a", b"1"), store.check):
        with pytest.raises(StorageError, match=said) as caught:
            attempt()
        assert str(tmp_path) in caught.value.where and caught.value.remedy


KILLED = """
import sys
from trainwright.storage.object_store import open_store
store, data = open_store(sys.argv[1]), [b"a" * 2_000_000, b"b" * 2_000_000]
store.put("file", data[0])
print("ready", flush=True)
while True:
    for item in data:
        store.put("file", item)
"""


def test_a_killed_writer_leaves_no_part_of_a_file(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout and process.stdout.readline() == "ready\n"
    store = open_store(str(tmp_path))
    reads = [store.get("file") for _ in range(20)]
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=10)
    for data in [*reads, store.get("file")]:
        assert data in (b"a" * 2_000_000, b"b" * 2_000_000)
    assert list(store.list()) == [("file", 2_000_000)]


# --- doubt ------------------------------------------------------------------------------------------------------------


def flaky(monkeypatch: pytest.MonkeyPatch, *, lands: bool, failures: int, before: bytes | None = None) -> None:
    """The next puts fail with a timeout, after the write or without it."""
    put, left = obstore.put, [failures]

    def fail(store: object, path: str, data: bytes, **more: object) -> object:
        if not left[0]:
            return put(store, path, data, **more)
        left[0] -= 1
        if before is not None:
            put(store, path, before)
        elif lands:
            put(store, path, data, **more)
        raise GenericError("Generic S3 error: ... kind: Timeout")

    monkeypatch.setattr(obstore, "put", fail)


@pytest.mark.parametrize("lands", [True, False])
def test_a_create_that_timed_out_is_settled_by_reading(monkeypatch: pytest.MonkeyPatch, lands: bool) -> None:
    store = open_store(f"memory://{uuid.uuid4().hex}")
    flaky(monkeypatch, lands=lands, failures=1)
    assert store.create("log/1", b"mine")
    assert store.get("log/1") == b"mine"
    assert not store.create("log/1", b"mine")


def test_a_create_that_timed_out_and_lost_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(f"memory://{uuid.uuid4().hex}")
    flaky(monkeypatch, lands=False, failures=1, before=b"theirs")
    assert not store.create("log/1", b"mine")
    assert store.get("log/1") == b"theirs"


@pytest.mark.parametrize("code", [5, 116, 110, 107], ids=["io", "stale", "timed-out", "not-connected"])
@pytest.mark.parametrize("lands", [True, False])
def test_a_network_folder_that_stumbles_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, lands: bool
) -> None:
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.01)
    store = open_store(str(tmp_path))
    sync, left = os.fsync, [3]

    def stumble(number: int) -> None:
        left[0] -= 1
        if left[0] >= 0:
            if not lands:
                (tmp_path / "a").unlink(missing_ok=True)
            raise OSError(code, os.strerror(code))
        sync(number)

    monkeypatch.setattr(os, "fsync", stumble)
    assert store.create("a", b"mine") and store.get("a") == b"mine"
    left[0] = 3
    store.put("a", b"mine still")
    assert store.get("a") == b"mine still"
    left[0] = 10**6
    with pytest.raises(StoreDown, match="network folder does not answer"):
        Store(str(tmp_path), RetryPolicy(total_s=0.1)).put("a", b"1")


# --- words ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("", "empty"),
        ("ftp://host/x", "unknown storage scheme ftp://"),
        ("s4://bucket/x", "did you mean 's3'"),
        ("s3:/bucket/x", "write s3://bucket/x"),
        ("s3//bucket/x", "write s3://bucket/x"),
        ("s3//bucket:x", "write s3://bucket:x"),
        ("file:/data", "write /data"),
        ("s3://", "takes a bucket"),
        ("s3:///prefix", "takes a bucket"),
        ("s3://key:hidden@bucket/x", "takes a bucket"),
        ("az://bucket/x?sig=hidden", "takes a bucket"),
        ("gs://bucket/../x", "'..'"),
    ],
)
def test_a_uri_that_names_no_store_is_refused(uri: str, said: str) -> None:
    with pytest.raises(StorageError) as caught:
        open_store(uri)
    assert said in str(caught.value) and caught.value.remedy and "hidden" not in str(caught.value)


@pytest.mark.parametrize("address", ["garbage", "ftp://host", "http://", "http://user:hidden@host:1"])
def test_an_endpoint_that_is_no_address_is_refused(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", address)
    with pytest.raises(StorageError, match="AWS_ENDPOINT_URL_S3 is not a valid endpoint address") as caught:
        open_store("s3://bucket/x")
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("status: 403 Forbidden <Code>InvalidAccessKeyId</Code>", "refuses the credentials"),
        ("Error performing PUT http://169.254.169.254/latest/api/token", "no credentials were found"),
        ("Error performing PUT: 404 <Code>NoSuchBucket</Code>", "bucket does not exist"),
        ("Received redirect without LOCATION, this normally indicates an incorrectly configured region", "region"),
        ("RetryError kind: Connect dns error", "cannot be reached"),
        ("RetryError kind: Timeout", "did not answer in time"),
        ("status: 507 <Code>XMinioStorageFull</Code>", "no space left"),
    ],
)
def test_causes_are_named(text: str, said: str) -> None:
    error = storage_error_for(GenericError(f"Generic S3 error: {text}"), doing="cannot write", where="s3://bucket/x")
    assert said in error.what and error.where == "s3://bucket/x" and error.remedy


def test_an_unknown_cause_is_shown_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "hidden-token")
    raw = GenericError(
        "Generic S3 error: odd hidden-token http://me:hidden-pw@host/x <Body>hidden</Body>\nDebug hidden"
    )
    error = storage_error_for(raw, doing="cannot write", where="s3://bucket/x")
    assert "odd ***" in error.what and "hidden" not in str(error)
    assert not classify_error(raw).certain


def test_an_error_of_the_system_keeps_its_number() -> None:
    assert "no space left" in storage_error_for(OSError(28, os.strerror(28)), doing="cannot write", where="x").what


def test_a_folder_whose_file_system_is_gone_is_not_made_again_beneath(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "mounted" / "runs"
    store = Store(str(folder), policy=RetryPolicy(total_s=0.2))
    store.put("a", b"1")
    shutil.rmtree(folder)
    assert store.find("a") is None and [*store.list()] == [] and not folder.exists(), "reading makes no folder"
    store.put("a", b"2")
    assert store.get("a") == b"2", "somebody deleted it"
    shutil.rmtree(folder)
    monkeypatch.setattr(store._backend, "_device", -1)
    with pytest.raises(StoreDown):
        store.put("a", b"3")
    assert not folder.exists()


@pytest.mark.parametrize("number", [errno.EACCES, errno.EINVAL])
def test_a_folder_above_that_cannot_be_forced_to_disk_is_no_reason_to_refuse(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One may enter `/scratch` of many clusters, and not list it."""
    force, refused = object_store._fsync, list[Path]()

    def fsync(place: Path) -> None:
        if place == tmp_path:
            refused.append(place)
            raise OSError(number, os.strerror(number))
        force(place)

    monkeypatch.setattr(object_store, "_fsync", fsync)
    store = open_store(str(tmp_path / "own"))
    store.put("a", b"1")
    store.create("b", b"2")
    assert store.get("a") + store.get("b") == b"12" and refused
