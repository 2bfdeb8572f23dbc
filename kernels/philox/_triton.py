"""Philox on the GPU: the jitted helpers that every drawing kernel shares, and the plain uniform kernel."""

import triton
import triton.language as tl

from gpubuf.kernels import philox

# Places in ``rng_ptr``.
SEED, OFFSET, TICKET = map(tl.constexpr, range(philox.TICKET + 1))

RESOLUTION = tl.constexpr(philox.RESOLUTION)


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
    return bits.to(tl.float64) * RESOLUTION


@triton.jit
def low_half(ticket_ptr):
    """Where the lower 32 bits of an int64 are, as all programs have no more: each holds its ticket to its end."""
    return ticket_ptr.to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def take_ticket(ticket_ptr):
    """The number of programs that took a ticket before this one, in the first lane of a block that is else undefined.

    Every program of a one-dimensional grid calls this once, after it has read the state that the last one changes,
    and hands the result to :func:`is_last` at its end. The ticket orders these reads only, and nothing is in flight
    yet that it would have to wait for; taken at the end, it would wait for every store of the program.
    """
    # All threads of the program have read the state. The barrier and the release put their reads before the ticket.
    tl.debug_barrier()
    # A block, as a scalar would be handed to all warps: only one waits for the atomic, where its result is used.
    lane = tl.arange(0, 128)
    return tl.atomic_add(low_half(ticket_ptr) + lane * 0, 1, mask=lane == 0, sem="release")


@triton.jit
def is_last(ticket_ptr, ticket):
    """bool [128]: true in one lane of the program that took the last ticket. It may store; the tickets start anew."""
    lane = tl.arange(0, 128)
    last = (lane == 0) & (ticket == tl.num_programs(0) - 1)
    # The tickets are one chain of atomics: to acquire its end puts every program's reads before what follows.
    tl.atomic_xchg(low_half(ticket_ptr) + lane * 0, lane * 0, mask=last, sem="acquire")
    return last


@triton.jit
def advance_state(rng_ptr, ticket, offset):
    """Set the random offset, once per launch, in the program that took the last ticket of the random state."""
    last = is_last(rng_ptr + TICKET, ticket)
    lane = tl.arange(0, 128).to(tl.int64) * 0
    tl.store(rng_ptr + OFFSET + lane, lane + offset, mask=last)


@triton.jit(do_not_specialize=["n"])
def philox_uniform_kernel(
    rng_ptr,  # int64 [3]: (seed, offset, ticket), advanced
    out_ptr,  # float64 [n]
    n,
    BLOCK: tl.constexpr,
):
    """out[i] = uniform(seed, offset + i). Grid: (cdiv(n, BLOCK),)."""
    seed = tl.load(rng_ptr + SEED)
    offset = tl.load(rng_ptr + OFFSET)
    ticket = take_ticket(rng_ptr + TICKET)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, philox_uniform_f64(seed, offset + i), mask=i < n)
    advance_state(rng_ptr, ticket, offset + n)
