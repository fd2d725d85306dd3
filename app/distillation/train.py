"""A distillation is carried out: a way is chosen, the job composed and trained, and the students are judged."""

from __future__ import annotations

from trainwright.distillation.compose_job import composed
from trainwright.distillation.delivery_choice import remember, settled
from trainwright.distillation.distilled_run import DistilledRun, judged
from trainwright.distillation.parallel_teachers import train_missing
from trainwright.distillation.spec import Distillation
from trainwright.runtime.launch import awaited, ready


def train(distillation: Distillation, *, resume: bool, fresh: bool, verbose: bool, judge: bool) -> DistilledRun:
    """See `tw.distill`."""
    train_missing(distillation.teachers, verbose=verbose)
    chosen = settled(distillation, fresh=fresh, verbose=verbose)
    whole = composed(chosen, verbose=verbose)
    remember(distillation, chosen, resume=resume, fresh=fresh)
    driven = ready(whole.job, resume=resume, fresh=fresh, verbose=verbose, notes=whole.notes)
    run = DistilledRun(chosen, whole.job, *driven)
    awaited(run)
    if judge:
        judged(run, verbose=verbose)
    return run
