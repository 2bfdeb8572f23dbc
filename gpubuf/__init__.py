"""GPU-resident replay buffers for PyTorch, built on Triton kernels."""

__version__ = "0.1.0"
