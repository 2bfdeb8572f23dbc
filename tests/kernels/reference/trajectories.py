"""The definition of the trajectory index's operations: walk over all steps. Slow, and read by tests only.

A trajectory, and a slice, is the list of its rows in order of time. An age counts steps from the oldest one stored.
"""

from gpubuf.kernels.trajectories import Rule


def trajectories(signals: list[list[int]], steps: int, envs: int, written: int, by_id: bool) -> list[list[int]]:
    """``signals[age][env]`` of the steps in a ring of ``steps``, into which ``written`` have been written so far."""
    found, newest = [], len(signals) - 1
    for env in range(envs):
        trajectory = []
        for age, step in enumerate(signals):
            trajectory.append((written - len(signals) + age) % steps * envs + env)
            if age == newest or (step[env] != signals[age + 1][env] if by_id else step[env]):
                found.append(trajectory)
                trajectory = []
    return found


def offsets(rule: Rule, length: int) -> list[int]:
    """The steps of a trajectory that a slice may begin at; negative ones lie before it, if the rule allows them."""
    n = min(rule.slice_len, length)
    cuts = {offset: (max(0, -offset), max(0, offset + n - length)) for offset in range(-n, length + 1)}
    allowed = [at for at, (a, b) in cuts.items() if a <= rule.before and b <= rule.after and max(a, b) < n]
    return allowed if length >= rule.min_len else []


def counted(found: list[list[int]], left_out: set[int], before: int = 0) -> list[list[int]]:
    """What counts of trajectories: not their first ``before`` steps, nor the rows that are left out."""
    cut = [[row for row in trajectory[before:] if row not in left_out] for trajectory in found]
    return [trajectory for trajectory in cut if trajectory]


def units(found: list[list[int]], rule: Rule, envs: int) -> list[tuple[list[int], int]]:
    """(trajectory, number of the unit within it) for every unit of weight, in the order that ranks count."""
    by_word_of_last_step = sorted(found, key=lambda t: (t[-1] // envs // 64, t[-1] % envs, t[-1]))
    weights = [(t, len(offsets(rule, len(t)))) for t in by_word_of_last_step]
    return [(t, unit) for t, weight in weights for unit in range(weight if rule.by_transition else min(weight, 1))]


def draw(
    units: list[tuple[list[int], int]], rule: Rule, uniforms: list[float], rank: list[int] | None
) -> list[list[int]]:
    slices = []
    for i, (u, v) in enumerate(zip(uniforms[::2], uniforms[1::2], strict=True)):
        trajectory, unit = units[int(u * len(units)) if rank is None else rank[i]]
        allowed = offsets(rule, len(trajectory))
        first = allowed[unit if rule.by_transition else int(v * len(allowed))]
        slices.append(trajectory[max(first, 0) : first + min(rule.slice_len, len(trajectory))])
    return slices


def bounds(found: list[list[int]]) -> dict[int, tuple[int, int, int]]:
    return {row: (t[0], t[-1], len(t)) for t in found for row in t}


def rest_of(found: list[list[int]]) -> dict[int, list[int]]:
    """For every row, its trajectory from there on: cut to ``slice_len`` it is the slice that starts there."""
    return {row: trajectory[i:] for trajectory in found for i, row in enumerate(trajectory)}


def eligible_starts(found: list[list[int]], need: int, starts_too: bool) -> set[int]:
    firsts = {trajectory[0] for trajectory in found if starts_too}
    return firsts | {row for row, rest in rest_of(found).items() if len(rest) >= need}
