"""Look at the rows of a saved buffer or of a run.

For what goes wrong in practice: NaN, ends of episodes, rows that don't follow each other, environments mixed up, keys
that never change.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from gpubuf.train.config import UsageError


def run(options: dict[str, Any]) -> int:
    from gpubuf.data.check import check
    from gpubuf.terminal import wrapped

    try:
        print(wrapped(str(check(saved_storage(options["folder"]))), sys.stdout))
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{options['folder']} can't be looked at: {error}") from None
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


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="what buffer.save() wrote, or the folder of a run")
