"""Findings that a kernel declares and explains, in a comment right above the statement that makes the access:

    # TTIR race (some_kernel, another_kernel): why it does no harm.

for each kind of finding. A declaration that nothing needs any more is a fault itself.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

from tests.gates.ttir.report import HIGH, Finding

_COMMENT = re.compile(r"\s*# TTIR ([a-z-]+) \(([\w, ]+)\): \S")


@dataclass(frozen=True)
class Declaration:
    """A kind of finding of a kernel whose first or second access is made by the statement of these lines of a file."""

    kind: str
    kernel: str
    file: str
    lines: range

    def covers(self, finding: Finding) -> bool:
        places = [place.rpartition(":") for place in finding.places]
        return (finding.kind, finding.kernel) == (self.kind, self.kernel) and any(
            file == self.file and int(line) in self.lines for file, _, line in places
        )

    def __str__(self) -> str:
        return f"{self.file}:{self.lines[0]} declares {self.kind} in {self.kernel}"


def declarations(kernels: Path) -> list[Declaration]:
    """Of all files of a folder of kernels.

    Raises:
        ValueError: a comment begins like a declaration and is none.
    """
    found = []
    for path in sorted(kernels.rglob("_triton*.py")):
        text = path.read_text()
        statements = sorted((n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.stmt)), key=lambda n: n.lineno)
        for number, line in enumerate(text.splitlines(), 1):
            if not line.strip().startswith("# TTIR"):
                continue
            match = _COMMENT.match(line)
            statement = next((n for n in statements if n.lineno > number), None)
            if match is None or match[1] not in HIGH or statement is None:
                raise ValueError(f"{path}:{number}: expected '# TTIR kind (kernel, ...): why' above a statement")
            lines = range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
            file = path.relative_to(kernels).as_posix()
            found += [Declaration(match[1], kernel.strip(), file, lines) for kernel in match[2].split(",")]
    return found


def unexplained(findings: list[Finding], declared: list[Declaration]) -> list[Finding]:
    """Faults among the findings."""
    return [f for f in findings if f.high and not any(d.covers(f) for d in declared)]


def stale(findings: list[Finding], declared: list[Declaration]) -> list[Declaration]:
    """Declarations of what was not found."""
    return [d for d in declared if not any(d.covers(f) for f in findings)]
