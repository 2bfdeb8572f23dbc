"""Running statistics in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from gpubuf.kernels.moments import (
    ACTIVE,
    COUNT,
    EPS,
    GAMMA,
    M2,
    MEAN,
    PEAK,
    PEAK_AT,
    UNTIL,
    check_returns,
    check_update,
)


def update(state: Tensor, source: Tensor, mean: Tensor, factor: Tensor, rule: Tensor, tickets: Tensor) -> None:
    """See :data:`gpubuf.kernels.moments.update`."""
    check_update(state, source, mean, factor, rule)
    if len(source) and rule[ACTIVE]:
        _merge(state, source.double(), rule)
    spread = (state[M2] / state[COUNT] + rule[EPS]).sqrt()
    scale = torch.maximum(spread, state[PEAK] / rule[PEAK_AT])
    factor.copy_(torch.where(state[COUNT] > 0, 1 / scale, 1.0))
    mean.copy_(state[MEAN])


def _merge(state: Tensor, rows: Tensor, rule: Tensor) -> None:
    finite = rows.isfinite()
    count = finite.sum(0).double()
    rows = rows.where(finite, 0.0)
    mean = rows.sum(0) / count.clamp(min=1)
    m2 = (rows - mean).where(finite, 0.0).square().sum(0)
    before = state[COUNT]
    counts = (count > 0) & (before < rule[UNTIL])
    now = before + count
    share, step = count / now, mean - state[MEAN]
    merged = torch.stack((
        now,
        state[MEAN] + step * share,
        state[M2] + m2 + step * step * before * share,
        torch.maximum(state[PEAK], rows.abs().amax(0)),
    ))  # fmt: skip
    state.copy_(merged.where(counts, state))


def returns(before: Tensor, rewards: Tensor, ends: Tensor, rule: Tensor) -> Tensor:
    """See :data:`gpubuf.kernels.moments.returns`."""
    check_returns(before, rewards, ends, rule)
    out = rewards.double()
    out = out.where(out.isfinite(), 0.0)
    gamma, ended = rule[GAMMA], ends.unsqueeze(-1)
    for t in range(len(out)):
        out[t] += before
        before.copy_((gamma * out[t]).masked_fill_(ended[t], 0.0))
    return out
