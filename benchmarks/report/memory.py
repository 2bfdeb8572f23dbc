"""The bytes of two buffers, stored in several ways: what ``gpubuf plan`` says."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.measure.figures import table
from benchmarks.measure.results import Runs
from benchmarks.peers.sources import transitions
from gpubuf import plan
from gpubuf.data import Codec

GB = 1e9
ONCE: dict[str, Any] = {"share_next": True}
HALF: dict[str, Any] = {"dtypes": {"observation": torch.bfloat16}}
BYTES: dict[str, Any] = {"dtypes": {"observation": Codec(torch.uint8, scale=1 / 255)}}
#: By title: rows, numbers of an observation and of an action, and the ways to store observations.
BUFFERS = {
    "10 M rows with observations of 310 numbers": (
        (10_000_000, 310, 12),
        {"float32": {}, "share_next": ONCE, "bfloat16": HALF, "bfloat16, share_next": {**HALF, **ONCE}},
    ),
    "1 M rows with four frames of 84 x 84": (
        (1_000_000, 4 * 84 * 84, 1),
        {"float32": {}, "uint8": BYTES, "uint8, share_next": {**BYTES, **ONCE}},
    ),
}


def memory_tables(runs: Runs) -> str:
    """docs/rows.md: gigabytes of rows, of next observations aside, of their index, and of everything."""
    tables = []
    for title, ((rows, *widths), ways) in BUFFERS.items():
        lines = []
        for name, options in ways.items():
            found = plan(transitions(1, *widths), rows, **options)
            in_rows, index = found.row_bytes * rows, found.fit("cpu").index.total
            parts = (in_rows, found.rows - in_rows, index, found.rows + index + found.counters)
            lines.append([name, *(f"{n / GB:.2f}" for n in parts)])
        tables.append(table([f"{title}, GB", "rows", "aside", "links", "all together"], lines))
    return "\n\n".join(tables)
