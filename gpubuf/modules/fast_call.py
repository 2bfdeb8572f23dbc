"""Recognises modules on TensorDicts that are plain functions of tensors: they can be called without a TensorDict."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from tensordict.utils import NestedKey
from torch import Tensor, nn


def hooked(module: nn.Module) -> bool:
    """Whether hooks run when ``module`` itself is called."""
    # Asked several times per loss: no loop.
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def is_plain(network: Any, outputs: int = 1) -> bool:
    """Whether ``network`` only calls ``network.module`` on the tensors at its keys, with so many outputs."""
    return (
        type(network) is TensorDictModule
        and len(network.out_keys) == outputs
        and network._kwargs is None
        and not (network.method_kwargs or network._get_kwargs)
        and not (network._forward_hooks or network._forward_pre_hooks)
        and not (network._backward_hooks or network._backward_pre_hooks)
    )


def entries(tensordict: TensorDictBase, keys: Iterable[NestedKey]) -> list[Tensor]:
    """The tensors at ``keys``; KeyError if one is missing."""
    found = []
    for key in keys:
        value: Tensor | None = tensordict.get(key, None)
        found.append(entry(tensordict, key) if value is None else value)
    return found


def output(network: Any, tensordict: TensorDictBase, key: NestedKey) -> Tensor:
    """What ``network`` writes at ``key`` for a batch, which stays as it is."""
    if is_plain(network) and network.out_keys[0] == key:
        value: Tensor = network.module(*entries(tensordict, network.in_keys))
        return value
    return entry(network(tensordict.exclude(key)), key)


def entry(tensordict: TensorDictBase, key: NestedKey) -> Tensor:
    """The tensor at ``key``.

    Raises:
        KeyError: there is none.
    """
    value: Tensor | None = tensordict.get(key, None)
    if value is None:
        raise KeyError(f"the entry {key!r} is missing; there are {sorted(tensordict.keys(True, True), key=str)}")
    return value
