"""Tests that tests/kernels/test_ttir.py runs in a process of their own, with tests/support/ttir/plugin.py."""
