"""Client of Ray's job server over HTTP: its address, calls with deadlines, exit codes and logs of jobs."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import os
import re
import signal
import time
import urllib.parse
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from typing import Any

import aiohttp
import requests
from ray.exceptions import AuthenticationError
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient

from trainwright.core.errors import ResourceError, TrainwrightError

_CONNECT_S, _ANSWER_S, _SILENCE_S = 10.0, 60.0, 30.0
_CLOSING = aiohttp.ClientWSTimeout(ws_close=_CONNECT_S)
_OWN_ADDRESS = "RAY_API_SERVER_ADDRESS"  # Ray takes this before any argument


class JobServerUnreachable(ResourceError):
    """The job server does not answer; it may answer later."""


class JobAgentUnavailable(ResourceError):
    """The job server answers, but its agent that starts jobs does not run yet."""


class JobIdTaken(ResourceError):
    """A job with this ID already exists."""


class _Client(JobSubmissionClient):
    """Ray's client, with a deadline for each call."""

    def _do_request(self, method: str, endpoint: str, **options: Any) -> requests.Response:
        asked = super()._do_request(method, endpoint, timeout=(_CONNECT_S, _ANSWER_S), **options)
        assert isinstance(asked, requests.Response)
        return asked

    def ask(self, method: str, endpoint: str, **options: Any) -> requests.Response:
        """Send one request. Raises what `requests` raises, and AuthenticationError."""
        return self._do_request(method, endpoint, **options)

    async def tail(self, path: str) -> AsyncIterator[str]:
        """Yield pieces of a growing text until the server closes the connection or is silent for long.

        The server answers no pings, so a silent connection may be dead. Raises aiohttp.ClientError and OSError.
        """
        limits = aiohttp.ClientTimeout(total=None, connect=_CONNECT_S)
        connecting = aiohttp.ClientSession(headers=self._headers, cookies=self._cookies, timeout=limits, trust_env=True)
        tls = True if self._ssl_context is None else self._ssl_context
        async with (
            connecting as session,
            session.ws_connect(self._address + path, ssl=tls, max_msg_size=0, timeout=_CLOSING) as stream,
        ):
            with contextlib.suppress(TimeoutError):
                while (message := await stream.receive(timeout=_SILENCE_S)).type == aiohttp.WSMsgType.TEXT:
                    yield message.data


class JobServer:
    """A connection to a job server.

    Args:
        address: `http://HOST:PORT`.

    Raises:
        JobServerUnreachable: no server answers.
        ResourceError: the server is no job server, or requires a token.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        logging.getLogger("ray.dashboard.modules.dashboard_sdk").setLevel(logging.ERROR)
        with self._explained(), _address_override(address):
            self._client = _Client(address)
            self.ray_version = str(self._ask("GET", "/api/version").json()["ray_version"])

    def jobs(self) -> tuple[JobDetails, ...]:
        """Return all submitted jobs."""
        with self._explained():
            return tuple(job for job in self._client.list_jobs() if job.submission_id)

    def job(self, submission: str) -> JobDetails:
        """Return one job."""
        with self._explained():
            return self._client.get_job_info(submission)

    def log(self, submission: str) -> str:
        """Return the log of a job so far."""
        with self._explained():
            return self._client.get_job_logs(submission)

    def stop(self, submission: str) -> None:
        """Stop a job: Ray sends SIGTERM to its driver."""
        with self._explained():
            self._client.stop_job(submission)

    def hosts(self) -> tuple[str, ...]:
        """Return host names of the living nodes; none if the server does not report them."""
        told = self._ask("GET", "/nodes?view=summary").json()
        nodes = (told.get("data") or {}).get("summary") or []
        alive = [node for node in nodes if (node.get("raylet") or {}).get("state", "ALIVE") == "ALIVE"]
        return tuple(str(node.get("hostname", "")) for node in alive)

    def upload(self, uri: str, data: bytes) -> None:
        """Upload a package under `gcs://NAME.zip`."""
        # As a file it is sent in pieces, each with a deadline; as bytes, all would have to be sent in that time.
        self._ask("PUT", f"/api/packages/{uri.replace('://', '/')}", data=io.BytesIO(data))

    def has_package(self, uri: str) -> bool:
        """Return whether the server has a package."""
        with self._explained():
            found = self._client.ask("GET", f"/api/packages/{uri.replace('://', '/')}")
        return found.status_code == requests.codes.ok

    def submit(
        self, submission: str, entrypoint: str, *, runtime_env: Mapping[str, Any], metadata: Mapping[str, str]
    ) -> None:
        """Start a job. Raises JobIdTaken and JobAgentUnavailable."""
        try:
            with self._explained():
                self._client.submit_job(
                    entrypoint=entrypoint, submission_id=submission, runtime_env=dict(runtime_env),
                    metadata=dict(metadata),
                )  # fmt: skip
        except ResourceError as error:
            if "already exists" in error.what:
                raise JobIdTaken(f"a job {submission} already exists", where=self.address) from error
            if "No available agent" in error.what:
                what = "the cluster runs, but its agent that starts jobs does not"
                raise JobAgentUnavailable(
                    what, where=self.address, remedy="try again in a minute; see the head's logs"
                ) from error
            raise

    async def tail(self, submission: str) -> AsyncIterator[str]:
        """Yield the log of a job from its start, in pieces. Raises JobServerUnreachable."""
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
                remedy="check that this is the address of Ray's dashboard, and see the head's logs",
                detail=found.text[:2000],
            )
        return found

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn errors of Ray's client and of HTTP into TrainwrightErrors."""
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
            "the cluster requires a token, or refuses the one that was sent",
            where=self.address,
            remedy="set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN to the cluster's token, or RAY_AUTH_TOKEN_PATH to a "
            "file with it; by default it is read from ~/.ray/auth_token",
        )

    def _unreachable(self, error: BaseException) -> JobServerUnreachable:
        local = urllib.parse.urlsplit(self.address).hostname in ("127.0.0.1", "localhost", "::1")
        forward = "in a second terminal, run `ray dashboard cluster.yaml`, which forwards it to this machine; or "
        tunnel = forward if local else ""
        return JobServerUnreachable(
            f"no job server answers at this address: {type(error).__name__}",
            where=self.address,
            remedy=f"{tunnel}give the right address: --address http://HOST:8265; check that the cluster runs",
        )


@contextlib.contextmanager
def _address_override(address: str) -> Iterator[None]:
    """Let Ray's client use this address instead of that of the environment."""
    before = os.environ.get(_OWN_ADDRESS)
    os.environ[_OWN_ADDRESS] = address
    try:
        yield
    finally:
        if before is None:
            del os.environ[_OWN_ADDRESS]
        else:
            os.environ[_OWN_ADDRESS] = before


# --- Address of the job server ----------------------------------------------------------------------------------------


DEFAULT_ADDRESS = "http://127.0.0.1:8265"
_VARIABLES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
_HTTP = ("http://", "https://")


def job_server_address(given: str | None, environment: Mapping[str, str]) -> str:
    """Return the address of the job server: the given one, that of the environment, or the default port here.

    Of the environment only http addresses count, since `RAY_ADDRESS` may also be the address of a cluster to join.

    Raises:
        ResourceError: the given address is not that of a job server, or contains credentials.
    """
    if given is None:
        found = (environment.get(name, "") for name in _VARIABLES)
        given = next((value for value in found if value.startswith(_HTTP)), DEFAULT_ADDRESS)
    parts = urllib.parse.urlsplit(given)
    if not given.startswith(_HTTP) or not parts.hostname:
        raise ResourceError(
            "this is not an HTTP address of a job server",
            where=f"--address {_without_credentials(given)}",
            remedy="give the dashboard's address: http://HOST:8265; ray dashboard cluster.yaml forwards it to "
            f"{DEFAULT_ADDRESS}",
        )
    if "@" in parts.netloc:
        raise ResourceError(
            "the address of the job server contains credentials",
            where="--address",
            remedy="remove them; a token is read from RAY_AUTH_TOKEN or ~/.ray/auth_token where RAY_AUTH_MODE=token",
        )
    return given.rstrip("/")


def _without_credentials(address: str) -> str:
    head, at, tail = address.rpartition("@")
    return f"{head.partition('://')[0]}://...@{tail}" if at else tail


# --- Exit codes of jobs -----------------------------------------------------------------------------------------------


_STOPPED = 128 + signal.SIGTERM  # Ray sends SIGTERM to stop a job


def exit_code(job: JobDetails, *, trainwright_missing: bool = False) -> int:
    """Return the exit code of the job's driver; 128 plus the number of a signal.

    Args:
        trainwright_missing: whether its log says that the cluster has no trainwright.

    Raises:
        ResourceError: the job never ran, or its driver ended without an exit code.
    """
    code = job.driver_exit_code
    if code and trainwright_missing:
        raise ResourceError(
            "the cluster's Python has no trainwright",
            where=f"job {job.submission_id}",
            remedy="install it on every node: see setup_commands in cluster.yaml, then `ray up cluster.yaml`",
        )
    if code is not None:
        return code if code >= 0 else 128 - code
    if job.status == JobStatus.SUCCEEDED:
        return 0
    if job.status == JobStatus.STOPPED:
        return _STOPPED
    raise ResourceError(
        "the cluster ended the job without an exit code: its driver could not start, or its node was lost",
        where=f"job {job.submission_id}",
        remedy="submit it again, which resumes the run; --verbose shows Ray's output",
        detail=job.message or "",
    )


# --- The log of a job, followed to its end over connections that may break --------------------------------------------


_RECONNECT_S = 120.0  # without an answer of the server until following ends
_PAUSE_S = 1.0
_POLL_S = 5.0  # between two requests for the whole log


class LogDisplay:
    """Shows the lines of a job's log, without Ray's own lines unless `verbose` is set.

    Attributes:
        trainwright_missing: whether a line said that the cluster's Python has no trainwright.
    """

    def __init__(self, write_line: Callable[[str], object], *, verbose: bool = False) -> None:
        self._write_line, self._verbose = write_line, verbose
        self.trainwright_missing = False

    def show(self, text: str) -> None:
        """Show one line of the log."""
        self.trainwright_missing = self.trainwright_missing or reports_missing_trainwright(text)
        if self._verbose or not is_ray_message(text):
            self._write_line(text)


class LogFollower:
    """Follows one job to its end.

    Args:
        patience_s: how long the server may not answer.
        say: takes a line about the connection.
    """

    def __init__(
        self,
        server: JobServer,
        submission: str,
        display: LogDisplay,
        *,
        patience_s: float = _RECONNECT_S,
        say: Callable[[str], object] = lambda _: None,
    ) -> None:
        self._server, self._submission, self._display = server, submission, display
        self._patience_s, self._say = patience_s, say
        self._cursor = LogCursor()
        self._lost_s: float | None = None

    def follow(self) -> JobDetails:
        """Show the log until the job has ended; return its details.

        Lines come over a WebSocket. Where a proxy lets none through, the whole log is asked for again and again.

        Raises:
            JobServerUnreachable: the server has not answered for too long.
            KeyboardInterrupt: Ctrl-C.
        """
        return asyncio.run(self._follow())

    async def _follow(self) -> JobDetails:
        while True:
            pause_s = _PAUSE_S
            try:
                connected = await self._show()
                details = await asyncio.to_thread(self._server.job, self._submission)
                self._found()
                ended = details.status.is_terminal()
                if ended or not connected:
                    await self._show_rest()
                    pause_s = _POLL_S
                if ended:
                    self._show_lines(self._cursor.flush())
                    return details
            except JobServerUnreachable as error:
                self._lose(error)
            await asyncio.sleep(pause_s)

    async def _show(self) -> bool:
        """Show what one connection sends; return whether there was one."""
        self._cursor.rewind()
        try:
            async for piece in self._server.tail(self._submission):
                self._found()
                self._show_lines(self._cursor.feed(piece))
        except JobServerUnreachable:  # the request for the job's state, which follows, tells whether the server answers
            return False
        return True

    async def _show_rest(self) -> None:
        """Show what no connection sent."""
        self._cursor.rewind()
        self._show_lines(self._cursor.feed(await asyncio.to_thread(self._server.log, self._submission)))

    def _show_lines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._display.show(line)

    def _found(self) -> None:
        if self._lost_s is not None:
            self._say("the cluster answers again")
        self._lost_s = None

    def _lose(self, error: JobServerUnreachable) -> None:
        """Start or continue to wait; raise the error after too long."""
        now_s = time.monotonic()
        if self._lost_s is None:
            self._lost_s = now_s
            self._say(f"the connection to {self._server.address} is lost; trying again for {self._patience_s:.0f} s")
        elif now_s - self._lost_s > self._patience_s:
            raise error


# --- Lines of a log ---------------------------------------------------------------------------------------------------


_RAY_MESSAGE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+\s+INFO \w+\.py:\d+ -- |Running entrypoint for job ")
_NO_TRAINWRIGHT = re.compile(
    r"No module named '?trainwright\b|Error while finding module specification for 'trainwright"
)


class LogCursor:
    """Position in a log. Each connection sends the log from its start; the cursor skips what was shown already."""

    def __init__(self) -> None:
        self._told = self._place = 0
        self._rest = ""

    def rewind(self) -> None:
        """Start with a new connection."""
        self._place = 0

    def feed(self, text: str) -> list[str]:
        """Return the lines that a piece of the log completes."""
        new = text[max(0, self._told - self._place) :]
        self._place += len(text)
        self._told = max(self._told, self._place)
        *lines, self._rest = (self._rest + new).split("\n")
        return lines

    def flush(self) -> list[str]:
        """Return the last line if it has no line end."""
        rest, self._rest = self._rest, ""
        return [rest] if rest else []


def is_ray_message(line: str) -> bool:
    """Return whether a line is Ray's own output about the start of a job."""
    return _RAY_MESSAGE.match(line) is not None


def reports_missing_trainwright(line: str) -> bool:
    """Return whether a line says that the cluster's Python has no trainwright."""
    return _NO_TRAINWRIGHT.search(line) is not None
