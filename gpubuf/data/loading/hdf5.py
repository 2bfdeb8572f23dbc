"""HDF5: a table, as D4RL writes it, and episodes in groups, as robomimic and Minari write them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gpubuf.data.loading.recording import Column, ColumnStatistics, Source, Steps, flag_of, key_of, overlaps, stamps


def open_hdf5(path: Path, filter_key: str | None = None) -> Source:
    """What reads an HDF5 file: of robomimic, of Minari, or a table.

    Raises:
        ImportError: h5py is missing.
        ValueError: there is a ``filter_key``, and the file is none of robomimic's.
        KeyError: the file has no such ``filter_key``.
    """
    try:
        import h5py
    except ImportError as error:
        raise ImportError('reading HDF5 needs h5py: pip install "gpubuf[datasets]"') from error
    file = h5py.File(path, "r")
    if "data" in file and isinstance(file["data"], h5py.Group):
        names = list(file["data"])
        if filter_key is not None:
            names = [name.decode() for name in file["mask"][filter_key][:]]
        return Hdf5Episodes([stamps([path]), filter_key], [file["data"][name] for name in sorted(names, key=_number)])
    if filter_key is not None:
        raise ValueError(f"{path} is no file of robomimic, which alone have filter keys")
    episodes = [name for name in file if re.fullmatch(r"episode_\d+", name)]
    if episodes:
        return Hdf5Episodes(stamps([path]), [file[name] for name in sorted(episodes, key=_number)])
    return Hdf5Table(path, file)


def _number(name: str) -> int:
    return int(name.rpartition("_")[2])


def _datasets(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """All data sets of numbers below a group, with their names."""
    for name, each in group.items():
        if hasattr(each, "items"):
            yield from _datasets(each, f"{before}{name}/")
        elif each.dtype.kind in "biuf":
            yield before + name, each


class Hdf5Table:
    """A table: a data set ``[records, ...]`` a column, as D4RL has it.

    Raises:
        ValueError: none says where trajectories end.
    """

    def __init__(self, path: Path, file: Any) -> None:
        self.identity: Any = stamps([path])
        self.statistics: dict[str, ColumnStatistics] = {}
        self._found = dict(_datasets(file))
        self.steps = Steps.of({flag_of(name): each[:] for name, each in self._found.items() if flag_of(name)})
        self.columns = {
            name: Column.of(key_of(name), each.shape[1:], each.dtype)
            for name, each in self._found.items()
            if each.shape[:1] == self.steps.end.shape and not flag_of(name)
        }

    def tasks(self, name: str, start: int, stop: int, out: npt.NDArray[Any], /) -> Sequence[Callable[[], None]]:
        found = self._found[name]
        return [lambda: found.read_direct(out, np.s_[start:stop])]


class Hdf5Episodes:
    """Episodes, a group each. Where they have an observation more than actions, it is what the last one led to."""

    def __init__(self, identity: Any, groups: Sequence[Any]) -> None:
        self.identity = identity
        self.statistics: dict[str, ColumnStatistics] = {}
        self._groups = groups
        found = dict(_datasets(groups[0]))
        self.columns = {
            name: Column.of(key_of(name), each.shape[1:], each.dtype)
            for name, each in found.items()
            if each.ndim and not flag_of(name)
        }
        actions = next(name for name, column in self.columns.items() if column.key[0] == "action")
        seen = next(name for name, column in self.columns.items() if column.has_next)
        lengths = [len(group[seen]) for group in groups]
        self._starts = np.cumsum([0, *lengths])
        last = lengths[0] > len(groups[0][actions])
        flags = {flag_of(name): self._flag(name) for name in found if flag_of(name)}
        terminated = flags.get("terminated", flags.get("done", np.zeros(self._starts[-1], bool)))
        self.steps = Steps.of_lengths(lengths, terminated, flags.get("truncated", np.zeros_like(terminated)), last)

    def _flag(self, name: str) -> npt.NDArray[np.bool_]:
        found = np.zeros(self._starts[-1], bool)
        self._fill(name, 0, found)
        return found

    def _fill(self, name: str, start: int, out: npt.NDArray[Any]) -> None:
        for number, records, places in overlaps(self._starts, start, start + len(out)):
            # An episode's last observation has no action.
            part = self._groups[number][name][records]
            out[places][: len(part)] = part
            out[places][len(part) :] = 0

    def tasks(self, name: str, start: int, stop: int, out: npt.NDArray[Any], /) -> Sequence[Callable[[], None]]:
        return [lambda: self._fill(name, start, out)]
