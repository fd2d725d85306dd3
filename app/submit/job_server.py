"""The job server of a cluster, Ray's own, over HTTP: every call has a deadline, every trouble a remedy."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import urllib.parse
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import requests
from ray.exceptions import AuthenticationError
from ray.job_submission import JobSubmissionClient

from trainwright.core.errors import ResourceError, TrainwrightError

CONNECT_S, ANSWER_S, SILENCE_S = 10.0, 60.0, 30.0
_CLOSING = aiohttp.ClientWSTimeout(ws_close=CONNECT_S)
_FINAL_STATES = frozenset({"STOPPED", "SUCCEEDED", "FAILED"})
_OWN_ADDRESS = "RAY_API_SERVER_ADDRESS"  # Ray takes this before any argument


class JobServerUnreachable(ResourceError):
    """The job server does not answer now, which may pass by itself."""


class JobAgentUnavailable(ResourceError):
    """The job server is up, but what starts jobs is not yet."""


class JobIdTaken(ResourceError):
    """There is a job of this id already."""


@dataclass(frozen=True, kw_only=True)
class JobDetails:
    """A job as the server tells it.

    Attributes:
        id: of the submission.
        status: `PENDING`, `RUNNING`, `STOPPED`, `SUCCEEDED` or `FAILED`.
        metadata: that it was submitted with.
        message: what the server says of it.
        code: that its driver ended with, negative for a signal; None where that is not known.
    """

    id: str
    status: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    message: str = ""
    exit_code: int | None = None

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        return self.status in _FINAL_STATES

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> JobDetails:
        """Of the server's JSON."""
        return cls(
            id=told["submission_id"],
            status=told["status"],
            metadata=told.get("metadata") or {},
            message=told.get("message") or "",
            exit_code=told.get("driver_exit_code"),
        )


class _Client(JobSubmissionClient):
    """Ray's client, with a deadline for each call."""

    def _do_request(self, method: str, endpoint: str, **options: Any) -> requests.Response:
        asked = super()._do_request(method, endpoint, timeout=(CONNECT_S, ANSWER_S), **options)
        assert isinstance(asked, requests.Response)
        return asked

    def ask(self, method: str, endpoint: str, **options: Any) -> requests.Response:
        """One request. Raises what `requests` raises, and AuthenticationError."""
        return self._do_request(method, endpoint, **options)

    async def tail(self, path: str) -> AsyncIterator[str]:
        """Pieces of a text that grows; ends where the server closes or says nothing for long.

        Pings would tell a dead connection from a silent server, but this one answers none. Raises aiohttp.ClientError,
        OSError.
        """
        limits = aiohttp.ClientTimeout(total=None, connect=CONNECT_S)
        connecting = aiohttp.ClientSession(headers=self._headers, cookies=self._cookies, timeout=limits)
        async with (
            connecting as session,
            session.ws_connect(self._address + path, ssl=self._tls, max_msg_size=0, timeout=_CLOSING) as stream,
        ):
            with contextlib.suppress(TimeoutError):
                while (message := await stream.receive(timeout=SILENCE_S)).type == aiohttp.WSMsgType.TEXT:
                    yield message.data

    @property
    def _tls(self) -> Any:
        return True if self._ssl_context is None else self._ssl_context


class JobServer:
    """What is asked of a job server.

    Args:
        address: `http://HOST:PORT`.

    Attributes:
        ray_version: of the cluster.

    Raises:
        Unreachable: nobody answers there.
        ResourceError: it answers, but no job server does, or it wants a token.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        logging.getLogger("ray.dashboard.modules.dashboard_sdk").setLevel(logging.ERROR)
        with self._explained(), _address_override(address):
            self._client = _Client(address)
            self.ray_version = str(self._ask("GET", "/api/version").json()["ray_version"])

    def jobs(self) -> tuple[JobDetails, ...]:
        """All that were submitted."""
        listed = self._ask("GET", "/api/jobs/").json()
        return tuple(JobDetails.of(told) for told in listed if told.get("submission_id"))

    def job(self, submission: str) -> JobDetails:
        """One of them."""
        return JobDetails.of(self._ask("GET", f"/api/jobs/{urllib.parse.quote(submission)}").json())

    def log(self, submission: str) -> str:
        """Its whole log so far."""
        return str(self._ask("GET", f"/api/jobs/{urllib.parse.quote(submission)}/logs").json()["logs"])

    def stop(self, submission: str) -> None:
        """Ask for its end: SIGTERM to its driver."""
        self._ask("POST", f"/api/jobs/{urllib.parse.quote(submission)}/stop")

    def hosts(self) -> tuple[str, ...]:
        """Names of the living nodes' hosts; none where the server does not tell."""
        told = self._ask("GET", "/nodes?view=summary").json()
        nodes = (told.get("data") or {}).get("summary") or []
        alive = [node for node in nodes if (node.get("raylet") or {}).get("state", "ALIVE") == "ALIVE"]
        return tuple(str(node.get("hostname", "")) for node in alive)

    def upload(self, uri: str, data: bytes) -> None:
        """Keep a package, under `gcs://NAME.zip`."""
        self._ask("PUT", f"/api/packages/{uri.replace('://', '/')}", data=data)

    def has_package(self, uri: str) -> bool:
        """Whether it keeps such a package."""
        with self._explained():
            found = self._client.ask("GET", f"/api/packages/{uri.replace('://', '/')}")
        return found.status_code == requests.codes.ok

    def submit(
        self, submission: str, entrypoint: str, *, runtime_env: Mapping[str, Any], metadata: Mapping[str, str]
    ) -> None:
        """Start a job. Raises Taken where there is one of this id, and Busy."""
        try:
            with self._explained():
                self._client.submit_job(
                    entrypoint=entrypoint, submission_id=submission, runtime_env=dict(runtime_env),
                    metadata=dict(metadata),
                )  # fmt: skip
        except ResourceError as error:
            if "already exists" in error.what:
                raise JobIdTaken(f"there is a job {submission} already", where=self.address) from error
            if "No available agent" in error.what:
                what = "the cluster is up, but its agent that starts jobs is not"
                raise JobAgentUnavailable(
                    what, where=self.address, remedy="try again in a minute; see the head's logs"
                ) from error
            raise

    async def tail(self, submission: str) -> AsyncIterator[str]:
        """Its log from the beginning on, in pieces; ends where the server says so. Raises Unreachable."""
        try:
            async for piece in self._client.tail(f"/api/jobs/{urllib.parse.quote(submission)}/logs/tail"):
                yield piece
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._unreachable(error) from error

    def _ask(self, method: str, path: str, **options: Any) -> requests.Response:
        with self._explained():
            found = self._client.ask(method, path, **options)
        if found.status_code != requests.codes.ok:
            raise ResourceError(
                f"the job server answers {found.status_code} to {method} {path.partition('?')[0]}",
                where=self.address,
                remedy="is this the address of Ray's dashboard? see its page in a browser, and the head's logs",
                detail=found.text[:2000],
            )
        return found

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn errors of Ray's client and of HTTP into ours."""
        try:
            yield
        except TrainwrightError:
            raise
        except AuthenticationError as error:
            raise self._refused() from error
        except (requests.exceptions.RequestException, ConnectionError) as error:
            raise self._unreachable(error) from error
        except (RuntimeError, ValueError, KeyError) as error:
            raise ResourceError(
                f"the job server refuses: {error}", where=self.address, remedy="see the head's dashboard logs"
            ) from error

    def _refused(self) -> ResourceError:
        return ResourceError(
            "the cluster wants a token that proves who you are, or refuses the one that it got",
            where=self.address,
            remedy="set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN to the cluster's token, or RAY_AUTH_TOKEN_PATH to a "
            "file with it; by default it is read from ~/.ray/auth_token",
        )

    def _unreachable(self, error: BaseException) -> JobServerUnreachable:
        local = urllib.parse.urlsplit(self.address).hostname in ("127.0.0.1", "localhost", "::1")
        tunnel = "in a second terminal, run `ray dashboard cluster.yaml`, which brings it here; or " if local else ""
        return JobServerUnreachable(
            f"nobody answers at the job server's address: {type(error).__name__}",
            where=self.address,
            remedy=f"{tunnel}give the right one: --address http://HOST:8265; is the cluster up?",
        )


@contextlib.contextmanager
def _address_override(address: str) -> Iterator[None]:
    """Within it Ray's client takes this address, whatever the environment says."""
    before = os.environ.get(_OWN_ADDRESS)
    os.environ[_OWN_ADDRESS] = address
    try:
        yield
    finally:
        if before is None:
            del os.environ[_OWN_ADDRESS]
        else:
            os.environ[_OWN_ADDRESS] = before


# --- Which job server is meant ----------------------------------------------------------------------------------------


DEFAULT_ADDRESS = "http://127.0.0.1:8265"
_VARIABLES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
_HTTP = ("http://", "https://")


def job_server_address(given: str | None, environment: Mapping[str, str]) -> str:
    """The address of the job server: what is given, else what the environment says, else this machine's own port.

    Of the environment only http addresses count: `RAY_ADDRESS` may also be that of a cluster that is joined.

    Raises:
        ResourceError: what is given is the address of something else, or holds credentials.
    """
    if given is None:
        found = (environment.get(name, "") for name in _VARIABLES)
        given = next((value for value in found if value.startswith(_HTTP)), DEFAULT_ADDRESS)
    parts = urllib.parse.urlsplit(given)
    if not given.startswith(_HTTP) or not parts.hostname:
        raise ResourceError(
            "this is no address of a job server, which is spoken to over HTTP",
            where=f"--address {_without_credentials(given)}",
            remedy="give the dashboard's address: http://HOST:8265; ray dashboard cluster.yaml brings it to "
            f"{DEFAULT_ADDRESS}",
        )
    if "@" in parts.netloc:
        raise ResourceError(
            "the address of the job server holds credentials",
            where="--address",
            remedy="leave them out; a token is read from RAY_AUTH_TOKEN or ~/.ray/auth_token where RAY_AUTH_MODE=token",
        )
    return given.rstrip("/")


def _without_credentials(address: str) -> str:
    head, at, tail = address.rpartition("@")
    return f"{head.partition('://')[0]}://...@{tail}" if at else tail


# --- How a submitted job ended, as the command that followed it ends --------------------------------------------------


_STOPPED = 128 + signal.SIGTERM  # what Ray sends to stop a job


def exit_code(job: JobDetails, *, trainwright_missing: bool = False) -> int:
    """The code of the job's own driver; of one that a signal ended, 128 and its number.

    Args:
        job: that is over.
        trainwright_missing: its log says that there is no trainwright on the cluster.

    Raises:
        ResourceError: it never ran, or its driver went without a word.
    """
    if job.exit_code is not None and job.exit_code != 0 and trainwright_missing:
        raise ResourceError(
            "the cluster's Python has no trainwright",
            where=f"job {job.id}",
            remedy="install it on every node: see setup_commands in cluster.yaml, then `ray up cluster.yaml`",
        )
    if job.exit_code is not None:
        return job.exit_code if job.exit_code >= 0 else 128 - job.exit_code
    if job.status == "SUCCEEDED":
        return 0
    if job.status == "STOPPED":
        return _STOPPED
    raise ResourceError(
        "the cluster ended the job without an exit code: its driver could not start, or its node went",
        where=f"job {job.id}",
        remedy="submit it again: a run goes on where it was; --verbose shows what Ray says",
        detail=job.message,
    )
