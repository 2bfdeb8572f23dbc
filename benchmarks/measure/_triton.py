"""Kernels that measure the device itself: one that does nothing, and one that only copies."""

import triton
import triton.language as tl


@triton.jit
def empty_kernel(x_ptr):
    """Takes as long as a launch. Grid: (1,)."""
    # x_ptr: any tensor; not read


@triton.jit
def copy_kernel(target_ptr, source_ptr, blocks, BLOCK: tl.constexpr):
    """``target = source``; each program copies every so many-th block. Grid: any number of programs."""
    # target_ptr, source_ptr: [blocks * BLOCK] int32
    lane = tl.arange(0, BLOCK)
    for block in range(tl.program_id(0).to(tl.int64), blocks, tl.num_programs(0)):
        at = block * BLOCK + lane
        tl.store(target_ptr + at, tl.load(source_ptr + at))
