"""A run's model in the layout that it was trained in, on workers: it evaluates and predicts as in one process."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import trainwright as tw
from tests.support.prediction_jobs import Strike, check, read
from tests.support.trained_layouts import LAYOUTS, rows, trained
from trainwright.core.errors import HangError, ResourceError, UserCodeError

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.mark.parametrize("layout", LAYOUTS)
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
