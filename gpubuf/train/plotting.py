"""The learning curve as a PNG. Matplotlib is imported when a curve is drawn, and needs no display."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

CURVE_FILE = "learning_curve.png"
_WINDOW = 10


def draw_curve(records: Iterable[dict[str, Any]], title: str, path: Path) -> None:
    """Draw the returns in ``records`` (see docs/training.md) over the steps, and write them to ``path``.

    Episodes of the training have random actions; a record may be the mean of many that ended together. Evaluations are
    deterministic.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    episodes: list[tuple[int, float]] = []
    evaluations: list[tuple[int, list[float]]] = []
    final: tuple[int, float] | None = None
    for record in records:
        if record["kind"] == "episode":
            episodes.append((record["step"], record["return"]))
        elif record["kind"] == "episodes":
            episodes.append((record["step"], record["mean_return"]))
        elif record["kind"] == "evaluation":
            evaluations.append((record["step"], record["returns"]))
        elif record["kind"] == "final_evaluation":
            final = record["step"], record["mean_return"]

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if episodes:
        steps = [step for step, _ in episodes]
        returns = [value for _, value in episodes]
        axes.plot(steps, returns, color="tab:blue", alpha=0.3, linewidth=0.8, label="training episodes")
        axes.plot(steps, _moving_mean(returns), color="tab:blue", label=f"mean of the last {_WINDOW}")
    if evaluations:
        steps = [step for step, _ in evaluations]
        axes.fill_between(
            steps,
            [min(returns) for _, returns in evaluations],
            [max(returns) for _, returns in evaluations],
            color="tab:orange",
            alpha=0.2,
            linewidth=0,
        )
        means = [sum(returns) / len(returns) for _, returns in evaluations]
        axes.plot(steps, means, color="tab:orange", marker=".", label="evaluation: mean and range")
    if final is not None:
        axes.plot(*final, color="tab:red", marker="*", linestyle="", label=f"final evaluation: {final[1]:.1f}")
    axes.set_title(title)
    axes.set_xlabel("environment steps")
    axes.set_ylabel("return of an episode")
    axes.grid(alpha=0.3)
    if episodes or evaluations or final:
        axes.legend(loc="best")
    figure.savefig(path, dpi=120)


def _moving_mean(values: list[float]) -> list[float]:
    windows = (values[max(0, end - _WINDOW) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]
