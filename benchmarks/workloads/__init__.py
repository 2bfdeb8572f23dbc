"""What is timed: data, operations, checks."""
