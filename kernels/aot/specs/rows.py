"""Specialisations of the rows kernels, as their launcher chooses them by rule."""

from __future__ import annotations

from typing import Any

from gpubuf.kernels.aot.compiler import AotSpec
from gpubuf.kernels.config import rows_copy
from gpubuf.kernels.rows import ALIGNMENT
from gpubuf.kernels.rows._launch import MAX_SOURCES, padded_keys

READ = "gpubuf.kernels.rows._triton:"
WRITE = "gpubuf.kernels.rows._triton_write:"

STORAGE = {"table_ptr": "*i64", "ring_ptr": "*i64"}
BATCH = {"arena_ptr": "*u8", "index_ptr": "*i64", "generation_ptr": "*i64"}


def specs_of(n_bytes: int, n_keys: int, capacity: str) -> list[AotSpec]:
    """Every kernel for one size of batch and one number of keys. ``capacity`` is the type of counts of rows."""
    config = rows_copy(n_bytes)
    constants = {"KEYS": padded_keys(n_keys), "TILE": config.tile, "ALIGNMENT": ALIGNMENT}
    sizes: dict[str, Any] = {"n_keys": "i32", "n": "i32", "capacity": capacity, "row_programs": "i32"}
    # Addresses don't fit int32, and the strides of rows do; both are padded to a power of two.
    sources = {"source_addresses": ("i64",) * n_keys, "source_strides": ("i32",) * n_keys}
    signatures: dict[str, dict[str, Any]] = {
        "gather": STORAGE | BATCH | sizes,
        "sample": STORAGE | {"rng_ptr": "*i64"} | BATCH | sizes,
        "extend": STORAGE | sources | {"index_ptr": "*i64", "skipped": "i32", "advance": "i32"} | sizes,
        "write": STORAGE | sources | {"index_ptr": "*i64", "winner_ptr": "*i1"} | sizes,
    }
    writes = {name: name in ("extend", "write") for name in signatures}
    return [
        AotSpec(
            f"{WRITE if writes[name] else READ}rows_{name}_kernel",
            signature,
            ({"PLAIN": True} if writes[name] else {}) | constants,
            config.num_warps,
        )
        for name, signature in signatures.items()
    ]


# Small and large batches of up to eight keys, and as many keys as one launch can write in more than 2**31 rows.
SPECS = [
    *specs_of(2**16, 8, "i32"),
    *specs_of(2**24, 8, "i32"),
    *specs_of(2**24, MAX_SOURCES, "i64"),
]
