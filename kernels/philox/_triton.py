"""Philox on the GPU: the jitted helpers that every drawing kernel shares, and the plain uniform kernel."""

import triton
import triton.language as tl


@triton.jit
def philox_uniform_f64(seed, counter):
    """The uniform of stream position ``counter`` (int64, scalar or block) under ``seed`` (int64 scalar): float64.

    ``((hi << 32 | lo) >> 11) * 2**-53`` of the first two words of Philox4x32-10; see :mod:`gpubuf.kernels.philox`.
    """
    low = (counter & 0xFFFFFFFF).to(tl.uint32)
    high = ((counter >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zero = low * 0
    word0, word1, _, _ = tl.philox(seed, low, high, zero, zero)
    # The top 53 of 64 bits, put together without ever setting the sign bit: int64 to float64 is then exact.
    bits = (word0.to(tl.int64) << 21) | (word1.to(tl.int64) >> 11)
    return bits.to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def advance_when_last(rng_ptr, n):
    """Move the random offset by ``n``, once per launch, in the program that gets here last.

    Every program of a one-dimensional grid calls this once, after it has read the offset for the last time.

    rng_ptr: int64 [3] = (seed, offset, ticket); the ticket is zero again afterwards.
    """
    # All threads of this program have read the offset before its ticket is drawn, and the ticket (acquire and
    # release) orders the reads of all programs before the one store below.
    tl.debug_barrier()
    ticket = tl.atomic_add(rng_ptr + 2, 1)
    if ticket == tl.num_programs(0) - 1:
        offset = tl.load(rng_ptr + 1)
        tl.store(rng_ptr + 1, offset + n)
        tl.store(rng_ptr + 2, 0)


@triton.jit
def philox_uniform_kernel(
    rng_ptr,  # int64 [3]: (seed, offset, ticket), advanced
    out_ptr,  # float64 [n]
    n,
    BLOCK: tl.constexpr,
):
    """out[i] = uniform(seed, offset + i). Grid: (cdiv(n, BLOCK),)."""
    seed = tl.load(rng_ptr)
    offset = tl.load(rng_ptr + 1)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, philox_uniform_f64(seed, offset + i), mask=i < n)
    advance_when_last(rng_ptr, n)
