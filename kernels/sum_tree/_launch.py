"""Launches the sum tree's kernels.

A *trusted* launch comes from :class:`gpubuf.data.SumTree`, which has looked at what it was given, and owns the rest.
Looking again takes 1.5 to 2.5 µs of a launch of 9.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpubuf.kernels import config
from gpubuf.kernels._check import check_devices, device_name
from gpubuf.kernels._launching import all_registers, cdiv, launch
from gpubuf.kernels.config import UpdateConfig
from gpubuf.kernels.philox import check_request
from gpubuf.kernels.sum_tree import _triton_update as kernels
from gpubuf.kernels.sum_tree._check import (
    check_eligible,
    check_index,
    check_scalars,
    check_tree,
    check_update,
    rows_to_build,
    tree_shape,
)
from gpubuf.kernels.sum_tree._triton import sum_tree_draw_kernel


def _check_eligible(eligible: Tensor | None, capacity: int) -> None:
    if eligible is not None:
        check_eligible(eligible, capacity)


def _or(given: Tensor | None, index: Tensor) -> Tensor:
    """``given``, or another int64 tensor in the place of one that the kernel does not read."""
    return index if given is None else given


def _shift(fan_out: int) -> int:
    return fan_out.bit_length() - 1


TOP_NODES = 64
"""A level with no more nodes to recompute than this is left to ``sum_tree_top_kernel``, with all levels above it."""

TOP_WARPS = 8
"""Warps of the single program of ``sum_tree_top_kernel``."""


def top_block(fan_out: int) -> int:
    """Nodes that ``sum_tree_top_kernel`` recomputes at a time; with more of 64 children sm_100 spills registers."""
    return max(1, min(64, 2048 // fan_out))


def run_block(chosen: UpdateConfig) -> int:
    """Nodes that a mark or a refresh by one program recomputes at a time. Mostly few are due."""
    return max(1, chosen.block_nodes // 2)


def _refresh(
    leaves: Tensor,
    nodes: Tensor,
    eligible: Tensor | None,
    weight: Tensor | None,
    index: Tensor,
    n: int,
    capacity: int,
    fan_out: int,
    chosen: UpdateConfig,
) -> None:
    """Recompute the nodes above ``n`` rows: a launch for each wide level, one for all the others.

    Where leaves hold tags, ``weight`` has the weights of the entries.
    """
    _, n_nodes, depth = tree_shape(capacity, fan_out)
    block, sizes = chosen.block_nodes, (n, capacity, n_nodes)
    tensors = (leaves, nodes, _or(eligible, index), leaves if weight is None else weight, index)
    flags = {"HAS_ELIGIBLE": eligible is not None, "HAS_TAGS": weight is not None}
    common = {"SHIFT": _shift(fan_out), "BLOCK_NODES": block, "num_warps": chosen.num_warps}
    programs = cdiv(min(n, cdiv(capacity, fan_out)), block)
    launch(kernels.sum_tree_refresh_leaves_kernel, programs, *tensors, *sizes, **flags, **common)
    for level in range(2, depth + 1):
        needed = min(n, cdiv(capacity, fan_out**level))
        if needed <= TOP_NODES:
            common |= {"BLOCK_NODES": top_block(fan_out), "num_warps": TOP_WARPS, "maxnreg": all_registers(TOP_WARPS)}
            launch(kernels.sum_tree_top_kernel, 1, nodes, index, *sizes, level, depth, **common)
            return
        launch(kernels.sum_tree_refresh_kernel, cdiv(needed, block), nodes, index, *sizes, level, **common)


def build(leaves: Tensor, nodes: Tensor, fan_out: int, eligible: Tensor | None = None) -> None:
    """See :data:`gpubuf.kernels.sum_tree.build`."""
    capacity = rows_to_build(leaves, fan_out, eligible)
    check_tree(leaves, nodes, capacity, fan_out)
    check_devices(leaves, nodes, eligible)
    # As many entries as rows: every level is recomputed as a whole, and the index is never read. At least 1025, because
    # the configuration of up to 1024 entries is that of the single-program kernels.
    chosen = config.tree_update(fan_out, max(capacity, 1025), device_name(leaves.device))
    _refresh(leaves, nodes, eligible, None, nodes.view(torch.int64), capacity, capacity, fan_out, chosen)


def refresh(
    leaves: Tensor,
    nodes: Tensor,
    index: Tensor,
    capacity: int,
    fan_out: int,
    eligible: Tensor | None = None,
    *,
    trusted: bool = False,
) -> None:
    """See :data:`gpubuf.kernels.sum_tree.refresh`."""
    if not trusted:
        check_tree(leaves, nodes, capacity, fan_out)
        _check_eligible(eligible, capacity)
        check_index(index)
        check_devices(leaves, nodes, index, eligible)
    n = index.numel()
    if n == 0:
        return
    _, n_nodes, depth = tree_shape(capacity, fan_out)
    chosen = config.tree_update(fan_out, n, device_name(leaves.device))
    if chosen.single_program:
        launch(
            kernels.sum_tree_refresh_small_kernel,
            1,
            leaves,
            nodes,
            _or(eligible, index),
            index,
            n,
            capacity,
            n_nodes,
            depth,
            HAS_ELIGIBLE=eligible is not None,
            SHIFT=_shift(fan_out),
            BLOCK_ENTRIES=chosen.block_entries,
            BLOCK_NODES=run_block(chosen),
            num_warps=chosen.num_warps,
            maxnreg=all_registers(chosen.num_warps),
        )
        return
    _refresh(leaves, nodes, eligible, None, index, n, capacity, fan_out, chosen)


def update(
    leaves: Tensor,
    nodes: Tensor,
    scalars: Tensor,
    ring: Tensor,
    index: Tensor,
    priority: Tensor,
    generation: Tensor | None,
    capacity: int,
    fan_out: int,
    eligible: Tensor | None = None,
    *,
    trusted: bool = False,
) -> None:
    """See :data:`gpubuf.kernels.sum_tree.update`."""
    if not trusted:
        check_tree(leaves, nodes, capacity, fan_out)
        check_scalars(scalars)
        _check_eligible(eligible, capacity)
        check_update(ring, index, priority, generation)
    # The ring is not the tree's own. To look at each of the other tensors takes 1 µs.
    if not trusted or ring.get_device() != leaves.get_device():
        check_devices(leaves, nodes, scalars, ring, index, priority, generation, eligible)
    n = index.numel()
    if n == 0:
        return
    if n >= 2**31:
        raise ValueError(f"an update takes fewer than 2**31 entries, but got {n}")
    _, n_nodes, depth = tree_shape(capacity, fan_out)
    chosen = config.tree_update(fan_out, n, device_name(leaves.device), config.in_graph())
    entries, has_generation = (ring, index, priority, _or(generation, index)), generation is not None
    if chosen.single_program:
        arguments = (leaves, nodes, _or(eligible, index), scalars, *entries, n, capacity, n_nodes, depth)
        launch(
            kernels.sum_tree_update_small_kernel,
            1,
            *arguments,
            HAS_ELIGIBLE=eligible is not None,
            HAS_GENERATION=has_generation,
            SHIFT=_shift(fan_out),
            BLOCK_ENTRIES=chosen.block_entries,
            BLOCK_NODES=chosen.block_nodes,
            num_warps=chosen.num_warps,
            maxnreg=all_registers(chosen.num_warps),
        )
        return
    weight = torch.empty_like(priority)
    launch(
        kernels.sum_tree_claim_kernel,
        cdiv(n, chosen.block_entries),
        leaves,
        scalars,
        *entries,
        weight,
        n,
        capacity,
        HAS_GENERATION=has_generation,
        BLOCK_ENTRIES=chosen.block_entries,
        num_warps=chosen.num_warps,
    )
    _refresh(leaves, nodes, eligible, weight, index, n, capacity, fan_out, chosen)


def mark(
    leaves: Tensor,
    nodes: Tensor,
    scalars: Tensor,
    index: Tensor,
    capacity: int,
    fan_out: int,
    within_buffer: bool,
    eligible: Tensor | None = None,
    *,
    trusted: bool = False,
) -> None:
    """See :data:`gpubuf.kernels.sum_tree.mark`."""
    if not trusted:
        check_tree(leaves, nodes, capacity, fan_out)
        check_scalars(scalars)
        _check_eligible(eligible, capacity)
        check_index(index)
        check_devices(leaves, nodes, scalars, index, eligible)
    n = index.numel()
    if n == 0:
        return
    _, n_nodes, depth = tree_shape(capacity, fan_out)
    chosen = config.tree_update(fan_out, n, device_name(leaves.device))
    if chosen.single_program:
        launch(
            kernels.sum_tree_mark_small_kernel,
            1,
            leaves,
            nodes,
            _or(eligible, index),
            scalars,
            index,
            n,
            capacity,
            n_nodes,
            depth,
            HAS_ELIGIBLE=eligible is not None,
            WITHIN_BUFFER=within_buffer,
            SHIFT=_shift(fan_out),
            BLOCK_ENTRIES=chosen.block_entries,
            BLOCK_NODES=run_block(chosen),
            num_warps=chosen.num_warps,
            maxnreg=all_registers(chosen.num_warps),
        )
        return
    entries = chosen.block_entries
    how = {"WITHIN_BUFFER": within_buffer, "BLOCK_ENTRIES": entries, "num_warps": chosen.num_warps}
    tensors, sizes = (leaves, nodes, scalars, index), (n, capacity, n_nodes)
    launch(kernels.sum_tree_mark_kernel, cdiv(n, entries), *tensors, *sizes, **how)
    _refresh(leaves, nodes, eligible, None, index, n, capacity, fan_out, chosen)


def draw(
    leaves: Tensor,
    nodes: Tensor,
    scalars: Tensor,
    rng: Tensor,
    n: int,
    capacity: int,
    fan_out: int,
    stratified: bool,
    eligible: Tensor | None = None,
    *,
    trusted: bool = False,
) -> tuple[Tensor, Tensor]:
    """See :data:`gpubuf.kernels.sum_tree.draw`."""
    if not trusted:
        check_tree(leaves, nodes, capacity, fan_out)
        check_scalars(scalars)
        _check_eligible(eligible, capacity)
    # What a user passes is always looked at: the random state and the number of draws.
    check_request(rng, n)
    if not trusted or rng.get_device() != leaves.get_device():
        check_devices(leaves, nodes, scalars, rng, eligible)
    index = torch.empty(n, dtype=torch.int64, device=leaves.device)
    weight = torch.empty(n, dtype=torch.float32, device=leaves.device)
    if n == 0:
        return index, weight
    _, n_nodes, depth = tree_shape(capacity, fan_out)
    chosen = config.tree_draw(fan_out, n, device_name(leaves.device))
    launch(
        sum_tree_draw_kernel,
        cdiv(n, chosen.block_draws),
        leaves,
        nodes,
        scalars,
        _or(eligible, index),
        rng,
        index,
        weight,
        n,
        capacity,
        n_nodes,
        depth,
        HAS_ELIGIBLE=eligible is not None,
        STRATIFIED=stratified,
        SHIFT=_shift(fan_out),
        BLOCK_DRAWS=chosen.block_draws,
        num_warps=chosen.num_warps,
    )
    return index, weight
