"""Kernels that the ahead-of-time gate has to refuse, so that the gate itself is tested."""

import triton
import triton.language as tl

from tests.gates.aot.spec import AotSpec


@triton.jit
def spilling(x_ptr, block: tl.constexpr):
    """Holds more values at once than one warp has registers."""
    offsets = tl.arange(0, block)
    tl.store(x_ptr + offsets, tl.load(x_ptr + offsets) + tl.sum(tl.load(x_ptr + offsets * 3)))


@triton.jit
def changing_type(x_ptr, n):
    """Carries an int32 into a loop that turns it into a float32: the interpreter runs it, the compiler refuses."""
    total = 0
    for i in range(n):
        total += tl.load(x_ptr + i)
    tl.store(x_ptr, total)


@triton.jit
def irreducible(x_ptr, rounds, block: tl.constexpr):
    """The condition of a loop is a reduction over the program, and so are barriers inside it."""
    offsets = tl.arange(0, block)
    for _ in range(rounds):
        word = tl.load(x_ptr + offsets)
        total = word * 0
        more = tl.max((word != 0).to(tl.int32), 0)
        while more > 0:
            total += word & -word
            word = word & (word - 1)
            more = tl.max((word != 0).to(tl.int32), 0)
        tl.store(x_ptr + offsets, total)
        tl.debug_barrier()


SPECS = [
    AotSpec("tests.gates.faulty_kernels:spilling", {"x_ptr": "*fp32"}, {"block": 16384}, num_warps=1),
    AotSpec("tests.gates.faulty_kernels:changing_type", {"x_ptr": "*fp32", "n": "i32"}),
    AotSpec("tests.gates.faulty_kernels:irreducible", {"x_ptr": "*i64", "rounds": "i32"}, {"block": 128}, num_warps=2),
]
