"""Buffers: a storage, a sampler and a writer behind one interface."""
