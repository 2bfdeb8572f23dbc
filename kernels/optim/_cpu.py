"""The optimiser's step by PyTorch's fused AdamW."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

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
    entries: list[list[int]] = table.view(-1, ENTRY).tolist()
    # What is empty has no address.
    some, others = (iter([each for each in tensors if each.numel()]) for tensors in (moments, targets))
    moments_of = {i: (next(some), next(some)) for i, entry in enumerate(entries) if entry[EXP_AVG]}
    targets_of = {i: next(others) for i, entry in enumerate(entries) if entry[TARGET]}
    count = steps.unbind()
    if all(grad is not None for grad in grads):
        steps.add_(1)
    elif counted := [own for own, grad in zip(count, grads, strict=True) if grad is not None]:
        torch._foreach_add_(counted, 1)
    for group, rule in enumerate(hyper.tolist()):
        mine = [i for i, entry in enumerate(entries) if entry[GROUP] == group and params[i].numel()]
        chosen = [(i, grad) for i in mine if (grad := grads[i]) is not None]
        if chosen:
            first, second = ([moments_of[i][which] for i, _ in chosen] for which in (0, 1))
            # Of bfloat16 parameters in float32, as their moments are.
            real = first[0].dtype
            own, given = [params[i] for i, _ in chosen], [grad for _, grad in chosen]
            if real is not own[0].dtype:
                own, given = ([each.to(real) for each in tensors] for tensors in (own, given))
            if norm is not None:
                clip = (rule[MAX_NORM] / (norm.reshape(()).double() + 1e-6)).clamp_(max=1)
                given = list(torch._foreach_mul(given, clip.to(real)))
            torch._fused_adamw_(
                own, given, first, second, [], [count[i] for i, _ in chosen], lr=rule[LR], beta1=rule[BETA1],
                beta2=rule[BETA2], weight_decay=rule[WEIGHT_DECAY], eps=rule[EPS], amsgrad=False, maximize=False,
            )  # fmt: skip
            if unit_rows:
                _normalise(own, [entries[i] for i, _ in chosen])
            if real is not params[0].dtype:
                torch._foreach_copy_([params[i] for i, _ in chosen], own)
        moving = [i for i in mine if averages[i] and i in targets_of]
        if moving:
            torch._foreach_lerp_([targets_of[i] for i in moving], [params[i] for i in moving], rule[TAU])


def _normalise(params: Iterable[Tensor], entries: Iterable[list[int]]) -> None:
    """Bring rows to their length."""
    for param, entry in zip(params, entries, strict=True):
        if entry[LENGTH]:
            (norm,) = struct.unpack("d", struct.pack("q", entry[NORM]))
            rows = param.as_strided((param.numel(),), (1,)).view(-1, entry[LENGTH], entry[INNER])
            rows *= norm / torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp_(min=SMALLEST_NORM)
