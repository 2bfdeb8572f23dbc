"""How a call is measured, and what no call can be faster than."""
