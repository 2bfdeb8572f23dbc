"""The buffer calls of programs that people run with TorchRL, and what TorchRL gives them."""
