"""Measurements of one thing each, beside the comparison with other libraries."""
