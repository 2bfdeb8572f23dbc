"""Returns to go: against a plain model over random histories, and with the rest of a buffer."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
import random
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

import gpubuf
from gpubuf.data import (
    Codec,
    Hindsight,
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    ReturnsToGo,
    RoundRobinWriter,
    SliceSampler,
    TensorDictReplayBuffer,
    Window,
)
from gpubuf.data.storage.end_bits import EndBits
from gpubuf.data.storage.plans import Readers
from gpubuf.data.storage.returns import Returns
from tests.support.fake_cuda import fake_cuda, no_blocking_copies
from tests.support.graph_recorder import RecordedCuda
from tests.support.placements import Machine


@dataclass
class Step:
    number: int
    reward: float
    done: bool
    episode: int
    marked: bool = False


class History:
    """Writes to a buffer and to a list of steps for each environment, with sizes and options that ``seed`` chooses."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        choose = self.random.choice
        self.envs, self.steps, self.gamma = choose([1, 1, 2, 3]), choose([1, 3, 8, 70]), choose([0.0, 0.5, 0.99, 1.0])
        self.by_id, self.time_first, self.elements = choose([True, False]), choose([True, False]), choose([1, 1, 2])
        # Rewards are halves and whole numbers, which all of these hold.
        self.stored = choose([None, None, torch.float64, torch.float16, Codec(torch.int8, 0.5)])
        self.mapped = choose([True, False, False]) and self.stored is None
        self.count, self.episodes = 0, [1000 * env for env in range(self.envs)]
        self.rows: list[list[Step]] = [[] for _ in range(self.envs)]
        self.buffer = self.new()

    def new(self) -> ReplayBuffer:
        several = self.envs > 1
        options: dict[str, Any] = {"dtypes": {("next", "reward"): self.stored}} if self.stored is not None else {}
        storage = LazyMemmapStorage if self.mapped else LazyTensorStorage
        return ReplayBuffer(
            storage(self.steps * self.envs, ndim=1 + several, **options),
            writer=RoundRobinWriter(track_generations=True),
            returns=ReturnsToGo(self.gamma, key="value_of_data"),
            dim_extend=0 if several and self.time_first else None,
            batch_size=16,
            **{"traj_key": "episode"} if self.by_id else {"end_keys": [("next", "done")]},
        )

    def batch_of(self, rows: list[list[Step]]) -> TensorDict:
        """Rows ``[E, T]``, ``[T, E]`` or ``[T]``."""

        def column(name: str) -> Tensor:
            return torch.tensor([[getattr(row, name) for row in steps] for steps in rows]).unsqueeze(-1)

        # A second element of a reward is twice the first.
        reward = column("reward") * torch.arange(1.0, self.elements + 1)
        coming = {"reward": reward, "done": column("done")}
        own = {"number": column("number"), "episode": column("episode")}
        data = TensorDict({**own, "next": coming}, [self.envs, len(rows[0])])
        return data[0] if self.envs == 1 else data.transpose(0, 1).contiguous() if self.time_first else data

    def write(self, n: int) -> None:
        new: list[list[Step]] = [[] for _ in range(self.envs)]
        for env, steps in enumerate(new):
            for _ in range(n):
                done = self.random.random() < 0.2
                self.count += 1
                steps.append(Step(self.count, self.random.randrange(-8, 9) / 2, done, self.episodes[env]))
                self.episodes[env] += done
        self.buffer.extend(self.batch_of(new))
        self.keep(new)

    def add(self) -> None:
        """One row, or one step of all environments."""
        new = [[Step(self.count + 1 + env, env / 2, False, self.episodes[env])] for env in range(self.envs)]
        self.count += self.envs
        time = 0 if self.envs == 1 or self.time_first else 1
        self.buffer.add(self.batch_of(new).unbind(time)[0])
        self.keep(new)

    def keep(self, new: list[list[Step]]) -> None:
        for rows, steps in zip(self.rows, new, strict=True):
            rows += steps
            del rows[: -self.steps]

    def end(self) -> None:
        env = self.random.choice([None, *range(self.envs)]) if self.rows[0] else None
        if self.rows[0]:
            self.buffer.end_trajectories(env)
            for at in range(self.envs) if env is None else [env]:
                self.rows[at][-1].marked = True

    def overwrite(self) -> None:
        """Rewards, and ends, of rows that are stored, as rows and by their keys."""
        if not self.rows[0]:
            return
        batch, info = self.buffer.sample(return_info=True)
        by_number = {row.number: row for rows in self.rows for row in rows}
        found = [by_number[number] for number in batch["number"].flatten().tolist()]
        for row in found:
            row.reward = self.random.randrange(-8, 9) / 2
        reward = torch.tensor([[row.reward] for row in found]) * torch.arange(1.0, self.elements + 1)
        if self.random.random() < 0.5:
            data = TensorDict({"next": {"reward": reward}}, [16])
            self.buffer.update_if_present(info["index"], data, generation=info["index_generation"])
            return
        for row in found:
            row.done = self.random.random() < 0.5
        batch["next", "reward"] = reward
        batch["next", "done"] = torch.tensor([[row.done] for row in found])
        index = info["index"]
        self.buffer[index if self.envs == 1 else tuple(index.unbind(-1))] = batch.exclude("value_of_data")

    def load(self, folder: Path) -> None:
        """Go on with another buffer, of as much room or more."""
        if not self.rows[0]:
            return
        before, end = self.buffer, self.random.random() < 0.5
        self.steps += self.random.choice([0, 5])
        same = self.steps * self.envs == before.storage.max_size
        how = self.random.choice(["state", "folder", *["copy", "pickle"] * same])
        if how in ("copy", "pickle"):
            self.buffer = copy.deepcopy(before) if how == "copy" else pickle.loads(pickle.dumps(before))
            return
        self.buffer = self.new()
        if how == "state":
            self.buffer.load_state_dict(before.state_dict(), end_trajectories=end)
        else:
            before.save(folder / str(self.count))
            self.buffer.load(folder / str(self.count), end_trajectories=end)
        for rows in self.rows:
            rows[-1].marked |= end

    def empty(self) -> None:
        self.buffer.empty()
        for rows in self.rows:
            rows.clear()

    def act(self, folder: Path) -> None:
        choose = self.random.choice
        action = choose(["write"] * 8 + ["add"] * 4 + ["end", "end", "overwrite", "overwrite", "load", "empty"])
        if action == "write":
            self.write(choose([1, 1, 2, 3, 7, self.steps, self.steps + 2]))
        elif action == "load":
            self.load(folder)
        else:
            getattr(self, action)()
        self.check()

    def due(self) -> dict[int, float]:
        """The return to go of each row, by its number."""
        found = {}
        for rows in self.rows:
            value = math.nan
            for row, later in zip(reversed(rows), [None, *reversed(rows)], strict=False):
                if self.by_id:
                    # The next row has to tell, also of a mark.
                    ends = later is not None and (row.marked or later.episode != row.episode)
                else:
                    ends = row.marked or row.done
                value = row.reward + self.gamma * (0.0 if ends else value)
                found[row.number] = value
        return found

    def check(self) -> None:
        due = self.due()
        if not due:
            return
        reader, n = self.buffer.parts.reader, len(self.buffer)
        tensors, _ = reader.gather(torch.arange(n))
        every = reader.layout.assemble(tensors, (n,), None)
        assert sorted(every["number"].flatten().tolist()) == sorted(due)
        for batch in (every, self.buffer.sample()):
            expected = torch.tensor([[due[number]] for number in batch["number"].flatten().tolist()])
            expected = expected * torch.arange(1.0, self.elements + 1)
            assert batch["value_of_data"].dtype is torch.float32
            torch.testing.assert_close(batch["value_of_data"], expected, equal_nan=True)


def run_histories(seeds: range, folder: Path) -> None:
    for seed in seeds:
        history = History(seed)
        for number in range(14):
            history.act(folder / f"{seed}-{number}")


@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(1000, 8000), marks=pytest.mark.nightly)], ids=len)
def test_every_return_is_that_of_a_plain_model(seeds, tmp_path):
    """After each of many writes, ends, changes in place, copies and loads: all rows as they are read."""
    run_histories(seeds, tmp_path)


@pytest.mark.parametrize(
    ("where", "name", "fault"),
    [
        (EndBits, "update_returns", lambda self, returns, rewards, rule, dtype, n: None),
        (EndBits, "update_returns", "n += self.signal.by_id + self._marks.by_writers"),
        (Readers, "end", "each.write(1)"),
        (Readers, "depends_on", lambda self, columns: self.end_bits.depends_on(columns)),
        (Returns, "load", "self.rebuild()"),
        (Readers, "_kept", property(lambda self: [each for each in (self.end_bits,) if each is not None])),
    ],
)
def test_the_histories_notice_a_fault(where, name, fault, monkeypatch, tmp_path):
    """Nothing is added up, the step before a write, marks, changes in place and loads are forgotten, or addresses."""
    if isinstance(fault, str):
        function = getattr(where, name)
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(fault) == 1, "plant another fault"
        found: dict[str, Any] = {}
        exec(source.replace(fault, "" if fault.startswith("or") else "pass"), function.__globals__, found)
        fault = found[name]
    monkeypatch.setattr(where, name, fault)
    with pytest.raises((AssertionError, TypeError)):
        run_histories(range(60), tmp_path)


def rows(n: int, ends: tuple[int, ...] = (), device: str = "cpu") -> TensorDict:
    """Rows of rewards of 1; those of ``ends`` end a trajectory."""
    done = torch.zeros(n, 1, dtype=torch.bool, device=device)
    done[list(ends)] = True
    reward = torch.ones(n, 1, device=device)
    return TensorDict({"number": torch.arange(n, device=device), "next": {"reward": reward, "done": done}}, [n])


def returns_of(buffer: ReplayBuffer) -> list[float]:
    """Those of the stored rows, by position, -1 for NaN."""
    found: Tensor = buffer.storage.readers.returns.column[: len(buffer), 0].nan_to_num(-1)
    return found.tolist()


def test_a_batch_says_what_has_ended():
    """NaN until then, and a key that users can mask by."""
    buffer = ReplayBuffer(10, batch_size=64, returns=ReturnsToGo(0.5))
    buffer.extend(rows(6, ends=(2,)))
    batch = buffer.sample()
    expected = torch.tensor([1.75, 1.5, 1.0, math.nan, math.nan, math.nan])[batch["number"]]
    assert batch["return_to_go"].shape == (64, 1)
    torch.testing.assert_close(batch["return_to_go"][:, 0], expected, equal_nan=True)
    # Rows are given as they were written.
    assert "return_to_go" not in buffer[:].keys()
    buffer.end_trajectories()
    assert returns_of(buffer) == [1.75, 1.5, 1.0] * 2
    # What is overwritten takes nothing from the rest of its trajectory.
    buffer.extend(rows(9, ends=(8,)))
    assert returns_of(buffer)[5] == 1.0


def test_with_windows_and_steps():
    """A window of it is around the drawn row, which is that of the return with several steps, too."""
    around = {"return_to_go": Window(-1, 1, outside="zero", mask="pad"), "number": Window(0, 1)}
    buffer = ReplayBuffer(20, batch_size=32, returns=ReturnsToGo(1.0), windows=around, n_steps=3, gamma=1.0)
    buffer.extend(rows(6, ends=(2, 5)))
    batch = buffer.sample()
    expected = torch.tensor([[0, 3, 2], [3, 2, 1], [2, 1, 0]]).repeat(2, 1).float()
    assert torch.equal(batch["return_to_go"][..., 0], expected[batch["number"][:, 0]])
    assert torch.equal(batch["pad"], batch["return_to_go"][..., 0] == 0)
    assert torch.equal(batch["next", "reward"][:, 0], expected[batch["number"][:, 0], 1])


def test_with_slices_and_priorities():
    """A decision transformer's: each step of a slice has its return."""
    buffer = TensorDictReplayBuffer(20, sampler=SliceSampler(slice_len=3), batch_size=12, returns=ReturnsToGo(1.0))
    buffer.extend(rows(9, ends=(2, 5, 8)))
    batch = buffer.sample().view(4, 3)
    assert torch.equal(batch["return_to_go"], torch.tensor([[3.0], [2.0], [1.0]]).expand(4, 3, 1))
    prioritized = TensorDictReplayBuffer(
        20, sampler=PrioritizedSampler(20, 0.7, 0.5), batch_size=12, returns=ReturnsToGo(1.0)
    )
    prioritized.extend(rows(3, ends=(2,)))
    batch = prioritized.sample()
    assert torch.equal(batch["return_to_go"], 3.0 - batch["number"].unsqueeze(1))


def test_buffers_of_one_storage_have_the_same():
    """Also one that comes later, when the rows are there; and another key that comes later moves nothing."""
    first = ReplayBuffer(10, batch_size=4, n_steps=2)
    first.extend(rows(6, ends=(2, 5)))
    second = ReplayBuffer(first.storage, batch_size=4, returns=ReturnsToGo(0.5))
    assert returns_of(second) == [1.75, 1.5, 1.0] * 2
    with pytest.raises(ValueError, match="another buffer with the same storage has other returns to go"):
        ReplayBuffer(first.storage, returns=ReturnsToGo(0.9))
    first.extend(rows(1, ends=(0,)).set("late", torch.ones(1)))
    second.extend(rows(2, ends=(1,)).set("late", torch.ones(2)))
    assert returns_of(second) == [1.75, 1.5, 1.0] * 2 + [1.0, 1.5, 1.0]
    assert first.sample().keys() - {"late"} == {"number", "next", "steps_to_next_obs"}


def test_an_interrupt_is_mended():
    buffer = ReplayBuffer(10, batch_size=4, returns=ReturnsToGo(0.5))
    buffer.extend(rows(6, ends=(2,)))
    due = returns_of(buffer)
    buffer.storage.readers.returns.column.fill_(7)
    buffer.storage.followers.mend()
    assert returns_of(buffer) == due


@pytest.mark.parametrize("where", ["pinned", "split"])
def test_rows_that_move_are_added_up_where_they_are(where, monkeypatch):
    """Rewards in other memory, or in two memories, without rows of before read again."""
    Machine(device=2_000_000).install(monkeypatch, work_on_cpu=True)
    stays, moves = (ReplayBuffer(200, batch_size=4, returns=ReturnsToGo(0.5)) for _ in range(2))
    for number, n in enumerate((150, 3, 80, 1)):
        for buffer in (stays, moves):
            buffer.extend(rows(n, ends=tuple(range(0, n, 7))))
        if number == 0:
            moves.to("split:64%" if where == "split" else "pinned")
            assert moves.storage.placement.kind == where
        assert returns_of(stays) == returns_of(moves)
    moves.storage.readers.returns.column.fill_(7)
    moves.storage.followers.rebuild()
    assert returns_of(stays) == returns_of(moves)


def test_memory_is_planned():
    batch = rows(1)
    batch["next", "reward"] = torch.zeros(1, 2)
    made = gpubuf.plan(batch, 1000, returns=ReturnsToGo())
    buffer = ReplayBuffer(1000, returns=ReturnsToGo())
    buffer.extend(batch)
    assert made.fit("cpu").index.index == buffer.memory().index >= 8000


def test_a_captured_step_goes_on_adding_up(monkeypatch):
    """Writes, and draws that read the column."""
    RecordedCuda().install(monkeypatch)
    buffer, twin = (ReplayBuffer(10, batch_size=8, returns=ReturnsToGo(0.5)) for _ in range(2))
    buffer.extend(rows(1))
    twin.extend(rows(1))

    def step(data):
        buffer.extend(data)
        return buffer.sample()["return_to_go"]

    captured = gpubuf.capture(step, warmup=1)
    for number in range(7):
        data = rows(3, ends=(number % 3,) if number % 2 else ())
        drawn = captured(data)
        twin.extend(data)
        assert returns_of(buffer) == returns_of(twin)
        assert set(drawn.nan_to_num(-1).flatten().tolist()) <= set(returns_of(twin))


def test_nothing_waits_for_the_gpu():
    with fake_cuda(), no_blocking_copies():
        storage = LazyTensorStorage(100, device="cuda", dtypes={("next", "reward"): torch.float16})
        buffer = ReplayBuffer(storage, batch_size=4, returns=ReturnsToGo(), windows={"return_to_go": Window(-2, 0)})
        data = {"number": torch.empty(30, device="cuda"), "next": {"reward": torch.empty(30, 1, device="cuda")}}
        data["next"]["done"] = torch.empty(30, 1, dtype=torch.bool, device="cuda")
        buffer.extend(TensorDict(data, [30]))
        buffer.end_trajectories()
        assert buffer.sample()["return_to_go"].shape == (4, 3, 1)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"reward": "reward"}, KeyError, "returns add up 'reward', which is not stored"),
        ({"reward": ("next", "phase")}, ValueError, "must be a real number, but is torch.complex64"),
        ({"key": "number"}, ValueError, "a key 'number', which the rows have already"),
        ({"key": "index"}, ValueError, "a key 'index', which draws have already"),
        ({"key": ("number", "return")}, ValueError, "which the rows have already"),
        ({"key": "pad"}, ValueError, "can't be both the return to go and what is told of a window"),
    ],
)
def test_rows_that_have_no_returns(options, error, text):
    windows = {"number": Window(-1, 0, mask="pad")}
    buffer = ReplayBuffer(10, batch_size=4, windows=windows, returns=ReturnsToGo(**options))
    data = rows(3)
    data["next", "phase"] = torch.zeros(3, dtype=torch.complex64)
    with pytest.raises(error, match=text):
        buffer.extend(data)


def test_what_can_not_be():
    for gamma in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="gamma must be in"):
            ReturnsToGo(gamma)
    for key in ((), ("next", "return")):
        with pytest.raises(ValueError, match="a key that is not under 'next'"):
            ReturnsToGo(key=key)
    with pytest.raises(ValueError, match="returns to go would know nothing"):
        ReplayBuffer(
            10,
            relabel=Hindsight(lambda achieved, goal, row: achieved),
            returns=ReturnsToGo(),
        )
    shared = ReplayBuffer(
        LazyTensorStorage(10, share_next=["reward"]), end_keys=[("next", "done")], returns=ReturnsToGo()
    )
    with pytest.raises(ValueError, match="exclude it from the keys of share_next"):
        shared.extend(rows(3).set("reward", torch.ones(3, 1)))
