"""Kernels that the ahead-of-time gate has to refuse, so that the gate itself is tested."""

import triton
import triton.language as tl

from tests.aot import AotSpec


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


SPECS = [
    AotSpec("tests.faulty_kernels:spilling", {"x_ptr": "*fp32"}, {"block": 16384}, num_warps=1),
    AotSpec("tests.faulty_kernels:changing_type", {"x_ptr": "*fp32", "n": "i32"}),
]
