"""``python -m gpubuf.kernels.aot [TARGET ...]``: what the compiler makes of every kernel."""

from gpubuf.kernels.aot.compiler import main

main()
