"""The optimiser's step by PyTorch's fused AdamW."""

from __future__ import annotations

import struct
from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from gpubuf.kernels.optim import (
    BETA1,
    BETA2,
    ENTRY,
    EPS,
    EXP_AVG,
    GROUP,
    INNER,
    LENGTH,
    LR,
    MAX_NORM,
    NORM,
    SMALLEST_NORM,
    TARGET,
    TAU,
    WEIGHT_DECAY,
)
from gpubuf.kernels.optim._check import check_step


def adamw(
    table: Tensor, tiles: Tensor, hyper: Tensor, grads: Sequence[Tensor | None], averages: Sequence[bool],
    norm: Tensor | None, steps: Tensor, ticket: Tensor, params: Sequence[Tensor], moments: Sequence[Tensor],
    targets: Sequence[Tensor], aligned: bool, unit_rows: bool, *, trusted: bool = False,
) -> None:  # fmt: skip
    """See :data:`gpubuf.kernels.optim.adamw`. A trusted call comes from an optimiser, which owns all but gradients."""
    if not trusted:
        check_step(table, hyper, grads, averages, steps, params)
    parts = _parts_of.get(table) if trusted else None
    if parts is None:
        parts = _parts(table, params, moments, targets, steps)
        if trusted:
            _parts_of[table] = parts
    if all(grad is not None for grad in grads):
        steps.add_(1)
    elif counted := [own for own, grad in zip(steps.unbind(), grads, strict=True) if grad is not None]:
        torch._foreach_add_(counted, 1)
    for rule, part in zip(hyper.tolist(), parts, strict=False):
        chosen = [each for each in part.optimised if grads[each[0]] is not None]
        if chosen:
            places, own, first, second, count = (list(each) for each in zip(*chosen, strict=True))
            given: list[Any] = [grads[i] for i in places]
            # Of bfloat16 parameters in float32, as their moments are.
            real, short = first[0].dtype, own
            if real is not own[0].dtype:
                own, given = ([each.to(real) for each in tensors] for tensors in (own, given))
            if norm is not None:
                clip = (rule[MAX_NORM] / (norm.reshape(()).double() + 1e-6)).clamp_(max=1)
                given = list(torch._foreach_mul(given, clip.to(real)))
            torch._fused_adamw_(
                own, given, first, second, [], count, lr=rule[LR], beta1=rule[BETA1], beta2=rule[BETA2],
                weight_decay=rule[WEIGHT_DECAY], eps=rule[EPS], amsgrad=False, maximize=False,
            )  # fmt: skip
            if unit_rows:
                _normalise(own, [part.entries[i] for i in places])
            if short is not own:
                torch._foreach_copy_(short, own)
        moving = [each for i, *each in part.followed if averages[i]]
        if moving:
            followers, sources = zip(*moving, strict=True)
            torch._foreach_lerp_(followers, sources, rule[TAU])


class _Part(NamedTuple):
    """What is in a table of one group, without entries that are empty.

    Attributes:
        entries: of the table, by place.
        optimised: (place, parameter, first moment, second moment, step).
        followed: (place, target, source).
    """

    entries: list[list[int]]
    optimised: list[tuple[Any, ...]]
    followed: list[tuple[Any, ...]]


def _parts(
    table: Tensor, params: Sequence[Tensor], moments: Sequence[Tensor], targets: Sequence[Tensor], steps: Tensor
) -> list[_Part]:
    """Those of the groups, in order."""
    entries: list[list[int]] = table.view(-1, ENTRY).tolist()
    parts = [_Part(entries, [], []) for _ in range(max((entry[GROUP] for entry in entries), default=-1) + 1)]
    # What is empty has no address.
    some, others = (iter([each for each in tensors if each.numel()]) for tensors in (moments, targets))
    for i, (entry, param, step) in enumerate(zip(entries, params, steps.unbind(), strict=True)):
        if param.numel() and entry[EXP_AVG]:
            parts[entry[GROUP]].optimised.append((i, param, next(some), next(some), step))
        if param.numel() and entry[TARGET]:
            parts[entry[GROUP]].followed.append((i, next(others), param))
    return parts


# By the table of an optimiser, whose tensors are the same in every step.
_parts_of: MutableMapping[Tensor, list[_Part]] = WeakIdKeyDictionary()


def _normalise(params: Iterable[Tensor], entries: Iterable[list[int]]) -> None:
    """Bring rows to their length."""
    for param, entry in zip(params, entries, strict=True):
        if entry[LENGTH]:
            (norm,) = struct.unpack("d", struct.pack("q", entry[NORM]))
            rows = param.as_strided((param.numel(),), (1,)).view(-1, entry[LENGTH], entry[INNER])
            rows *= norm / torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp_(min=SMALLEST_NORM)
