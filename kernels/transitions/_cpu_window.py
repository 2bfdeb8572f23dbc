"""Windows on the CPU: how many steps each has, its last row, and where the observation behind that one is."""

# Numba needs the real signatures: no `from __future__ import annotations`.

from gpubuf.kernels._jit import jit
from gpubuf.kernels._pointers import prefetch_l2
from gpubuf.kernels.trajectories._cpu_search import divided, load_i64, lowest_bit
from gpubuf.kernels.transitions import ENTRIES, PENDING, SIDE_STRIDE
from gpubuf.kernels.transitions._cpu_convert import read_i32

# A place of a next observation is the row that it is in, if not negative. Else it is one of these, minus twice the
# number of the entry or the environment.
_ASIDE, _PENDING = -1, -2


@jit(forceinline=True)
def _to_first_end(ends, steps, envs, env, step, k):  # type: ignore[no-untyped-def]
    """Steps from ``step`` to the first that ends a trajectory, inclusive; ``k`` if there is none among so many."""
    seen = 0
    while True:
        available = min(64 - (step & 63), steps - step)
        found = lowest_bit(load_i64(ends + 8 * ((step >> 6) * envs + env)) >> (step & 63))
        if found < available:
            return min(seen + found + 1, k)
        seen += available
        if seen >= k:
            return k
        step += available
        step = step if step < steps else 0


@jit(forceinline=True)
def find_windows(ends, written, capacity, envs, n_steps, position, n, length, last):  # type: ignore[no-untyped-def]
    """The steps and the last row of the window of each of ``n`` rows. ``ends`` is 0 if there are none."""
    steps = capacity // envs
    newest = (written // envs + steps - 1) % steps
    if ends != 0:
        for i in range(n):
            step, env = divided(position[i], envs)
            prefetch_l2(ends + 8 * ((step >> 6) * envs + env))
    for i in range(n):
        step, env = divided(position[i], envs)
        k = newest - step + 1 if step <= newest else newest - step + 1 + steps
        k = min(k, n_steps)
        if ends != 0 and k > 1:
            k = _to_first_end(ends, steps, envs, env, step, k)
        length[i] = k
        row = position[i] + (k - 1) * envs
        last[i] = row if row < capacity else row - capacity


@jit(forceinline=True)
def find_next(links, written, capacity, envs, last, n, place):  # type: ignore[no-untyped-def]
    """Where the observation behind each row is. Returns the number of a row whose observation is lost, or -1."""
    steps = capacity // envs
    pending = (written // envs + steps - 1) % steps * envs
    for i in range(n):
        prefetch_l2(links + 4 * last[i])
    lost = -1
    for i in range(n):
        row = last[i]
        link = read_i32(links, row)
        if pending <= row < pending + envs:
            place[i] = _PENDING - 2 * (row - pending)
        elif link > 0:
            place[i] = _ASIDE - 2 * (link - 1)
        else:
            if link < 0:
                lost = i
            place[i] = row + envs if row + envs < capacity else row + envs - capacity
    return lost


@jit(forceinline=True)
def side_address(entry, place):  # type: ignore[no-untyped-def]
    """Address of a next observation that is in no row."""
    number = (_ASIDE - place) >> 1
    return (entry[ENTRIES] if place & 1 else entry[PENDING]) + number * entry[SIDE_STRIDE]
