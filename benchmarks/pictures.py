"""Draws committed results: the pictures of README.md and of docs/. ``python -m benchmarks.report`` calls it.

A picture holds what it shows, as JSON in its metadata: so a test can tell that it is that of the newest results.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from benchmarks.measure.elsewhere import ROOT
from benchmarks.measure.results import Runs, by_curve
from benchmarks.workloads.registry import REGISTRY, TITLES
from benchmarks.workloads.replay import WORKLOADS
from gpubuf.train.metrics import draw_bands

#: Curves of the runs on MuJoCo's environments, and what they are called in a picture.
CURVES = {
    "fastsac": "gpubuf, --algo fastsac",
    "sac, uniform": "gpubuf, --algo sac",
    "Stable-Baselines3": "Stable-Baselines3, SAC",
}
#: The key of the metadata.
SHOWN = "Shown"
OURS = "gpubuf"


def learning(runs: Runs) -> Any:
    """By environment and label the curves of every seed: (step, mean return)."""
    found: dict[str, dict[str, Any]] = {}
    for (env, curve), ones in by_curve(runs["learning"]).items() if "learning" in runs else ():
        if curve in CURVES and all(one["points"] for one in ones):
            found.setdefault(env, {})[CURVES[curve]] = [one["points"] for one in ones]
    return {
        env: {label: curves[label] for label in CURVES.values() if label in curves} for env, curves in found.items()
    }


def rsl_rl(runs: Runs) -> Any:
    """By algorithm the curves of every seed in rsl_rl's runner: (transitions, seconds of a core, mean return)."""
    found: dict[str, list[Any]] = {}
    for one in runs["rsl_rl"].data["rsl_rl"] if "rsl_rl" in runs else ():
        found.setdefault(one["algorithm"], []).append(one["points"])
    return found


def draw_rsl_rl(figure: Any, found: Any) -> None:
    by_steps, by_seconds = figure.subplots(1, 2, sharey=True)
    for column, axes in enumerate((by_steps, by_seconds)):
        for number, (name, curves) in enumerate(found.items()):
            for seed, points in enumerate(curves):
                # Untrained policies are left out: a logarithm has no 0.
                x = [point[column] for point in points[1:]]
                label = name if seed == 0 else None
                axes.plot(x, [point[2] for point in points[1:]], label=label, color=f"C{number}")
        axes.grid(alpha=0.3)
    by_steps.set(xscale="log", xlabel="transitions", ylabel="return")
    by_seconds.set(xlabel="seconds of a core")
    figure.legend(*by_steps.get_legend_handles_labels(), loc="outside upper center", ncols=max(len(found), 1))


def draw_learning(figure: Any, found: Any) -> None:
    all_axes = figure.subplots(1, len(found), squeeze=False)[0]
    for axes, (env, curves) in zip(all_axes, found.items(), strict=True):
        draw_bands(axes, curves)
        axes.set(title=env, xlabel="environment steps", ylabel="return")
        axes.grid(alpha=0.3)


def in_turn(runs: Runs) -> Any:
    """By workload and peer how many times as long as ours its call takes, on a CPU, where the two alternate."""
    found: dict[str, dict[str, float]] = {}
    for peer, part in runs["in_turn"].in_turn.items() if "in_turn" in runs else ():
        for name, took in part.items():
            if peer in took and not peer.startswith(OURS):
                found.setdefault(REGISTRY[name].title, {})[TITLES[peer]] = round(took[peer] / took[OURS], 2)
    return found


def over_and_over(runs: Runs) -> Any:
    """The same of one call over and over, on a GPU."""
    found: dict[str, dict[str, float]] = {}
    for name in (name for name in WORKLOADS if "cuda" in runs and name in runs["cuda"].workloads):
        took = {who: runs["cuda"].median(name, who) for who in TITLES}
        ours, peers = took[OURS], {who: each for who, each in took.items() if each and not who.startswith(OURS)}
        if ours and peers:
            found[REGISTRY[name].title] = {TITLES[who]: round(each / ours, 2) for who, each in peers.items()}
    return found


def draw_ratios(figure: Any, found: Any) -> None:
    axes, peers = figure.subplots(), list(dict.fromkeys(peer for row in found.values() for peer in row))
    for number, peer in enumerate(peers):
        height = 0.8 / len(peers)
        rows = [(place + height * number, row[peer]) for place, row in enumerate(found.values()) if peer in row]
        places, times = zip(*rows, strict=True)
        bars = axes.barh(places, [each - 1 for each in times], height, left=1, label=peer, align="edge")
        axes.bar_label(bars, [f"{each:.1f}x" for each in times], padding=3, fontsize=8)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set(xscale="log", xlabel="how many times as long as gpubuf a call takes")
    axes.xaxis.set_major_formatter("{x:g}x")
    axes.set_yticks([place + 0.4 for place in range(len(found))], found)
    axes.set_xlim(right=axes.get_xlim()[1] * 1.5)
    axes.invert_yaxis()
    figure.legend(loc="outside upper right", ncols=len(peers))


PICTURES: dict[str, tuple[Callable[[Runs], Any], Callable[[Any, Any], None]]] = {
    "docs/learning.png": (learning, draw_learning),
    "docs/integrations/rsl_rl.png": (rsl_rl, draw_rsl_rl),
    "docs/performance.png": (in_turn, draw_ratios),
    "docs/performance-gpu.png": (over_and_over, draw_ratios),
}


def drawn(picture: str) -> Any:
    """What a picture shows; None if there is none."""
    from PIL import Image

    if not (ROOT / picture).exists():
        return None
    with Image.open(ROOT / picture) as image:
        return json.loads(image.info.get(SHOWN, "null"))


def outdated(runs: Runs) -> list[str]:
    """The pictures that show something else than the newest runs have."""
    return [name for name, (found, _) in PICTURES.items() if drawn(name) != json.loads(json.dumps(found(runs)))]


def draw(picture: str, runs: Runs) -> None:
    from matplotlib.figure import Figure

    find, show = PICTURES[picture]
    found = find(runs)
    figure = Figure(figsize=(8, 1 + 0.36 * len(found) if show is draw_ratios else 4), layout="constrained")
    show(figure, found)
    figure.savefig(ROOT / picture, dpi=110, metadata={SHOWN: json.dumps(found)})
