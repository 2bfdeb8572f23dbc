"""The trajectory index in plain PyTorch. Every call looks at the flags of all steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gpubuf.kernels.philox._cpu import uniform
from gpubuf.kernels.rows import DTYPES, ENTRY, SIZE, WRITTEN, has_lost
from gpubuf.kernels.rows._cpu import fields_of, load
from gpubuf.kernels.trajectories import (
    Rule,
    Slices,
    bit_levels,
    level_sizes,
    new_slices,
    oldest_touched,
    touched_rows,
)
from gpubuf.kernels.trajectories._check import (
    check_bounds,
    check_draw,
    check_eligible,
    check_index,
    check_returns,
    check_signals,
    check_slices,
    not_stored,
    rank_out_of_range,
    too_short,
)

_BITS = torch.arange(64, device="cpu")


def _packed(flags: Tensor) -> Tensor:
    """Flags ``[T, E]`` as words ``[ceil(T / 64), E]``."""
    words = -(-len(flags) // 64)
    padded = torch.zeros(64 * words, flags.shape[1], dtype=torch.int64, device="cpu")
    padded[: len(flags)] = flags
    return (padded.view(words, 64, -1) << _BITS[:, None]).sum(1)


def _unpacked(words: Tensor, count: int) -> Tensor:
    """The reverse: bool ``[count, E]``."""
    bits = (words[:, None, :] >> _BITS[:, None]) & 1
    return bits.reshape(-1, words.shape[1])[:count].bool()


class _Ring:
    """The steps in a ring, and their flags by age: bool ``[filled, E]``, the virtual end not included."""

    def __init__(self, ends: Tensor, ring: Tensor, steps: int, envs: int) -> None:
        self.steps, self.envs = steps, envs
        self.filled = min(int(ring[SIZE]) // envs, steps)
        self.cursor = int(ring[WRITTEN]) // envs % steps
        self.oldest = self.cursor if self.filled == steps else 0
        self.lost = int(has_lost(int(ring[WRITTEN]), int(ring[SIZE]), steps * envs))
        self._ends = ends.view(-1)
        self.step = (torch.arange(self.filled, device="cpu") + self.oldest) % steps
        self.flags = self.all_flags()[self.step]

    def all_flags(self) -> Tensor:
        """Of all steps in the ring's order, ``[T, E]``."""
        words = self._ends[: bit_levels(self.steps, self.envs)[0]].view(-1, self.envs)
        return _unpacked(words, self.steps)

    def store(self, flags: Tensor) -> None:
        """Set the flags of all steps, ``[T, E]``, and their summaries."""
        levels: list[Tensor] = []
        while not levels or len(levels[-1]) > 1:
            levels.append(_packed(flags))
            flags = levels[-1] != 0
        self._ends.copy_(torch.cat([level.view(-1) for level in levels]))
        self.flags = self.all_flags()[self.step]

    @functools.cached_property
    def last(self) -> Tensor:
        """The age of the last step of each step's trajectory, ``[filled, E]``."""
        ages = torch.arange(self.filled, device="cpu")[:, None]
        ends = torch.where(self.flags, ages, self.filled - 1)
        return ends.flip(0).cummin(0).values.flip(0) if self.filled else ends

    @functools.cached_property
    def first(self) -> Tensor:
        """The age of the first step of each step's trajectory, ``[filled, E]``."""
        ages = torch.arange(1, self.filled + 1, device="cpu")[:, None]
        after = torch.zeros(self.filled, self.envs, dtype=torch.int64, device="cpu")
        after[1:] = torch.where(self.flags, ages, 0)[:-1]
        return after.cummax(0).values if self.filled else after

    def ages_of(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """(age, environment) of stored rows; IndexError if one is not."""
        wrong = (rows < 0) | (rows >= self.filled * self.envs)
        if wrong.any():
            raise not_stored(rows, int(wrong.nonzero()[0]), self.filled * self.envs)
        return (rows // self.envs - self.oldest) % self.steps, rows % self.envs

    def rows_of(self, age: Tensor, env: Tensor) -> Tensor:
        return (age + self.oldest) % self.steps * self.envs + env

    def laid_out(self, age: Tensor, env: Tensor, length: Tensor, slice_len: int) -> Slices:
        """The slices that begin at some ages."""
        index, _, last = new_slices(age, len(age), slice_len)
        at = torch.arange(slice_len, device="cpu")
        steps = torch.minimum(at, (length - 1)[:, None])
        index.copy_(self.rows_of(age[:, None] + steps, env[:, None]).view(-1))
        last.copy_((at == (length - 1)[:, None]).view(-1))
        return index, length, last


def _rule(numbers: Sequence[int]) -> Rule:
    slice_len, min_len, before, after, by_transition, past = numbers
    return Rule(slice_len, min_len, before, after, bool(by_transition), past)


def _offsets(length: Tensor, rule: Rule) -> Tensor:
    """``Rule.offsets`` of trajectories."""
    m = length.clamp(max=rule.slice_len)
    offsets = length - m + 1 + (m - 1).clamp(max=rule.before) + (m - 1).clamp(max=rule.after)
    return offsets.where(length >= rule.min_len, 0)


def _trajectories(ring: _Ring, rule: Rule) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(word, weight, first age, length) of every trajectory, in the order in which units are counted."""
    ends = ring.flags.clone()
    ends[-1:] = True
    age, env = ends.nonzero().unbind(1)
    step = ring.step[age]
    word = step // 64 * ring.envs + env
    order = (word * 64 + step % 64).argsort()
    age, env, word = age[order], env[order], word[order]
    # Negative where all of it is left out.
    first = ring.first.clamp(min=rule.past * ring.lost)[age, env]
    length = age - first + 1
    offsets = _offsets(length, rule)
    return word, offsets if rule.by_transition else offsets.clamp(max=1), first, length


def _sum_up(sums: Tensor, ring: _Ring, fan_out: int, rule: Rule) -> None:
    word, weight, *_ = _trajectories(ring, rule)
    sizes = level_sizes(ring.steps, ring.envs, fan_out)
    level = torch.zeros(sizes[0], dtype=torch.int64, device="cpu").index_add_(0, word, weight)
    levels = [level]
    for size in sizes[1:]:
        level = torch.zeros(size, dtype=torch.int64, device="cpu")
        found = levels[-1].view(-1, fan_out).sum(1)
        level[: len(found)] = found
        levels.append(level)
    sums.view(-1).copy_(torch.cat(levels))


def _read_flags(ring: _Ring, signals: Tensor, by_id: bool, n: int) -> None:
    """Set the flags of the newest ``n`` steps, and of the one before them with identifiers."""
    steps, envs, filled = ring.steps, ring.envs, ring.filled
    flags = torch.zeros(steps, envs, dtype=torch.bool, device="cpu") if n >= steps else ring.all_flags()
    if filled and n:
        read = ring.step[max(filled - min(n, filled) - by_id, 0) :]
        rows = (read[:, None] * envs + torch.arange(envs, device="cpu")).view(-1)
        found = torch.zeros(len(rows), dtype=torch.bool, device="cpu")
        for k, field in enumerate(fields_of(signals.view(-1, ENTRY))):
            data = load(field, rows)
            if by_id and k == 0:
                found |= (data != load(field, (rows + envs) % (steps * envs))).any(-1)
            else:
                found |= (data != 0).any(-1)
        found = found.view(-1, envs)
        if by_id:
            # The newest step has no next one.
            found[-1] = False
        flags[read] = found
    ring.store(flags)


def update(ends: Tensor, sums: Tensor | None, ring: Tensor, signals: Tensor, by_id: bool, n: int, *index: int) -> None:
    """See :data:`gpubuf.kernels.trajectories.update`."""
    check_index(ends, sums, ring, *index)
    check_signals(signals, by_id, n)
    steps, envs, fan_out, *rule = index
    view = _Ring(ends, ring, steps, envs)
    _read_flags(view, signals, by_id, n)
    if sums is not None:
        _sum_up(sums, view, fan_out, _rule(rule))


def prepared_ends(
    ends: Tensor, ring: Tensor, signals: Tensor, by_id: bool, n: int, steps: int, envs: int
) -> Callable[[], None]:
    """:func:`update` for who reads ``ends`` alone: sums stay as they are.

    To be called as often as one likes, as long as the caller, who vouches for the arguments, keeps the tensors alive.
    """
    return lambda: _read_flags(_Ring(ends, ring, steps, envs), signals, by_id, n)


def resum(ends: Tensor, sums: Tensor, ring: Tensor, *index: int) -> None:
    """See :data:`gpubuf.kernels.trajectories.resum`."""
    check_index(ends, sums, ring, *index)
    steps, envs, fan_out, *rule = index
    _sum_up(sums, _Ring(ends, ring, steps, envs), fan_out, _rule(rule))


def draw(ends: Tensor, sums: Tensor, ring: Tensor, rng: Tensor, rank: Tensor | None, n: int, *index: int) -> Slices:
    """See :data:`gpubuf.kernels.trajectories.draw`."""
    check_index(ends, sums, ring, *index)
    check_draw(rng, rank, n)
    steps, envs, _, *numbers = index
    rule, view = _rule(numbers), _Ring(ends, ring, steps, envs)
    if n == 0:
        return new_slices(ends, n, rule.slice_len)
    word, weight, first, length = _trajectories(view, rule)
    total = int(weight.sum())
    if not total:
        raise too_short(max(int(length.max()), 0) if len(length) else 0, rule.min_len)
    if rank is not None and ((rank < 0) | (rank >= total)).any():
        raise rank_out_of_range(rank, int(((rank < 0) | (rank >= total)).nonzero()[0]), total)
    u, v = uniform(rng, 2 * n).view(n, 2).unbind(1)
    unit = (u * total).long().clamp_(max=total - 1) if rank is None else rank
    before = weight.cumsum(0)
    chosen = torch.searchsorted(before, unit, right=True)
    length, env, first = length[chosen], word[chosen] % envs, first[chosen]
    unit = unit - (before - weight)[chosen]
    if not rule.by_transition:
        offsets = _offsets(length, rule)
        unit = torch.minimum((v * offsets).long(), offsets - 1)
    m = length.clamp(max=rule.slice_len)
    begin = unit - (m - 1).clamp(max=rule.before)
    stop = torch.minimum(begin + m, length)
    begin = begin.clamp(min=0)
    return view.laid_out(first + begin, env, stop - begin, rule.slice_len)


def slices(ends: Tensor, ring: Tensor, start: Tensor, slice_len: int, steps: int, envs: int) -> Slices:
    """See :data:`gpubuf.kernels.trajectories.slices`."""
    check_slices(ends, ring, start, slice_len, steps, envs)
    view = _Ring(ends, ring, steps, envs)
    age, env = view.ages_of(start)
    length = (view.last[age, env] - age + 1).clamp(max=slice_len)
    return view.laid_out(age, env, length, slice_len)


def bounds(ends: Tensor, ring: Tensor, row: Tensor, steps: int, envs: int) -> Tensor:
    """See :data:`gpubuf.kernels.trajectories.bounds`."""
    check_bounds(ends, ring, row, steps, envs)
    view = _Ring(ends, ring, steps, envs)
    age, env = view.ages_of(row)
    first, last = view.first[age, env], view.last[age, env]
    return torch.stack((view.rows_of(first, env), view.rows_of(last, env), last - first + 1))


def update_eligible(
    eligible: Tensor, ends: Tensor, ring: Tensor, n: int, need: int, starts_too: bool, steps: int, envs: int,
    before: int = 0, past: int = 0,
) -> Tensor:  # fmt: skip
    """See :data:`gpubuf.kernels.trajectories.update_eligible`."""
    check_eligible(eligible, ends, ring, n, need, steps, envs, before, past)
    view, count = _Ring(ends, ring, steps, envs), touched_rows(n, need, steps, envs, before, past) // envs
    ages = torch.arange(view.filled, device="cpu")[:, None]
    can_start = torch.zeros(steps, envs, dtype=torch.bool, device="cpu")
    first = (view.first + before).clamp(min=past * view.lost)
    can_start[view.step] = (ages >= first) & ((view.last - ages + 1 >= need) | ((first == ages) & starts_too))
    touched = (torch.arange(count, device="cpu") + view.cursor + oldest_touched(before, past, steps) - count) % steps
    flags = _unpacked(eligible.view(-1, 1), steps * envs).view(steps, envs)
    flags[touched] = can_start[touched]
    eligible.view(-1).copy_(_packed(flags.reshape(-1, 1)).view(-1))
    return (touched[:, None] * envs + torch.arange(envs, device="cpu")).view(-1)


def update_returns(
    returns: Tensor, ends: Tensor, ring: Tensor, rewards: Tensor, rule: Tensor, dtype: int, n: int, *shape: int
) -> None:
    """See :data:`gpubuf.kernels.trajectories.update_returns`."""
    elements = check_returns(returns, ends, ring, rewards, rule, dtype, n, *shape)
    view, (gamma, scale, offset) = _Ring(ends, ring, *shape), rule.tolist()
    (field,) = fields_of(rewards.view(-1, ENTRY))
    value = torch.full((view.envs, elements), torch.nan, dtype=torch.float64, device="cpu")
    env = torch.arange(view.envs, device="cpu")
    changes = unfinished = torch.ones(view.envs, dtype=torch.bool, device="cpu")
    for age in reversed(range(view.filled)):
        end = view.flags[age]
        if age < view.filled - n:
            # Only trajectories that have ended since go further back.
            changes = changes & ~(end | unfinished)
            if not changes.any():
                break
        unfinished = unfinished & ~end
        row = view.step[age] * view.envs + env
        reward = load(field, row).reshape(-1).view(DTYPES[dtype]).view(view.envs, elements).double() * scale + offset
        value = reward + gamma * value.masked_fill(end[:, None], 0.0)
        returns[row[changes]] = value[changes].float()
