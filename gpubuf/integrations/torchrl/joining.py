"""How a class is gpubuf's and TorchRL's at once.

It derives from gpubuf's class first, so that a call takes the same time as gpubuf's. Names that only TorchRL's class
has would run on attributes that its constructor never made. They are replaced by :class:`Missing` when the class is
made.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpubuf import serialization


class MissingInGpubufError(NotImplementedError, AttributeError):
    """A member of TorchRL's class has no counterpart in gpubuf. ``hasattr`` is False for it."""


class Missing:
    """Stands for a member that only TorchRL's class has. An attribute of the instance goes before it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        kind = (owner or type(instance)).__name__
        raise MissingInGpubufError(
            f"{kind}.{self.name} is TorchRL's, and gpubuf has none: docs/migration.md says what to use instead"
        )


def _set_state(instance: object, state: dict[str, Any]) -> None:
    vars(instance).update(state)


#: Special methods of TorchRL's that are at work on attributes of its constructor: Python's own in their place.
_SPECIAL: dict[str, Any] = {
    "__getstate__": object.__getstate__,
    "__setstate__": _set_state,
    "__repr__": object.__repr__,
}


class Joined:
    """Base of the classes that are gpubuf's and TorchRL's at once. It comes first among their bases."""

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        seen: set[str] = set()
        for base in cls.__mro__:
            own = {name for name in vars(base) if not name.startswith(("__", "_abc_")) or name in _SPECIAL}
            if base.__module__.partition(".")[0] == "torchrl":
                for name in own - seen:
                    setattr(cls, name, _SPECIAL.get(name) or Missing(name))
            seen |= own


class SavedInFolder(Joined):
    """Parts that TorchRL's buffer saves each in a folder of its own: one file there, of gpubuf's format."""

    def dumps(self, path: Any) -> None:
        """Write the state into a folder. Synchronises."""
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        serialization.save(folder / _FILE, self.state_dict())  # type: ignore[attr-defined]

    def loads(self, path: Any) -> None:
        """Restore what :meth:`dumps` has written.

        Raises:
            FileNotFoundError: gpubuf has written nothing there. A folder of TorchRL's is read by ``load_torchrl``.
        """
        file = Path(path) / _FILE
        if not file.exists():
            raise FileNotFoundError(f"there is no {file}: read a folder of TorchRL's own with gpubuf.data.load_torchrl")
        self.load_state_dict(serialization.load(file))  # type: ignore[attr-defined]


_FILE = "gpubuf.safetensors"
