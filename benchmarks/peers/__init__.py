"""What is measured beside gpubuf, an environment each; never dependencies of it."""
