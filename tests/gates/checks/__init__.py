"""Tests that tests/gates/test_ttir.py runs in a process of their own, with tests/gates/ttir/plugin.py."""
