"""Search the temperature and the share of the hard loss with which a student learns best, and whether that helps it.

    <storage>/<name>/search.json            what is searched
    <storage>/<name>/t4-alpha0.1-seed0/     a run like any other, and so on; alone-seed0: the student without teachers
    <storage>/<name>/found.json             the result

Each setting is trained with the first seed, the best ones and the student alone with all seeds. The best setting on the
validation set and the student alone are then evaluated once on the test set.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, TypeAdapter, model_validator
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trainwright.core import formatting
from trainwright.core.errors import JobError, NonFiniteLoss, RunConflict, TrainwrightError, nearest
from trainwright.core.strict_model import StrictModel
from trainwright.datasets import Dataset, split
from trainwright.distillation.distillation_job import ComposedJob, LoadedDistillation, compose_job, train_teachers
from trainwright.distillation.distillation_spec import STUDENT, Distillation
from trainwright.distillation.student_evaluation import evaluate_students
from trainwright.distillation.trained_student import students_of
from trainwright.inference.run_inference import evaluate
from trainwright.planning.job_description import describe, description_changes
from trainwright.reporting.progress_bar import print_status
from trainwright.reporting.scorecard import Scorecard
from trainwright.storage.checkpoints import find_checkpoint
from trainwright.storage.object_store import Store, canonical_uri, open_store
from trainwright.tuning.trials import SearchMetric, TrialWatcher, delete_search, fixed_layout, train_trials

if TYPE_CHECKING:
    from trainwright.core.job import Job
    from trainwright.core.soft_loss import SoftLoss

_SEARCH_FILE, _RESULT_FILE = "search.json", "found.json"
_BASELINE = "alone"  # the student without teachers
_SIGNIFICANT_DEVIATIONS = 2.0  # a gain of so many deviations counts


class Search(StrictModel):
    """What `tw.search` does: a distillation with each of several settings and seeds, and the student alone.

    Attributes:
        distillation: of one student with targets and metrics. Its `evaluate=` is the test set, which is used once,
            after the setting is chosen. Teacher outputs are computed first, once for all runs, unless `way="inline"`.
        name: of the search; by default the student's, with `-search`.
        temperatures: to try, in place of the loss's own; none in regression.
        alphas: to try, in place of the loss's own.
        seeds: number of seeds, counted from the student's.
        validation: data set on which settings are compared, or a share to split off from the training set.
        metric: of the student, by which settings are compared.
        mode: whether a larger or a smaller metric is better.
        finalists: settings that are trained with all seeds: the best with the first seed. None trains all settings
            with all seeds.
        concurrent: runs at a time; by default 8 at most, and at most as many as the cluster has accelerators, or CPUs,
            for. A run has one worker, unless the student's job says otherwise.
    """

    distillation: Distillation
    name: str = ""
    temperatures: tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...] = (1.0, 2.0, 4.0)
    alphas: tuple[Annotated[float, Field(ge=0, le=1)], ...] = (0.1, 0.5)
    seeds: Annotated[int, Field(ge=1)] = 3
    validation: Any = 0.1
    metric: str = "accuracy"
    mode: Literal["max", "min"] = "max"
    finalists: Annotated[int, Field(ge=1)] | None = 2
    concurrent: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Search:
        problems = [*self._distillation_problems(), *self._setting_problems()]
        if problems:
            raise JobError(problems)
        return self

    def distill(self, *, resume: bool = False, fresh: bool = False, verbose: bool = False) -> SearchResult:
        """See `search`."""
        return search(self, resume=resume, fresh=fresh, verbose=verbose)

    @property
    def student(self) -> Job:
        """The student's job as it would be trained alone, on all rows."""
        return self.distillation.student

    @property
    def run_name(self) -> str:
        """Name of the search."""
        return self.name or f"{self.student.name}-search"

    @property
    def folder(self) -> str:
        """Folder of its runs."""
        return f"{canonical_uri(self.student.storage).rstrip('/')}/{self.run_name}"

    @property
    def seed_values(self) -> tuple[int, ...]:
        """The seeds."""
        return tuple(range(self.student.training.seed, self.student.training.seed + self.seeds))

    def rank(self, value: float) -> float:
        """Return a number that is larger for a better value of the metric; NaN and infinity come last."""
        return SearchMetric(name=self.metric, largest=self.mode == "max").rank(value)

    def settings(self) -> dict[str, tuple[Setting, SoftLoss]]:
        """Return all settings by name, with their losses. Raises JobError for a loss without teachers, `alpha=1`."""
        settings = {}
        for temperature, alpha in product(self.temperatures or (None,), self.alphas or (None,)):
            values = {"temperature": temperature, "alpha": alpha}
            values = {name: value for name, value in values.items() if value is not None}
            name = "-".join(f"{key[0] if key == 'temperature' else key}{value:g}" for key, value in values.items())
            name = name or "given"
            loss = self.distillation.loss.replace(**values)
            settings[name] = (Setting(name=name, temperature=temperature, alpha=alpha), loss)
        return settings

    def _distillation_problems(self) -> list[str]:
        job, distillation, problems = self.student, self.distillation, []
        if distillation.students or distillation.mutual or distillation.joint:
            problems.append("distillation: students=, mutual= and joint= train several: a search is of one student")
        if not distillation.teachers:
            problems.append("distillation: there is no teacher: give teachers=")
        if not job.target_names or job.loss is None:
            problems.append("student: it has no targets= and loss=, so that it cannot be trained alone for comparison")
        if job.evaluate is None:
            problems.append("student: evaluate= is missing: give the test set, which is looked at once at the end")
        if self.metric == "loss":
            problems.append('metric="loss" differs with the setting: name one of the student\'s metrics=')
        elif self.metric not in job.metrics:
            problems.append(f"metric={self.metric!r} is none of the student's: {nearest(self.metric, job.metrics)}")
        return problems

    def _setting_problems(self) -> list[str]:
        """Problems of the settings and of the validation set."""
        problems, share = [], self.validation
        if not isinstance(share, Dataset) and not (isinstance(share, float) and 0 < share < 1):
            problems.append(f"validation={share!r}: give a data set, or a share of the training set between 0 and 1")
        for name, values in (("temperatures", self.temperatures), ("alphas", self.alphas)):
            if len(set(values)) < len(values):
                problems.append(f"{name}= names one twice")
        try:
            self.settings()
            self.student.replace(name=self.run_name)
        except JobError as error:
            problems += error.problems
        return problems


def search(search: Search, *, resume: bool = False, fresh: bool = False, verbose: bool = False) -> SearchResult:
    """Find the temperature and alpha with which a student learns best from its teachers, and whether teachers help it.

    Each setting and the student without teachers are trained as separate runs, some at a time, and compared on a
    validation set. The best setting and the student alone are evaluated on the test set once. Teachers with
    `train=True` are trained first; teacher outputs are computed once for all runs. The same call continues where an
    earlier one was stopped or killed, and returns the stored result where it is finished.

    Args:
        search: what to try.
        resume: continue the runs of a search of this name although it was changed.
        fresh: delete the results of the search, and start again.
        verbose: show Ray's own output.

    Raises:
        JobError: students, teachers and their layers do not match.
        RunConflict: the name belongs to another search; or, with `fresh`, one of its runs has a driver that is alive.
        Stopped: a signal came; the runs have taken a checkpoint.
        TrainwrightError: a run failed, or the cluster has no room for it.
    """
    if fresh:
        delete_search(search.student.storage, search.run_name)
    store = open_store(search.folder)
    train_teachers(search.distillation.teachers, verbose=verbose)
    _check_past(search, store, resume)
    if (past := store.find(_RESULT_FILE)) is not None:
        return SearchResult.decode(past)
    jobs = SearchJobs.of(search, verbose)
    result = _test(search, jobs, store.uri, _train(search, jobs, store, verbose), verbose)
    store.put(_RESULT_FILE, result.encode())
    return result


@dataclass(frozen=True, kw_only=True)
class SearchJobs:
    """The jobs of a search."""

    composed: ComposedJob  # the student with its teachers, on all rows
    alone: Job  # the student without them, on the same rows as those with them
    train: Dataset  # the rows with teacher outputs; those of `alone` are its own
    validation: Dataset
    test: Dataset  # the test set, with teacher outputs

    @classmethod
    def of(cls, search: Search, verbose: bool) -> SearchJobs:
        """Compute missing teacher outputs, and split the rows. Raises as `compose_job`."""
        distillation, share = _targets_once(search.distillation), search.validation
        composed = compose_job(distillation, verbose=verbose)
        student = fixed_layout(search.student)
        if isinstance(share, float):
            train, validation = _split(composed.job.train, share)
            student_parts = _split(student.train, share)
        else:
            on_validation = distillation.replace(student=search.student.replace(evaluate=share))
            train, validation = composed.job.train, compose_job(on_validation, verbose=verbose).job.evaluate
            student_parts = (student.train, share)
        alone = student.replace(train=student_parts[0], evaluate=student_parts[1])
        return cls(
            composed=composed, alone=alone, train=train, validation=validation, test=composed.job.evaluate,
        )  # fmt: skip

    def runs(self, search: Search, names: Sequence[str], seeds: Sequence[int]) -> dict[str, Job]:
        """Return the jobs of these settings, or of the student alone, with these seeds, by the names of their runs."""
        settings, jobs = search.settings(), {}
        for name in names:
            job = self.alone if name == _BASELINE else self._with_teachers(settings[name][1], search.student)
            for seed in seeds:
                run = f"{name}-seed{seed}"
                jobs[run] = job.replace(name=run, seed=seed, storage=search.folder)
        return jobs

    def _with_teachers(self, soft: SoftLoss, student: Job) -> Job:
        job = self.composed.with_soft_loss(soft, student)
        return fixed_layout(job.replace(train=self.train, evaluate=self.validation))


def _targets_once(distillation: Distillation) -> Distillation:
    """Return the distillation with teacher outputs that are computed once, unless teachers run inline."""
    return distillation if distillation.way == "inline" else distillation.replace(way="offline")


def _split(data: Dataset, share: float) -> tuple[Dataset, Dataset]:
    """Return the rows to train on and those to compare settings on: the same row numbers of each data set."""
    parts = split(data, {"train": 1.0 - share, "validation": share})
    return parts["train"], parts["validation"]


def _check_past(search: Search, store: Store, resume: bool) -> None:
    """Store the description of the search. Raises RunConflict if the name belongs to another search."""
    words = _describe_search(search)
    stored = store.find(_SEARCH_FILE)
    old_words = json.loads(stored)["search"] if stored is not None else words
    changed = description_changes(old_words, words)
    if changed and not resume:
        listed = "".join(f"\n    {line}" for line in changed)
        raise RunConflict(
            f"the search {search.run_name!r} was started with others:{listed}\n ",
            where=store.uri,
            remedy="resume=True keeps the runs that it has, fresh=True starts again, or give it a new name",
        )
    if changed:
        store.delete([_RESULT_FILE])
    store.put(_SEARCH_FILE, json.dumps({"search": words}, indent=1).encode())


def _describe_search(search: Search) -> dict[str, str]:
    """Return a description of all that the results depend on."""
    job, loaded = search.student, LoadedDistillation.of(_targets_once(search.distillation))
    words = describe(
        job.replace(name=search.run_name, loss=loaded.loss, targets=loaded.loss.targets),
        train=job.train.index(),
        evaluate=job.evaluate.index(),
    )
    share = search.validation
    rows = f"{share:g} of train" if isinstance(share, float) else f"{share!r}, {share.index().hash[:8]}"
    keys = ("temperatures", "alphas", "seeds", "metric", "mode", "finalists")
    shas = {name: runner.sha256[:12] for name, runner in loaded.runners.items()}
    return {**words, **{key: str(getattr(search, key)) for key in keys}, "validation": rows, "teachers": str(shas)}


def _train(search: Search, jobs: SearchJobs, store: Store, verbose: bool) -> dict[str, float]:
    """Train all settings with the first seed, and the finalists and the student alone with all seeds.

    Returns:
        The metric of each run on the validation set, by name; NaN where its loss became NaN or infinite.
    """
    names, (first, *others) = tuple(search.settings()), search.seed_values
    finalists = min(search.finalists or len(names), len(names))
    total = len(names) + finalists * len(others) + search.seeds
    print_status(f"search in {store.uri}: {total} runs")
    found: dict[str, float] = {}

    def train(runs: Mapping[str, Job]) -> None:
        watcher = _DivergedRuns(None, SearchMetric(name=search.metric, largest=search.mode == "max"), ())
        found.update(
            train_trials(
                runs.values(), search.metric, concurrent=search.concurrent, resume=True, verbose=verbose,
                watcher=watcher,
            )
        )  # fmt: skip
        found.update(dict.fromkeys(watcher.errors, math.nan))
        if missing := [name for name in runs if name not in found]:
            what = f"the evaluation after the last step is missing: {', '.join(missing)}"
            raise TrainwrightError(what, where=store.uri, remedy="call it again; trainwright show tells how they ended")

    all_seeds = finalists == len(names)
    train(
        jobs.runs(search, names, search.seed_values if all_seeds else (first,))
        | jobs.runs(search, (_BASELINE,), search.seed_values)
    )
    if not all_seeds and others:
        best = sorted(names, key=lambda name: search.rank(found[f"{name}-seed{first}"]), reverse=True)
        train(jobs.runs(search, best[:finalists], others))
    return found


class _DivergedRuns(TrialWatcher):
    """Keeps the errors of runs whose loss became NaN or infinite; other errors end the search."""

    def failed(self, job: Job, error: TrainwrightError) -> None:
        if not isinstance(error, NonFiniteLoss):
            raise error
        super().failed(job, error)


def _test(search: Search, jobs: SearchJobs, uri: str, metrics: Mapping[str, float], verbose: bool) -> SearchResult:
    """Choose a setting on the validation set, and evaluate it and the student alone on the test set."""
    settings = tuple(_with_score(each, search, metrics) for each, _ in search.settings().values())
    most = max(len(each.validation.values) for each in settings)
    finalists = [each for each in settings if len(each.validation.values) == most]
    chosen = max(finalists, key=lambda each: [*map(search.rank, (each.validation.mean, each.validation.values[0]))])
    if not math.isfinite(chosen.validation.values[0]):
        raise TrainwrightError(
            f"{search.metric!r} is NaN or infinite with each setting", where=uri,
            remedy="lower the learning rate of the student, and start again with fresh=True",
        )  # fmt: skip
    test = {chosen.name: jobs.test, _BASELINE: search.student.evaluate}
    scores = {
        name: Score(values=tuple(
            evaluate(job.replace(evaluate=data))[search.metric] if math.isfinite(metrics[run]) else math.nan
            for run, job in jobs.runs(search, (name,), search.seed_values).items()
        ))
        for name, data in test.items()
    }  # fmt: skip
    return SearchResult(
        name=search.run_name, metric=search.metric, mode=search.mode, seeds=search.seed_values, settings=settings,
        alone=_with_score(Setting(name=_BASELINE), search, metrics), chosen=chosen.name, test=scores[chosen.name],
        test_alone=scores[_BASELINE], scorecard=_scorecard(search, jobs, chosen.name, verbose), uri=uri,
    )  # fmt: skip


def _with_score(setting: Setting, search: Search, metrics: Mapping[str, float]) -> Setting:
    runs = [f"{setting.name}-seed{seed}" for seed in search.seed_values]
    return replace(setting, validation=Score(values=tuple(metrics[run] for run in runs if run in metrics)))


def _scorecard(search: Search, jobs: SearchJobs, setting: str, verbose: bool) -> Scorecard:
    """Compare the student of a setting and the first seed with its teachers, on the test set."""
    ((run, job),) = jobs.runs(search, (setting,), search.seed_values[:1]).items()
    once = _targets_once(search.distillation)
    student = search.student.replace(name=run, seed=job.training.seed, storage=search.folder)
    distillation = once.replace(student=student, targets=once.folder)
    own, (_, checkpoint) = students_of(distillation, job)[STUDENT].job, find_checkpoint(job)
    loss: Any = job.loss
    return evaluate_students(
        distillation, loss, {STUDENT: own}, folder=f"{search.folder}/judged", step=checkpoint.step, verbose=verbose
    )


# --- What a search found ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Score:
    """A metric over the seeds."""

    values: tuple[float, ...] = ()  # one for each seed

    @property
    def mean(self) -> float:
        """The mean; NaN without values, or where one is not finite."""
        return statistics.fmean(self.values) if self.values and all(map(math.isfinite, self.values)) else math.nan

    @property
    def deviation(self) -> float:
        """The sample's standard deviation (n - 1); NaN of fewer than two values, or where one is not finite."""
        return statistics.stdev(self.values) if len(self.values) > 1 and math.isfinite(self.mean) else math.nan

    def __str__(self) -> str:
        mean = formatting.metric(self.mean)
        return f"{mean} ± {self.deviation:.4f}" if math.isfinite(self.deviation) else mean


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A temperature and a share of the hard loss, or the student alone, with its score."""

    name: str  # the name of its runs, without the seed
    temperature: float | None = None  # None in regression, and for the student alone
    alpha: float | None = None  # None for the student alone
    validation: Score = Score()  # the metric after the last step, for each seed that was trained

    @property
    def text(self) -> str:
        """The setting for people: `T = 2, alpha = 0.1`."""
        if self.name == _BASELINE:
            return "student alone"
        values = [("T", self.temperature), ("alpha", self.alpha)]
        return ", ".join(f"{name} = {value:g}" for name, value in values if value is not None)


@dataclass(frozen=True, kw_only=True, repr=False)
class SearchResult:
    """What a search found. Prints as a table."""

    name: str  # of the search
    metric: str  # by which settings are compared
    mode: Literal["max", "min"]  # whether more or less of it is better
    seeds: tuple[int, ...]  # of the student alone, and of each setting that was trained with all seeds
    settings: tuple[Setting, ...]  # all, in the order in which they were given
    alone: Setting  # the student without teachers, on the same rows
    chosen: str  # name of the setting that is best on the validation set
    test: Score  # score of the chosen setting's students on the test set
    test_alone: Score  # the same of the students without teachers
    scorecard: Scorecard  # the student of the chosen setting and the first seed beside its teachers, on the test set
    uri: str  # of the search's folder

    @property
    def best(self) -> Setting:
        """The setting that was chosen."""
        return next(each for each in self.settings if each.name == self.chosen)

    @property
    def gain(self) -> float:
        """By how much students with teachers are better on the test set than those without."""
        more = self.test.mean - self.test_alone.mean
        return more if self.mode == "max" else -more

    @property
    def deviation(self) -> float:
        """The larger standard deviation of both over the seeds; NaN of one seed, or without a finite metric."""
        both = (self.test.deviation, self.test_alone.deviation)
        return max(both) if all(map(math.isfinite, both)) else math.nan

    @property
    def helped(self) -> bool:
        """Whether the gain is more than twice the deviation. False for one seed."""
        return self.gain > _SIGNIFICANT_DEVIATIONS * self.deviation

    @property
    def sentence(self) -> str:
        """Whether distillation helped, in a sentence."""
        figures = f"{self.metric} {self.test} on the test set with {self.best.text}, {self.test_alone} alone"
        if len(self.seeds) > 1 and not math.isfinite(self.deviation):
            return f"A run without a finite {self.metric} leaves open whether distillation helped: {figures}."
        if not math.isfinite(self.deviation):
            return f"One seed cannot tell whether distillation helped: {figures}."
        times = f"{abs(self.gain) / self.deviation:.1f} times" if self.deviation else "more than 0 times"
        if self.helped:
            return f"Distillation helped: {figures}, better by {times} the larger deviation."
        if self.gain < -_SIGNIFICANT_DEVIATIONS * self.deviation:
            return f"Distillation made it worse: {figures}, {times} the larger deviation."
        how = f"{times} the larger deviation, and less than {_SIGNIFICANT_DEVIATIONS:g} times is chance"
        return f"Distillation did not help: {figures}; they differ by {how}."

    def encode(self) -> bytes:
        """Return the result as JSON, with the conclusion beside it."""
        told = {"sentence": self.sentence, "helped": self.helped, "gain": formatting.finite(self.gain)}
        return json.dumps({**asdict(self), "told": told}, indent=1).encode()

    @classmethod
    def decode(cls, data: bytes) -> SearchResult:
        """Return the result from what `encode` gave."""
        facts: dict[str, Any] = json.loads(data)
        del facts["told"]
        return TypeAdapter(cls).validate_python(facts)

    def __repr__(self) -> str:
        verdicts = (line.rstrip() for line in str(self.scorecard).splitlines())
        return "\n".join([formatting.plain_text(_result_table(self), 120), "", *verdicts])

    def _repr_html_(self) -> str:
        return f"<pre>{escape(repr(self))}</pre>"


def _result_table(found: SearchResult) -> RenderableType:
    """The conclusion, and a row for each setting, for the terminal."""
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    for heading in ("setting", f"{found.metric}, validation", "test", ""):
        table.add_column(Text(heading), no_wrap=True)
    for each in (*found.settings, found.alone):
        test = {found.chosen: str(found.test), _BASELINE: str(found.test_alone)}.get(each.name, "")
        note = "chosen" if each.name == found.chosen else ""
        note = note or ("first seed only" if len(each.validation.values) == 1 < len(found.seeds) else "")
        table.add_row(each.text, str(each.validation), test, note, style="bold" if note == "chosen" else "")
    head = Text(found.sentence, style="bold green" if found.helped else "bold yellow")
    scope = f"mean ± standard deviation of {formatting.count(len(found.seeds), 'seed')}"
    return Group(head, Padding(table, (1, 0, 0, 2)), Padding(Text(scope, style="dim"), (1, 0, 0, 2)))
