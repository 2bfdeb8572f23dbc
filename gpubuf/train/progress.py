"""Shows the progress of a run: a bar on a terminal, and a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TextIO

from gpubuf.terminal import make_progress

_PLAIN_LINES = 10
_PLAIN_SECONDS = 60.0
_REFRESH_SECONDS = 0.1
# A step that takes longer is a pause, in which something is compiled, unless the one before took as long.
_PAUSE_SECONDS = 3.0


@dataclass(frozen=True)
class Status:
    """The progress of a run.

    Attributes:
        step: Transitions collected.
        mean_return: Of the last episodes; None before the first has ended.
        critic_loss: Mean since the last record; None before the first.
        actor_loss: As ``critic_loss``.
    """

    step: int
    mean_return: float | None
    critic_loss: float | None
    actor_loss: float | None


class Reporter:
    """Shows a run to its user; this one shows nothing but messages."""

    def start(self, step: int, total: int) -> None:
        """Training begins, at ``step`` of ``total``."""

    def update(self, status: Status) -> None:
        """Training has advanced. Called after every step; returns at once unless there is something to show."""

    def message(self, text: str) -> None:
        """Show another line of text."""
        print(text, flush=True)

    def stop(self) -> None:
        """Training is over, or was interrupted."""


class Speed:
    """Steps per second over the last few seconds, so that the remaining time is right after the random warm-up, too.

    What is compiled at the first steps takes up to minutes, and says nothing about those that follow: no rate is known
    from such a pause until more steps have been counted.
    """

    def __init__(self, step: int, total: int, span: float = 5.0) -> None:
        self._total = total
        self._span = span
        self._paused = False
        self._last = time.monotonic()
        self._marks = [(self._last, step)]

    def count(self, step: int, now: float) -> None:
        """Note the time at which ``step`` was done. Called after every step."""
        pause = now - self._last > _PAUSE_SECONDS
        if pause and not self._paused:
            self._marks = [(now, step)]
        self._paused, self._last = pause, now

    def update(self, step: int) -> float:
        """Note the time of ``step``. Returns steps per second, 0 while unknown."""
        now = time.monotonic()
        self._marks.append((now, step))
        while len(self._marks) > 2 and self._marks[1][0] < now - self._span:
            self._marks.pop(0)
        then, first = self._marks[0]
        return (step - first) / (now - then) if now > then else 0.0

    def left(self, step: int, rate: float) -> str:
        """The time for the remaining steps at ``rate``, as text."""
        if rate <= 0:
            return "-:--"
        seconds = round(max(0, self._total - step) / rate)
        hours, rest = divmod(seconds, 3600)
        minutes, seconds = divmod(rest, 60)
        return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def describe(status: Status) -> str:
    """Return and losses as text, with dashes for unknown numbers."""
    return (
        f"return {_number(status.mean_return, '.1f')}  "
        f"critic {_number(status.critic_loss, '.3g')}  actor {_number(status.actor_loss, '.3g')}"
    )


def _speed(rate: float, left: str) -> str:
    """Rate and remaining time as text, with dashes while they are unknown."""
    return f"{f'{rate:.0f}' if rate >= 10 else f'{rate:.2g}' if rate > 0 else '-'} steps/s  {left} left"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


class PlainReporter(Reporter):
    """Ten lines per run, or one per minute if that is more, without control sequences: for logs."""

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file
        self._total = 0
        self._due = 0
        self._shown = 0.0
        self._speed = Speed(0, 0)

    def start(self, step: int, total: int) -> None:
        self._total = total
        self._due = self._next(step)
        self._shown = time.monotonic()
        self._speed = Speed(step, total, span=float("inf"))

    def update(self, status: Status) -> None:
        now = time.monotonic()
        self._speed.count(status.step, now)
        if status.step < self._due and now < self._shown + _PLAIN_SECONDS:
            return
        self._shown = now
        rate = self._speed.update(status.step)
        self._due = self._next(status.step)
        self.message(
            f"step {status.step:,}/{self._total:,}  {describe(status)}  "
            f"{_speed(rate, self._speed.left(status.step, rate))}"
        )
        self._speed = Speed(status.step, self._total, span=float("inf"))

    def _next(self, step: int) -> int:
        return min(step + max(1, self._total // _PLAIN_LINES), self._total)

    def message(self, text: str) -> None:
        print(text, file=self._file or sys.stdout, flush=True)


class BarReporter(Reporter):
    """A progress bar, drawn by rich."""

    def __init__(self) -> None:
        self._progress = make_progress(
            "short bar",
            "{task.completed:,.0f}/{task.total:,.0f}",
            "[cyan]{task.fields[description_]}",
            "{task.fields[speed]}",
        )
        self._speed = Speed(0, 0)
        self._shown = 0.0
        self._latest: Status | None = None
        self._task = self._progress.add_task("", total=None, start=False, description_="", speed="")

    def start(self, step: int, total: int) -> None:
        self._speed = Speed(step, total)
        self._progress.update(self._task, completed=step, total=total)
        self._progress.start_task(self._task)
        self._progress.start()

    def update(self, status: Status) -> None:
        self._latest = status
        now = time.monotonic()
        self._speed.count(status.step, now)
        if now - self._shown >= _REFRESH_SECONDS:
            self._shown = now
            self._show(status)

    def _show(self, status: Status) -> None:
        rate = self._speed.update(status.step)
        self._progress.update(
            self._task,
            completed=status.step,
            description_=describe(status),
            speed=_speed(rate, self._speed.left(status.step, rate)),
        )

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
