"""What every operation of a buffer has to know: whether a graph records it, and whether one before it was cut short."""
