"""A run's model in the layout that it was trained in, on workers: it evaluates and predicts as in one process."""

from __future__ import annotations

import os
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpt import GPT, Size, surprise

import trainwright as tw
from tests.support.prediction_jobs import Strike, check, read
from tests.support.trained_layouts import rows, trained
from trainwright.core.errors import HangError, ResourceError, UserCodeError

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.mark.parametrize("layout", ["sharded", "pipeline"])
def test_it_evaluates_and_predicts_as_one_process_does(
    layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where a worker ends over a row, and all room with it, as where they have not heard of us for long."""
    strike = Strike("orphan", str(tmp_path / "killed"), at=30)
    judged = tw.datasets.table(rows())
    chosen, model = trained(tmp_path, layout, evaluate=judged.map(strike) if layout == "pipeline" else judged)
    found, told = tw.evaluate(chosen), capsys.readouterr().err
    assert f"served at step 2 on 2 workers, in the layout that it was trained in: {layout} (" in told
    struck = Path(strike.mark).exists() and "begins again on new workers: its " in told
    assert struck == (layout == "pipeline"), told
    assert found == pytest.approx(tw.evaluate(chosen, here=True), rel=1e-12) and len(found) == 2
    assert not capsys.readouterr().err
    bare = tw.datasets.table({name: column for name, column in rows().items() if name != "y"})
    made = tw.predict(chosen, bare, to=str(tmp_path / "out"), keep=("id",), range_rows=23, batch_size=10)
    assert (made.parts, made.computed) == (3, 3) and read(made.uri)["id"].to_pylist() == rows()["id"].tolist()
    with torch.no_grad():
        check(made.uri, model(torch.from_numpy(rows()["x"])).numpy())


def test_what_the_users_code_raised_on_one_rank_is_told_at_once(tmp_path: Path) -> None:
    def broken(outputs: Any, targets: Any) -> Any:
        raise LookupError("struck")

    chosen, _ = trained(tmp_path, "pipeline", metrics={"accuracy": broken})
    with pytest.raises(UserCodeError, match="raised LookupError: struck") as caught:
        tw.evaluate(chosen)
    assert "rank 1" in caught.value.where and "in broken" in caught.value.detail
    with pytest.raises(ResourceError, match="needs 1 GPU"):
        tw.evaluate(chosen.replace(accelerator="gpu"))


def test_ranks_that_hang_tell_where_they_stand(tmp_path: Path) -> None:
    def stuck(outputs: Any, targets: Any) -> Any:
        threading.Event().wait(600)

    chosen, _ = trained(tmp_path, "sharded", metrics={"accuracy": stuck})
    with pytest.raises(HangError, match="did not evaluate some within 5 s") as caught:
        tw.evaluate(chosen.replace(hang_deadline_s=5.0, failures=0))
    assert "rank 0, " in caught.value.where and caught.value.detail.count("in stuck") == 2


SIZE = Size(context=16, width=16, depth=2, heads=4, groups=2, hidden=16, batch_size=4, epochs=1, rate=0.1,
                vocabulary=31)  # fmt: skip


class Mortal(GPT):
    """Ends its process once, while it decodes, where `folder` is given; tells that it decoded."""

    def __init__(self, folder: Path, *, mortal: bool) -> None:
        super().__init__(SIZE)
        self.folder, self.mortal = folder, mortal
        self.double()

    def forward(self, tokens: torch.Tensor, cache: Any = None) -> torch.Tensor:
        if cache and tokens.shape[1] == 1:
            mark = self.folder / "killed"
            (self.folder / ("again" if mark.exists() else "decoded")).touch()
            if self.mortal and next(iter(cache.values()))[0].shape[2] == 7 and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(tokens, cache)


@pytest.mark.parametrize("layout", ["sharded", pytest.param("tensor", marks=pytest.mark.soak)])
def test_the_text_of_a_divided_model_is_that_of_one_process_also_after_a_worker_is_lost(
    layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = {"tokens": np.random.default_rng(3).integers(0, 31, (8, SIZE.context))}
    build = partial(Mortal, tmp_path, mortal=layout == "tensor")
    chosen, _ = trained(tmp_path, layout, columns, model=build, loss=surprise, inputs="tokens", targets="tokens",
                        metrics={}, evaluate=None)  # fmt: skip
    options: Any = {"count": 14, "temperature": 0.8, "seed": 3}
    text = tw.generate(chosen, columns["tokens"][:3, :4], **options).tolist()
    assert ("begins again on new workers" in capsys.readouterr().err) == (layout == "tensor")
    assert (tmp_path / "decoded").exists() and (tmp_path / "again").exists() == (layout == "tensor")
    assert text == tw.generate(chosen, columns["tokens"][:3, :4], here=True, **options).tolist()
