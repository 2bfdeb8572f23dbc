"""``gpubuf tune``: finds the fastest configurations of the kernels on this device, for the sizes that a user has.

``shapes`` holds these sizes, ``operations`` lists the points to tune and the configurations to try, ``workloads`` the
calls and their checks. ``timing`` times them, ``search`` chooses, ``files`` writes the file that
:mod:`gpubuf.kernels.config` reads, ``report`` shows progress and results. The command is `gpubuf.commands.tune`.
"""
