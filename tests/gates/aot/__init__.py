"""Ahead-of-time compilation of every kernel, for targets that this machine does not have."""
