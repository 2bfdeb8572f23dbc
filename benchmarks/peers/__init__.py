"""An adapter for each library that is measured, and the rows that all of them store.

The libraries are never dependencies of gpubuf: each has an environment of its own, from the ``.txt`` files here.
"""
