"""A search for the temperature and the share of the hard loss with which a student learns best, and whether it helps.

    <storage>/<name>/search.json            what is searched
    <storage>/<name>/t4-alpha0.1-seed0/     a run like any other, and so on; alone-seed0: the student without teachers
    <storage>/<name>/found.json, found.html what was found

Each setting is trained with the first seed, of which those that fall behind are stopped; the others with all seeds. The
best on the validation set, and the student alone, are then looked at once on the test set.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from trainwright.core.errors import JobError, RunConflict, nearest
from trainwright.core.job import Job
from trainwright.core.loss_api import teacher_column
from trainwright.core.soft_loss import SoftLoss
from trainwright.core.strict_model import StrictModel
from trainwright.datasets.dataset import Dataset
from trainwright.datasets.ops.hash_split import split
from trainwright.distillation.distillation_job import ComposedJob, build_loss, compose_job, teachers_with_layers
from trainwright.distillation.distillation_spec import Distillation
from trainwright.distillation.parallel_runs import train_teachers
from trainwright.distillation.search_result import BASELINE, Score, SearchResult, Setting, result_page
from trainwright.distillation.search_trials import SearchObjective, SuccessiveHalving, TrialResult, run_trials
from trainwright.distillation.student_evaluation import latency_device, model_costs
from trainwright.inference.trained_model import evaluate
from trainwright.planning.job_description import describe, description_changes
from trainwright.storage.object_store import Store, canonical_uri, open_store
from trainwright.strategies.distillation.distillation_loss import DistillationLoss, student_metrics, teacher_metrics
from trainwright.strategies.distillation.multi_student import StudentModels

_SEARCH_FILE, _RESULT_FILE, _PAGE_FILE = "search.json", "found.json", "found.html"
_LAYOUT = frozenset({"workers", "min_workers", "max_workers", "strategy", "plan", "devices", "consistency"})


class Search(StrictModel):
    """What `tw.search` does: a distillation with each of several settings and seeds, and the student alone.

    Attributes:
        distillation: of one student, which has targets and metrics. Its `evaluate=` is the test set, which is looked at
            once, when the setting is chosen. What the teachers say is computed before, once for all, whatever its
            `way=`, unless that is `inline`.
        name: of the search; by default the student's, with `-search`.
        temperatures: to try, in place of the loss' own; none in regression.
        alphas: the same.
        seeds: with how many each is trained, counted from the student's.
        validation: the data set on which settings are compared, or a share of the training set that is taken from it.
        metric: of the student, by which they are compared.
        mode: whether more or less of it is better.
        stop_early: end the settings that are behind (ASHA: Li et al., 2020, A system for massively parallel
            hyperparameter tuning): of those that came as far, the best in `reduction` go on. A setting is judged by its
            first seed alone then; False trains each with all seeds.
        grace: evaluations that each may have before.
        reduction: as said; at so many times as many evaluations they are compared again.
        concurrent: runs at a time; by default as many as the cluster has accelerators, or CPUs, for. A run has one
            worker, unless the student's job says otherwise.
    """

    distillation: Distillation
    name: str = ""
    temperatures: tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...] = (1.0, 2.0, 4.0)
    alphas: tuple[Annotated[float, Field(ge=0, le=1)], ...] = (0.1, 0.5)
    seeds: Annotated[int, Field(ge=1)] = 3
    validation: Any = 0.1
    metric: str = "accuracy"
    mode: Literal["max", "min"] = "max"
    stop_early: bool = True
    grace: Annotated[int, Field(ge=1)] = 1
    reduction: Annotated[int, Field(ge=2)] = 3
    concurrent: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Search:
        problems = [*self._unsuited(), *self._unfit()]
        if problems:
            raise JobError(problems)
        return self

    def distill(self, *, resume: bool = False, fresh: bool = False, verbose: bool = False) -> SearchResult:
        """See `search`."""
        return search(self, resume=resume, fresh=fresh, verbose=verbose)

    @property
    def student(self) -> Job:
        """The job as it would be trained alone, on all rows."""
        return self.distillation.student

    @property
    def called(self) -> str:
        """Its name."""
        return self.name or f"{self.student.name}-search"

    @property
    def folder(self) -> str:
        """Where its runs are."""
        return f"{canonical_uri(self.student.storage).rstrip('/')}/{self.called}"

    @property
    def numbers(self) -> tuple[int, ...]:
        """The seeds."""
        return tuple(range(self.student.seed, self.student.seed + self.seeds))

    def settings(self) -> dict[str, tuple[Setting, SoftLoss]]:
        """All, by name, with their losses. Raises JobError for one that teaches nothing."""
        found = {}
        for temperature, alpha in product(self.temperatures or (None,), self.alphas or (None,)):
            given = {"temperature": temperature, "alpha": alpha}
            given = {name: value for name, value in given.items() if value is not None}
            name = "-".join(f"{key[0] if key == 'temperature' else key}{value:g}" for key, value in given.items())
            name = name or "given"
            loss = self.distillation.loss.replace(**given)
            found[name] = (Setting(name=name, temperature=temperature, alpha=alpha), loss)
        return found

    def _unsuited(self) -> list[str]:
        job, distillation, problems = self.student, self.distillation, []
        if distillation.students or distillation.mutual or distillation.joint:
            problems.append("distillation: students=, mutual= and joint= train several: a search is of one student")
        if not distillation.teachers:
            problems.append("distillation: there is no teacher: give teachers=")
        if not job.wanted_targets or job.loss is None:
            problems.append("student: it has no targets= and loss=, so that it cannot be trained alone for comparison")
        if job.evaluate is None:
            problems.append("student: evaluate= is missing: give the test set, which is looked at once at the end")
        if self.metric == "loss":
            problems.append('metric="loss" differs with the setting: name one of the student\'s metrics=')
        elif self.metric not in job.metrics:
            problems.append(f"metric={self.metric!r} is none of the student's: {nearest(self.metric, job.metrics)}")
        return problems

    def _unfit(self) -> list[str]:
        """Of the settings and what they are compared on."""
        problems, share = [], self.validation
        if not isinstance(share, Dataset) and not (isinstance(share, float) and 0 < share < 1):
            problems.append(f"validation={share!r}: give a data set, or a share of the training set between 0 and 1")
        for name, given in (("temperatures", self.temperatures), ("alphas", self.alphas)):
            if len(set(given)) < len(given):
                problems.append(f"{name}= names one twice")
        try:
            self.settings()
            self.student.replace(name=self.called)
        except JobError as error:
            problems += error.problems
        return problems


def search(search: Search, *, resume: bool = False, fresh: bool = False, verbose: bool = False) -> SearchResult:
    """Find the temperature and alpha with which a student learns best from its teachers, and whether that helps it.

    Settings are trained as runs of their own, some at a time (Ray Tune), each with several seeds, and so is the student
    without teachers. They are compared on a validation set; the best of them and the student alone are looked at on the
    test set once. Teachers that are to be trained come first; what they say is computed once for all. The same call
    goes on where an earlier one was ended, and gives what was found where it is finished.

    Args:
        search: what is tried.
        resume: go on with the runs of a search of this name although it was changed.
        fresh: begin it again, without what it has.
        verbose: show Ray's own output.

    Raises:
        JobError: students, teachers and their layers do not go together.
        RunConflict: the name belongs to another search.
        TrainwrightError: a run failed, or there is no room for it.
        KeyboardInterrupt: it was stopped by Ctrl-C; its runs have checkpoints.
    """
    store = open_store(search.folder)
    if fresh:
        store.delete_folder("")
    train_teachers(search.distillation.teachers, verbose=verbose)
    _check_past(search, store, resume)
    if (past := store.find(_RESULT_FILE)) is not None:
        return SearchResult.decode(past)
    parts = SearchJobs.of(search, verbose)
    found = _confirmed(search, parts, store.uri, _trained(search, parts, verbose))
    store.put(_PAGE_FILE, result_page(found).encode())
    store.put(_RESULT_FILE, found.encode())
    return found


@dataclass(frozen=True, kw_only=True)
class SearchJobs:
    """The jobs of a search.

    Attributes:
        student: the job as it was given.
        taught: with the teachers beside all rows.
        alone: the student without them, on the same rows as those with them.
        train, validation: the rows with what teachers say; those of `alone` are its own.
        test: the test set, with what teachers say.
    """

    student: Job
    taught: ComposedJob
    alone: Job
    train: Dataset
    validation: Dataset
    test: Dataset

    @classmethod
    def of(cls, search: Search, verbose: bool) -> SearchJobs:
        """Have what is missing of the teachers' words computed. Raises as `compose_job`."""
        distillation, share = _targets_once(search.distillation), search.validation
        whole = compose_job(distillation, verbose=verbose)
        student = _steady(search.student)
        if isinstance(share, float):
            train, validation = _cut(whole.job.train, share)
            own = _cut(student.train, share)
        else:
            beside = distillation.replace(student=search.student.replace(evaluate=share))
            train, validation = whole.job.train, compose_job(beside, verbose=verbose).job.evaluate
            own = (student.train, share)
        alone = student.replace(train=own[0], evaluate=own[1])
        return cls(
            student=search.student, taught=whole, alone=alone, train=train, validation=validation,
            test=whole.job.evaluate,
        )  # fmt: skip

    def runs(self, search: Search, names: Sequence[str], seeds: Sequence[int]) -> dict[str, Job]:
        """The jobs of these settings, or of the student alone, with these seeds, by the names of their runs."""
        settings, jobs = search.settings(), {}
        for name in names:
            job = self.alone if name == BASELINE else self._taught(settings[name][1])
            for seed in seeds:
                run = f"{name}-seed{seed}"
                jobs[run] = job.replace(name=run, seed=seed, storage=search.folder)
        return jobs

    def tested(self, job: Job) -> dict[str, float]:
        """The metrics of a run of these on the test set; of one with teachers, theirs too."""
        taught = isinstance(job.loss, DistillationLoss)
        own = teacher_metrics(self.student.metrics, self.taught.loss) if taught else {}
        test = self.test if taught else self.student.evaluate
        return evaluate(job.replace(evaluate=test, metrics={**job.metrics, **own}))

    def _taught(self, soft: SoftLoss) -> Job:
        loss, model = replace(self.taught.loss, soft=soft), self.taught.job.model
        changes: dict[str, Any] = {"loss": loss, "metrics": student_metrics(self.student.metrics, loss)}
        changes["model"] = replace(model, loss=loss) if isinstance(model, StudentModels) else model
        return _steady(self.taught.job.replace(train=self.train, evaluate=self.validation, **changes))


def _targets_once(distillation: Distillation) -> Distillation:
    """The same with what teachers say computed before, unless they are to run in the step."""
    return distillation if distillation.way == "inline" else distillation.replace(way="offline")


def _cut(data: Dataset, share: float) -> tuple[Dataset, Dataset]:
    """The rows to train on, and those to compare settings on: by number, the same of any data set with these rows."""
    parts = split(data, {"train": 1.0 - share, "validation": share})
    return parts["train"], parts["validation"]


def _steady(job: Job) -> Job:
    """For runs of which many are made: one worker each, where nothing is pinned, and no copies but checkpoints."""
    given = job.model_fields_set
    own: dict[str, Any] = {} if given & _LAYOUT else {"workers": 1}
    return job.replace(**own, probe=False, **({} if "keeper_s" in given else {"keeper_s": 0.0}))


def _check_past(search: Search, store: Store, resume: bool) -> None:
    """Write down what is searched. Raises RunConflict where the name belongs to another search."""
    words = _described(search)
    stored = store.find(_SEARCH_FILE)
    old = json.loads(stored)["search"] if stored is not None else words
    changed = description_changes(old, words)
    if changed and not resume:
        listed = "".join(f"\n    {line}" for line in changed)
        raise RunConflict(
            f"the search {search.called!r} was started with others:{listed}\n ",
            where=store.uri,
            remedy="resume=True keeps the runs that it has, fresh=True begins again, or give it a new name",
        )
    if changed:
        store.delete([_RESULT_FILE])
    store.put(_SEARCH_FILE, json.dumps({"search": words}, indent=1).encode())


def _described(search: Search) -> dict[str, str]:
    """What its results depend on."""
    job, distillation = search.student, _targets_once(search.distillation)
    teachers = teachers_with_layers(distillation)
    loss = build_loss(distillation, teachers, {teacher.name: teacher.load() for teacher in teachers})
    words = describe(
        job.replace(name=search.called, loss=loss, targets=loss.targets),
        train=job.train.index(),
        evaluate=job.evaluate.index(),
    )
    share = search.validation
    rows = f"{share:g} of train" if isinstance(share, float) else f"{share!r}, {share.index().hash[:8]}"
    own = ("temperatures", "alphas", "seeds", "metric", "mode", "stop_early", "grace", "reduction")
    told = {teacher.name: f"{teacher.load().sha256[:12]}" for teacher in teachers}
    return {**words, **{name: str(getattr(search, name)) for name in own}, "validation": rows, "teachers": str(told)}


def _trained(search: Search, parts: SearchJobs, verbose: bool) -> dict[str, TrialResult]:
    """Train them all: first every setting with one seed, then what is left, and the student alone, with the others.

    Gives what each run came to, by name.
    """
    names, (first, *others) = tuple(search.settings()), search.numbers
    aim = SearchObjective(metric=search.metric, mode=search.mode)
    go = partial(run_trials, aim=aim, concurrent=search.concurrent, verbose=verbose)
    if not search.stop_early or len(names) == 1:
        return go(parts.runs(search, (*names, BASELINE), search.numbers))
    halving = SuccessiveHalving(grace=search.grace, reduction=search.reduction)
    outcomes = go(parts.runs(search, names, (first,)), halving=halving)
    left = [name for name in names if not outcomes[f"{name}-seed{first}"].stopped]
    return outcomes | go({**parts.runs(search, left, others), **parts.runs(search, (BASELINE,), search.numbers)})


def _confirmed(search: Search, parts: SearchJobs, uri: str, outcomes: Mapping[str, TrialResult]) -> SearchResult:
    """Choose on the validation set, and look at the test set."""
    settings = tuple(_summed(each, search, outcomes) for each, _ in search.settings().values())
    alone = _summed(Setting(name=BASELINE), search, outcomes)
    best = max if search.mode == "max" else min
    chosen = best((each for each in settings if not each.stopped), key=lambda each: each.validation.mean)
    tests = {
        name: [parts.tested(job) for job in parts.runs(search, (name,), search.numbers).values()]
        for name in (chosen.name, BASELINE)
    }
    said, metric = tests[chosen.name][0], search.metric
    baseline = next(iter(parts.runs(search, (BASELINE,), search.numbers).values()))
    student, teachers = model_costs(baseline, search.distillation.teachers)
    return SearchResult(
        name=search.called, metric=metric, mode=search.mode, seeds=search.numbers, settings=settings, alone=alone,
        chosen=chosen.name,
        test=Score(values=tuple(each[metric] for each in tests[chosen.name])),
        test_alone=Score(values=tuple(each[metric] for each in tests[BASELINE])),
        together=said.get(f"{teacher_column('')}/{metric}"),
        student=student,
        teachers=tuple(replace(each, test=said[f"{teacher_column(each.name)}/{metric}"]) for each in teachers),
        machine=latency_device(), uri=uri,
    )  # fmt: skip


def _summed(setting: Setting, search: Search, outcomes: Mapping[str, TrialResult]) -> Setting:
    """With what its runs came to: at the end, or where it was stopped."""
    runs = [f"{setting.name}-seed{seed}" for seed in search.numbers]
    last = [outcomes[run] for run in runs if run in outcomes]  # of one that was stopped there are no other seeds
    return replace(
        setting,
        validation=Score(values=tuple(each.value for each in last)),
        steps=max(each.step for each in last),
        stopped=any(each.stopped for each in last),
    )
