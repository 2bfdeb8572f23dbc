"""HDF5: a table, as D4RL writes it, and episodes in groups, as robomimic and Minari write them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gpubuf.data.loading.recording import Table, key_of, needed, overlaps, stamps


def hdf5_table(path: Path, filter_key: str | None = None) -> Table:
    """What reads an HDF5 file: of robomimic, of Minari, or a table with a data set ``[records, ...]`` a column.

    Raises:
        ImportError: h5py is missing.
        KeyError: the file has no such ``filter_key``.
        ValueError: nothing says where trajectories end.
    """
    file = needed("h5py").File(path, "r")
    groups = file["data"] if "data" in file and hasattr(file["data"], "items") else file
    names = [name for name in groups if re.fullmatch(r"(demo|episode)_\d+", name)]
    if filter_key is not None:
        names = [name.decode() for name in file["mask"][filter_key][:]]
    if names:
        names.sort(key=lambda name: int(name.rpartition("_")[2]))
        return _episodes([stamps([path]), filter_key], [groups[name] for name in names])
    found = dict(_datasets(file))

    def fill(name: str, start: int, out: npt.NDArray[Any]) -> None:
        out[...] = found[name][start : start + len(out)]

    return Table(stamps([path]), {name: (each.shape, each.dtype) for name, each in found.items()}, fill)


def _datasets(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """All data sets of numbers below a group, with their names."""
    for name, each in group.items():
        if hasattr(each, "items"):
            yield from _datasets(each, f"{before}{name}/")
        elif each.dtype.kind in "biufc" and each.ndim:
            yield before + name, each


def _episodes(identity: Any, groups: Sequence[Any]) -> Table:
    """Episodes, a group each. Where they have an observation more than actions, it is what the last one led to."""
    found = dict(_datasets(groups[0]))
    seen, acted = (next(name for name in found if key_of(name)[0] == key) for key in ("observation", "action"))
    lengths = [len(group[seen]) for group in groups]
    starts = np.cumsum([0, *lengths])

    def fill(name: str, start: int, out: npt.NDArray[Any]) -> None:
        for number, records, places in overlaps(starts, start, start + len(out)):
            part = groups[number][name][records]
            out[places][: len(part)] = part
            out[places][len(part) :] = 0

    flags = {"episode": np.repeat(np.arange(len(groups)), lengths)}
    if lengths[0] > len(found[acted]):
        flags["valid"] = np.ones(starts[-1], bool)
        flags["valid"][starts[1:] - 1] = False
    arrays = {name: ((int(starts[-1]), *each.shape[1:]), each.dtype) for name, each in found.items()}
    return Table(identity, arrays, fill, flags)
