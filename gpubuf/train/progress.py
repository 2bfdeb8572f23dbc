"""Shows the progress of a run: a bar on a terminal, and a plain line now and then elsewhere."""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TextIO

from gpubuf.terminal import make_progress

_PLAIN_LINES = 10
_PLAIN_SECONDS = 60.0
_REFRESH_SECONDS = 0.1


@dataclass(frozen=True)
class Status:
    """The progress of a run.

    Attributes:
        step: Transitions collected.
        updates: Made so far. The first steps have none: they act at random.
        mean_return: Of the last episodes; None before the first has ended.
        evaluation: Mean return of the last evaluation; None before the first.
        critic_loss: Mean since the last record; None before the first.
        actor_loss: As ``critic_loss``.
    """

    step: int
    updates: int
    mean_return: float | None
    evaluation: float | None
    critic_loss: float | None
    actor_loss: float | None


class Reporter:
    """Shows a run to its user, or tells another program of it; this one shows nothing but messages.

    Override what you need, and give an instance to `train`. All is called from the loop of the training, on the host.
    """

    def start(self, step: int, total: int) -> None:
        """Training begins, at ``step`` of ``total``."""

    def update(self, status: Status) -> None:
        """Training has advanced. Called after every step; returns at once unless there is something to show."""

    def record(self, record: Mapping[str, Any]) -> None:
        """A line has been written to the metrics (docs/training.md lists their kinds)."""

    def message(self, text: str) -> None:
        """Show another line of text."""
        print(text, flush=True)

    def stop(self) -> None:
        """Training is over, or was interrupted. The final evaluation is recorded after that."""

    def close(self) -> None:
        """Everything has been written, or an error ends the run."""


class _Pace:
    """How fast a run learns. Random steps say nothing about that, nor does the first update, which compiles."""

    def __init__(self) -> None:
        self._began: tuple[int, float] | None = None

    def left(self, status: Status, total: int, now: float) -> datetime.timedelta | None:
        """The time that the other steps will take; None while that is unknown."""
        if self._began is None:
            if status.updates:
                self._began = status.step, now
            return None
        step, began = self._began
        if status.step == step:
            return None
        return datetime.timedelta(seconds=round((now - began) / (status.step - step) * (total - status.step)))


def describe(status: Status, losses: bool = True) -> str:
    """Returns as text, and losses, with dashes for unknown numbers."""
    text = f"return {_number(status.mean_return, '.1f')}"
    if status.evaluation is not None:
        text += f"  eval {status.evaluation:.1f}"
    if losses:
        text += f"  critic {_number(status.critic_loss, '.3g')}  actor {_number(status.actor_loss, '.3g')}"
    return text


def _speed(rate: float | None) -> str:
    """Steps per second as text, with a dash while they are unknown."""
    return f"{'-' if not rate else f'{rate:.0f}' if rate >= 10 else f'{rate:.2g}'} steps/s"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


class PlainReporter(Reporter):
    """Ten lines per run, or one per minute if that is more, without control sequences: for logs.

    The speed is that since the line before.
    """

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file
        self._total = 0
        self._due = 0
        self._pace = _Pace()
        # Step and time of the last line.
        self._shown = 0, 0.0

    def start(self, step: int, total: int) -> None:
        self._total = total
        self._next(step, time.monotonic())

    def _next(self, step: int, now: float) -> None:
        self._shown = step, now
        self._due = min(step + max(1, self._total // _PLAIN_LINES), self._total)

    def update(self, status: Status) -> None:
        now, (step, before) = time.monotonic(), self._shown
        left = self._pace.left(status, self._total, now)
        if status.step < self._due and now < before + _PLAIN_SECONDS:
            return
        rate = (status.step - step) / max(now - before, 1e-9)
        text = f"{describe(status)}  {_speed(rate)}  {'-' if left is None else left} left"
        self.message(f"step {status.step:,}/{self._total:,}  {text}")
        self._next(status.step, now)

    def message(self, text: str) -> None:
        print(text, file=self._file or sys.stdout, flush=True)


class BarReporter(Reporter):
    """A progress bar, drawn by rich: up to a million steps it fits into 80 columns."""

    def __init__(self) -> None:
        self._total = 0
        self._left: datetime.timedelta | None = None
        self._progress = make_progress(
            "short bar",
            "{task.completed:,.0f}/{task.total:,.0f}",
            "[cyan]{task.description}",
            "{task.fields[speed]}",
            "[cyan]{task.fields[left]}",
        )
        self._pace = _Pace()
        self._shown = 0.0
        self._latest: Status | None = None
        self._task = self._progress.add_task("", total=None, start=False, speed="", left="")

    def start(self, step: int, total: int) -> None:
        self._total = total
        self._progress.update(self._task, completed=step, total=total)
        self._progress.start_task(self._task)
        self._progress.start()

    def update(self, status: Status) -> None:
        self._latest = status
        now = time.monotonic()
        self._left = self._pace.left(status, self._total, now)
        if now - self._shown >= _REFRESH_SECONDS:
            self._shown = now
            self._show(status)

    def _show(self, status: Status) -> None:
        speed = _speed(self._progress.tasks[0].speed)
        left = "-" if self._left is None else str(self._left)
        told = describe(status, losses=False)
        self._progress.update(self._task, completed=status.step, description=told, speed=speed, left=left)

    def message(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def stop(self) -> None:
        if self._latest is not None:
            self._show(self._latest)
        self._progress.stop()


def choose_reporter(quiet: bool = False) -> Reporter:
    """A bar on a terminal, plain lines elsewhere, or nothing but messages."""
    if quiet:
        return Reporter()
    # rich alone would let FORCE_COLOR put control sequences into a log.
    if sys.stdout.isatty():
        from rich.console import Console

        if not Console().is_dumb_terminal:
            return BarReporter()
    return PlainReporter()
