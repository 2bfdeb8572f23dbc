"""The low layer of gpubuf: operations on tensors, with no buffer in sight.

Each family of operations is a package of the same files, which share one vocabulary:

* ``__init__.py``: the schema of every operation, its documentation, and its fake (meta) implementation;
* ``_launch.py``: plans how Triton kernels cut their work up, and launches them;
* ``_triton.py``, ``_triton_*.py``: ``@triton.jit`` functions only;
* ``_cpu.py``: the CPU backend in plain PyTorch;
* ``_numba.py``, ``_numba_*.py``, of rows, the sum tree, trajectories and philox: what is called in its place where
  Numba is installed, and the loops that Numba compiles;
* ``_check.py``, where there is one: checks of arguments, for both backends.

``tests/kernels/reference/`` has the definition of the operations in plain Python and PyTorch. Read it first.

Operations are registered with ``torch.library``, so PyTorch's dispatcher picks the backend by the tensors' device;
eager calls on plain tensors go past it, by the same rule. Nothing here imports from the rest of gpubuf.
"""

if __name__ != "gpubuf.kernels":
    raise ImportError(
        f"this package was imported as {__name__!r}; its import name is 'gpubuf.kernels' "
        "(a top-level 'kernels' would overwrite another well-known package)"
    )
