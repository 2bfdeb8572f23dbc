"""Optimisers: AdamW, weight rows of fixed length and target networks in one pass over the parameters."""

from gpubuf.optim.adamw import AdamW

__all__ = ["AdamW"]
