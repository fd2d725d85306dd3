"""What must not be told is not: in events, descriptions, errors and addresses."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import trainwright as tw
from trainwright.core.errors import DataError, JobError, UserCodeError
from trainwright.core.events import Failed
from trainwright.core.redaction import REDACTED, is_secret, redact, redact_json
from trainwright.planning.job_description import describe, description_changes
from trainwright.storage.event_files import read_events
from trainwright.storage.event_log import EventLog
from trainwright.storage.object_store import open_store

CANARY = 'canary/"of\\mine"+='
"""As unusual as a secret may be."""

SECRET = (
    "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_SAS_TOKEN", "HF_TOKEN", "WANDB_API_KEY", "OPENAI_APIKEY", "MLFLOW_TRACKING_PASSWORD",
    "RAY_AUTH_TOKEN", "github_token", "PGPASSWORD", "MYSQL_PWD", "MYSQL_ROOT_PASSWORD", "SMTP_PASS", "SSHPASS",
    "GITHUB_PAT", "AZURE_STORAGE_CONNECTION_STRING", "SENTRY_DSN", "SLACK_WEBHOOK_URL", "NPM_CONFIG__AUTH",
    "CLIENTSECRET", "API_KEYS", "DJANGO_SECRET_KEY", "DB_PASSWORD2", "LDAP_BIND_PW", "VENDOR_CREDS",
    "DOCKER_AUTH_CONFIG", "CI_JOB_JWT_V2", "API_BEARER",
)  # fmt: skip
PLAIN = (
    "TOKENIZERS_PARALLELISM", "KEYBOARD", "PATH", "MONKEYS", "RAY_AUTH_TOKEN_PATH", "SSH_AUTH_SOCK", "HOME",
    "GOOGLE_APPLICATION_CREDENTIALS", "AWS_SHARED_CREDENTIALS_FILE", "PWD", "OLDPWD", "OLD_PWD", "PGPASSFILE",
    "COMPASS", "PATTERN", "RAY_AUTH_MODE", "DATABASE_URL", "TOKEN_URL",
)  # fmt: skip


@pytest.fixture(autouse=True)
def canary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANARY_TOKEN", CANARY)


def test_names_say_what_is_secret() -> None:
    assert [name for name in SECRET if not is_secret(name)] == []
    assert [name for name in PLAIN if is_secret(name)] == []


@given(before=st.text(), value=st.text(min_size=6), after=st.text())
def test_no_secret_is_left_in_any_text(before: str, value: str, after: str) -> None:
    environment = {"MY_TOKEN": value, "OTHER": "x"}
    assert value not in redact(before + value + after, environment).replace(REDACTED, "")
    (hidden,) = json.loads(redact_json(json.dumps([before + value + after]), environment))
    assert value not in hidden.replace(REDACTED, "")


def test_a_secret_is_found_as_it_is_quoted_and_none_hides_a_part_of_another() -> None:
    environment = {"SHORT_KEY": "canary", "LONG_KEY": CANARY}
    for quoted in (repr(CANARY), json.dumps(CANARY), CANARY):
        hidden = redact(f"{quoted} canary", environment)
        assert "mine" not in hidden and "canary" not in hidden


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        ("DATABASE_URL", "postgres://me:pass-w0rd@db.example.org:5432/runs?sslmode=require", "pass-w0rd"),
        ("DATABASE_URL", "mysql://me:p%40ss%2Fw0rd@db/runs", "p@ss/w0rd"),
        ("REDIS_URL", "redis://:pass-w0rd@10.0.0.7:6379/0", "pass-w0rd"),
        ("ANY_NAME", "broker=amqp://me:pass@w0rd@mq//", "pass@w0rd"),
        ("GIT_REMOTE", "https://ghp_0123456789abcdef@github.com/me/code.git", "ghp_0123456789abcdef"),
        ("DATABASE_URL", "postgresql://db/runs?user=me&password=pass-w0rd&sslmode=require", "pass-w0rd"),
        ("JDBC_URL", "jdbc:sqlserver://db:1433;user=me;password=pass-w0rd;encrypt=true", "pass-w0rd"),
        ("SIGNED", "https://b.s3.amazonaws.com/x?X-Amz-Expires=60&X-Amz-Signature=0f1e2d3c4b5a", "0f1e2d3c4b5a"),
        ("BLOB", "https://me.blob.core.windows.net/c/x?sv=2024&sp=r&sig=cGFzcw%2Fw0rd%3D", "cGFzcw/w0rd="),
        ("PG_DSN", "host=db user=me password=pass-w0rd dbname=runs", "pass-w0rd"),
        ("AZURE_STORAGE_CONNECTION_STRING", "AccountKey=cGFzcw+/w0rd==;EndpointSuffix=x", "cGFzcw+/w0rd=="),
    ],
)
def test_a_part_of_a_variable_that_is_secret_is_hidden_by_itself_too(name: str, value: str, secret: str) -> None:
    for text in (f"cannot open {value}", f"refused {secret}", repr({"password": secret})):
        assert secret not in redact(text, {name: value})
        assert json.dumps(secret)[1:-1] not in redact_json(json.dumps([text]), {name: value})


def test_a_password_in_an_address_is_hidden_wherever_it_comes_from() -> None:
    told = redact("cannot open 'postgres://me:abc@db/runs' and redis://:x@y", {})
    assert told == "cannot open 'postgres://me:***@db/runs' and redis://:***@y"
    assert json.loads(redact_json('{"a": ["https://me:abc@host/x"]}', {})) == {"a": ["https://me:***@host/x"]}


@pytest.mark.parametrize(
    "text",
    [
        "abfss://container@account.dfs.core.windows.net/x",
        "ssh://git@host/x",
        "http://host:80/a@b",
        "s3://b/a:b@c",
        "http://host/x?token_count=7&tokens=9",
        "s3://bucket/sig=1/x",
        "the password=secret;token=1",
    ],
)
def test_an_address_without_a_password_stays(text: str) -> None:
    assert redact(text, {}) == text and redact_json(json.dumps(text), {}) == json.dumps(text)


def test_what_is_no_secret_stays() -> None:
    assert redact("/home/thomas", {"REPOSITORY": "https://thomas@git.example.org/x"}) == "/home/thomas"
    text = "the learning rate true is no number"
    assert redact(text, {"SOME_KEY": "true", "PATH": "learning rate"}) == text


@pytest.mark.parametrize(
    "error",
    [
        UserCodeError(f"refused: {CANARY}", where=f"at {CANARY}", remedy=CANARY, detail=f"a\n{CANARY}"),
        JobError([f"x={CANARY}"], where=CANARY),
    ],
)
def test_every_text_of_an_error_is_rewritten(error: UserCodeError | JobError) -> None:
    error.hide(redact)
    assert REDACTED in str(error) and CANARY not in f"{error}{error.args}{error.__dict__}"
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and CANARY.encode() not in pickle.dumps(error)


def test_events_reach_storage_without_them(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    with EventLog(store, "run") as journal:
        journal.open(1)
        journal.write(Failed(cause=f"refused {CANARY}", detail=CANARY))
    (event,) = read_events(store, "run")
    assert isinstance(event, Failed) and event.cause == f"refused {REDACTED}"
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and json.dumps(CANARY)[1:-1] in path.read_text()]


def test_a_job_is_described_without_them() -> None:
    def loss(outputs: object, targets: object, address: str = "x") -> object:
        return outputs

    rows = tw.datasets.parquet("s3://bucket/" + CANARY)
    job = tw.Job(
        name="told", model=dict, optimizer=list, loss=loss, train=rows, inputs="x", targets="y", batch_size=1,
        storage=f"runs/{os.environ['CANARY_TOKEN']}",
    )  # fmt: skip
    told = describe(job)
    assert not [name for name, text in told.items() if CANARY in text]
    assert REDACTED in told["storage"] and REDACTED in told["train"]


def test_a_word_that_became_a_secret_is_no_change_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    job = tw.Job(
        name="told", model=dict, optimizer=list, loss=max, train=tw.datasets.parquet("s3://bucket/rows"),
        inputs="embedding", targets="y", batch_size=1,
    )  # fmt: skip
    before = describe(job)
    monkeypatch.setenv("SORT_KEY", "embedding")
    now = describe(job)
    assert before["inputs"] != now["inputs"]
    assert description_changes(before, now) == []
    assert description_changes(before, {**now, "targets": "z"}) == ["targets: y -> z"]
    (other,) = description_changes(before, {**now, "inputs": "image"})
    assert other == f"inputs: {REDACTED} -> image"


@pytest.mark.parametrize("kind", ["parquet", "csv", "json_lines", "tfrecord", "webdataset", "arrow", "images", "text"])
def test_an_address_with_a_password_is_no_data_set(kind: str) -> None:
    with pytest.raises(DataError, match="has a password in it") as caught:
        getattr(tw.datasets, kind)("s3://me:pass-word@bucket/train")
    assert "pass-word" not in str(caught.value) and "s3://***@bucket/train" in str(caught.value)
    assert "AWS_SECRET_ACCESS_KEY" in caught.value.remedy


def test_a_secret_that_is_set_or_changed_later_is_removed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "first-value and second-value"
    monkeypatch.setenv("TW_LATE_TOKEN", "first-value")
    assert redact(text) == "*** and second-value"
    monkeypatch.setenv("TW_LATE_TOKEN", "second-value")
    assert redact(text) == "first-value and ***"
    monkeypatch.delenv("TW_LATE_TOKEN")
    assert redact(text) == text
