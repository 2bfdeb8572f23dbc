"""``python -m gpubuf.kernels.aot [TARGET ...]``: compile every kernel and print registers, spills and accesses."""

from gpubuf.kernels.aot.compiler import main

main()
