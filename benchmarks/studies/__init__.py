"""Measurements with a command each: ``python -m benchmarks.studies.<name>``. Every study writes one file of results."""
