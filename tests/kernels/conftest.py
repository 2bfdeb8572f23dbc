"""Tests of kernels run on both backends, in quick runs too."""

import pytest

from gpubuf.kernels._registry import triton_on_cpu


@pytest.fixture(params=["numba", "triton"])
def backend(request: pytest.FixtureRequest):
    """Run a test through the CPU twins and again through the Triton launchers under the interpreter."""
    with triton_on_cpu(request.param == "triton"):
        yield request.param
