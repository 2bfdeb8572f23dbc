"""Benchmarks of gpubuf beside its peers: ``make bench``, ``make gpu``."""
