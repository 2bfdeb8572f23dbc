"""Storages: the memory of rows."""
