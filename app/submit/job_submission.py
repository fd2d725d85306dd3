"""Submit a job file to a cluster: load it, pack its folder, send it and follow it; or attach to a job, or stop it.

A submission carries metadata in Ray, which tell whether a job of the same run exists already.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import shlex
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.job_submission import JobDetails, JobStatus

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
    collect_credentials,
    credential_package_uri,
    storage_schemes,
)
from trainwright.submit.job_package import build_package, package_contents, package_folder
from trainwright.submit.job_server import (
    JobAgentUnavailable,
    JobIdTaken,
    JobServer,
    JobServerUnreachable,
    LogDisplay,
    LogFollower,
    exit_code,
)

_STOP_TIMEOUT_S = 600  # time of a job for its last checkpoint before Ray kills it
_STOP_VARIABLE = "RAY_JOB_STOP_WAIT_TIME_S"
_ATTEMPTS = 5
_DETACHED_EXIT_CODE = 130  # exit code of Ctrl-C


@dataclass(frozen=True, kw_only=True)
class SubmitOutput:
    """Where the output of a submission goes, and the command that follows the job again."""

    write_line: Callable[[str], object]
    make_display: Callable[[], LogDisplay]
    attach_command: str


class Submission:
    """A request and the job server that it goes to. Every method may raise TrainwrightError.

    Args:
        environment: of this process; credentials come from it.
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
        """Send the job, or find one of the same run that runs already; return its ID.

        Args:
            attach: send nothing; find the run's latest job.
        """
        found = job_to_follow(self._server.jobs(), self._request.metadata, anyway=attach)
        if found is not None:
            self._output.write_line(f"attached to job {found.submission_id} ({found.status}) at {self._server.address}")
            return str(found.submission_id)
        package = self._package()
        for _ in range(_ATTEMPTS - 1):
            try:
                return self._send(package)
            except JobAgentUnavailable:  # the cluster has just started, and its agent has not
                continue
            except JobIdTaken:  # another command submitted at the same time, for this run or another storage
                found = job_to_follow(self._server.jobs(), self._request.metadata, anyway=False)
                if found is not None:
                    return str(found.submission_id)
        return self._send(package)

    def follow(self, submission: str) -> int:
        """Show the job's log to its end; return its exit code, or that of Ctrl-C, after which the job continues."""
        display = self._output.make_display()
        details = self._follow(submission, display)
        if details is None:
            return _DETACHED_EXIT_CODE
        return exit_code(details, trainwright_missing=display.trainwright_missing)

    def stop(self) -> int:
        """Stop the run's job with a checkpoint and show its log to the end; return 0 if it stopped."""
        job = _running(_jobs_of_run(self._server.jobs(), self._request.metadata))
        if job is None:
            raise RunConflict(
                f"no job of the run {self._request.run!r} is running on this cluster",
                where=self._server.address,
                remedy="--attach shows the log of its latest job",
            )
        time = formatting.duration(_STOP_TIMEOUT_S)
        self._output.write_line(f"stopping job {job.submission_id} with a checkpoint; it has {time} for that")
        self._server.stop(str(job.submission_id))
        details = self._follow(str(job.submission_id), self._output.make_display())
        if details is None:
            return _DETACHED_EXIT_CODE
        self._output.write_line(f"job {details.submission_id}: {details.status.lower()}")
        return 0 if details.status in (JobStatus.STOPPED, JobStatus.SUCCEEDED) else exit_code(details)

    def follow_hint(self) -> str:
        """Return the commands that follow and stop the job, in two lines."""
        command = self._output.attach_command
        return f"  follow it again  {command}\n  stop it          {command} --stop"

    def _follow(self, submission: str, display: LogDisplay) -> JobDetails | None:
        """Return how the job ended; None after Ctrl-C. Raises ResourceError."""
        try:
            return LogFollower(self._server, submission, display, say=self._output.write_line).follow()
        except KeyboardInterrupt:
            self._output.write_line(f"job {submission} continues without this terminal\n{self.follow_hint()}")
            return None
        except JobServerUnreachable as error:
            what = f"the cluster has not answered for too long; job {submission} may continue without this terminal"
            raise ResourceError(what, where=error.where, remedy=f"once it answers:\n{self.follow_hint()}") from error

    def _package(self) -> tuple[str, str]:
        """Upload the package unless the server has it; return its URI and the command to run in it."""
        options = self._request.options
        folder = package_folder(options.file, options.folder)
        storage = () if "://" in self._request.metadata.storage else (Path(self._request.metadata.storage),)
        contents = package_contents(folder, needed=Path(options.file).resolve(), without=storage)
        uri, data = build_package(contents)
        self._output.write_line(f"packed {contents}; {formatting.size(len(data))} to send")
        if not self._server.has_package(uri):
            self._server.upload(uri, data)
        return uri, self._request.entrypoint(folder)

    def _send(self, package: tuple[str, str]) -> str:
        """Submit the job under the next free ID. Raises JobIdTaken."""
        uri, entrypoint = package
        submission = next_submission_id(self._server.jobs(), self._request.run)
        variables = {_STOP_VARIABLE: str(_STOP_TIMEOUT_S), SENDER_VARIABLE: package_versions()["trainwright"]}
        runtime_env: dict[str, Any] = {"working_dir": uri, "env_vars": variables}
        options = self._request.options
        schemes = self._request.schemes if options.credentials else ()
        credentials = collect_credentials(schemes, options.env, self._environment)
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


# --- Options and request ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SubmitOptions:
    """Options of the command line."""

    file: str
    overrides: tuple[str, ...] = ()  # `field=value`, including those of `--strategy` and `--workers`
    fit_options: tuple[str, ...] = ()  # options to pass to `fit`: `--resume`, `--fresh`, `--verbose`
    env: tuple[str, ...] = ()  # names of additional variables to send
    credentials: bool = True  # whether to send credentials of storage
    folder: str | None = None  # to pack; None for the folder of the file


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """A job or a distillation to submit."""

    options: SubmitOptions
    command: str  # `fit` or `distill`
    run: str
    storage: str
    schemes: tuple[str, ...]  # kinds of object storage that the job uses

    @property
    def metadata(self) -> SubmissionMetadata:
        """Return the metadata of the submission."""
        facts = (Path(self.options.file).read_bytes(), *(item.encode() for item in sorted(self.options.overrides)))
        digest = hashlib.sha256(b"\0".join(facts)).hexdigest()[:16]
        return SubmissionMetadata(
            run=self.run,
            storage=canonical_uri(self.storage),
            digest=digest,
            fresh="--fresh" in self.options.fit_options,
        )

    def entrypoint(self, folder: Path) -> str:
        """Return the command that the cluster runs in the unpacked folder."""
        file = Path(self.options.file).resolve().relative_to(folder).as_posix()
        overrides = [part for item in self.options.overrides for part in ("--set", item)]
        return shlex.join(["python", "-m", "trainwright", self.command, file, *overrides, *self.options.fit_options])

    def with_storage(self, storage: str) -> JobRequest:
        """Return the request with another storage."""
        overrides = (*self.options.overrides, f"storage={storage}")
        return replace(self, options=replace(self.options, overrides=overrides), storage=storage)


def _load_request(options: SubmitOptions) -> JobRequest:
    """Load the file and check what needs no data. It imports from the package's folder, as on the cluster.

    Raises:
        TrainwrightError: as `fit`, or an address in the file contains credentials.
    """
    sys.path.insert(0, str(package_folder(options.file, options.folder)))
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
    """Yield the job, or the jobs in the parts of a distillation or recipe."""
    if isinstance(value, Job):
        yield value
    elif isinstance(value, StrictModel):
        for name in type(value).model_fields:
            yield from _jobs(getattr(value, name))


def resolve_storage(work: JobRequest, hosts: Sequence[str], here: str) -> tuple[JobRequest, str]:
    """Return the request with storage that means the same on the cluster, and a note about it.

    Raises:
        StorageError: the storage is a folder that no node of the cluster has.
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
    nodes = "its node, and is lost with it" if len(hosts) == 1 else "a disk that all nodes of the cluster share"
    return work, f"storage={folder} has to be on {nodes}; object storage (s3://, gs://, az://) needs none"


# --- Jobs of the same run ---------------------------------------------------------------------------------------------


_RUN, _STORAGE, _DIGEST, _FRESH = (f"trainwright_{word}" for word in ("run", "storage", "digest", "fresh"))


@dataclass(frozen=True, kw_only=True)
class SubmissionMetadata:
    """Metadata of a submission in Ray, which identify its run; they contain no secret."""

    run: str
    storage: str
    digest: str  # of the job file and its overrides
    fresh: bool = False  # whether it starts the run from the beginning

    def as_mapping(self) -> dict[str, str]:
        """Return the metadata in Ray's form."""
        return {
            _RUN: self.run, _STORAGE: self.storage, _DIGEST: self.digest, _FRESH: str(self.fresh).lower(),
            "job_name": self.run,
        }  # fmt: skip

    @classmethod
    def of(cls, metadata: Mapping[str, str]) -> SubmissionMetadata | None:
        """Return the metadata of a job in Ray; None if trainwright did not submit it."""
        if not all(name in metadata for name in (_RUN, _STORAGE, _DIGEST, _FRESH)):
            return None
        return cls(
            run=metadata[_RUN], storage=metadata[_STORAGE], digest=metadata[_DIGEST], fresh=metadata[_FRESH] == "true"
        )


def _jobs_of_run(jobs: Iterable[JobDetails], metadata: SubmissionMetadata) -> list[JobDetails]:
    """Return the jobs of the same run, the latest last."""
    marks = ((job, SubmissionMetadata.of(job.metadata or {})) for job in jobs)
    same = [job for job, other in marks if other and (other.run, other.storage) == (metadata.run, metadata.storage)]
    return sorted(same, key=lambda job: _number(str(job.submission_id), metadata.run))


def _running(jobs: Iterable[JobDetails]) -> JobDetails | None:
    """Return the job that has not ended."""
    return next((job for job in jobs if not job.status.is_terminal()), None)


def job_to_follow(jobs: Iterable[JobDetails], metadata: SubmissionMetadata, *, anyway: bool) -> JobDetails | None:
    """Return the job to follow; None if a new one must be submitted.

    Args:
        anyway: follow the running or latest job of the run in any case.

    Raises:
        RunConflict: the running job has another file or other options, or there is no job to follow.
    """
    known = _jobs_of_run(jobs, metadata)
    alive = _running(known)
    if anyway:
        if not known:
            raise RunConflict(
                f"no job of the run {metadata.run!r} was submitted to this cluster",
                where=metadata.storage,
                remedy="leave out --attach to submit it",
            )
        return alive or known[-1]
    if alive is None:
        return None
    other = SubmissionMetadata.of(alive.metadata or {})
    assert other is not None, "it is a job of the run"
    if other.digest != metadata.digest or (metadata.fresh and not other.fresh):
        changed = "with another job file or other options" if other.digest != metadata.digest else "without --fresh"
        raise RunConflict(
            f"the run {metadata.run!r} is already running {changed}",
            where=f"job {alive.submission_id}, {alive.status}",
            remedy="--attach follows it as it is; --stop ends it with a checkpoint, then submit again",
        )
    return alive


def next_submission_id(jobs: Iterable[JobDetails], run: str) -> str:
    """Return the ID of a new submission: the run's name and the next number."""
    return f"{run}-{1 + max((_number(str(job.submission_id), run) for job in jobs), default=0)}"


def _number(submission: str, run: str) -> int:
    found = re.fullmatch(rf"{re.escape(run)}-(\d+)", submission)
    return int(found[1]) if found else 0
