"""Specialisations of the transitions kernels, as their launcher chooses them by rule."""

from __future__ import annotations

from typing import Any

import torch

from gpubuf.kernels.aot.compiler import AotSpec
from gpubuf.kernels.rows import ALIGNMENT
from gpubuf.kernels.rows._launch import padded_keys
from gpubuf.kernels.transitions._launch import batch_tile

BATCH = "gpubuf.kernels.transitions._triton:"

STORAGE = {"fields_ptr": "*i64", "ring_ptr": "*i64"}


def batch_specs(n_bytes: int, n_keys: int, capacity: str, ends: bool, links: bool, noise: bool) -> list[AotSpec]:
    """Both kernels that make a batch. ``capacity`` is the type of counts of rows."""
    tile, num_warps = batch_tile(n_bytes, torch.device("cpu"))
    constants: dict[str, Any] = {
        "HAS_ENDS": ends,
        "HAS_LINKS": links,
        "HAS_NOISE": noise,
        "KEYS": padded_keys(n_keys),
        "TILE": tile,
        "ALIGNMENT": ALIGNMENT,
    }
    pointers = {"ends_ptr": "*i64", "links_ptr": "*i32" if links else "*i64", "noise_ptr": "*i64"}
    sizes = dict.fromkeys(("n_keys", "n", "envs", "n_steps", "mirror", "draws", "row_programs"), "i32")
    common: dict[str, Any] = STORAGE | pointers | {"arena_ptr": "*u8", "index_ptr": "*i64", "generation_ptr": "*i64"}
    common |= sizes | {"capacity": capacity, "gamma_bits": "i64"}
    return [
        AotSpec(f"{BATCH}transitions_{name}_kernel", common | more, constants, num_warps)
        for name, more in {"gather": {}, "sample": {"rng_ptr": "*i64"}}.items()
    ]


# Codecs alone; windows; observations stored once with random processing; and that in more than 2**31 rows.
SPECS = [
    *batch_specs(2**16, 8, "i32", False, False, False),
    *batch_specs(2**16, 8, "i32", True, False, False),
    *batch_specs(2**16, 8, "i32", True, True, True),
    *batch_specs(2**16, 8, "i64", True, True, True),
]
