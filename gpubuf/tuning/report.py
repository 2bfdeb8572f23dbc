"""Shows the tuning: how far it is, and the tables of its results."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from gpubuf.progress import ITEMS, can_show, progress_bar
from gpubuf.tuning.search import Result

HEADING = ("operation", "call", "configuration", "µs", "by rule", "launches")


def table(results: Iterable[Result]) -> list[tuple[str, ...]]:
    """A line for every call that was timed, under a heading."""
    lines: list[tuple[str, ...]] = [HEADING]
    for result in results:
        chosen, by_rule = result.chosen, result.by_rule
        if chosen is None:
            lines.append((result.job.operation, str(result.job), "not tuned", "", "", ""))
            continue
        first = (result.job.operation, describe(chosen.config))
        for name, timing in chosen.timings.items():
            rule = "" if by_rule is None else f"{1e6 * by_rule.timings[name].seconds:.2f}"
            launches = "" if timing.launches is None else f"{timing.launches}"
            lines.append((first[0], name, first[1], f"{1e6 * timing.seconds:.2f}", rule, launches))
            first = ("", "")
    return lines


def notes(results: Iterable[Result]) -> list[str]:
    """The configurations that could not be used or tried, a line for each reason; and used ones that spill."""
    found = []
    for result in results:
        timings = {} if result.chosen is None else result.chosen.timings
        found += [f"{result.job}: spills registers: {timing.spilled}" for timing in timings.values() if timing.spilled]
        reasons: dict[str, list[str]] = {}
        for made, reason in result.rejected:
            reasons.setdefault(reason, []).append(describe(made))
        found += [f"{result.job}: {'; '.join(made)}: {reason}" for reason, made in reasons.items()]
        if result.untried:
            found.append(f"{result.job}: {result.untried} configurations not tried for want of time")
    return found


def describe(made: Any) -> str:
    """A configuration in a few words."""
    return ", ".join(f"{name} {value}" for name, value in dataclasses.asdict(made).items())


@contextmanager
def progress(n_points: int) -> Iterator[Callable[[Result], None]]:
    """Yields the function to call with every result: a bar on a terminal, a line for each point anywhere else.

    Both are on standard error: standard output is for the table.
    """
    counted = itertools.count(1)
    lines = not can_show(sys.stderr)
    with progress_bar("points", n_points, None, columns=ITEMS) as advance:

        def show(result: Result) -> None:
            advance(1)
            chosen = "not tuned" if result.chosen is None else describe(result.chosen.config)
            timed = f"{len(result.trials)} of {len(result.trials) + len(result.rejected) + result.untried} timed"
            if lines:
                print(f"{next(counted)}/{n_points} {result.job}: {chosen} ({timed})", file=sys.stderr, flush=True)

        yield show
