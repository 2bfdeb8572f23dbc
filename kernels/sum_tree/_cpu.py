"""The sum tree in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from gpubuf.kernels.philox import check_request
from gpubuf.kernels.philox._cpu import uniform
from gpubuf.kernels.rows import SIZE, WRITTEN
from gpubuf.kernels.sum_tree import (
    ALPHA,
    BETA,
    EPS,
    LARGEST,
    MAX_PRIORITY,
    MAXIMUM,
    MINIMUM,
    ROWS_PER_WORD,
    SMALLEST,
    SUM,
    level_sizes,
)
from gpubuf.kernels.sum_tree._check import check_index, check_tree, check_update, nothing_to_draw, outside, refused


def _counting(leaves: Tensor, rows: Tensor, eligible: Tensor | None) -> Tensor:
    """The weights of some leaves in float64, 0 where they are ineligible or padding."""
    weights = leaves[rows].double()
    if eligible is None:
        return weights
    word = (rows // ROWS_PER_WORD).clamp_(max=len(eligible) - 1)
    return weights * ((eligible[word] >> rows % ROWS_PER_WORD) & 1)


def _summed(children: Tensor) -> Tensor:
    """Of ``[..., F]`` the sum, always in the same order: halves are added."""
    while children.shape[-1] > 1:
        half = children.shape[-1] // 2
        children = children[..., :half] + children[..., half:]
    return children[..., 0]


def _refresh(
    leaves: Tensor, nodes: Tensor, eligible: Tensor | None, capacity: int, fan_out: int, touched: Tensor
) -> None:
    """Recompute the parents ``touched`` of leaves, and all nodes above them, from their children."""
    planes, children = nodes.view(3, -1), torch.arange(fan_out, device="cpu")
    below, here, sizes = -1, 0, level_sizes(capacity, fan_out)
    for size in sizes:
        at = touched[:, None] * fan_out + children
        if below < 0:
            weights = _counting(leaves, at, eligible)
            found = weights, torch.where(weights > 0, weights, torch.inf), weights
        else:
            found = tuple(planes[:, below + at])
        planes[:, here + touched] = torch.stack((_summed(found[SUM]), found[MINIMUM].amin(-1), found[MAXIMUM].amax(-1)))
        below, here = here, here + size
        touched = torch.unique(touched // fan_out)


def build(
    leaves: Tensor, nodes: Tensor, scalars: Tensor, eligible: Tensor | None, capacity: int, fan_out: int,
) -> None:  # fmt: skip
    """See :data:`gpubuf.kernels.sum_tree.build`."""
    check_tree(leaves, nodes, scalars, eligible, capacity, fan_out)
    _refresh(leaves, nodes, eligible, capacity, fan_out, torch.arange(-(-capacity // fan_out), device="cpu"))


def refresh(
    leaves: Tensor, nodes: Tensor, scalars: Tensor, eligible: Tensor | None, capacity: int, fan_out: int,
    index: Tensor,
) -> None:  # fmt: skip
    """See :data:`gpubuf.kernels.sum_tree.refresh`."""
    check_tree(leaves, nodes, scalars, eligible, capacity, fan_out)
    check_index(index)
    _check_range(index, capacity)
    _refresh(leaves, nodes, eligible, capacity, fan_out, torch.unique(index[index >= 0] // fan_out))


def _check_range(index: Tensor, capacity: int) -> None:
    wrong = (index < -1) | (index >= capacity)
    if wrong.any():
        raise outside(index, int(wrong.nonzero()[0]), capacity)


def _weight_of(priority: Tensor, scalars: Tensor) -> Tensor:
    """(priority + eps) ** alpha in float32: 0, or a normal number."""
    base = priority.double() + scalars[EPS]
    weight = base ** scalars[ALPHA]
    return weight.clamp(SMALLEST, LARGEST).where(base > 0, weight.clamp(max=LARGEST)).float().abs()


def update(
    leaves: Tensor, nodes: Tensor, scalars: Tensor, eligible: Tensor | None, capacity: int, fan_out: int,
    ring: Tensor, index: Tensor, priority: Tensor, generation: Tensor | None,
) -> None:  # fmt: skip
    """See :data:`gpubuf.kernels.sum_tree.update`."""
    check_tree(leaves, nodes, scalars, eligible, capacity, fan_out)
    check_update(ring, index, priority, generation)
    written, size = int(ring[WRITTEN]), int(ring[SIZE])
    kept = (index >= 0) & (index < size)
    if generation is not None:
        kept &= generation == (written - index + capacity - 1) // capacity
    wrong = (index < -1) | (index >= capacity)
    bad = kept & ~((priority >= 0) & (priority <= LARGEST))
    if (wrong | bad).any():
        place = int((wrong | bad).nonzero()[0])
        raise outside(index, place, capacity) if wrong[place] else refused(index, priority, place)
    rows, given = index[kept], priority[kept]
    if not len(rows):
        return
    rows, order = rows.sort(stable=True)
    # Of duplicates the last one.
    last = torch.ones(len(rows), dtype=torch.bool, device="cpu")
    last[:-1] = rows[1:] != rows[:-1]
    rows = rows[last]
    leaves[rows] = _weight_of(given[order[last]], scalars)
    scalars[MAX_PRIORITY] = torch.maximum(scalars[MAX_PRIORITY], given.abs().max().double())
    _refresh(leaves, nodes, eligible, capacity, fan_out, torch.unique(rows // fan_out))


def mark(
    leaves: Tensor, nodes: Tensor, scalars: Tensor, eligible: Tensor | None, capacity: int, fan_out: int,
    index: Tensor, within_buffer: bool, touched: Tensor | None = None,
) -> None:  # fmt: skip
    """See :data:`gpubuf.kernels.sum_tree.mark`."""
    check_tree(leaves, nodes, scalars, eligible, capacity, fan_out)
    for given in (index, index if touched is None else touched):
        check_index(given)
        _check_range(given, capacity)
    largest = nodes.view(3, -1)[MAXIMUM, -1]
    if within_buffer and largest > 0:
        weight = largest.float()
    else:
        given = scalars[MAX_PRIORITY]
        weight = _weight_of(torch.ones_like(given) if within_buffer or given < 0 else given, scalars)
    leaves[index[index >= 0]] = weight
    rows = index if touched is None else touched
    _refresh(leaves, nodes, eligible, capacity, fan_out, torch.unique(rows[rows >= 0] // fan_out))


def draw(
    leaves: Tensor, nodes: Tensor, scalars: Tensor, eligible: Tensor | None, capacity: int, fan_out: int,
    rng: Tensor, n: int, stratified: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See :data:`gpubuf.kernels.sum_tree.draw`."""
    check_tree(leaves, nodes, scalars, eligible, capacity, fan_out)
    check_request(rng, n)
    planes = nodes.view(3, -1)
    total, least = planes[SUM, -1], planes[MINIMUM, -1]
    if n and not total > 0:
        raise nothing_to_draw(eligible)
    mass = uniform(rng, n)
    mass = ((torch.arange(n, device="cpu") + mass) / n if stratified and n else mass) * total
    index, children, start = (
        torch.zeros(n, dtype=torch.int64, device="cpu"),
        torch.arange(fan_out, device="cpu"),
        planes.shape[1] - 1,
    )
    # Down from the root, which has no number of its own to choose from.
    for size in [*level_sizes(capacity, fan_out)[-2::-1], 0]:
        start -= size
        at = index[:, None] * fan_out + children
        weights = planes[SUM, start + at] if size else _counting(leaves, at, eligible)
        prefix = weights.cumsum(-1)
        child = (prefix <= mass[:, None]).sum(-1, keepdim=True)
        # Where rounding has carried the mass past the last prefix sum.
        last = torch.where(weights > 0, children, 0).amax(-1, keepdim=True)
        child = torch.where(child == fan_out, last, child)
        before = _before(prefix, child)
        mass = (mass - before).clamp_(min=0)
        index = at.gather(-1, child)[:, 0]
    ratio = leaves[index].double() / least
    return index, (ratio ** -scalars[BETA]).float()


def _before(prefix: Tensor, child: Tensor) -> Tensor:
    """The prefix sum before each child ``[n, 1]``: ``[n]``."""
    return torch.where(child > 0, prefix.gather(-1, (child - 1).clamp(min=0)), 0)[:, 0]
