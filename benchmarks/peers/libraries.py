"""One adapter per library: the same five operations, each in the words that a user of that library writes.

An adapter does nothing that is timed: a benchmark times the functions that it returns.
"""

from __future__ import annotations

import itertools
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from benchmarks.peers.sources import Source

ALPHA, BETA, EPS = 0.6, 0.4, 1e-8
#: Bytes, and rows, of a write that fills a buffer.
CHUNK_BYTES, CHUNK_ROWS = 1 << 25, 1_000_000


class UnavailableError(Exception):
    """The library is not installed, or cannot do this; the message says why."""


@contextmanager
def needing(library: str) -> Iterator[None]:
    """Within it a library is imported or made, without its warnings; that it is not there is an UnavailableError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except ImportError as error:
        raise UnavailableError(f"{library} is not installed here: {error}") from error
    except RuntimeError as error:
        # TorchRL's trees are compiled for one version of torch, and are missing under any other.
        if "SegmentTree" not in str(error):
            raise
        raise UnavailableError(f"TorchRL's prioritized sampler does not load here: {error}") from error


def flat_arrays(data: TensorDictBase) -> dict[str, np.ndarray]:
    """Columns by flat name, ``next.reward`` for ``("next", "reward")``."""
    return {name: column.cpu().numpy() for name, column in data.flatten_keys(".").items()}


class Library(ABC):
    """A replay buffer of some library, filled with the given rows.

    Args:
        source: the rows. The buffer is exactly full of them afterwards, its cursor at the first.
        prioritized: proportional prioritization, with exponents :data:`ALPHA` and :data:`BETA`.
        device: where the buffer keeps its rows, or brings its batches.

    Attributes:
        name: the library's, in files of results.
        title: the same for people.
        tree_bytes: what prioritization takes for a row, about.
        weights_over: the largest importance weight of the ``"buffer"`` is 1, or that of the ``"batch"``.
        exact_sums: a row of next to no weight is never drawn; not so where sums are float32.
        priorities_known: all rows have the priorities that the benchmarks give them.
        untouched: nothing was written since it was filled.

    Raises:
        UnavailableError: the library is missing, has no such buffer here, or the buffer no room.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    tree_bytes: ClassVar[int] = 8
    weights_over: ClassVar[str] = "buffer"
    exact_sums: ClassVar[bool] = True

    def __init__(self, source: Source, prioritized: bool, device: str) -> None:
        self.source = source
        self.prioritized = prioritized
        self.device = device
        self.priorities_known = False
        self.untouched = True
        self.load()
        self.check_room()
        self.open()
        self.fill()

    @abstractmethod
    def load(self) -> None:
        """Import the library, and find out whether it can do this at all."""

    @abstractmethod
    def open(self) -> None:
        """Create the buffer."""

    @abstractmethod
    def rows(self, source: TensorDict) -> Any:
        """Rows in the form that :attr:`extend` takes, made before anything is timed."""

    def rows_on_host(self, source: TensorDict) -> Any:
        """The same where they come from the host and the buffer is on a GPU."""
        raise UnavailableError(f"{self.title} has no buffer on a GPU")

    @abstractmethod
    def priorities(self, index: Tensor, priority: Tensor) -> tuple[Any, Any]:
        """An index and its priorities in the form that :attr:`update` takes."""

    @abstractmethod
    def columns(self, batch: Any) -> dict[str, np.ndarray]:
        """A sampled batch as arrays by flat name; importance weights are called ``weight``."""

    @abstractmethod
    def stored(self, position: np.ndarray) -> dict[str, np.ndarray]:
        """The rows at these positions of the buffer, read past the sampler."""

    #: write rows at the cursor
    extend: Callable[[Any], Any]
    #: a batch of ``n`` rows
    sample: Callable[[int], Any]
    #: set priorities
    update: Callable[[Any, Any], Any]
    #: one step of prioritized training: draw ``n``, give the drawn rows these priorities, return the batch
    step: Callable[[int, Any], Any]

    def newest(self, n: int) -> Any:
        """A batch of many rows among the ``n`` written last; None: :meth:`stored` has all, in order."""
        return None

    def row_bytes(self) -> int:
        """About how many bytes a row takes in this library's buffer."""
        return self.source.layout.row_bytes + (self.tree_bytes if self.prioritized else 0)

    def check_room(self) -> None:
        """Raise where the buffer would leave others less than a quarter of what memory is free."""
        from gpubuf.data.storage import host_memory

        need = self.row_bytes() * len(self.source)
        on_gpu = self.device == "cuda" and torch.cuda.is_available()
        free = host_memory.device_memory()[0] if on_gpu else host_memory.host_memory()[0]
        if need > free * 3 // 4:
            raise UnavailableError(f"no room: it takes {need / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free")

    def fill(self) -> None:
        """Write all rows."""
        n = min(CHUNK_BYTES // self.source.layout.row_bytes, CHUNK_ROWS)
        for start in range(0, len(self.source), n):
            self.extend(self.rows(self.source.rows(start, min(n, len(self.source) - start))))

    def settle(self, call: Callable[[], object]) -> None:
        """Call often enough that nothing happens any more that happens only the first few times."""
        call()

    @property
    def clock(self) -> str:
        """Its clock: CUDA's ``"events"`` if its calls go to PyTorch's stream, else the ``"wall"`` clock."""
        return "events" if self.device == "cuda" else "wall"


class TorchRLInterface(Library):
    """The interface of TorchRL, which is gpubuf's as well."""

    buffer: Any

    def classes(self) -> tuple[Any, Any, Any]:
        """The uniform buffer, the prioritized buffer and the storage."""
        raise NotImplementedError

    def load(self) -> None:
        self.uniform_class, self.prioritized_class, self.storage_class = self.classes()

    def storage(self) -> Any:
        """An empty storage."""
        once = {"share_next": True} if self.source.layout.shared else {}
        return self.storage_class(len(self.source), device=self.device, **once)

    def open(self) -> None:
        self.buffer = self.new_prioritized() if self.prioritized else self.uniform_class(storage=self.storage())
        self.extend = self.buffer.extend
        self.sample = self.buffer.sample
        self.update = self.buffer.update_priority
        self.step = self.take_step

    def new_prioritized(self) -> Any:
        """An empty prioritized buffer."""
        return self.prioritized_class(alpha=ALPHA, beta=BETA, eps=EPS, storage=self.storage())

    def take_step(self, n: int, priority: Tensor) -> TensorDictBase:
        batch: TensorDictBase = self.buffer.sample(n)
        batch["td_error"] = priority
        self.buffer.update_tensordict_priority(batch)
        return batch

    def rows(self, source: TensorDict) -> TensorDictBase:
        return source.to(self.device)

    def rows_on_host(self, source: TensorDict) -> TensorDictBase:
        return source

    def priorities(self, index: Tensor, priority: Tensor) -> tuple[Tensor, Tensor]:
        return index.to(self.device), priority.to(self.device)

    def columns(self, batch: TensorDictBase) -> dict[str, np.ndarray]:
        flat = flat_arrays(batch)
        if "priority_weight" in flat:
            flat["weight"] = flat.pop("priority_weight")
        return flat

    def stored(self, position: np.ndarray) -> dict[str, np.ndarray]:
        return self.columns(self.buffer[torch.from_numpy(position).to(self.device)])


class Gpubuf(TorchRLInterface):
    """This library."""

    name = "gpubuf"
    title = "gpubuf"

    def classes(self) -> tuple[Any, Any, Any]:
        from gpubuf import LazyTensorStorage, TensorDictPrioritizedReplayBuffer, TensorDictReplayBuffer

        return TensorDictReplayBuffer, TensorDictPrioritizedReplayBuffer, LazyTensorStorage


class GpubufGraph(Gpubuf):
    """This library, every call the replay of a CUDA graph. The buffer is filled and set up by eager calls."""

    name = "gpubuf-graph"
    title = "gpubuf, graph"
    #: Calls of each captured function before it replays, and some more: see `gpubuf.capture`.
    SETTLING = 6

    def load(self) -> None:
        if self.device != "cuda":
            raise UnavailableError("CUDA graphs need a GPU: elsewhere gpubuf.capture runs the same calls one by one")
        super().load()

    def open(self) -> None:
        super().open()
        self.captured: dict[Any, Callable[[], Any]] = {}
        sample, step = self.sample, self.step
        self.sample = lambda n: self.graph(n, lambda: sample(n))()
        # A graph for each set of priorities, which the graph reads where they lie.
        self.step = lambda n, priority: self.graph((n, id(priority)), lambda: step(n, priority))()

    def graph(self, key: Any, call: Callable[[], Any]) -> Callable[[], Any]:
        """The captured form of a call, captured once; it keeps what the call refers to alive."""
        if key not in self.captured:
            from gpubuf import capture

            self.captured[key] = capture(call)
        return self.captured[key]

    def settle(self, call: Callable[[], object]) -> None:
        call()
        known = -1
        # As long as calls go on to meet functions that were not captured before.
        while known < len(self.captured):
            known = len(self.captured)
            call()
        for _ in range(self.SETTLING * known):
            call()


class TorchRL(TorchRLInterface):
    """TorchRL from PyPI."""

    name = "torchrl"
    title = "TorchRL"
    tree_bytes = 16
    exact_sums = False

    def classes(self) -> tuple[Any, Any, Any]:
        with needing("TorchRL"):
            from torchrl.data import LazyTensorStorage, TensorDictPrioritizedReplayBuffer, TensorDictReplayBuffer
        return TensorDictReplayBuffer, TensorDictPrioritizedReplayBuffer, LazyTensorStorage

    def open(self) -> None:
        with needing("TorchRL"):
            super().open()

    def new_prioritized(self) -> Any:
        if self.device == "cpu":
            return super().new_prioritized()
        from torchrl.data import PrioritizedSampler

        # TorchRL's wheel on PyPI has no trees for a GPU: they lie on the CPU, and rows on the GPU.
        sampler = PrioritizedSampler(len(self.source), ALPHA, BETA, eps=EPS, device="cpu")
        return self.uniform_class(storage=self.storage(), sampler=sampler)


class Cpprb(Library):
    """cpprb: NumPy arrays on the CPU, sum tree in C++."""

    name = "cpprb"
    title = "cpprb"
    tree_bytes = 24
    exact_sums = False

    def load(self) -> None:
        if self.device != "cpu":
            raise UnavailableError(f"cpprb has no buffer on {self.device}")
        with needing("cpprb"):
            import cpprb
        self.library = cpprb

    def open(self) -> None:
        columns = {
            name: {"shape": column.shape[1], "dtype": column.numpy().dtype}
            for name, column in self.source.layout.row.items()
        }
        if self.prioritized:
            buffer = self.library.PrioritizedReplayBuffer(len(self.source), columns, alpha=ALPHA, eps=EPS)
            self.sample = lambda n: buffer.sample(n, beta=BETA)
            self.update = buffer.update_priorities
        else:
            buffer = self.library.ReplayBuffer(len(self.source), columns)
            self.sample = buffer.sample
        self.buffer = buffer
        self.extend = lambda rows: buffer.add(**rows)
        self.step = self.take_step

    def take_step(self, n: int, priority: np.ndarray) -> dict[str, np.ndarray]:
        batch: dict[str, np.ndarray] = self.buffer.sample(n, beta=BETA)
        self.buffer.update_priorities(batch["indexes"], priority)
        return batch

    def rows(self, source: TensorDict) -> dict[str, np.ndarray]:
        return flat_arrays(source)

    def priorities(self, index: Tensor, priority: Tensor) -> tuple[np.ndarray, np.ndarray]:
        return index.numpy().astype(np.uint64), priority.numpy()

    def columns(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        flat = dict(batch)
        if "weights" in flat:
            flat["weight"] = flat.pop("weights")
            flat["index"] = flat.pop("indexes").astype(np.int64)
        return flat

    def stored(self, position: np.ndarray) -> dict[str, np.ndarray]:
        return {name: column[position] for name, column in self.buffer.get_all_transitions().items()}


class Flashbax(Library):
    """flashbax: pure functions on a state of JAX arrays, compiled; the state is donated, as its documentation says.

    A call that returns has only been queued, so every call waits for its result: on a CPU there is nothing to overlap
    with. Weights are the user's business there: computed from the probabilities, in the same compiled function.
    """

    name = "flashbax"
    title = "flashbax"
    # the sum tree has two float32 for each leaf of the next power of two
    tree_bytes = 16
    weights_over = "batch"
    exact_sums = False

    def load(self) -> None:
        with needing("flashbax"):
            import flashbax
            import jax
        self.library, self.jax = flashbax, jax
        kind = "gpu" if self.device == "cuda" else "cpu"
        try:
            self.home = jax.devices(kind)[0]
        except RuntimeError as error:
            raise UnavailableError(f"JAX sees no {kind} here: {error}") from error
        if len(self.source) >= 1 << 31:
            raise UnavailableError("flashbax counts rows in int32")

    def open(self) -> None:
        jax = self.jax
        row = {name: jax.device_put(column[0], self.home) for name, column in self.rows(self.source.rows(0, 1)).items()}
        # The state depends on the size of the buffer alone, not on that of batches.
        buffer = self.make(1)
        with jax.default_device(self.home):
            self.state = buffer.init(row)
            self.key = jax.random.PRNGKey(0)
        self.add = jax.jit(buffer.add, donate_argnums=0)
        if self.prioritized:
            self.set_priorities = jax.jit(buffer.set_priorities, donate_argnums=0)
        self.draws: dict[int, Callable[..., Any]] = {}
        self.steps: dict[int, Callable[..., Any]] = {}
        self.extend, self.sample = self.write, self.draw
        self.update, self.step = self.change, self.take_step

    def make(self, n: int) -> Any:
        """The functions of a buffer whose batches have ``n`` rows."""
        options = {"max_length": len(self.source), "min_length": 1, "sample_batch_size": n, "add_batches": True}
        if not self.prioritized:
            return self.library.make_item_buffer(**options)
        kind = "gpu" if self.device == "cuda" else "cpu"
        return self.library.make_prioritised_item_buffer(**options, priority_exponent=ALPHA, device=kind)

    def drawing(self, n: int) -> Callable[[Any, Any], tuple[Any, Any]]:
        """A function of state and key: the next key, and a batch of ``n``."""
        buffer, split = self.make(n), self.jax.random.split

        def draw(state: Any, key: Any) -> tuple[Any, Any]:
            key, this = split(key)
            drawn = buffer.sample(state, this)
            batch = dict(drawn.experience)
            if self.prioritized:
                weight = drawn.probabilities**-BETA
                batch |= {"index": drawn.indices, "weight": weight / weight.max()}
            return key, batch

        return draw

    def write(self, rows: Any) -> None:
        self.state = self.jax.block_until_ready(self.add(self.state, rows))

    def draw(self, n: int) -> Any:
        if n not in self.draws:
            self.draws[n] = self.jax.jit(self.drawing(n))
        self.key, batch = self.jax.block_until_ready(self.draws[n](self.state, self.key))
        return batch

    def change(self, index: Any, priority: Any) -> None:
        self.state = self.jax.block_until_ready(self.set_priorities(self.state, index, priority))

    def take_step(self, n: int, priority: Any) -> Any:
        if n not in self.steps:
            draw, set_priorities = self.drawing(n), self.make(n).set_priorities

            def step(state: Any, key: Any, priority: Any) -> tuple[Any, Any, Any]:
                key, batch = draw(state, key)
                return set_priorities(state, batch["index"], priority), key, batch

            self.steps[n] = self.jax.jit(step, donate_argnums=0)
        result = self.jax.block_until_ready(self.steps[n](self.state, self.key, priority))
        self.state, self.key, batch = result
        return batch

    def rows(self, source: TensorDict) -> Any:
        return self.jax.device_put(self.rows_on_host(source), self.home)

    def rows_on_host(self, source: TensorDict) -> dict[str, np.ndarray]:
        return flat_arrays(source)

    def priorities(self, index: Tensor, priority: Tensor) -> tuple[Any, Any]:
        pair = (index.numpy().astype(np.int32), priority.numpy())
        return tuple(self.jax.device_put(pair, self.home))

    def columns(self, batch: Any) -> dict[str, np.ndarray]:
        return {name: np.asarray(column) for name, column in batch.items()}

    def stored(self, position: np.ndarray) -> dict[str, np.ndarray]:
        return {name: np.asarray(column[0, position]) for name, column in self.state.experience.items()}

    @property
    def clock(self) -> str:
        return "wall"


class Rlox(Library):
    """rlox: NumPy arrays on the CPU, in Rust. It writes rows one by one into a buffer with priorities."""

    name = "rlox"
    title = "rlox"
    tree_bytes = 16
    exact_sums = False

    def load(self) -> None:
        if self.device != "cpu":
            raise UnavailableError(f"rlox has no buffer on {self.device}")
        with needing("rlox"):
            import rlox
        self.library = rlox

    def open(self) -> None:
        sizes = len(self.source), self.source.layout.observation, self.source.layout.action
        if self.prioritized:
            buffer = self.library.PrioritizedReplayBuffer(*sizes, ALPHA, BETA)
            self.update = buffer.update_priorities
        else:
            buffer = self.library.ReplayBuffer(*sizes)
        self.buffer, self.seeds = buffer, itertools.count()
        self.sample = lambda n: buffer.sample(n, next(self.seeds))
        self.extend, self.step = self.write, self.take_step

    def write(self, calls: tuple[Callable[..., None], list[Any]]) -> None:
        write, several = calls
        for one in several:
            write(*one)

    def take_step(self, n: int, priority: np.ndarray) -> dict[str, np.ndarray]:
        batch: dict[str, np.ndarray] = self.buffer.sample(n, next(self.seeds))
        self.buffer.update_priorities(batch["indices"], priority)
        return batch

    def rows(self, source: TensorDict) -> tuple[Callable[..., None], list[Any]]:
        rows = flat_arrays(source)
        observation, action, after = rows["observation"], rows["action"], rows["next.observation"]
        reward, terminated = rows["next.reward"].ravel(), rows["next.terminated"].ravel()
        truncated = rows["next.done"].ravel() & ~terminated
        if len(reward) > 1 and not self.prioritized:
            flat = (*map(np.ravel, (observation, after, action)), reward)
            return self.buffer.push_batch, [(*flat, terminated.view(np.uint8), truncated.view(np.uint8))]
        several = zip(observation, action, reward.tolist(), terminated.tolist(), truncated.tolist(), after, strict=True)
        return self.buffer.push, list(several)

    def priorities(self, index: Tensor, priority: Tensor) -> tuple[np.ndarray, np.ndarray]:
        return index.numpy().astype(np.uint64), priority.numpy().astype(np.float64)

    def columns(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        flags = {"terminated": batch["terminated"] > 0, "done": (batch["terminated"] | batch["truncated"]) > 0}
        after = {"observation": batch["next_obs"], "reward": batch["rewards"][:, None]}
        found = {"observation": batch["obs"], "action": batch["actions"]}
        found |= {f"next.{name}": column for name, column in after.items()}
        found |= {f"next.{name}": column[:, None] for name, column in flags.items()}
        if "weights" in batch:
            found |= {"weight": batch["weights"], "index": batch["indices"].astype(np.int64)}
        return found

    def newest(self, n: int) -> dict[str, np.ndarray] | None:
        if self.prioritized:
            raise UnavailableError("rlox reads no rows but by draws: what is written can't be told from the others")
        draws = [self.buffer.sample_recent(n, n, next(self.seeds)) for _ in range(64)]
        return {name: np.concatenate([drawn[name] for drawn in draws]) for name in draws[0]}

    def stored(self, position: np.ndarray) -> dict[str, np.ndarray]:
        raise NotImplementedError


#: Libraries beside ours; each has an environment of this name.
PEERS = ("torchrl", "cpprb", "flashbax", "rlox")
#: By their names in files of results.
LIBRARIES: dict[str, type[Library]] = {
    library.name: library for library in (Gpubuf, GpubufGraph, TorchRL, Cpprb, Flashbax, Rlox)
}
