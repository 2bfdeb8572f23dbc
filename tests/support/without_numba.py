"""A plugin of pytest: as if Numba were not installed. The tests of the CPU then run its plain definitions.

``pytest -p tests.support.without_numba -n 0 -k "not triton" tests/kernels/test_rows.py``
"""

import sys

sys.modules["numba"] = None  # type: ignore[assignment]
