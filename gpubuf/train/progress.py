"""Shows the progress of a run: a line that is rewritten on a terminal, and one now and then elsewhere."""

from __future__ import annotations

import datetime
import os
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpubuf.terminal import wrapped

_PLAIN_LINES = 10
_PLAIN_SECONDS = 60.0
_REFRESH_SECONDS = 0.1

# Back to the beginning of the line, which is erased.
_ANEW = "\r\x1b[K"


@dataclass(frozen=True)
class Status:
    """The progress of a run.

    Attributes:
        step: Transitions collected.
        updates: Made so far. The first steps have none: they act at random.
        mean_return: Of the last episodes; None before the first has ended.
        evaluation: Mean return of the last evaluation; None before the first.
    """

    step: int
    updates: int
    mean_return: float | None
    evaluation: float | None


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


class LineReporter(Reporter):
    """A line that is rewritten on a terminal; elsewhere ten lines per run, or one per minute if that is more.

    Speed and time left are those since the first update: random steps say nothing about them, nor does that update,
    which compiles.
    """

    def __init__(self) -> None:
        self._rewrites = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self._total = 0
        # Step and time of the last line, and of the first update.
        self._shown = 0, 0.0
        self._began: tuple[int, float] | None = None

    def start(self, step: int, total: int) -> None:
        self._total, self._shown = total, (step, time.monotonic())

    def update(self, status: Status) -> None:
        now, (step, before) = time.monotonic(), self._shown
        if self._began is None and status.updates:
            self._began = status.step, now
        last = status.step >= self._total
        due = status.step >= step + max(1, self._total // _PLAIN_LINES) or now >= before + _PLAIN_SECONDS
        if not (last or (now >= before + _REFRESH_SECONDS if self._rewrites else due)):
            return
        self._shown = status.step, now
        learnt, began = self._began or (status.step, now)
        rate = (status.step - learnt) / max(now - began, 1e-9)
        left = datetime.timedelta(seconds=round((self._total - status.step) / rate)) if rate else "-"
        known = {"return": status.mean_return, "eval": status.evaluation}
        returns = "".join(f"  {name} {value:.1f}" for name, value in known.items() if value is not None)
        speed = f"{rate:.0f}" if rate >= 10 else f"{rate:.2g}" if rate else "-"
        text = f"step {status.step:,}/{self._total:,}{returns}  {speed} steps/s  {left} left"
        if self._rewrites:
            width = shutil.get_terminal_size().columns - 1
            if len(text) > width:
                # Whole columns, as many as there is room for.
                text = text.replace(" steps/s", "/s")
                text = f"{text}  "[: width + 2].rpartition("  ")[0]
            print(f"{_ANEW}{text}", end="", flush=True)
        else:
            print(text, flush=True)

    def message(self, text: str) -> None:
        print(f"{_ANEW if self._rewrites else ''}{wrapped(text, sys.stdout)}", flush=True)

    def stop(self) -> None:
        if self._rewrites:
            print(flush=True)
