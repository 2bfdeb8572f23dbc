"""Calls on ensembles of buffers where TorchRL's and gpubuf's give the same."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

from tests.support.torchrl_buffers.edits import outcome


def rows(n: int, start: int = 0) -> TensorDict:
    """``n`` rows for three buffers in turn."""
    number = torch.arange(start, start + n)
    return TensorDict({"a": number, "task": number % 3, "value": number.float(), "version": number * 0}, [n])


def ensemble(data: Any, **options: Any) -> Any:
    """An ensemble of three buffers that track generations."""
    parts = [
        data.TensorDictReplayBuffer(
            storage=data.LazyTensorStorage(5), writer=data.TensorDictRoundRobinWriter(track_generations=True)
        )
        for _ in range(3)
    ]
    return data.ReplayBufferEnsemble(*parts, batch_size=6, **options)


def streams(data: Any) -> list[Any]:
    """The flags of two buffers whose streams were ended, of one that was full and one that was not."""
    told = []
    for truncates in (True, False):
        parts = [
            data.TensorDictReplayBuffer(
                storage=data.LazyTensorStorage(5),
                sampler=data.SliceSampler(slice_len=2, end_key=("next", "done")),
                writer=data.TensorDictRoundRobinWriter(track_generations=True),
            )
            for _ in range(3)
        ]
        for part, n in zip(parts, (7, 4, 0), strict=True):
            for number in range(n):
                flag = torch.tensor([[number % 4 == 3]])
                flags = {"done": flag, "terminated": flag.clone(), "truncated": torch.zeros_like(flag)}
                names = ("done", "terminated", "truncated") if truncates else ("done",)
                part.extend(TensorDict({"next": {name: flags[name] for name in names}}, [1]))
        data.ReplayBufferEnsemble(*parts).end_streams()
        told += [[part[:]["next", name].flatten().tolist() for name in names] for part in parts[:2]]
    return told


def told_of(found: Any) -> list[Any]:
    """The rows of each buffer of an ensemble."""
    return [found[number][:]["a"].tolist() if len(found[number]) else [] for number in range(3)]


def story(data: Any) -> dict[str, Any]:
    """What the ensembles of ``data``, a module, give."""
    told: dict[str, Any] = {}
    both = ensemble(data, routing_key="task")
    told["stats before"] = {key: both.stats()[key] for key in ("size", "write_count", "initialized", "num_buffers")}
    told["routed"] = [outcome(lambda: both.extend(rows(7))), told_of(both)]
    told["one row"] = [outcome(lambda: both.add(rows(1, 8)[0])), told_of(both)]
    told["two dimensions"] = [outcome(lambda: both.extend(rows(6, 9).view(2, 3))), told_of(both)]
    told["stats"] = both.stats()
    told["no such buffer"] = outcome(lambda: both.extend(rows(3).set("task", torch.tensor([0, 1, 3]))))
    told["no integers"] = outcome(lambda: both.extend(rows(3).set("task", torch.zeros(3))))
    told["too few"] = outcome(lambda: both.extend(torch.arange(3)))
    told["untouched"] = told_of(both)
    handles = both.extend(rows(4, 30))
    patch = {"value": torch.tensor([-1.0, -2.0, -3.0, -4.0])}
    both[0].extend(rows(5, 300).set("task", torch.zeros(5, dtype=torch.long)))
    result = both.update_if_present(
        index=handles.select("buffer_ids", "index"), generation=handles["index_generation"], patch=patch
    )
    told["updated"] = [result.updated.tolist(), result.updated_count, result.stale_count]
    told["values"] = [part[:]["value"].tolist() for part in (both[0], both[1], both[2])]
    newer = both.update_if_present(
        index=handles.select("buffer_ids", "index"),
        generation=handles["index_generation"],
        patch=patch,
        version_key="version",
        version=torch.tensor([1, 1, 0, 1]),
        require_newer=True,
    )
    told["newer"] = [newer.updated.tolist(), newer.version_rejected.tolist()]
    columns = ensemble(data, routing_dim=1)
    told["by a dimension"] = [outcome(lambda: columns.extend(rows(6).view(2, 3))), told_of(columns)]
    told["not as many"] = outcome(lambda: columns.extend(rows(6).view(3, 2)))
    told["one row by a dimension"] = outcome(lambda: columns.add(rows(1)[0]))
    told["both ways"] = outcome(lambda: ensemble(data, routing_key="task", routing_dim=0))
    told["no int"] = outcome(lambda: ensemble(data, routing_dim="task"))
    sized = ensemble(data, routing_key="task", p="sampleable")
    sized.extend(rows(9).set("task", torch.tensor([0, 0, 0, 1, 1, 1, 1, 1, 1])[torch.arange(9)]))
    told["sized"] = told_of(sized)
    told["ended"] = streams(data)
    told["alive"] = [both.is_alive, both.service_backend, both.client() is both, both.start() is both]
    both.synchronize()
    both.shutdown()
    told["shut"] = [both.is_alive, outcome(both.start)]
    both.empty()
    told["emptied"] = [both.stats()["size"], both.stats()["write_count"]]
    return told
