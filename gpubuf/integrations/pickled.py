"""A buffer for programs that save theirs by pickle: its rows are written and read a piece at a time."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from multiprocessing.context import get_spawning_popen
from pickle import PickleBuffer
from typing import Any, Self, SupportsIndex

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from torch.utils._pytree import tree_map_only

from gpubuf.data.buffer import ReplayBuffer
from gpubuf.data.checkpoints.save import state_of
from gpubuf.data.samplers.base import Sampler
from gpubuf.data.storage.containers import Pieces
from gpubuf.data.storage.lazy import LazyTensorStorage

#: Bytes of a piece of rows.
PIECE_BYTES = 1 << 25


class Piece:
    """A tensor that pickle writes from where it is, and reads into memory of its own, on the CPU.

    Of one on a GPU there is a copy on the host until pickle has written everything.

    Attributes:
        tensor: the tensor; None once it was taken.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Any = tensor.detach()

    def take(self) -> Tensor:
        """The tensor, which is gone from here: pickle keeps pieces until it has read everything."""
        taken: Tensor = self.tensor
        self.tensor = None
        return taken

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        tensor = self.tensor.cpu().contiguous()
        data = tensor.reshape(-1).view(torch.uint8).numpy()
        # Earlier protocols know no buffers.
        content: Any = PickleBuffer(data) if int(protocol) >= 5 else bytearray(data)
        return _read, (content, tensor.dtype, tuple(tensor.shape))


def _read(content: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Piece:
    tensor = torch.empty(shape, dtype=dtype, device="cpu")
    if tensor.numel():
        tensor.reshape(-1).view(torch.uint8).numpy()[:] = np.frombuffer(content, np.uint8)
    if isinstance(content, bytearray):
        # Pickle keeps it.
        content.clear()
    return Piece(tensor)


def _cut(rows: TensorDict) -> Iterator[dict[Any, Piece]]:
    """Rows ``[T, E]`` in pieces of some steps, by key."""
    columns: dict[Any, Any] = dict(rows.items(True, True))
    per_step = sum(column.nbytes for column in columns.values()) // max(1, len(rows))
    steps = max(1, PIECE_BYTES // max(1, per_step))
    for start in range(0, len(rows), steps):
        yield {key: Piece(column[start : start + steps]) for key, column in columns.items()}


def _joined(pieces: list[dict[Any, Piece]]) -> Pieces:
    """Rows that were cut, each of which can be read once."""

    def rows(columns: dict[Any, Tensor]) -> TensorDict:
        return TensorDict(columns, next(iter(columns.values())).shape[:2])

    def parts() -> Iterator[tuple[int, TensorDict]]:
        start = 0
        for piece in pieces:
            part = rows({key: each.take() for key, each in piece.items()})
            yield start, part
            start += len(part)

    return Pieces(rows({key: each.tensor[:0] for key, each in pieces[0].items()}), parts)


class PickledBuffer(ReplayBuffer):
    """A :class:`gpubuf.ReplayBuffer` of two dimensions that pickle makes no copy of, and reads without a GPU too.

    Nobody may write while pickle does. A pickle has what :meth:`state_dict` has, and the transforms.

    Args:
        storage: arguments of the :class:`gpubuf.LazyTensorStorage` in it.
        sampler: as for :class:`gpubuf.ReplayBuffer`.
        **options: likewise.
    """

    def __init__(self, storage: dict[str, Any], sampler: Sampler, **options: Any) -> None:
        # A sampler as it is before it serves a storage.
        self._made = {**options, "storage": storage, "sampler": copy.deepcopy(sampler)}
        super().__init__(storage=LazyTensorStorage(**storage), sampler=sampler, **options)

    def to(self, device: torch.device | str, *, progress: bool | None = None) -> Self:
        """As :meth:`gpubuf.ReplayBuffer.to`."""
        super().to(device, progress=progress)
        self._made["storage"]["device"] = device
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy that goes on where this one is: what pickle reads begins new trajectories."""
        other = type(self).__new__(type(self))
        ReplayBuffer.__setstate__(other, ReplayBuffer.__getstate__(self))
        return other

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None:
            return super().__getstate__()
        state = self.operation.run(state_of, self)
        rows = state["_storage"].pop("rows", [])
        return {
            "made": copy.deepcopy({**self._made, "transform": None if self.transform.is_empty else self.transform}),
            "rows": [piece for part in (rows if isinstance(rows, list) else [rows]) for piece in _cut(part)],
            "state": tree_map_only(Tensor, Piece, state),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "made" not in state:
            super().__setstate__(state)
            return
        made, whole = state["made"], tree_map_only(Piece, Piece.take, state["state"])
        if not torch.cuda.is_available():
            made["storage"]["device"] = "cpu"
        self.__init__(**made)  # type: ignore[misc]
        if state["rows"]:
            whole["_storage"]["rows"] = _joined(state["rows"])
        self.load_state_dict(whole)
