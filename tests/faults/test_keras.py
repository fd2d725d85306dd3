"""TensorFlow under the same core: kills change no bit, and a run goes on under another strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trainwright as tw
from tests.support import keras_jobs, processes
from tests.support.conformance import tensorflow_case
from tests.support.finished_runs import State, final_state, told
from tests.support.torch_jobs import Kill
from trainwright.core import events
from trainwright.core.errors import RunConflict
from trainwright.planning.job_file import load_job
from trainwright.storage.object_store import open_store
from trainwright.storage.run_log import RunLog


@pytest.fixture(scope="module")
def whole(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> State:
    """An unbroken run of two workers."""
    folder = tmp_path_factory.mktemp("keras")
    tw.fit(keras_jobs.job(folder))
    return final_state(folder, "faulty")


def test_a_killed_worker_and_a_killed_chief_change_no_bit(folder: Path, whole: State) -> None:
    kills = tuple(Kill(rank=rank, step=step, folder=str(folder.parent)) for rank, step in ((1, 6), (0, 8)))
    run = tw.fit(keras_jobs.job(folder, kills, spares=2, keeper_s=3600.0))
    assert run.state == "done" and all(kill.mark.exists() for kill in kills)
    assert final_state(folder, "faulty") == whole
    formed: Any = told(folder, "faulty", events.Formed)
    assert {event.survivors for event in formed} == {0}, "every failure takes new processes"
    states = [(event.source, event.step, event.steps_lost) for event in formed]
    assert states == [("initial", 0, 0), ("keeper", 6, 0), ("keeper", 8, 0)], "from what the other worker copied"
    assert [event.rank for event in told(folder, "faulty", events.Failed)] == [1, 0]


@pytest.mark.soak
def test_the_driver_is_killed_and_started_again(folder: Path, tmp_path: Path, whole: State) -> None:
    file = tmp_path / "job.py"
    file.write_text(
        f"from tests.support import keras_jobs\njob = keras_jobs.job({str(folder)!r}, pace_s=0.2, keeper_s=3600.0)\n"
    )
    with processes.trainwright("fit", file, cluster=processes.address()) as driver:
        processes.wait_until(lambda: committed(folder) >= 10, driver)
        processes.kill(driver)
    tw.fit(load_job(str(file)))
    formed: Any = told(folder, "faulty", events.Formed)[-1]
    assert (formed.source, formed.steps_lost, formed.step >= 10) == ("keeper", 0, True), "from what a worker copied"
    assert final_state(folder, "faulty") == whole


@pytest.mark.soak
def test_a_run_goes_on_under_each_other_strategy(folder: Path, ray_cluster: None, tmp_path: Path) -> None:
    """Without dropout, which is counted by data rank."""
    layouts: tuple[tuple[str, int, int | None], ...] = (
        ("tf_one_device", 1, None),
        ("tf_mirrored", 1, 2),
        ("tf_multi_worker_mirrored", 2, None),
        ("tf_central_storage", 1, 2),
    )
    same = {"model": keras_jobs.make_model(dropout=0.0), "checkpoint_steps": None}
    for epochs, (strategy, workers, devices) in enumerate(layouts, 1):
        job = keras_jobs.job(folder, strategy=strategy, workers=workers, devices=devices, epochs=epochs, **same)
        assert tw.fit(job).state == "done"
    alone = keras_jobs.job(tmp_path / "alone", strategy="tf_one_device", workers=1, epochs=len(layouts), **same)
    tw.fit(alone)
    moved, stayed = (tensorflow_case.state(final_state(at, "faulty").files) for at in (folder, tmp_path / "alone"))
    assert moved.keys() == stayed.keys()
    for name, value in stayed.items():
        if value.dtype.kind == "f":
            assert np.allclose(moved[name], value, rtol=0, atol=1e-9), name


def test_fit_goes_on_in_the_middle_of_an_epoch(folder: Path, ray_cluster: None, tmp_path: Path) -> None:
    tw.fit(keras_jobs.fit_job(tmp_path / "whole"))
    kill = Kill(rank=0, step=13, folder=str(tmp_path))
    run = tw.fit(keras_jobs.fit_job(folder, (kill,)))
    assert run.state == "done" and kill.mark.exists()
    assert final_state(folder, "faulty") == final_state(tmp_path / "whole", "faulty")
    broken, whole = (told(at, "faulty", events.Evaluated) for at in (folder, tmp_path / "whole"))
    assert [event.step for event in whole] == [9, 18, 27]
    ours, theirs = ({event.step: event.metrics for event in each} for each in (broken, whole))
    assert ours == theirs  # steps that are done again are evaluated again


def test_fit_on_two_workers_changes_no_bit_when_one_is_killed(folder: Path, ray_cluster: None, tmp_path: Path) -> None:
    """With dropout, metrics that go on from the middle of an epoch, and a callback that counts epochs."""
    two: dict[str, Any] = {"workers": 2, "strategy": "tf_multi_worker_mirrored"}
    tw.fit(keras_jobs.fit_job(tmp_path / "whole", **two))
    kills = tuple(Kill(rank=rank, step=step, folder=str(tmp_path)) for rank, step in ((1, 7), (0, 13)))
    run = tw.fit(keras_jobs.fit_job(folder, kills, **two, keeper_s=3600.0))
    assert run.state == "done" and all(kill.mark.exists() for kill in kills)
    assert final_state(folder, "faulty") == final_state(tmp_path / "whole", "faulty")
    broken, whole = (told(at, "faulty", events.Evaluated) for at in (folder, tmp_path / "whole"))
    ours, theirs = ({event.step: event.metrics for event in each} for each in (broken, whole))
    assert ours == theirs and [*theirs] == [9, 18, 27]
    (rate,) = [
        value
        for name, value in tensorflow_case.state(final_state(folder, "faulty").files).items()
        if "learning_rate" in name
    ]
    assert rate == pytest.approx(0.01)


@pytest.mark.soak
def test_a_gan_is_killed_and_resumed_without_a_trace(folder: Path, ray_cluster: None, tmp_path: Path) -> None:
    """Its optimizers make their variables in the first step, which follows on the checkpoint."""
    tw.fit(keras_jobs.gan_job(tmp_path / "whole"))
    kill = Kill(rank=0, step=13, folder=str(tmp_path))
    run = tw.fit(keras_jobs.gan_job(folder, (kill,), epochs=2))
    assert run.state == "done" and kill.mark.exists()
    assert list(run.history.learning_rate) == pytest.approx([0.03] * 18)
    tw.fit(keras_jobs.gan_job(folder), resume=True)
    assert final_state(folder, "faulty") == final_state(tmp_path / "whole", "faulty")


@pytest.mark.soak
def test_a_custom_loop_on_two_workers_changes_no_bit_when_both_are_killed(
    folder: Path, ray_cluster: None, tmp_path: Path
) -> None:
    tw.fit(keras_jobs.loop_job(tmp_path / "whole"))
    kills = tuple(Kill(rank=rank, step=step, folder=str(tmp_path)) for rank, step in ((1, 7), (0, 13)))
    run = tw.fit(keras_jobs.loop_job(folder, kills))
    assert run.state == "done" and all(kill.mark.exists() for kill in kills)
    assert final_state(folder, "faulty") == final_state(tmp_path / "whole", "faulty")


def test_settings_of_keras_reach_the_workers(folder: Path, ray_cluster: None) -> None:
    import keras

    def settings() -> tuple[Any, ...]:
        named = keras.config.floatx(), keras.config.epsilon(), keras.config.image_data_format()
        return (*named, keras.config.dtype_policy().name)

    def set_all(floatx: str, epsilon: float, image_data_format: str, policy: str) -> None:
        keras.config.set_floatx(floatx)
        keras.config.set_epsilon(epsilon)
        keras.config.set_image_data_format(image_data_format)
        keras.config.set_dtype_policy(policy)

    before, own = settings(), ("float64", 1e-3, "channels_first", "mixed_bfloat16")

    def model() -> Any:
        if settings() != own:
            raise ValueError(settings())
        return keras_jobs.make_model()()

    set_all(*own)
    try:
        run = tw.fit(keras_jobs.fit_job(folder, model=model, epochs=1, evaluate=None))
    finally:
        set_all(*before)
    assert run.state == "done"


def test_a_callback_ends_the_training(folder: Path, ray_cluster: None) -> None:
    run = tw.fit(keras_jobs.fit_job(folder, patience=1))
    assert (run.state, final_state(folder, "faulty").step, committed(folder)) == ("done", 18, 18)
    assert any("a callback ended the training after 18 of 27 steps" in event.text for event in noted(folder))
    with pytest.raises(RunConflict, match=r"is finished \(18 steps\)"):
        tw.fit(keras_jobs.fit_job(folder, patience=1))
    goals = {"best": "loss", "early_stop": tw.EarlyStop("loss", patience=1, min_delta=10.0)}
    again = tw.fit(keras_jobs.fit_job(folder, patience=1, **goals))
    (*_, ended) = told(folder, "faulty", events.RunEnded)
    assert (again.state, ended.step) == ("done", 18) and "loss has not improved in 1 evaluation" in ended.reason
    assert ended.best == f"loss {again.metrics['loss']:.4g} at step 18" and again.load_model(step="best") is not None


@pytest.mark.soak
def test_a_pipeline_of_the_users_own_counts_each_row_once(folder: Path, ray_cluster: None, tmp_path: Path) -> None:
    """The unbroken run computes all rows in each worker, the killed one only a worker's own."""
    tw.fit(keras_jobs.job(tmp_path / "whole", train=tw.datasets.from_tf(keras_jobs.pipeline)))
    kill = Kill(rank=1, step=12, folder=str(tmp_path))
    run = tw.fit(keras_jobs.job(folder, (kill,), train=tw.datasets.from_tf(keras_jobs.sharded_pipeline)))
    assert run.state == "done" and "computes only its own rows after shard" in repr(run.plan)
    assert final_state(folder, "faulty") == final_state(tmp_path / "whole", "faulty")


def noted(folder: Path) -> list[Any]:
    return list(told(folder, "faulty", events.Noted))


def committed(folder: Path) -> int:
    """Step of the newest checkpoint that the log names."""
    entry = RunLog(open_store(str(folder)), "faulty").head() if folder.exists() else None
    return entry.checkpoints[-1].step if entry and entry.checkpoints else 0
