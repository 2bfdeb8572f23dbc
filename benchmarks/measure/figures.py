"""How figures are written for people: microseconds, ratios, Markdown tables, and the machine of a run in a sentence."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.measure.results import Run, Runs

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
    found = machine["versions"].items()
    versions = ", ".join(f"{name} {version}" for name, version in found if version and name != "gpubuf")
    threads = f"{machine['threads']} thread" + ("s" if machine["threads"] != 1 else "")
    instructions = f" ({machine['instructions']})" if "instructions" in machine else ""
    return (
        f"{machine['device']['name']}{instructions}, Python {machine['python_version']}, {threads}; {versions}; "
        f"{run.data['datetime'][:10]}, [`{run.source}`]({{root}}{run.source})."
    )


def conditions(run: Run) -> str:
    """:func:`described`, and how busy the machine was."""
    machine = run.machine
    load = f"Load of the machine before the run: {machine['load_before']:.2f} on {machine['cores']} cores."
    return f"{described(run)}\n\n{load}"


def of_run(kind: str, what: str) -> Callable[[Callable[[Run], str]], Callable[[Runs], str]]:
    """A section of the pages that is about the newest run of one kind; without one it says that there is none.

    Args:
        kind: see :func:`benchmarks.measure.results.kind_of`.
        what: of what no run is committed then: ``of `python -m benchmarks.studies.speed```.
    """

    def decorate(section: Callable[[Run], str]) -> Callable[[Runs], str]:
        def found(runs: Runs) -> str:
            run = runs.get(kind)
            return f"No run {what} is committed: {OPEN}." if run is None else section(run)

        return found

    return decorate


def against(ours: float | None, theirs: float | None, missing: str = OPEN) -> str:
    """``402000 (2010x)``, or what stands for a missing figure."""
    if theirs is None:
        return missing
    return microseconds(theirs) + (f" ({theirs / ours:.1f}x)" if ours else "")


def or_open(seconds: float | None) -> str:
    """Microseconds, or ``open``."""
    return OPEN if seconds is None else microseconds(seconds)
