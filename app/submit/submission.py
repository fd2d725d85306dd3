"""A submission from its wish to its end: read, packed, sent, followed; or attached to, or stopped."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from trainwright.core.errors import ResourceError, RunConflict
from trainwright.reporting import formatting
from trainwright.reporting.versions import versions
from trainwright.submit.attach import attached, next_id, running
from trainwright.submit.credential_handoff import CREDENTIALS, HOOK, SENDER, package_of
from trainwright.submit.credentials import Credentials, credentials_of
from trainwright.submit.exit_code import exit_code
from trainwright.submit.job_request import Wish, read, settle
from trainwright.submit.job_server import Busy, JobNews, JobServer, Taken, Unreachable
from trainwright.submit.log_follower import Follower, Screen
from trainwright.submit.package import contents_of, folder_of, pack

STOP_S = 600  # that a job has for its last checkpoint, before Ray kills it
_STOP_VARIABLE = "RAY_JOB_STOP_WAIT_TIME_S"
_TRIES = 5
DETACHED = 130  # exit code of Ctrl-C


@dataclass(frozen=True, kw_only=True)
class Talk:
    """How a submission speaks.

    Attributes:
        say: takes a line.
        screen: makes what shows the job's log.
        again: the command that attaches again.
    """

    say: Callable[[str], object]
    screen: Callable[[], Screen]
    again: str


class Submission:
    """One work and the job server that it goes to. Raises TrainwrightError from every method.

    Args:
        environment: of this process, of which credentials are taken.
    """

    def __init__(self, wish: Wish, address: str, environment: Mapping[str, str], talk: Talk) -> None:
        self._environment, self._talk = environment, talk
        work = read(wish)
        self._server = JobServer(address)
        if self._server.ray_version != ray.__version__:
            talk.say(f"note: the cluster has Ray {self._server.ray_version}, and this machine {ray.__version__}")
        self._work, note = settle(work, self._server.hosts(), socket.gethostname())
        if note:
            talk.say(f"note: {note}")

    def submit(self, *, attach: bool = False) -> str:
        """Send the work, or find the job of it that runs already; its id.

        Args:
            attach: send nothing, follow what there is.
        """
        found = attached(self._server.jobs(), self._work.mark, anyway=attach)
        if found is not None:
            self._talk.say(f"attached to job {found.id} ({found.status}) at {self._server.address}")
            return found.id
        package = self._packed()
        for _ in range(_TRIES - 1):
            try:
                return self._send(package)
            except Busy:  # it has waited for its agent: the cluster has just come up
                continue
            except Taken:  # by another command at the same time, of this run or of another storage
                found = attached(self._server.jobs(), self._work.mark, anyway=False)
                if found is not None:
                    return found.id
        return self._send(package)

    def follow(self, submission: str) -> int:
        """Show the job's log to its end; the job's own exit code, or that of Ctrl-C, which lets the job go on."""
        screen = self._talk.screen()
        news = self._followed(submission, screen)
        return DETACHED if news is None else exit_code(news, lacks_trainwright=screen.lacks_trainwright)

    def stop(self) -> int:
        """End the run's job with a checkpoint, and show the log until it is over; 0 where it stopped."""
        job = running(self._server.jobs(), self._work.mark)
        if job is None:
            raise RunConflict(
                f"no job of the run {self._work.run!r} is under way on this cluster",
                where=self._server.address,
                remedy="--attach shows the log of its newest one",
            )
        self._talk.say(f"stopping job {job.id} with a checkpoint; it has {formatting.duration(STOP_S)} for that")
        self._server.stop(job.id)
        news = self._followed(job.id, self._talk.screen())
        return DETACHED if news is None else self._stopped(news)

    def ways(self) -> str:
        """How to come back to the job, in lines."""
        return f"  follow it again  {self._talk.again}\n  stop it          {self._talk.again} --stop"

    def _followed(self, submission: str, screen: Screen) -> JobNews | None:
        """How the job ended; None where Ctrl-C came before. Raises ResourceError."""
        try:
            return Follower(self._server, submission, screen, say=self._talk.say).follow()
        except KeyboardInterrupt:
            self._talk.say(f"job {submission} goes on without this terminal\n{self.ways()}")
            return None
        except Unreachable as error:
            what = f"the cluster has not answered for too long; job {submission} may go on without this terminal"
            raise ResourceError(what, where=error.where, remedy=f"once it answers:\n{self.ways()}") from error

    def _stopped(self, news: JobNews) -> int:
        """What came of the wish to stop."""
        self._talk.say(f"job {news.id}: {news.status.lower()}")
        return 0 if news.status in ("STOPPED", "SUCCEEDED") else exit_code(news)

    def _packed(self) -> tuple[str, str]:
        """The package's URI, which the server has then, and the command to run in it."""
        wish = self._work.wish
        folder = folder_of(wish.file, wish.folder)
        storage = () if "://" in self._work.mark.storage else (Path(self._work.mark.storage),)
        contents = contents_of(folder, needed=Path(wish.file).resolve(), without=storage)
        uri, data = pack(contents)
        self._talk.say(f"packed {contents}; {formatting.size(len(data))} to send")
        if not self._server.has(uri):
            self._server.upload(uri, data)
        return uri, self._work.entrypoint(folder)

    def _credentials(self) -> Credentials:
        """What goes along."""
        wish, work = self._work.wish, self._work
        return credentials_of(work.schemes if wish.credentials else (), wish.env, self._environment)

    def _send(self, package: tuple[str, str]) -> str:
        """Submit it under the next free id. Raises Taken."""
        uri, entrypoint = package
        submission = next_id(self._server.jobs(), self._work.run)
        variables = {_STOP_VARIABLE: str(STOP_S), SENDER: versions()["trainwright"]}
        runtime_env: dict[str, Any] = {"working_dir": uri, "env_vars": variables}
        credentials = self._credentials()
        if credentials.names:
            variables[CREDENTIALS] = f"{submission}.{secrets.token_hex(16)}"
            runtime_env["worker_process_setup_hook"] = HOOK
            self._server.upload(package_of(variables[CREDENTIALS]), credentials.dump())
        self._server.submit(submission, entrypoint, runtime_env=runtime_env, metadata=self._work.mark.metadata())
        told = f", with the values of {', '.join(credentials.names)}" if credentials.names else ""
        self._talk.say(f"submitted job {submission} to {self._server.address}{told}")
        return submission
