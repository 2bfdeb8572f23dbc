"""Checkpoints of the ranks of a process group: a file for each rank under one manifest, and one commit.

Each rank saves its own buffer, as :mod:`gpubuf.data.checkpoints.save` does, to a file of its own, all at the same time.
When all files are on the disk, rank 0 replaces the manifest, which names them. Until then the previous checkpoint of
all ranks is whole, whichever of them is lost.

As many ranks as there were go on exactly. On fewer ranks, each takes several shards, one after the other; what is not
exact then is refused.
"""

from __future__ import annotations

import math
import os
import secrets
from contextlib import nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from gpubuf import serialization, system
from gpubuf.data.checkpoints import files, restore
from gpubuf.data.checkpoints import save as of_one
from gpubuf.data.checkpoints.files import need
from gpubuf.data.checkpoints.restore import check, existing, readers, replacing
from gpubuf.data.checkpoints.save import Checkpointed, state_of
from gpubuf.data.processing.moments import merged_entries
from gpubuf.data.storage.containers import Data, Pieces
from gpubuf.data.storage.share_next import full_state, oldest_of
from gpubuf.data.storage.state import lacks_past
from gpubuf.kernels.sum_tree import MAX_PRIORITY

#: Flags that say where a trajectory ends. Where the last is stored, targets go by it, and a cut changes none.
_DONE, _TRUNCATED, _TERMINATED = ("next", "done"), ("next", "truncated"), ("next", "terminated")
_SAMPLER = frozenset({"type", "random", "alpha", "beta", "eps", "tree"})


class _Vote:
    """``with _Vote(group) as vote: ...; vote.cast(value)``: what all ranks did, or an error on all of them.

    A rank that raises before its vote tells the others, which raise too.
    """

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self._group, self._cast = process_group, False

    def cast(self, value: Any = None, failure: str | None = None) -> list[Any]:
        """The values of all ranks, in their order. Waits for them.

        Raises:
            RuntimeError: another rank has failed, or is lost: then it takes the timeout of the group.
        """
        self._cast = True
        if self._group is None:
            return [value]
        every: list[Any] = [None] * self._group.size()
        dist.all_gather_object(every, (value, failure), group=self._group)
        failed = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(every) if text is not None]
        if failed and failure is None:
            raise RuntimeError(f"other ranks have failed, and nothing has changed: {'; '.join(failed)}")
        return [each for each, _ in every]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if error is not None and not self._cast:
            self.cast(failure=f"{type(error).__name__}: {error}")


def save(
    buffer: Checkpointed,
    path: str | os.PathLike[str],
    *,
    process_group: dist.ProcessGroup | None = None,
    **options: Any,
) -> int:
    """Save everything to a folder, atomically; see :func:`gpubuf.data.checkpoints.save.save`. Synchronises.

    With ``process_group`` all of its ranks save their buffers together: see :func:`save_shards`.
    """
    if process_group is not None:
        return save_shards(buffer, path, process_group, **options)
    return of_one.save(buffer, path, **options)


def load(
    buffer: Checkpointed,
    path: str | os.PathLike[str],
    *,
    process_group: dist.ProcessGroup | None = None,
    **options: Any,
) -> None:
    """Restore what :func:`save` wrote; see :func:`gpubuf.data.checkpoints.restore.load`. Synchronises.

    With ``end_trajectories`` (default: True) the next write begins a trajectory: see ``load_state_dict``.

    What several ranks have saved is loaded by all ranks of ``process_group``, as many as there were or fewer: see
    :func:`load_shards`. Without one this buffer takes the rows of all.
    """
    if process_group is not None:
        load_shards(buffer, path, process_group, **options)
    else:
        restore.load(buffer, path, **options)


def save_shards(
    buffer: Checkpointed,
    path: str | os.PathLike[str],
    process_group: dist.ProcessGroup,
    *,
    progress: bool | None = None,
) -> int:
    """:func:`gpubuf.data.checkpoints.save.save` on every rank of a group, of its shard. All ranks call it.

    Args:
        buffer: that of this rank.
        path: the folder, which every rank sees (of several machines: on a file system that they share).
        process_group: the ranks.
        progress: as for ``save``.

    Returns:
        The bytes that this rank has written.

    Raises:
        RuntimeError: another rank has failed, or is lost (after the group's timeout). As ``save`` besides. The previous
            checkpoint is whole in all of these cases. Synchronises.
    """
    folder, rank = Path(path), process_group.rank()
    with _Vote(process_group) as vote:
        if rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
        vote.cast()
    with system.locked(folder, exclusive=True) if rank == 0 else nullcontext():
        with _Vote(process_group) as vote:
            if rank == 0:
                files.check_replaceable(folder, files.RANKS)
            (save_id, *_) = vote.cast(secrets.token_hex(8))
        with _Vote(process_group) as vote:
            file = files.write(
                folder, save_id, [buffer.operation], lambda: {"buffer": state_of(buffer)}, progress, rank
            )
            found = vote.cast(file)
        with _Vote(process_group) as vote:
            if rank == 0:
                files.commit(folder, files.Manifest(files.RANKS, tuple(found)))
            vote.cast()
    return file.size


def load_shards(
    buffer: Checkpointed,
    path: str | os.PathLike[str],
    process_group: dist.ProcessGroup | None,
    *,
    progress: bool | None = None,
    end_trajectories: bool = True,
) -> None:
    """Restore what :func:`save_shards` wrote, on all ranks of a group. All ranks call it.

    On as many ranks as there were, each goes on with the same batches. On fewer, rank r of M takes the shards r, r + M,
    r + 2 M and so on, its own as the newest: rows, oldest first, and priorities are those of the shards; running
    statistics are those of all of their rows; the random stream, and the state of transforms, are its own. The newest
    trajectory of every other shard is cut where the shard ends: ``("next", "done")`` and ``("next", "truncated")`` are
    set there, so that no slice and no n-step window leads from one shard into another. Batches that were prefetched are
    drawn anew.

    Args:
        buffer: that of this rank. It has room for the rows of its shards.
        path: the folder.
        process_group: the ranks. None: this process takes all shards.
        progress: as for ``save``.
        end_trajectories: as for :meth:`gpubuf.ReplayBuffer.load_state_dict`.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: as :func:`gpubuf.data.checkpoints.restore.load`; or there are more ranks than there were, or what
            several shards have can't be put together. The buffers of all ranks are as they were.
        RuntimeError: another rank has failed, or is lost: before all have checked their shards, the buffers are as they
            were; later, they are empty. Synchronises.
    """
    buffer.operation.run(_load_shards, buffer, path, process_group, progress, end_trajectories)


def _load_shards(
    buffer: Checkpointed,
    path: str | os.PathLike[str],
    process_group: dist.ProcessGroup | None,
    progress: bool | None,
    end_trajectories: bool,
) -> None:
    rank, ranks = (0, 1) if process_group is None else (process_group.rank(), process_group.size())
    with _Vote(process_group) as vote:
        folder = existing(path)
        with system.locked(folder, exclusive=False):
            shards = files.read_manifest(folder, files.RANKS).files
            if len(shards) < ranks:
                raise ValueError(
                    f"the checkpoint at {folder} is of {len(shards)} ranks and can't be cut into more: here are {ranks}"
                )
            mine = [*range(rank + ranks, len(shards), ranks), rank]
            found = [files.read(folder, shards[each], progress) for each in mine]
        states = [each["buffer"] for each in found]
        for state in states:
            check(buffer.parts, state)
        if len(states) > 1:
            states = [_one_state(states, mine, buffer.parts.storage.ndim)]
            check(buffer.parts, states[0])
        vote.cast()
    with _Vote(process_group) as vote, replacing(buffer.parts):
        buffer.load_state_dict(states[0], end_trajectories=end_trajectories)
        vote.cast()


# Several shards as one


def _one_state(states: list[dict[str, Any]], ranks: list[int], ndim: int) -> dict[str, Any]:
    """The state of one buffer with the rows of several, the last of which is the rank's own.

    Raises:
        ValueError: they can't be put together.
    """
    own = states[-1]
    for name in ("_transforms", "_writer"):
        same = all(_bytes(state[name]) == _bytes(own[name]) for state in states)
        need(same, f"the {name[1:]} of ranks {ranks} have different states, which can't be put together")
    need(not own["_writer"], "rows that are not in the order of their writes can be restored on as many ranks only")
    filled = [(rank, state) for rank, state in zip(ranks, states, strict=True) if state["_storage"]["initialized"]]
    one = dict(own)
    if filled:
        storages = [state["_storage"] for _, state in filled]
        orders = [_oldest_first(storage) for storage in storages]
        one["_storage"] = _one_storage(storages, [rank for rank, _ in filled], ndim)
        one["_sampler"] = _one_sampler([state["_sampler"] for _, state in filled], orders)
    if "_processing" in own:
        one["_processing"] = _one_processing([state["_processing"] for state in states])
    return one


def _bytes(state: dict[str, Any]) -> bytes:
    return b"".join(map(bytes, serialization.contents(state)))


def _oldest_first(storage: dict[str, Any]) -> Tensor:
    """The positions of the rows of a storage, int64 ``[size]``."""
    return (torch.arange(int(storage["size"]), device="cpu") + oldest_of(storage)) % int(storage["max_size"])


def _one_storage(storages: list[dict[str, Any]], ranks: list[int], ndim: int) -> dict[str, Any]:
    own = storages[-1]
    rest = own["shape"][1:]
    form = _bytes({"form": own.get("form")})
    for rank, storage in zip(ranks, storages, strict=True):
        need(storage["shape"][1:] == rest, f"the storage of rank {rank} has the shape {storage['shape']}, not {rest}")
        need(_bytes({"form": storage.get("form")}) == form, f"rank {rank} stores its rows in another way than others")
        need("host" not in storage, "data that are not tensors can be restored on as many ranks only")
    for rank, storage in zip(ranks[:-1], storages, strict=False):
        _cut(storage, ndim, rank)
    wholes = [full_state(storage, ndim) for storage in storages]
    pieces = [Pieces.of(whole["rows"], ndim) for whole in wholes]
    size = sum(storage["size"] for storage in storages)
    per_step = math.prod(rest)

    def each() -> Any:
        start = 0
        for whole, part in zip(wholes, pieces, strict=True):
            rows: Data = torch.cat([data for _, data in part.parts()])
            oldest = oldest_of(whole) // per_step
            for run in (rows[oldest:], rows[:oldest]):
                yield start, run
                start += len(run)

    one = {name: value for name, value in wholes[-1].items() if name not in ("rewritten", "skipped", "marks")}
    if any(whole.get("marks") is not None for whole in wholes):
        marks = (whole.get("marks", torch.zeros(whole["size"], dtype=torch.uint8, device="cpu")) for whole in wholes)
        one["marks"] = torch.cat([each[_oldest_first(whole)] for each, whole in zip(marks, wholes, strict=True)])
    counters = {"written": size, "size": size, "max_size": size, "shape": [size // per_step, *rest]}
    if lacks_past(wholes[0]):
        counters |= {"written": 2 * size, "skipped": size}
    return {**one, **counters, "rows": Pieces(pieces[-1].example, each)}


def _cut(storage: dict[str, Any], ndim: int, rank: int) -> None:
    """End the trajectories that go on at the newest step of a storage, whose rows are changed: those of its file stay.

    Raises:
        ValueError: the rows have no flags that could say so without ending the values too.
    """
    newest = (storage["written"] // math.prod(storage["shape"][1:]) - 1) % storage["shape"][0]
    for start, rows in Pieces.of(storage["rows"], ndim).parts():
        if not start <= newest < start + len(rows):
            continue
        keys = rows.keys(True) if hasattr(rows, "keys") else ()
        need(
            _DONE in keys,
            f"the rows have no {_DONE}, by which the newest trajectory of rank {rank} could be kept apart from what "
            "another rank wrote: restore them on as many ranks",
        )
        done = rows.get(_DONE)[newest - start]
        if bool(done.all()):
            return
        need(
            _TERMINATED in keys,
            f"the newest trajectory of rank {rank} goes on, and without {_TERMINATED} beside {_DONE} a cut there would "
            "end its values too: restore the rows on as many ranks",
        )
        if _TRUNCATED in keys:
            rows.get(_TRUNCATED)[newest - start] |= ~done
        done.fill_(True)


def _one_sampler(samplers: list[dict[str, Any]], orders: list[Tensor]) -> dict[str, Any]:
    own = samplers[-1]
    for sampler in samplers:
        need(sampler.keys() <= _SAMPLER, f"what a {own['type']} knows can be restored on as many ranks only")
        for name in ("type", "alpha", "beta", "eps"):
            text = f"the samplers of the ranks have different values of {name}: {own.get(name)}, {sampler.get(name)}"
            need(sampler.get(name) == own.get(name), text)
        need((sampler.get("tree") is None) == (own.get("tree") is None), "some ranks have priorities, and others none")
    if own.get("tree") is None:
        return own
    trees = [sampler["tree"] for sampler in samplers]
    leaves = torch.cat([tree["leaves"][order] for tree, order in zip(trees, orders, strict=True)])
    hyper = own["tree"]["hyper"].clone()
    hyper[MAX_PRIORITY] = torch.stack([tree["hyper"][MAX_PRIORITY] for tree in trees]).amax()
    return {**own, "tree": {"capacity": leaves.numel(), "leaves": leaves, "hyper": hyper}}


def _one_processing(states: list[dict[str, Any]]) -> dict[str, Any]:
    own, steps = states[-1], {}
    for number, step in own["steps"].items():
        others = [state["steps"][number] for state in states]
        if "moments" in step:
            merged = {key: merged_entries([each["moments"][key] for each in others]) for key in step["moments"]}
            steps[number] = {**step, "moments": merged}
            continue
        need(all(_bytes(each) == _bytes(step) for each in others), "the ranks process batches in different ways")
        steps[number] = step
    return {**own, "steps": steps}


def _is_sharded(folder: Path) -> bool:
    """Whether a folder holds the checkpoint of several ranks."""
    try:
        files.read_manifest(folder, files.RANKS)
    except (FileNotFoundError, files.DamagedError):
        return False
    return True


def _load_all(buffer: Checkpointed, folder: Path, end_trajectories: bool) -> None:
    """All shards into the buffer of one process."""
    load_shards(buffer, folder, None, end_trajectories=end_trajectories)


readers.append((_is_sharded, _load_all))
