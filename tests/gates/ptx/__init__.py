"""Executes the PTX that Triton makes of a kernel for sm_90, on CPU tensors, and counts what it costs.

It continues where tests/gates/ttir ends: layouts, vector accesses, shuffles, shared memory and barriers exist only
here. :mod:`.parse` reads the text, :mod:`.emitter` translates each basic block to NumPy over all lanes,
:mod:`.machine` runs programs and checks what they do, :mod:`.launch` takes the place of Triton's launches.

Warps run in lockstep, or a random part of them runs ahead to the next barrier. Several programs of a grid run at once.
Atomics are applied one after another, in random order.

Not seen: what ptxas does, caches, and the order of accesses to memory by lanes of different programs. Functions that
the device approximates are exact here, and denormal floats are kept.
"""
