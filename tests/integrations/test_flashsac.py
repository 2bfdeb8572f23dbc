"""The buffers of FlashSAC and rsl_rl_flashsac: ours gives the rows that FlashSAC's gave at the same positions."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from gpubuf.integrations import flashsac, rsl_rl
from tests.support import flashsac_buffer
from tests.support.flashsac_buffer.steps import ACT, ENVS, GAMMA, OBS, STEPS, WRITTEN, Box, slots, step_of
from tests.support.records import plain, read

RECORDED = read(flashsac_buffer)
KINDS = [flashsac.TorchUniformBuffer, flashsac.MemoryEfficientTorchUniformBuffer]


def made(kind: Any, n_step: int, dtype: torch.dtype | None = None, **options: Any) -> Any:
    return kind(Box(OBS), Box(ACT), n_step, GAMMA, ENVS * STEPS, 6, 4, "cpu", dtype, **options)


def filled(kind: Any, n_step: int, written: int, dtype: torch.dtype | None = None, **options: Any) -> Any:
    buffer = made(kind, n_step, dtype, **options)
    for step in range(written):
        buffer.add(step_of(step))
    return buffer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize("n_step", [1, 3])
def test_batches_are_those_of_flashsac(n_step, written, dtype, kind):
    """Keys, dtypes, shapes and bits, by FlashSAC's positions."""
    theirs = RECORDED[f"{n_step} steps, {written} written" + ("" if dtype is None else ", bfloat16")]
    ours = filled(kind, n_step, written, dtype).sample(slots(written, n_step).numpy())
    assert list(ours) == list(theirs)
    assert plain(ours) == theirs


def ages(buffer: Any) -> set[int]:
    """How long ago the rows were written that come in 300 batches."""
    numbers = torch.cat([buffer.sample()["observation"][:, 0] for _ in range(300)])
    return set((12 - numbers % 100).long().tolist())


def test_windows_that_end_at_the_newest_row_are_left_out():
    """FlashSAC discounts every window by gamma ** n_step, which would be wrong for them."""
    assert ages(filled(KINDS[0], 3, 13)) == {2, 3, 4, 5, 6, 7}


def test_a_file_of_flashsac_is_refused(tmp_path):
    torch.save({"num_in_buffer": 3}, tmp_path / "buffer.pt")
    with pytest.raises(ValueError, match="n_step steps"):
        made(KINDS[0], 3).load(tmp_path / "buffer.pt")


@pytest.mark.parametrize("kind", KINDS)
def test_length_and_readiness(kind):
    buffer = made(kind, 3)
    assert len(buffer) == 0
    assert not buffer.can_sample()
    with pytest.raises(RuntimeError, match="empty"):
        buffer.sample()
    with pytest.raises(RuntimeError, match="empty"):
        buffer.sample([0])
    buffer.add(step_of(0))
    assert not buffer.can_sample()
    buffer.add(step_of(1))
    assert buffer.can_sample()
    # Before a window is whole the oldest step stands for itself.
    assert set((buffer.sample()["observation"][:, 0] % 100).tolist()) == {0}
    buffer.reset()
    assert len(buffer) == 0


def test_observations_are_read_by_position():
    buffer = filled(KINDS[0], 1, 5)
    expected = torch.cat([torch.from_numpy(step_of(step)["observation"]) for step in range(5)])
    assert torch.equal(buffer.get_observations(), expected)


def test_tensors_and_other_dtypes_are_taken():
    buffer, other = made(KINDS[0], 1), made(KINDS[0], 1)
    buffer.add(step_of(3))
    step = {key: torch.from_numpy(value).double() for key, value in step_of(3).items()}
    other.add(step | {"truncated": step["truncated"].bool(), "info": "left alone"})
    ours, theirs = buffer.sample([0, 1, 2]), other.sample([0, 1, 2])
    assert all(torch.equal(ours[key], theirs[key]) and ours[key].dtype == theirs[key].dtype for key in ours)


def test_other_numbers_of_environments():
    """They are free where rows need not follow each other."""
    part = {key: value[:2] for key, value in step_of(1).items()}
    free = filled(KINDS[0], 1, 1)
    free.add(part)
    assert len(free) == ENVS + 2
    fixed = filled(KINDS[0], 3, 1)
    with pytest.raises(ValueError, match="shape"):
        fixed.add(part)


def group_step(step: int) -> dict[str, Any]:
    """A step as rsl_rl_flashsac's algorithms add it: observations in groups."""
    given = {key: torch.from_numpy(value) for key, value in step_of(step).items()}
    for key in ("observation", "next_observation"):
        groups = {"policy": given[key][:, :1], "critic": given[key], "unused": given[key]}
        given[key] = TensorDict(groups, batch_size=[ENVS])
    return given


@pytest.mark.parametrize("name", ["TorchUniformBuffer", "MemoryEfficientTorchUniformBuffer"])
def test_groups_of_observations(name):
    """rsl_rl_flashsac's form: the rows are those of FlashSAC's."""
    example = group_step(0)["observation"]
    arguments = ACT, 3, GAMMA, ENVS * STEPS, 6, 4, "cpu"
    buffer = getattr(rsl_rl, name)(example, *arguments, store_groups=["policy", "critic"])
    for step in range(13):
        buffer.add(group_step(step))
    plain = filled(getattr(flashsac, name), 3, 13)
    ours, theirs = buffer.sample(slots(13, 3)), plain.sample(slots(13, 3))
    assert list(ours) == list(theirs)
    for key, value in theirs.items():
        if "observation" not in key:
            assert torch.equal(ours[key], value)
            continue
        assert isinstance(ours[key], TensorDict)
        assert set(ours[key].keys()) == {"policy", "critic"}
        assert ours[key].shape == (len(value),)
        assert torch.equal(ours[key]["critic"], value)
        assert torch.equal(ours[key]["policy"], value[:, :1])
    assert buffer.sample()["observation"].shape == (4,)


def test_all_groups_are_stored_by_default():
    buffer = rsl_rl.TorchUniformBuffer(group_step(0)["observation"], ACT, 1, GAMMA, 8, 1, 2, "cpu", torch.bfloat16)
    buffer.add(group_step(1))
    assert set(buffer.sample()["next_observation"].keys()) == {"policy", "critic", "unused"}
    assert buffer.sample()["observation"]["policy"].dtype == torch.float32
    assert buffer.get_observations()["critic"].shape == (ENVS, OBS)


def test_observations_stored_once_and_short_take_a_quarter():
    """Case 39, in bytes."""
    twice, once = (
        filled(kind, 1, 1, dtype).buffer.storage for kind, dtype in zip(KINDS, (None, torch.bfloat16), strict=True)
    )
    rows, aside = STEPS * ENVS, once.sharing.slots + ENVS
    rest = rows * (4 * ACT + 4 + 2)
    assert twice.nbytes == rest + rows * 2 * 4 * OBS
    assert once.nbytes == rest + (rows + aside) * 2 * OBS
