"""The plan of a save: its files, and the pieces of tensors in each, at one moment of the buffer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpubuf import serialization
from gpubuf.data.checkpoints.manifest import File, Kind, LeafSpec, Manifest, RowFiles, TensorFiles
from gpubuf.data.prefetch import copied
from gpubuf.data.storage.column import Column
from gpubuf.data.storage.layout import Key, Node
from gpubuf.data.storage.tensor_storage import TensorStorage

_MOST_BYTES = 1 << 26
_LEAST_BYTES = 1 << 20
_FILES = 128


@dataclass
class Piece:
    """The plan of one file: ``start .. stop`` of some tensors.

    Attributes:
        kind: of the file.
        numbers: of the file.
        span: ``(start, stop)``.
        parts: the tensors; none of them where ``holds`` is certain.
        n_bytes: how much they are.
        earlier: a file of the previous checkpoint that may hold the same.
        certain: whether it does.
    """

    kind: Kind
    numbers: list[int]
    span: tuple[int, int]
    parts: list[Tensor]
    n_bytes: int
    earlier: File | None
    certain: bool


class Snapshot:
    """A buffer as of one moment: taken, and written or copied, under its lock.

    Args:
        folder: of the checkpoint.
        storage: the buffer's storage.
        state: the buffer's state; becomes part of this.
        previous: the checkpoint in the folder, if it can be built upon.
        same: whether the rows at positions ``start .. stop`` are certainly those of the previous checkpoint.
        file_bytes: size of a file, or None.

    Attributes:
        state: what goes into the file of the state: all but the rows and large tensors.
    """

    def __init__(
        self,
        folder: Path,
        storage: TensorStorage,
        state: dict[str, Any],
        previous: Manifest | None,
        same: Callable[[int, int], bool],
        file_bytes: int | None,
    ) -> None:
        self._folder = folder
        self._counters = (storage.written, len(storage), storage.max_size)
        self._rows: tuple[RowFiles, list[Piece]] | None = None
        if "rows" in state["_storage"]:
            self._rows = self._pieces_of_rows(storage, previous, same, file_bytes)
            state["_storage"] = {key: value for key, value in state["_storage"].items() if key != "rows"}
        large = _take_large(state, _LEAST_BYTES if file_bytes is None else file_bytes)
        self._tensors = [self._pieces_of(number, *item, previous, file_bytes) for number, item in enumerate(large)]
        self.state = state

    @property
    def _pieces(self) -> Iterator[Piece]:
        if self._rows is not None:
            yield from self._rows[1]
        for _, pieces in self._tensors:
            yield from pieces

    @property
    def n_bytes(self) -> int:
        """Bytes of rows and large tensors."""
        return sum(piece.n_bytes for piece in self._pieces)

    @property
    def n_bytes_read(self) -> int:
        """Of these, what has to be looked at: written, or compared with a file."""
        return sum(piece.n_bytes for piece in self._pieces if not piece.certain)

    def copy(self) -> None:
        """Take copies of what has to be looked at, on the host: from then on the buffer may change. Synchronises."""
        for piece in self._pieces:
            piece.parts = copied(piece.parts, torch.device("cpu"))
        self.state = copied(self.state, torch.device("cpu"))

    def manifest(self, save_id: str, put: Callable[[Piece], File], state_file: Callable[[], File]) -> Manifest:
        """The manifest of the save, once ``put`` has found or written a file for every piece."""
        rows = None
        if self._rows is not None:
            form, pieces = self._rows
            rows = replace(form, files=tuple(map(put, pieces)))
        tensors = tuple(replace(form, files=tuple(map(put, pieces))) for form, pieces in self._tensors)
        return Manifest(save_id, *self._counters, rows, tensors, state_file())

    def _pieces_of_rows(
        self,
        storage: TensorStorage,
        previous: Manifest | None,
        same: Callable[[int, int], bool],
        file_bytes: int | None,
    ) -> tuple[RowFiles, list[Piece]]:
        layout, shape = storage.layout, storage.shape
        per_step = math.prod(shape[1:])
        steps = len(storage) // per_step
        step_bytes = per_step * layout.row_bytes
        leaves = tuple(LeafSpec(leaf.key, _name(leaf.dtype, leaf.name), leaf.shape) for leaf in layout.leaves)
        form = RowFiles(leaves, tuple(_nested_batch(layout.root, ())), (steps, *shape[1:]), ())
        earlier: dict[tuple[int, int], File] = {}
        if previous is not None and previous.rows is not None and previous.rows.leaves == leaves:
            earlier = {(file.start, file.stop): file for file in previous.rows.files}
        return form, [
            self._piece(
                "rows", [number], storage.columns, span, step_bytes, earlier, same(*(n * per_step for n in span))
            )
            for number, span in enumerate(spans(steps, shape[0], step_bytes, file_bytes))
        ]

    def _pieces_of(
        self, number: int, path: Key, tensor: Tensor, previous: Manifest | None, file_bytes: int | None
    ) -> tuple[TensorFiles, list[Piece]]:
        form = TensorFiles(path, _name(tensor.dtype, ".".join(path)), tuple(tensor.shape), ())
        known = {} if previous is None else {other.path: other for other in previous.tensors}
        before = known.get(path)
        same_form = before is not None and (before.dtype, before.shape[1:]) == (form.dtype, form.shape[1:])
        earlier = {(file.start, file.stop): file for file in before.files} if before and same_form else {}
        item_bytes = tensor.nbytes // len(tensor)
        return form, [
            self._piece("tensor", [number, i], [tensor], span, item_bytes, earlier, False)
            for i, span in enumerate(spans(len(tensor), len(tensor), item_bytes, file_bytes))
        ]

    def _piece(
        self,
        kind: Kind,
        numbers: list[int],
        tensors: Sequence[Tensor | Column],
        span: tuple[int, int],
        item_bytes: int,
        earlier: Mapping[tuple[int, int], File],
        same: bool,
    ) -> Piece:
        start, stop = span
        file = earlier.get(span)
        if file is not None:
            path = self._folder / file.name
            # Somebody may have removed it since.
            file = file if path.is_file() and path.stat().st_size == file.size else None
        certain = file is not None and same
        parts = [] if certain else [tensor[start:stop] for tensor in tensors]
        return Piece(kind, numbers, span, parts, (stop - start) * item_bytes, file, certain)


def spans(length: int, capacity: int, item_bytes: int, file_bytes: int | None) -> list[tuple[int, int]]:
    """``0 .. length`` in pieces. The cuts depend on the capacity alone, not on the number of rows stored."""
    if file_bytes is None:
        file_bytes = min(max(capacity * item_bytes // _FILES, _LEAST_BYTES), _MOST_BYTES)
    step = max(1, file_bytes // max(1, item_bytes))
    return [(start, min(start + step, length)) for start in range(0, length, step)]


def _name(dtype: torch.dtype, key: str) -> str:
    name = serialization.NAMES.get(dtype)
    if name is None:
        raise TypeError(f"cannot save {key}: it has the dtype {dtype}")
    return name


def _take_large(state: dict[str, Any], at_least: int) -> list[tuple[Key, Tensor]]:
    """Take the large tensors out of ``state`` (None stands in for them), with their paths."""
    large: list[tuple[Key, Tensor]] = []
    for key, value in list(state.items()):
        state[key] = _without(value, (key,), at_least, large)
    return large


def _without(value: Any, path: Key, at_least: int, large: list[tuple[Key, Tensor]]) -> Any:
    if isinstance(value, Tensor) and value.dim() > 0 and value.nbytes >= max(1, at_least):
        large.append((path, value.detach()))
        return None
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        return value
    return {key: _without(item, (*path, key), at_least, large) for key, item in value.items()}


def _nested_batch(node: int | Node, path: Key) -> Iterator[tuple[Key, tuple[int, ...]]]:
    if isinstance(node, int):
        return
    if node.batch_suffix:
        yield path, node.batch_suffix
    for name, child in node.children.items():
        yield from _nested_batch(child, (*path, name))
