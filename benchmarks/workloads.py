"""The workloads: what is done, to how many transitions, and how its result is checked before it is timed.

Every library gets the same transitions, in the same order, and the same indices and priorities. The transitions carry
their row number in the first action, so that a batch tells which rows it was made of.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from benchmarks.libraries import ALPHA, BETA, EPS, Library

CAPACITY = 1_000_000
#: Different batches that a benchmark goes through in turn, so that none of them stays in the caches.
POOL = 64


def transitions(n: int, seed: int = 0) -> TensorDict:
    """``n`` transitions of 17 + 6 + 17 float32, reward, done and terminated; ``action[:, 0]`` is the row number."""
    generator = torch.Generator().manual_seed(seed)

    def normal(width: int) -> Tensor:
        return torch.randn(n, width, generator=generator)

    action = normal(6)
    # exact in float32 up to 2**24 rows
    action[:, 0] = torch.arange(n)
    terminated = torch.rand(n, 1, generator=generator) < 0.001
    done = terminated | (torch.rand(n, 1, generator=generator) < 0.001)
    after = {"observation": normal(17), "reward": normal(1), "done": done, "terminated": terminated}
    return TensorDict(
        {"observation": normal(17), "action": action, "next": TensorDict(after, batch_size=[n])}, batch_size=[n]
    )


def draws(n: int, capacity: int) -> list[tuple[Tensor, Tensor]]:
    """:data:`POOL` pairs of ``n`` row numbers and their new priorities."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randint(capacity, (n,), generator=generator), torch.rand(n, generator=generator) + 0.1)
        for _ in range(POOL)
    ]


def row_numbers(library: Library, batch: Any) -> np.ndarray:
    """Which rows a sampled batch is made of."""
    return library.columns(batch)["action"][:, 0].astype(np.int64)


def check_rows(columns: dict[str, np.ndarray], source: TensorDict, n: int) -> np.ndarray:
    """Assert that a batch holds ``n`` whole transitions of the source; return their row numbers."""
    row = columns["action"][:, 0].astype(np.int64)
    assert row.shape == (n,)
    for name, column in source.flatten_keys(".").items():
        np.testing.assert_array_equal(columns[name], column.numpy()[row], err_msg=name)
    if "index" in columns:
        np.testing.assert_array_equal(columns["index"], row)
    return row


def set_all_priorities(library: Library, source: TensorDict) -> np.ndarray:
    """Give every row a priority of its own; returns them."""
    priority = torch.rand(len(source), generator=torch.Generator().manual_seed(2)) + 0.1
    library.update(*library.priorities(torch.arange(len(source)), priority))
    return priority.numpy().astype(np.float64)


def check_weights(library: Library, priority: np.ndarray, source: TensorDict, n: int) -> None:
    """Assert that a prioritized batch has whole rows and the weights of the formula (Schaul et al., 2016)."""
    columns = library.columns(library.sample(n))
    row = check_rows(columns, source, n)
    weight = (priority + EPS) ** ALPHA
    np.testing.assert_allclose(columns["weight"].ravel(), (weight[row] / weight.min()) ** -BETA, rtol=1e-5)


def check_draws_only(library: Library, rows: np.ndarray, n: int) -> None:
    """Assert that a batch is made of these rows alone."""
    drawn = row_numbers(library, library.sample(n))
    assert np.isin(drawn, rows).all()
    assert np.unique(drawn).size > 1


def sampling(library: Library, source: TensorDict, n: int) -> Callable[[], object]:
    """Draw a batch."""
    if library.prioritized:
        check_weights(library, set_all_priorities(library, source), source, n)
    else:
        row = check_rows(library.columns(library.sample(n)), source, n)
        assert np.unique(row).size > n // 2
    sample = library.sample
    return lambda: sample(n)


#: So far above the others that nothing else is drawn.
OVERWHELMING = 1e20


def updating(library: Library, source: TensorDict, n: int) -> Callable[[], object]:
    """Set the priorities of a batch of rows."""
    set_all_priorities(library, source)
    pool = [library.priorities(index, priority) for index, priority in draws(n, len(source))]
    index, priority = draws(n, len(source))[0]
    library.update(*library.priorities(index, torch.full_like(priority, OVERWHELMING)))
    check_draws_only(library, index.numpy(), n)
    library.update(*pool[0])
    batches, update = cycle(pool), library.update
    return lambda: update(*next(batches))


def stepping(library: Library, source: TensorDict, n: int) -> Callable[[], object]:
    """Draw a batch, then set the priorities of the rows drawn."""
    priority = set_all_priorities(library, source)
    check_weights(library, priority, source, n)
    pool = [library.priorities(index, priority)[1] for index, priority in draws(n, len(source))]
    # twice the rows that a batch draws, so that half of them at least keep their overwhelming priority
    library.update(*library.priorities(torch.arange(2 * n), torch.full((2 * n,), OVERWHELMING)))
    drawn = row_numbers(library, library.step(n, pool[0]))
    assert (drawn < 2 * n).all()
    check_draws_only(library, np.setdiff1d(np.arange(2 * n), drawn), n)
    set_all_priorities(library, source)
    batches, step = cycle(pool), library.step
    return lambda: step(n, next(batches))


def extending(library: Library, source: TensorDict, n: int) -> Callable[[], object]:
    """Write a batch of rows at the cursor. Written are rows that were there before, so that each stays whole."""
    starts = range(0, min(POOL * n, len(source) - n + 1), n)
    pool = [library.rows(source[start : start + n].clone()) for start in starts]
    marked = source[:n].clone()
    marked["next", "reward"] += 1.0
    library.extend(library.rows(marked))
    read_back(library, source, marked, n)
    batches, extend = cycle(pool), library.extend
    return lambda: extend(next(batches))


def read_back(library: Library, source: TensorDict, marked: TensorDict, n: int) -> None:
    """Assert that exactly the first ``n`` rows are the marked ones."""
    reward = torch.cat([marked["next", "reward"], source["next", "reward"][n:]])
    expected = TensorDict({**source, "next": TensorDict({**source["next"], "reward": reward})}, [len(source)])
    # enough draws that some of the rows written come up
    seen = np.concatenate([check_rows(library.columns(library.sample(4096)), expected, 4096) for _ in range(64)])
    assert (seen < n).any()
    assert (seen >= n).any()


@dataclass(frozen=True)
class Workload:
    """One operation on a batch of one size.

    Attributes:
        title: what it is, for people.
        operation: checks the library against the oracle, and returns what is timed.
        batch: number of transitions.
        prioritized: which of the two buffers.
    """

    title: str
    operation: Callable[[Library, TensorDict, int], Callable[[], object]]
    batch: int
    prioritized: bool

    @property
    def name(self) -> str:
        """``uniform-sample-256`` for "uniform sample" and 256."""
        return f"{self.title.replace(' ', '-')}-{self.batch}"


_ALL = (
    Workload("uniform sample", sampling, 256, prioritized=False),
    Workload("uniform sample", sampling, 4096, prioritized=False),
    Workload("extend", extending, 256, prioritized=False),
    Workload("prioritized sample", sampling, 256, prioritized=True),
    Workload("prioritized sample", sampling, 4096, prioritized=True),
    Workload("priority update", updating, 256, prioritized=True),
    Workload("priority update", updating, 4096, prioritized=True),
    Workload("sample and update", stepping, 256, prioritized=True),
    Workload("sample and update", stepping, 4096, prioritized=True),
    Workload("prioritized extend", extending, 256, prioritized=True),
)
#: By name.
WORKLOADS = {workload.name: workload for workload in _ALL}
