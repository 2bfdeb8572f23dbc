"""A storage in memory-mapped files. It may be larger than memory, and is there again after a restart."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import resource
import shutil
import tempfile
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from gpubuf.data.arguments import warn
from gpubuf.data.storage import memmap_files as files
from gpubuf.data.storage.column import Column, Record, separate
from gpubuf.data.storage.containers import Data, batch_shape
from gpubuf.data.storage.layout import RowLayout
from gpubuf.data.storage.lazy import LazyTensorStorage
from gpubuf.data.storage.memmap_files import COUNTER_WORDS, COUNTERS_FILE, GPUBUF_FILE, Counters
from gpubuf.data.storage.placement import Placement
from gpubuf.data.storage.ring import Ring
from gpubuf.data.storage.schema import Schema
from gpubuf.data.storage.tree_layout import saved_tree, with_tree
from gpubuf.kernels import rows

FORMAT = "gpubuf-memmap"
VERSION = 2

LARGE_ROW = 256
"""Bytes of a key from which on its rows are requested: of smaller ones sixteen and more share a page of the system."""

PATIENCE = 100
"""Batches whose pages are requested after one that had to wait for the disk."""

_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)
_WILLNEED = mmap.MADV_WILLNEED


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
        super().__init__(max_size, device="cpu", ndim=ndim, compilable=compilable, shared_init=shared_init)
        if isinstance(scratch_dir, tempfile.TemporaryDirectory):
            scratch_dir = scratch_dir.name
        self.existsok = existsok
        self.auto_cleanup = scratch_dir is None if auto_cleanup is None else auto_cleanup
        self.scratch_dir = None if scratch_dir is None else Path(scratch_dir).absolute()
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._hold: int | None = None  # of a temporary folder
        self._counters: Counters | None = None
        self._faults, self._patience = 0, PATIENCE
        self._is_rest = False  # whether files of ours are in the way
        self._tree: dict[str, Any] = {}  # what the folder says about containers of the rows
        self._ends_found = False  # whether the next write begins a trajectory, after rows that were there
        if self.scratch_dir is not None and (self.scratch_dir / GPUBUF_FILE).exists():
            if not existsok:
                raise RuntimeError(
                    f"there is a storage in {self.scratch_dir} already: open it with existsok=True or "
                    "LazyMemmapStorage.open(), or choose another scratch_dir"
                )
            self._reopen(self.scratch_dir)
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

    def _reopen(self, folder: Path) -> None:
        content = _manifest(folder)
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
        self._counters = counters = Counters(folder / COUNTERS_FILE)
        tensors = layout.collect(data, self.ndim)
        turned = counters.recover([tensor.flatten(0, self.ndim - 1) for tensor in tensors], math.prod(shape))
        written, size = int(counters.ring[rows.WRITTEN]), int(counters.ring[rows.SIZE])
        if not 0 <= size <= min(written, math.prod(shape)):
            raise ValueError(f"{folder / COUNTERS_FILE} is damaged: {size} rows of {written} written, room for {shape}")
        found = separate(list(map(Column, tensors)))
        self._adopt(self.schema_like(layout), found, shape, Placement("cpu", torch.device("cpu")))
        self.ring.set_counters(written, size)
        self.ring.past_lost = turned
        if (folder / files.MARKS_FILE).exists():
            self.keep_marks()
        self.followers.rebuild()

    def establish(self, schema: Schema, shape: tuple[int, ...], data_device: torch.device) -> None:
        if schema.written.host:
            raise NotImplementedError(
                f"{list(schema.written.host)} are not tensors, and files hold tensors only: use a LazyTensorStorage"
            )
        self._tree = saved_tree(schema.written)
        super().establish(schema, shape, data_device)

    def _place(self, data_device: torch.device, schema: Schema, shape: tuple[int, ...]) -> Placement:
        """On the CPU, whatever its memory: the rows are in files."""
        return Placement("cpu", torch.device("cpu"))

    def _allocate(self, layout: RowLayout, shape: tuple[int, ...], placement: Placement) -> list[Record]:
        files.check_names(layout)
        if self.scratch_dir is None:
            if self.auto_cleanup:
                self.scratch_dir, self._hold = files.new_folder()
            else:
                self.scratch_dir = Path(tempfile.mkdtemp(prefix=files.TEMPORARY))
        folder = self.scratch_dir
        folder.mkdir(parents=True, exist_ok=True)
        _warn_of_full_disk(folder, math.prod(shape) * layout.row_bytes)
        created: list[Path] = []
        # Without the file that is written last: by a process that was killed while it made a storage.
        self._is_rest = self.existsok and (folder / COUNTERS_FILE).exists()
        if self._is_rest:
            (folder / files.MARKS_FILE).unlink(missing_ok=True)
        try:
            self._create(folder / COUNTERS_FILE, torch.int64, (COUNTER_WORDS,), created)
            self._counters = Counters(folder / COUNTERS_FILE)
            columns = [
                Column(self._create(files.tensor_file(folder, leaf.key), leaf.dtype, (*shape, *leaf.shape), created))
                for leaf in layout.leaves
            ]
            files.write_metadata(folder, layout, shape, 0)
            # Last, because it makes the folder a storage.
            files.write_json(
                folder / GPUBUF_FILE,
                {
                    "format": FORMAT,
                    "version": VERSION,
                    "max_size": self.requested_size,
                    "ndim": self.ndim,
                    "ignored": sorted(layout.ignored),
                    **self._tree,
                },
            )
        except BaseException:
            for path in created:
                path.unlink(missing_ok=True)
            raise
        return separate(columns)

    def _new_marks(self, device: torch.device) -> Tensor:
        """Mapped, like the rows: those that are there already, if the folder has some."""
        assert self.scratch_dir is not None
        path = self.scratch_dir / files.MARKS_FILE
        if path.exists() and path.stat().st_size:
            return files.map_file(path, torch.uint8, (self.max_size,), writable=True)
        # Of who was interrupted, or killed, before it had a size.
        path.unlink(missing_ok=True)
        return files.create_file(path, torch.uint8, (self.max_size,), self.scratch_dir)

    def _create(self, path: Path, dtype: torch.dtype, shape: tuple[int, ...], created: list[Path]) -> Tensor:
        assert self.scratch_dir is not None
        files.refuse_links(path.parent, self.scratch_dir)
        if self._is_rest or (self.existsok and (path.parent / files.META_FILE).exists()):
            # Of a storage of TorchRL's, or of a TensorDict. Files of anybody else stay.
            path.unlink(missing_ok=True)
        try:
            tensor = files.create_file(path, dtype, shape, self.scratch_dir)
        except FileExistsError:
            raise RuntimeError(
                f"{path} exists, but is not part of a storage of gpubuf: choose another scratch_dir"
            ) from None
        created.append(path)
        return tensor

    def _adopt(self, schema: Schema, found: list[Record], shape: tuple[int, ...], placement: Placement) -> None:
        super()._adopt(schema, found, shape, placement)
        self._remove_with_self()

    def _remove_with_self(self) -> None:
        assert self.scratch_dir is not None
        if self.auto_cleanup:
            self._finalizer = weakref.finalize(
                self, _remove, self.scratch_dir, self._own_files(), os.getpid(), self._hold
            )

    def _new_ring(self, device: torch.device) -> Ring:
        ring = super()._new_ring(device)
        assert self._counters is not None
        # The kernels advance the counters in the file.
        ring.counters = self._counters.ring
        return ring

    def __getstate__(self) -> dict[str, Any]:
        """A copy keeps its rows in files of its own, in a new temporary folder."""
        own = {"scratch_dir": None, "auto_cleanup": True, "_hold": None, "_counters": None, "_finalizer": None}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self._counters is not None:
            self._counters.ring.copy_(self.ring.counters)
            self.ring.counters = self._counters.ring
            self._remove_with_self()

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
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        if faults != self._faults:
            self._faults, self._patience = faults, PATIENCE
        if self._patience == 0:
            return
        self._patience -= 1
        for leaf, (address, *_, stride) in zip(self.layout.leaves, self.rows.table.tolist(), strict=True):
            if leaf.row_bytes >= LARGE_ROW:
                for start in (address + index * stride).tolist():
                    page = start // mmap.PAGESIZE * mmap.PAGESIZE
                    _madvise(page, start + leaf.row_bytes - page, _WILLNEED)

    # What can be killed

    def _noted(self, n: int = 0, index: Tensor | None = None) -> contextlib.AbstractContextManager[Any]:
        """Around a write of ``n`` rows at the cursor, or of rows at ``index``: see :class:`~.memmap_files.Counters`."""
        counters = self._counters
        if counters is None:
            return contextlib.nullcontext()
        return counters.appending(n) if index is None else counters.overwriting(index)

    def _write_at_cursor(
        self, launch: Callable[[], Tensor | None], n: int, count: Callable[[int], None]
    ) -> Tensor | None:
        if self._ends_found:
            self.end_if_asked()
            self._ends_found = False
        with self._noted(n):
            return super()._write_at_cursor(launch, n, count)

    def write(self, index: Tensor, data: Data) -> None:
        with self._noted(index=index):
            super().write(index, data)

    def update(self, index: Tensor, keys: Sequence[int], sources: list[Tensor], generation: Tensor) -> None:
        with self._noted(index=index):
            super().update(index, keys, sources, generation)

    def empty(self, recount: bool = False) -> None:
        with contextlib.nullcontext() if self._counters is None else self._counters.replacing():
            super().empty(recount)

    def load_state_dict(self, state: dict[str, Any]) -> Tensor | None:
        self._ends_found = False
        with contextlib.nullcontext() if self._counters is None else self._counters.replacing():
            return super().load_state_dict(state)

    def _own_files(self) -> list[Path]:
        """All files of the storage, those that are deepest first."""
        folder = self.scratch_dir
        assert folder is not None
        tensors = [files.tensor_file(folder, leaf.key) for leaf in self.layout.leaves]
        levels = {parent for path in tensors for parent in path.parents if parent.is_relative_to(folder)} | {folder}
        metadata = [level / files.META_FILE for level in levels]
        own = [folder / name for name in (files.STORAGE_FILE, GPUBUF_FILE, COUNTERS_FILE, files.MARKS_FILE)]
        if self._hold is not None:
            own.append(folder / files.LOCK_FILE)
        return sorted(tensors + metadata + own, key=lambda path: -len(path.parts))

    def flush(self) -> None:
        """Wait until everything written is on the disk, so that it survives a crash of the machine too.

        Rows first, then the counters. Don't write meanwhile.
        """
        if not self.initialized:
            return
        assert self.scratch_dir is not None
        for leaf in self.layout.leaves:
            files.sync_file(files.tensor_file(self.scratch_dir, leaf.key), self.scratch_dir)
        files.sync_file(self.scratch_dir / COUNTERS_FILE)
        if self.marks.rows is not None:
            files.sync_file(self.scratch_dir / files.MARKS_FILE)
        files.write_metadata(self.scratch_dir, self.layout, tuple(self.shape), len(self))

    def cleanup(self) -> bool:
        """Remove the files now. The rows can be used until the storage is dropped. Returns whether there were files."""
        found = self.initialized and any(path.exists() for path in self._own_files())
        if self.initialized:
            assert self.scratch_dir is not None
            _remove(self.scratch_dir, self._own_files(), os.getpid(), self._hold)
            self._hold = None
        if self._finalizer is not None:
            self._finalizer.detach()
        return found


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
