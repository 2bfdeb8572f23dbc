"""Random sequences of operations on a sum tree against a model in plain Python."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpubuf.data.samplers.base import RandomState
from gpubuf.data.samplers.sum_tree import SumTree
from gpubuf.kernels import rows
from gpubuf.kernels._registry import triton_on_cpu
from gpubuf.kernels.philox.reference import uniforms
from gpubuf.kernels.sum_tree.reference import WeightList
from tests.support.sum_tree_checks import assert_consistent, bitmap


@st.composite
def sequences(draw, max_operations: int):
    """(capacity, fan-out, operations); small integers as priorities, so that every sum is exact."""
    capacity = draw(st.integers(1, 70))
    row = st.integers(-1, capacity - 1)
    priority = st.integers(0, 50)
    batch = st.lists(st.tuples(row, priority, st.integers(0, 3)), max_size=12)
    written = st.integers(0, 3 * capacity)
    operation = st.one_of(
        st.tuples(st.just("update"), batch, st.none()),
        st.tuples(st.just("update in ring"), batch, written),
        st.tuples(st.just("update by generation"), batch, written),
        st.tuples(st.just("mark"), st.lists(row, max_size=12), st.booleans()),
        st.tuples(st.just("mark run"), row, st.integers(1, capacity)),
        st.tuples(st.just("draw"), st.integers(1, 8), st.booleans()),
        st.tuples(st.just("restrict"), st.one_of(st.none(), st.integers(0, 2**capacity - 1))),
        st.tuples(st.just("flip"), st.lists(row, max_size=12)),
        st.tuples(st.just("rebuild")),
        st.tuples(st.just("clear")),
    )
    return capacity, draw(st.sampled_from([2, 4, 16])), draw(st.lists(operation, min_size=1, max_size=max_operations))


def apply_update(tree: SumTree, model: WeightList, kind: str, batch, written: int | None) -> None:
    index, priority, generation = ([entry[column] for entry in batch] for column in range(3))
    tensors = torch.tensor(index, dtype=torch.int64), torch.tensor(priority, dtype=torch.float32)
    if written is None:
        tree.update(*tensors)
        model.update(index, priority)
        return
    ring = rows.new_ring("cpu")
    size = min(written, tree.capacity)
    ring[rows.WRITTEN], ring[rows.SIZE] = written, size
    if kind == "update in ring":
        tree.update(*tensors, ring=ring)
        model.update(index, priority, None, written, size)
    else:
        tree.update(*tensors, ring=ring, generation=torch.tensor(generation, dtype=torch.int64))
        model.update(index, priority, generation, written, size)


def run(capacity: int, fan_out: int, operations) -> None:
    tree, model = SumTree(capacity, fan_out=fan_out), WeightList(capacity)
    rng, offset = RandomState(17), 0
    for name, *arguments in operations:
        if name.startswith("update"):
            apply_update(tree, model, name, *arguments)
        elif name == "mark":
            tree.mark(torch.tensor(arguments[0], dtype=torch.int64), arguments[1])
            model.mark(*arguments)
        elif name == "mark run":
            first, length = arguments
            run_of_rows = [(first + i) % capacity for i in range(length)]
            tree.mark(torch.tensor(run_of_rows))
            model.mark(run_of_rows)
        elif name == "restrict":
            (bits,) = arguments
            model.eligible = None if bits is None else [bits >> row & 1 == 1 for row in range(capacity)]
            tree.restrict(None if model.eligible is None else bitmap(model.eligible))
        elif name == "flip" and model.eligible is not None:
            for row in set(arguments[0]) - {-1}:
                model.eligible[row] = not model.eligible[row]
            assert tree.eligible is not None
            tree.eligible.copy_(bitmap(model.eligible))
            tree.refresh(torch.tensor(arguments[0], dtype=torch.int64))
        elif name == "draw" and any(model.counting):
            n, stratified = arguments
            index, weight = tree.draw(n, rng, stratified)
            assert index.tolist() == model.draw(uniforms(17, offset, n), stratified)
            assert weight.tolist() == pytest.approx([model.importance(row) for row in index.tolist()], rel=1e-6)
            offset += n
        elif name == "rebuild":
            tree.rebuild()
        elif name == "clear":
            tree.clear()
            model.weights = [0.0] * capacity
        assert tree.leaves[:capacity].tolist() == model.weights
        assert tree.max_priority.item() == (1.0 if model.max_priority is None else model.max_priority)
        assert_consistent(tree)
    assert rng.state.tolist() == [17, offset, 0]


COMMON = settings(deadline=None, database=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


@settings(COMMON, max_examples=150)
@given(sequences(max_operations=25))
def test_numba(sequence):
    run(*sequence)


@settings(COMMON, max_examples=10)
@given(sequences(max_operations=6))
def test_triton(sequence):
    with triton_on_cpu():
        run(*sequence)


@pytest.mark.slow
@settings(COMMON, max_examples=25)
@given(sequences(max_operations=6))
def test_triton_at_length(sequence):
    with triton_on_cpu():
        run(*sequence)
