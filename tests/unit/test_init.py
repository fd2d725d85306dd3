"""`trainwright init`: samples with a user's values, whose comments stay and whose values arrive."""

from __future__ import annotations

import subprocess
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from trainwright.cli import cluster_commands
from trainwright.cli.cluster_commands import TEMPLATES, ask_values, parse_values, read_template
from trainwright.cli.main import app
from trainwright.cluster_files.placeholders import ClusterFileError, fill_placeholders, find_placeholders
from trainwright.cluster_files.validation import check

ROOT = Path(__file__).resolve().parents[2]
PRESENT = [kind for kind, name in TEMPLATES.items() if (ROOT / "clusters" / name).is_file()]
BATCH = """#!/bin/bash
# CHANGE nodes: hosts of the run
#SBATCH --nodes=3
# CHANGE job: your job file
JOB=job.py # beside this script
echo "$JOB"
"""


def run(*arguments: object) -> str:
    done = CliRunner().invoke(app, ["init", *map(str, arguments)])
    if done.exception:
        raise done.exception
    return done.stdout


@pytest.mark.parametrize("kind", PRESENT)
def test_every_kind_is_written_as_it_is(kind: str, tmp_path: Path) -> None:
    out = tmp_path / "file"
    said = run("--cluster", kind, "--out", out)
    assert out.read_text(encoding="utf-8") == read_template(kind)
    assert 3 <= len(said.splitlines()) <= 6 and str(out) in said
    assert not [one for one in check(out) if one.verdict == "bad"]


@pytest.mark.parametrize("kind", ["aws", "kuberay"])
def test_images_have_the_version_of_ray_that_is_installed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here = metadata.version("ray")
    monkeypatch.setattr(cluster_commands.metadata, "version", lambda package: "2.55.7")
    text = read_template(kind)
    assert here not in text and text.count("2.55.7") >= 2


@pytest.mark.parametrize("kind", PRESENT)
def test_every_value_of_every_kind_can_be_given(kind: str) -> None:
    text = read_template(kind)
    for marker in find_placeholders(text):
        value = str(int(marker.value) + 1) if marker.value.isdecimal() else f"{marker.value}x"
        if marker.value.startswith("[") or marker.value in ("true", "false"):
            continue
        changed = fill_placeholders(text, {marker.name: value})
        now = {found.name: found.value for found in find_placeholders(changed)}
        assert now == {found.name: found.value for found in find_placeholders(text)} | {marker.name: value}
        before, after = text.splitlines(), changed.splitlines()
        assert [n for n, (a, b) in enumerate(zip(before, after, strict=True), 1) if a != b] == [marker.line]


ODD = [
    "a: b", "#x", "a #b", "it's", '"q"', "yes", "null", "12", "1e3", "- a", "{a}", "[a]",
    "*a", "&a b", "a\\b", " ", "é", "@", "2026-01-01",
]  # fmt: skip


@pytest.mark.parametrize("value", ODD)
def test_odd_values_arrive_as_text(value: str) -> None:
    changed = fill_placeholders(read_template("aws"), {"key_name": value, "region": value})
    config = yaml.safe_load(changed)
    assert config["provider"]["region"] == value
    nodes = [kind["node_config"] for kind in config["available_node_types"].values()]
    assert [node["KeyName"] for node in nodes] == [value, value], "the alias follows"


@settings(max_examples=60)
@given(value=st.text(st.characters(categories=["L", "N", "P", "S", "Zs"]), min_size=1, max_size=12))
def test_any_line_of_text_arrives_or_is_refused(value: str) -> None:
    text = "# CHANGE a: x\na: b # stays\nc: 1\n"
    if not value.isprintable():
        with pytest.raises(ClusterFileError):
            fill_placeholders(text, {"a": value})
        return
    changed = fill_placeholders(text, {"a": value})
    assert yaml.safe_load(changed) == {"a": value, "c": 1}
    assert changed.endswith(" # stays\nc: 1\n")


@pytest.mark.parametrize("value", ["it's", "a b", "$HOME", "a;b", '"q"', "#x", "`id`"])
def test_a_script_gets_quotes_where_the_shell_needs_them(value: str) -> None:
    assert [found.value for found in find_placeholders(fill_placeholders(BATCH, {"job": value}))] == ["3", value]


@pytest.mark.parametrize(
    ("value", "becomes"),
    [
        ("~/envs/my venv", "/home/me/envs/my venv"), ("/scratch/$ME/tw", "/scratch/me 2/tw"), ("${ME}x", "me 2x"),
        ("$(id)", "$(id)"), ("a~/b", "a~/b"), ("`id`$ME", "`id`$ME"),
    ],
)  # fmt: skip
def test_a_script_expands_home_and_variables_and_runs_nothing(value: str, becomes: str) -> None:
    line = fill_placeholders(BATCH, {"job": value}).split("# CHANGE job")[1].splitlines()[1]
    name = line.partition("=")[0]
    environment = {"HOME": "/home/me", "ME": "me 2"}
    ran = subprocess.run(["bash", "-c", f'{line}\necho "${name}"'], env=environment, capture_output=True, check=True)
    assert ran.stdout.decode() == f"{becomes}\n"


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [(BATCH, "nodes", "3 4"), (BATCH, "nodes", ""), (BATCH, "nodes", "~/3"), (BATCH, "nodes", "$N"),
     (BATCH, "job", "a\nb"), ("# CHANGE n: x\nn: 1\n", "n", "many"),
     ("# CHANGE n: x\nn: 1\n", "n", "1: 2"), ("# CHANGE n: x\nn: 1\n", "n", "[1"),
     ("# CHANGE n: x\nn: 1\n", "n", "2 # a"),
     ("# CHANGE a: x\na: b\n", "a", "")],
)  # fmt: skip
def test_a_value_that_cannot_stand_there_is_refused(text: str, name: str, value: str) -> None:
    with pytest.raises(ClusterFileError, match=r"not a valid value|does not fit"):
        fill_placeholders(text, {name: value})


def test_a_list_may_be_given_without_brackets() -> None:
    text = "# CHANGE hosts: x\nhosts: [a, b]\n"
    assert yaml.safe_load(fill_placeholders(text, {"hosts": "c, d, e"})) == {"hosts": ["c", "d", "e"]}


@pytest.mark.parametrize("text", ["# CHANGE a: x\n", "# CHANGE a: x\n\n", "# CHANGE a: x\nb: 1\n# CHANGE a: x\nc: 2\n"])
def test_a_mark_without_a_value_of_its_own_is_told(text: str) -> None:
    with pytest.raises(ClusterFileError, match="CHANGE a"):
        find_placeholders(text)


def test_an_unknown_name_is_told_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ClusterFileError, match="'region'"):
        run("--cluster", "aws", "--set", "regoin=x", "--out", tmp_path / "f")
    assert not (tmp_path / "f").exists()
    with pytest.raises(ClusterFileError, match="'kuberay'"):
        run("--cluster", "kubray", "--out", tmp_path / "f")
    with pytest.raises(ClusterFileError, match="name=value"):
        parse_values(["region"])


def test_a_file_that_is_there_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "f"
    out.write_text("mine", encoding="utf-8")
    with pytest.raises(ClusterFileError, match="--force"):
        run("--cluster", "aws", "--out", out)
    assert out.read_text(encoding="utf-8") == "mine"
    run("--cluster", "aws", "--out", out, "--force", "--yes", "--set", "max_workers=9", "--set", "max_nodes=9")
    assert yaml.safe_load(out.read_text(encoding="utf-8"))["max_workers"] == 9


def test_what_is_not_given_is_asked_for() -> None:
    asked = []
    known = find_placeholders(read_template("aws"))
    values = ask_values(known, {"region": "eu-west-1"}, lambda marker: asked.append(marker.name) or marker.value)
    assert asked == [marker.name for marker in known if marker.name != "region"]
    assert yaml.safe_load(fill_placeholders(read_template("aws"), values))["provider"]["region"] == "eu-west-1"
