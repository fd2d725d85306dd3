"""The example of Ray Serve: rows that are sent over HTTP get the outputs that `tw.predict` writes for them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import requests
from torch import Tensor, nn

import trainwright as tw
from tests.support.prediction_jobs import job, read, train
from tests.support.s3_server import free_ports
from trainwright.core.data import Batch

pytestmark = pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`")  # Ray Serve's own

ROWS, URL = 12, "http://127.0.0.1:{}/"


class Pixels(nn.Module):
    """Logits of images of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(28 * 28, 3)

    def forward(self, image: Tensor) -> Tensor:
        return self.last(image.flatten(1).float() / 255)


def rows() -> dict[str, np.ndarray]:
    random = np.random.default_rng(4)
    return {"x": random.integers(0, 256, (ROWS, 28, 28), np.uint8), "y": random.integers(0, 3, ROWS)}


def first_batch(_: int) -> Batch:
    return Batch(
        columns={name: column[:8] for name, column in rows().items()}, weights=np.ones(8), samples=np.arange(8)
    )


@pytest.fixture
def port(ray_cluster: None) -> Iterator[int]:
    """A port that Ray Serve listens on."""
    from ray import serve

    (chosen,) = free_ports(1)
    serve.start(http_options={"host": "127.0.0.1", "port": chosen})
    yield chosen
    serve.shutdown()


def test_rows_over_http_get_what_predict_writes(tmp_path: Path, port: int) -> None:
    from ray import serve
    from serve_fashion_mnist import Classifier

    data = tw.datasets.table(rows())
    chosen = job(tmp_path, model=Pixels, train=data)
    train(chosen, 2, first_batch)
    expected = read(tw.predict(chosen, data, to=str(tmp_path / "out"), workers=1).uri)["output"]
    serve.run(Classifier.bind(chosen), name="fashion")

    def answer(image: object) -> requests.Response:
        return requests.post(URL.format(port), json={"image": image}, timeout=60)

    with ThreadPoolExecutor(ROWS) as many:  # together, so that there are batches
        answers = list(many.map(answer, rows()["x"].tolist()))
    assert [each.status_code for each in answers] == [200] * ROWS
    found = [each.json() for each in answers]
    np.testing.assert_allclose([each["logits"] for each in found], expected.to_pylist(), atol=1e-6)
    assert [each["class"] for each in found] == np.argmax(expected.to_pylist(), axis=1).tolist()
    wrong = answer([[1, 2], [3]])
    assert wrong.status_code == 400 and "28 rows of 28 numbers" in wrong.json()["error"]
