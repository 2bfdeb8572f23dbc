"""Launches the kernel of lambda returns."""

from __future__ import annotations

import torch
from torch import Tensor

from gpubuf.kernels._differentiable import computing_dtype, dense
from gpubuf.kernels._launching import cdiv, launch
from gpubuf.kernels.td import SMALLEST, check_return, check_target
from gpubuf.kernels.td._launch import REAL, optional
from gpubuf.kernels.td._triton_returns import soft_lambda_return_kernel

SEQUENCES = 32
"""Sequences of a program, one a lane of its only warp: each step waits for the one before, so spread them widely."""


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
    target = torch.empty(shape, dtype=real, device=next_q.device)
    n_sequences, n = check_return(target, done, mask, lmbda, length, inner)
    if n:
        launch(
            soft_lambda_return_kernel,
            cdiv(n_sequences, SEQUENCES),
            dense(next_q),
            optional(next_log_prob, next_q),
            optional(alpha, next_q),
            dense(reward),
            dense(terminated),
            dense(done),
            optional(mask, next_q),
            gamma,
            lmbda,
            optional(steps, next_q),
            target,
            n,
            n_sequences,
            length,
            inner,
            next_q.shape[0],
            REAL=REAL[real],
            HAS_LOG_PROB=next_log_prob is not None,
            HAS_STEPS=steps is not None,
            HAS_MASK=mask is not None,
            COMBINE=combine,
            BLOCK=SEQUENCES,
            num_warps=1,
        )
    return target
