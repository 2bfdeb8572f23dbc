"""Checkpoints: saving a buffer to a folder, and loading it."""
