"""Weights & Biases, by a run object of its own: several runs of a process do not meet."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from trainwright.core.errors import JobError
from trainwright.tracking.base import Ending, Row, Tracked, module_of, scrub

Mode = Literal["online", "offline", "disabled"]


@dataclass(kw_only=True)
class WandB:
    """Tells Weights & Biases. Needs `wandb`, and for `online` a key: `wandb login`, or WANDB_API_KEY on the driver.

    Args:
        project: to which the run belongs.
        entity: user or team; by default that of the key.
        mode: `offline` writes below `folder` what `wandb sync` sends later, `disabled` nothing; by default that of
            WANDB_MODE, else `online`.
        folder: for its files; by default that of WANDB_DIR, else the working folder.
        tags: of the run.
    """

    project: str
    entity: str | None = None
    mode: Mode | None = None
    folder: str | None = None
    tags: tuple[str, ...] = ()
    _run: Any = field(default=None, init=False, repr=False)
    _last: int = field(default=0, init=False, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self.project, self.entity, self.mode, self.folder, self.tags)

    def check(self) -> None:
        """Raises JobError where it is not installed, or has no key; in a terminal it asks for one."""
        wandb = module_of("wandb", "wandb", "WandB")
        if (self.mode or os.environ.get("WANDB_MODE") or "online") != "online":
            return
        try:
            known = wandb.login()
        except Exception as error:  # of many kinds
            raise JobError([f"trackers= has WandB, which has no key: {scrub(str(error))}; run: wandb login"]) from error
        if not known:
            raise JobError(["trackers= has WandB, which has no key: run wandb login, or set WANDB_API_KEY"])

    def begin(self, run: Tracked, params: Mapping[str, str]) -> int:
        """See `Tracker.begin`."""
        wandb = module_of("wandb", "wandb", "WandB")
        self._run = wandb.init(
            project=self.project, entity=self.entity, mode=self.mode, dir=self.folder, tags=list(self.tags) or None,
            id=run.id, name=run.name, config=dict(params), resume="allow", allow_val_change=True, reinit="create_new",
            settings=wandb.Settings(silent=True, console="off"),
        )  # fmt: skip
        self._last = max(int(self._run.step) - 1, 0)  # W&B tells the next one
        return self._last

    def log(self, rows: Sequence[Row]) -> None:
        """See `Tracker.log`. W&B takes no step before the last one: what is told of it late counts as of the last."""
        for row in rows:
            self._last = max(self._last, row.step)
            self._run.log(dict(row.values), step=self._last)

    def end(self, ending: Ending) -> None:
        """See `Tracker.end`. Links become part of the summary."""
        self._run.summary.update({f"trainwright/{name}": uri for name, uri in ending.links.items()})
        self._run.summary.update({"trainwright/state": ending.state})
        self._run.finish(exit_code=1 if ending.state == "failed" else 0)


def _again(project: str, entity: str | None, mode: Mode | None, folder: str | None, tags: tuple[str, ...]) -> WandB:
    return WandB(project=project, entity=entity, mode=mode, folder=folder, tags=tags)
