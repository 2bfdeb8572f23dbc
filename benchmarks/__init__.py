"""Benchmarks of gpubuf beside its peers: ``python -m benchmarks``, ``make bench``, ``make gpu``.

The rooms, each of which imports only those before it: ``measure`` (clocks, machine, files of results),
``peers`` (an adapter for each library), ``workloads`` (the registry of what is timed) and ``studies`` (a command each).
``run``, ``report`` (the one writer of tables), ``stages`` and ``__main__`` are the commands.
"""
