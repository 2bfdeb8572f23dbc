"""Reads the state of a buffer from the files of a checkpoint. Verifies all of it before it returns any."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from gpubuf import serialization
from gpubuf.data.checkpoints import manifest as files
from gpubuf.data.checkpoints.manifest import DamagedError, File, Manifest, RowFiles, need
from gpubuf.data.storage.layout import Data, Key, Pieces, RowLayout
from gpubuf.data.storage.linking import Repeated
from gpubuf.data.storage.tensor_storage import TensorStorage
from gpubuf.terminal import Advance


def read(folder: Path, manifest: Manifest, advance: Advance) -> tuple[dict[str, Any], list[list[Tensor]]]:
    """The state without the rows, and the tensors of every file of rows; all of it verified."""

    def parts(file: File, specs: list[tuple[torch.dtype, tuple[int, ...]]]) -> list[Tensor]:
        found: list[Tensor] | None = files.open_file(folder, file).get("parts")
        need(isinstance(found, list) and len(found) == len(specs), f"{file.name} doesn't hold what it should")
        assert found is not None
        for tensor, (dtype, shape) in zip(found, specs, strict=True):
            due = (dtype, (file.stop - file.start, *shape))
            is_tensor = isinstance(tensor, Tensor)
            need(
                is_tensor and (tensor.dtype, tuple(tensor.shape)) == due,
                f"{file.name} holds {tensor.dtype, tuple(tensor.shape)}, expected {due}" if is_tensor else file.name,
            )
        advance(file.size)
        return found

    state = files.open_file(folder, manifest.state)
    # Copies: the buffer may keep tensors of the state, and must not keep the file with them.
    state = _copied(state)
    rows: list[list[Tensor]] = []
    if manifest.rows is not None:
        batch = manifest.rows.batch_shape[1:]
        specs = [(serialization.DTYPES[leaf.dtype], (*batch, *leaf.shape)) for leaf in manifest.rows.leaves]
        rows = [parts(file, specs) for file in manifest.rows.files]
    for tensor in manifest.tensors:
        dtype = serialization.DTYPES[tensor.dtype]
        found = [parts(file, [(dtype, tensor.shape[1:])])[0] for file in tensor.files]
        need(len(found) > 0, f"the tensor {'.'.join(tensor.path)} has no files")
        at: Any = state
        for name in tensor.path[:-1]:
            at = at.get(name) if isinstance(at, dict) else None
        need(
            isinstance(at, dict) and bool(tensor.path) and tensor.path[-1] in at and at[tensor.path[-1]] is None,
            f"the state has no place for {'.'.join(tensor.path)}",
        )
        at[tensor.path[-1]] = torch.cat(found)
    return state, rows


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copied(item) for item in value]
    if isinstance(value, tuple):
        items = [_copied(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value.clone() if isinstance(value, (Tensor, TensorDict)) else value


def pieces(storage: TensorStorage, rows: RowFiles, parts: list[list[Tensor]], advance: Advance) -> Pieces:
    """The rows as a storage takes them: batches like those that were written, a file at a time."""
    batch = rows.batch_shape[1:]
    try:
        empty = [torch.empty((0, *batch, *leaf.shape), dtype=serialization.DTYPES[leaf.dtype]) for leaf in rows.leaves]
    except (RuntimeError, TypeError) as error:
        raise DamagedError(f"the rows' shapes are impossible: {error}") from None
    layout = RowLayout(_batch(rows, empty), storage.ndim)
    if storage.initialized and {leaf.key for leaf in storage.layout.leaves} == {leaf.key for leaf in layout.leaves}:
        # Only the storage knows which tensorclasses its rows are made of.
        layout = storage.layout
    order = {leaf.key: position for position, leaf in enumerate(rows.leaves)}
    places = [order[leaf.key] for leaf in layout.leaves]

    def data(tensors: list[Tensor]) -> Data:
        own = tuple(tensors[0].shape[: storage.ndim]) if tensors else (0, *batch)
        return layout.assemble([tensors[i] for i in places], own, None)

    told = set[str]()

    def each() -> Iterator[tuple[int, Data]]:
        for file, tensors in zip(rows.files, parts, strict=True):
            yield file.start, data(tensors)
            if file.name not in told:
                told.add(file.name)
                advance(file.size)

    return Pieces(data(empty), Repeated(each))


def _batch(rows: RowFiles, tensors: list[Tensor]) -> Data:
    """Tensors in the order of ``rows.leaves`` as a tensor, or a TensorDict."""
    if [leaf.key for leaf in rows.leaves] == [()]:
        return tensors[0]
    try:
        return _level(rows, tensors, ())
    except RuntimeError as error:
        raise DamagedError(f"the rows' shapes contradict each other: {error}") from None


def _level(rows: RowFiles, tensors: list[Tensor], path: Key) -> TensorDict:
    found: dict[str, Any] = {}
    for leaf, tensor in zip(rows.leaves, tensors, strict=True):
        if leaf.key[: len(path)] == path:
            name = leaf.key[len(path)]
            if len(leaf.key) == len(path) + 1:
                found[name] = tensor
            elif name not in found:
                found[name] = _level(rows, tensors, (*path, name))
    nested = dict(rows.nested_batch).get(path, ())
    return TensorDict(found, (0, *rows.batch_shape[1:], *nested))
