"""Lambda returns on the GPU, computed in REAL, float32 or float64, whatever the dtypes of the arguments."""

import triton
import triton.language as tl

from gpubuf.kernels.td._triton import next_value


@triton.jit(do_not_specialize=["n", "n_sequences", "length"])
def soft_lambda_return_kernel(
    next_q_ptr,  # any float [n_nets, n]
    next_log_prob_ptr,  # any float [n], read where HAS_LOG_PROB
    alpha_ptr,  # any float [1], read where HAS_LOG_PROB
    reward_ptr,  # any number [n]
    terminated_ptr,  # bool as uint8, or any number [n]
    done_ptr,  # bool as uint8, or any number [n]
    mask_ptr,  # uint8 [n], read where HAS_MASK
    gamma_ptr,  # any float [1]
    lmbda_ptr,  # any float [1]
    steps_ptr,  # any number [n], read where HAS_STEPS
    target_ptr,  # REAL [n], out
    n,
    n_sequences,
    length,
    inner,
    n_nets,
    REAL: tl.constexpr,
    HAS_LOG_PROB: tl.constexpr,
    HAS_STEPS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    COMBINE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """target_t = reward_t + (terminated ? 0 : gamma^steps * (last ? V_t : (1 - lmbda) V_t + lmbda target_{t+1})).

    V_t is the value of soft_td_target_kernel. Rows are [.., length, inner]; a lane has one sequence.
    Grid: (cdiv(n_sequences, BLOCK),).
    """
    sequence = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = sequence < n_sequences
    width = inner + tl.zeros([BLOCK], tl.int64)
    # The last row of each sequence.
    row = (sequence // width) * width * length + (length - 1) * width + sequence % width
    gamma = tl.load(gamma_ptr).to(tl.float64)
    lmbda = tl.load(lmbda_ptr).to(tl.float64).to(REAL)
    target = tl.zeros([BLOCK], REAL)
    follows = tl.zeros([BLOCK], tl.int1)
    for _ in range(length):
        entropy = (next_log_prob_ptr, alpha_ptr) if HAS_LOG_PROB else None
        steps = steps_ptr if HAS_STEPS else None
        value, discount = next_value(next_q_ptr, entropy, steps, gamma, row, inside, n, n_nets, REAL, COMBINE)
        done = tl.load(done_ptr + row, mask=inside, other=0) != 0
        terminated = tl.load(terminated_ptr + row, mask=inside, other=0) != 0
        reward = tl.load(reward_ptr + row, mask=inside, other=0).to(REAL)
        value = tl.where(follows & (done == 0), (1 - lmbda) * value + lmbda * target, value)
        target = reward + tl.where(terminated, 0.0, discount * value)
        tl.store(target_ptr + row, target, mask=inside)
        follows = inside
        if HAS_MASK:
            follows = inside & (tl.load(mask_ptr + row, mask=inside, other=0) != 0)
        row -= width
