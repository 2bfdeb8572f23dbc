"""``python -m tests.gates.aot [TARGET ...]``: compile every kernel and print registers, spills and accesses."""

from tests.gates.aot.compiler import main

main()
