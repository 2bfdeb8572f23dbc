"""TorchRL's side of the buffers: what its users bring along and the core does not need."""

# Pickles name the modules here, which may thus be the first that a process imports. `gpubuf.data` exports what is in
# them, and has to be begun before.
import gpubuf.data  # noqa: F401
