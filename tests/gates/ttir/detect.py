"""Conflicts between accesses: within a program between two barriers, and between the programs of a launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from tests.gates.ttir.machine import Access, Machine

_LIMIT = 2000
"""Places that are looked at where the same operations meet, of a launch or an interval, evenly spaced."""

Element = tuple[Access, int]
"""An access, and one of its addresses."""


def _places(accesses: Sequence[Access]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(place, access, element) of all that the accesses touch; a place is as long as the smallest element."""
    grain = min(a.op.size for a in accesses)
    where, which, element = [], [], []
    for number, a in enumerate(accesses):
        parts = a.op.size // grain
        where.append((a.addresses[:, None] // grain + np.arange(parts)).ravel())
        which.append(np.full(where[-1].size, number))
        element.append(np.repeat(np.arange(a.addresses.size), parts))
    return np.concatenate(where), np.concatenate(which), np.concatenate(element)


def _near_writes(accesses: Sequence[Access]) -> list[Access]:
    """Accesses without the loads that can't meet a write."""
    writes = [a for a in accesses if not a.is_load]
    if not writes:
        return []
    low = min(int(a.addresses.min()) for a in writes)
    high = max(int(a.addresses.max()) + a.op.size for a in writes)
    return [
        a
        for a in accesses
        if not a.is_load or (int(a.addresses.max()) + a.op.size > low and int(a.addresses.min()) < high)
    ]


def _meetings(
    accesses: Sequence[Access], owner: Callable[[Access], int] | None, truncated: Callable[[], None]
) -> Iterator[list[Element]]:
    """Elements that meet in a place, at least one a write; of different owners where there are owners."""
    accesses = _near_writes(accesses)
    if not accesses:
        return
    where, which, element = _places(accesses)
    is_write = np.array([not a.is_load for a in accesses])[which]
    hot = np.isin(where, np.unique(where[is_write]))
    where, which, element = where[hot], which[hot], element[hot]
    order = np.argsort(where, kind="stable")
    where, which, element = where[order], which[order], element[order]
    begin = np.flatnonzero(np.r_[True, where[1:] != where[:-1]])
    end = np.r_[begin[1:], where.size]
    several = end - begin > 1
    if owner is not None:
        owners = np.array([owner(a) for a in accesses])[which]
        several &= np.minimum.reduceat(owners, begin) != np.maximum.reduceat(owners, begin)
    groups = np.flatnonzero(several)
    if groups.size > _LIMIT:
        # Many harmless places must not hide a few of others.
        numbers = np.random.default_rng(0).integers(2**62, size=1 + max(a.op.number for a in accesses))
        alike = np.add.reduceat(numbers[[a.op.number for a in accesses]][which], begin)[groups]
        kinds = [groups[alike == kind] for kind in np.unique(alike)]
        if any(kind.size > _LIMIT for kind in kinds):
            truncated()
        spaced = [np.linspace(0, kind.size - 1, min(kind.size, _LIMIT)).astype(int) for kind in kinds]
        groups = np.concatenate([kind[chosen] for kind, chosen in zip(kinds, spaced, strict=True)])
    for g in groups:
        members = slice(begin[g], end[g])
        yield [(accesses[k], int(x)) for k, x in zip(which[members], element[members], strict=True)]


def _ends(group: list[Element], count: int) -> list[Element]:
    """A group, or as many of its first and last members."""
    return group if len(group) <= 2 * count else group[:count] + group[-count:]


def _same_bits(a: Access, i: int, b: Access, j: int) -> bool:
    return (
        a.bits is not None
        and b.bits is not None
        and a.op.size == b.op.size
        and bool(a.addresses[i] == b.addresses[j])
        and bool(a.bits[i] == b.bits[j])
    )


def _silent(a: Access, i: int) -> bool:
    return a.silent is not None and bool(a.silent[i])


# Within a program


def within_interval(machine: Machine, accesses: list[Access]) -> None:
    """Report conflicts of one program's accesses with no barrier between them."""
    if len(accesses) == 1 and (accesses[0].op.scalar or accesses[0].is_atomic):
        return
    seen = set()

    def truncated() -> None:
        machine.report.add("truncated", machine.program.name, "more places meet within a program than are looked at")

    for group in _meetings(accesses, None, truncated):
        group = _ends(group, 24)
        for n, (a, i) in enumerate(group):
            for b, j in group[n + 1 :]:
                if (a.is_load and b.is_load) or (a.is_atomic and b.is_atomic) or (a is b and i == j):
                    continue
                (first, k), (second, m) = ((b, j), (a, i)) if a.step > b.step else ((a, i), (b, j))
                kind, message = _judge_lanes(first, k, second, m, machine.program.has_products)
                key = kind, first.op.number, second.op.number
                if kind and key not in seen:
                    seen.add(key)
                    lanes = "" if first.op.scalar and second.op.scalar else f"lanes {first.lane_of(k)}, "
                    lanes += "" if second.op.scalar else f"{second.lane_of(m)}, "
                    where = f"{lanes}program {machine.current}, address {int(first.addresses[k]):#x}"
                    machine.find(kind, f"{message}: {where}", first.op, second.op)


def _judge_lanes(a: Access, i: int, b: Access, j: int, several_layouts: bool) -> tuple[str, str]:
    """What it means that ``a`` and then ``b`` touch a place without a barrier; ("", "") if nothing.

    With ``several_layouts`` a lane of two operations may be two threads. What it stores where it has loaded is an
    exception, for it depends as a rule on what was loaded.
    """
    if a is b:
        same = _same_bits(a, i, b, j)
        return ("duplicate-equal", "one value") if same else ("duplicate", "different values")
    what = "WAW" if not (a.is_load or b.is_load) else "WAR" if a.is_load else "RAW"
    if a.op.scalar and b.op.scalar:
        if what == "WAW":
            return "", ""  # one thread does all writes of scalars
        return ("leader-only", what) if (a if a.is_load else b).op.leader_only else ("barrier-scalar", what)
    if what == "WAW" and _same_bits(a, i, b, j):
        return "barrier-equal", what
    by_others = several_layouts and a.is_store and a.op is not b.op
    if a.op.shape == b.op.shape and a.lane_of(i) == b.lane_of(j) and not by_others:
        return "same-lane", what
    if what != "WAW" and (_silent(a, i) or _silent(b, j)):
        return "barrier-silent", what
    return "barrier", what


# Between programs


class _Clocks:
    """Which accesses come before which, by barriers and atomics with acquire and release.

    Vector clocks: of every program, what all its threads have done, then what that thread has done which does
    scalar stores and atomics.
    """

    def __init__(self, machine: Machine) -> None:
        width, height, depth = machine.grid
        self._count = width * height * depth
        self._acquired: dict[int, list[tuple[int, np.ndarray]]] = {}
        released: dict[int, np.ndarray] = {}
        clocks: dict[int, np.ndarray] = {}
        for atomic in machine.atomics:
            program = atomic.program
            mine = clocks.get(program, np.zeros(2 * self._count, np.int64))
            # Threads other than the one that does the atomic go on when they get its result.
            if atomic.ordering in ("acquire", "acq_rel") and atomic.used and atomic.address in released:
                mine = np.maximum(mine, released[atomic.address])
                self._acquired.setdefault(program, []).append((atomic.step, mine))
            clocks[program] = mine
            if atomic.ordering in ("release", "acq_rel"):
                mine = mine.copy()
                # A release covers what came before the last barrier: the atomic is one thread's.
                mine[program], mine[self._count + program] = atomic.barrier, atomic.step + 1
                released[atomic.address] = np.maximum(mine, released.get(atomic.address, 0))

    def before(self, a: Access, b: Access) -> bool:
        """Whether ``a`` happens before ``b``, of another program."""
        known = [clock for step, clock in self._acquired.get(b.program, []) if step < b.step]
        by_one_thread = a.op.scalar and not a.is_load
        return bool(known) and bool(a.step < known[-1][a.program + (self._count if by_one_thread else 0)])


def within_launch(machine: Machine) -> None:
    """Report conflicts of accesses of different programs."""
    if len({a.program for a in machine.accesses}) < 2:
        return

    def truncated() -> None:
        machine.report.add("truncated", machine.program.name, "more places meet between programs than are looked at")

    clocks: _Clocks | None = None
    seen = set()
    for group in _meetings(machine.accesses, lambda a: a.program, truncated):
        clocks = clocks or _Clocks(machine)
        writers = [(a, i) for a, i in group if not a.is_load]
        for a, i in writers[:64]:
            for b, j in _ends(group, 128):
                if a.program == b.program or (a.is_atomic and b.is_atomic):
                    continue
                key = frozenset((a.op.number, b.op.number))
                if (key, "race") in seen or clocks.before(a, b) or clocks.before(b, a):
                    continue
                kind, message = _judge_programs(a, i, b, j)
                if (key, kind) not in seen:
                    seen.add((key, kind))
                    first, second = sorted((a.op, b.op), key=lambda op: op.number)
                    where = f"programs {a.program} and {b.program} of {machine.grid}, {int(a.addresses[i]):#x}"
                    machine.find(kind, f"{message}: {where}", first, second)


def _judge_programs(a: Access, i: int, b: Access, j: int) -> tuple[str, str]:
    if a.is_store and b.is_store:
        return ("race-equal", "both store one value") if _same_bits(a, i, b, j) else ("race", "different values stored")
    if a.is_atomic or b.is_atomic:
        other = b if a.is_atomic else a
        return "race", f"an atomic against a plain {other.op.kind}"
    if _silent(a, i):
        return "race-silent", "a store of what was there before against a load"
    return "race", "a store against a load"
