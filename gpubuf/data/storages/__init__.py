"""Storages: where rows live."""
