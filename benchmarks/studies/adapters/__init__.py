"""Programs' own buffers beside the adapters of ``gpubuf.integrations``: time of each call, and bytes.

``python -m benchmarks.studies.adapters`` fills the program's buffer and ours with the same rows, in one process of the
program's environment (``make bench`` makes them), one thread, and calls them in turn: a shared machine is then equally
slow for both. ``registry.py`` has a line for each table, and a module beside it makes the buffers.
"""
