"""Progress on stderr: a bar in a terminal, plain lines in files and pipes, one changing output in a notebook."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

from trainwright.core import formatting
from trainwright.core.events import Event, Formed, Steps
from trainwright.core.plan import Plan
from trainwright.reporting.event_messages import EventFormatter, OutputLine, ProgressFigures, Tone
from trainwright.reporting.plan_view import plan_line

_STYLES: dict[Tone, str] = {"plain": "", "good": "green", "warning": "yellow", "bad": "bold red"}
_PLAIN_SHARE, _PLAIN_S = 0.1, 10.0  # a plain line after this share of the run, and after this many seconds
_NOTEBOOK_S = 0.5


class ProgressDisplay(Protocol):
    """Shows lines and progress figures."""

    def line(self, line: OutputLine) -> None:
        """Show a line that stays."""

    def show(self, figures: ProgressFigures, *, news: bool) -> None:
        """Show the figures; with `news` even where the last ones are recent."""

    def close(self) -> None:
        """Remove the bar; lines stay."""


class RunProgress:
    """An event listener that shows the progress of a run.

    Args:
        plan: shown in the first line, its notes in the next ones.
        verbose: also show checkpoints, processes, and the tracebacks of failures that the run recovered from.
        console: where to write; stderr by default, so that stdout is free for data.
        surface: shows lines and figures; by default the one that suits the console.
    """

    def __init__(
        self,
        plan: Plan | None = None,
        *,
        verbose: bool = False,
        console: Console | None = None,
        surface: ProgressDisplay | None = None,
    ) -> None:
        self._formatter = EventFormatter(verbose=verbose)
        self._surface = surface or display_for(console or Console(file=sys.stderr, markup=False))
        self._first = [] if plan is None else _plan_lines(plan)

    def on(self, event: Event) -> None:
        """Take one event."""
        first, self._first = self._first, []
        lines = self._formatter.tell(event)
        for line in (*first, *lines):
            self._surface.line(line)
        if isinstance(event, (Steps, Formed)) or lines:
            self._surface.show(self._formatter.figures, news=isinstance(event, Formed))

    def close(self) -> None:
        """Remove the bar; a second call does nothing."""
        self._surface.close()


def _plan_lines(plan: Plan) -> list[OutputLine]:
    """Return the plan and its notes as lines."""
    notes = [OutputLine(text=f"  note: {note}") for note in plan.notes]
    return [OutputLine(text=f"plan {plan_line(plan)}", tone="good"), *notes]


def print_status(text: str, tone: Tone = "plain") -> None:
    """Print a line on stderr."""
    _print(Console(file=sys.stderr), OutputLine(text=text, tone=tone))


def display_for(console: Console) -> ProgressDisplay:
    """Return the display that suits the console: terminal, notebook, or plain text."""
    if _in_notebook():
        return NotebookDisplay()
    if console.is_terminal and not console.is_dumb_terminal:
        return TerminalDisplay(console)
    return PlainTextDisplay(console)


def _in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook, without importing IPython."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return type(shell).__name__ == "ZMQInteractiveShell"


class TerminalDisplay:
    """A bar at the bottom of the terminal, with lines above it."""

    def __init__(self, console: Console) -> None:
        self._bar = RichProgress(
            TextColumn("{task.fields[head]}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[tail]}", markup=False),
            console=console,
            expand=True,
            transient=True,
            refresh_per_second=4,
            redirect_stdout=False,
            redirect_stderr=True,  # what Ray prints of a lost process goes above the bar
        )
        self._task = self._bar.add_task("", total=None, head="starting", tail="")

    def line(self, line: OutputLine) -> None:
        """Print above the bar."""
        _print(self._bar.console, line)

    def show(self, figures: ProgressFigures, *, news: bool) -> None:
        """Update the bar; the first figures make it visible."""
        self._bar.start()
        head = f"step {figures.step:,}/{figures.total:,}  epoch {figures.epoch}/{figures.epochs}"
        total, tail = figures.total or None, _tail(figures)
        self._bar.update(self._task, total=total, completed=figures.step, head=head, tail=tail, refresh=news)

    def close(self) -> None:
        """Remove the bar."""
        self._bar.stop()


def _tail(figures: ProgressFigures) -> str:
    if figures.activity or not math.isfinite(figures.samples_per_s):
        return figures.activity or "first step"
    waited = f"data wait {formatting.percent(figures.wait_share)}  " if math.isfinite(figures.wait_share) else ""
    waited += f"MFU {formatting.percent(figures.mfu)}  " if math.isfinite(figures.mfu) else ""
    pace = f"loss {formatting.metric(figures.loss)}  {formatting.throughput(figures.samples_per_s)}"
    return f"{pace}  {waited}{formatting.clock_time(figures.left_s)} left"


class PlainTextDisplay:
    """Lines for files and pipes: the figures after each tenth of the run, and every ten seconds while steps progress.

    Args:
        head: start of each line, such as the run's name where several runs print.
    """

    def __init__(self, console: Console, *, head: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._head, self._clock = console, head, clock
        self._shown_step: int | None = None
        self._shown_s = -math.inf

    def line(self, line: OutputLine) -> None:
        """Print the line."""
        _print(self._console, replace(line, text=self._head + line.text))

    def show(self, figures: ProgressFigures, *, news: bool) -> None:
        """Print the figures when they are due."""
        if news or self._shown_step is None:
            # After a recovery the step may be smaller: the next tenth counts from here.
            self._shown_step, self._shown_s = figures.step, self._clock()
            return
        far = figures.step - self._shown_step >= max(_PLAIN_SHARE * figures.total, 1)
        late = self._clock() - self._shown_s >= _PLAIN_S and figures.step > self._shown_step
        if (far or late or figures.step == figures.total > self._shown_step) and not figures.activity:
            self.line(OutputLine(text=figures.text()))
            self._shown_step, self._shown_s = figures.step, self._clock()

    def close(self) -> None:
        """Do nothing."""


class NotebookDisplay:
    """One notebook output that changes in place: the lines so far, a bar and the curve of the loss.

    It appears at once, in the cell that starts the run. Events come from a thread, perhaps while another cell runs.

    Args:
        display: shows HTML and returns a function that replaces it; IPython's by default.
    """

    def __init__(
        self,
        display: Callable[[str], Callable[[str], Any]] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._lines: list[OutputLine] = []
        self._figures = ProgressFigures(activity="starting")
        self._shown_s = -math.inf
        self._replace = (display or _ipython_display)(self._html())

    def line(self, line: OutputLine) -> None:
        """Add a line."""
        self._lines.append(line)
        self._draw()

    def show(self, figures: ProgressFigures, *, news: bool) -> None:
        """Redraw, at most twice a second unless there is news."""
        self._figures = figures
        if news or self._clock() - self._shown_s >= _NOTEBOOK_S:
            self._draw()

    def close(self) -> None:
        """Show the last figures."""
        self._draw()

    def _draw(self) -> None:
        self._shown_s = self._clock()
        self._replace(self._html())

    def _html(self) -> str:
        figures = self._figures
        lines = [line.text + (f"\n{line.detail}" if line.detail else "") for line in self._lines]
        return _progress_html(lines, figures.step, figures.total, figures.text(), figures.curve.svg(figures.total))


def _progress_html(lines: Sequence[str], done: int, total: int, status: str, curve: str = "") -> str:
    """Return lines, a bar with its status, and a curve as HTML for a notebook."""
    from markupsafe import Markup

    from trainwright.reporting.html.templates import render_template

    return render_template(
        "progress.html.j2", lines="\n".join(lines), done=done, total=max(total, 1), status=status, curve=Markup(curve)
    )


def _ipython_display(body: str) -> Callable[[str], Any]:
    """Show HTML. Returns the function that replaces it."""
    from IPython.display import HTML, display

    handle: Any = display(HTML(body), display_id=True)  # type: ignore[no-untyped-call]
    return lambda new: handle.update(HTML(new))  # type: ignore[no-untyped-call]


def _print(console: Console, line: OutputLine) -> None:
    console.print(Text(line.text, style=_STYLES[line.tone]), soft_wrap=True, highlight=False)
    if line.detail:
        console.print(Text("\n".join(f"    {row}" for row in line.detail.rstrip().splitlines())), soft_wrap=True)


# --- rows of predictions ----------------------------------------------------------------------------------------------


class RowProgress:
    """Progress over rows: a bar in a terminal, one changing output in a notebook, elsewhere lines.

    Notebooks and lines change with each tenth of the rows, and every ten seconds.

    Args:
        done: rows that are done already at the start.
        console: where to write; stderr by default.
    """

    def __init__(self, total: int, done: int, console: Console | None = None) -> None:
        self._console = console or Console(file=sys.stderr)
        self._total, self.done, self._shown = total, done, done
        self._shown_s = time.monotonic()
        self._first: tuple[int, float] | None = None  # rows and time of the first call of `add`
        self._bar: RichProgress | None = None
        self._notes: list[str] = []
        self._replace: Callable[[str], Any] | None = None  # the output of a notebook
        if _in_notebook():
            self._replace = _ipython_display(self._html())
        elif self._console.is_terminal and not self._console.is_dumb_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(bar_width=None))
            self._bar = RichProgress(*columns, console=self._console, expand=True, transient=True)
            self._task = self._bar.add_task(self._text(), total=total, completed=done)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def add(self, rows: int) -> None:
        """Count computed rows; negative where rows were lost."""
        self.done += rows
        now = time.monotonic()
        self._first = self._first or (self.done, now)
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, description=self._text())
        elif (
            self.done - self._shown >= _PLAIN_SHARE * self._total
            or now - self._shown_s >= _PLAIN_S
            or self.done == self._total
        ):
            self._shown, self._shown_s = self.done, now
            if self._replace is not None:
                self._replace(self._html())
            else:
                self.note(self._text())

    def note(self, text: str) -> None:
        """Print a line that stays."""
        if self._replace is not None:
            self._notes.append(text)
            self._replace(self._html())
        else:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _html(self) -> str:
        return _progress_html(self._notes, self.done, self._total, self._text())

    def _text(self) -> str:
        rows, since_s = self._first or (self.done, 0.0)
        spent_s = time.monotonic() - since_s
        shown = f"rows {self.done:,}/{self._total:,}"
        if self.done <= rows or spent_s <= 0:
            return shown
        rate = (self.done - rows) / spent_s
        return f"{shown}, {formatting.throughput(rate)}, {formatting.clock_time((self._total - self.done) / rate)} left"
