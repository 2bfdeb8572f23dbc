"""Samplers: which rows a batch is made of."""
