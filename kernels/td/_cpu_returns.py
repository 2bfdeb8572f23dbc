"""Lambda returns on the CPU. One kernel serves both precisions, as in ``_cpu.py``."""

# Numba needs the real signatures: no `from __future__ import annotations`.

import torch
from numba import carray
from torch import Tensor

from gpubuf.kernels._differentiable import computing_dtype, dense
from gpubuf.kernels._floats import read, write
from gpubuf.kernels._jit import OPTIONS, jit
from gpubuf.kernels._pointers import as_u8
from gpubuf.kernels.td import SMALLEST, check_return, check_target
from gpubuf.kernels.td._cpu_reduce import address, one_critic


@jit(
    "void(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64,"
    " boolean, int64)",
    **OPTIONS,
)
def _soft_lambda_return(  # type: ignore[no-untyped-def]
    next_q, next_log_prob, alpha, reward, terminated, done, mask, gamma, lmbda, steps, length, inner, combine, n, nets,
    wide, target,
):  # fmt: skip
    discount, share = read(gamma, True, 0), read(lmbda, True, 0)
    temperature = read(alpha, wide, 0) if alpha else 0.0
    ended, finished = carray(as_u8(terminated), n), carray(as_u8(done), n)
    for first in range(0, n, length * inner):
        # Step by step from the last, all rows of a step together: they lie next to each other.
        for row in range(first + length * inner - 1, first - 1, -1):
            y = read(reward, wide, row)
            if not ended[row]:
                value, _ = one_critic(next_q, wide, n, nets, row, combine)
                if next_log_prob:
                    value -= temperature * read(next_log_prob, wide, row)
                after = row + inner
                follows = after < first + length * inner and not finished[row]
                if follows and mask:
                    follows = carray(as_u8(mask), n)[after] != 0
                if follows:
                    value = (1 - share) * value + share * read(target, wide, after)
                y += (discount ** read(steps, wide, row) if steps else discount) * value
            write(target, wide, row, y)


def soft_lambda_return(
    next_q: Tensor,
    next_log_prob: Tensor | None,
    alpha: Tensor | None,
    reward: Tensor,
    terminated: Tensor,
    done: Tensor,
    mask: Tensor | None,
    gamma: Tensor,
    lmbda: Tensor,
    steps: Tensor | None,
    length: int,
    inner: int,
    combine: int = SMALLEST,
) -> Tensor:
    """See :data:`gpubuf.kernels.td.soft_lambda_return`."""
    shape = check_target(next_q, next_log_prob, alpha, reward, terminated, gamma, steps, combine)
    real = computing_dtype(next_q)
    target = torch.empty(shape, dtype=real)
    _, n = check_return(target, done, mask, lmbda, length, inner)
    if not n:
        return target
    next_q = dense(next_q, real)
    next_log_prob = None if next_log_prob is None else dense(next_log_prob, real)
    alpha = None if alpha is None else dense(alpha, real)
    reward, terminated, done = dense(reward, real), dense(terminated, torch.bool), dense(done, torch.bool)
    mask = None if mask is None else dense(mask, torch.bool)
    gamma, lmbda = dense(gamma, torch.float64), dense(lmbda, torch.float64)
    steps = None if steps is None else dense(steps, real)
    _soft_lambda_return(
        next_q.data_ptr(),
        address(next_log_prob),
        address(alpha),
        reward.data_ptr(),
        terminated.data_ptr(),
        done.data_ptr(),
        address(mask),
        gamma.data_ptr(),
        lmbda.data_ptr(),
        address(steps),
        length,
        inner,
        combine,
        n,
        next_q.shape[0],
        real is torch.float64,
        target.data_ptr(),
    )
    return target
