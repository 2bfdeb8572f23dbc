"""TorchRL's side of the buffers: what its users bring along and the core does not need."""
