"""Checkpoints: whole ones round-trip, damaged ones are passed over with a note, old ones are deleted."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.core.engine import CheckpointFile, CheckpointManifest, CheckpointRef, checkpoint_path
from trainwright.core.errors import CheckpointError, DamagedCheckpoint, StorageError, StoreDown
from trainwright.storage.checkpoints import (
    MANIFEST,
    CheckpointReader,
    CheckpointWriter,
    decode_manifest,
    delete_unreferenced,
    encode_manifest,
    newest_intact,
    read_manifest,
    verify,
    write_manifest,
)
from trainwright.storage.object_store import Store, open_store

RUN = "digits"
FILES = {"shard-0.bin": b"parameters" * 100, "optimizer/shard-0.bin": b"moments" * 50, "empty": b""}


@pytest.fixture(params=["folder", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return open_store(str(tmp_path) if request.param == "folder" else f"memory://{uuid.uuid4().hex}")


def save(store: Store, step: int, token: int = 1, parent: str = "") -> CheckpointRef:
    path = checkpoint_path(step, token)
    writer = CheckpointWriter(store, RUN, path)
    for name, data in FILES.items():
        writer.write(name, data + b"%d" % step)
    manifest = CheckpointManifest(step=step, files=writer.entries)
    digest = write_manifest(store, RUN, path, manifest)
    return CheckpointRef(step=step, path=path, manifest_sha256=digest, parent=parent)


def chain(store: Store, *steps: int, token: int = 1) -> list[CheckpointRef]:
    refs: list[CheckpointRef] = []
    for step in steps:
        refs.append(save(store, step, token, refs[-1].path if refs else ""))
    return refs


def folders(store: Store) -> set[str]:
    return {path.split("/")[2] for path, _ in store.list(f"{RUN}/checkpoints")}


def test_names_sort_by_step() -> None:
    assert checkpoint_path(1200, 17) == "checkpoints/00001200-17"


def test_what_was_saved_is_read_back(store: Store) -> None:
    ref = save(store, 7)
    manifest = read_manifest(store, RUN, ref)
    assert manifest.step == 7
    reader = CheckpointReader(store, RUN, ref, manifest)
    assert set(reader.names()) == set(FILES)
    assert {name: reader.read(name) for name in reader.names()} == {name: data + b"7" for name, data in FILES.items()}
    assert verify(store, RUN, ref, checksums=True) == manifest


def test_arrays_are_written_as_their_bytes(store: Store) -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    writer = CheckpointWriter(store, RUN, "checkpoints/00000001-1")
    writer.write("rows", memoryview(array))
    writer.write("columns", memoryview(array.T))
    assert store.get(f"{RUN}/checkpoints/00000001-1/rows") == array.tobytes()
    assert store.get(f"{RUN}/checkpoints/00000001-1/columns") == array.T.tobytes()
    assert [(entry.name, entry.size_bytes) for entry in writer.entries] == [("columns", 48), ("rows", 48)]


def test_threads_may_write_one_checkpoint(store: Store) -> None:
    writer = CheckpointWriter(store, RUN, "checkpoints/00000001-1")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: writer.write(f"shard-{number}", b"%d" % number), range(32)))
    assert sorted(entry.name for entry in writer.entries) == sorted(f"shard-{number}" for number in range(32))


@pytest.mark.parametrize("name", ["../other", "/etc/x", "a//b", "", "a\\b"])
def test_no_file_leaves_the_checkpoint(store: Store, name: str) -> None:
    writer = CheckpointWriter(store, RUN, "checkpoints/00000001-1")
    with pytest.raises(StorageError, match="not inside the store"):
        writer.write(name, b"1")
    assert list(store.list()) == []


@pytest.mark.parametrize("name", ["shard", MANIFEST])
def test_a_file_name_is_used_once(store: Store, name: str) -> None:
    writer = CheckpointWriter(store, RUN, "checkpoints/00000001-1")
    writer.write("shard", b"1")
    with pytest.raises(ValueError, match="already"):
        writer.write(name, b"2")
    assert store.get(f"{RUN}/checkpoints/00000001-1/shard") == b"1"


def test_a_reader_knows_its_files(store: Store) -> None:
    ref = save(store, 7)
    reader = CheckpointReader(store, RUN, ref, read_manifest(store, RUN, ref))
    with pytest.raises(CheckpointError, match=r"no file 'other', only .*shard-0\.bin"):
        reader.read("other")


@settings(max_examples=40)
@given(
    st.builds(
        CheckpointManifest,
        step=st.integers(0),
        files=st.lists(
            st.builds(CheckpointFile, name=st.text(), size_bytes=st.integers(0), sha256=st.just("0" * 64))
        ).map(tuple),
    )
)
def test_a_manifest_round_trips(manifest: CheckpointManifest) -> None:
    assert decode_manifest(encode_manifest(manifest)) == manifest


# --- damage -----------------------------------------------------------------------------------------------------------

Damage = Callable[[bytes], bytes]
DAMAGES: dict[str, tuple[str, Damage | None, str]] = {
    "torn manifest": (MANIFEST, lambda data: data[: len(data) // 2], "manifest is torn or altered"),
    "empty manifest": (MANIFEST, lambda data: b"", "manifest is torn or altered"),
    "altered manifest": (MANIFEST, lambda data: data.replace(b'"step": 30', b'"step": 31'), "manifest is torn"),
    "missing manifest": (MANIFEST, None, r"MANIFEST\.json is missing"),
    "truncated shard": ("shard-0.bin", lambda data: data[:-1], r"shard-0\.bin is torn: it has 1001 bytes, not 1002"),
    "grown shard": ("shard-0.bin", lambda data: data + b"0", r"shard-0\.bin is torn: it has 1003 bytes"),
    "altered shard": ("shard-0.bin", lambda data: b"q" + data[1:], r"shard-0\.bin is altered"),
    "missing shard": ("optimizer/shard-0.bin", None, r"shard-0\.bin is missing"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_with_a_note(store: Store, kind: str) -> None:
    name, damage, said = DAMAGES[kind]
    refs = chain(store, 10, 20, 30)
    place = f"{RUN}/{refs[-1].path}/{name}"
    if damage is None:
        store.delete([place])
    else:
        before = store.get(place)
        store.put(place, damage(before))
        assert store.get(place) != before

    with pytest.raises(CheckpointError, match=said) as caught:
        verify(store, RUN, refs[-1], checksums=True)
    assert caught.value.where == store.uri_of(place) and caught.value.remedy
    ref, notes = newest_intact(store, RUN, refs)
    assert ref == refs[1]
    assert len(notes) == 1 and "step 30 is skipped" in notes[0] and name.rpartition("/")[2] in notes[0]


def test_a_manifest_torn_at_any_byte_costs_its_checkpoint_and_no_more() -> None:
    """Or filled with zeros from there on, as file systems leave it after a power cut."""
    store = open_store(f"memory://{uuid.uuid4().hex}")
    refs = chain(store, 10, 20)
    place = f"{RUN}/{refs[-1].path}/{MANIFEST}"
    whole = store.get(place)
    for length in range(len(whole)):
        for left in (whole[:length], whole[:length].ljust(len(whole), b"\0")):
            store.put(place, left)
            ref, notes = newest_intact(store, RUN, refs, checksums=False)
            assert ref == refs[0] and "step 20 is skipped: the manifest is torn" in notes[0]


@pytest.mark.parametrize("kind", ["truncated shard", "altered shard", "missing shard"])
def test_a_reader_refuses_a_damaged_file(store: Store, kind: str) -> None:
    name, damage, said = DAMAGES[kind]
    ref = save(store, 30)
    reader = CheckpointReader(store, RUN, ref, read_manifest(store, RUN, ref))
    place = f"{RUN}/{ref.path}/{name}"
    if damage is None:
        store.delete([place])
    else:
        store.put(place, damage(store.get(place)))
    with pytest.raises(CheckpointError, match=said):
        reader.read(name)
    assert reader.read("empty") == b"30"


def test_a_manifest_of_another_version_is_no_crash(store: Store) -> None:
    ref = save(store, 30)
    place = f"{RUN}/{ref.path}/{MANIFEST}"
    for data in (b'{"format": 2}', b"[]", b'{"format": 1}', b'{"format": 1, "cursor": {"lanes": 1}}'):
        store.put(place, data)
        digest = hashlib.sha256(data).hexdigest()
        with pytest.raises(CheckpointError, match="another version"):
            read_manifest(store, RUN, CheckpointRef(step=30, path=ref.path, manifest_sha256=digest))


def test_several_damaged_ones_are_each_noted(store: Store) -> None:
    refs = chain(store, 10, 20, 30)
    store.delete([f"{RUN}/{refs[2].path}/{MANIFEST}", f"{RUN}/{refs[1].path}/empty"])
    ref, notes = newest_intact(store, RUN, refs)
    assert ref == refs[0] and len(notes) == 2 and "step 30" in notes[0] and "step 20" in notes[1]
    store.delete([f"{RUN}/{refs[0].path}/empty"])
    assert newest_intact(store, RUN, refs) == (None, [*notes, newest_intact(store, RUN, refs[:1])[1][0]])
    assert newest_intact(store, RUN, ()) == (None, [])


def test_sizes_alone_are_checked_without_checksums(store: Store) -> None:
    ref = save(store, 30)
    place = f"{RUN}/{ref.path}/shard-0.bin"
    store.put(place, store.get(place)[::-1])
    assert verify(store, RUN, ref).step == 30
    with pytest.raises(CheckpointError, match="altered"):
        verify(store, RUN, ref, checksums=True)


def test_a_store_that_fails_damages_no_checkpoint(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    refs = chain(store, 10, 20)

    def fail(*_: object) -> bytes:
        raise StorageError("the store cannot be reached")

    monkeypatch.setattr(Store, "get", fail)
    with pytest.raises(StorageError, match="cannot be reached") as caught:
        newest_intact(store, RUN, refs)
    assert not isinstance(caught.value, CheckpointError)


# --- retention --------------------------------------------------------------------------------------------------------


def test_what_the_log_names_is_kept_and_the_rest_deleted(store: Store) -> None:
    refs = chain(store, 10, 20, 30, 40)
    store.put(f"{RUN}/log/00000001.json", b"{}")
    deleted = delete_unreferenced(store, RUN, refs[2:])
    assert set(deleted) == {refs[0].path, refs[1].path}
    assert folders(store) == {"00000030-1", "00000040-1"}
    assert delete_unreferenced(store, RUN, refs[2:]) == ()
    assert newest_intact(store, RUN, refs[2:]) == (refs[3], []) and store.exists(f"{RUN}/log/00000001.json")


def test_orphans_of_dead_drivers_are_deleted(store: Store) -> None:
    old = save(store, 10, token=1)
    store.put(f"{RUN}/checkpoints/00000020-1/shard-0.bin", b"of a driver that died")
    store.put(f"{RUN}/checkpoints/00000015-4/shard-0.bin", b"of an upload that was given up")
    new = save(store, 18, token=4, parent=old.path)
    delete_unreferenced(store, RUN, [old, new])
    assert folders(store) == {"00000010-1", "00000018-4"}


def test_uploads_under_way_are_left(store: Store) -> None:
    new = save(store, 20, token=4)
    for path in ("00000030-4", "00000005-9", "00000011-4"):
        store.put(f"{RUN}/checkpoints/{path}/shard-0.bin", b"1")
    delete_unreferenced(store, RUN, [new])
    assert folders(store) == {"00000020-4", "00000030-4", "00000005-9"}


def test_nothing_named_deletes_nothing(store: Store) -> None:
    save(store, 20)
    assert delete_unreferenced(store, RUN, []) == () and folders(store) == {"00000020-1"}


def test_files_of_others_are_left(store: Store) -> None:
    refs = chain(store, 10, 20)
    store.put(f"{RUN}/checkpoints/notes/README", b"mine")
    delete_unreferenced(store, RUN, refs[1:])
    assert folders(store) == {"00000020-1", "notes"}


def test_no_folder_of_a_deleted_checkpoint_stays(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    refs = chain(store, 10, 20)
    (tmp_path / RUN / refs[0].path / "shard-1.bin#1").write_bytes(b"half a file of a killed writer")
    delete_unreferenced(store, RUN, refs[1:])
    assert [path.name for path in (tmp_path / RUN / "checkpoints").iterdir()] == ["00000020-1"]


@pytest.mark.parametrize("down", [False, True])
def test_a_full_store_gets_back_what_a_checkpoint_took(
    store: Store, monkeypatch: pytest.MonkeyPatch, down: bool
) -> None:
    """One that is down does not: it would take no deletions either."""
    kept = save(store, 10)
    put = Store.put

    def fail(self: Store, path: str, data: bytes, **more: bool) -> None:
        if path.endswith("second"):
            raise (StoreDown if down else StorageError)("cannot write")
        put(self, path, data, **more)

    monkeypatch.setattr(Store, "put", fail)
    writer = CheckpointWriter(store, RUN, checkpoint_path(20, 1))
    writer.write("first", b"1")
    with pytest.raises(StorageError, match="cannot write"):
        writer.write("second", b"2")
    assert store.exists(f"{RUN}/{checkpoint_path(20, 1)}/first") is down
    verify(store, RUN, kept, checksums=True)


# --- reading ----------------------------------------------------------------------------------------------------------

MIB = 1 << 20


def large(store: Store, step: int, files: dict[str, bytes]) -> CheckpointRef:
    writer = CheckpointWriter(store, RUN, checkpoint_path(step, 1))
    for name, data in files.items():
        writer.write(name, data)
    digest = write_manifest(store, RUN, checkpoint_path(step, 1), CheckpointManifest(step=step, files=writer.entries))
    return CheckpointRef(step=step, path=checkpoint_path(step, 1), manifest_sha256=digest)


def test_a_large_file_is_read_in_portions(store: Store) -> None:
    data = np.random.default_rng(0).bytes(40 * MIB + 7)
    ref = large(store, 10, {"model": data})
    portions = list(store.stream(f"{RUN}/{ref.path}/model"))
    assert [len(portion) for portion in portions] == [16 * MIB, 16 * MIB, 8 * MIB + 7]
    assert CheckpointReader(store, RUN, ref, read_manifest(store, RUN, ref)).read("model") == data
    for damaged, said in (
        (data[:-1], "torn: it has 41943046 bytes"),
        (data + b"1", "is torn"),
        (data[::-1], "altered"),
    ):
        store.put(f"{RUN}/{ref.path}/model", damaged)
        for check in (lambda reader: reader.read("model"), lambda reader: reader.verify("model")):
            with pytest.raises(DamagedCheckpoint, match=said):
                check(CheckpointReader(store, RUN, ref, read_manifest(store, RUN, ref)))
    store.delete([f"{RUN}/{ref.path}/model"])
    with pytest.raises(DamagedCheckpoint, match="missing"):
        CheckpointReader(store, RUN, ref, read_manifest(store, RUN, ref)).read("model")


_MEASURE = """
import resource, sys
from trainwright.storage.checkpoints import CheckpointReader, read_manifest, verify
from trainwright.core.engine import CheckpointRef
from trainwright.storage.object_store import open_store
store, ref = open_store(sys.argv[1]), CheckpointRef(step=10, path=sys.argv[2], manifest_sha256=sys.argv[3])
verify(store, "digits", ref)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
if sys.argv[4] == "verify":
    verify(store, "digits", ref, checksums=True)
else:
    CheckpointReader(store, "digits", ref, read_manifest(store, "digits", ref)).read("model")
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_memory_is_bounded(tmp_path: Path) -> None:
    """Of 320 MiB: verifying takes what is read ahead, reading the file once and that."""
    ref = large(open_store(str(tmp_path)), 10, {"model": bytes(320 * MIB)})
    arguments = [sys.executable, "-c", _MEASURE, str(tmp_path), ref.path, ref.manifest_sha256]
    for what, most_mib in (("verify", 160), ("read", 420)):
        done = subprocess.run([*arguments, what], check=True, capture_output=True, text=True, timeout=120)
        assert int(done.stdout) <= most_mib, what


def test_inference_reads_no_optimizer(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    refs, read = chain(store, 10, 20), list[str]()
    store.put(f"{RUN}/{refs[1].path}/optimizer/shard-0.bin", b"moments" * 50 + b"21")  # altered, of the same size
    get = Store.get
    monkeypatch.setattr(Store, "get", lambda self, path: read.append(path) or get(self, path))
    assert newest_intact(store, RUN, refs, weights_only=True) == (refs[1], [])
    assert not [path for path in read if "optimizer" in path] and len(read) == 3
    assert newest_intact(store, RUN, refs)[0] == refs[0]
    read.clear()
    assert newest_intact(store, RUN, refs, checksums=False) == (refs[1], []) and len(read) == 1
