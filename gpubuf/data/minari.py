"""Offline data sets of Minari, as buffers."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from gpubuf.data.arguments import component
from gpubuf.data.samplers.base import Sampler
from gpubuf.data.storage.layout import Key, as_key, as_written
from gpubuf.data.storage.storage import Storage, TensorStorage
from gpubuf.data.tensordict_buffers import TensorDictReplayBuffer
from gpubuf.terminal import ITEMS, progress_bar

_EXTRA = "pip install 'gpubuf[minari]'"


def from_minari(
    dataset: Any,
    *,
    storage: Storage | Callable[[], Storage] | None = None,
    sampler: Sampler | Callable[[], Sampler] | None = None,
    dtype: torch.dtype | None = torch.float32,
    exclude: Sequence[str | tuple[str, ...]] = (),
    download: bool = False,
    progress: bool | None = None,
    kind: type[TensorDictReplayBuffer] = TensorDictReplayBuffer,
    **kwargs: Any,
) -> TensorDictReplayBuffer:
    """A buffer with the transitions of a Minari data set, episode by episode.

    Of N steps the buffer has: ``"observation"`` and ``"action"`` ``[N, ...]``, nested where the spaces are (a tuple's
    parts are called ``"0"``, ``"1"``, ...); ``("next", "observation")``; ``("next", "reward")`` ``[N, 1]``;
    ``("next", "terminated")``, ``("next", "truncated")`` and ``("next", "done")``, bool ``[N, 1]``; and
    ``("collector", "traj_ids")``, int64 ``[N]``, the numbers of the episodes from 0 on. The last step of an episode
    that is marked neither terminated nor truncated is marked truncated: the data end there. Only one episode at a time
    is held beside the storage.

    Args:
        dataset: the id of a data set (``"D4RL/door/human-v2"``), or a ``minari.MinariDataset``, filtered if wanted, or
            anything with ``total_steps``, ``total_episodes`` and ``iterate_episodes()``.
        storage: an empty storage of one dimension, or a function that returns one. Default: a
            :class:`LazyTensorStorage` on the CPU of exactly as many rows as there are steps.
        sampler: a sampler, or a function that returns one. Default: uniform.
        dtype: what floating-point data become, and rewards in any case; None leaves them as they are.
        exclude: keys to leave out, as in the buffer: ``"observation"`` entries leave ``("next", "observation")`` too.
        download: fetch the data set from Minari's server if it is not there (with an id).
        progress: show a bar (needs ``rich``); default: on a terminal.
        kind: the class of the buffer.
        **kwargs: further arguments of :class:`TensorDictReplayBuffer`.

    Raises:
        ImportError: Minari, or rich for ``progress=True``, is not installed.
        TypeError: data that are no numbers, such as texts: ``exclude`` them.
        ValueError: the data set is empty, an episode contradicts itself or those before, or the storage is not empty,
            has several dimensions, or is too small.
    """
    if isinstance(dataset, str):
        dataset = _load(dataset, download)
    n_steps, n_episodes = int(dataset.total_steps), int(dataset.total_episodes)
    if n_steps == 0:
        raise ValueError("the data set has no steps")
    target: TensorStorage = component(storage, TensorStorage, lambda: kind._default_storage(n_steps))
    if target.ndim != 1 or len(target):
        raise ValueError(f"the storage must be empty and of one dimension, it is {target!r}")
    if target.max_size < n_steps:
        raise ValueError(f"the data set has {n_steps} steps, the storage has room for {target.max_size}")
    buffer = kind(storage=target, sampler=sampler, **kwargs)
    excluded = frozenset(map(as_key, exclude))
    episodes: Iterable[Any] = dataset.iterate_episodes()
    with progress_bar("episodes", n_episodes, progress, columns=ITEMS, install=_EXTRA) as advance:
        for number, episode in enumerate(episodes):
            rows = _transitions(episode, number, dtype, excluded)
            if len(buffer) + rows.shape[0] > n_steps:
                raise ValueError(f"the data set has more than the {n_steps} steps that it says it has")
            try:
                buffer.extend(rows)
            except ValueError as error:
                raise ValueError(f"episode {number} doesn't fit: {error}") from None
            advance(1)
    if len(buffer) != n_steps:
        raise ValueError(f"the data set says that it has {n_steps} steps, but has {len(buffer)}")
    return buffer


def _load(name: str, download: bool) -> Any:
    try:
        minari = importlib.import_module("minari")
    except ImportError as error:
        raise ImportError(f"from_minari({name!r}) needs Minari: {_EXTRA}") from error
    return minari.load_dataset(name, download=download)


def _transitions(episode: Any, number: int, dtype: torch.dtype | None, excluded: frozenset[Key]) -> TensorDict:
    """One episode as rows. An episode of T steps has T + 1 observations."""
    where = f"episode {number}"
    reward = _tensor(episode.rewards, dtype, ("next", "reward"), where)
    if not reward.is_floating_point():
        reward = reward.to(dtype or torch.float32)
    n = reward.shape[0]
    terminated, truncated = (
        torch.from_numpy(np.array(flags, dtype=bool)).reshape(-1, 1)
        for flags in (episode.terminations, episode.truncations)
    )
    if n == 0 or terminated.shape[0] != n or truncated.shape[0] != n:
        raise ValueError(
            f"{where} has {n} rewards, {terminated.shape[0]} terminations and {truncated.shape[0]} truncations"
        )
    truncated[-1] |= ~terminated[-1]
    entries: dict[Key, Tensor] = {}
    for key, value in _leaves(("observation",), episode.observations, dtype, excluded, where):
        _check_length(key, value, n + 1, where)
        entries[key] = value[:-1]
        entries[("next", *key)] = value[1:]
    for key, value in _leaves(("action",), episode.actions, dtype, excluded, where):
        _check_length(key, value, n, where)
        entries[key] = value
    entries[("next", "reward")] = reward.reshape(n, 1)
    entries[("next", "terminated")] = terminated
    entries[("next", "truncated")] = truncated
    entries[("next", "done")] = terminated | truncated
    entries[("collector", "traj_ids")] = torch.full((n,), number)
    rows = TensorDict(batch_size=[n])
    for key, value in entries.items():
        if not _left_out(key, excluded):
            rows.set(key, value)
    return rows


def _left_out(key: Key, excluded: frozenset[Key]) -> bool:
    return any(key[:length] in excluded for length in range(1, len(key) + 1))


def _leaves(
    key: Key, value: Any, dtype: torch.dtype | None, excluded: frozenset[Key], where: str
) -> Iterator[tuple[Key, Tensor]]:
    """The tensors of a value of a space: of a dictionary or a tuple of spaces, or of one that is neither."""
    if _left_out(key, excluded):
        return
    if isinstance(value, tuple):
        value = {str(position): part for position, part in enumerate(value)}
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _leaves((*key, name), part, dtype, excluded, where)
    else:
        yield key, _tensor(value, dtype, key, where)


def _tensor(value: Any, dtype: torch.dtype | None, key: Key, where: str) -> Tensor:
    array = np.asarray(value)
    if array.dtype.kind not in "biufc" or array.ndim == 0:
        raise TypeError(
            f"{where}: {as_written(key)!r} holds {array.dtype} of shape {list(array.shape)}, which can't be stored; "
            f"leave it out with exclude=[{as_written(key)!r}]"
        )
    # A copy where the array is read-only or of foreign byte order, neither of which PyTorch takes.
    tensor = torch.from_numpy(np.require(array, array.dtype.newbyteorder("="), ["C", "W"]))
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _check_length(key: Key, value: Tensor, n: int, where: str) -> None:
    if value.shape[0] != n:
        raise ValueError(f"{where}: {as_written(key)!r} has {value.shape[0]} entries, expected are {n}")
