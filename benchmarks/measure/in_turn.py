"""Times calls as a program makes them: one call of each contender after the other, not one of them in a tight loop.

A call finds in the caches what the others have left there, and a shared machine is equally slow for all.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.measure.clocks import WALL, Call, Clock
from benchmarks.measure.steady import Probe, steady

#: By contender: ``"calls"``, the median microseconds of each; ``"probes"``, what
#: :func:`~benchmarks.measure.steady.steady` said of each; and where they are counted ``"operations"``.
Found = dict[str, dict[str, Any]]

#: Rounds before those that count.
WARM_UP = 10


@dataclass(frozen=True)
class Contender:
    """One way to do the work of a table.

    Attributes:
        calls: what is timed, by name. The same names in all contenders of a table, as far as they have them.
        counted: the call whose operations are counted, those that reach PyTorch's dispatcher; None: none is.
    """

    calls: Mapping[str, Call]
    counted: Call | None = None


class _Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return func(*args, **(kwargs or {}))


def operations(call: Call) -> int:
    """How many operations a call dispatches."""
    count = _Count()
    with count:
        call()
    return count.operations


def alternating(
    calls: Mapping[str, Call], rounds: int, clocks: Mapping[str, Clock] | None = None, warm_up: int = WARM_UP
) -> dict[str, list[float]]:
    """Seconds of calls, each made once a round, on the wall clock unless they have others.

    ``warm_up`` rounds, but no more than those that count, go before.
    """
    took: dict[str, list[float]] = {who: [] for who in calls}
    clocks = dict.fromkeys(calls, WALL) if clocks is None else clocks
    for number in range(-min(warm_up, rounds), rounds):
        for who, call in calls.items():
            seconds = clocks[who].seconds(call)
            if number >= 0:
                took[who].append(seconds)
    return took


def in_turn(contenders: Mapping[str, Contender], rounds: int, probe: Probe) -> Found:
    """Call by call, the contenders that have it in turn."""
    found: Found = {who: {"calls": {}, "probes": {}} for who in contenders}
    for what in dict.fromkeys(what for made in contenders.values() for what in made.calls):
        calls = {who: made.calls[what] for who, made in contenders.items() if what in made.calls}
        took, said = steady(functools.partial(alternating, calls, rounds), probe)
        for who in calls:
            found[who]["calls"][what] = statistics.median(took[who]) * 1e6
            found[who]["probes"][what] = said
    for who, made in contenders.items():
        if made.counted is not None:
            found[who]["operations"] = operations(made.counted)
    return found
