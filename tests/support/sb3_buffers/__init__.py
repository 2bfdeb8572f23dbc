"""Batches of Stable-Baselines3's buffers at given rows, for tests where it is not installed.

``record.py`` makes ``record.json`` in an environment that has it, and trains with our buffers there.
"""
