"""Steps that are written as a list of tensors, which a launch reads where they are."""

from __future__ import annotations

import copy

import pytest
import torch
from tensordict import TensorDict

from gpubuf import LazyTensorStorage, ReplayBuffer
from tests.support.column_setup import assert_same_buffers, buffer, rows


def _negated(value: torch.Tensor) -> torch.Tensor:
    """The same numbers, in memory that holds them with the other sign."""
    if not value.is_floating_point():
        return value
    return torch.complex(torch.zeros_like(value), -value).conj().imag


def test_tensors_of_a_step_that_are_no_plain_memory():
    """Views, negations, zeros without memory and tensors with gradients: their numbers are written."""
    options = {"ndim": 2, "share_next": True, "dtypes": {("next", "done"): torch.float32}}
    ours, theirs = (
        ReplayBuffer(
            storage=LazyTensorStorage(24, **options), n_steps=3, end_keys=[("next", "done")], batch_size=4, dim_extend=0
        )
        for _ in range(2)
    )
    strange = [
        lambda value: value.flip(0).flip(0),
        lambda value: torch.stack([value, value], 1)[:, 0],
        _negated,
        lambda value: torch._efficientzerotensor(value.shape, dtype=value.dtype),
        lambda value: value.requires_grad_() if value.is_floating_point() else value,
        lambda value: value.as_strided(value.shape, (0,) * value.ndim),
    ]
    for step in range(30):
        columns = {key: torch.from_numpy(value) for key, value in rows((3,), 3 * step).items()}
        if step:
            columns = {key: strange[step % len(strange)](value) for key, value in columns.items()}
        ours.add_columns(list(columns.values()) if step else columns)
        theirs.add(TensorDict({key: value.detach().clone() for key, value in columns.items()}, [3]))
    assert_same_buffers(ours, theirs)


def test_tensors_of_a_step_that_are_refused():
    """Nothing is written, and the next step is."""
    made, theirs = (
        ReplayBuffer(storage=LazyTensorStorage(24, ndim=2, dtypes={"action": torch.int8}), batch_size=4)
        for _ in range(2)
    )

    def tensors(step: int) -> list:
        return [torch.from_numpy(value) for value in rows((3,), 3 * step).values()]

    for which in (made, theirs):
        which.add_columns(rows((3,), 0))
        which.add_columns(tensors(1))
    wrong = tensors(2)
    with pytest.raises(ValueError, match="key 'action': a number to store as"):
        made.add_columns([wrong[0], wrong[1] + 1000, *wrong[2:]])
    for bad in (wrong[0][:2], wrong[0].double(), wrong[0].to("meta")):
        with pytest.raises((ValueError, RuntimeError, NotImplementedError)):
            made.add_columns([bad, *wrong[1:]])
    with pytest.raises(ValueError, match="5 columns"):
        made.add_columns(wrong[:4])
    with pytest.raises(ValueError, match="5 columns"):
        made.add_columns([])
    for which in (made, theirs):
        which.add_columns(tensors(3))
    assert_same_buffers(made, theirs)


def test_a_step_after_the_rows_were_released_or_moved(tmp_path):
    """The way of tensors leads to the memory of now."""
    made, theirs = buffer("shared"), buffer("shared")

    def tensors(step: int) -> list:
        return [torch.from_numpy(value) for value in rows((3,), 3 * step).values()]

    def write(*steps: int) -> None:
        for step in steps:
            made.add_columns(tensors(step))
            theirs.add_columns(rows((3,), 3 * step))

    for which in (made, theirs):
        which.add_columns(rows((3,), 0))
    write(1, 2)
    made.empty()
    theirs.empty()
    write(0, 1)
    made.dumps(tmp_path / "rows")
    theirs.dumps(tmp_path / "others")
    write(2, 3)
    made.loads(tmp_path / "rows")
    theirs.loads(tmp_path / "others")
    write(2, 3, 4)
    copied = copy.deepcopy(made)
    copied.add_columns(tensors(9))
    assert_same_buffers(made, theirs)
    theirs.add_columns(rows((3,), 27))
    assert_same_buffers(copied, theirs)


@pytest.mark.parametrize("storage", ["rows", "small"])
def test_rows_of_one_dimension(storage):
    """As many rows at each write as the tensors have: over the seam, more than there is room for, and views."""
    ours, theirs = buffer(storage), buffer(storage)
    ours.extend_columns(rows((3,), 0))
    theirs.extend_columns(rows((3,), 0))
    first = 3
    for n in (1, 3, 1, 20, 3, 60, 2, 1, 5, 6, 7, 8, 9, 10, 1):
        columns = rows((n,), first)
        tensors = [torch.from_numpy(value) for value in columns.values()]
        if n == 7:
            tensors[0] = tensors[0].flip(0).flip(1).flip(1).flip(0)
        ours.extend_columns(tensors)
        theirs.extend_columns(columns)
        for tensor in tensors:
            tensor.zero_()
        first += n
    with pytest.raises(ValueError, match="obs"):
        ours.extend_columns([tensors[0].double(), *tensors[1:]])
    ours.extend_columns([tensor[:0] for tensor in tensors])
    assert_same_buffers(ours, theirs)
