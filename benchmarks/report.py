"""Writes the measured figures into README.md and the pages of docs/, so that none of them is typed by hand.

``python -m benchmarks.report`` reads the newest file of every kind in ``benchmarks/results/``, and rewrites the blocks
between the markers ``<!-- figures: NAME -->`` and ``<!-- end of figures -->``, and draws the pictures of these runs.
With ``--check`` it changes nothing, and fails if a page or a picture is out of date.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.measure.elsewhere import ROOT
from benchmarks.measure.prediction import COLD, FASTSAC, PRECISIONS, TARGETS, WARM, Networks, of_perceptrons, on_device
from benchmarks.measure.results import Run, Runs, by_curve, newest_runs
from benchmarks.pictures import draw, outdated
from benchmarks.studies.in_turn import WORKLOADS as HEADLINES
from benchmarks.workloads import losses
from benchmarks.workloads import windows as neighbours
from benchmarks.workloads.registry import REGISTRY, TITLES
from benchmarks.workloads.replay import WORKLOADS
from benchmarks.workloads.sac import WORKLOADS as SAC
from benchmarks.workloads.slices import SLICES

#: Stands for a figure that no run has.
OPEN = "open"
OURS = "gpubuf"


def digits(value: float) -> str:
    """Three significant digits, or all digits before the point: ``9.17``, ``76.2``, ``1062``."""
    return f"{value:.{max(0, 2 - len(str(int(value))) + 1)}f}"


def against(ours: float | None, theirs: float | None, missing: str = "") -> str:
    """``402000 (2010x)``, or what stands for a missing figure."""
    return missing if theirs is None else digits(theirs) + (f" ({theirs / ours:.1f}x)" if ours else "")


#: Marks behind the title of a row, and what stands below a table that has such rows.
MARKS = {
    "†": "The host changed its speed while this row was measured.",
    "‡": "The host was slower, all the while, than at its best in this run.",
}
#: How many times slower than at its best a host must be to be in another state.
SLOWER = 1.3


def steady_title(title: str, probe: dict[str, Any] | None, run: Run) -> str:
    """The title of a row, marked where its probes have not agreed, or show a slow host. Of older results none does."""
    if probe is None:
        return title
    slow = min(probe["before"], probe["after"]) > SLOWER * min(probes(run.data))
    return f"{title} †" if not probe["agreed"] else f"{title} ‡" if slow else title


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose first column is text and the others numbers."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    shown = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    marked = [f"{mark} {said}" for mark, said in MARKS.items() if any(row[0].endswith(mark) for row in rows)]
    return "\n\n".join([shown, *marked])


def probes(found: Any) -> list[float]:
    """The microseconds of all probes in what a run has found."""
    if isinstance(found, dict):
        own = [found["before"], found["after"]] if "agreed" in found else []
        return own + [took for each in found.values() for took in probes(each)]
    return [took for each in found for took in probes(each)] if isinstance(found, list) else []


def described(run: Run) -> str:
    """Device, versions and conditions of a run, in a sentence or two."""
    machine = run.machine
    known = machine["versions"].items()
    versions = ", ".join(f"{name} {version}" for name, version in known if version and name != "gpubuf")
    threads = f"{machine['threads']} thread" + ("s" if machine["threads"] != 1 else "")
    instructions = f" ({machine['instructions']})" if "instructions" in machine else ""
    tuned = {True: ", by a tuned file", False: ", by the rules"}.get(machine.get("tuned"), "")
    seen = probes(run.data)
    probed = f"probes of the host: {digits(min(seen))} to {digits(max(seen))} µs; " if seen else ""
    found = (
        f"{machine['device']['name']}{instructions}, Python {machine['python_version']}, {threads}, load "
        f"{machine['load_before']:.2f} on {machine['cores']} cores{tuned}; {versions}; {probed}"
        f"{run.data['datetime'][:10]}, [`{run.source}`]({{root}}{run.source})."
    )
    if "gpu_tests" in run.data:
        tests = run.data["gpu_tests"]
        counts = "{passed} passed, {failed} failed, {skipped} skipped".format(**tests)
        found += f"\n\nGPU tests: {counts}." + "".join(f" Failed: `{name}`." for name in tests["failures"])
    return found


def of_run(section: Callable[[Run], str], kind: str) -> Callable[[Runs], str]:
    """A block about the newest run of one kind, and where it comes from; without one it says that there is none."""

    def found(runs: Runs) -> str:
        run = runs.get(kind)
        return f"No run of this kind is committed: {OPEN}." if run is None else f"{section(run)}\n\n{described(run)}"

    return found


# One table of workloads for README, pages and the terminal


def comparison(run: Run, workloads: Sequence[str]) -> str:
    """Median µs per call by library, in brackets how many times as long as gpubuf's. Graphs have no ratio."""
    names = [name for name in workloads if name in run.workloads]
    measured = {library for name in names for library in run.of(name)}
    columns = [name for name in TITLES if name in measured]
    rows = []
    for name in names:
        took = {library: run.median(name, library) for library in columns}
        micro = {library: None if each is None else each * 1e6 for library, each in took.items()}
        cells = [against(None if who.startswith(OURS) else micro.get(OURS), micro[who]) for who in columns]
        of_row = next(iter(run.of(name).values()))["extra_info"]
        rows.append([steady_title(REGISTRY[name].title, of_row.get("probe"), run), *cells])
    return table(["median µs per call", *(TITLES[name] for name in columns)], rows) if rows else f"{OPEN}."


def our_best(name: str, took: dict[str, Any]) -> float:
    """Our microseconds: of a whole update by the fastest way that there is, else by the call that a user writes."""
    ways = [each for who, each in took.items() if who.startswith(OURS) and (who == OURS or name in SAC)]
    return min(ways)


def in_turn_rows(run: Run, where: str = "") -> dict[str, list[str]]:
    """By workload of calls in turn: its title, our time, TorchRL's, and the fastest other library's.

    A peer's ratio is to the calls of ours that alternated with its own.
    """
    rows: dict[str, list[str]] = {}
    for name in HEADLINES:
        found = {peer: part[name] for peer, part in run.in_turn.items() if name in part}
        if not found:
            continue
        ours = found.get("torchrl") or next(iter(found.values()))
        others = [(each[peer] / each[OURS], peer) for peer, each in found.items() if peer not in ("torchrl", OURS)]
        title = steady_title(f"{REGISTRY[name].title}{where}", ours.get("probe"), run)
        row = rows[name] = [title, digits(our_best(name, ours))]
        for peer in ("torchrl", min(others, default=(0.0, ""))[1]):
            each = found.get(peer)
            shown = against(our_best(name, each), each.get(peer)) if each else ""
            row.append(f"{shown} {TITLES[peer]}" if shown and peer != "torchrl" else shown)
    return rows


def in_turn(run: Run) -> str:
    """docs/performance.md: all of :func:`in_turn_rows`."""
    return table(["median µs per call, in turn", "gpubuf", "TorchRL", "fastest other"], [*in_turn_rows(run).values()])


#: Workloads of calls in turn that README shows.
SHOWN = (
    *("uniform-sample-256", "extend-1", "extend-256", "prioritized-sample-256"),
    *("slices-5M-in-6M-write-and-sample", "SAC-update-256"),
)


def headlines(runs: Runs) -> str:
    """README: calls in turn, Stable-Baselines3's loop with a large buffer, and steps per second of whole programs."""
    rows: list[list[str]] = []
    kinds = []
    for kind in ("in_turn", "cuda"):
        if kind in runs:
            where = "" if kind == "in_turn" else f", {runs[kind].machine['device']['name']}"
            found = in_turn_rows(runs[kind], f"{where}, µs")
            rows += [found[name] for name in SHOWN if name in found]
            kinds += [kind] if found else []
    if "sb3_loop" in runs:
        loop = list(runs["sb3_loop"].data["sb3_loop"].values())[-1]
        took = [[loop[who]["calls"][what] for who in (OURS, "Stable-Baselines3")] for what in ("sample", "add")]
        own, theirs = ", ".join(digits(ours) for ours, _ in took), ", ".join(against(*each) for each in took)
        rows.append(["`sample`, `add` in Stable-Baselines3's SAC, µs", own, "", f"{theirs} its own"])
    if "speed" in runs:
        speeds = {one["program"]: one["steps_per_second"] for one in runs["speed"].data["speed"]}
        ours, others = speeds["gpubuf, uniform"], ("Stable-Baselines3", "SBX")
        shown = ", ".join(f"{speeds[who]:.0f} ({ours / speeds[who]:.1f}x) {who}" for who in others if who in speeds)
        rows.append(["training with SAC, steps per second", f"{ours:.0f}", "", shown])
    kinds += [kind for kind in ("sb3_loop", "speed") if kind in runs]
    sources = ", ".join(f"[{runs[kind].machine['device']['name']}]({{root}}{runs[kind].source})" for kind in kinds)
    return f"{table(['', 'gpubuf', 'TorchRL', 'another'], rows)}\n\nMeasured on: {sources}." if rows else f"{OPEN}."


def sb3_loop(run: Run) -> str:
    """``add`` and ``sample`` inside Stable-Baselines3's loop."""
    rows = []
    for before, found in run.data["sb3_loop"].items():
        for what in ("sample", "add"):
            ours, theirs = (found[who]["calls"][what] for who in (OURS, "Stable-Baselines3"))
            rows.append([f"`{what}`, {int(before):,} rows before", digits(ours), against(ours, theirs)])
    return table(["median µs in Stable-Baselines3's SAC", "gpubuf", "its own buffer"], rows)


def contenders(run: Run) -> str:
    """docs/performance-losses.md: a table for each loss, with ratios to the first line, and operations if known."""
    parts = []
    for name, found in run.data["losses"].items():
        first = next(iter(found.values()))
        names = list(dict.fromkeys(call for part in found.values() for call in part["calls"]))
        rows = []
        for contender, part in found.items():
            cells = []
            for call in names:
                took, before = part["calls"].get(call), first["calls"].get(call)
                ratio = f" ({took / before:.2f}x)" if took and before and part is not first else ""
                cells.append("" if took is None else f"{digits(took)}{ratio}")
            rows.append([contender, *cells, str(part.get("operations", ""))])
        head = [losses.WORKLOADS[name].title, *(f"{call}, µs" for call in names), "operations"]
        parts.append(table(head, rows))
    return "\n\n".join(parts)


# Studies


def algorithms(run: Run) -> str:
    """Mean returns by algorithm and seed, at the end and on the way, and minutes of a core."""
    rows = []
    for (env, curve), ones in by_curve(run).items():
        returns = [one["mean_return"] for one in ones]
        known = [spent / 60 for one in ones if (spent := one["processor_seconds"]) is not None]
        points = [value for one in ones for _, value in one["points"]]
        row = [f"{env}, {curve}", f"{ones[0]['steps']:,}", ", ".join(f"{each:.0f}" for each in returns)]
        row.append(f"{statistics.fmean(returns):.0f}")
        row.append(f"{statistics.fmean(points):.0f}" if points else "")
        rows.append([*row, f"{statistics.fmean(known):.1f}" if known else ""])
    head = ["environment, algorithm", "steps", "mean return by seed", "mean", "mean on the way", "minutes of a core"]
    return table(head, rows)


def pendulum(run: Run) -> str:
    """What ``gpubuf train`` reaches on Pendulum with every seed, and how fast it is."""
    rows = []
    for (env, curve), ones in by_curve(run).items():
        if "Pendulum" in env:
            returns = ", ".join(f"{one['mean_return']:.1f} (seed {one['seed']})" for one in ones)
            minutes = statistics.fmean(one["seconds"] for one in ones) / 60
            steps = statistics.fmean(one["steps_per_second"] for one in ones)
            mode = f"{env}, {curve}, {ones[0]['steps']:,} steps"
            rows.append([mode, returns, str(ones[0]["episodes"]), f"{minutes:.1f}", f"{steps:.0f}"])
    return table(["`gpubuf train`", "mean return", "of episodes", "minutes", "steps per second"], rows)


def speed(run: Run) -> str:
    """Steps per second of several programs."""
    found, rows = run.data["speed"], []
    for one in found:
        rounds = f"{min(one['rounds']):.0f} to {max(one['rounds']):.0f}"
        factor = found[0]["steps_per_second"] / one["steps_per_second"]
        rows.append([one["program"], f"{one['steps_per_second']:.0f}", rounds, f"{factor:.2f}x"])
    head = [f"SAC on {found[0]['env']}", "steps per second", "in the rounds", f"{found[0]['program']}, as fast"]
    return table(head, rows)


def alone(run: Run) -> str:
    """docs/training-measured.md: `gpubuf train` by itself, with many environments on the device."""
    rows = []
    for each in run.data["alone"]:
        rates = [f"{each[what]:,.0f}" for what in ("steps_per_second", "updates_per_second")]
        rows.append([steady_title(f"`{each['program']}`", each["probe"], run), *rates])
    return table(["", "steps per second", "updates per second"], rows)


def rsl_rl(run: Run) -> str:
    """docs/integrations/rsl_rl.md: what each algorithm reaches in rsl_rl's runner, and how fast it is."""
    rows = []
    for name in dict.fromkeys(one["algorithm"] for one in run.data["rsl_rl"]):
        ones = [one for one in run.data["rsl_rl"] if one["algorithm"] == name]
        spent = sum(one["processor_seconds"] for one in ones)
        returns = ", ".join(f"{one['mean_return']:.0f}" for one in ones)
        updates = sum(one["updates"] for one in ones)
        rates = [f"{sum(one['steps'] for one in ones) / spent:,.0f}", f"{updates / spent:,.0f}"]
        rows.append([name, f"{ones[0]['steps']:,}", returns, f"{spent / len(ones):.0f}", *rates])
    head = ["`torch/Pendulum`, 64 environments", "steps", "mean return by seed", "seconds of a core"]
    return table([*head, "steps per second", "updates per second"], rows)


def launches(runs: Runs) -> str:
    """docs/performance-launches.md: the kernels of every call, what it should take on an H200, and what it took.

    What its launches cost the host, and the bandwidth that a cold call should get, are those that the run has measured.
    """
    run, measured = runs.get("kernels"), runs.get("calls on cuda")
    if run is None:
        return f"No run of this kind is committed: {OPEN}."
    took = {} if measured is None else {each["call"]: each for each in measured.data["calls"]}
    speeds = {} if measured is None else measured.machine
    bandwidth = speeds.get("copy_bytes_per_second", COLD.bandwidth * 1e6) / 1e6
    caches = {"warm": WARM, "cold": dataclasses.replace(COLD, bandwidth=bandwidth)}
    rows = []
    for each in run.data["kernels"]["launches"]:
        found = took.get(each["call"], {})
        cells = [digits(each["total"] * speeds["launch_us"]) if "launch_us" in speeds else OPEN]
        for what, met in caches.items():
            cells += [digits(on_device(each["launches"], met)), digits(found[what]) if what in found else OPEN]
        kernels = ", ".join(f"`{name}`" for name in each["kernels"])
        title = steady_title(each["call"], found.get("probe"), measured or run)
        rows.append([title, str(each["total"]), *cells, kernels])
    times = (f"µs, {what}, {how}" for what in caches for how in ("predicted", "measured"))
    shown = table(["call", "launches", "µs of the host for them", *times, "kernels"], rows)
    copied = f"{bandwidth / 1e6:.2f} TB/s" if "copy_bytes_per_second" in speeds else OPEN
    copies = f"A kernel copies random data at, read and written: {copied}."
    return "\n\n".join([shown, copies, *(described(each) for each in (measured, run) if each is not None)])


def on_h200(run: Run) -> str:
    """docs/windows.md: what batches of windows launch on an H200, and should take there."""
    counted = []
    for each in run.data["kernels"]["windows"]:
        moved = (sum(launch[f"bytes_{how}"] for launch in each["launches"]) / 1e6 for how in ("loaded", "stored"))
        took = [digits(on_device(each["launches"], met, each["others"])) for met in (WARM, COLD)]
        launched = each["total"] + each["others"], each["others"]
        counted.append([each["call"], *map(str, launched), *map(digits, moved), *took])
    head = ["gpubuf on an H200, predicted", "launches", "of PyTorch", "MB loaded", "MB stored", "µs, warm", "µs, cold"]
    return table(head, counted)


def fused() -> list[list[str]]:
    """What an update of soft actor-critic should take in fused launches, as rows of a table."""
    critics = FASTSAC._replace(policy=False)
    # FastSAC's actor learns once in four updates of the critics.
    shares = {"SAC": {Networks(): 1.0}, "FastSAC, critics": {critics: 1.0}, "FastSAC": {critics: 0.75, FASTSAC: 0.25}}
    asked = [("SAC", n) for n in (256, 1024, 4096, 8192)] + [(name, 8192) for name in ("FastSAC, critics", "FastSAC")]
    rows = []
    for (name, n), precision in itertools.product(asked, PRECISIONS):
        cells = []
        for target in TARGETS.values():
            found = [(share, of_perceptrons(n, target, precision, each)) for each, share in shares[name].items()]
            cells.append(digits(sum(share * sum(one.microseconds for one in each.values()) for share, each in found)))
        launches = sum(share * len(each) for share, each in found)
        rows.append([f"{name}, {precision}, {n}", f"{launches:g}", *cells])
    return rows


def updates(runs: Runs) -> str:
    """docs/performance-launches.md: kernels of whole updates, and what the fused one should take."""
    run, measured = runs.get("updates"), runs.get("update_times on cuda")
    if run is None:
        return f"No run of this kind is committed: {OPEN}."
    found: dict[tuple[str, str], dict[bool, int]] = {}
    for each in run.data["updates"]["updates"]:
        found.setdefault((each["algorithm"], each["form"]), {})[each["prioritized"]] = each["total"]
    rows = [[*name, *(str(of.get(how, "")) for how in (False, True))] for name, of in found.items()]
    parts = [table(["update", "form", "kernels", "with priorities"], rows)]
    of_families = run.data["updates"]["families"]
    names = list(of_families[0]["more"])
    rows = [[each["algorithm"], str(each["total"]), *(str(each["more"][n]) for n in names)] for each in of_families]
    parts.append(table(["gpubuf by autograd", "kernels", *(f"more without `{name}`" for name in names)], rows))
    parts.append(table(["fused, predicted µs", "launches", *TARGETS], fused()))
    times = [] if measured is None else measured.data["update_times"]
    rows = [
        [f"{each['algorithm']}, {each['form']}", str(each["rows"]), each["precision"], digits(each["microseconds"])]
        for each in times
    ]
    parts.append(table(["measured", "rows", "precision", "µs"], rows) if rows else f"Measured times: {OPEN}.")
    return "\n\n".join([*parts, *(described(each) for each in (measured, run) if each is not None)])


def windows(run: Run) -> str:
    """docs/windows.md: bytes and calls beside other libraries.

    A ratio is to the calls of ours that alternated with those of the other.
    """
    found, tables = run.data["windows"], []
    for name, entry in neighbours.WORKLOADS.items():
        parts = [ways for part, ways in found["parts"].items() if part.startswith(f"{name} ")]
        rows = []
        for who, each, ours in [(who, each, ways[OURS]) for ways in parts for who, each in ways.items()]:
            if who == OURS and rows:
                continue
            took = [against(None if who == OURS else ours["calls"][n], each["calls"][n]) for n in each["calls"]]
            probe = min(each["probes"].values(), key=lambda said: said["agreed"])
            title = steady_title("gpubuf, windows" if who == OURS else who, probe, run)
            rows.append([title, digits(each["bytes"] / 1e9), *took])
        head = [entry.title, "GB per million rows", *(f"median µs, {n}" for n in entry.batches)]
        tables += [table(head, rows)] if rows else []
    return "\n\n".join([*tables, f"{found['rows']:,} rows were written."])


WRITERS = {
    "gpubuf": "gpubuf, a client per writer",
    "queue": "`torch.multiprocessing.Queue` of TensorDicts",
    "memmap": "TorchRL, shared `LazyMemmapStorage`",
}


def writers(run: Run) -> str:
    """docs/writers.md: rows per second of writers, and what they cost the learner."""
    rows, ours = [], 0.0
    for each in (rate for rate in run.data["writers"]["rates"] if rate["contender"] in WRITERS):
        ours = each["rows/s"] if each["contender"] == OURS else ours
        faster = "" if each["contender"] == OURS else f" ({each['rows/s'] / ours:.2f}x)"
        alone, beside = each["updates"]
        row = [WRITERS[each["contender"]], f"{each['row bytes']}", f"{each['writers']}"]
        row += [f"{each['rows/s']:,.0f}{faster}", digits(each["learner us/row"]), f"{alone:.0f}"]
        rows.append([*row, f"{beside:.0f} ({beside / alone - 1:+.0%})", f"{each['paced rows/s']:.0f}"])
    head = ["", "bytes of a row", "writers", "rows/s", "µs of the learner per row", "updates/s", "while writers write"]
    return table([*head, "rows/s then"], rows)


GROUPS = {"replay": WORKLOADS, "sac": SAC, "slices": SLICES}
FIGURES: dict[str, Callable[[Runs], str]] = {
    **{
        f"{name}{end}": of_run(functools.partial(comparison, workloads=list(group)), kind)
        for name, group in GROUPS.items()
        for kind, end in (("cpu", ""), ("cuda", "_gpu"))
    },
    "headlines": headlines,
    "in_turn": of_run(in_turn, "in_turn"),
    "sb3_loop": of_run(sb3_loop, "sb3_loop"),
    "losses": of_run(contenders, "losses"),
    "training": of_run(pendulum, "learning"),
    "training_gpu": of_run(pendulum, "learning on cuda"),
    "alone_gpu": of_run(alone, "alone on cuda"),
    "algorithms": of_run(algorithms, "learning"),
    "speed": of_run(speed, "speed"),
    "rsl_rl": of_run(rsl_rl, "rsl_rl"),
    "launches": launches,
    "updates": updates,
    "writers": of_run(writers, "writers"),
    "windows": of_run(windows, "windows"),
    "windows_gpu": of_run(on_h200, "kernels"),
}

BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)


def pages() -> list[str]:
    """Every page with figures, from the root of the project."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path.relative_to(ROOT).as_posix() for path in found if BLOCK.search(path.read_text())]


def rewritten(page: str, runs: Runs, root: str) -> str:
    """The page with every block of figures as the runs have it; ``root`` is the way to the project's root.

    Raises:
        ValueError: a block asks for figures that nobody knows.
    """

    def block(match: re.Match[str]) -> str:
        if match[2] not in FIGURES:
            raise ValueError(f"figures {match[2]!r} are unknown; there are {sorted(FIGURES)}")
        return f"{match[1]}\n{FIGURES[match[2]](runs).replace('{root}', root)}\n\n{match[3]}"

    return BLOCK.sub(block, page)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; fail where a page is out of date")
    options = parser.parse_args(arguments)
    runs, stale = newest_runs(), []
    for name in pages():
        path = ROOT / name
        old = path.read_text()
        new = rewritten(old, runs, "../" * name.count("/"))
        if new != old:
            stale.append(name)
            if not options.check:
                path.write_text(new)
    for name in outdated(runs):
        stale.append(name)
        if not options.check:
            draw(name, runs)
    print(f"{'out of date' if options.check else 'rewritten'}: {', '.join(stale) or 'none'}")
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
