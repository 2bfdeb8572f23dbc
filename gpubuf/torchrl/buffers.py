"""The buffers that ``gpubuf.data`` exports: those of the core, with what only programs for TorchRL ask of a buffer."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Self

import torch

from gpubuf.data import tensordict_buffers as core
from gpubuf.data.buffer import ReplayBuffer as CoreBuffer
from gpubuf.data.samplers.base import Sampler
from gpubuf.torchrl.samplers import PrioritizedSampler, RandomSampler
from gpubuf.torchrl.storages import LazyTensorStorage, ListStorage

_HERE = "the buffer works in the process that makes it; with shared=True, processes that write get a client()"
#: Arguments of TorchRL's that have no counterpart: accepted at TorchRL's default, refused at any other value.
_REFUSED = {
    "consume_after_n_samples": "SamplerWithoutReplacement draws each row once an epoch",
    "delayed_init": "make the buffer where its parts can be made",
    "service_backend": _HERE,
    "service_backend_options": _HERE,
    "transport": _HERE,
    "transport_options": _HERE,
}

SHARED_WRITERS = 4
"""Places for writers of a buffer that is made with ``shared=True``."""


class _Assigned:
    """A part that TorchRL's users assign, for want of a setter: ``buffer._storage = other`` calls the setter.

    There is no ``__get__``: reading the attribute costs what it costs anyway.
    """

    def __init__(self, setter: str) -> None:
        self._setter = setter

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __set__(self, owner: Any, part: Any) -> None:
        if "_batches" in vars(owner):
            getattr(owner, self._setter)(part)
        else:
            # The constructor.
            vars(owner)[self._name] = part


class ReplayBuffer(CoreBuffer):
    """:class:`gpubuf.data.buffer.ReplayBuffer`, with the arguments and calls that only programs for TorchRL use.

    Args:
        storage, **parts: as for the core's class.
        transform_factory: a function that returns the transform; excludes ``transform``.
        checkpointer: writes and reads the rows where the buffer is saved: an object with ``dumps(storage, path)`` and
            ``loads(storage, path)``, such as TorchRL's checkpointers of tensor storages. Default: gpubuf's own form.
        compilable: accepted for compatibility: every operation can be compiled.
        shared: True is ``writers=4``: processes may write, by a :meth:`client` each.

    Raises:
        NotImplementedError: an argument of TorchRL's was set that has no counterpart.
    """

    _default_storage, _default_objects = LazyTensorStorage, ListStorage
    _default_sampler, _prioritized_sampler = RandomSampler, PrioritizedSampler
    _storage: Any = _Assigned("_replace_storage")
    _sampler: Any = _Assigned("set_sampler")
    _writer: Any = _Assigned("set_writer")

    def __init__(
        self,
        storage: Any = None,
        *,
        transform_factory: Callable[[], Callable[[Any], Any]] | None = None,
        checkpointer: Any = None,
        compilable: bool | None = None,
        shared: bool = False,
        **parts: Any,
    ) -> None:
        for name in _REFUSED.keys() & parts.keys():
            if parts.pop(name) not in (None, False, "direct", "auto"):
                raise NotImplementedError(f"{name} is not supported by gpubuf: {_REFUSED[name]}")
        if shared and parts.get("writers") is None:
            parts["writers"] = SHARED_WRITERS
        if transform_factory is not None:
            if parts.get("transform") is not None:
                raise TypeError("transform and transform_factory exclude each other")
            parts["transform"] = transform_factory()
        super().__init__(storage, **parts)
        if checkpointer is not None:
            self._storage.checkpointer = checkpointer
            self._has_default_storage = False

    def share(self, shared: bool = True) -> Self:
        """The buffer itself, if it is as ``shared`` says.

        Raises:
            NotImplementedError: ``shared`` is True, and the buffer was made without.
        """
        if shared and self.writers is None:
            raise NotImplementedError(
                "a buffer is shared from its beginning: make it with shared=True, and pass processes its client()"
            )
        return self

    def register_save_hook(self, hook: Callable[..., Any]) -> None:
        """Have a hook change the rows that :meth:`save` writes: ``hook(rows, path=folder)`` returns others.

        Hooks belong to the storage, and are not part of a checkpoint: register them again before :meth:`load`. See
        :class:`gpubuf.torchrl.checkpointers.StorageCheckpointerBase`.
        """
        self._storage.register_save_hook(hook)

    def register_load_hook(self, hook: Callable[..., Any]) -> None:
        """Have a hook make rows of what :meth:`load` reads: ``hook(data, out=None)`` returns all rows of a storage."""
        self._storage.register_load_hook(hook)

    def dumps(self, path: Any, **options: Any) -> Any:
        """:meth:`save`, by TorchRL's name."""
        return self.save(path, **options)

    dump = dumps

    def loads(self, path: Any, **options: Any) -> None:
        """:meth:`load`, by TorchRL's name."""
        self.load(path, **options)


class TensorDictReplayBuffer(ReplayBuffer, core.TensorDictReplayBuffer):
    """:class:`gpubuf.data.tensordict_buffers.TensorDictReplayBuffer`, with what programs for TorchRL ask of it.

    Args:
        **parts: as for the core's class, and as for :class:`ReplayBuffer`.
    """


class PrioritizedReplayBuffer(ReplayBuffer, core.PrioritizedReplayBuffer):
    """:class:`gpubuf.data.tensordict_buffers.PrioritizedReplayBuffer`, with what programs for TorchRL ask of it.

    Args:
        **parts: as for the core's class, and as for :class:`ReplayBuffer`.
        dtype, sampler_device: accepted for compatibility.
        sync: accepted as True; ``shared=True`` has other processes write.
    """

    def __init__(
        self,
        storage: Any = None,
        *,
        dtype: torch.dtype = torch.float,
        sampler_device: torch.device | str | None = None,
        sync: bool = True,
        **parts: Any,
    ) -> None:
        require_sync(sync)
        super().__init__(storage, **parts)

    @property
    def prioritized_sampler(self) -> Sampler:
        """The sampler, under TorchRL's name."""
        return self.sampler


class TensorDictPrioritizedReplayBuffer(TensorDictReplayBuffer, core.TensorDictPrioritizedReplayBuffer):
    """The core's class of this name, with what programs for TorchRL ask of it.

    Args:
        **parts: as for the core's class, and as for :class:`ReplayBuffer`.
        sampler_device: accepted for compatibility.
        sync: accepted as True; ``shared=True`` has other processes write.
    """

    def __init__(
        self,
        storage: Any = None,
        *,
        sampler_device: torch.device | str | None = None,
        sync: bool = True,
        **parts: Any,
    ) -> None:
        require_sync(sync)
        super().__init__(storage, **parts)

    prioritized_sampler = PrioritizedReplayBuffer.prioritized_sampler


def _describe(kind: Any) -> None:
    """Let ``help()`` show all arguments of a class, and the documentation of the core's before its own."""
    parameters: dict[str, inspect.Parameter] = {}
    for base in sorted(kind.__mro__, key=lambda base: base.__module__ == __name__):
        if "__init__" in vars(base) and base is not object:
            for name, parameter in inspect.signature(base.__init__).parameters.items():
                if name == "storage" or parameter.kind is inspect.Parameter.KEYWORD_ONLY:
                    parameters.setdefault(name, parameter)
    kind.__signature__ = inspect.Signature(list(parameters.values()))
    kind.__doc__ = f"{inspect.getdoc(kind.__bases__[-1])}\n\n{inspect.getdoc(kind)}"


for _kind in (ReplayBuffer, TensorDictReplayBuffer, PrioritizedReplayBuffer, TensorDictPrioritizedReplayBuffer):
    _describe(_kind)


def require_sync(sync: bool) -> None:
    """Raise NotImplementedError for TorchRL's ``sync=False``."""
    if not sync:
        raise NotImplementedError(
            "sync=False (writers in other processes) is not supported by gpubuf: leave it out, make the buffer with "
            "shared=True, and pass processes its client()"
        )
