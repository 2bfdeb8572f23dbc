"""Threads and streams: the lock of a buffer, prefetching, pinned batches."""
