"""Executes the PTX that Triton makes of a kernel for sm_90, sm_80 or sm_120 on CPU tensors, and counts what it costs.

It continues where tests/gates/ttir ends: layouts, vector accesses, shuffles, shared memory and barriers exist only
here. :mod:`.parse` reads the text, :mod:`.emitter` translates each basic block to NumPy over all lanes,
:mod:`.machine` runs programs and checks what they do, :mod:`.launch` takes the place of Triton's launches.

Warps run in lockstep, or a random part of them runs ahead to the next barrier. Several programs of a grid run at once.
Atomics are applied one after another, in random order. Copies to shared memory arrive when they are waited for; where
warps run ahead, some at once. Products of matrices are ``mma``: those of sm_90 for groups of warps, ``wgmma``, raise
:exc:`~tests.gates.ptx.emitter.NotExecutedError`. TF32 is truncated to 10 bits of mantissa, as tensor cores do.

Not seen: what ptxas does, how tensor cores round sums, caches, and the order of accesses to memory by lanes of
different programs. Functions that the device approximates are exact here, and denormal floats are kept.
"""
