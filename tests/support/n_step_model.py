"""n-step transitions in plain Python, and the rows that the tests of them write."""

from __future__ import annotations

import torch
from tensordict import TensorDict

from gpubuf import LazyTensorStorage, TensorDictReplayBuffer
from tests.contracts.buffers import SAMPLERS


class Model:
    """An unbounded list of transitions for each environment, of which the newest ``steps`` are stored.

    Args:
        steps: that fit.
        envs: environments; None: one, and batches without a dimension for it.
        seed: of rewards and ends.
        ends: share of rows that end an episode.
    """

    def __init__(self, steps: int, envs: int | None = None, *, seed: int = 0, ends: float = 0.25) -> None:
        self.steps, self.envs, self.ends = steps, envs, ends
        self.rows: list[list[dict[str, float]]] = [[] for _ in range(envs or 1)]
        self._random = torch.Generator().manual_seed(seed)

    def write(self, n: int) -> TensorDict:
        """The next ``n`` steps, for a buffer to write: ``[n]``, or ``[envs, n]``."""
        new = [[self._row(env, len(self.rows[env]) + i) for i in range(n)] for env in range(len(self.rows))]
        for env, rows in enumerate(new):
            self.rows[env] += rows
        batch = torch.stack([self._batch(rows) for rows in new])
        return batch if self.envs is not None else batch[0]

    def _row(self, env: int, step: int) -> dict[str, float]:
        draw = torch.rand(4, generator=self._random).tolist()
        ended = draw[1] < self.ends
        number = 1000 * env + step
        return {
            "number": number,
            # The true final observation of an episode is not the next row's.
            "coming": number + (0.5 if ended else 1),
            "reward": draw[0] - 0.5,
            "terminated": ended and draw[2] < 0.5,
            "truncated": ended and draw[2] >= 0.5,
            "priority": draw[3] + 0.1,
        }

    @staticmethod
    def _batch(rows: list[dict[str, float]]) -> TensorDict:
        def column(name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.tensor([row[name] for row in rows], dtype=dtype).reshape(-1, 1)

        terminated, truncated = column("terminated", torch.bool), column("truncated", torch.bool)
        following = {
            "observation": column("coming").expand(-1, 3).clone(),
            "reward": column("reward"),
            "costs": torch.cat([column("reward"), -2 * column("reward")], 1).double(),
            "terminated": terminated,
            "truncated": truncated,
            "done": terminated | truncated,
        }
        at_root = {"observation": column("number").expand(-1, 3).clone(), "action": column("number") + 0.25}
        return TensorDict({**at_root, "next": TensorDict(following, [len(rows)])}, [len(rows)])

    @property
    def written(self) -> int:
        return len(self.rows[0])

    def position(self, number: int) -> int:
        """Where the row of a number lies."""
        env, step = divmod(number, 1000)
        return (step % self.steps) * len(self.rows) + env

    def stored(self) -> list[int]:
        """The numbers of the rows that are stored."""
        first = max(0, self.written - self.steps)
        return [1000 * env + step for env in range(len(self.rows)) for step in range(first, self.written)]

    def transition(self, number: int, n_steps: int, gamma: float) -> dict[str, float]:
        """The transition that begins with the row of a number."""
        env, step = divmod(number, 1000)
        assert max(0, self.written - self.steps) <= step < self.written
        window = []
        for row in self.rows[env][step : step + n_steps]:
            window.append(row)
            if row["terminated"] or row["truncated"]:
                break
        total = 0.0
        for i, row in enumerate(window):
            total += gamma**i * torch.tensor(row["reward"]).item()
        return {**window[-1], "number": number, "reward": total, "steps": len(window)}

    def check(self, batch: TensorDict, n_steps: int, gamma: float) -> None:
        """Every row of a batch is what it should be. It has its ``"index"`` if the buffer adds that."""
        flat = batch.reshape(-1)
        following = flat["next"]
        assert batch.numel() > 0
        assert flat["steps_to_next_obs"].dtype is torch.int64
        assert flat["steps_to_next_obs"].shape == (len(flat), 1)
        for i in range(len(flat)):
            due = self.transition(int(flat["observation"][i, 0]), n_steps, gamma)
            assert flat["observation"][i].tolist() == [due["number"]] * 3
            assert flat["action"][i].tolist() == [due["number"] + 0.25]
            assert flat["steps_to_next_obs"][i].tolist() == [due["steps"]]
            assert following["observation"][i].tolist() == [due["coming"]] * 3
            assert following["terminated"][i].tolist() == [bool(due["terminated"])]
            assert following["truncated"][i].tolist() == [bool(due["truncated"])]
            assert following["done"][i].tolist() == [bool(due["terminated"] or due["truncated"])]
            assert abs(following["reward"][i].item() - due["reward"]) <= 1e-6 * max(1, abs(due["reward"]))
            if "index" in flat.keys():
                index = flat["index"][i].tolist()
                position = index if isinstance(index, int) else index[0] * len(self.rows) + index[1]
                assert position == self.position(due["number"])


def new(
    steps: int, envs: int | None = None, sampler: str = "uniform", storage: type = LazyTensorStorage, **options
) -> TensorDictReplayBuffer:
    capacity = steps * (envs or 1)
    return TensorDictReplayBuffer(
        storage=storage(capacity, ndim=1 if envs is None else 2),
        sampler=SAMPLERS[sampler](capacity),
        **{"batch_size": 24, "generator": torch.Generator().manual_seed(3), **options},
    )


def filled(n: int = 20, steps: int = 12, **options) -> tuple[TensorDictReplayBuffer, Model]:
    buffer, model = new(steps, **{"n_steps": 3, "gamma": 0.9, **options}), Model(steps, options.get("envs"))
    buffer.extend(model.write(n))
    return buffer, model


def agents_rows(n: int, **more: torch.Tensor) -> TensorDict:
    step = torch.arange(float(n)).unsqueeze(-1)
    flags = torch.zeros(n, 1, dtype=torch.bool)
    below = {"observation": step + 1, "reward": step, "done": flags, **more}
    return TensorDict({"observation": step, "next": below}, [n])
