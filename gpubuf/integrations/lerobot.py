"""LeRobot's replay buffer, with its names: ``from gpubuf.integrations.lerobot import ReplayBuffer``.

LeRobot is at https://github.com/huggingface/lerobot; its buffer is in ``lerobot/rl/buffer.py``, and what mixes two of
them in ``lerobot/rl/data_sources``. It is imported where its data sets are made only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.utils.data import Dataset

from gpubuf.data.buffer import ReplayBuffer as Rows
from gpubuf.data.datasets import batches_of
from gpubuf.data.loading.lerobot import feature_key
from gpubuf.data.processing.augment import RandomShift
from gpubuf.data.storage.lazy import LazyTensorStorage
from gpubuf.data.storage.schema import Codec
from gpubuf.integrations.environment_steps import stored_values

__all__ = ["LeRobotDatasetAdapter", "OnlineOfflineMixer", "ReplayBuffer"]

IMAGE = "observation.image"
PAD = 4
_FRAMES = 64
# Keys of data sets.
ACTION, REWARD, DONE = "action", "next.reward", "next.done"
INFO = "complementary_info."
#: Where rows have what data sets have, unless it is the name with its dots as nested keys. As in TorchRL.
KEY_MAP: dict[str, Any] = {"episode_index": "episode", "frame_index": "frame", "task": "language_instruction"}
#: What LeRobot adds to frames itself.
OWN_FEATURES = ("index", "episode_index", "frame_index", "timestamp", "task_index", "task")


class ReplayBuffer:
    """LeRobot's replay buffer: the same arguments, methods, keys, shapes and dtypes.

    It differs in this:

    * With ``optimize_memory`` the next state of an episode's last transition is the one that was given, and not the
      first state of the next episode. The newest transition can be drawn, with its own next state.
    * Every transition must have the keys of ``complementary_info`` that the first one had. LeRobot keeps what was in
      memory.
    * An error in the thread of :meth:`get_iterator` reaches the caller. LeRobot waits for ever.
    * The random shift is part of the launch that copies the rows, unless you give a function of your own. Nothing is
      compiled at the first batch.

    Args:
        capacity: number of transitions.
        device: where batches go.
        state_keys: only read by LeRobot's programs: the states that you add have the keys.
        image_augmentation_function: called once for all images of a batch ``[n, C, H, W]``, instead of a random shift
            by up to 4 pixels.
        use_drq: whether states with keys that begin with ``"observation.image"`` are augmented.
        storage_device: where the rows are: as for :class:`gpubuf.LazyTensorStorage`.
        optimize_memory: store states once.
        dtypes: how states are stored, by their keys: ``{"observation.image": Codec(torch.uint8, scale=1 / 255)}`` takes
            a quarter of the memory. See :class:`gpubuf.LazyTensorStorage`.
        next_capacity: with ``optimize_memory``, room for the last states of episodes.

    Attributes:
        buffer: the :class:`gpubuf.ReplayBuffer` in it; None before the first transition.

    Raises:
        ValueError: ``capacity`` is below 1.
    """

    def __init__(
        self,
        capacity: int,
        device: str = "cuda:0",
        state_keys: Sequence[str] | None = None,
        image_augmentation_function: Callable[[Tensor], Tensor] | None = None,
        use_drq: bool = True,
        storage_device: str = "cpu",
        optimize_memory: bool = False,
        *,
        dtypes: Mapping[str, torch.dtype | Codec] | None = None,
        next_capacity: int | None = None,
    ) -> None:
        if capacity <= 0:
            raise ValueError(f"Capacity must be greater than 0. The capacity is {capacity}")
        self.capacity = capacity
        self.device = device
        self.state_keys = [] if state_keys is None else state_keys
        self.image_augmentation_function = image_augmentation_function
        self.use_drq = use_drq
        self.storage_device = storage_device
        self.optimize_memory = optimize_memory
        self.buffer: Rows | None = None
        self._dtypes, self._next_capacity = dict(dtypes or {}), next_capacity
        self._states: list[str] = []
        self._info: list[str] | None = None
        # The columns of a transition, in the order of the first write.
        self._keys: list[Any] = []
        self._numbers = [torch.zeros(1, dtype=dtype, device="cpu") for dtype in (torch.float32, torch.bool, torch.bool)]

    # As LeRobot's attributes

    @property
    def initialized(self) -> bool:
        """Whether a transition has been added."""
        return self.buffer is not None

    @property
    def size(self) -> int:
        """The number of stored transitions."""
        return 0 if self.buffer is None else len(self.buffer)

    @property
    def position(self) -> int:
        """Where the next transition goes."""
        return 0 if self.buffer is None else self.buffer.storage.cursor

    def __len__(self) -> int:
        """The number of stored transitions."""
        return self.size

    def _stored(self, *key: str) -> Tensor:
        if self.buffer is None:
            raise AttributeError("nothing has been added: the first transition settles keys and shapes")
        rows = stored_values(self.buffer, key)
        rows = rows.bool() if key[0] in ("done", "truncated") else rows
        return torch.cat([rows, rows.new_zeros(self.capacity - len(rows), *rows.shape[1:])])

    @property
    def states(self) -> dict[str, Tensor]:
        """States by key, ``[capacity, ...]`` float32 on the device of the rows, zeros where nothing is stored. These
        and all that follow are copies: changing them changes no row.
        """
        return {key: self._stored("state", key) for key in self._states}

    @property
    def next_states(self) -> dict[str, Tensor]:
        """States after each transition, as :attr:`states`: those that were given, also with ``optimize_memory``."""
        return {key: self._stored("next", "state", key) for key in self._states}

    @property
    def actions(self) -> Tensor:
        """Actions, ``[capacity, ...]`` float32."""
        return self._stored("action")

    @property
    def rewards(self) -> Tensor:
        """Rewards, ``[capacity]`` float32."""
        return self._stored("reward")

    @property
    def dones(self) -> Tensor:
        """Ends of the task, ``[capacity]`` bool."""
        return self._stored("done")

    @property
    def truncateds(self) -> Tensor:
        """Ends by length, ``[capacity]`` bool."""
        return self._stored("truncated")

    @property
    def complementary_info(self) -> dict[str, Tensor]:
        """Information by key, ``[capacity, ...]`` float32."""
        return {key: self._stored("complementary_info", key) for key in self._info or ()}

    # Writing

    def add(
        self,
        state: Mapping[str, Tensor],
        action: Tensor,
        reward: float | Tensor,
        next_state: Mapping[str, Tensor] | None,
        done: bool | Tensor,
        truncated: bool | Tensor,
        complementary_info: Mapping[str, Any] | None = None,
    ) -> None:
        """Add a transition. All numbers are stored as float32, unless ``dtypes`` says otherwise.

        Args:
            state, next_state: tensors by key, with a batch dimension of 1 or without one. ``next_state`` may be None at
                the end of an episode: the state stands for it, as in data sets.
            action: likewise.
            reward, done, truncated: numbers.
            complementary_info: tensors or numbers by key, which come back in batches.

        Raises:
            KeyError: a key of the first transition is missing.
            ValueError: a tensor has another shape, information is neither a tensor nor a number, or there is no
                ``next_state`` and the episode goes on.
        """
        if next_state is None:
            if not done and not truncated:
                raise ValueError("next_state is None, and the episode goes on: give the state that follows")
            next_state = state
        if self.buffer is None:
            self._begin(state, complementary_info)
        assert self.buffer is not None
        # Memory that is there already, read before this returns.
        for number, value in zip(self._numbers, (reward, done, truncated), strict=True):
            number.numpy()[0] = value.item() if isinstance(value, Tensor) else value
        columns = [_column(state[key]) for key in self._states]
        columns += [_column(action), *self._numbers]
        columns += [_column(next_state[key]) for key in self._states]
        if self._info is not None:
            given = {} if complementary_info is None else complementary_info
            columns += [_column(_number(key, given)) for key in self._info]
        self.buffer.extend_columns(columns if self.buffer.initialized else dict(zip(self._keys, columns, strict=True)))

    def _begin(self, state: Mapping[str, Tensor], info: Mapping[str, Any] | None) -> None:
        self._states = list(state)
        self._info = None if info is None else [key for key in info if _number(key, info) is not None]
        keys = [("state", key) for key in self._states]
        self._keys = [*keys, "action", "reward", "done", "truncated", *[("next", *key) for key in keys]]
        self._keys += [("complementary_info", key) for key in self._info or ()]
        storage = LazyTensorStorage(
            self.capacity,
            device=self.storage_device,
            dtypes={("state", key): dtype for key, dtype in self._dtypes.items()},
            batch_dtypes={"done": torch.float32, "truncated": torch.float32},
            share_next=keys if self.optimize_memory else False,
            next_capacity=self._next_capacity,
        )
        shifted = [("state", key) for key in self._images]
        own = self.image_augmentation_function is None
        self.buffer = Rows(storage=storage, process=[RandomShift(shifted, PAD)] if shifted and own else [])

    @property
    def _images(self) -> list[str]:
        return [key for key in self._states if key.startswith(IMAGE)] if self.use_drq else []

    # Reading

    def sample(self, batch_size: int) -> dict[str, Any]:
        """A batch of ``min(batch_size, len(self))`` transitions, drawn uniformly with replacement.

        Returns:
            ``"state"`` and ``"next_state"`` (dicts), ``"action"``, ``"reward"``, ``"done"`` and ``"truncated"``
            (float32), and ``"complementary_info"`` (a dict or None): tensors ``[B, ...]`` on ``device``.

        Raises:
            RuntimeError: nothing has been added.
        """
        if self.buffer is None:
            raise RuntimeError("Cannot sample from an empty buffer: add transitions first")
        data: TensorDict = self.buffer.sample(min(batch_size, len(self.buffer)))
        if data.device != torch.device(self.device):
            data = data.to(self.device)
        states: list[dict[str, Tensor]] = [
            {key: where["state"][key] for key in self._states} for where in (data, data["next"])
        ]
        if self.image_augmentation_function is not None and self._images:
            # Called once, as LeRobot does, with the images of all keys: states, and then next states.
            images = self.image_augmentation_function(
                torch.cat([state[key] for key in self._images for state in states])
            )
            parts = iter(images.chunk(len(self._images) * 2))
            for key in self._images:
                for state in states:
                    state[key] = next(parts)
        info = None if self._info is None else {key: data["complementary_info"][key] for key in self._info}
        return {
            "state": states[0],
            "action": data["action"],
            "reward": data["reward"],
            "next_state": states[1],
            "done": data["done"],
            "truncated": data["truncated"],
            "complementary_info": info,
        }

    def get_iterator(
        self, batch_size: int, async_prefetch: bool = True, queue_size: int = 2
    ) -> Iterator[dict[str, Any]]:
        """Batches without end.

        Args:
            batch_size: as for :meth:`sample`.
            async_prefetch: let a thread draw ahead. It ends when the iterator is closed or collected.
            queue_size: how many batches are drawn ahead, by the thread or without one.

        Raises:
            RuntimeError: nothing has been added.
            ValueError: ``queue_size`` is below 1.
        """
        return _batches(self.sample, batch_size, async_prefetch, queue_size)

    # Data sets

    @classmethod
    def from_lerobot_dataset(
        cls,
        lerobot_dataset: Any,
        device: str = "cuda:0",
        state_keys: Sequence[str] | None = None,
        capacity: int | None = None,
        *others: Any,
        **options: Any,
    ) -> Self:
        """A buffer with the transitions of a ``LeRobotDataset``. Each frame is read once, and none is kept beside.

        Args:
            lerobot_dataset: the data set. An episode ends where ``"next.done"`` says so, or, without this key, where
                another one begins. The state after its last frame is in no data set: the last state stands for it.
            capacity: default: the length of the data set.
            device, state_keys, *others, **options: the arguments of the class, but for ``capacity``.

        Raises:
            ValueError: ``capacity`` is below the length of the data set, or there are no ``state_keys``.
        """
        n = len(lerobot_dataset)
        if capacity is not None and capacity < n:
            raise ValueError(f"the data set has {n} frames, but the capacity is {capacity}")
        buffer = cls(n if capacity is None else capacity, device, state_keys, *others, **options)
        for transition in transitions_of(lerobot_dataset, state_keys):
            buffer.add(**transition)
        return buffer

    def to_lerobot_dataset(
        self, repo_id: str, fps: int = 1, root: Any = None, task_name: str = "from_replay_buffer"
    ) -> Any:
        """The transitions as a ``LeRobotDataset``, the oldest first, an episode up to each end. Needs LeRobot.

        Args:
            repo_id, fps, root: as for ``LeRobotDataset.create``.
            task_name: of all frames.

        Raises:
            ImportError: LeRobot is missing.
            ValueError: the buffer is empty.
        """
        rows = self.buffer
        if rows is None or not len(rows):
            raise ValueError("The replay buffer is empty. Cannot convert to a dataset.")
        n, start = len(rows), self.position - len(rows)
        order = (torch.arange(n, device="cpu") + start) % self.capacity
        dataset = new_dataset(repo_id, fps, root, features_of(self._frame(rows.storage[order[:1]][0])))
        dataset.start_image_writer(num_processes=0, num_threads=3)
        # A few frames at a time, since images are large.
        for part in order.split(_FRAMES):
            for row in rows.storage[part].cpu().unbind(0):
                flags = {REWARD: row["reward"].reshape(1).float(), DONE: row["done"].reshape(1).to(torch.bool)}
                dataset.add_frame({**self._frame(row), **flags, "task": task_name})
                if row["done"] or row["truncated"]:
                    dataset.save_episode()
        if dataset.episode_buffer["size"] > 0:
            dataset.save_episode()
        dataset.stop_image_writer()
        dataset.finalize()
        return dataset

    def _frame(self, row: TensorDict) -> dict[str, Tensor]:
        """States, action and information of a row. Numbers have one dimension."""
        frame = {key: row["state"][key] for key in self._states} | {"action": row["action"]}
        info = {INFO + key: row["complementary_info"][key] for key in self._info or ()}
        return frame | {key: value.reshape(1) if value.ndim == 0 else value for key, value in info.items()}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.size}/{self.capacity} transitions, buffer={self.buffer!r})"


class OnlineOfflineMixer:
    """LeRobot's ``DataMixer`` of an online and an offline buffer: the same arguments, methods and batches.

    Of information that one buffer alone has there is none in a batch of both, where LeRobot's has fewer entries than
    the batch has rows. One thread of :meth:`get_iterator` draws from both buffers.

    Args:
        online_buffer: its rows come first in a batch.
        offline_buffer: None: batches are those of ``online_buffer``.
        online_ratio: share of the online rows in a batch, rounded down, but at least one row.

    Raises:
        ValueError: the ratio is not in [0, 1].
    """

    def __init__(
        self, online_buffer: ReplayBuffer, offline_buffer: ReplayBuffer | None = None, online_ratio: float = 1.0
    ) -> None:
        if not 0.0 <= online_ratio <= 1.0:
            raise ValueError(f"online_ratio must be in [0, 1], got {online_ratio}")
        self.online_buffer, self.offline_buffer, self.online_ratio = online_buffer, offline_buffer, online_ratio

    def sample(self, batch_size: int) -> dict[str, Any]:
        """A batch of both buffers: see :meth:`ReplayBuffer.sample`, of which each gives its part.

        Raises:
            RuntimeError: nothing has been added to one of them.
        """
        if self.offline_buffer is None:
            return self.online_buffer.sample(batch_size)
        n = max(1, int(batch_size * self.online_ratio))
        batch = self.online_buffer.sample(n)
        return batch if n == batch_size else _joined(batch, self.offline_buffer.sample(batch_size - n))

    def get_iterator(
        self, batch_size: int, async_prefetch: bool = True, queue_size: int = 2
    ) -> Iterator[dict[str, Any]]:
        """Batches without end, as :meth:`ReplayBuffer.get_iterator`."""
        return _batches(self.sample, batch_size, async_prefetch, queue_size)


def _joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Two batches as one."""
    batch: dict[str, Any] = {}
    for key, value in first.items():
        other = second[key]
        if isinstance(value, Tensor):
            batch[key] = torch.cat([value, other])
        else:
            names = value if key != "complementary_info" else value and other and value.keys() & other
            batch[key] = {name: torch.cat([value[name], other[name]]) for name in names} if names else None
    return batch


def _batches(
    sample: Callable[[int], dict[str, Any]], batch_size: int, async_prefetch: bool, queue_size: int
) -> Iterator[dict[str, Any]]:
    """See :meth:`ReplayBuffer.get_iterator`."""
    if queue_size < 1:
        raise ValueError(f"queue_size must be at least 1, got {queue_size}")
    if not async_prefetch:
        waiting = [sample(batch_size) for _ in range(queue_size)]
        while True:
            yield waiting.pop(0)
            waiting.append(sample(batch_size))
    thread = ThreadPoolExecutor(1)
    coming = [thread.submit(sample, batch_size) for _ in range(queue_size)]
    try:
        while True:
            batch = coming.pop(0).result()
            coming.append(thread.submit(sample, batch_size))
            yield batch
    finally:
        # By hand: when the interpreter ends, what shutdown() would do it with is gone.
        for draw in coming:
            draw.cancel()
        thread.shutdown()


def _column(value: Tensor) -> Tensor:
    """A row as a column of one: a batch dimension of 1 is that of the rows."""
    if value.ndim == 0 or value.shape[0] != 1:
        value = value.unsqueeze(0)
    return value if value.dtype is torch.float32 else value.to(torch.float32)


def _number(key: str, info: Mapping[str, Any]) -> Tensor:
    """Information as a tensor.

    Raises:
        ValueError: it is something else, or missing.
    """
    value = info.get(key)
    if isinstance(value, Tensor):
        return value
    if not isinstance(value, int | float):
        raise ValueError(
            f"complementary_info[{key!r}] must be a tensor or a number in every transition, got {type(value).__name__}"
        )
    return torch.tensor(float(value), device="cpu")


# Between transitions and data sets


def transitions_of(dataset: Any, state_keys: Sequence[str] | None) -> Iterator[dict[str, Any]]:
    """The transitions of a data set, as arguments of :meth:`ReplayBuffer.add`; each sample is read once.

    Args:
        dataset: ``dataset[i]`` is a dict with ``"action"``, ``"next.reward"``, ``"episode_index"``, ``state_keys``, and
            perhaps ``"next.done"``. Keys that begin with ``"complementary_info."`` come along.
        state_keys: what a state is made of.

    Raises:
        ValueError: there are no ``state_keys``.
    """
    if state_keys is None:
        raise ValueError("state_keys must be given: which keys of the data set make a state")
    n = len(dataset)
    following: Any = dataset[0] if n else None
    for i in range(n):
        sample: Any = following
        following = dataset[i + 1] if i + 1 < n else None
        goes_on = following is not None and bool(following["episode_index"] == sample["episode_index"])
        done = bool(sample[DONE].item()) if DONE in sample else not goes_on
        # The state after the last one is in no data set.
        coming = following if goes_on and not done else sample
        info = {key.removeprefix(INFO): _one(value) for key, value in sample.items() if key.startswith(INFO)}
        yield {
            "state": {key: _one(sample[key]) for key in state_keys},
            "action": _one(sample[ACTION]),
            "reward": float(sample[REWARD].item()),
            "next_state": {key: _one(coming[key]) for key in state_keys},
            "done": done,
            "truncated": False,
            "complementary_info": info or None,
        }


def _one(value: Any) -> Any:
    return value.unsqueeze(0) if isinstance(value, Tensor) else value


def new_dataset(
    repo_id: str,
    fps: int,
    root: Any,
    features: Mapping[str, Any],
    robot_type: str | None = None,
    video_codec: str | None = None,
) -> Any:
    """An empty data set of LeRobot's. Of LeRobot from 0.5 on videos have its own codec.

    Raises:
        ImportError: LeRobot is missing.
    """
    try:
        from lerobot.datasets.lerobot_dataset import LeRobotDataset
    except ImportError as error:
        raise ImportError("data sets of LeRobot need it: pip install lerobot") from error
    named: dict[str, Any] = {"repo_id": repo_id, "fps": fps, "root": root, "robot_type": robot_type}
    if video_codec is not None and "vcodec" in inspect.signature(LeRobotDataset.create).parameters:
        named["vcodec"] = video_codec
    return LeRobotDataset.create(**named, features=dict(features), use_videos=True)


def features_of(rows: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """LeRobot's description of frames with these values, of which the reward and the flag are left out."""
    found: dict[str, dict[str, Any]] = {
        "index": {"dtype": "int64", "shape": [1]},
        "episode_index": {"dtype": "int64", "shape": [1]},
        "frame_index": {"dtype": "int64", "shape": [1]},
        "timestamp": {"dtype": "float32", "shape": [1]},
        "task_index": {"dtype": "int64", "shape": [1]},
        REWARD: {"dtype": "float32", "shape": (1,)},
        DONE: {"dtype": "bool", "shape": (1,)},
    }
    for key, value in rows.items():
        shape = tuple(value.shape)
        is_image = len(shape) == 3 and shape[0] in (1, 3)
        found[key] = {"dtype": "image" if is_image else "float32", "shape": shape}
    return found


class LeRobotDatasetAdapter:
    """Between rows of a buffer and a ``LeRobotDataset``: ``buffer.export(LeRobotDatasetAdapter(...))``. Needs LeRobot.

    Names and arguments are those of TorchRL 0.15.

    Args:
        repo_id, root, fps, robot_type: as for ``LeRobotDataset.create``.
        features: what frames have, as LeRobot describes it: ``{"action": {"dtype": "float32", "shape": (2,), "names":
            None}}``. Numbers are given this dtype and shape.
        key_map: where rows have it. Default: the name, with its dots as nested keys (``"next.reward"`` is ``("next",
            "reward")``); ``"observation.images.NAME"`` is ``("observation", "image", NAME)``, ``"episode_index"`` is
            ``"episode"``, ``"frame_index"`` ``"frame"``, and ``"task"`` ``"language_instruction"``.
        task: of all frames.
        task_key: where a row has its own task, a text.
        batch_size: rows that are read at a time.
        video_codec: of features with the dtype ``"video"``, for LeRobot below 0.5.
    """

    def __init__(
        self,
        *,
        repo_id: str | None = None,
        root: Any = None,
        fps: int | None = None,
        features: Mapping[str, dict[str, Any]] | None = None,
        key_map: Mapping[str, Any] | None = None,
        task: str | None = None,
        task_key: Any = None,
        robot_type: str | None = None,
        batch_size: int = 256,
        video_codec: str = "h264",
    ) -> None:
        self.repo_id, self.root, self.fps, self.features = repo_id, root, fps, features
        self.key_map = KEY_MAP | dict(key_map or {})
        self.task, self.task_key = task, task_key
        self.robot_type, self.batch_size, self.video_codec = robot_type, batch_size, video_codec

    def key_of(self, name: str) -> Any:
        """Where rows have a feature."""
        return self.key_map.get(name, feature_key(name))

    def to_external(self, dataset: Any) -> Any:
        """A new ``LeRobotDataset``, on disk. Frames are numbered anew, from 0 in each episode.

        An episode ends where ``key_map["episode_index"]`` changes; of rows without that key after those whose
        ``("next", "done")`` is true.

        Args:
            dataset: what :meth:`gpubuf.ReplayBuffer.export` gives, or a map-style data set of TensorDicts.

        Raises:
            ImportError: LeRobot is missing.
            KeyError: rows lack a feature, or what tells episodes.
            ValueError: there is no ``repo_id``, ``fps``, ``features`` or task; or rows of several environments have
                no number of their episode.
        """
        if self.repo_id is None or self.fps is None or self.features is None:
            raise ValueError("to make a data set of LeRobot give the adapter repo_id, fps and features")
        if self.task is None and self.task_key is None:
            raise ValueError("LeRobot wants a task with every frame: give the adapter task= or task_key=")
        made = new_dataset(self.repo_id, self.fps, self.root, self.features, self.robot_type, self.video_codec)
        several = getattr(getattr(dataset, "storage", None), "ndim", 1) > 1
        episode, ended = None, False
        for rows in batches_of(dataset, self.batch_size):
            for row in rows.unbind(0):
                at = row.get(self.key_of("episode_index"), None)
                if at is None and several:
                    raise ValueError("rows of several environments need the number of their episode: see key_map")
                if ended or (at is not None and episode is not None and not torch.equal(at, episode)):
                    made.save_episode()
                episode, ended = at, at is None and bool(row["next", "done"])
                made.add_frame(self._frame(row))
        made.save_episode()
        made.finalize()
        return made

    def _frame(self, row: TensorDict) -> dict[str, Any]:
        frame: dict[str, Any] = {"task": self.task if self.task_key is None else row[self.task_key]}
        for name, feature in (self.features or {}).items():
            if name not in OWN_FEATURES:
                value = row[self.key_of(name)]
                if feature["dtype"] not in ("image", "video"):
                    value = value.to(getattr(torch, feature["dtype"])).reshape(tuple(feature["shape"]))
                frame[name] = value
        return frame

    def from_external(self, dataset: Any) -> Dataset[TensorDict]:
        """The frames of a ``LeRobotDataset`` as a map-style data set of TensorDicts, which reads them when asked."""
        return _Frames(dataset, self.key_of)


class _Frames(Dataset[TensorDict]):
    def __init__(self, dataset: Any, key_of: Callable[[str], Any]) -> None:
        self.dataset, self._key_of = dataset, key_of

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> TensorDict:
        row = TensorDict({}, [])
        for name, value in self.dataset[index].items():
            row[self._key_of(name)] = value
        return row
