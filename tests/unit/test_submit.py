"""Submitting, as far as it is pure: addresses, packages, credentials, what to attach to, logs, ends."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from io import BytesIO
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.job_submission import JobDetails, JobStatus, JobType

from trainwright.core.errors import JobError, ResourceError, RunConflict, StorageError, UserCodeError
from trainwright.submit import job_package
from trainwright.submit.job_credentials import JobCredentials, collect_credentials, storage_schemes
from trainwright.submit.job_server import (
    DEFAULT_ADDRESS,
    LogCursor,
    LogDisplay,
    exit_code,
    is_ray_message,
    job_server_address,
    reports_missing_trainwright,
)
from trainwright.submit.job_submission import (
    JobRequest,
    Submission,
    SubmissionMetadata,
    SubmitOptions,
    SubmitOutput,
    job_to_follow,
    next_submission_id,
    resolve_storage,
)


@pytest.mark.parametrize(
    ("given_one", "environment", "address"),
    [
        (None, {}, DEFAULT_ADDRESS),
        (None, {"RAY_ADDRESS": "10.0.0.1:6379"}, DEFAULT_ADDRESS),
        (None, {"RAY_ADDRESS": "http://head:8265/"}, "http://head:8265"),
        (None, {"RAY_ADDRESS": "http://a", "RAY_API_SERVER_ADDRESS": "https://b"}, "https://b"),
        ("http://c:1", {"RAY_API_SERVER_ADDRESS": "https://b"}, "http://c:1"),
    ],
)
def test_the_address_is_what_is_given_or_an_http_one_of_the_environment(
    given_one: str | None, environment: dict[str, str], address: str
) -> None:
    assert job_server_address(given_one, environment) == address


@pytest.mark.parametrize("wrong", ["ray://head:10001", "head:8265", "10.0.0.1:6379", "http://", "auto"])
def test_an_address_of_another_kind_is_refused_with_what_is_wanted(wrong: str) -> None:
    with pytest.raises(ResourceError, match="http://HOST:8265"):
        job_server_address(wrong, {})


@pytest.mark.parametrize("wrong", ["http://me:secret@head:8265", "ray://me:secret@head"])
def test_credentials_in_an_address_are_refused_and_not_repeated(wrong: str) -> None:
    with pytest.raises(ResourceError) as caught:
        job_server_address(wrong, {})
    assert "secret" not in str(caught.value)


@given(
    text=st.text(alphabet="ab\n", max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=6),
    breaks=st.lists(st.integers(0, 60), max_size=3),
)
def test_a_cursor_tells_each_line_once_whatever_breaks(text: str, cuts: list[int], breaks: list[int]) -> None:
    cursor, told = LogCursor(), []
    for end in [*sorted(breaks), len(text)]:
        cursor.rewind()
        places = [0, *sorted(cut for cut in cuts if cut < end), end]
        for start, stop in pairwise(places):
            told += cursor.feed(text[start:stop])
    told += cursor.flush()
    assert "\n".join(told) == text.removesuffix("\n") and told == text.splitlines()


def test_lines_of_ray_and_a_missing_trainwright_are_known() -> None:
    assert is_ray_message("2026-11-23 11:20:11,704\tINFO job_manager.py:581 -- Runtime env is setting up.")
    assert is_ray_message("Running entrypoint for job a-1: python -m trainwright fit job.py")
    assert not is_ray_message("plan one_device: 1 worker")
    assert reports_missing_trainwright("/usr/bin/python: No module named trainwright")
    assert reports_missing_trainwright("ModuleNotFoundError: No module named 'trainwright'")
    assert not reports_missing_trainwright("ModuleNotFoundError: No module named 'trainwrights'")


def news(
    name: str, status: str = "RUNNING", mark: SubmissionMetadata | None = None, code: int | None = None
) -> JobDetails:
    return JobDetails(
        type=JobType.SUBMISSION, entrypoint="", submission_id=name, status=JobStatus(status),
        metadata=mark.as_mapping() if mark else {}, driver_exit_code=code,
    )  # fmt: skip


MARK = SubmissionMetadata(run="a", storage="s3://b/runs", digest="d")


def test_the_run_that_is_under_way_is_followed_and_no_other() -> None:
    others = [news("raysubmit_x"), news("a-3", mark=SubmissionMetadata(run="a", storage="s3://c", digest="d"))]
    assert job_to_follow(others, MARK, anyway=False) is None
    assert job_to_follow([*others, news("a-1", "FAILED", MARK)], MARK, anyway=False) is None
    under_way = news("a-2", "PENDING", MARK)
    assert job_to_follow([*others, news("a-1", "FAILED", MARK), under_way], MARK, anyway=False) is under_way
    assert next_submission_id([*others, under_way], "a") == "a-4" and next_submission_id([], "a") == "a-1"
    assert next_submission_id([news("a-b-7"), news("a-10"), news("a-9")], "a") == "a-11"


@pytest.mark.parametrize(
    ("wanted", "runs"),
    [
        (SubmissionMetadata(run="a", storage="s3://b/runs", digest="e"), MARK),
        (SubmissionMetadata(run="a", storage="s3://b/runs", digest="d", fresh=True), MARK),
    ],
)
def test_another_job_of_the_run_is_refused_unless_it_is_to_be_followed(
    wanted: SubmissionMetadata, runs: SubmissionMetadata
) -> None:
    jobs = [news("a-1", mark=runs)]
    with pytest.raises(RunConflict, match="--attach"):
        job_to_follow(jobs, wanted, anyway=False)
    assert job_to_follow(jobs, wanted, anyway=True) is jobs[0]


def test_attaching_to_what_is_over_shows_the_newest_and_to_nothing_is_refused() -> None:
    over = [news("a-10", "FAILED", MARK), news("a-9", "SUCCEEDED", MARK)]
    assert job_to_follow(over, MARK, anyway=True) is over[0]
    with pytest.raises(RunConflict, match="no job"):
        job_to_follow([], MARK, anyway=True)


@pytest.mark.parametrize(
    ("status", "code", "wanted"),
    [("SUCCEEDED", 0, 0), ("SUCCEEDED", None, 0), ("FAILED", 2, 2), ("FAILED", -9, 137), ("STOPPED", None, 143)],
)
def test_the_exit_code_is_the_jobs_own(status: str, code: int | None, wanted: int) -> None:
    assert exit_code(news("a-1", status, code=code)) == wanted


def test_a_job_that_never_ran_and_a_cluster_without_trainwright_are_said() -> None:
    with pytest.raises(ResourceError, match="without an exit code"):
        exit_code(news("a-1", "FAILED"))
    with pytest.raises(ResourceError, match="no trainwright"):
        exit_code(news("a-1", "FAILED", code=1), trainwright_missing=True)


def test_credentials_are_the_schemes_own_and_those_named(tmp_path: Path) -> None:
    file = tmp_path / "key.json"
    file.write_text('{"key": "kept"}')
    environment = {
        "AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "shh", "AWS_REGION": "", "AWS_PROFILE": "me", "OTHER": "x",
        "GOOGLE_APPLICATION_CREDENTIALS": str(file), "AZURE_STORAGE_ACCOUNT_KEY": "k",
    }  # fmt: skip
    found = collect_credentials(("s3", "gs"), ("OTHER",), environment)
    assert found.names == ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "GOOGLE_APPLICATION_CREDENTIALS", "OTHER")
    assert found.files == {"GOOGLE_APPLICATION_CREDENTIALS": '{"key": "kept"}'}
    assert "shh" not in repr(found) and "kept" not in repr(found) and JobCredentials.load(found.dump()) == found
    assert collect_credentials((), (), environment).names == ()
    with pytest.raises(JobError, match="NOT_THERE"):
        collect_credentials((), ("NOT_THERE",), environment)
    with pytest.raises(JobError, match="GOOGLE_APPLICATION_CREDENTIALS names a file that cannot be read"):
        collect_credentials(("gs",), (), {"GOOGLE_APPLICATION_CREDENTIALS": str(tmp_path / "none")})


def test_addresses_name_their_schemes_and_may_hold_no_credentials() -> None:
    assert storage_schemes("storage='s3://b/runs' train=parquet('gs://d') teams3://x") == ("gs", "s3")
    assert storage_schemes("parquet('abfss://box@me.dfs.core.windows.net/train'), gcs://d") == ("az", "gs")
    with pytest.raises(StorageError) as caught:
        storage_schemes("storage='s3://key:secret@b/runs'")
    assert "secret" not in str(caught.value)


def work(storage: str) -> JobRequest:
    return JobRequest(options=SubmitOptions(file="job.py"), command="fit", run="a", storage=storage, schemes=())


def test_a_folder_of_this_machine_is_no_storage_of_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_storage(work("s3://b/runs"), ("x", "y"), "here") == (work("s3://b/runs"), "")
    same, note = resolve_storage(work("runs"), ("here",), "here")
    assert (
        same.storage == str(tmp_path / "runs") and f"storage={tmp_path}/runs" in same.entrypoint(tmp_path) and not note
    )
    for hosts in (("x",), ("here", "x"), ()):
        with pytest.raises(StorageError, match="share no disk"):
            resolve_storage(work("runs"), hosts, "here")
    assert "share" in resolve_storage(work("/mnt/runs"), ("here", "x"), "here")[1]
    assert "is lost with it" in resolve_storage(work("file:///mnt/runs"), ("x",), "here")[1]


def test_the_entrypoint_is_quoted_and_relative_to_the_package(tmp_path: Path) -> None:
    wish = SubmitOptions(
        file=str(tmp_path / "in it" / "a job.py"), overrides=("name=a; rm -rf /",), fit_options=("--fresh",)
    )
    asked = JobRequest(options=wish, command="fit", run="a", storage="s3://b", schemes=())
    assert asked.entrypoint(tmp_path) == ("python -m trainwright fit 'in it/a job.py' --set 'name=a; rm -rf /' --fresh")


def folder(root: Path) -> Path:
    for name in ("job.py", "lib/helper.py", "data/big", "runs/a/log", "__pycache__/x.pyc", "notes.txt"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    (root / ".gitignore").write_text("data/\nnotes.txt\n")
    return root


def packed(root: Path) -> tuple[job_package.PackageContents, set[str]]:
    found = job_package.package_contents(root, needed=root / "job.py", without=(root / "runs",))
    uri, data = job_package.build_package(found)
    assert job_package.build_package(found) == (uri, data) and uri.startswith("gcs://_ray_pkg_")
    return found, set(zipfile.ZipFile(BytesIO(data)).namelist())


def test_a_package_holds_what_git_does_not_ignore(tmp_path: Path) -> None:
    root = folder(tmp_path)
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    found, names = packed(root)
    assert names == {".gitignore", "job.py", "lib/helper.py"}
    assert found.left_out == ("data", "notes.txt", "runs") and "3 files" in str(found)


def test_a_package_without_git_holds_all_but_runs_and_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    _, names = packed(folder(tmp_path))
    assert names == {".gitignore", "job.py", "lib/helper.py", "data/big", "notes.txt"}


@pytest.mark.parametrize("git", [True, False])
def test_credentials_and_what_is_outside_of_the_folder_stay_behind(
    git: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside, root = tmp_path / "outside", folder(tmp_path / "in")
    outside.mkdir()
    (outside / "passwd").write_text("root")
    secret = (
        ".env", ".env.prod", "conf/.aws/credentials", "conf/secrets.toml", "deploy/key.PEM",
        "job/service-account-7.json", "kaggle.json",
    )  # fmt: skip
    for name in (*secret, ".env.example", "lib/environment.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    (root / "lib" / "settings.txt").symlink_to(root / ".env")
    (root / "lib" / "alias.py").symlink_to("helper.py")
    (root / "lib" / "passwd").symlink_to(outside / "passwd")
    (root / "lib" / "folder").symlink_to(outside)
    if git:
        subprocess.run(["git", "init", "-q", str(root)], check=True)
        subprocess.run(["git", "-C", str(root), "add", "-f", "."], check=True)
    else:
        monkeypatch.setenv("PATH", os.devnull)
    found, names = packed(root)
    assert {name for name in names if not name.startswith(("data/", "notes"))} == {
        ".gitignore", "job.py", "lib/helper.py", "lib/alias.py", "lib/environment.py", ".env.example"
    }  # fmt: skip
    assert found.credentials == (*secret, "lib/settings.txt")
    assert found.links == ("lib/folder", "lib/passwd")
    assert ".env, .env.prod" in str(found) and "links that leave the folder: lib/folder, lib/passwd" in str(found)


def make_repository(root: Path) -> None:
    root.mkdir(parents=True)
    (root / "model.py").write_text("model")
    (root / "weights.bin").write_text("weights")
    (root / ".gitignore").write_text("*.bin\n")
    git = ["git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "a"]):
        subprocess.run([*git, *command], check=True)


@pytest.mark.parametrize("git", [True, False])
def test_submodules_other_repositories_and_links_to_folders_are_packed(git: bool, tmp_path: Path) -> None:
    root = folder(tmp_path / "in")
    make_repository(tmp_path / "model")
    if git:
        subprocess.run(["git", "init", "-q", str(root)], check=True)
        for path in ("third/model", "absent"):
            add = ["submodule", "--quiet", "add", str(tmp_path / "model"), path]
            subprocess.run(["git", "-C", str(root), "-c", "protocol.file.allow=always", *add], check=True)
        subprocess.run(["git", "-C", str(root), "submodule", "--quiet", "deinit", "-f", "absent"], check=True)
    else:
        make_repository(root / "third" / "model")
    make_repository(root / "clone")
    (root / "alias").symlink_to("third")
    (root / "lib" / "loop").symlink_to("..")
    _, names = packed(root)
    expected = {
        f"{place}/{name}" for place in ("third/model", "alias/model", "clone") for name in ("model.py", ".gitignore")
    }
    assert {name for name in names if name.startswith(("third", "alias", "clone", "lib/loop", "absent"))} == expected


@pytest.mark.parametrize("git", [True, False])
def test_links_to_runs_to_environments_and_to_themselves_are_not_packed(git: bool, tmp_path: Path) -> None:
    root = folder(tmp_path / "in")
    for path in ("runs/exp/checkpoints/weights", ".venv/bin/python"):
        (root / path).parent.mkdir(parents=True)
        (root / path).touch()
    for link, target in (("latest", "runs/exp"), ("env", ".venv"), ("itself", "itself")):
        (root / link).symlink_to(target)
    if git:
        subprocess.run(["git", "init", "-q", str(root)], check=True)
    _, names = packed(root)
    assert not [name for name in names if name.partition("/")[0] in ("runs", "latest", "env", "itself")]
    assert "job.py" in names


def test_where_git_fails_nothing_is_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = folder(tmp_path)
    (root / ".git").mkdir()
    with pytest.raises(ResourceError, match="ignored files would be sent") as caught:
        packed(root)
    assert "not a git repository" in str(caught.value.detail)
    monkeypatch.setenv("PATH", os.devnull)
    with pytest.raises(ResourceError, match="ignored files would be sent"):
        packed(root)


def test_a_name_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    root = folder(tmp_path)
    Path(os.fsdecode(os.fsencode(root) + b"/caf\xe9.txt")).write_text("a")
    with pytest.raises(ResourceError, match="not UTF-8"):
        packed(root)


def test_a_job_imports_from_the_packages_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_package_of_the_root.py").write_text("NAME = 'a'\n")
    (tmp_path / "exp").mkdir()
    (tmp_path / "exp" / "job.py").write_text("import my_package_of_the_root\nraise RuntimeError('was imported')\n")
    options = SubmitOptions(file=str(tmp_path / "exp" / "job.py"), folder=str(tmp_path))
    output = SubmitOutput(write_line=print, make_display=lambda: LogDisplay(print), attach_command="")
    with pytest.raises(UserCodeError, match="was imported"):
        Submission(options, "http://127.0.0.1:9", {}, output)


def test_a_jobs_own_file_goes_whatever_it_is_called(tmp_path: Path) -> None:
    (tmp_path / ".config").mkdir()
    job = tmp_path / ".config" / "job.py"
    job.write_text("job")
    assert job_package.package_contents(tmp_path, needed=job).files == (".config/job.py",)


def test_too_large_a_folder_is_refused_with_what_is_large_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(job_package, "_FOLDER_BYTES", 10)
        with pytest.raises(ResourceError, match=r"the largest are .*, lib \(13 B\)"):
            packed(folder(tmp_path))
    monkeypatch.setattr(job_package, "_ARCHIVE_BYTES", 10)
    with pytest.raises(ResourceError, match=r"compressed, has .*the largest are .*, lib \(13 B\)"):
        packed(folder(tmp_path))


def test_the_folder_is_the_files_own_or_one_around_it(tmp_path: Path) -> None:
    file = tmp_path / "in" / "job.py"
    assert (
        job_package.package_folder(str(file), None) == file.parent
        and job_package.package_folder(str(file), str(tmp_path)) == tmp_path
    )
    with pytest.raises(JobError, match="is not in it"):
        job_package.package_folder(str(file), str(tmp_path / "other"))
