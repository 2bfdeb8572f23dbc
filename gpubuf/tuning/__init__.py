"""``gpubuf tune``: finds the fastest configurations of the kernels on this device, for the sizes that a user has.

``workloads`` has the points to tune, the configurations to try and the calls that are timed. ``search`` times them,
chooses, and writes the file that :mod:`gpubuf.kernels.config` reads. The command is `gpubuf.commands.tune`.
"""
