"""Measurements of gpubuf alone, one command each: ``python -m benchmarks.studies.<name>``.

Every study writes one file of results, and has the function that turns such a file into a block of a page.
"""
