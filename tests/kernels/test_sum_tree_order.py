"""One order of summation: a node of the sum tree is the same to the bit, whatever kernel and launch computed it."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from gpubuf.kernels import config, sum_tree
from gpubuf.kernels._registry import triton_on_cpu
from gpubuf.kernels.config import UpdateConfig

GEOMETRIES = {
    "one program": UpdateConfig(True, 1024, 256, 16),
    "one program, few nodes": UpdateConfig(True, 256, 64, 8),
    "a launch a stage": UpdateConfig(False, 256, 1024, 4),
    "a launch a stage, many nodes": UpdateConfig(False, 4096, 4096, 8),
}


def written_order(children: np.ndarray) -> np.ndarray:
    """The sum of each row [R, F]: parts of 8 (F / 4 where F is above 32) one after the other, then halves."""
    fan_out = children.shape[1]
    parts = children.reshape(len(children), -1, min(fan_out, max(8, fan_out // 4)))
    total = parts[:, 0]
    for part in range(1, parts.shape[1]):
        total = total + parts[:, part]
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    return total[:, 0]


def sums_of(leaves: torch.Tensor, fan_out: int) -> np.ndarray:
    """All sums of a tree, level by level, with the padding."""
    below, levels = leaves.double().numpy(), []
    for length in sum_tree.level_sizes(len(leaves), fan_out):
        below = written_order(below.reshape(-1, fan_out))
        below = np.pad(below, (0, length - len(below)))
        levels.append(below)
    return np.concatenate(levels)


def weights(count: int, seed: int) -> torch.Tensor:
    """Weights over many orders of magnitude, so that hardly any sum is exact; one in eight is zero."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.exp(8 * torch.randn(count, generator=generator))
    return torch.where(torch.rand(count, generator=generator) < 0.125, 0.0, drawn)


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize(
    ("capacity", "fan_out"), [(2**20, 32), (70_000, 64), (3000, 16), (700, 128), (100, 4), (50, 2)]
)
def test_build_update_mark_and_refresh_agree_to_the_bit(capacity, fan_out, geometry):
    """Finding 8 of the review of the compiled kernels: two orders of summation gave two roots."""
    leaves, nodes = sum_tree.new_tree(capacity, fan_out, "cpu")
    scalars = torch.tensor([1.0, 1.0, 0.0, 3.0, 0.0], dtype=torch.float64)
    ring = torch.tensor([capacity, capacity, 0, 0])
    leaves[:capacity] = weights(capacity, 0)
    index = torch.randint(capacity, (500,), generator=torch.Generator().manual_seed(1))

    def check() -> None:
        assert nodes[sum_tree.SUM].numpy().tobytes() == sums_of(leaves, fan_out).tobytes()

    with triton_on_cpu(), config.using(sum_tree_update=GEOMETRIES[geometry]):
        sum_tree.build(leaves, nodes, fan_out)
        check()
        sum_tree.update(leaves, nodes, scalars, ring, index, weights(len(index), 2), None, capacity, fan_out)
        check()
        sum_tree.mark(leaves, nodes, scalars, index[:70].flip(0), capacity, fan_out, False)
        check()
        leaves[index] = weights(len(index), 3)
        sum_tree.refresh(leaves, nodes, index, capacity, fan_out)
        check()


COUNT_FLOAT_SUMS = """
import importlib, re, sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from gpubuf.kernels.aot.operations import specs_of

specs = [spec for spec in specs_of("sum_tree") if "_triton_update:" in spec.kernel]
assert len({spec.kernel for spec in specs}) >= 6
for spec in specs:
    module, _, name = spec.kernel.partition(":")
    kernel = getattr(importlib.import_module(module), name)
    signature = {a: "constexpr" if a in spec.constexprs else spec.signature[a] for a in kernel.arg_names}
    source = ASTSource(kernel, signature=signature, constexprs=spec.constexprs)
    ttir = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": spec.num_warps}).asm["ttir"]
    reduces = re.findall(r'"tt\\.(?:reduce|scan)".*?tt\\.(?:reduce|scan)\\.return', ttir, re.DOTALL)
    assert reduces or "refresh" not in name, "nothing is reduced: has the text of TTIR changed?"
    if any("arith.addf" in each for each in reduces):
        print(spec)
"""


def test_no_sum_of_an_update_is_left_to_the_compiler():
    """A reduction's order of additions follows from its layout: none of the update kernels may reduce floats so."""
    # A process that runs the interpreter cannot compile.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COUNT_FLOAT_SUMS]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout == ""
