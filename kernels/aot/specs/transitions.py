"""Specialisations of the rows kernels for fields, as their launcher chooses them by rule."""

from __future__ import annotations

from typing import Any

import torch

from gpubuf.kernels.aot.compiler import AotSpec
from gpubuf.kernels.rows import ALIGNMENT
from gpubuf.kernels.rows._launch import (
    COMPARED_COLUMNS,
    MAX_SOURCES,
    assign_tile,
    batch_tile,
    padded_keys,
    sample_tile,
    write_tile,
)

BATCH = "gpubuf.kernels.rows._triton:"
WRITE = "gpubuf.kernels.rows._triton_write:"

TABLE = {"table_ptr": "*i64", "ring_ptr": "*i64"}
STORAGE = {"fields_ptr": "*i64", "ring_ptr": "*i64"}


def batch_specs(n_bytes: int, n_keys: int, steps: str, ends: bool, links: bool, noise: bool) -> list[AotSpec]:
    """The kernel that computes a batch, of given rows and of drawn ones. ``steps`` is the type of their number."""
    device = torch.device("cpu")
    tiles = {"gather": batch_tile(n_bytes, device), "sample": sample_tile(n_bytes, device, links, noise)}
    constants: dict[str, Any] = {
        "HAS_ENDS": ends,
        "HAS_LINKS": links,
        "HAS_NOISE": noise,
        "KEYS": padded_keys(n_keys),
        "ALIGNMENT": ALIGNMENT,
    }
    pointers = {"ends_ptr": "*i64", "links_ptr": "*i32" if links else "*i64", "noise_ptr": "*i64", "rng_ptr": "*i64"}
    sizes = dict.fromkeys(("n_keys", "n", "rows", "envs", "n_steps", "mirror", "draws", "row_programs"), "i32")
    common: dict[str, Any] = STORAGE | pointers | {"arena_ptr": "*u8", "index_ptr": "*i64", "generation_ptr": "*i64"}
    common |= sizes | {"steps": steps, "gamma_bits": "i64"}
    return [
        AotSpec(
            f"{BATCH}rows_compute_kernel", common, constants | {"SAMPLE": name == "sample", "TILE": tile}, num_warps
        )
        for name, (tile, num_warps) in tiles.items()
    ]


def write_specs(n_bytes: int, n_keys: int, capacity: str) -> list[AotSpec]:
    """The kernels that write columns."""
    tile, num_warps = write_tile(n_bytes, torch.device("cpu"))
    constants = {"PLAIN": False, "KEYS": padded_keys(n_keys), "TILE": tile, "ALIGNMENT": ALIGNMENT}
    common = TABLE | sources(n_keys) | {"n_keys": "i32", "n": "i32", "capacity": capacity, "row_programs": "i32"}
    signatures: dict[str, dict[str, Any]] = {
        "extend": common | {"index_ptr": "*i64", "skipped": "i32", "advance": "i32"},
        "write": common | {"index_ptr": "*i64", "winner_ptr": "*i1"},
    }
    return [
        AotSpec(f"{WRITE}rows_{name}_kernel", signature, constants, num_warps) for name, signature in signatures.items()
    ]


def link_specs(n_bytes: int, n_keys: int, capacity: str, again: bool) -> list[AotSpec]:
    """The kernels of observations that are stored once, for an extension or for rows that get them ``again``."""
    tile, num_warps = write_tile(n_bytes, torch.device("cpu"))
    block, assign_warps = assign_tile(n_bytes, torch.device("cpu"))
    rows = {"ring_ptr": "*i64", "index_ptr": "*i64", "winner_ptr": "*i1" if again else "*i64"}
    sizes = {"n": "i32", "skipped": "i32", "capacity": capacity, "envs": "i32"}
    fields = {"fields_ptr": "*i64", "n_keys": "i32"} | sources(n_keys)
    columns = min(COMPARED_COLUMNS, tile)
    keys = {"RELINK": again, "KEYS": padded_keys(n_keys)}
    assigned = dict.fromkeys(("links_ptr", "differs_ptr", "free_ptr"), "*i32") | {"owners_ptr": "*i64", "slots": "i32"}
    signatures: dict[str, dict[str, Any]] = {
        "compare": fields | {"differs_ptr": "*i32", "begun": "i32"},
        "assign": assigned,
        "aside": fields | {"links_ptr": "*i32", "advance": "i32"},
    }
    constants: dict[str, dict[str, Any]] = {
        "compare": keys | {"BLOCK_ROWS": tile // columns, "BLOCK_COLUMNS": columns},
        "assign": {"RELINK": again, "BLOCK": block},
        "aside": keys | {"TILE": tile, "ALIGNMENT": ALIGNMENT},
    }
    warps = {"compare": num_warps, "assign": assign_warps, "aside": num_warps}
    return [
        AotSpec(f"{WRITE}rows_{name}_kernel", rows | sizes | signature, constants[name], warps[name])
        for name, signature in signatures.items()
    ]


def sources(n_keys: int) -> dict[str, Any]:
    """Addresses don't fit int32, and the strides of rows do; both are padded to a power of two."""
    return {"source_addresses": ("i64",) * n_keys, "source_strides": ("i32",) * n_keys}


# Codecs alone; windows; observations stored once with random processing; and that in more than 2**31 rows.
SPECS = [
    *batch_specs(2**16, 8, "i32", False, False, False),
    *batch_specs(2**16, 8, "i32", True, False, False),
    *batch_specs(2**16, 8, "i32", True, True, True),
    *batch_specs(2**16, 8, "i64", True, True, True),
    *write_specs(2**16, 8, "i32"),
    *write_specs(2**16, MAX_SOURCES, "i64"),
    *link_specs(2**16, 8, "i32", False),
    *link_specs(2**16, 8, "i32", True),
    *link_specs(2**16, MAX_SOURCES, "i64", False),
]
