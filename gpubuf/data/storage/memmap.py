"""A storage in memory-mapped files. It may be larger than memory, and is there again after a restart."""

from __future__ import annotations

import contextlib
import functools
import math
import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import Tensor

from gpubuf import system
from gpubuf.data.arguments import Missing, warn, warn_of_no_effect
from gpubuf.data.storage import memmap_files as files
from gpubuf.data.storage.allocation import Allocation
from gpubuf.data.storage.column import Column, Columns
from gpubuf.data.storage.containers import Data, batch_shape
from gpubuf.data.storage.layout import RowLayout
from gpubuf.data.storage.lazy import LazyTensorStorage
from gpubuf.data.storage.memmap_files import COUNTER_WORDS, COUNTERS_FILE, GPUBUF_FILE, Counters
from gpubuf.data.storage.placement import Placement
from gpubuf.data.storage.plan import NOT_INITIALIZED
from gpubuf.data.storage.ring import Ring
from gpubuf.data.storage.rows import Rows
from gpubuf.data.storage.schema import Schema
from gpubuf.data.storage.tree_layout import saved_tree, with_tree
from gpubuf.kernels import rows

FORMAT = "gpubuf-memmap"
VERSION = 2

LARGE_ROW = 256
"""Bytes of a key from which on its rows are requested: of smaller ones sixteen and more share a page of the system."""

PATIENCE = 100
"""Batches whose pages are requested after one that had to wait for the disk."""

_ON_CPU = Placement("cpu", torch.device("cpu"))
_UNMAPPED = cast("Counters", Missing(NOT_INITIALIZED))


class MappedFiles(Allocation):
    """The files of a storage in a folder.

    Args:
        max_size, ndim: as for :class:`Allocation`.
        folder: where they are, or are to be; None: in a temporary folder.
        existsok: replace files of a storage of TorchRL's, or of a mapped TensorDict.
        auto_cleanup: remove them when this is dropped or the process exits.

    Attributes:
        folder: as given; None: it is made with the files.
        mapped: the mapped counters. Without files every attribute of it raises a RuntimeError.
    """

    relocatable = False

    def __init__(self, max_size: int, ndim: int, folder: Path | None, existsok: bool, auto_cleanup: bool) -> None:
        system.need_posix("memory-mapped rows")
        super().__init__(max_size, "cpu", ndim)
        self.folder, self._existsok, self._auto_cleanup = folder, existsok, auto_cleanup
        self.mapped = _UNMAPPED
        # All files, those that are deepest first.
        self._own: list[Path] = []
        self._hold: int | None = None  # of a temporary folder
        self._finalizer: weakref.finalize[Any, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy keeps its rows in files of its own, in a new temporary folder."""
        own: dict[str, Any] = {"folder": None, "_auto_cleanup": True, "mapped": _UNMAPPED, "_own": [], "_hold": None}
        return {**vars(self), **own, "_finalizer": None}

    @property
    def path(self) -> Path:
        """The folder, which is there."""
        assert self.folder is not None
        return self.folder

    def reopen(self) -> Rows:
        """The rows in the files, and how many there are.

        Raises:
            ValueError: they are damaged, or those of another storage.
        """
        folder, content = self.path, _manifest(self.path)
        for name, own in (("ndim", self.ndim), ("max_size", self.max_size)):
            if content.get(name) != own:
                raise ValueError(f"the storage in {folder} has {name}={content.get(name)}, asked for is {name}={own}")
        data, _ = files.read_rows(folder, writable=True)
        shape = batch_shape(data, self.ndim)
        if math.prod(shape) < self.max_size:
            raise ValueError(f"the storage in {folder} has shape {shape}, which is less than its {self.max_size} rows")
        ignored = content.get("ignored")
        if not isinstance(ignored, list):
            raise ValueError(f"{folder / GPUBUF_FILE}: 'ignored' must be a list of keys, not {ignored!r}")
        layout = with_tree(RowLayout(data, self.ndim, frozenset(map(str, ignored))), content.get("tree"))
        self.mapped = Counters(folder / COUNTERS_FILE)
        tensors = layout.collect(data, self.ndim)
        self.mapped.recover([tensor.flatten(0, self.ndim - 1) for tensor in tensors], math.prod(shape))
        written, size = int(self.mapped.ring[rows.WRITTEN]), int(self.mapped.ring[rows.SIZE])
        if not 0 <= size <= min(written, math.prod(shape)):
            raise ValueError(f"{folder / COUNTERS_FILE} is damaged: {size} rows of {written} written, room for {shape}")
        self._keep(layout)
        columns = Columns.separate(map(Column, tensors), layout.leaves)
        found = self.rows_in(columns, self.schema_like(layout), shape, _ON_CPU)
        found.ring.set_counters(written, size)
        return found

    def memory(self, schema: Schema, shape: tuple[int, ...], placement: Placement) -> Columns:
        """New files.

        Raises:
            NotImplementedError: rows hold other things than tensors.
            RuntimeError: there are files already that are not those of a storage.
        """
        layout = schema.stored
        if schema.written.host:
            raise NotImplementedError(
                f"{list(schema.written.host)} are not tensors, and files hold tensors only: use a LazyTensorStorage"
            )
        files.check_names(layout)
        if self.folder is None:
            if self._auto_cleanup:
                self.folder, self._hold = files.new_folder()
            else:
                self.folder = Path(tempfile.mkdtemp(prefix=files.TEMPORARY))
        folder = self.folder
        folder.mkdir(parents=True, exist_ok=True)
        _warn_of_full_disk(folder, math.prod(shape) * layout.row_bytes)
        created: list[Path] = []
        # Without the file that is written last: by a process that was killed while it made a storage.
        is_rest = self._existsok and (folder / COUNTERS_FILE).exists()
        if is_rest:
            (folder / files.MARKS_FILE).unlink(missing_ok=True)
        create = functools.partial(self._create, is_rest, created)
        try:
            create(folder / COUNTERS_FILE, torch.int64, (COUNTER_WORDS,))
            self.mapped = Counters(folder / COUNTERS_FILE)
            columns = [
                Column(create(files.tensor_file(folder, leaf.key), leaf.dtype, (*shape, *leaf.shape)))
                for leaf in layout.leaves
            ]
            files.write_metadata(folder, layout, shape, 0)
            # Last, because it makes the folder a storage.
            files.write_json(
                folder / GPUBUF_FILE,
                {
                    "format": FORMAT,
                    "version": VERSION,
                    "max_size": self.max_size,
                    "ndim": self.ndim,
                    "ignored": sorted(layout.ignored),
                    **saved_tree(schema.written),
                },
            )
        except BaseException:
            for path in created:
                path.unlink(missing_ok=True)
            raise
        self._keep(layout)
        return Columns.separate(columns, layout.leaves)

    def _create(
        self, is_rest: bool, created: list[Path], path: Path, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> Tensor:
        files.refuse_links(path.parent, self.path)
        if is_rest or (self._existsok and (path.parent / files.META_FILE).exists()):
            # Of a storage of TorchRL's, or of a TensorDict. Files of anybody else stay.
            path.unlink(missing_ok=True)
        try:
            tensor = files.create_file(path, dtype, shape, self.path)
        except FileExistsError:
            raise RuntimeError(
                f"{path} exists, but is not part of a storage of gpubuf: choose another scratch_dir"
            ) from None
        created.append(path)
        return tensor

    def marks(self, capacity: int, device: torch.device) -> Tensor:
        """Mapped, like the rows: those that are there already, if the folder has some."""
        path = self.path / files.MARKS_FILE
        if path.exists() and path.stat().st_size:
            return files.map_file(path, torch.uint8, (capacity,), writable=True)
        # Of who was interrupted, or killed, before it had a size.
        path.unlink(missing_ok=True)
        return files.create_file(path, torch.uint8, (capacity,), self.path)

    def ring(self, capacity: int, device: torch.device) -> Ring:
        ring = super().ring(capacity, device)
        # The kernels advance the counters in the file.
        ring.counters = self.mapped.ring
        return ring

    def _keep(self, layout: RowLayout) -> None:
        """The files for rows of a layout are there, for as long as they are to be."""
        folder = self.path
        tensors = [files.tensor_file(folder, leaf.key) for leaf in layout.leaves]
        levels = {parent for path in tensors for parent in path.parents if parent.is_relative_to(folder)} | {folder}
        metadata = [level / files.META_FILE for level in levels]
        own = [folder / name for name in (files.STORAGE_FILE, GPUBUF_FILE, COUNTERS_FILE, files.MARKS_FILE)]
        if self._hold is not None:
            own.append(folder / files.LOCK_FILE)
        self._own = sorted(tensors + metadata + own, key=lambda path: -len(path.parts))
        if self._auto_cleanup:
            self._finalizer = weakref.finalize(self, _remove, folder, self._own, os.getpid(), self._hold)

    def replacing(self) -> contextlib.AbstractContextManager[Any]:
        """Around what replaces all rows: see :meth:`~.memmap_files.Counters.replacing`."""
        return self.mapped.replacing() if self._own else contextlib.nullcontext()

    def remove(self) -> bool:
        """Remove the files now. Returns whether there were any."""
        found = any(path.exists() for path in self._own)
        if self._own:
            _remove(self.path, self._own, os.getpid(), self._hold)
            self._hold = None
        if self._finalizer is not None:
            self._finalizer.detach()
        return found


class LazyMemmapStorage(LazyTensorStorage):
    """A storage with one memory-mapped file per key, allocated at the first write.

    The operating system keeps in memory what is in use, and the rest on disk. Everything works as on any other storage
    on the CPU, with the same kernels on the mapped memory, and a batch is a copy in memory like any other. The files
    are sparse: they take space as rows are written.

    The ring's counters are mapped too, so that the rows are all there again when a process was killed, without
    :meth:`flush`; only a crash of the machine can lose what was not flushed. Of the write in whose middle it was killed
    no row is left: neither those that it wrote nor those that it replaced. Rows that were being overwritten by index
    stay, and a warning names them. If a state was being loaded, the storage is empty. Samplers rebuild what they know
    from the rows: every row then counts as new to a prioritized one.

    The folder is laid out as TorchRL's ``storage/`` and can be read by ``TensorDict.load_memmap``. Only one process at
    a time may write to it.

    Args:
        max_size: capacity in transitions. With ``ndim > 1`` it is rounded up to whole steps of all environments.
        scratch_dir: folder of the files, made where it is missing, or a ``TemporaryDirectory``. Default: a new
            temporary folder.
        device: ``"cpu"``; ``"auto"`` means the same.
        ndim: number of batch dimensions: 1, or 2 for time-first ``[T, E]`` storage.
        dtypes, batch_dtypes: not supported: the files hold what is written, for TorchRL reads them.
        existsok: open the storage that is in ``scratch_dir`` already, if there is one, with the rows it holds. A
            storage of TorchRL's, or a mapped TensorDict, is replaced, as TorchRL does; files of anything else are not.
        compilable: accepted for compatibility; every operation can be compiled.
        shared_init: accepted for compatibility, with one warning: a storage belongs to one process.
        auto_cleanup: remove the files when the storage is dropped or the process exits. Default: for temporary folders
            only. Files left by a killed process are removed by the next process that creates a temporary storage.
            Nothing but the storage's own files is ever removed.
        end_trajectories: have the next write begin a trajectory, after rows that were there: as for
            :meth:`gpubuf.ReplayBuffer.load_state_dict`.

    Raises:
        NotImplementedError: ``dtypes``, ``batch_dtypes`` or ``share_next`` are given.
        ValueError: the device is another, ``max_size`` or ``ndim`` is below 1, or differs from that of the storage in
            ``scratch_dir``.
        RuntimeError: there is a storage in ``scratch_dir``, and ``existsok`` is False.
    """

    allocation: MappedFiles

    def __init__(
        self,
        max_size: int,
        *,
        scratch_dir: str | os.PathLike[str] | tempfile.TemporaryDirectory[str] | None = None,
        device: torch.device | str = "cpu",
        ndim: int = 1,
        dtypes: None = None,
        batch_dtypes: None = None,
        existsok: bool = False,
        compilable: bool = False,
        shared_init: bool = False,
        auto_cleanup: bool | None = None,
        share_next: bool = False,
        end_trajectories: bool = True,
    ) -> None:
        if dtypes or batch_dtypes or share_next:
            raise NotImplementedError(
                "the files of a LazyMemmapStorage hold what is written, for TorchRL reads them: dtypes, batch_dtypes "
                "and share_next are options of LazyTensorStorage"
            )
        if device != "auto" and torch.device(device).type != "cpu":
            raise ValueError(
                f"memory-mapped rows are on the CPU, the device can't be {device}: move batches in a transform, or "
                "choose a LazyTensorStorage"
            )
        warn_of_no_effect(shared_init=shared_init)
        if isinstance(scratch_dir, tempfile.TemporaryDirectory):
            scratch_dir = scratch_dir.name
        folder = None if scratch_dir is None else Path(scratch_dir).absolute()
        self._begin(
            MappedFiles(max_size, ndim, folder, existsok, folder is None if auto_cleanup is None else auto_cleanup)
        )
        self._faults, self._patience = 0, PATIENCE
        self._ends_found = False  # whether the next write begins a trajectory, after rows that were there
        if folder is not None and (folder / GPUBUF_FILE).exists():
            if not existsok:
                raise RuntimeError(
                    f"there is a storage in {folder} already: open it with existsok=True or LazyMemmapStorage.open(), "
                    "or choose another scratch_dir"
                )
            self._reopen()
            self._ends_found = end_trajectories

    @classmethod
    def open(cls, scratch_dir: str | os.PathLike[str], *, end_trajectories: bool = True) -> Self:
        """The storage in a folder, with its rows, shape and counters. Copies nothing, and reads nothing before use.

        Rows that were tensorclasses come back as TensorDicts. ``end_trajectories`` is as in the constructor.

        Raises:
            ValueError: there is no storage, or it is damaged, or was written by a newer version.
        """
        folder = Path(scratch_dir)
        content = _manifest(folder)
        path = folder / GPUBUF_FILE
        max_size, ndim = (files.read_count(content, name, path) for name in ("max_size", "ndim"))
        return cls(max_size, scratch_dir=folder, ndim=ndim, existsok=True, end_trajectories=end_trajectories)

    def _reopen(self) -> None:
        self._adopt(self.allocation.reopen())
        if (self.allocation.path / files.MARKS_FILE).exists():
            self.keep_marks()
        self.followers.rebuild()

    @property
    def scratch_dir(self) -> Path | None:
        """The folder of the files; None: it is made at the first write."""
        return self.allocation.folder

    # Pages

    @property
    def has_large_rows(self) -> bool:
        """Whether :meth:`request` has anything to do."""
        return self.initialized and any(leaf.row_bytes >= LARGE_ROW for leaf in self.layout.leaves)

    def request(self, index: Tensor) -> None:
        """Ask the system to read the pages of large rows, so that they are in memory when the rows are used.

        Waits for nothing. A call of the system, 1 to 2 µs, per row and key of at least :data:`LARGE_ROW` bytes; none
        where the process has not waited for a page of any file during the last :data:`PATIENCE` calls.

        Args:
            index: int64 ``[n]``, flat positions on the CPU.
        """
        faults = system.slow_page_faults()
        if faults != self._faults:
            self._faults, self._patience = faults, PATIENCE
        if self._patience == 0:
            return
        self._patience -= 1
        for leaf, (address, *_, stride) in zip(self.layout.leaves, self.rows.table.tolist(), strict=True):
            if leaf.row_bytes >= LARGE_ROW:
                for start in (address + index * stride).tolist():
                    page = start // mmap.PAGESIZE * mmap.PAGESIZE
                    system.read_ahead(page, start + leaf.row_bytes - page)

    # What can be killed

    def _write_at_cursor(
        self, launch: Callable[[], Tensor | None], n: int, count: Callable[[int], None]
    ) -> Tensor | None:
        if self._ends_found:
            self.end_if_asked()
            self._ends_found = False
        with self.allocation.mapped.appending(n):
            return super()._write_at_cursor(launch, n, count)

    def write(self, index: Tensor, data: Data) -> None:
        with self.allocation.mapped.overwriting(index):
            super().write(index, data)

    def update(self, index: Tensor, keys: Sequence[int], sources: list[Tensor], generation: Tensor) -> None:
        with self.allocation.mapped.overwriting(index):
            super().update(index, keys, sources, generation)

    def empty(self, recount: bool = False) -> None:
        with self.allocation.replacing():
            super().empty(recount)

    def load_state_dict(self, state: dict[str, Any]) -> Tensor | None:
        self._ends_found = False
        with self.allocation.replacing():
            return super().load_state_dict(state)

    def flush(self) -> None:
        """Wait until everything written is on the disk, so that it survives a crash of the machine too.

        Rows first, then the counters. Don't write meanwhile.
        """
        if not self.initialized:
            return
        folder = self.allocation.path
        for leaf in self.layout.leaves:
            files.sync_file(files.tensor_file(folder, leaf.key), folder)
        files.sync_file(folder / COUNTERS_FILE)
        if self.marks.kept:
            files.sync_file(folder / files.MARKS_FILE)
        files.write_metadata(folder, self.layout, tuple(self.shape), len(self))

    def cleanup(self) -> bool:
        """Remove the files now. The rows can be used until the storage is dropped. Returns whether there were files."""
        return self.allocation.remove()


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / GPUBUF_FILE
    if not path.exists():
        hint = "; load_torchrl() reads what TorchRL has saved" if (folder / files.STORAGE_FILE).exists() else ""
        raise ValueError(f"there is no storage in {folder}: {GPUBUF_FILE} is missing{hint}")
    content = files.read_json(path)
    if content.get("format") != FORMAT:
        raise ValueError(f"{path} is not that of a memory-mapped storage of gpubuf")
    if content.get("version") != VERSION:
        raise ValueError(f"{path} has version {content.get('version')!r}, this reads version {VERSION}")
    return content


def _warn_of_full_disk(folder: Path, n_bytes: int) -> None:
    """Warn if the files can outgrow the disk: the system kills a process that fills it through a mapping."""
    free = shutil.disk_usage(folder).free
    if n_bytes > free:
        warn(
            f"the storage takes {n_bytes / 1e9:.1f} GB when it is full, {folder} has {free / 1e9:.1f} GB free: a "
            "process that runs out of disk while it writes to mapped memory is killed",
        )


def _remove(folder: Path, paths: list[Path], owner: int, hold: int | None) -> None:
    """Remove files, and the folders that are empty then. A forked child leaves its parent's files alone."""
    if os.getpid() == owner:
        for path in paths:
            # What lies behind a link is somebody else's.
            with contextlib.suppress(ValueError):
                files.refuse_links(path.parent, folder)
                path.unlink(missing_ok=True)
        for level in sorted({path.parent for path in paths} | {folder}, key=lambda path: -len(path.parts)):
            # Not empty: somebody else's files are there, too.
            with contextlib.suppress(OSError):
                level.rmdir()
    if hold is not None:
        os.close(hold)
