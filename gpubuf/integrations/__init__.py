"""Adapters for other programs: one module for each, with that program's names. Nothing is imported here.

An adapter imports its program only inside, where it needs it, and says in one sentence if that is missing.
"""
