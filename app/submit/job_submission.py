"""A submission from its wish to its end: read, packed, sent, followed; or attached to, or stopped."""

from __future__ import annotations

import hashlib
import re
import secrets
import shlex
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray

from trainwright.core import formatting
from trainwright.core.errors import JobError, ResourceError, RunConflict, StorageError
from trainwright.core.frameworks import package_versions
from trainwright.core.job import Job
from trainwright.core.strict_model import StrictModel
from trainwright.planning.job_file import load
from trainwright.storage.object_store import canonical_uri
from trainwright.submit.job_credentials import (
    CREDENTIALS_VARIABLE,
    SENDER_VARIABLE,
    WORKER_SETUP_HOOK,
    JobCredentials,
    collect_credentials,
    credential_package_uri,
    storage_schemes,
)
from trainwright.submit.job_log import LogDisplay, LogFollower
from trainwright.submit.job_server import (
    JobAgentUnavailable,
    JobDetails,
    JobIdTaken,
    JobServer,
    JobServerUnreachable,
    exit_code,
)
from trainwright.submit.working_directory import build_package, package_contents, package_folder

_STOP_TIMEOUT_S = 600  # that a job has for its last checkpoint, before Ray kills it
_STOP_VARIABLE = "RAY_JOB_STOP_WAIT_TIME_S"
_ATTEMPTS = 5
_DETACHED_EXIT_CODE = 130  # exit code of Ctrl-C


@dataclass(frozen=True, kw_only=True)
class SubmitOutput:
    """How a submission speaks.

    Attributes:
        say: takes a line.
        screen: makes what shows the job's log.
        again: the command that attaches again.
    """

    say: Callable[[str], object]
    screen: Callable[[], LogDisplay]
    again: str


class Submission:
    """One work and the job server that it goes to. Raises TrainwrightError from every method.

    Args:
        environment: of this process, of which credentials are taken.
    """

    def __init__(self, wish: SubmitOptions, address: str, environment: Mapping[str, str], talk: SubmitOutput) -> None:
        self._environment, self._talk = environment, talk
        work = _load_request(wish)
        self._server = JobServer(address)
        if self._server.ray_version != ray.__version__:
            talk.say(f"note: the cluster has Ray {self._server.ray_version}, and this machine {ray.__version__}")
        self._work, note = resolve_storage(work, self._server.hosts(), socket.gethostname())
        if note:
            talk.say(f"note: {note}")

    def submit(self, *, attach: bool = False) -> str:
        """Send the work, or find the job of it that runs already; its id.

        Args:
            attach: send nothing, follow what there is.
        """
        found = job_to_follow(self._server.jobs(), self._work.mark, anyway=attach)
        if found is not None:
            self._talk.say(f"attached to job {found.id} ({found.status}) at {self._server.address}")
            return found.id
        package = self._packed()
        for _ in range(_ATTEMPTS - 1):
            try:
                return self._send(package)
            except JobAgentUnavailable:  # it has waited for its agent: the cluster has just come up
                continue
            except JobIdTaken:  # by another command at the same time, of this run or of another storage
                found = job_to_follow(self._server.jobs(), self._work.mark, anyway=False)
                if found is not None:
                    return found.id
        return self._send(package)

    def follow(self, submission: str) -> int:
        """Show the job's log to its end; the job's own exit code, or that of Ctrl-C, which lets the job go on."""
        screen = self._talk.screen()
        news = self._followed(submission, screen)
        return _DETACHED_EXIT_CODE if news is None else exit_code(news, lacks_trainwright=screen.lacks_trainwright)

    def stop(self) -> int:
        """End the run's job with a checkpoint, and show the log until it is over; 0 where it stopped."""
        job = _running_job(self._server.jobs(), self._work.mark)
        if job is None:
            raise RunConflict(
                f"no job of the run {self._work.run!r} is under way on this cluster",
                where=self._server.address,
                remedy="--attach shows the log of its newest one",
            )
        self._talk.say(
            f"stopping job {job.id} with a checkpoint; it has {formatting.duration(_STOP_TIMEOUT_S)} for that"
        )
        self._server.stop(job.id)
        news = self._followed(job.id, self._talk.screen())
        return _DETACHED_EXIT_CODE if news is None else self._stopped(news)

    def ways(self) -> str:
        """How to come back to the job, in lines."""
        return f"  follow it again  {self._talk.again}\n  stop it          {self._talk.again} --stop"

    def _followed(self, submission: str, screen: LogDisplay) -> JobDetails | None:
        """How the job ended; None where Ctrl-C came before. Raises ResourceError."""
        try:
            return LogFollower(self._server, submission, screen, say=self._talk.say).follow()
        except KeyboardInterrupt:
            self._talk.say(f"job {submission} goes on without this terminal\n{self.ways()}")
            return None
        except JobServerUnreachable as error:
            what = f"the cluster has not answered for too long; job {submission} may go on without this terminal"
            raise ResourceError(what, where=error.where, remedy=f"once it answers:\n{self.ways()}") from error

    def _stopped(self, news: JobDetails) -> int:
        """What came of the wish to stop."""
        self._talk.say(f"job {news.id}: {news.status.lower()}")
        return 0 if news.status in ("STOPPED", "SUCCEEDED") else exit_code(news)

    def _packed(self) -> tuple[str, str]:
        """The package's URI, which the server has then, and the command to run in it."""
        wish = self._work.wish
        folder = package_folder(wish.file, wish.folder)
        storage = () if "://" in self._work.mark.storage else (Path(self._work.mark.storage),)
        contents = package_contents(folder, needed=Path(wish.file).resolve(), without=storage)
        uri, data = build_package(contents)
        self._talk.say(f"packed {contents}; {formatting.size(len(data))} to send")
        if not self._server.has(uri):
            self._server.upload(uri, data)
        return uri, self._work.entrypoint(folder)

    def _credentials(self) -> JobCredentials:
        """What goes along."""
        wish, work = self._work.wish, self._work
        return collect_credentials(work.schemes if wish.credentials else (), wish.env, self._environment)

    def _send(self, package: tuple[str, str]) -> str:
        """Submit it under the next free id. Raises Taken."""
        uri, entrypoint = package
        submission = next_submission_id(self._server.jobs(), self._work.run)
        variables = {_STOP_VARIABLE: str(_STOP_TIMEOUT_S), SENDER_VARIABLE: package_versions()["trainwright"]}
        runtime_env: dict[str, Any] = {"working_dir": uri, "env_vars": variables}
        credentials = self._credentials()
        if credentials.names:
            variables[CREDENTIALS_VARIABLE] = f"{submission}.{secrets.token_hex(16)}"
            runtime_env["worker_process_setup_hook"] = WORKER_SETUP_HOOK
            self._server.upload(credential_package_uri(variables[CREDENTIALS_VARIABLE]), credentials.dump())
        self._server.submit(submission, entrypoint, runtime_env=runtime_env, metadata=self._work.mark.metadata())
        told = f", with the values of {', '.join(credentials.names)}" if credentials.names else ""
        self._talk.say(f"submitted job {submission} to {self._server.address}{told}")
        return submission


# --- What is to be submitted ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SubmitOptions:
    """What the command line asks for.

    Attributes:
        file: the job's.
        overrides: `field=value`, those of `--strategy` and `--workers` included.
        options: that `fit` gets too: `--resume`, `--fresh`, `--verbose`.
        env: further variables to send.
        credentials: whether any are sent.
        folder: to pack; None for the file's own.
    """

    file: str
    overrides: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    credentials: bool = True
    folder: str | None = None


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """A job, or a distillation, as the cluster gets it.

    Attributes:
        verb: `fit` or `distill`.
        run: name of the run; of a recipe's last one.
        storage: as the job says it.
        schemes: kinds of object storage that it uses.
    """

    wish: SubmitOptions
    verb: str
    run: str
    storage: str
    schemes: tuple[str, ...]

    @property
    def mark(self) -> SubmissionMetadata:
        """What tells it from other submissions."""
        facts = (Path(self.wish.file).read_bytes(), *(item.encode() for item in sorted(self.wish.overrides)))
        digest = hashlib.sha256(b"\0".join(facts)).hexdigest()[:16]
        return SubmissionMetadata(
            run=self.run, storage=canonical_uri(self.storage), digest=digest, fresh="--fresh" in self.wish.options
        )

    def entrypoint(self, folder: Path) -> str:
        """The command that the cluster runs in the unpacked folder."""
        file = Path(self.wish.file).resolve().relative_to(folder).as_posix()
        overrides = [part for item in self.wish.overrides for part in ("--set", item)]
        return shlex.join(["python", "-m", "trainwright", self.verb, file, *overrides, *self.wish.options])

    def at(self, storage: str) -> JobRequest:
        """The same work with its runs elsewhere."""
        overrides = (*self.wish.overrides, f"storage={storage}")
        return replace(self, wish=replace(self.wish, overrides=overrides), storage=storage)


def _load_request(wish: SubmitOptions) -> JobRequest:
    """Load the file, and check what can be checked without data.

    Raises:
        TrainwrightError: as `fit` would; or an address in it holds credentials.
    """
    value = load(wish.file, wish.overrides)
    job = next(_jobs(value), None)
    if job is None:
        raise JobError([f"{wish.file}: a {type(value).__name__} without a job cannot be submitted"])
    canonical_uri(job.storage)
    return JobRequest(
        wish=wish,
        verb="fit" if isinstance(value, Job) else "distill",
        run=job.name,
        storage=job.storage,
        schemes=storage_schemes(" ".join([repr(value), *wish.overrides])),
    )


def _jobs(value: Any) -> Iterator[Job]:
    """The job itself, or those of a distillation's and a recipe's parts."""
    if isinstance(value, Job):
        yield value
    elif isinstance(value, StrictModel):
        for name in type(value).model_fields:
            yield from _jobs(getattr(value, name))


def resolve_storage(work: JobRequest, hosts: Sequence[str], here: str) -> tuple[JobRequest, str]:
    """The work with storage that means the same on the cluster, and what is to be said of it. Pure but for paths.

    Args:
        hosts: names of the cluster's nodes.
        here: name of this machine.

    Raises:
        StorageError: the runs would be in a folder that no node of the cluster has.
    """
    scheme, found, rest = work.storage.partition("://")
    if found and scheme != "file":
        return work, ""
    folder = rest if found else work.storage
    if tuple(hosts) == (here,):
        return work.at(canonical_uri(work.storage)), ""
    if not Path(folder).is_absolute():
        raise StorageError(
            f"storage= is the folder {folder!r} of this machine, and nodes of a cluster share no disk",
            where=f"run {work.run!r}",
            remedy="--set storage=s3://BUCKET/runs (or gs://, az://), or an absolute folder that all nodes mount",
        )
    nodes = "its node, and goes with it" if len(hosts) == 1 else "a disk that all nodes of the cluster share"
    return work, f"storage={folder} has to be on {nodes}; object storage (s3://, gs://, az://) needs none"


# --- Whether a submission follows a job that runs already, or is a new one --------------------------------------------


_RUN, _STORAGE, _DIGEST, _FRESH = (f"trainwright_{word}" for word in ("run", "storage", "digest", "fresh"))


@dataclass(frozen=True, kw_only=True)
class SubmissionMetadata:
    """What tells submissions apart; goes with each as its metadata, and holds no secret.

    Attributes:
        run: name of the run.
        storage: where it is.
        digest: of the job's file and of what the command line changes in it.
        fresh: whether it begins the run again.
    """

    run: str
    storage: str
    digest: str
    fresh: bool = False

    def metadata(self) -> dict[str, str]:
        """As Ray stores it."""
        return {
            _RUN: self.run, _STORAGE: self.storage, _DIGEST: self.digest, _FRESH: str(self.fresh).lower(),
            "job_name": self.run,
        }  # fmt: skip

    @classmethod
    def of(cls, metadata: Mapping[str, str]) -> SubmissionMetadata | None:
        """That of a job; None where it is none of ours."""
        if not all(name in metadata for name in (_RUN, _STORAGE, _DIGEST, _FRESH)):
            return None
        return cls(
            run=metadata[_RUN], storage=metadata[_STORAGE], digest=metadata[_DIGEST], fresh=metadata[_FRESH] == "true"
        )


def _jobs_of_run(jobs: Iterable[JobDetails], mark: SubmissionMetadata) -> list[JobDetails]:
    """The submissions of the same run, the newest last."""
    marks = ((job, SubmissionMetadata.of(job.metadata)) for job in jobs)
    same = [job for job, other in marks if other and (other.run, other.storage) == (mark.run, mark.storage)]
    return sorted(same, key=lambda job: _number(job.id, mark.run))


def _running_job(jobs: Iterable[JobDetails], mark: SubmissionMetadata) -> JobDetails | None:
    """The one of the run that has not ended."""
    return next((job for job in _jobs_of_run(jobs, mark) if not job.over), None)


def job_to_follow(jobs: Iterable[JobDetails], mark: SubmissionMetadata, *, anyway: bool) -> JobDetails | None:
    """The job to follow; None where a new one is to be submitted.

    Args:
        anyway: follow whatever there is of the run, and if it is over the newest.

    Raises:
        RunConflict: the run's job goes by another file, or is not the fresh one that is wanted; or there is none to
            follow.
    """
    known = _jobs_of_run(jobs, mark)
    alive = next((job for job in known if not job.over), None)
    if anyway:
        if not known:
            raise RunConflict(
                f"no job of the run {mark.run!r} was submitted to this cluster",
                where=mark.storage,
                remedy="leave --attach out to submit it",
            )
        return alive or known[-1]
    if alive is None:
        return None
    other = SubmissionMetadata.of(alive.metadata)
    assert other is not None, "it is one of the run's"
    if other.digest != mark.digest or (mark.fresh and not other.fresh):
        changed = "by another job file or other options" if other.digest != mark.digest else "and not begun afresh"
        raise RunConflict(
            f"the run {mark.run!r} is under way {changed}",
            where=f"job {alive.id}, {alive.status}",
            remedy="--attach follows it as it is; --stop ends it with a checkpoint, then submit again",
        )
    return alive


def next_submission_id(jobs: Iterable[JobDetails], run: str) -> str:
    """Of a new submission: the run's name and the next number."""
    return f"{run}-{1 + max((_number(job.id, run) for job in jobs), default=0)}"


def _number(submission: str, run: str) -> int:
    found = re.fullmatch(rf"{re.escape(run)}-(\d+)", submission)
    return int(found[1]) if found else 0
