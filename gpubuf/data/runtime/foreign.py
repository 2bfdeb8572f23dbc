"""Parts of another library, given where gpubuf's belong."""

from __future__ import annotations

_LIBRARIES = {"torchrl": "TorchRL"}


def told(given: object) -> str:
    """The type of what was given, and of a part of TorchRL's what to do instead; the end of a message."""
    kind = type(given)
    library = _LIBRARIES.get(kind.__module__.partition(".")[0])
    if library is None:
        return kind.__name__
    return (
        f"{library}'s {kind.__name__}: take gpubuf.data's class of that name here, and "
        f"gpubuf.integrations.torchrl's in a buffer of {library}'s"
    )
