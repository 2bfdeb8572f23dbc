"""``gpubuf inspect``: looks at the rows of a saved buffer, or of the buffer of a run."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from gpubuf.commands import PLOTS, check_ending
from gpubuf.train.config import UsageError


def run(options: dict[str, Any]) -> int:
    plot: Path | None = options["plot"]
    check_ending("--plot", plot, PLOTS)
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise UsageError('--plot needs matplotlib: pip install "gpubuf[train]"')

    from gpubuf.data.check import check

    try:
        report = check(saved_storage(options["folder"]))
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{options['folder']} can't be looked at: {error}") from None
    print(report)
    if plot is not None:
        _draw(report, plot)
        print(f"\nepisodes in {plot}")
    return 0


def saved_storage(folder: Path) -> Any:
    """The storage that was saved in ``folder``, by a buffer's ``save`` or by ``gpubuf train``, on the CPU.

    Raises:
        OSError: there is none.
        ValueError: it is damaged, or stores keys in other dtypes than they were written in.
    """
    from gpubuf.data import LazyTensorStorage
    from gpubuf.data.checkpoints import files, restore
    from gpubuf.serialization import load
    from gpubuf.train.run import CHECKPOINT_FILE

    if (folder / CHECKPOINT_FILE).exists():
        state = load(folder / CHECKPOINT_FILE)["trainer"]["buffer"]["_storage"]
    else:
        state = restore.read(folder, files.BUFFER, progress=False)["_storage"]
    if not state["initialized"]:
        raise ValueError("nothing was stored when it was saved")
    storage = LazyTensorStorage(state["max_size"], ndim=len(state["shape"]), share_next="sharing" in state)
    try:
        storage.load_state_dict(state)
    except ValueError as error:
        raise ValueError(
            f"{error}; load it into a buffer like the one that saved it, and print(buffer.check())"
        ) from None
    return storage


def _draw(report: Any, path: Path) -> None:
    """Histograms of the lengths and returns of episodes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    for panel, (name, values) in enumerate((("length", report.lengths), ("return", report.returns)), 1):
        axes = figure.add_subplot(1, 2, panel)
        axes.hist(values.numpy(), bins=40)
        axes.set(xlabel=f"{name} of an episode", ylabel="episodes")
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "inspect",
        help="look at the rows of a saved buffer or of a run",
        description="Look at stored rows for what goes wrong in practice: NaN, ends of episodes, rows that don't "
        "follow each other, environments mixed up, keys that never change.",
        allow_abbrev=False,
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="what buffer.save() wrote, or the folder of a run")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw lengths and returns of episodes, .png, .svg or .pdf"
    )
