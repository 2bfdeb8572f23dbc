"""The definitions of the operations in plain Python and PyTorch, and the oracles of their tests."""
