"""Rows that say who wrote them, and whether they are whole; and what writers in other processes do in tests."""

import multiprocessing
import os
import signal
import time
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

WIDTH = 5
#: Its processes are forked from one that has imported this, which takes seconds.
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload([__name__])


def payload(writer: Any, number: Any) -> Any:
    """What a row holds besides, ``[..., WIDTH]`` float32: other numbers for each row, so that a torn one shows."""
    place = np.arange(WIDTH, dtype=np.float64)
    seeds = np.asarray(writer, np.float64)[..., None] * 7919 + np.asarray(number, np.float64)[..., None]
    return np.modf(np.sin(seeds + 12.9898 * (place + 1)) * 43758.5453)[0].astype(np.float32)


def columns(writer: int, first: int, n: int, episode: int = 7) -> dict[Any, np.ndarray]:
    """Rows ``first .. first + n`` of a writer, as arrays by key: each ``episode`` of them end in a done flag."""
    number = np.arange(first, first + n)
    done = (number % episode == episode - 1)[:, None]
    return {
        "writer": np.full((n, 1), writer),
        "number": number[:, None],
        "payload": payload(np.full(n, writer), number),
        "state": np.stack([np.full(n, writer), number], 1).astype(np.float32),
        ("next", "state"): np.stack([np.full(n, writer), number + 1], 1).astype(np.float32),
        ("next", "reward"): np.ones((n, 1), np.float32),
        ("next", "done"): done,
        ("next", "terminated"): done,
    }


def batch(writer: int, first: int, n: int, episode: int = 7) -> TensorDict:
    """:func:`columns` as a TensorDict ``[n]``."""
    out = TensorDict({}, [n])
    for key, value in columns(writer, first, n, episode).items():
        out.set(key, torch.as_tensor(value))
    return out


def are_whole(rows: Any) -> bool:
    """Whether every row is one that its writer wrote, as a whole."""
    expected = torch.as_tensor(payload(rows["writer"][..., 0].numpy(), rows["number"][..., 0].numpy()))
    found: Tensor = rows["payload"]
    told = torch.cat([rows["writer"], rows["number"]], -1).float()
    coming = torch.cat([rows["writer"], rows["number"] + 1], -1).float()
    same = torch.equal(rows["state"], told) and torch.equal(rows["next", "state"], coming)
    return same and torch.equal(found, expected)


# What processes do. They are spawned, and import nothing that tests use.


def write_rows(client: Any, writer: int, sizes: list[int], form: str = "columns") -> None:
    """Write batches of these sizes, the last number first seen is 0, and close the client."""
    first = 0
    for n in sizes:
        if form == "columns":
            client.extend_columns(columns(writer, first, n))
        else:
            client.extend(batch(writer, first, n))
        first += n
    client.close()


def write_and_die(client: Any, writer: int, n: int) -> None:
    """Write so many rows, then be killed."""
    client.extend_columns(columns(writer, 0, n))
    os.kill(os.getpid(), signal.SIGKILL)


def write_until_refused(client: Any, answers: Any) -> None:
    """Write one row after the other until that fails, and say how and after how many seconds."""
    first, began = 0, time.monotonic()
    try:
        while True:
            client.extend_columns(columns(0, first, 1))
            first += 1
            if first == 1:
                answers.put("begun")
                began = time.monotonic()
            time.sleep(0.01)
    except (RuntimeError, TimeoutError) as error:
        answers.put((type(error).__name__, str(error), time.monotonic() - began))


def learn_and_die(answers: Any) -> None:
    """Make a buffer and start a writer; once it writes, be killed."""
    from gpubuf import LazyTensorStorage, ReplayBuffer

    buffer = ReplayBuffer(LazyTensorStorage(1000), writers=1)
    client = buffer.client(batch(0, 0, 1))
    multiprocessing.get_context("spawn").Process(target=write_until_refused, args=(client, answers)).start()
    while not buffer.writers.counters()[0].waiting:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
