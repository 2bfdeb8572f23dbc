"""A data set of others, from its files into a buffer."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from gpubuf.data.buffer import ReplayBuffer
from gpubuf.data.loading.recording import Recording, Source
from gpubuf.data.storage.lazy import LazyTensorStorage
from gpubuf.data.storage.memmap import LazyMemmapStorage
from gpubuf.data.storage.memmap_files import GPUBUF_FILE, write_json
from gpubuf.data.storage.placement import NothingFitsError
from gpubuf.data.tensordict_buffers import TensorDictReplayBuffer
from gpubuf.terminal import progress_bar

#: In a folder of mapped rows: what is loaded into it.
SOURCE_FILE = "source.json"


def open_dataset(
    source: str | os.PathLike[str] | Source,
    *,
    keys: Sequence[str] | Mapping[Any, str] | None = None,
    next_observations: bool = True,
    keep_last: bool = False,
    filter_key: str | None = None,
) -> Recording:
    """Look at a data set in files, without reading its rows. No network, no GPU.

    Args:
        source: a path: an ``.npz`` file (a table, or of OGBench), an HDF5 file (D4RL, robomimic, Minari), a folder of
            a Minari data set, a Parquet file or a folder of them, or a folder of a LeRobot data set (v3). Or an object
            that reads another format: a :class:`gpubuf.data.loading.recording.Source`.
        keys: what is loaded: names in the files, or a mapping from keys of rows to them, such as ``{"pixels":
            "observation.images.top"}``. Default: observations, actions and rewards. Ends are always loaded.
        next_observations: load them. Without them an episode's last row is one like the others.
        keep_last: keep the last rows of trajectories whose next observation nobody recorded. They are truncated, and
            their own observation stands for the next one. Default: they are left out, and the rows before them, which
            led to their observations, end the trajectories. A terminated row is always kept, with its own observation
            where there is no other: nothing bootstraps from it.
        filter_key: of robomimic: the episodes that this mask names.

    Rows have ``"observation"`` and ``"action"``, under ``"next"`` the observation, the ``"reward"`` ``[1]``, and
    ``"done"``, ``"terminated"`` and ``"truncated"``, bool ``[1]``. Other names stay, nested where they have dots or
    slashes. Float64 becomes float32, complex128 complex64; text is left out. Frames of videos are uint8 ``[3, H, W]``.

    Raises:
        FileNotFoundError: there is nothing at the path.
        ImportError: what reads the format is missing.
        KeyError: there is no such column.
        ValueError: the format is unknown, nothing says where trajectories end, or two columns are for one key.
    """
    reader = _reader(Path(source), filter_key) if isinstance(source, (str, os.PathLike)) else source
    return Recording.of(reader, keys, next_observations, keep_last)


def _reader(path: Path, filter_key: str | None) -> Source:
    if not path.exists():
        raise FileNotFoundError(f"there is no data set at {path}")
    mains = [path / "main_data.hdf5", path / "data" / "main_data.hdf5"]
    found = next((main for main in mains if main.exists()), path)
    if found.suffix == ".npz":
        from gpubuf.data.loading.npz import npz_table

        return npz_table(found)
    if found.suffix in (".hdf5", ".h5", ".hdf"):
        from gpubuf.data.loading.hdf5 import hdf5_table

        return hdf5_table(found, filter_key)
    if (found / "meta" / "info.json").exists():
        from gpubuf.data.loading.lerobot import LeRobotFolder

        return LeRobotFolder(found)
    tables = [found] if found.suffix == ".parquet" else sorted(found.rglob("*.parquet"))
    if tables:
        from gpubuf.data.loading.parquet import parquet_table

        return parquet_table(tables)
    raise ValueError(f"{path} is of no known format: npz, HDF5, Minari, Parquet, LeRobot v3")


def load_dataset(
    source: str | os.PathLike[str] | Source | Recording,
    buffer: ReplayBuffer | None = None,
    *,
    device: torch.device | str = "auto",
    folder: str | os.PathLike[str] | None = None,
    capacity: int | None = None,
    keys: Sequence[str] | Mapping[Any, str] | None = None,
    next_observations: bool = True,
    keep_last: bool = False,
    filter_key: str | None = None,
    workers: int | None = None,
    progress: bool | None = None,
    **options: Any,
) -> Any:
    """Load a data set from its files into a buffer. Each row is read once; of a video each frame is decoded once.

    ``load_dataset("halfcheetah-medium-v2.hdf5", device="cuda", batch_size=256)``. The memory is planned first: what
    does not fit is refused before anything is read. Observations are stored once (``share_next``), but in a folder.

    Args:
        source: a path, or what :func:`open_dataset` gives.
        buffer: write to this one. Default: a new :class:`gpubuf.TensorDictReplayBuffer`.
        device: where a new buffer has its rows: as for :class:`gpubuf.LazyTensorStorage`.
        folder: have the rows in mapped files there (:class:`gpubuf.LazyMemmapStorage`). A load that was interrupted or
            killed goes on when the same call is made again; one that was complete is opened.
        capacity: rows of a new buffer. Default: those of the data set, or of the ``folder`` that is opened.
        keys, next_observations, keep_last, filter_key: as for :func:`open_dataset`.
        workers: threads that read and decode. Default: as many as :class:`concurrent.futures.ThreadPoolExecutor` has.
        progress: show a bar. Default: on a terminal, where rich is installed.
        **options: of a new buffer: ``batch_size``, ``sampler``, ``process`` and so on; ``storage`` takes the place of
            ``device``.

    Returns:
        The buffer.

    Raises:
        gpubuf.data.storage.placement.NothingFitsError: there is no room. Nothing has been read.
        ValueError: ``folder`` has other rows or another capacity, or the files have changed since the load began.
        TypeError: a buffer was given together with what a new one takes.
    """
    if buffer is not None and (options or folder is not None or capacity is not None):
        raise TypeError(f"folder, capacity and {list(options)} are for a new buffer, and one was given")
    look = {"keys": keys, "next_observations": next_observations, "keep_last": keep_last, "filter_key": filter_key}
    recording = source if isinstance(source, Recording) else open_dataset(source, **look)  # type: ignore[arg-type]
    begin, size = 0, recording.rows if capacity is None else capacity
    if buffer is None:
        if folder is not None:
            options["storage"] = _mapped(recording, Path(folder), size)
            if capacity not in (None, options["storage"].max_size):
                raise ValueError(f"{folder} has room for {options['storage'].max_size} rows, got capacity={capacity}")
            begin = options["storage"].written
        elif "storage" not in options:
            options["storage"] = _in_memory(recording, device, size, options.get("sampler"))
        buffer = TensorDictReplayBuffer(**options)
    row_bytes = recording.row_bytes
    with progress_bar("load", recording.rows * row_bytes, progress) as advance:
        advance(begin * row_bytes)
        for batch in recording.batches(begin, workers) if begin < recording.rows else ():
            buffer.extend(batch)
            advance(len(batch) * row_bytes)
    return buffer


def _in_memory(recording: Recording, device: torch.device | str, size: int, sampler: Any) -> LazyTensorStorage:
    made, kind = recording.plan(size, sampler=sampler or "uniform"), str(device).partition(":")[0]
    if not (made.auto if kind == "auto" else all(fit.fits for fit in made.fits if fit.placement == kind)):
        raise NothingFitsError(f"{size} rows of {made.row_bytes} bytes don't fit. {made.summary}")
    return LazyTensorStorage(size, device=device, **recording.sharing(size))


def _mapped(recording: Recording, folder: Path, size: int) -> LazyMemmapStorage:
    identity, path = recording.identity, folder / SOURCE_FILE
    if (folder / GPUBUF_FILE).exists():
        if not path.exists() or json.loads(path.read_text()) != identity:
            raise ValueError(f"{folder} has rows of something else than this load: choose another folder")
        return LazyMemmapStorage.open(folder, end_trajectories=False)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(path, identity)
    return LazyMemmapStorage(size, scratch_dir=folder, existsok=True)
