"""What TorchRL's own tests of replay buffers look at, as facts that its classes and gpubuf's can be asked for."""
