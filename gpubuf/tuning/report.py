"""Tables of what was tuned."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gpubuf.tuning.search import Result

HEADING = ("operation", "call", "configuration", "µs", "by rule", "bytes", "% of copy", "% of floor")


@dataclass(frozen=True)
class Limits:
    """What the device can do at best, measured.

    Attributes:
        copy: bytes a second that a copy on the device reads and writes.
        launch: seconds of a kernel that does nothing, one of many in a graph.
    """

    copy: float
    launch: float


def table(results: Iterable[Result], limits: Limits) -> list[tuple[str, ...]]:
    """A line for every call that was timed, under a heading.

    "% of copy" is the share of the measured copy bandwidth that the bytes of the call amount to, "% of floor" the share
    of its time that its launches would take if they did nothing.
    """
    lines: list[tuple[str, ...]] = [HEADING]
    for result in results:
        operation = result.job.operation
        if result.chosen is None:
            lines.append((operation, str(result.job), "not tuned", "", "", "", "", ""))
            continue
        by_rule = result.by_rule
        for number, (name, timing) in enumerate(result.chosen.timings.items()):
            n_bytes = result.n_bytes[name]
            rule = "" if by_rule is None else f"{1e6 * by_rule.timings[name].seconds:.2f}"
            floor = "" if timing.launches is None else f"{100 * timing.launches * limits.launch / timing.seconds:.0f}"
            lines.append(
                (
                    operation if number == 0 else "",
                    name,
                    describe(result.chosen.config) if number == 0 else "",
                    f"{1e6 * timing.seconds:.2f}",
                    rule,
                    f"{n_bytes:,}",
                    f"{100 * n_bytes / timing.seconds / limits.copy:.1f}",
                    floor,
                )
            )
    return lines


def notes(results: Iterable[Result]) -> list[str]:
    """What could not be used or tried, and why: a line for each kind of reason. And what spills although it is used."""
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
