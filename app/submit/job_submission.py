"""A submission from its options to its end: read, packed, sent, followed; or attached to, or stopped."""

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
        display: makes what shows the job's log.
        again: the command that attaches again.
    """

    write_line: Callable[[str], object]
    make_display: Callable[[], LogDisplay]
    attach_command: str


class Submission:
    """One work and the job server that it goes to. Raises TrainwrightError from every method.

    Args:
        environment: of this process, of which credentials are taken.
    """

    def __init__(
        self, options: SubmitOptions, address: str, environment: Mapping[str, str], output: SubmitOutput
    ) -> None:
        self._environment, self._output = environment, output
        work = _load_request(options)
        self._server = JobServer(address)
        if self._server.ray_version != ray.__version__:
            output.write_line(
                f"note: the cluster has Ray {self._server.ray_version}, and this machine {ray.__version__}"
            )
        self._request, note = resolve_storage(work, self._server.hosts(), socket.gethostname())
        if note:
            output.write_line(f"note: {note}")

    def submit(self, *, attach: bool = False) -> str:
        """Send the work, or find the job of it that runs already; its id.

        Args:
            attach: send nothing, follow what there is.
        """
        found = job_to_follow(self._server.jobs(), self._request.metadata, anyway=attach)
        if found is not None:
            self._output.write_line(f"attached to job {found.id} ({found.status}) at {self._server.address}")
            return found.id
        package = self._package()
        for _ in range(_ATTEMPTS - 1):
            try:
                return self._send(package)
            except JobAgentUnavailable:  # it has waited for its agent: the cluster has just come up
                continue
            except JobIdTaken:  # by another command at the same time, of this run or of another storage
                found = job_to_follow(self._server.jobs(), self._request.metadata, anyway=False)
                if found is not None:
                    return found.id
        return self._send(package)

    def follow(self, submission: str) -> int:
        """Show the job's log to its end; the job's own exit code, or that of Ctrl-C, which lets the job go on."""
        display = self._output.make_display()
        details = self._follow(submission, display)
        return (
            _DETACHED_EXIT_CODE
            if details is None
            else exit_code(details, trainwright_missing=display.trainwright_missing)
        )

    def stop(self) -> int:
        """End the run's job with a checkpoint, and show the log until it is over; 0 where it stopped."""
        job = _running_job(self._server.jobs(), self._request.metadata)
        if job is None:
            raise RunConflict(
                f"no job of the run {self._request.run!r} is under way on this cluster",
                where=self._server.address,
                remedy="--attach shows the log of its newest one",
            )
        self._output.write_line(
            f"stopping job {job.id} with a checkpoint; it has {formatting.duration(_STOP_TIMEOUT_S)} for that"
        )
        self._server.stop(job.id)
        details = self._follow(job.id, self._output.make_display())
        return _DETACHED_EXIT_CODE if details is None else self._stop_exit_code(details)

    def follow_hint(self) -> str:
        """How to come back to the job, in lines."""
        return (
            f"  follow it again  {self._output.attach_command}\n  stop it          {self._output.attach_command} --stop"
        )

    def _follow(self, submission: str, display: LogDisplay) -> JobDetails | None:
        """How the job ended; None where Ctrl-C came before. Raises ResourceError."""
        try:
            return LogFollower(self._server, submission, display, say=self._output.write_line).follow()
        except KeyboardInterrupt:
            self._output.write_line(f"job {submission} goes on without this terminal\n{self.follow_hint()}")
            return None
        except JobServerUnreachable as error:
            what = f"the cluster has not answered for too long; job {submission} may go on without this terminal"
            raise ResourceError(what, where=error.where, remedy=f"once it answers:\n{self.follow_hint()}") from error

    def _stop_exit_code(self, details: JobDetails) -> int:
        """What came of the options to stop."""
        self._output.write_line(f"job {details.id}: {details.status.lower()}")
        return 0 if details.status in ("STOPPED", "SUCCEEDED") else exit_code(details)

    def _package(self) -> tuple[str, str]:
        """The package's URI, which the server has then, and the command to run in it."""
        options = self._request.options
        folder = package_folder(options.file, options.folder)
        storage = () if "://" in self._request.metadata.storage else (Path(self._request.metadata.storage),)
        contents = package_contents(folder, needed=Path(options.file).resolve(), without=storage)
        uri, data = build_package(contents)
        self._output.write_line(f"packed {contents}; {formatting.size(len(data))} to send")
        if not self._server.has_package(uri):
            self._server.upload(uri, data)
        return uri, self._request.entrypoint(folder)

    def _credentials(self) -> JobCredentials:
        """What goes along."""
        options, work = self._request.options, self._request
        return collect_credentials(work.schemes if options.credentials else (), options.env, self._environment)

    def _send(self, package: tuple[str, str]) -> str:
        """Submit it under the next free id. Raises Taken."""
        uri, entrypoint = package
        submission = next_submission_id(self._server.jobs(), self._request.run)
        variables = {_STOP_VARIABLE: str(_STOP_TIMEOUT_S), SENDER_VARIABLE: package_versions()["trainwright"]}
        runtime_env: dict[str, Any] = {"working_dir": uri, "env_vars": variables}
        credentials = self._credentials()
        if credentials.names:
            variables[CREDENTIALS_VARIABLE] = f"{submission}.{secrets.token_hex(16)}"
            runtime_env["worker_process_setup_hook"] = WORKER_SETUP_HOOK
            self._server.upload(credential_package_uri(variables[CREDENTIALS_VARIABLE]), credentials.dump())
        self._server.submit(
            submission, entrypoint, runtime_env=runtime_env, metadata=self._request.metadata.as_mapping()
        )
        told = f", with the values of {', '.join(credentials.names)}" if credentials.names else ""
        self._output.write_line(f"submitted job {submission} to {self._server.address}{told}")
        return submission


# --- What is to be submitted ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SubmitOptions:
    """What the command line asks for.

    Attributes:
        file: the job's.
        overrides: `field=value`, those of `--strategy` and `--workers` included.
        fit_options: that `fit` gets too: `--resume`, `--fresh`, `--verbose`.
        env: further variables to send.
        credentials: whether any are sent.
        folder: to pack; None for the file's own.
    """

    file: str
    overrides: tuple[str, ...] = ()
    fit_options: tuple[str, ...] = ()
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

    options: SubmitOptions
    command: str
    run: str
    storage: str
    schemes: tuple[str, ...]

    @property
    def metadata(self) -> SubmissionMetadata:
        """What tells it from other submissions."""
        facts = (Path(self.options.file).read_bytes(), *(item.encode() for item in sorted(self.options.overrides)))
        digest = hashlib.sha256(b"\0".join(facts)).hexdigest()[:16]
        return SubmissionMetadata(
            run=self.run,
            storage=canonical_uri(self.storage),
            digest=digest,
            fresh="--fresh" in self.options.fit_options,
        )

    def entrypoint(self, folder: Path) -> str:
        """The command that the cluster runs in the unpacked folder."""
        file = Path(self.options.file).resolve().relative_to(folder).as_posix()
        overrides = [part for item in self.options.overrides for part in ("--set", item)]
        return shlex.join(["python", "-m", "trainwright", self.command, file, *overrides, *self.options.fit_options])

    def with_storage(self, storage: str) -> JobRequest:
        """The same work with its runs elsewhere."""
        overrides = (*self.options.overrides, f"storage={storage}")
        return replace(self, options=replace(self.options, overrides=overrides), storage=storage)


def _load_request(options: SubmitOptions) -> JobRequest:
    """Load the file, and check what can be checked without data.

    Raises:
        TrainwrightError: as `fit` would; or an address in it holds credentials.
    """
    value = load(options.file, options.overrides)
    job = next(_jobs(value), None)
    if job is None:
        raise JobError([f"{options.file}: a {type(value).__name__} without a job cannot be submitted"])
    canonical_uri(job.storage)
    return JobRequest(
        options=options,
        command="fit" if isinstance(value, Job) else "distill",
        run=job.name,
        storage=job.storage,
        schemes=storage_schemes(" ".join([repr(value), *options.overrides])),
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
        return work.with_storage(canonical_uri(work.storage)), ""
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

    def as_mapping(self) -> dict[str, str]:
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


def _jobs_of_run(jobs: Iterable[JobDetails], metadata: SubmissionMetadata) -> list[JobDetails]:
    """The submissions of the same run, the newest last."""
    marks = ((job, SubmissionMetadata.of(job.metadata)) for job in jobs)
    same = [job for job, other in marks if other and (other.run, other.storage) == (metadata.run, metadata.storage)]
    return sorted(same, key=lambda job: _number(job.id, metadata.run))


def _running_job(jobs: Iterable[JobDetails], metadata: SubmissionMetadata) -> JobDetails | None:
    """The one of the run that has not ended."""
    return next((job for job in _jobs_of_run(jobs, metadata) if not job.ended), None)


def job_to_follow(jobs: Iterable[JobDetails], metadata: SubmissionMetadata, *, anyway: bool) -> JobDetails | None:
    """The job to follow; None where a new one is to be submitted.

    Args:
        anyway: follow whatever there is of the run, and if it is over the newest.

    Raises:
        RunConflict: the run's job goes by another file, or is not the fresh one that is wanted; or there is none to
            follow.
    """
    known = _jobs_of_run(jobs, metadata)
    alive = next((job for job in known if not job.ended), None)
    if anyway:
        if not known:
            raise RunConflict(
                f"no job of the run {metadata.run!r} was submitted to this cluster",
                where=metadata.storage,
                remedy="leave --attach out to submit it",
            )
        return alive or known[-1]
    if alive is None:
        return None
    other = SubmissionMetadata.of(alive.metadata)
    assert other is not None, "it is one of the run's"
    if other.digest != metadata.digest or (metadata.fresh and not other.fresh):
        changed = "by another job file or other options" if other.digest != metadata.digest else "and not begun afresh"
        raise RunConflict(
            f"the run {metadata.run!r} is under way {changed}",
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
