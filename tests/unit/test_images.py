"""Folders of images as a source, and their decoding."""

from __future__ import annotations

import io
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.fs as pafs
import pytest
from PIL import Image

from tests.support import regression_job
from trainwright.core.errors import DataError, JobError
from trainwright.datasets import Dataset, decode_image, images, mix, split, table
from trainwright.datasets.data_source import object_array
from trainwright.datasets.formats.image_folder import ImageLoader, ImageSource
from trainwright.planning.job_preparation import prepare

RNG = np.random.default_rng(0)
DEEP = RNG.integers(0, 65536, (40, 40), dtype=np.uint16)


def pixels(number: int, shape: tuple[int, ...] = (6, 8, 3)) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, shape, dtype=np.uint8)


def encoded(array: np.ndarray, form: str = "PNG") -> bytes:
    stream = io.BytesIO()
    Image.fromarray(array).save(stream, form)
    return stream.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Classes bird (2), cat (3, one of them in a folder of its own) and cat-x (1)."""
    root = tmp_path / "data"
    for number, name in enumerate(
        ["bird/1.png", "bird/2.PNG", "cat/a.png", "cat/more/b.png", "cat/z.png", "cat-x/c.png"]
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(encoded(pixels(number)))
    (root / "cat" / "notes.txt").write_text("no image")
    (root / "_hidden").mkdir()
    return root


def class_names(data: Dataset) -> tuple[str, ...]:
    assert isinstance(data.source, ImageSource)
    return data.source.class_names()


def test_a_linked_image_counts_and_a_linked_folder_repeats_none(folder: Path) -> None:
    (folder / "cat-x" / "a.png").symlink_to(folder / "cat" / "a.png")
    (folder / "cat" / "again").symlink_to("more")
    data = images(folder)
    index = data.index()
    read = data.read(index, range(index.rows))
    assert read["file"].tolist()[2:] == ["cat/a.png", "cat/z.png", "cat/more/b.png", "cat-x/a.png", "cat-x/c.png"]
    (folder / "latest").symlink_to(".")
    with pytest.raises(DataError, match=r"no image of its own.*latest"):
        images(folder).index()


def test_folders_are_classes(folder: Path) -> None:
    data = images(folder)
    index = data.index()
    assert class_names(data) == index.classes == ("bird", "cat", "cat-x")
    read = data.read(index, range(index.rows))
    assert list(zip(read["file"].tolist(), read["label"].tolist(), strict=True)) == [
        ("bird/1.png", 0),
        ("bird/2.PNG", 0),
        ("cat/a.png", 1),
        ("cat/z.png", 1),
        ("cat/more/b.png", 1),
        ("cat-x/c.png", 2),
    ]
    assert read["image"].tolist() == [(folder / name).read_bytes() for name in read["file"]]
    rows = [5, 0, 3]
    for name, array in data.read(index, rows).items():
        assert array.tolist() == read[name][rows].tolist()
    assert pickle.loads(pickle.dumps((data, index))) == (data, index)
    assert class_names(images(f"{folder}/c*/*.png")) == ("cat", "cat-x")


@pytest.mark.parametrize(("path", "rows"), [("", 6), ("/", 6), ("/*/*.png", 4), ("/**/*.[pP]*", 6)])
@pytest.mark.parametrize("uri", [False, True])
def test_paths_globs_and_uris(folder: Path, path: str, rows: int, uri: bool) -> None:
    data = images(f"{folder.as_uri() if uri else folder}{path}")
    index = data.index()
    assert index.rows == rows
    read = data.read(index, [rows - 1])
    assert read["file"].tolist() == ["cat-x/c.png"] and read["label"].tolist() == [2]


def test_groups_are_parts_of_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5000):
        path = tmp_path / f"{number % 2}" / f"{number:05}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes([number % 256]))
    for number in range(5):
        (tmp_path / "1" / f"large{number}.jpg").write_bytes(bytes(3 << 20))
    data = images(tmp_path)
    index = data.index()
    assert [(Path(group.file).name, group.number, group.rows) for group in index.groups] == [
        ("0", 0, 2500),
        ("1", 0, 2503),
        ("1", 1, 2),
    ]
    read: list[str] = []
    content = ImageLoader._content
    monkeypatch.setattr(ImageLoader, "_content", lambda self, info: read.append(info.path) or content(self, info))
    assert [len(image) for image in data.read(index, [5004, 5003], ["image"])["image"]] == [3 << 20, 3 << 20]
    assert len(read) == 2
    assert data.read(index, [2500, 1], ["label"])["label"].tolist() == [1, 0] and len(read) == 2


def test_a_remote_store_is_read_in_parallel_with_the_same_result(folder: Path) -> None:
    data = images(folder)
    index = data.index()
    loader = data.source.open(index)
    assert isinstance(loader, ImageLoader)
    loader._system = pafs.SubTreeFileSystem("/", loader._system)
    expected = data.source.open(index).load(1, ["image"])["image"].tolist()
    assert loader.load(1, ["image"])["image"].tolist() == expected
    assert loader.twin().load(1, ["image"])["image"].tolist() == expected


def test_the_hash_names_the_content_and_not_the_place(folder: Path, tmp_path: Path) -> None:
    first = images(folder).index().hash
    folder.rename(tmp_path / "moved")
    assert images(tmp_path / "moved").index().hash == first
    (tmp_path / "moved" / "cat").rename(tmp_path / "moved" / "dog")
    assert images(tmp_path / "moved").index().hash != first


def test_classes_may_be_given(folder: Path) -> None:
    data = images(folder, classes=["cat-x", "dog", "cat", "bird"])
    index = data.index()
    assert data.read(index, [0, 2, 5])["label"].tolist() == [3, 2, 0]
    assert class_names(data) == ("cat-x", "dog", "cat", "bird")
    with pytest.raises(DataError, match="'cat-x' is not among the classes") as caught:
        images(folder, classes=["cat", "bird"]).index()
    assert caught.value.remedy == "did you mean 'cat'?"


def test_a_label_means_one_class_in_training_and_evaluation(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "test" / "cat").mkdir(parents=True)
    (tmp_path / "test" / "cat" / "1.png").write_bytes(encoded(pixels(0)))
    train, test = images(folder), images(tmp_path / "test")
    shifted = "label means other classes in evaluate=: 0 is 'cat' there and 'bird' in train="
    arrays = {"x": np.ones((6, 3), np.float32), "sample": np.arange(6)}
    parts: list[tuple[Dataset, Dataset, str]] = [
        (train, test, shifted),
        (train.filter(lambda row: True), test.weighted(np.ones(1)), shifted),
        (train.beside(table(arrays)), split(test, {"a": 1.0})["a"], shifted),
        (mix({"a": train, "b": test}), table({"label": np.ones(1)}), shifted.replace("evaluate", "train", 1)),
    ]
    for data, evaluate, problem in parts:
        with pytest.raises(JobError, match=re.escape(problem)) as caught:
            prepare(regression_job.job(tmp_path, train=data, evaluate=evaluate, inputs="label", targets="label"))
        assert "images(path, classes=[...])" in str(caught.value)
    named = images(tmp_path / "test", class_names(train))
    for fields in ({"evaluate": named, "targets": "label"}, {"evaluate": test, "targets": "file"}):
        prepare(regression_job.job(tmp_path, train=train, inputs="image", **fields, batch_size=1))


@pytest.mark.parametrize(
    ("kind", "message", "where"),
    [
        ("empty class", "the class folder has no image", "data/dog"),
        ("no class", "lies in no class folder", "data/x.png"),
        ("no images", "no image file is here, among 1 entries", "data"),
        ("missing", "nothing at this path", "data"),
    ],
)
def test_each_wrong_folder_has_its_own_error(tmp_path: Path, kind: str, message: str, where: str) -> None:
    root = tmp_path / "data"
    if kind != "missing":
        (root / "dog").mkdir(parents=True)
    if kind == "empty class":
        (root / "cat").mkdir()
        (root / "cat" / "1.png").write_bytes(b"1")
    if kind == "no class":
        (root / "x.png").write_bytes(b"1")
    with pytest.raises(DataError, match=message) as caught:
        images(root).index()
    assert caught.value.where == str(tmp_path / where)


@pytest.mark.parametrize("how", ["an image vanishes", "an image grows", "an image is added", "the folder vanishes"])
@pytest.mark.parametrize("listed", [False, True])
def test_a_folder_that_changes_in_the_middle_is_named(folder: Path, how: str, listed: bool) -> None:
    data = images(folder)
    index = data.index()
    loader = data.source.open(index)
    if listed:
        loader.load(0, ["image"])
    path = folder / "bird" / "1.png"
    if how == "an image grows":
        path.write_bytes(path.read_bytes() + b"x")
    elif how == "an image is added":
        (folder / "bird" / "3.png").write_bytes(b"x")
        if listed:
            assert len(loader.load(0, ["image"])["image"]) == 2
            return
    else:
        path.unlink()
    if how == "the folder vanishes":
        (folder / "bird" / "2.PNG").unlink()
        (folder / "bird").rmdir()
    message = "the file changed" if listed else "the folder cannot be listed|the folder changed"
    with pytest.raises(DataError, match=message) as caught:
        loader.load(0, ["image"])
    assert caught.value.where == str(path if listed else folder / "bird")


def test_images_are_decoded(folder: Path) -> None:
    data = images(folder).map(decode_image())
    index = data.index()
    read = data.read(index, [2, 0])
    assert read["image"].shape == (2, 6, 8, 3) and read["image"].dtype == np.uint8
    np.testing.assert_array_equal(read["image"], [pixels(2), pixels(0)])
    assert read["label"].tolist() == [1, 0] and read["image"][0].flags.writeable


@pytest.mark.parametrize(
    ("size", "mode", "shape"),
    [(4, "RGB", (4, 4, 3)), ((3, 5), "RGB", (3, 5, 3)), (None, "L", (6, 8)), ((2, 2), "RGBA", (2, 2, 4))],
)
def test_size_and_mode(size: Any, mode: str, shape: tuple[int, ...]) -> None:
    decode = pickle.loads(pickle.dumps(decode_image("photo", size=size, mode=mode)))
    row = decode({"photo": encoded(pixels(0), "JPEG"), "other": 1}, RNG)
    assert row["photo"].shape == shape and row["other"] == 1
    assert decode({"photo": encoded(pixels(1)[..., 0])}, RNG)["photo"].shape == shape


@pytest.mark.parametrize("form", ["PNG", "TIFF", "PPM"])
def test_grey_of_16_bits_keeps_its_shades(form: str) -> None:
    deep = np.array([[0, 200, 257], [40000, 65278, 65535]], dtype=np.uint16)
    row = {"image": encoded(deep, form)}
    shades = [[0, 1, 1], [156, 254, 255]]
    assert decode_image(mode="L")(row, RNG)["image"].tolist() == shades
    assert decode_image()(row, RNG)["image"][..., 2].tolist() == shades
    assert decode_image(mode="I")(row, RNG)["image"].tolist() == deep.tolist()


def test_masks_keep_their_class_numbers() -> None:
    classes = np.array([[0, 7], [19, 255]], dtype=np.uint8)
    palette = Image.fromarray(classes, "L").convert("P")
    palette.putpalette(bytes(RNG.integers(0, 256, 768, dtype=np.uint8)))
    stream = io.BytesIO()
    palette.save(stream, "PNG")
    for content in (encoded(classes), stream.getvalue()):
        found = decode_image(mode="P", size=6, resample="nearest")({"image": content}, RNG)["image"]
        assert found.dtype == np.uint8 and found.tolist() == np.kron(classes, np.ones((3, 3), np.uint8)).tolist()
    deep = encoded(classes.astype(np.uint16))
    found = decode_image(mode="I", size=4, resample="nearest")({"image": deep}, RNG)["image"]
    assert found.tolist() == np.kron(classes, np.ones((2, 2), np.uint8)).tolist()
    with pytest.raises(DataError, match="resample='cubic' is unknown"):
        decode_image(resample="cubic")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "mode"),
    [
        (np.array([[0, 255]], np.uint16), "I"),
        (np.array([[0, 70000]], np.int32), "I"),
        (np.array([[-1, 300]], np.int32), "I"),
        (np.array([[0.25, 1.0]], np.float32), "F"),
    ],
)
def test_values_that_eight_bits_would_lose_are_refused(values: np.ndarray, mode: str) -> None:
    row = {"image": encoded(values, "TIFF"), "file": "cat/1.tif"}
    with pytest.raises(DataError, match=r"values from .* would lose") as caught:
        decode_image(mode="L")(row, RNG)
    assert caught.value.where == "cat/1.tif" and f"mode={mode!r}" in caught.value.remedy
    assert decode_image(mode=mode)(row, RNG)["image"].tolist() == values.tolist()
    assert not decode_image()({"image": encoded(np.zeros((2, 2), np.uint16))}, RNG)["image"].any()


@pytest.mark.parametrize(
    "content",
    [b"", b"no image", encoded(pixels(0))[:-40], encoded(DEEP)[:-40], encoded(pixels(0, (99, 99, 3)), "JPEG")[:900]],
)
def test_a_damaged_image_is_named(content: bytes) -> None:
    with pytest.raises(DataError, match="cannot be decoded") as caught:
        decode_image()({"image": content, "file": "cat/1.jpg"}, RNG)
    assert caught.value.where == "cat/1.jpg" and caught.value.remedy


def test_images_of_hugging_face_are_decoded_and_a_bad_row_is_named(tmp_path: Path) -> None:
    (tmp_path / "1.png").write_bytes(encoded(pixels(1)))
    cells = [{"bytes": encoded(pixels(0)), "path": "0.png"}, {"bytes": None, "path": str(tmp_path / "1.png")}]
    for path in ("gone.png", None):
        data = table({"image": object_array([*cells, {"bytes": None, "path": path}])}).map(decode_image())
        index = data.index()
        np.testing.assert_array_equal(data.read(index, [0, 1])["image"], [pixels(0), pixels(1)])
        with pytest.raises(DataError, match="cannot be decoded" if path else "holds NoneType") as caught:
            data.read(index, [2])
        assert caught.value.where == (path or "sample 2") and caught.value.remedy


def test_what_is_no_bytes_and_a_missing_column_are_named() -> None:
    with pytest.raises(DataError, match="holds ndarray and not the bytes"):
        decode_image()({"image": pixels(0)}, RNG)
    with pytest.raises(DataError, match="no column 'image'") as caught:
        decode_image()({"imag": b""}, RNG)
    assert caught.value.remedy == "did you mean 'imag'?"
