"""Calls that change rows in place, count them and forget them, and what they give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase


def rows(n: int, start: int = 0) -> TensorDict:
    """``n`` rows that tell which they are."""
    number = torch.arange(start, start + n)
    observation = number.float().unsqueeze(-1) * torch.tensor([1.0, 10.0])
    reward = number.float().unsqueeze(-1)
    done = torch.zeros(n, 1, dtype=torch.bool)
    return TensorDict({"a": number, "obs": observation, "next": {"reward": reward, "done": done}}, [n])


def outcome(call: Callable[[], Any]) -> Any:
    """What a call gives, in plain values; of an error its type. gpubuf's batches have generations, too."""
    try:
        found = call()
    except Exception as error:
        return type(error).__name__
    if isinstance(found, torch.Tensor):
        return found.tolist()
    if isinstance(found, TensorDictBase):
        entries = sorted(found.flatten_keys(".").items())
        return [list(found.batch_size), {key: each.tolist() for key, each in entries if key != "index_generation"}]
    return found if isinstance(found, (int, float, bool, str, dict, list, type(None))) else "the buffer"


def story(data: Any) -> dict[str, Any]:
    """Calls on the buffers of ``data``, a module, and what they give.

    Every call that changes rows is followed by what the rows are then.
    """
    buffer = data.TensorDictReplayBuffer(storage=data.LazyTensorStorage(10), batch_size=3)
    told: dict[str, Any] = {"stats before": outcome(lambda: buffer.stats()["size"]), "can": buffer.can_sample()}
    told["extend"] = outcome(lambda: buffer.extend(rows(5)))
    edits: dict[str, Callable[[], Any]] = {
        "set_": lambda: buffer.set_("a", torch.full((5,), 3)),
        "set_ converts": lambda: buffer.set_("a", torch.full((5,), 2.5)),
        "set_ too many": lambda: buffer.set_("a", torch.zeros(10, dtype=torch.long)),
        "set_ one row": lambda: buffer.set_("obs", torch.zeros(2)),
        "set_ unknown": lambda: buffer.set_("zz", torch.zeros(5)),
        "set_ nested": lambda: buffer.set_(("next", "reward"), torch.ones(5, 1)),
        "set_ below": lambda: buffer.set_("next", TensorDict({"reward": torch.full((5, 1), 4.0)}, [5])),
        "set_at_ int": lambda: buffer.set_at_("a", 3, 2),
        "set_at_ slice": lambda: buffer.set_at_("a", torch.tensor([1, 2]), slice(0, 2)),
        "set_at_ mask": lambda: buffer.set_at_("a", 5, torch.tensor([True, False, False, False, True])),
        "set_at_ list": lambda: buffer.set_at_("a", torch.tensor([11, 12]), [0, 3]),
        "set_at_ negative": lambda: buffer.set_at_("a", 99, torch.tensor([-1])),
        "set_at_ beyond": lambda: buffer.set_at_("a", 99, torch.tensor([7])),
        "set_at_ unknown": lambda: buffer.set_at_("zz", 99, torch.tensor([1])),
        "update_": lambda: buffer.update_(TensorDict({"a": torch.zeros(5, dtype=torch.long)}, [5])),
        "update_ dict": lambda: buffer.update_({"a": torch.arange(5), "next": {"reward": torch.zeros(5, 1)}}),
        "update_ unknown": lambda: buffer.update_({"zz": torch.zeros(5)}),
        "update_ some": lambda: buffer.update_({"a": torch.ones(5), "obs": torch.zeros(5, 2)}, keys_to_update=["a"]),
        "read": lambda: buffer.read_all_in_order(),
        "read 3": lambda: buffer.read_all_in_order(3),
        "read 100": lambda: buffer.read_all_in_order(100),
        "write_all": lambda: buffer.write_all(rows(5, 20)),
        "write_all 2": lambda: buffer.write_all(rows(2, 40), end=2),
        "write_all fewer": lambda: buffer.write_all(rows(3, 60)),
    }
    for name, edit in edits.items():
        told[name] = [outcome(edit), outcome(lambda: buffer[:])]
    told["contains"] = [buffer.storage.contains(i) for i in (0, 4, 5, 9, 10, -1, -5, -6)]
    told["contains tensor"] = outcome(lambda: buffer.storage.contains(torch.tensor([0, 4, 7])))
    told["stats"] = buffer.stats()
    told["can sample"] = [buffer.can_sample(), buffer.can_sample(100)]
    no_size = data.ReplayBuffer(storage=data.LazyTensorStorage(10))
    told["can sample without a size"] = [outcome(no_size.can_sample), outcome(lambda: no_size.can_sample(4))]
    slices = data.ReplayBuffer(
        storage=data.LazyTensorStorage(10), sampler=data.SliceSampler(slice_len=4, end_key=("next", "done"))
    )
    for _ in range(2):
        slices.extend(rows(3))
        told[f"can sample slices of {len(slices)}"] = [outcome(lambda n=n: slices.can_sample(n)) for n in (4, 8, 7)]
    told["no repeats"] = []
    for drop_last in (False, True):
        sampler = data.SamplerWithoutReplacement(drop_last=drop_last)
        epoch = data.ReplayBuffer(storage=data.LazyTensorStorage(10), sampler=sampler, batch_size=5)
        epoch.extend(rows(5))
        told["no repeats"].append([epoch.can_sample(5), epoch.can_sample(6)])
    buffer.empty(empty_write_count=False)
    told["emptied"] = [len(buffer), buffer.write_count]
    buffer.extend(rows(4))
    told["written again"] = [len(buffer), buffer.write_count]
    buffer.empty()
    told["emptied for good"] = [len(buffer), buffer.write_count, outcome(lambda: buffer.extend(rows(2)))]
    return told
