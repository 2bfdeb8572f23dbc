"""What other programs' buffers gave, as JSON keeps it: ``record.json``, beside the module that recorded it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor


def plain(value: Any) -> Any:
    """Tensors with their dtype; a TensorDict by the names of its entries."""
    if isinstance(value, Tensor):
        return {"dtype": str(value.dtype).removeprefix("torch."), "values": value.tolist()}
    if isinstance(value, TensorDictBase):
        return plain(dict(sorted(value.flatten_keys(".").items())))
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


def tensors(value: Any) -> Any:
    """What :func:`plain` was given, a TensorDict as a dict."""
    if not isinstance(value, dict):
        return value
    if value.keys() == {"dtype", "values"}:
        return torch.tensor(value["values"], dtype=getattr(torch, value["dtype"]))
    return {key: tensors(each) for key, each in value.items()}


def read(package: Any) -> dict[str, Any]:
    """The record in a package."""
    record: dict[str, Any] = json.loads((Path(package.__path__[0]) / "record.json").read_text())
    return record


def write(module: str, found: dict[str, Any]) -> None:
    """Write the record beside ``module``, a file, a line for each entry."""
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(plain(each))}" for name, each in found.items())
    Path(module).with_name("record.json").write_text("{" + lines + "}\n")
