"""What every mix of buffers must do, whatever they are: kinds of mixes, and random histories against plain models.

``tests/data/test_mixed.py`` runs them. To check another mix, add it to :data:`MIXES`. Its buffers are those of
:mod:`tests.contracts.buffers`, and so are the models of their rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from gpubuf import MixedReplayBuffer
from tests.contracts.buffers import COPIES, SLICE, STEPS, BufferContract, Model
from tests.support.transitions import same

ALPHA, BETA, EPS = 0.7, 0.5, 1e-8


class Count(nn.Module):
    """A transform that counts the batches that it has seen, and whose state may fail to load."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.fails = fails
        self.register_buffer("seen", torch.zeros(1, dtype=torch.int64))

    def forward(self, batch: TensorDict) -> TensorDict:
        self.seen += 1
        return batch

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        if self.fails:
            raise ArithmeticError("not this one")


@dataclass(frozen=True)
class Mix:
    """A kind of mix.

    Attributes:
        parts: its buffers.
    """

    parts: tuple[BufferContract, ...]

    def __str__(self) -> str:
        return " + ".join(map(str, self.parts))

    def new(self, seed: int) -> MixedReplayBuffer:
        """An empty mix."""
        buffers = [part.new(seed=seed + number) for number, part in enumerate(self.parts)]
        return MixedReplayBuffer(buffers, transform=Count(), generator=torch.Generator().manual_seed(seed))

    @property
    def unit(self) -> int:
        """Rows that stay together."""
        return SLICE if self.parts[0].slices else 1

    @property
    def prioritized(self) -> bool:
        return any(part.prioritized for part in self.parts)

    @property
    def generations(self) -> bool:
        return self.prioritized or any(part.generations for part in self.parts)


_C = BufferContract
#: The first six are gathered in one launch.
MIXES = [
    Mix((_C(), _C())),
    Mix((_C(sampler="prioritized"), _C(sampler="prioritized"))),
    Mix((_C(envs=2), _C(sampler="prioritized", envs=3))),
    Mix((_C(generations=True), _C(storage="memmap"))),
    Mix((_C(), _C(sampler="stratified"))),
    Mix((_C(sampler="prioritized", process=True), _C(process=True))),
    Mix((_C(), _C(sampler="prioritized"), _C(envs=2))),
    Mix((_C(sampler="prioritized"), _C(envs=2))),
    Mix((_C(n_steps=3, share_next=True), _C(n_steps=3, sampler="prioritized"))),
    Mix((_C(narrow=True, share_next=True, transform=True), _C(narrow=True, transform=True))),
    Mix((_C(sampler="slices"), _C(sampler="slices", envs=2))),
    Mix((_C(sampler="prioritized slices"), _C(sampler="prioritized slices", share_next=True))),
]


class MixHistory:
    """Random operations on a mix, and on a model of each of its buffers."""

    def __init__(self, mix: Mix, seed: int) -> None:
        self.mix, self.mixed = mix, mix.new(seed)
        self.models = [Model(part, seed + number) for number, part in enumerate(mix.parts)]
        self.random = self.models[0].random

    def run(self, n: int) -> None:
        operations = [self.extend, self.extend, self.sample, self.sample, self.sample, self.empty, self.duplicate]
        for _ in range(n):
            self.random.choice([*operations, self.set_shares])()
            assert len(self.mixed) == sum(len(model.stored) for model in self.models)
        for buffer, model in zip(self.mixed.buffers, self.models, strict=True):
            model.check_rows(buffer)

    def extend(self) -> None:
        number = self.random.randrange(len(self.models))
        self.mixed.extend(self.models[number].write(self.random.choice([1, 2, 5, STEPS, STEPS + 5])), buffer=number)

    def empty(self) -> None:
        number = self.random.randrange(2 * len(self.models))
        if number < len(self.models) and self.mixed[number].initialized:
            self.mixed[number].empty()
            self.models[number].empty()
        elif number == len(self.models) and all(buffer.initialized for buffer in self.mixed.buffers):
            self.mixed.empty()
            for model in self.models:
                model.empty()

    def set_shares(self) -> None:
        shares = [self.random.choice([0.0, 0.1, 0.5, 0.75]) for _ in self.models]
        shares[self.random.randrange(len(shares))] = 0.25
        self.mixed.shares = shares

    def duplicate(self) -> None:
        """A copy goes on with the same batches, and shares nothing (CASES 60)."""
        ready = self.ready()
        how = self.random.choice(list(COPIES))
        other = COPIES[how](self.mix, self.mixed)
        if how in ("state_dict", "files"):
            other.shares = self.mixed.shares
            assert other.transform.state_dict() == self.mixed.transform.state_dict()
        if ready:
            for _ in range(3):
                assert same(self.mixed.sample(4), other.sample(4))
        self.mixed.empty()
        self.mixed = other

    def ready(self) -> bool:
        """Whether some buffer that has a share has rows, and every such one some to draw."""
        parts = zip(self.mixed.buffers, self.mixed.shares, strict=True)
        live = [buffer for buffer, share in parts if share and len(buffer)]
        if not live:
            with pytest.raises(RuntimeError, match="all the buffers that have a share are empty"):
                self.mixed.sample(4)
        return bool(live) and all(buffer.can_sample() for buffer in live)

    # Batches

    def sample(self) -> None:
        if not self.ready():
            return
        n, batches = self.random.choice([2, 4, 10, 16]), self.random.choice([None, None, 3])
        batch, info = self.mixed.sample(n, return_info=True, batches=batches)
        assert batch.shape == info["index"].shape == ((n,) if batches is None else (batches, n))
        assert {key: batch[key] is value for key, value in info.items()} == dict.fromkeys(info, True)
        assert ("priority_weight" in info) == self.mix.prioritized
        assert ("index_generation" in info) == self.mix.generations
        for owner in info["buffer"].reshape(-1, n):
            assert (owner.diff() >= 0).all()
            self.check_counts(torch.bincount(owner, minlength=len(self.models)).tolist(), n)
        flat = {key: value.reshape(-1) for key, value in info.items()}
        for number in range(len(self.models)):
            mine = flat["buffer"] == number
            if mine.any():
                self.check_part(number, batch.reshape(-1)[mine], {key: value[mine] for key, value in flat.items()})
        if self.mix.prioritized and self.random.random() < 0.7:
            self.return_priorities(batch, flat)
        if self.mix.generations and self.random.random() < 0.5:
            self.return_keys(flat)

    def check_counts(self, counts: list[int], n: int) -> None:
        """CASES 45, 61 and 74: each buffer gives its share but for a row, and an empty one or a share of 0 nothing."""
        unit, stored, shares = self.mix.unit, [len(buffer) for buffer in self.mixed.buffers], self.mixed.shares
        weights = [float(share) * (rows > 0) for share, rows in zip(shares, stored, strict=True)]
        due = [n / unit * share / sum(weights) for share in weights]
        assert sum(counts) == n
        assert all(count == 0 for count, weight in zip(counts, weights, strict=True) if not weight)
        assert all(abs(count / unit - share) < 1 for count, share in zip(counts, due, strict=True))

    def check_part(self, number: int, rows: TensorDict, info: dict[Any, Tensor]) -> None:
        """The rows of one buffer are its rows, with its generations and weights."""
        contract, model, buffer = self.mix.parts[number], self.models[number], self.mixed[number]
        index = info["index"]
        coordinates = torch.stack([index // model.envs, index % model.envs], -1) if contract.envs else index
        model.check_batch(buffer, rows, {**info, "index": coordinates})
        if not contract.prioritized and "priority_weight" in info:
            assert (info["priority_weight"] == 1).all()
        elif contract.sampler == "prioritized":
            leaves = buffer.sampler.tree.leaves
            due = (leaves[index] / leaves[leaves > 0].min()) ** -BETA
            torch.testing.assert_close(info["priority_weight"], due, rtol=1e-5, atol=0)

    # What goes back

    def priorities(self) -> list[Tensor | None]:
        """The leaves of each buffer."""
        has = [buffer.initialized and buffer.sampler.has_priorities for buffer in self.mixed.buffers]
        return [
            buffer.sampler.tree.leaves.clone() if own else None
            for buffer, own in zip(self.mixed.buffers, has, strict=True)
        ]

    def return_priorities(self, batch: TensorDict, info: dict[Any, Tensor]) -> None:
        """CASES 42 and 45: each to its buffer, unless its row was overwritten; those of other rows may be anything."""
        if self.random.random() < 0.5:
            self.extend()
        due = self.priorities()
        priority = torch.rand(info["index"].shape, generator=torch.Generator().manual_seed(len(batch))) + 0.5
        for i, (number, at) in enumerate(zip(info["buffer"].tolist(), info["index"].tolist(), strict=True)):
            leaves = due[number]
            if leaves is None:
                priority[i] = float("nan")
            elif self.models[number].generation(at) == info["index_generation"][i]:
                leaves[at] = (priority[i] + EPS) ** ALPHA
        if self.random.random() < 0.5:
            self.mixed.update_tensordict_priority(batch.set("td_error", priority.view(batch.shape)))
        else:
            self.mixed.update_priority(
                info["index"], priority, buffer=info["buffer"], generation=info["index_generation"]
            )
        for found, leaves in zip(self.priorities(), due, strict=True):
            assert leaves is None or torch.allclose(found, leaves, rtol=1e-5, atol=0)

    def return_keys(self, info: dict[Any, Tensor]) -> None:
        """CASES 46: each row that was drawn gets another number, unless it was overwritten."""
        rows = {pair: i for i, pair in enumerate(zip(info["buffer"].tolist(), info["index"].tolist(), strict=True))}
        drawn = torch.tensor(list(rows.values()))
        if self.random.random() < 0.5:
            self.extend()
        back = [
            self.models[number].renumber(at)
            if self.models[number].generation(at) == info["index_generation"][i] and at in self.models[number].stored
            else -1
            for (number, at), i in rows.items()
        ]
        values = TensorDict({"number": torch.tensor(back).unsqueeze(-1)}, [len(back)])
        self.mixed.update_if_present(
            info["index"][drawn], values, buffer=info["buffer"][drawn], generation=info["index_generation"][drawn]
        )
        for buffer, model in zip(self.mixed.buffers, self.models, strict=True):
            model.check_rows(buffer)
