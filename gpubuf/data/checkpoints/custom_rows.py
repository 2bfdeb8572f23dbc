"""Rows saved by a custom checkpointer, or changed by hooks, in a subfolder.

They lie in a folder of their own inside the checkpoint, ``storage-<id>``. The state names it, so that a save that is
killed leaves the rows of the previous checkpoint where they are. The link ``storage`` leads to the newest one, for
programs that look for them under TorchRL's name.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpubuf.data.checkpoints.files import Manifest, RowFiles, need
from gpubuf.data.storage.layout import batch_shape
from gpubuf.data.storage.storage import TensorStorage, rows_state

#: Where the state says it.
KEY = "_rows_apart"
_NAME = re.compile(r"storage-[0-9a-f]{16}")
_LINK = "storage"


def save(folder: Path, save_id: str, storage: TensorStorage, state: dict[str, Any]) -> None:
    """Write the rows of a storage by its checkpointer, and take them out of ``state``. Synchronises.

    Raises what the checkpointer and the hooks raise.
    """
    own = state["_storage"]
    custom = storage.custom_rows
    if custom is None or not own["initialized"]:
        return
    name = f"{_LINK}-{save_id}"
    try:
        custom.save(folder / name)
    except BaseException:
        shutil.rmtree(folder / name, ignore_errors=True)
        raise
    rest = {key: value for key, value in own.items() if key != "rows"}
    state[KEY] = {**rest, "folder": name, "by": custom.name}
    state["_storage"] = {"initialized": False, "max_size": storage.max_size}


def settle(folder: Path, state: dict[str, Any]) -> None:
    """The manifest names this save now: let the link lead to its rows, and remove those of others."""
    current = state[KEY]["folder"] if KEY in state else None
    for entry in folder.iterdir():
        if _NAME.fullmatch(entry.name) and entry.name != current and entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
    link = folder / _LINK
    if current is None:
        if link.is_symlink():
            link.unlink()
    elif link.is_symlink() or not link.exists():
        # Not every file system has links, and nothing here needs it.
        with contextlib.suppress(OSError):
            temporary = folder / f"{current}.link"
            temporary.symlink_to(current)
            os.replace(temporary, link)


def load(folder: Path, manifest: Manifest, storage: TensorStorage, state: dict[str, Any]) -> Manifest:
    """Read the rows that :func:`save` has written, if there are any, into ``state``.

    Returns:
        The manifest as it would be with these rows in files of the checkpoint.

    Raises:
        ValueError: there is another checkpointer now, or what it reads are not the rows that were saved.
    """
    saved = state.pop(KEY, None)
    if saved is None:
        return manifest
    need(
        isinstance(saved, dict) and _NAME.fullmatch(str(saved.get("folder"))) is not None,
        "the checkpoint names no valid row folder",
    )
    path, custom = folder / saved["folder"], storage.custom_rows
    need(not path.is_symlink(), f"{path} is a link: links are refused")
    if custom is None or saved["by"] != custom.name:
        own_name = "its own" if custom is None else f"a {custom.name}"
        raise ValueError(f"the rows were saved by a {saved['by']}: give the buffer that checkpointer, not {own_name}")
    rows, size = custom.load(path, tuple(saved["shape"]))
    shape = batch_shape(rows, storage.ndim)
    need(
        (list(shape), size) == (saved["shape"], saved["size"]),
        f"{path} holds {size} rows of a storage of shape {list(shape)}, not {saved['size']} of {saved['shape']}",
    )
    own = rows_state(rows, storage.ndim, size)
    state["_storage"] = {**{key: value for key, value in saved.items() if key not in ("folder", "by")}, **own}
    state["_storage"]["written"] = saved["written"]
    form = RowFiles((), (), tuple(batch_shape(own["rows"], storage.ndim)), ())
    return replace(manifest, rows=form)
