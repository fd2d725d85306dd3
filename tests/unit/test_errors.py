"""Errors as they are shown: Python's words, options on the command line, and few lines in a notebook."""

from __future__ import annotations

import subprocess
import sys

import pytest
import ray
import ray.exceptions

import trainwright as tw
from trainwright.cli.plan_commands import with_option_names
from trainwright.core.errors import JobError, ResourceError, RunConflict, UserCodeError, user_code
from trainwright.ray_cluster import discovery
from trainwright.runtime import launch


@pytest.mark.parametrize(
    ("remedy", "options"),
    [
        (
            "resume=True goes on from its last checkpoint, fresh=True begins again, or give the job a new name",
            "--resume goes on from its last checkpoint, --fresh begins again, or give the job a new name",
        ),
        ('on_crash_loop="skip" (with resume=True)', 'on_crash_loop="skip" (with --resume)'),
        ("give another folder, or step=12 to go on", "give another folder, or --step 12 to go on"),
        ("give it in samples: critical_batch=2000", "give it in samples: --critical-batch 2000"),
        ("here=True, or for predictions workers=", "--here, or for predictions --workers"),
        (
            "tw.open_run('wave', 'runs') shows it; fresh=True trains again, a larger epochs= goes on for longer",
            "`trainwright show wave --storage runs` shows it; --fresh trains again, a larger --set epochs= goes on for "
            "longer",
        ),
        ("give either loss= with inputs=, or step=", "give either loss= with inputs=, or step="),
    ],
)
def test_what_to_do_is_said_in_options_on_the_command_line_alone(remedy: str, options: str) -> None:
    assert with_option_names(remedy) == options


NOTEBOOK = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance(colors="NoColor")
shell.run_cell("import trainwright as tw")
shell.run_cell("tw.fit(tw.Job(nam=3))")
"""


def test_a_notebook_shows_what_is_wrong_and_no_frames_of_ours() -> None:
    done = subprocess.run([sys.executable, "-c", NOTEBOOK], capture_output=True, text=True, timeout=60)
    shown = done.stdout.strip().splitlines()
    assert (
        shown[0].startswith("JobError: the job has")
        and "nam= is not a field of Job: did you mean 'name'?" in done.stdout
    )
    assert "Traceback" not in done.stdout and ".py" not in done.stdout


def test_a_long_traceback_of_the_users_is_cut_at_its_beginning() -> None:
    error = UserCodeError("loss= raised KeyError", detail="\n".join(f"line {number}" for number in range(50)))
    lines = error._render_traceback_()
    assert lines[:2] == ["...", "line 30"] and lines[-2:] == ["line 49", "UserCodeError: loss= raised KeyError"]
    assert RunConflict("taken", remedy="fresh=True")._render_traceback_() == ["RunConflict: taken\n  -> fresh=True"]
    assert JobError(["a"])._render_traceback_() == ["JobError: the job has 1 problem\n  1. a"]


def test_a_detached_driver_without_a_cluster_is_refused_before_ray_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(verbose: bool = False) -> bool:
        raise AssertionError("Ray is not started")

    monkeypatch.setattr(launch, "has_cluster", lambda: False)
    monkeypatch.setattr(launch, "connect", connect)
    data = tw.datasets.table({"x": [[1.0]]})
    job = tw.Job(name="n", model=dict, optimizer=list, loss=max, inputs="x", batch_size=1, train=data)
    with pytest.raises(ResourceError, match="outlives this process") as caught:
        tw.start(job, detached=True)
    assert "set RAY_ADDRESS" in caught.value.remedy and "RAY_AUTH_MODE=token" in caught.value.remedy
    assert "leave --detach out" in with_option_names(caught.value.remedy)


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (ray.exceptions.AuthenticationError("no token was found"), "the Ray cluster asks for a token"),
        (ConnectionError("Failed to connect"), "the Ray cluster cannot be reached: Failed to connect"),
    ],
    ids=["no token", "wrong token"],
)
def test_a_cluster_that_asks_for_a_token_says_how_to_give_it(
    error: Exception, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**options: object) -> None:
        raise error

    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.1:6379")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(ResourceError, match=what) as caught:
        discovery.connect()
    assert "RAY_AUTH_TOKEN" in caught.value.remedy and caught.value.where == "192.0.2.1:6379"


def test_ray_that_does_not_start_in_time_says_so_and_where_its_logs_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**options: object) -> None:
        raise Exception("The current node timed out during startup.")  # as Ray 2.60 does

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(ResourceError, match="Ray did not start on this machine: The current node timed out") as caught:
        discovery.connect()
    assert "load" in caught.value.where and "logs" in caught.value.remedy


def test_the_traceback_of_user_code_has_no_frame_of_ours() -> None:
    def mistake() -> None:
        raise KeyError("label")

    with pytest.raises(UserCodeError, match="loss= raised KeyError") as caught, user_code("loss=", "correct it"):
        mistake()
    assert caught.value.detail.count("File ") == 1 and "in mistake" in caught.value.detail
