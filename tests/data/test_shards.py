"""Samplers with a process group: ranks that draw from shards are, in expectation, one buffer of all rows."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from gpubuf import capture
from gpubuf.data import (
    LazyTensorStorage,
    MixedReplayBuffer,
    Normalize,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    RewardScale,
    Sampler,
    SliceSampler,
    TensorDictReplayBuffer,
)
from tests.support.fake_cuda import fake_cuda, no_blocking_copies
from tests.support.ranks import CountedCollectives, run_ranks
from tests.support.transitions import same
from tests.support.waiting import no_waiting

ALPHA, BETA, EPS, DRAWN, BATCHES, SLICE = 0.6, 0.4, 1e-8, 400, 50, 3


def rows_of(rank: int) -> TensorDict:
    """A shard: of its own size and scale of priorities, with trajectories of its own lengths."""
    generator = torch.Generator().manual_seed(rank)
    n = 24 + 9 * rank
    done = torch.arange(n) % (4 + rank % 3) == 3
    shard = {
        "row": torch.arange(n) + 1000 * rank,
        "x": torch.randn(n, generator=generator) + 0.3 * rank,
        "priority": torch.exp(torch.randn(n, generator=generator) + rank % 4),
        "next": {"done": done.unsqueeze(-1)},
    }
    return TensorDict(shard, [n])


def filled(rows: TensorDict, sampler: Sampler, capacity: int = 5000) -> TensorDictReplayBuffer:
    """A buffer of ``rows``, each with its priority."""
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(capacity), sampler=sampler, priority_key="priority")
    buffer.set_rng(torch.Generator().manual_seed(int(rows["row"][0])))
    index = buffer.extend(rows)
    if sampler.has_priorities:
        buffer.update_priority(index, rows["priority"])
    return buffer


def samplers(group: dist.ProcessGroup | None) -> dict[str, Sampler]:
    return {
        "prioritized": PrioritizedSampler(5000, ALPHA, BETA, EPS, process_group=group),
        "stratified": PrioritizedSampler(5000, ALPHA, BETA, EPS, stratified=True, process_group=group),
        "uniform": RandomSampler(process_group=group),
        "trajectories": SliceSampler(slice_len=SLICE, process_group=group),
        "starts": SliceSampler(slice_len=SLICE, weighting="transition", process_group=group),
        "padded": SliceSampler(slice_len=SLICE, strict_length=False, pad_output=True, process_group=group),
        "prioritized slices": PrioritizedSliceSampler(5000, ALPHA, BETA, EPS, slice_len=SLICE, process_group=group),
    }


def drawn(buffer: TensorDictReplayBuffer, n: int = DRAWN * SLICE) -> TensorDict:
    return buffer.sample(n).select("row", "x", "priority_weight", strict=False)


def in_groups(rank: int, size: int, sizes: list[int]) -> dict[int, Any]:
    """What ranks find in groups of these sizes: the same processes are in one after the other."""
    alone, _ = dist.new_subgroups(1)
    return {each: on_rank(rank % each, each, dist.new_subgroups(each)[0], alone) for each in sizes}


def on_rank(rank: int, size: int, group: dist.ProcessGroup, alone: dist.ProcessGroup) -> dict[str, Any]:
    """All that the tests look at, of one rank of a group."""
    rows = rows_of(rank)
    found: dict[str, Any] = {"drawn": {}, "again": {}, "alone": {}, "nobody": {}, "calls": {}}
    for name, sampler in samplers(group).items():
        buffer = filled(rows, sampler)
        with CountedCollectives() as counted:
            first = drawn(buffer)
        found["calls"][name] = counted.calls
        found["drawn"][name] = torch.cat([first, *(drawn(buffer) for _ in range(9))]).to_dict()
        found["again"][name] = drawn(filled(rows, samplers(group)[name])).to_dict()
        # A group of one rank, and none.
        found["alone"][name] = drawn(filled(rows, samplers(alone)[name])).to_dict()
        found["nobody"][name] = drawn(filled(rows, samplers(None)[name])).to_dict()

    found["statistics"] = statistics_of(rank, group)
    buffer = filled(rows, samplers(group)["prioritized"])
    found["gradients"] = torch.stack([gradient(buffer.sample(64), group) for _ in range(BATCHES)])
    with CountedCollectives() as counted:
        buffer.sample(8, batches=3)
    found["calls"]["three batches"] = counted.calls

    # A row that comes after a draw has the largest priority that any rank was given.
    sampler, plain = PrioritizedSampler(5000, ALPHA, BETA, EPS, process_group=group), rows.exclude("priority")
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(5000), sampler=sampler)
    buffer.update_priority(buffer.extend(plain), rows["priority"])
    buffer.sample(4)
    tree, index = sampler._tree_made(), buffer.extend(plain[:1])
    found["largest"] = [float(rows["priority"].max()), float(tree.max_priority), float(tree.leaves[index])]

    found["refused"] = {}
    for name, sampler in samplers(group).items():
        # Nothing written; too little for a slice.
        empty = TensorDictReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=SLICE)
        if rank != size - 1:
            empty.extend(rows)
        found["refused"][name] = [refusal(empty)]
        if rank == size - 1:
            empty.extend(rows[:1])
        if name in ("trajectories", "starts", "prioritized slices"):
            found["refused"][name].append(refusal(empty))
    return found


WRITES = 3


def observations(rank: int, write: int) -> TensorDict:
    """What a rank writes: of its own length, mean and scale, far from zero."""
    generator = torch.Generator().manual_seed(10 * rank + write)
    n = 5 + 3 * rank + write
    x = 1000 + rank + torch.randn(n, 3, generator=generator) * (1 + write)
    done = torch.arange(n) == n - 1
    return TensorDict({"x": x, "next": {"reward": x[:, :1] - 1000, "done": done.unsqueeze(-1)}}, [n])


def statistics_of(rank: int, group: dist.ProcessGroup) -> dict[str, Any]:
    """Running statistics after each write and all-reduce; the second write goes into a restored buffer."""
    found: dict[str, Any] = {"states": [], "calls": []}
    state: dict[str, Any] = {}
    for write in range(WRITES):
        if write < 2:
            steps = [Normalize("x"), RewardScale(0.9)]
            storage = LazyTensorStorage(100)
            buffer = TensorDictReplayBuffer(storage=storage, process=steps[:1], transform=steps[1], batch_size=4)
        if write == 1:
            buffer.load_state_dict(state)
        buffer.extend(observations(rank, write))
        with CountedCollectives() as counted:
            for step in steps:
                assert step.all_reduce(group) is step
        found["calls"].append(counted.calls)
        found["states"].append({type(step).__name__: step.state_dict() for step in steps})
        state = buffer.state_dict()
    return found


def refusal(buffer: TensorDictReplayBuffer) -> str:
    try:
        buffer.sample()
    except RuntimeError as error:
        return str(error)
    return "drawn"


def gradient(batch: TensorDict, group: dist.ProcessGroup) -> Tensor:
    """Of a small loss, weighted as losses are: averaged over the ranks."""
    slope = torch.tensor([0.5, -0.2], dtype=torch.float64, requires_grad=True)
    x = batch["x"].double()
    loss = (batch["priority_weight"].double() * (slope[0] * x + slope[1] - x.sin()) ** 2).mean()
    (found,) = torch.autograd.grad(loss, slope)
    dist.all_reduce(found, group=group)
    return found / group.size()


def gradients_of_rows(x: Tensor) -> Tensor:
    """Of the same loss, for each row alone: ``[n, 2]``."""
    residual = 2 * (0.5 * x - 0.2 - x.sin())
    return torch.stack((residual * x, residual), 1)


@pytest.fixture(scope="module")
def four() -> list[dict[int, Any]]:
    """Of four processes what they find in groups of two, and of four."""
    return run_ranks(in_groups, 4, [2, 4])


@pytest.fixture(scope="module", params=[2, 4, pytest.param(8, marks=pytest.mark.slow)])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    size = request.param
    found = run_ranks(in_groups, size, [size]) if size > 4 else request.getfixturevalue("four")
    return [each[size] for each in found[:size]]


def pooled(ranks: list[dict[str, Any]], name: str) -> tuple[Tensor, Tensor]:
    """The rows that all ranks have drawn, and their weights."""
    parts = [found["drawn"][name] for found in ranks]
    return torch.cat([part["row"] for part in parts]), torch.cat([part["priority_weight"] for part in parts])


class OneBuffer:
    """What one buffer of all rows draws: how often, with which weight, and the factor of each row's rank.

    Attributes:
        rows, chance, weight, factor: of each row that can be drawn (of slices: as their start).
    """

    def __init__(self, size: int, name: str) -> None:
        parts = []
        for rank in range(size):
            shard = rows_of(rank)
            n = shard.numel()
            q = (shard["priority"].double() + EPS) ** ALPHA if "prior" in name or name == "stratified" else None
            if q is None:
                q = torch.ones(n, dtype=torch.float64)
            # Of the slice samplers: how many steps are left, and how many starts its trajectory has.
            done = shard["next", "done"].flatten().tolist()
            ends = [i for i in range(n) if done[i] or i == n - 1]
            last = [next(end for end in ends if end >= i) for i in range(n)]
            starts = {end: max(sum(each == end for each in last) - SLICE + 1, 0) for end in ends}
            mass = q
            if "slices" in name or name in ("starts", "trajectories"):
                legal = torch.tensor([last[i] - i + 1 >= SLICE for i in range(n)])
                share = torch.tensor([1 / max(starts[last[i]], 1) for i in range(n)], dtype=torch.float64)
                mass = torch.where(legal, share if name == "trajectories" else q, 0)
            if name == "padded":
                # A trajectory is drawn, then one of its starts: of a short one the first step.
                first = [i == 0 or done[i - 1] for i in range(n)]
                share = [1 / starts[e] if starts[e] else float(f) for e, f in zip(last, first, strict=True)]
                mass = torch.tensor(share, dtype=torch.float64)
                legal = torch.tensor([last[i] - i + 1 >= SLICE or first[i] for i in range(n)])
                mass = torch.where(legal, mass, 0)
            parts.append((shard["row"], mass, q, torch.full((n,), float(mass.sum()), dtype=torch.float64)))
        self.rows, mass, q, own = (torch.cat(columns) for columns in zip(*parts, strict=True))
        self.chance = mass / mass.sum()
        self.factor = size * own / mass.sum()
        self.weight = (q / q[mass > 0].min()) ** -BETA
        self.drawable = mass > 0


NAMES = list(samplers(None))
NUMBERS = ("count", "mean", "m2", "peak")


def drawn_of(ranks: list[dict[str, Any]], name: str) -> tuple[OneBuffer, Tensor, Tensor]:
    """One buffer of all rows, which of them each draw of all ranks begins at, and the weights of its steps."""
    one = OneBuffer(len(ranks), name)
    rows, weights = pooled(ranks, name)
    step = SLICE if "slices" in name or name in ("trajectories", "starts", "padded") else 1
    starts = rows.view(-1, step)[:, 0].contiguous()
    return one, torch.searchsorted(one.rows, starts), weights.view(-1, step)


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_of_one_buffer_times_the_share_of_the_rank(ranks, name):
    one, place, weights = drawn_of(ranks, name)
    due = (one.weight * one.factor)[place]
    assert one.drawable[place].all()
    torch.testing.assert_close(weights.double(), due.unsqueeze(1).expand_as(weights), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_pooled_draws_follow_the_law_of_one_buffer(ranks, name):
    """Chi-square of pooled draws, of which each counts as often as its rank's factor says."""
    one, place, _ = drawn_of(ranks, name)
    count = torch.bincount(place, minlength=one.rows.numel()).double()
    due = place.numel() * one.chance / one.factor
    assert not count[~one.drawable].any()
    count, due = count[one.drawable], due[one.drawable]
    statistic = float(((count - due) ** 2 / due).sum())
    freedom = count.numel() - len(ranks)
    # Six standard deviations of chi-square. Stratified draws vary less.
    assert statistic < freedom + 6 * math.sqrt(2 * freedom)
    assert name == "stratified" or statistic > freedom - 6 * math.sqrt(2 * freedom)


def test_the_gradient_has_the_expectation_of_one_buffer(ranks):
    """To rounding where it is summed over all rows with the weights that were drawn, and as the mean of batches."""
    one = OneBuffer(len(ranks), "prioritized")
    x = torch.cat([rows_of(rank)["x"] for rank in range(len(ranks))]).double()
    each = gradients_of_rows(x)
    due = (one.chance * one.weight) @ each
    rows, weights = pooled(ranks, "prioritized")
    place = torch.searchsorted(one.rows, rows)
    weight = torch.zeros_like(one.weight).index_put((place,), weights.double())
    # Each rank draws its rows with q / S_r, which is their chance in one buffer by the factor and the number of ranks.
    seen = one.chance / one.factor * weight
    missing = weight == 0
    assert float(one.chance[missing].sum()) < 0.01
    torch.testing.assert_close(seen @ each, ((one.chance * one.weight)[~missing]) @ each[~missing], rtol=1e-6, atol=0)
    # Without the factor it is another one.
    plain = (one.chance / one.factor * one.weight) @ each
    gradients = ranks[0]["gradients"]
    error = gradients.std(0) / math.sqrt(BATCHES)
    assert ((gradients.mean(0) - due).abs() < 5 * error).all()
    assert ((plain - due).abs() > 5 * error).any()


@pytest.mark.parametrize("name", NAMES)
def test_every_run_has_the_same_bits(ranks, name):
    for found in ranks:
        n = found["again"][name]["row"].numel()
        for key, value in found["again"][name].items():
            assert torch.equal(value, found["drawn"][name][key][:n])


@pytest.mark.parametrize("name", NAMES)
def test_one_rank_is_a_buffer_without_a_group(ranks, name):
    for found in ranks:
        alone, nobody = found["alone"][name], dict(found["nobody"][name])
        nobody.setdefault("priority_weight", torch.ones_like(alone["priority_weight"]))
        assert alone.keys() == nobody.keys()
        assert all(torch.equal(alone[key], nobody[key]) for key in alone)


def test_new_rows_have_the_largest_priority_of_all_ranks(ranks):
    largest = max(found["largest"][0] for found in ranks)
    assert len({found["largest"][0] for found in ranks}) > 1
    for found in ranks:
        _, known, weight = found["largest"]
        assert known == largest
        assert weight == pytest.approx((largest + EPS) ** ALPHA)


def test_a_draw_takes_one_collective_of_24_bytes(ranks):
    for found in ranks:
        for name, calls in found["calls"].items():
            assert [size for _, size in calls] == [24], name
            assert "allgather" in calls[0][0]


def test_all_ranks_hear_of_a_rank_without_rows(ranks):
    last = len(ranks) - 1
    for found in ranks:
        for name, told in found["refused"].items():
            for text in told:
                assert f"of {len(ranks)} ranks those numbered [{last}] have no row that can be drawn" in text, name


def test_statistics_of_all_ranks_are_those_of_all_rows(ranks):
    for write in range(WRITES):
        states = [found["statistics"]["states"][write] for found in ranks]
        x = torch.cat([observations(rank, w)["x"] for rank in range(len(ranks)) for w in range(write + 1)]).double()
        moments = states[0]["Normalize"]["moments"]["0"]
        assert moments["count"].tolist() == [len(x)] * 3
        torch.testing.assert_close(moments["mean"], x.mean(0), rtol=1e-14, atol=0)
        torch.testing.assert_close(moments["m2"], ((x - x.mean(0)) ** 2).sum(0), rtol=1e-8, atol=0)
        assert torch.equal(moments["peak"].float(), x.abs().amax(0).float())
        for state in states:
            for name in ("Normalize", "RewardScale"):
                entry, first = state[name]["moments"]["0"], states[0][name]["moments"]["0"]
                assert all(torch.equal(entry[key], first[key]) for key in first)


def test_statistics_take_one_collective(ranks):
    for found in ranks:
        for write, calls in enumerate(found["statistics"]["calls"]):
            # Count, mean, M2 and largest magnitude of three elements, and of one.
            # Before they have met ranks also say how many elements a row has.
            expected = [4 * 3 * 8, 4 * 1 * 8] if write else [8, 4 * 3 * 8, 8, 4 * 1 * 8]
            assert [size for _, size in calls] == expected


@pytest.mark.parametrize("shared", [torch.ones(4, 2).double(), torch.ones(4, 3), torch.full((4, 3), 9.0).double(), 3])
def test_a_damaged_state_of_shared_statistics_is_refused(shared):
    step = Normalize("x")
    step.load_state_dict({"training": True, "moments": {"0": dict.fromkeys(NUMBERS, torch.ones(3).double())}})
    state = step.state_dict()
    state["moments"]["0"]["shared"] = shared
    with pytest.raises(ValueError, match=r"ranks share|float64"):
        step.load_state_dict(state)


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """A group of two ranks, the other of which is never heard."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    world = dist.group.WORLD
    assert world is not None
    yield world
    dist.destroy_process_group()


@pytest.mark.skipif(torch.__version__ < (2, 9), reason="PyTorch 2.8 has no all-gather of fake tensors")
@pytest.mark.parametrize("name", NAMES)
def test_a_draw_does_not_wait_for_the_gpu(group, name):
    with fake_cuda():
        buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(100, device="cuda"), sampler=samplers(group)[name], batch_size=12
        )
        done = torch.empty(50, 1, dtype=torch.bool, device="cuda")
        buffer.extend(TensorDict({"x": torch.empty(50, 2, device="cuda"), "next": {"done": done}}, [50]))
        with no_blocking_copies():
            weight = buffer.sample()["priority_weight"]
        assert (weight.device.type, weight.dtype, weight.shape) == ("cuda", torch.float32, (12,))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", NAMES)
def test_draws_with_nccl_are_captured(name, tmp_path):
    """One all-gather of 24 bytes, no wait; replays draw what eager steps draw, and with one rank what no group does."""
    dist.init_process_group("nccl", store=dist.FileStore(f"{tmp_path}/store", 1), rank=0, world_size=1)
    try:
        found = []
        for given, captured in ((dist.group.WORLD, True), (dist.group.WORLD, False), (None, False)):
            buffer = TensorDictReplayBuffer(
                storage=LazyTensorStorage(5000, device="cuda"), sampler=samplers(given)[name], priority_key="priority"
            )
            buffer.set_rng(torch.Generator().manual_seed(3))
            rows = rows_of(1).to("cuda")
            index = buffer.extend(rows)
            if buffer.sampler.has_priorities:
                buffer.update_priority(index, rows["priority"])

            def draw(buffer: TensorDictReplayBuffer = buffer) -> TensorDict:
                batch = drawn(buffer, 4 * SLICE)
                return batch.set("priority_weight", batch.get("priority_weight", torch.ones(len(batch), device="cuda")))

            step = capture(draw, device="cuda") if captured else draw
            with CountedCollectives() as counted:
                batches = [step().clone()]
            if given is not None:
                assert [size for _, size in counted.calls] == [24]
            batches += [step().clone() for _ in range(4)]
            with no_waiting():
                batches += [step().clone() for _ in range(5)]
            assert not captured or step.captured
            found.append(torch.stack(batches).cpu())
        assert same(found[0], found[1])
        assert torch.equal(found[1]["row"], found[2]["row"])
        torch.testing.assert_close(found[1]["priority_weight"], found[2]["priority_weight"])
    finally:
        dist.destroy_process_group()


def test_refusals(group):
    with pytest.raises(TypeError, match=r"process_group must be a torch\.distributed\.ProcessGroup"):
        RandomSampler(process_group=2)
    with pytest.raises(ValueError, match="batches of unequal sizes, whose mean over ranks"):
        SliceSampler(slice_len=3, strict_length=False, process_group=group)
    with pytest.raises(ValueError, match="batches of unequal sizes, whose mean over ranks"):
        PrioritizedSliceSampler(10, 0.6, 0.4, slice_len=3, span=(False, 1), process_group=group)
    sampler = RandomSampler(process_group=group)
    with pytest.raises(TypeError, match="can't be pickled: make it in the process that is the rank"):
        pickle.dumps(sampler)
    assert copy.deepcopy(sampler).shards is sampler.shards


def test_mixes_refuse_shards(group):
    """How many rows each buffer gives to a batch is up to each rank, and so would be how many collectives there are."""
    buffers = [filled(rows_of(0), RandomSampler(process_group=each)) for each in (None, group)]
    with pytest.raises(ValueError, match="process_group"):
        MixedReplayBuffer(buffers, batch_size=8).sample()
