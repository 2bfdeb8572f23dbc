"""Saving buffers: everything is written to one new file, which then takes the place of the earlier one."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from gpubuf import system
from gpubuf.data.checkpoints import files
from gpubuf.data.operation import Operation
from gpubuf.data.parts import Assembled


class Checkpointed(Assembled, Protocol):
    """A buffer. Its state is made and taken by its own methods, for a subclass may add to it."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that it needs to go on with the same batches."""

    def load_state_dict(self, state: dict[str, Any], *, end_trajectories: bool = True) -> None:
        """Restore that: see :func:`gpubuf.data.checkpoints.restore.load_state_dict`."""


def save(buffer: Checkpointed, path: str | os.PathLike[str], **options: Any) -> int:
    """Save everything that a buffer needs to go on with the same batches.

    The checkpoint at ``path`` is replaced in one step, when the new one is on the disk: a save that is killed leaves
    the previous one whole. Other threads that use the buffer wait while its contents are copied. Above 256 MiB nothing
    is copied, and they wait until all of it is on the disk.

    Args:
        buffer: the buffer.
        path: a folder, created where it doesn't exist. Other files in it are left alone.
        **options: ``progress``: show a bar (needs ``rich``); default: on a terminal, for 1 GiB and more.

    Returns:
        The bytes written.

    Raises:
        TypeError: something in the state is neither a tensor nor a plain value; the text names it.
        ValueError: the folder holds a ``manifest.json`` of another program, or a checkpoint of several buffers.
        OSError: the file can't be written. In all of these cases the previous checkpoint is whole. Synchronises.
    """
    return save_state(path, files.BUFFER, [buffer.operation], lambda: state_of(buffer), **options)


def state_of(buffer: Checkpointed) -> dict[str, Any]:
    """The state of a buffer as it is saved, within an operation."""
    buffer.parts.settle()
    return buffer.state_dict()


def save_state(
    path: str | os.PathLike[str],
    of: str,
    operations: list[Operation],
    state_now: Callable[[], dict[str, Any]],
    *,
    progress: bool | None = None,
    **gone: Any,
) -> int:
    """Save what ``state_now`` gives, as of one moment. See :func:`save`.

    Args:
        path: the folder.
        of: what it is the state of; see :class:`~.files.Manifest`.
        operations: of all buffers in it.
        state_now: gives the state; called within one operation of all of them.
        progress: as for :func:`save`.

    Raises as :func:`save`.
    """
    if gone:
        raise TypeError(f"save() takes no {', '.join(gone)}: each save writes everything, to one file")
    folder, save_id = Path(path), secrets.token_hex(8)
    folder.mkdir(parents=True, exist_ok=True)
    with system.locked(folder, exclusive=True):
        files.check_replaceable(folder, of)
        file = files.write(folder, save_id, operations, state_now, progress)
        files.commit(folder, files.Manifest(of, (file,)))
    return file.size
