"""``gpubuf tune``: finds the fastest configurations of the kernels on this device, for the sizes that a user has.

``operations`` holds these sizes, the points to tune and the configurations to try, ``workloads`` the calls and their
checks. ``timing`` times them, ``search`` chooses, ``report`` shows the results and writes the file that
:mod:`gpubuf.kernels.config` reads. The command is `gpubuf.commands.tune`.
"""
