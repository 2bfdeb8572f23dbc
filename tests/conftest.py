"""Shared fixtures. Triton's interpreter must be chosen before Triton is imported, hence the lines at the top."""

import os

# The gpu-marked tests compile for the real device; everything else runs the kernels on CPU tensors.
if os.environ.get("GPUBUF_TEST_GPU") != "1":
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch

from gpubuf.kernels._registry import triton_on_cpu

torch.set_num_threads(1)


@pytest.fixture(params=["numba", "triton"])
def backend(request: pytest.FixtureRequest):
    """Run a test through the CPU twins and again through the Triton launchers under the interpreter."""
    with triton_on_cpu(request.param == "triton"):
        yield request.param
