"""Load a data set from its files into mapped files.

An npz or HDF5 file (D4RL, OGBench, robomimic, Minari), Parquet files or a folder of LeRobot. Says first how much memory
the rows take. A load that was interrupted goes on when the command is given again. Exit codes: 0 done, 1 the disk or
memory is full, 2 the request can't be met.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from gpubuf.commands import whole_number
from gpubuf.terminal import show, wrapped
from gpubuf.train.config import UsageError


def run(options: dict[str, Any]) -> int:
    into, capacity, workers = (options.pop(name) for name in ("into", "capacity", "workers"))
    source, just_plan, keys = (options.pop(name) for name in ("source", "plan", "keys"))

    from gpubuf.data.loading.load import load_dataset, open_dataset

    try:
        recording = open_dataset(source, keys=keys and keys.split(","), **options)
        made = recording.plan(capacity, in_files=not just_plan)
        show(made.key_table())
        if just_plan:
            show(made.fit_table())
            print(wrapped(made.summary, sys.stdout))
            return 0 if made.auto else 1
        load_dataset(recording, folder=into, capacity=capacity, workers=workers)
    except (FileNotFoundError, ImportError, KeyError, ValueError) as error:
        raise UsageError(str(error.args[0] if isinstance(error, KeyError) else error)) from error
    text = f"{recording.rows:,} transitions of {recording.trajectories:,} trajectories are in {into}."
    print(wrapped(f'{text}\n  LazyMemmapStorage.open("{into}") opens them.', sys.stdout))
    return 0


def add(parser: argparse.ArgumentParser) -> None:
    source = "a file, or a folder of Minari, Parquet files or LeRobot"
    parser.add_argument("source", type=Path, metavar="SOURCE", help=source)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--into", type=Path, metavar="FOLDER", help="the folder of the mapped files")
    where.add_argument("--plan", action="store_true", help="only say how much memory the rows take, and where they fit")
    keys = "names in the files, with commas (default: observations, actions, rewards)"
    parser.add_argument("--keys", metavar="A,B,...", help=keys)
    parser.add_argument("--no-next", dest="next_observations", action="store_false", help="leave out next observations")
    last = "keep last rows whose next observation was not recorded (default: the trajectory ends one row before)"
    parser.add_argument("--keep-last", action="store_true", help=last)
    parser.add_argument("--filter-key", metavar="NAME", help="of robomimic: load the episodes that this mask names")
    size = "room for so many transitions (default: those of the data set)"
    parser.add_argument("--capacity", type=whole_number, metavar="N", help=size)
    parser.add_argument("--workers", type=whole_number, metavar="N", help="threads that read and decode")
