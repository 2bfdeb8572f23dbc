"""A storage that learns from the first batch what a row is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gpubuf.data.arguments import warn_of_no_effect
from gpubuf.data.storage.allocation import Allocation
from gpubuf.data.storage.schema import Codec, Options
from gpubuf.data.storage.storage import TensorStorage


class LazyTensorStorage(TensorStorage):
    """A :class:`TensorStorage` that allocates at the first write, from the keys, shapes and dtypes found there.

    Rows are TensorDicts, tensorclasses, tensors, or dicts, tuples, lists and named tuples of them, nested: batches have
    the structure of the first write. Text and other data that are not tensors may lie beside the tensors of a
    TensorDict. A list on the host keeps them, so that a draw on a GPU waits for its index.

    Args:
        max_size: capacity in transitions. With ``ndim > 1`` it is rounded up to whole steps of all environments.
        device: ``"cpu"``, ``"cuda"`` or a ``torch.device``; ``"pinned"`` for rows in pinned host memory that the GPU
            gathers from, with counters, tree and index on the GPU; ``"split"`` for as many rows as there is room for on
            the GPU and the others in pinned host memory (``"split:20GiB"``, ``"split:30%"`` for so many); ``"mps"``,
            ``"xpu"`` and the like for rows, draws and priorities on the CPU, and a copy of every batch, before the
            transforms, on that device, which has no kernels here: what :meth:`extend` returns, and what an index gives,
            stays on the CPU; ``"auto"`` for the first of ``"cuda"``, ``"pinned"`` and ``"split"`` that has room for
            rows and index, and ``"cpu"`` on a machine without CUDA. What it chose, and why, is in :attr:`placement`,
            and is logged (``logging.getLogger("gpubuf")``, level INFO, or WARNING where rows are on the host).
        ndim: number of batch dimensions: 1, or 2 for time-first ``[T, E]`` storage.
        dtypes: how keys are stored, by key: a dtype, or a :class:`Codec`. Numbers are converted as ``to()`` of tensors
            does, but to the nearest integer, half to even. Integers out of range raise ValueError at the write (on a
            GPU they are cut, and count as faults).
        batch_dtypes: dtypes that keys have in batches, by key; of others it is the dtype that is written.
            ``storage[i]`` always has that one.
        share_next: store observations once: the next observation of a row is that of the next row, unless the two
            differ. True for every key that is both at the root and under "next", with one shape and dtype, but for
            flags and rewards; or a list of such keys. Any rows may be written, and come back exactly.
        next_capacity: how many next observations there is room for that are not those of the next row: the last ones
            of trajectories. Default: an eighth of the rows, at least 256 and one an environment, never more than rows.
            A write that would need more raises RuntimeError on the CPU, and nothing is written; on a GPU such rows
            count as faults, which the next call that synchronises raises. ``storage.sharing.used`` says how many are.
        compilable: accepted for compatibility; every operation can be compiled.
        consolidated, shared_init: accepted for compatibility, with one warning: the rows of each key are one piece of
            memory anyway, and a storage belongs to one process.
        cleanup_memmap: accepted for compatibility.

    Keys are given as you write them elsewhere, nested ones as tuples. A root key also means the same key under "next",
    unless that is given itself. With any of these options indexing gives copies.

    Raises:
        ValueError: ``max_size`` or ``ndim`` below 1; a dtype can't be converted; at the first write: an option
            names a key that the batch doesn't have.
        RuntimeError: at the first write: there is no such device, it lacks the dtype of a key, or ``"auto"`` finds room
            nowhere (:class:`gpubuf.data.storage.placement.NothingFitsError`).
    """

    def __init__(
        self,
        max_size: int,
        *,
        device: torch.device | str = "cpu",
        ndim: int = 1,
        dtypes: Mapping[Any, torch.dtype | Codec] | None = None,
        batch_dtypes: Mapping[Any, torch.dtype] | None = None,
        share_next: bool | Sequence[Any] = False,
        next_capacity: int | None = None,
        compilable: bool = False,
        consolidated: bool = False,
        shared_init: bool = False,
        cleanup_memmap: bool = True,
    ) -> None:
        warn_of_no_effect(consolidated=consolidated, shared_init=shared_init)
        options = Options.of(dtypes, batch_dtypes, share_next, next_capacity)
        self._begin(Allocation(max_size, device, ndim, options))
