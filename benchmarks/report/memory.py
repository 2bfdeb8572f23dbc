"""The bytes of two buffers, stored in several ways: what ``gpubuf plan`` says."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.measure.figures import table
from benchmarks.measure.results import Runs
from gpubuf import plan
from gpubuf.data import Codec

GB = 1e9


def _row(observation: tuple[int, ...], actions: int) -> dict[Any, tuple[tuple[int, ...], torch.dtype]]:
    return {
        "observation": (observation, torch.float32),
        "action": ((actions,), torch.float32),
        ("next", "observation"): (observation, torch.float32),
        ("next", "reward"): ((1,), torch.float32),
        ("next", "done"): ((1,), torch.bool),
        ("next", "terminated"): ((1,), torch.bool),
    }


#: Title, rows, the spec of a row, and the ways to store its observations.
BUFFERS = (
    (
        "10 M rows with observations of 310 numbers",
        10_000_000,
        _row((310,), 12),
        (
            ("float32", {}),
            ("share_next", {"share_next": True}),
            ("bfloat16", {"dtypes": {"observation": torch.bfloat16}}),
            ("bfloat16, share_next", {"dtypes": {"observation": torch.bfloat16}, "share_next": True}),
        ),
    ),
    (
        "1 M rows with four frames of 84 x 84",
        1_000_000,
        _row((4, 84, 84), 1),
        (
            ("float32", {}),
            ("uint8", {"dtypes": {"observation": Codec(torch.uint8, scale=1 / 255)}}),
            ("uint8, share_next", {"dtypes": {"observation": Codec(torch.uint8, scale=1 / 255)}, "share_next": True}),
        ),
    ),
)


def memory_tables(runs: Runs) -> str:
    """docs/rows.md: gigabytes of rows, of next observations aside, of their index, and of everything."""
    tables = []
    for title, rows, spec, ways in BUFFERS:
        lines = []
        for name, options in ways:
            found = plan(spec, rows, **options)
            in_rows, index = found.row_bytes * rows, found.fit("cpu").index.total
            parts = (in_rows, found.rows - in_rows, index, found.rows + index + found.counters)
            lines.append([name, *(f"{n / GB:.2f}" for n in parts)])
        tables.append(table([f"{title}, GB", "rows", "aside", "links", "all together"], lines))
    return "\n\n".join(tables)
