"""Executes Triton kernels on CPU tensors as the compiler sees them, and looks at every access to memory.

A launch is specialised and compiled by Triton itself, for sm_90, up to TTIR, its first intermediate language. That is
translated to Python (:mod:`.ir`, :mod:`.emitter` and the modules whose name starts with ``emit_``) and executed in
NumPy on real CPU tensors (:mod:`.machine`), the programs and the lanes of a store in random order. What Triton's
interpreter hides shows here: values that the compiler does not carry through a loop (:mod:`.aliases`), constants that a
specialisation makes of arguments, code that does not compile. :mod:`.detect` looks for races between programs, barriers
that are missing within one, and accesses out of bounds, misaligned or uninitialised.

``python -m pytest -p tests.gates.ttir.plugin -n 0 -k "not numba" tests/kernels/test_rows.py`` runs a file of tests
so; tests/gates/test_ttir.py runs every kernel.

Not seen: what Triton's later passes, LLVM and ptxas do. Floats are NumPy's: no fused multiply-add, exact functions.
Programs run one after another, so that a race shows in what is accessed and not in what comes out, and a program that
waits for another one never ends. Only accesses that a test makes are looked at.
"""
