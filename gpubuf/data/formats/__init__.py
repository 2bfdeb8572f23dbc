"""Buffers from and to the files of other libraries."""
