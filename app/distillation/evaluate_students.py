"""Students beside their teachers: what each says of the evaluation set, and what that is worth."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trainwright.core.data import Batch, Sums, Terms
from trainwright.core.errors import JobError, UserCodeError
from trainwright.core.frameworks import load
from trainwright.core.job import Job
from trainwright.datasets.ops.transforms import Counters
from trainwright.distillation.compose_job import taught_layers
from trainwright.distillation.metrics import Accord, Picture, Residue, Tally, Units, labelled, together, units_of
from trainwright.distillation.model_queries import Speaker, Voice, here, latencies
from trainwright.distillation.scorecard import MAIN, Mark, Pair, Verdict, kept_of
from trainwright.distillation.spec import Distillation
from trainwright.distillation.target_cache import stored_targets
from trainwright.distillation.teachers import Teacher
from trainwright.reporting import formatting
from trainwright.strategies.distillation.losses import Distilled
from trainwright.strategies.distillation.teacher_outputs import LOGITS

Array = npt.NDArray[Any]

TOGETHER, LOSS = "all teachers", "loss"
LOCAL_FLOPS = 4e11  # that this process computes in less time than a pool takes to start
_NUMBERS = 2e9  # of each model's outputs that are looked at; of more, rows are left out
_ROWS, _CHUNK = 256, 1 << 22  # rows and numbers at once


def judge(
    distillation: Distillation,
    loss: Distilled,
    students: Mapping[str, Job],
    *,
    folder: str,
    step: int = 0,
    verbose: bool = False,
) -> Verdict:
    """Ask students and teachers about the evaluation set, and time them.

    Teachers are asked as `way="offline"` has them, where their answers are kept. Small models answer in this process,
    others through a pool, as `tw.predict`.

    Args:
        distillation: what was asked for.
        loss: of the students: who teaches whom.
        students: the job of each alone, with its checkpoints.
        folder: where what students say is kept, should a pool have to compute it.
        step: that the students are at.
        verbose: show Ray's own output.

    Raises:
        TrainwrightError: there is no evaluation set with rows by number; as `stored_targets` and `Teacher.load`.
    """
    began_s, job = time.monotonic(), distillation.student
    if job.evaluate is None:
        raise JobError(["evaluate= is missing: students are judged on an evaluation set"])
    job.evaluate.need_rows_by_number("judging students")
    builders = distillation.builders
    teachers = taught_layers(distillation) if distillation.way == "offline" else distillation.teachers
    speakers = [
        Speaker.of(Teacher(name=name, job=each, output=loss.soft.output), job.evaluate, build=builders[name])
        for name, each in students.items()
    ]
    speakers += [Speaker.of(each, job.evaluate) for each in teachers]
    rows, of_rows = _looked_at(speakers, job.evaluate.index().rows)
    asked, notes = [], []
    for each in speakers:
        if (ready := _ready(each, distillation, len(rows), of_rows, folder, verbose)) is None:
            size = formatting.size(each.profile.parameter_bytes)
            notes.append(f"{each.name} is not judged: its {size} of parameters are too large for this process")
        else:
            asked.append(ready)
    hearing = Hearing(job, loss, asked, rows)
    hearing.listen()
    return replace(
        hearing.verdict(), step=step, of_rows=of_rows, notes=[*notes, *hearing.notes],
        seconds=time.monotonic() - began_s,
    )  # fmt: skip


def _looked_at(speakers: list[Speaker], rows: int) -> tuple[Array, int]:
    """Row numbers, all or evenly spaced where the outputs would be too many, and how many rows there are."""
    most = max(1, int(_NUMBERS // max(each.numbers for each in speakers)))
    every = np.arange(rows) if rows <= most else np.unique(np.linspace(0, rows - 1, most).astype(np.int64))
    return every, rows


def _ready(speaker: Speaker, wish: Distillation, rows: int, of_rows: int, folder: str, verbose: bool) -> Speaker | None:
    """With its answers, where they are kept or a pool has to give them; None where nobody can ask it."""
    kept = not speaker.student and wish.way == "offline"
    small = speaker.fits_here and speaker.profile.flops * rows <= LOCAL_FLOPS
    if kept or (rows == of_rows and not small):
        to, keep = (folder, "fp32") if speaker.student else (wish.folder, wish.keep)
        told = stored_targets(speaker.teacher, wish.student.evaluate, folder=to, keep=keep, verbose=verbose)
        return replace(speaker, stored=told)
    return speaker if speaker.fits_here else None


class Hearing:
    """One look at the rows.

    Args:
        job: of the students, as it would be trained without teachers.
        loss: who teaches whom.
        speakers: students and teachers.
        rows: numbers of those that are looked at.

    Attributes:
        notes: what could not be said, and why.
    """

    def __init__(self, job: Job, loss: Distilled, speakers: list[Speaker], rows: Array) -> None:
        self._job, self._loss, self._speakers, self._rows = job, loss, speakers, rows
        wanted = [job.columns, *(each.teacher.input_columns or None for each in speakers)]
        names = None if None in wanted else tuple(dict.fromkeys(name for some in wanted for name in some or ()))
        self._data, self._names = job.evaluate, names
        self._reader = self._data.reader(self._data.index(), names)
        self._kind, self._spec = loss.soft.kind, job.model_spec(1)
        self._framework = next(each.profile.framework for each in speakers if each.student)
        self._teachers = [each.name for each in speakers if not each.student]
        self._tallies: dict[str, Tally | Residue] = {}
        self._accords: dict[tuple[str, str], Accord] = {}
        self._pictures: dict[str, Picture] = {}
        self._sums: dict[str, Sums] = {}
        self._forms: dict[
            str, str | None
        ] = {}  # a speaker's output as the job's functions take it; None for not at all
        self._dropped: set[tuple[str, str]] = set()
        self._latency: dict[str, dict[str, float]] = {}
        self._tokens = 1
        self.notes: list[str] = []

    def listen(self) -> None:
        """Go through the rows once. Raises TrainwrightError."""
        voices: dict[str, Voice] = {}
        for batch in self._batches():
            voices = voices or self._voices(batch)
            said = {name: voice(batch) for name, voice in voices.items()}
            told = [self._metrics(name, batch, each) for name, each in said.items()]
            loss = next((terms for terms in told if terms is not None), None)
            first = next(iter(said.values()))
            self._tokens = first.shape[1] if self._kind == "language_model" else 1
            labels, weights, tokens = labelled(self._kind, first, self._targets(batch), loss)
            units = {name: units_of(self._kind, each[:, :tokens], labels, weights) for name, each in said.items()}
            if len(self._teachers) > 1:
                units[TOGETHER] = together({name: units[name] for name in self._teachers}, self._shares())
            self._count(units)

    def verdict(self) -> Verdict:
        """What was counted."""
        pictures = {name: picture.means() for name, picture in self._pictures.items()}
        first = next(iter(self._pictures.values()), None)
        marks = [
            Mark(
                name=name, student=name not in (*self._teachers, TOGETHER), scores=tally.scores(),
                metrics=self._sums.get(name, Sums()).means(), reliability=tally.reliability(),
                latency_s=self._latency.get(name, {}), soft=pictures.get(name, []), **self._sizes(name),
            )
            for name, tally in self._tallies.items()
        ]  # fmt: skip
        return Verdict(
            kind=self._kind, rows=len(self._rows), of_rows=len(self._rows), tokens=self._tokens, marks=marks,
            device=here(),
            units=next(iter(self._tallies.values())).weight, classes=first.shown() if first else [],
            commonest=[float(each) for each in first.commonest()] if first else None, pairs=self._paired(marks),
        )  # fmt: skip

    def _voices(self, batch: Batch) -> dict[str, Voice]:
        """Of all speakers; those that this process can hold are timed with as many rows as a batch has, or a step."""
        voices, timed = {}, self._timed_batch()
        for each in self._speakers:
            standing = each.opened(batch) if each.fits_here else None
            if standing is not None:
                self._latency[each.name] = latencies(standing, timed)
            voices[each.name] = each.voice(standing)
        return voices

    def _timed_batch(self) -> Batch:
        """As many rows as a step takes, where there are as many."""
        return self._read(self._rows[: self._job.batch_size])

    def _batches(self) -> Iterator[Batch]:
        widest = max(each.numbers for each in self._speakers)
        size = int(max(1, min(_ROWS, _CHUNK // widest)))
        for start in range(0, len(self._rows), size):
            yield self._read(self._rows[start : start + size])

    def _read(self, samples: Array) -> Batch:
        """Rows with all columns that somebody wants, transformed as `tw.predict` does."""
        counters = Counters(seed=self._job.seed, epoch=0)
        columns = self._data.transform(self._reader.gather(samples), samples, counters, self._names)
        return Batch(columns=columns, weights=np.ones(len(samples)), samples=samples)

    def _targets(self, batch: Batch) -> list[Array]:
        wanted = self._job.wanted_targets
        columns = self._job.collation(batch) if wanted else {}
        return [np.asarray(columns[name]) for name in wanted]

    def _metrics(self, name: str, batch: Batch, said: Array) -> Terms | None:
        """Count the job's loss and metrics of what somebody says; the loss, where it has one."""
        if not self._job.wanted_targets or self._forms.get(name, "") is None:
            return None
        if name not in self._forms:
            self._forms[name] = self._form(name, batch, said)
            return self._metrics(name, batch, said)
        form = self._forms[name]
        outputs = {form: said} if form else said
        loss = self._marked(batch, outputs, "")
        found = {LOSS: loss}
        for metric in self._spec.metrics:
            if (name, metric) not in self._dropped:
                try:
                    found[metric] = self._marked(batch, outputs, metric)
                except (JobError, UserCodeError) as error:
                    self._dropped.add((name, metric))
                    self.notes.append(f"{metric} is not told of {name}: {error.what}")
        totals = {key: (float((terms.values * terms.weights).sum()), float(terms.weights.sum()))
                  for key, terms in found.items()}  # fmt: skip
        self._sums[name] = self._sums.get(name, Sums()) + Sums(totals=totals)
        return loss

    def _form(self, name: str, batch: Batch, said: Array) -> str | None:
        """How the job's functions take what somebody says: bare, or by the output's name."""
        problem = ""
        for form in ("", self._loss.soft.output or LOGITS):
            try:
                self._marked(batch, {form: said} if form else said, "")
            except (JobError, UserCodeError) as error:
                problem = problem or error.what
            else:
                return form
        self.notes.append(f"loss and metrics are not told of {name}, whose output alone does not give them: {problem}")
        return None

    def _marked(self, batch: Batch, outputs: Any, only: str) -> Terms:
        marking = load(f"trainwright.strategies.{self._framework}.distillation.offline_metrics")
        terms: Terms = marking.marked(self._spec, batch, outputs, only)
        return terms

    def _count(self, units: Mapping[str, Units]) -> None:
        values = self._kind == "regression"
        for name, each in units.items():
            self._tallies.setdefault(name, Residue() if values else Tally()).add(each)
            if not values and each.labels is not None:
                self._draw(name, each)
        for student in (each.name for each in self._speakers if each.student):
            for teacher in self._teachers_of(student, units):
                accord = self._accords.setdefault((student, teacher), Accord(values=values))
                accord.add(units[student], units[teacher])

    def _draw(self, name: str, units: Units) -> None:
        assert units.labels is not None, "asked before"
        logs, labels, weights = units.chances, units.labels, units.weights
        if self._kind == "multi_label":  # of each label that a sample has, all labels of this sample
            count = units.columns
            own, present = np.nonzero(labels.reshape(-1, count))
            logs, labels, weights = (
                logs[:, 1].reshape(-1, count)[own],
                present,
                weights.reshape(-1, count)[own, present],
            )
        self._pictures.setdefault(name, Picture(logs.shape[-1], labels)).add(logs, labels, weights)

    def _teachers_of(self, student: str, units: Mapping[str, Units]) -> list[str]:
        taught = self._loss.taught_by(student) if student in self._loss.learners else ()
        everyone = [TOGETHER] if TOGETHER in units and taught else []
        return [name for name in (*taught, *everyone) if name in units]

    def _shares(self) -> dict[str, float]:
        soft, names = self._loss.soft, tuple(self._teachers)
        shares = soft.share(names) if soft.combine == "fixed" else [1 / len(names)] * len(names)
        return dict(zip(names, shares, strict=True))

    def _sizes(self, name: str) -> dict[str, Any]:
        found = [each.profile for each in self._speakers if each.name == name]
        return {"parameters": found[0].parameters, "size_bytes": found[0].parameter_bytes} if found else {}

    def _paired(self, marks: list[Mark]) -> list[Pair]:
        main = {mark.name: mark.scores.get(MAIN.get(self._kind, "top-1"), float("nan")) for mark in marks}
        return [
            Pair(student=one, teacher=other, scores=accord.scores(), kept=kept_of(main[one], main[other]))
            for (one, other), accord in self._accords.items()
        ]
