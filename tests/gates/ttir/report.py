"""Findings, counted by what and where."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

HIGH = {
    "alias": "a name that enters a loop as another one and becomes it there: the compiler does not carry it",
    "compile": "the front end refuses the kernel",
    "out-of-bounds": "outside the storage that the pointer comes from, or outside all live storages",
    "misaligned": "an address that is no multiple of the element's size, or of what a vector of them takes",
    "race": "two programs touch a place, one writes, and neither access comes before the other",
    "barrier": "two lanes of a program touch a place, one writes, and no barrier is between",
    "barrier-scalar": "all threads load a scalar and one stores it, and no barrier is between",
    "duplicate": "lanes of one store give a place different values",
    "uninitialised": "a load of memory that nothing has written",
    "shared-bounds": "outside the shared memory of a program",
    "shuffle": "lanes of a warp exchange values with some that have gone another way",
    "register": "a register is read that nothing has been written to",
    "endless": "a program that does not end",
}
"""Kinds of findings that are faults unless the kernel declares them, see :mod:`.declared`. The last four: of PTX."""

LOW = {
    "race-equal": "a race of stores of one value",
    "race-silent": "a race of a load and a store of what was there before",
    "barrier-equal": "no barrier between stores of one value",
    "barrier-silent": "no barrier between a load and a store of what was there before",
    "same-lane": "no barrier between accesses of the same lane of the same shape, so probably of one thread",
    "leader-only": "no barrier between a scalar load and a store, where only the thread that stores uses what it loads",
    "duplicate-equal": "lanes of one store give a place one value",
    "beyond-view": "outside the tensor passed, within its storage",
    "hint": "a pointer is no multiple of what tl.multiple_of says",
    "truncated": "more places in conflict than are looked at",
}
"""Kinds of findings that a reader may want to know."""


@dataclass
class Finding:
    """``first`` and ``second`` are the accesses, ``places`` the lines of their statements, ``rows/_triton.py:150``."""

    kind: str
    kernel: str
    first: str
    second: str
    places: list[str]
    message: str
    count: int = 0
    tests: list[str] = field(default_factory=list)

    @property
    def high(self) -> bool:
        return self.kind in HIGH

    def __str__(self) -> str:
        second = "\n    " + self.second if self.second and self.second != self.first else ""
        test = f"\n    in {self.tests[0]}" if self.tests else ""
        return f"{self.kind} x{self.count} {self.kernel}\n    {self.first}{second}\n    {self.message}{test}"


@dataclass
class Report:
    """What was executed: launches, launches of several programs, and programs of every kernel; and what was found."""

    findings: dict[tuple[str, ...], Finding] = field(default_factory=dict)
    kernels: dict[str, list[int]] = field(default_factory=dict)
    specialisations: int = 0

    def add(self, kind: str, kernel: str, message: str, *accesses: tuple[str, str]) -> None:
        """Count a finding; ``accesses`` are (description, line of the statement)."""
        first, second = ([text for text, _ in accesses] + ["", ""])[:2]
        key = kind, kernel, first, second
        if key not in self.findings:
            places = [place for _, place in accesses]
            self.findings[key] = Finding(kind, kernel, first, second, places, message)
        found = self.findings[key]
        found.count += 1
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
        if test not in found.tests and len(found.tests) < 3:
            found.tests.append(test)

    def launched(self, kernel: str, programs: int) -> None:
        counts = self.kernels.setdefault(kernel, [0, 0, 0])
        for i, more in enumerate((1, int(programs > 1), programs)):
            counts[i] += more

    def ordered(self) -> list[Finding]:
        return sorted(self.findings.values(), key=lambda f: (not f.high, f.kind, f.kernel, f.first, f.second))

    @property
    def total(self) -> int:
        """How often something was found."""
        return sum(finding.count for finding in self.findings.values())

    def kinds(self) -> set[str]:
        return {finding.kind for finding in self.findings.values()}

    def text(self) -> str:
        lines = [
            f"{name}: {launches} launches, {several} of several programs, {programs} programs in all"
            for name, (launches, several, programs) in sorted(self.kernels.items())
        ]
        launches = sum(counts[0] for counts in self.kernels.values())
        lines.append(f"{launches} launches of {len(self.kernels)} kernels, {self.specialisations} specialisations")
        return "\n".join([*lines, *(("HIGH " if f.high else "low  ") + str(f) for f in self.ordered())])

    def write(self, path: Path) -> None:
        path.write_text(
            json.dumps({"kernels": self.kernels, "findings": [asdict(f) for f in self.ordered()]}, indent=1)
        )


def read(path: Path) -> tuple[dict[str, list[int]], list[Finding]]:
    """(counts of every kernel, findings) of a report that was written."""
    report = json.loads(path.read_text())
    return report["kernels"], [Finding(**finding) for finding in report["findings"]]
