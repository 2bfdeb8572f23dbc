"""The sum tree on the CPU: its operations.

Trees of another fan-out than the CPU's own take the plain definition. So does a call that a kernel refuses, before it
has changed anything: the definition says why.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpubuf.kernels._jit import named
from gpubuf.kernels._operations import vector
from gpubuf.kernels._threads import call_in_parts
from gpubuf.kernels.config import CPU_FAN_OUT
from gpubuf.kernels.philox import OFFSET, check_request
from gpubuf.kernels.sum_tree import _cpu
from gpubuf.kernels.sum_tree._check import check_index, check_tree, check_update

_build = named("sum_tree._numba_kernels.build")
_refresh = named("sum_tree._numba_kernels.refresh")
_update = named("sum_tree._numba_kernels.update")
_mark = named("sum_tree._numba_kernels.mark")
_draw = named("sum_tree._numba_kernels.draw")


def _tree(leaves: Tensor, nodes: Tensor, eligible: Tensor | None, capacity: int) -> tuple[int, int, int, int]:
    """A tree as kernels take it."""
    return leaves.data_ptr(), nodes.data_ptr(), 0 if eligible is None else eligible.data_ptr(), capacity


def build(
    leaves: Tensor, nodes: Tensor, scalars: Tensor, eligible: Tensor | None, capacity: int, fan_out: int,
) -> None:  # fmt: skip
    """See :data:`gpubuf.kernels.sum_tree.build`."""
    if fan_out != CPU_FAN_OUT:
        return _cpu.build(leaves, nodes, scalars, eligible, capacity, fan_out)
    check_tree(leaves, nodes, scalars, eligible, capacity, fan_out)
    _build(*_tree(leaves, nodes, eligible, capacity))


def refresh(
    leaves: Tensor, nodes: Tensor, scalars: Tensor, eligible: Tensor | None, capacity: int, fan_out: int,
    index: Tensor, *, trusted: bool = False,
) -> None:  # fmt: skip
    """See :data:`gpubuf.kernels.sum_tree.refresh`."""
    if fan_out != CPU_FAN_OUT:
        return _cpu.refresh(leaves, nodes, scalars, eligible, capacity, fan_out, index)
    if not trusted:
        check_tree(leaves, nodes, scalars, eligible, capacity, fan_out)
        check_index(index)
    tree = _tree(leaves, nodes, eligible, capacity)
    if not _refresh(*tree, index.data_ptr(), index.numel()):
        _cpu.refresh(leaves, nodes, scalars, eligible, capacity, fan_out, index)


def update(
    leaves: Tensor, nodes: Tensor, scalars: Tensor, eligible: Tensor | None, capacity: int, fan_out: int,
    ring: Tensor, index: Tensor, priority: Tensor, generation: Tensor | None, *, trusted: bool = False,
) -> None:  # fmt: skip
    """See :data:`gpubuf.kernels.sum_tree.update`."""
    if fan_out != CPU_FAN_OUT:
        return _cpu.update(leaves, nodes, scalars, eligible, capacity, fan_out, ring, index, priority, generation)
    if not trusted:
        check_tree(leaves, nodes, scalars, eligible, capacity, fan_out)
        check_update(ring, index, priority, generation)
    tree = _tree(leaves, nodes, eligible, capacity)
    told = index.data_ptr(), priority.data_ptr(), 0 if generation is None else generation.data_ptr(), index.numel()
    if not _update(*tree, scalars.data_ptr(), ring.data_ptr(), *told):
        _cpu.update(leaves, nodes, scalars, eligible, capacity, fan_out, ring, index, priority, generation)


def mark(
    leaves: Tensor, nodes: Tensor, scalars: Tensor, eligible: Tensor | None, capacity: int, fan_out: int,
    index: Tensor, within_buffer: bool, touched: Tensor | None = None, *, trusted: bool = False,
) -> None:  # fmt: skip
    """See :data:`gpubuf.kernels.sum_tree.mark`."""
    if fan_out != CPU_FAN_OUT:
        return _cpu.mark(leaves, nodes, scalars, eligible, capacity, fan_out, index, within_buffer, touched)
    if not trusted:
        check_tree(leaves, nodes, scalars, eligible, capacity, fan_out)
        check_index(index)
    tree = _tree(leaves, nodes, eligible, capacity)
    if not _mark(*tree, scalars.data_ptr(), index.data_ptr(), index.numel(), within_buffer):
        _cpu.mark(leaves, nodes, scalars, eligible, capacity, fan_out, index, within_buffer)
    if touched is not None:
        refresh(leaves, nodes, scalars, eligible, capacity, fan_out, touched, trusted=trusted)


def draw(
    leaves: Tensor, nodes: Tensor, scalars: Tensor, eligible: Tensor | None, capacity: int, fan_out: int,
    rng: Tensor, n: int, stratified: bool, *, trusted: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See :data:`gpubuf.kernels.sum_tree.draw`."""
    if fan_out != CPU_FAN_OUT:
        return _cpu.draw(leaves, nodes, scalars, eligible, capacity, fan_out, rng, n, stratified)
    if not trusted:
        check_tree(leaves, nodes, scalars, eligible, capacity, fan_out)
    check_request(rng, n)
    index, weight = torch.empty_like(vector(n, torch.int64)), torch.empty_like(vector(n, torch.float32))
    if n == 0:
        return index, weight
    tree = _tree(leaves, nodes, eligible, capacity)
    others = scalars.data_ptr(), rng.data_ptr(), index.data_ptr(), weight.data_ptr()
    results = call_in_parts(_draw, (*tree, *others), n, (n, stratified))
    if not all(results):
        return _cpu.draw(leaves, nodes, scalars, eligible, capacity, fan_out, rng, n, stratified)
    if len(results) > 1:
        rng[OFFSET] += n
    return index, weight
