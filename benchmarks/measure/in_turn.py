"""Times calls that are compared with each other: in one process, one after the other, in many rounds.

A shared machine is then equally slow for all of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

Call = Callable[[], object]
#: By contender: ``"calls"``, the microseconds of each, and where they are known ``"bytes"`` and ``"operations"``.
Found = dict[str, dict[str, Any]]

#: Seconds of one call of one contender in one round.
TURN = 0.05


@dataclass(frozen=True)
class Contender:
    """One way to do the work of a table.

    Attributes:
        calls: what is timed, by name. The same names in all contenders of a table, as far as they have them.
        n_bytes: of all memory that it keeps; None: not of interest.
        counted: the call whose operations are counted, those that reach PyTorch's dispatcher; None: none is.
        between: what lies between two calls and is not timed; None: nothing does.
    """

    calls: Mapping[str, Call]
    n_bytes: int | None = None
    counted: Call | None = None
    between: Call | None = None


class _Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return func(*args, **(kwargs or {}))


def operations(call: Call) -> int:
    """How many operations a call dispatches."""
    with _Count() as count:
        call()
    return count.operations


def turn(call: Call, between: Call | None = None) -> float:
    """Microseconds per call: the mean over a slice of time, so that what is done now and then counts too."""
    call()
    count, took, start = 0, 0.0, time.perf_counter()
    while time.perf_counter() < start + TURN or not count:
        if between is not None:
            between()
        began = time.perf_counter()
        call()
        took += time.perf_counter() - began
        count += 1
    return took / count * 1e6


def in_turn(contenders: Mapping[str, Contender], rounds: int) -> Found:
    """The medians over rounds, in each of which every call had its turn."""
    calls = {(who, what): call for who, made in contenders.items() for what, call in made.calls.items()}
    took: dict[tuple[str, str], list[float]] = {place: [] for place in calls}
    for call in calls.values():
        turn(call)
    for _ in range(rounds):
        for place, call in calls.items():
            took[place].append(turn(call, contenders[place[0]].between))
    found: Found = {}
    for who, made in contenders.items():
        found[who] = {"calls": {what: statistics.median(took[who, what]) for what in made.calls}}
        if made.n_bytes is not None:
            found[who]["bytes"] = made.n_bytes
        if made.counted is not None:
            found[who]["operations"] = operations(made.counted)
    return found
