"""The definition of running statistics, in Python floats. Slow, and read by tests only."""

from __future__ import annotations

import math

from gpubuf.kernels.moments import Rule


def update(source: list[list[float]], state: list[list[float]], rule: Rule) -> list[list[float]]:
    """The state (counts, means, M2s, largest magnitudes) with the rows of ``source`` taken in."""
    out = [list(row) for row in state]
    for element in range(len(state[0])):
        numbers = [float(row[element]) for row in source if math.isfinite(row[element])]
        count, mean, m2, peak = (row[element] for row in state)
        if not numbers or not rule.active or count >= rule.until:
            continue
        own_mean = math.fsum(numbers) / len(numbers)
        own_m2 = math.fsum((number - own_mean) ** 2 for number in numbers)
        total = count + len(numbers)
        step = own_mean - mean
        out[0][element] = total
        out[1][element] = mean + step * len(numbers) / total
        out[2][element] = m2 + own_m2 + step * step * count * len(numbers) / total
        out[3][element] = max(peak, max(abs(number) for number in numbers))
    return out


def factors(state: list[list[float]], rule: Rule) -> list[float]:
    """What the numbers of each element are multiplied with."""
    found = []
    for count, _, m2, peak in zip(*state, strict=True):
        scale = max(math.sqrt(m2 / count + rule.eps), peak / rule.peak_at) if count else 1.0
        found.append(1 / scale)
    return found


def returns(rewards: list[float], ends: list[bool], before: float, gamma: float) -> tuple[list[float], float]:
    """The running returns of one environment, and what its next step adds."""
    found = []
    for reward, end in zip(rewards, ends, strict=True):
        found.append(before + (reward if math.isfinite(reward) else 0.0))
        before = 0.0 if end else gamma * found[-1]
    return found, before
