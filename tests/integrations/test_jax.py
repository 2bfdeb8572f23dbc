"""Arrays of JAX go into buffers, and batches back to JAX, by DLPack: without NumPy, and without a copy of their own."""

import numpy as np
import pytest
import torch

from gpubuf import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from gpubuf.data.storage import containers

jax = pytest.importorskip("jax", reason="JAX is not installed: make jax")
jnp = jax.numpy


@pytest.fixture(autouse=True)
def taken(monkeypatch):
    """What became tensors by DLPack. NumPy is asked for nothing."""
    found = []
    of_dlpack = containers.from_dlpack

    def from_dlpack(value):
        found.append(of_dlpack(value))
        return found[-1]

    def refuse(value, *args, **options):
        if isinstance(value, jax.Array):
            raise AssertionError("an array of JAX goes through NumPy")
        return as_array(value, *args, **options)

    as_array = np.asarray
    monkeypatch.setattr(containers, "from_dlpack", from_dlpack)
    monkeypatch.setattr(np, "asarray", refuse)
    return found


def transitions(n: int) -> dict:
    number = jnp.arange(n)
    return {
        "observation": number[:, None].astype(jnp.float32) * jnp.ones(3),
        "half": number.astype(jnp.bfloat16),
        "image": number[:, None].astype(jnp.uint8) * jnp.ones((1, 2), jnp.uint8),
        "next": {"reward": number[:, None].astype(jnp.float32), "done": number % 2 == 0},
    }


def leaves(batch: dict) -> list:
    return jax.tree_util.tree_leaves(batch)


def test_nested_dicts_are_written_from_where_they_are(taken):
    """Each array becomes a tensor in the array's own memory, once; dtypes are kept, bfloat16 and bool too."""
    batch = transitions(10)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(20), batch_size=4)
    buffer.extend(batch)
    own = sorted(array.unsafe_buffer_pointer() for array in leaves(batch))
    assert sorted({tensor.data_ptr() for tensor in taken}) == own
    taken.clear()
    buffer.extend(batch)
    assert sorted(tensor.data_ptr() for tensor in taken) == own
    rows = buffer[10:]
    number = torch.arange(10)
    assert torch.equal(rows["observation"], number[:, None].float().expand(10, 3))
    assert torch.equal(rows["half"], number.bfloat16())
    assert torch.equal(rows["image"], number[:, None].to(torch.uint8).expand(10, 2))
    assert torch.equal(rows["next", "reward"], number[:, None].float())
    assert torch.equal(rows["next", "done"], number % 2 == 0)


def test_rows_one_by_one(taken):
    """``add`` and ``extend_columns`` take arrays of JAX, too."""
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(20), batch_size=4)
    batch = transitions(6)
    for i in range(6):
        buffer.add(jax.tree_util.tree_map(lambda array, i=i: array[i], batch))
    flat = {
        "observation": batch["observation"], "half": batch["half"], "image": batch["image"],
        ("next", "reward"): batch["next"]["reward"], ("next", "done"): batch["next"]["done"],
    }  # fmt: skip
    buffer.extend_columns(flat)
    for key in flat:
        assert torch.equal(buffer[:6][key], buffer[6:12][key]), key


def test_single_arrays():
    """Rows that are one array each."""
    buffer = ReplayBuffer(8, batch_size=4)
    buffer.extend(jnp.arange(8.0))
    assert torch.equal(buffer[:], torch.arange(8.0))


def test_batches_go_back_without_a_copy():
    """JAX has the batch in the memory of the tensor."""
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(20), batch_size=16)
    buffer.extend(transitions(10))
    batch = buffer.sample()
    for key, dtype in {"observation": jnp.float32, "half": jnp.bfloat16, "image": jnp.uint8}.items():
        array = jax.dlpack.from_dlpack(batch[key])
        assert array.dtype == dtype
        assert array.shape == tuple(batch[key].shape)
        assert array.unsafe_buffer_pointer() == batch[key].data_ptr()
    done, index = jax.dlpack.from_dlpack(batch["next", "done"]), jax.dlpack.from_dlpack(batch["index"])
    assert done.dtype == jnp.bool_
    assert done.tolist() == [int(i) % 2 == 0 for i in index]
