"""``python -m tests.support.aot [TARGET ...]``: compile every kernel and print registers, spills and accesses."""

from tests.support.aot.compiler import main

main()
