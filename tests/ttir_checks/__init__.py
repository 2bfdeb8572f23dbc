"""Tests that run in a process of their own with tests/support/ttir/plugin.py: tests/test_ttir.py starts them."""
