"""Launches the sum tree's kernels.

A *trusted* launch comes from :class:`gpubuf.data.SumTree`, which has looked at what it was given, and owns the rest.
Looking again takes 1.5 to 2.5 µs of a launch of 9.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gpubuf.kernels import config
from gpubuf.kernels._launching import Variant, all_registers, cdiv, launch, variant_of
from gpubuf.kernels._registry import check_devices, device_name
from gpubuf.kernels.config import UpdateConfig
from gpubuf.kernels.philox import check_request
from gpubuf.kernels.sum_tree import Tree
from gpubuf.kernels.sum_tree import _triton_update as kernels
from gpubuf.kernels.sum_tree._check import check_index, check_tree, check_update, tree_shape
from gpubuf.kernels.sum_tree._triton import sum_tree_draw_kernel

TOP_NODES = 64
"""A level with no more nodes to recompute than this is left to ``sum_tree_top_kernel``, with all levels above it."""

TOP_WARPS = 8
"""Warps of the single program of ``sum_tree_top_kernel``."""


def top_block(fan_out: int) -> int:
    """Nodes that ``sum_tree_top_kernel`` recomputes at a time; with more of 64 children sm_100 spills registers."""
    return max(1, min(64, 2048 // fan_out))


@config.remembered
def _planned(
    kernel: Any, fan_out: int, n: int, device: torch.device, in_graph: bool = False, **flags: bool
) -> tuple[UpdateConfig, Variant | None]:
    """How ``n`` rows are worked on, and the variant of ``kernel`` that does all of it where one program does.

    ``flags`` are the compile-time arguments that come before the shift and the blocks.
    """
    chosen = config.tree_update(fan_out, n, device_name(device), in_graph)
    if not chosen.single_program:
        return chosen, None
    # The rows of a mark or a refresh are mostly a run, above which few nodes are due.
    nodes = chosen.block_nodes if kernel is kernels.sum_tree_update_small_kernel else max(1, chosen.block_nodes // 2)
    blocks = {"SHIFT": fan_out.bit_length() - 1, "BLOCK_ENTRIES": chosen.block_entries, "BLOCK_NODES": nodes}
    return chosen, variant_of(kernel, chosen.num_warps, all_registers(chosen.num_warps), {**flags, **blocks})


def _refresh(tree: Tree, index: Tensor, n: int, chosen: UpdateConfig, weight: Tensor | None = None) -> None:
    """Recompute the nodes above ``n`` rows: a launch for each wide level, one for all the others.

    Where leaves hold tags, ``weight`` has the weights of the entries. An absent tensor is some other one to a kernel,
    which does not read it.
    """
    leaves, nodes, _, eligible, capacity, fan_out = tree
    _, n_nodes, depth = tree_shape(capacity, fan_out)
    block, sizes = chosen.block_nodes, (n, capacity, n_nodes)
    tensors = leaves, nodes, index if eligible is None else eligible, leaves if weight is None else weight, index
    flags = {"HAS_ELIGIBLE": eligible is not None, "HAS_TAGS": weight is not None}
    common = {"SHIFT": fan_out.bit_length() - 1, "BLOCK_NODES": block, "num_warps": chosen.num_warps}
    programs = cdiv(min(n, cdiv(capacity, fan_out)), block)
    launch(kernels.sum_tree_refresh_leaves_kernel, programs, *tensors, *sizes, **flags, **common)
    for level in range(2, depth + 1):
        needed = min(n, cdiv(capacity, fan_out**level))
        if needed <= TOP_NODES:
            common |= {"BLOCK_NODES": top_block(fan_out), "num_warps": TOP_WARPS, "maxnreg": all_registers(TOP_WARPS)}
            launch(kernels.sum_tree_top_kernel, 1, nodes, index, *sizes, level, depth, **common)
            return
        launch(kernels.sum_tree_refresh_kernel, cdiv(needed, block), nodes, index, *sizes, level, **common)


def build(*given: Any) -> None:
    """See :data:`gpubuf.kernels.sum_tree.build`."""
    tree = Tree(*given)
    check_tree(*tree)
    check_devices(tree.leaves, tree.nodes, tree.eligible)
    # As many entries as rows: every level is recomputed as a whole, and the index is never read. At least 1025, because
    # the configuration of up to 1024 entries is that of the single-program kernels.
    chosen = config.tree_update(tree.fan_out, max(tree.capacity, 1025), device_name(tree.leaves.device))
    _refresh(tree, tree.nodes.view(torch.int64), tree.capacity, chosen)


def refresh(
    leaves: Tensor, nodes: Tensor, scalars: Tensor, eligible: Tensor | None, capacity: int, fan_out: int,
    index: Tensor, *, trusted: bool = False,
) -> None:  # fmt: skip
    """See :data:`gpubuf.kernels.sum_tree.refresh`."""
    if not trusted:
        check_tree(leaves, nodes, scalars, eligible, capacity, fan_out)
        check_index(index)
        check_devices(leaves, nodes, index, eligible)
    n, limited = index.numel(), eligible is not None
    if n == 0:
        return
    chosen, small = _planned(kernels.sum_tree_refresh_small_kernel, fan_out, n, leaves.device, HAS_ELIGIBLE=limited)
    if small is None:
        _refresh(Tree(leaves, nodes, scalars, eligible, capacity, fan_out), index, n, chosen)
    else:
        _, n_nodes, depth = tree_shape(capacity, fan_out)
        small.launch(1, (leaves, nodes, eligible if limited else index, index, n, capacity, n_nodes, depth))


def update(
    leaves: Tensor, nodes: Tensor, scalars: Tensor, eligible: Tensor | None, capacity: int, fan_out: int,
    ring: Tensor, index: Tensor, priority: Tensor, generation: Tensor | None, *, trusted: bool = False,
) -> None:  # fmt: skip
    """See :data:`gpubuf.kernels.sum_tree.update`."""
    if not trusted:
        check_tree(leaves, nodes, scalars, eligible, capacity, fan_out)
        check_update(ring, index, priority, generation)
    # The ring is not the tree's own. To look at each of the other tensors takes 1 µs.
    if not trusted or ring.get_device() != leaves.get_device():
        check_devices(leaves, nodes, scalars, ring, index, priority, generation, eligible)
    n, limited, has_generation = index.numel(), eligible is not None, generation is not None
    if n == 0:
        return
    if n >= 2**31:
        raise ValueError(f"an update takes fewer than 2**31 entries, but got {n}")
    chosen, small = _planned(
        kernels.sum_tree_update_small_kernel, fan_out, n, leaves.device, config.in_graph(),
        HAS_ELIGIBLE=limited, HAS_GENERATION=has_generation,
    )  # fmt: skip
    entries = ring, index, priority, generation if has_generation else index
    if small is not None:
        _, n_nodes, depth = tree_shape(capacity, fan_out)
        tensors = leaves, nodes, eligible if limited else index, scalars
        small.launch(1, (*tensors, *entries, n, capacity, n_nodes, depth))
        return
    weight, block = torch.empty_like(priority), chosen.block_entries
    how = {"HAS_GENERATION": has_generation, "BLOCK_ENTRIES": block, "num_warps": chosen.num_warps}
    launch(kernels.sum_tree_claim_kernel, cdiv(n, block), leaves, scalars, *entries, weight, n, capacity, **how)
    _refresh(Tree(leaves, nodes, scalars, eligible, capacity, fan_out), index, n, chosen, weight)


def mark(
    leaves: Tensor, nodes: Tensor, scalars: Tensor, eligible: Tensor | None, capacity: int, fan_out: int,
    index: Tensor, within_buffer: bool, touched: Tensor | None = None, *, trusted: bool = False,
) -> None:  # fmt: skip
    """See :data:`gpubuf.kernels.sum_tree.mark`."""
    refreshed = index if touched is None else touched
    if not trusted:
        check_tree(leaves, nodes, scalars, eligible, capacity, fan_out)
        check_index(index)
        check_index(refreshed)
        check_devices(leaves, nodes, scalars, index, eligible, touched)
    n, n_touched, limited = index.numel(), refreshed.numel(), eligible is not None
    if n_touched == 0:
        return
    _, n_nodes, depth = tree_shape(capacity, fan_out)
    chosen, small = _planned(
        kernels.sum_tree_mark_small_kernel, fan_out, n_touched, leaves.device,
        HAS_ELIGIBLE=limited, WITHIN_BUFFER=within_buffer, HAS_TOUCHED=touched is not None,
    )  # fmt: skip
    if small is not None:
        tensors = leaves, nodes, eligible if limited else index, scalars, index, refreshed
        small.launch(1, (*tensors, n, n_touched, capacity, n_nodes, depth))
        return
    block = chosen.block_entries
    how = {"WITHIN_BUFFER": within_buffer, "BLOCK_ENTRIES": block, "num_warps": chosen.num_warps}
    launch(kernels.sum_tree_mark_kernel, cdiv(n, block), leaves, nodes, scalars, index, n, capacity, n_nodes, **how)
    _refresh(Tree(leaves, nodes, scalars, eligible, capacity, fan_out), refreshed, n_touched, chosen)


def draw(
    leaves: Tensor, nodes: Tensor, scalars: Tensor, eligible: Tensor | None, capacity: int, fan_out: int,
    rng: Tensor, n: int, stratified: bool, *, trusted: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See :data:`gpubuf.kernels.sum_tree.draw`."""
    if not trusted:
        check_tree(leaves, nodes, scalars, eligible, capacity, fan_out)
    # What a user passes is always looked at: the random state and the number of draws.
    check_request(rng, n)
    if not trusted or rng.get_device() != leaves.get_device():
        check_devices(leaves, nodes, scalars, rng, eligible)
    index, weight = rng.new_empty(n), leaves.new_empty(n)
    if n == 0:
        return index, weight
    _, n_nodes, depth = tree_shape(capacity, fan_out)
    chosen = config.tree_draw(fan_out, n, device_name(leaves.device))
    tensors = leaves, nodes, scalars, index if eligible is None else eligible, rng, index, weight
    flags = {"HAS_ELIGIBLE": eligible is not None, "STRATIFIED": stratified, "SHIFT": fan_out.bit_length() - 1}
    how = {"BLOCK_DRAWS": chosen.block_draws, "num_warps": chosen.num_warps}
    programs = cdiv(n, chosen.block_draws)
    launch(sum_tree_draw_kernel, programs, *tensors, n, capacity, n_nodes, depth, **flags, **how)
    return index, weight
