"""TFRecord as a source: what TensorFlow writes is read without it, and every damage is found."""

from __future__ import annotations

import struct
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tests.support.record_files import field, message
from trainwright.core.errors import DataError
from trainwright.core.tfrecord_framing import frame, unframe
from trainwright.datasets import tfrecord
from trainwright.datasets.data_source import Field

ROWS = 5000


def row(number: int) -> dict[str, list[Any]]:
    """Features of a row; text in latin-1 stands for bytes."""
    return {
        "label": [number * (-1) ** number * 10**10],
        "score": [number / 4],
        "image": ["".join(map(chr, [number % 256, 0, 255, 0] * (number % 9)))],
        "box": [0.5, float(number), -1.0],
        "shape": [28, number],
        "ids": [(-1) ** i * (number << 7 * i) for i in range(1 + number % 8)],
        "words": ["a\0"] * (1 + number % 2),
        "pair": ["x\0", str(number)],
    }


def example(features: dict[str, list[Any]]) -> bytes:
    """What TensorFlow makes of features."""
    made = {}
    for name, value in features.items():
        if isinstance(value[0], str):
            content = tf.train.BytesList(value=[each.encode("latin-1") for each in value])
            made[name] = tf.train.Feature(bytes_list=content)
        elif isinstance(value[0], float):
            made[name] = tf.train.Feature(float_list=tf.train.FloatList(value=value))
        else:
            made[name] = tf.train.Feature(int64_list=tf.train.Int64List(value=value))
    return tf.train.Example(features=tf.train.Features(feature=made)).SerializeToString()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What TensorFlow writes, plain and compressed."""
    folder = tmp_path_factory.mktemp("tfrecord")
    records = [example(row(number)) for number in range(ROWS)]
    for name, options in (("a.tfrecord", None), ("b.tfrecord.gz", "GZIP")):
        with tf.io.TFRecordWriter(str(folder / name), options=options) as file:
            for record in records:
                file.write(record)
    return folder


@pytest.mark.parametrize("name", ["a.tfrecord", "b.tfrecord.gz"])
def test_what_tensorflow_writes_is_read_back_in_any_order(files: Path, name: str) -> None:
    data = tfrecord(files / name)
    index = data.index()
    assert [group.rows for group in index.groups] == ([4096, 904] if name == "a.tfrecord" else [ROWS])
    assert index.schema == {
        "label": Field(np.dtype(np.int64), ()),
        "score": Field(np.dtype(np.float32), ()),
        "image": Field(np.dtype(object), ()),
        "box": Field(np.dtype(np.float32), (3,)),
        "shape": Field(np.dtype(np.int64), (2,)),
        "ids": Field(np.dtype(object), ()),
        "words": Field(np.dtype(object), ()),
        "pair": Field(np.dtype(object), (2,)),
    }
    rows = np.random.default_rng(0).permutation(ROWS)[:300].tolist()
    read = data.read(index, rows)
    for place, number in enumerate(rows):
        expected = row(number)
        assert read["label"][place] == expected["label"][0]
        assert read["image"][place] == expected["image"][0].encode("latin-1")
        assert read["ids"][place].tolist() == expected["ids"] and read["ids"][place].dtype == np.int64
        assert read["words"][place] == [word.encode() for word in expected["words"]]
        assert read["pair"][place].tolist() == [word.encode() for word in expected["pair"]]
    np.testing.assert_array_equal(read["score"], np.float32([row(number)["score"][0] for number in rows]))
    np.testing.assert_array_equal(read["box"], np.float32([row(number)["box"] for number in rows]))
    assert read["shape"].tolist() == [row(number)["shape"] for number in rows]


def test_columns_and_ranges(files: Path) -> None:
    data = tfrecord(files / "a.tfrecord", columns=["label"])
    index = data.index()
    assert list(index.schema) == ["label"] and index.groups[1].stop == (files / "a.tfrecord").stat().st_size
    with pytest.raises(DataError, match="no column 'lable'") as caught:
        tfrecord(files / "a.tfrecord", columns=["lable"]).index()
    assert caught.value.remedy == "did you mean 'label'?"


@pytest.mark.parametrize(("byte", "what"), [(3, "length"), (9, "its sum"), (40, "data"), (-2, "sum of the data")])
def test_a_bit_that_flipped_is_found_when_indexed_and_when_read(files: Path, tmp_path: Path, byte: int, what: str):
    path = tmp_path / "a.tfrecord"
    content = (files / "a.tfrecord").read_bytes()
    lengths, at = [], 0
    while at < len(content):
        lengths.append(struct.unpack_from("<Q", content, at)[0] + 16)
        at += lengths[-1]
    place = sum(lengths[:4200]) + (byte if byte > 0 else lengths[4200] + byte)
    path.write_bytes(content)
    index = tfrecord(path).index()
    path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    start = sum(lengths[:4200])
    damage = f"begins at byte {start} of" if what == "length" else f"the record at byte {start} is damaged"
    with pytest.raises(DataError, match=damage) as caught:
        tfrecord(path).index()
    group = "" if what == "length" else "row group 1, "
    assert caught.value.where == f"{path}, {group}row 4200"
    assert tfrecord(path).read(index, [5], ["label"])["label"].tolist() == row(5)["label"]
    with pytest.raises(DataError, match=f"the record at byte {start} is damaged: its CRC-32C is wrong") as caught:
        tfrecord(path).read(index, [4300])
    assert caught.value.where == f"{path}, row group 1, row 4200"


def test_a_length_that_leads_out_of_its_group_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "x.tfrecord"
    path.write_bytes(frame(LABEL))
    index = tfrecord(path).index()
    path.write_bytes(b"\xff" + frame(LABEL)[1:])
    with pytest.raises(DataError, match="the record at byte 0 is damaged") as caught:
        tfrecord(path).read(index, [0])
    assert caught.value.where == f"{path}, row group 0, row 0"


LABEL = message("label", 3, field(1, 2, b"\x05"))
RECORD = frame(LABEL)


@pytest.mark.parametrize("bit", range(64))
def test_each_flipped_bit_of_a_length_names_file_and_offset(tmp_path: Path, bit: int) -> None:
    path = tmp_path / "x.tfrecord"
    path.write_bytes(RECORD * 3)
    index = tfrecord(path).index()
    damaged = bytearray(RECORD * 3)
    damaged[len(RECORD) + bit // 8] ^= 1 << bit % 8
    path.write_bytes(damaged)
    with pytest.raises(DataError, match=rf"\bbyte {len(RECORD)}\b") as caught:
        tfrecord(path).index()
    assert str(path) in caught.value.where and caught.value.where.endswith("row 1") and caught.value.remedy
    with pytest.raises(DataError, match=f"the record at byte {len(RECORD)} is damaged") as caught:
        tfrecord(path).read(index, [0])
    assert caught.value.where == f"{path}, row group 0, row 1"


@pytest.mark.parametrize("kept", range(1, len(RECORD)))
def test_a_record_cut_off_anywhere_names_file_and_offset(tmp_path: Path, kept: int) -> None:
    """A torn length is one of fewer than 12 bytes: nothing of the record may be read from beyond the end."""
    path = tmp_path / "x.tfrecord"
    path.write_bytes(RECORD * 2)
    index = tfrecord(path).index()
    path.write_bytes(RECORD + RECORD[:kept])
    with pytest.raises(DataError, match=f"begins at byte {len(RECORD)} of {len(RECORD) + kept}") as caught:
        tfrecord(path).index()
    assert caught.value.where == f"{path}, row 1" and caught.value.remedy
    group = replace(index.groups[0], stop=path.stat().st_size)
    with pytest.raises(DataError, match=f"the record at byte {len(RECORD)} is damaged"):
        tfrecord(path).read(replace(index, groups=(group,), sizes={}), [0])


@pytest.mark.parametrize(
    ("payloads", "error", "where"),
    [
        ([LABEL, b"some text"], "the record is not a tf.train.Example: ", ", row group 0, row 1"),
        ([LABEL, LABEL[:-1]], "it cannot be parsed", ", row group 0, row 1"),
        ([b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"], "it cannot be parsed", ", row group 0, row 0"),
        ([b"\x0a\x00\x12\x00"], "it looks like a SequenceExample", ", row group 0, row 0"),
        ([LABEL, message("label", 2, field(1, 2, bytes(4)))], "float32 here and int64 in the rows before",
         ", row group 0, row 1, column 'label'"),
    ],
)  # fmt: skip
def test_records_that_are_no_examples_are_named(tmp_path: Path, payloads: list[bytes], error: str, where: str) -> None:
    path = tmp_path / "x.tfrecord"
    path.write_bytes(b"".join(map(frame, payloads)))
    with pytest.raises(DataError, match=error) as caught:
        tfrecord(path).index()
    assert caught.value.where == f"{path}{where}"


@pytest.mark.parametrize(
    ("second", "message_of"),
    [
        (message("other", 3, field(1, 2, b"\x05")), "the record has no feature 'label'"),
        (message("label", 3, b""), "0 values"),
        (field(1, 2, field(1, 2, field(1, 2, b"label") + field(2, 2, b""))), "the record has no feature 'label'"),
        (message("label", 2, field(1, 2, bytes(4))), "1 values of float32 where all rows had int64"),
    ],
)
def test_a_missing_or_damaged_feature_names_its_row(tmp_path: Path, second: bytes, message_of: str) -> None:
    path = tmp_path / "x.tfrecord"
    path.write_bytes(frame(LABEL) * 3)
    index = tfrecord(path).index()
    path.write_bytes(frame(LABEL) + frame(second) + frame(LABEL))
    group = replace(index.groups[0], stop=path.stat().st_size)
    changed = replace(index, groups=(group,), sizes={})
    with pytest.raises(DataError, match=message_of) as caught:
        tfrecord(path).read(changed, [0])
    assert caught.value.where == f"{path}, row group 0, row 1, column 'label'"


def test_files_must_agree_on_kinds_and_may_differ_in_length(tmp_path: Path) -> None:
    (tmp_path / "a.tfrecord").write_bytes(frame(LABEL))
    (tmp_path / "b.tfrecord").write_bytes(frame(message("label", 3, field(1, 2, b"\x05\x06"))))
    data = tfrecord(tmp_path)
    index = data.index()
    assert [array.tolist() for array in data.read(index, [0, 1])["label"]] == [[5], [5, 6]]
    (tmp_path / "c.tfrecord").write_bytes(frame(message("label", 1, field(1, 2, b"a"))))
    with pytest.raises(DataError, match=r"'label' is bytes here and list of int64 in .*a\.tfrecord"):
        tfrecord(tmp_path).index()


@pytest.mark.parametrize(("content", "error"), [(b"", "no rows"), (frame(LABEL)[:-1], "does not end before")])
def test_empty_and_cut_files(tmp_path: Path, content: bytes, error: str) -> None:
    (tmp_path / "x.tfrecord").write_bytes(content)
    with pytest.raises(DataError, match=error):
        tfrecord(tmp_path).index()


def test_numbers_may_be_packed_or_stand_alone(tmp_path: Path) -> None:
    numbers = message("x", 3, field(1, 0, b"\x05") + field(1, 0, b"\x96\x01") + field(1, 2, b"\x07\x08"))
    floats = message("y", 2, field(1, 5, struct.pack("<f", 0.5)) + field(1, 2, struct.pack("<2f", 1.5, 2.5)))
    (tmp_path / "x.tfrecord").write_bytes(frame(numbers + floats))
    data = tfrecord(tmp_path / "x.tfrecord")
    read = data.read(data.index(), [0])
    assert read["x"].tolist() == [[5, 150, 7, 8]] and read["y"].tolist() == [[0.5, 1.5, 2.5]]


@given(st.lists(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=40), min_size=1, max_size=3))
def test_numbers_of_any_size(rows: list[list[int]]) -> None:
    def varint(value: int) -> bytes:
        packed, rest = b"", value & (1 << 64) - 1
        while rest >= 0x80:
            packed += bytes([rest & 0x7F | 0x80])
            rest >>= 7
        return packed + bytes([rest])

    def sized(number: int, content: bytes) -> bytes:
        return bytes([number << 3 | 2]) + varint(len(content)) + content

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.tfrecord"
        records = []
        for row in rows:
            entry = sized(1, b"x") + sized(2, sized(3, sized(1, b"".join(map(varint, row)))))
            records.append(frame(sized(1, sized(1, entry))))
        path.write_bytes(b"".join(records))
        data = tfrecord(path)
        read = data.read(data.index(), list(range(len(rows))))["x"]
    same = len({*map(len, rows)}) == 1 and rows[0]
    assert [values.tolist() if np.ndim(values) else [values] for values in read] == rows
    assert read.dtype == (np.int64 if same else object)


def test_a_frame_with_any_flipped_bit_is_refused() -> None:
    record = frame(b"123456789")
    assert unframe(record) == b"123456789"
    for place in range(8 * len(record)):
        damaged = bytearray(record)
        damaged[place // 8] ^= 1 << place % 8
        assert unframe(bytes(damaged)) is None
