"""How figures are written for people: microseconds, ratios, Markdown tables, and the machine of a run in a sentence."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.measure.results import Run

#: Stands for a figure that no run has.
OPEN = "open"


def digits(value: float) -> str:
    """Three significant digits, or all digits before the point: ``9.17``, ``76.2``, ``1062``."""
    return f"{value:.{max(0, 2 - len(str(int(value))) + 1)}f}"


def microseconds(seconds: float) -> str:
    """:func:`digits` of as many microseconds."""
    return digits(seconds * 1e6)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose first column is text and the others numbers."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def described(run: Run) -> str:
    """Device, versions and conditions of a run, in one sentence."""
    machine = run.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if name != "gpubuf")
    threads = f"{machine['threads']} thread" + ("s" if machine["threads"] != 1 else "")
    return (
        f"{machine['device']['name']}, Python {machine['python_version']}, {threads}; {versions}; "
        f"{run.data['datetime'][:10]}, [`{run.source}`]({{root}}{run.source})."
    )


def load_before(run: Run) -> str:
    """How busy the machine was."""
    machine = run.machine
    return f"Load of the machine before the run: {machine['load_before']:.2f} on {machine['cores']} cores."


def against(ours: float | None, theirs: float | None, missing: str = OPEN) -> str:
    """``402000 (2010x)``, or what stands for a missing figure."""
    if theirs is None:
        return missing
    return microseconds(theirs) + (f" ({theirs / ours:.1f}x)" if ours else "")


def or_open(seconds: float | None) -> str:
    """Microseconds, or ``open``."""
    return OPEN if seconds is None else microseconds(seconds)
