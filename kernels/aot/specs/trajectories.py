"""Specialisations of the trajectory index's kernels, as their launcher chooses them by rule."""

from gpubuf.kernels import config
from gpubuf.kernels.aot.compiler import AotSpec
from gpubuf.kernels.trajectories._launch import (
    BLOCK_ROWS,
    COMPARED,
    ELIGIBLE_WORDS,
    SUMS_WARPS,
    UPDATE_REGISTERS,
    run_bounds,
    shape_of,
)

READ = "gpubuf.kernels.trajectories._triton:"
WRITE = "gpubuf.kernels.trajectories._triton_update:"

RULE = dict.fromkeys(("slice_len", "min_len", "before", "after"), "i32")
RING = {"ring_ptr": "*i64"}
ENDS = {"ends_ptr": "*i64"}
SUMS = {"sums_ptr": "*i64"}
SIGNALS = {"signals_ptr": "*i64", "n_signals": "i32"}
OTHERS = {"others_ptr": "*i64", "n_others": "i32"}
SLICES = {"index_ptr": "*i64", "length_ptr": "*i64", "last_ptr": "*i1"}


def ints(*names: str, large: bool = False) -> dict[str, str]:
    return dict.fromkeys(names, "i64" if large else "i32")


def readers(fan_out: int, n: int, slice_len: int, large: bool, flags: tuple[bool, ...]) -> list[AotSpec]:
    """Draws, slices and bounds."""
    ring = RING | ENDS | ints("n", "envs", "levels") | ints("steps", large=large)
    draw, slices = config.index_draw(fan_out, n, slice_len), config.index_slices(n, slice_len)
    shift = fan_out.bit_length() - 1
    drawn = SUMS | {"rng_ptr": "*i64", "rank_ptr": "*i64"} | SLICES | RULE | {"depth": "i32"}
    return [
        *(
            AotSpec(
                READ + "trajectories_draw_kernel",
                ring | drawn | ints("words", "root", large=large),
                {
                    "HAS_RANK": has_rank,
                    "BY_TRANSITION": by_transition,
                    "SHIFT": shift,
                    "BLOCK_SLICES": draw.block_slices,
                    "BLOCK_STEPS": draw.block_steps,
                },
                draw.num_warps,
            )
            for has_rank in flags
            for by_transition in flags
        ),
        AotSpec(
            READ + "trajectories_slices_kernel",
            ring | SLICES | {"start_ptr": "*i64", "slice_len": "i32"},
            {"BLOCK_SLICES": slices.block_slices, "BLOCK_STEPS": slices.block_steps},
            slices.num_warps,
        ),
        AotSpec(
            READ + "trajectories_bounds_kernel",
            ring | {"row_ptr": "*i64", "bounds_ptr": "*i64"},
            {"BLOCK_ROWS": BLOCK_ROWS},
        ),
    ]


def writers(fan_out: int, n: int, steps: int, envs: int, large: bool, flags: tuple[bool, ...]) -> list[AotSpec]:
    """Updates of ``n`` steps, marks, and sums."""
    shape = shape_of(steps, envs, fan_out)
    run_words = run_bounds(n, shape.slots)[0]
    chosen = config.index_update(fan_out, n, run_words, envs)
    shift = fan_out.bit_length() - 1
    size = ints("steps", large=large) | {"envs": "i32"}
    run = ints("n", "run_words")
    nodes = {"SHIFT": shift, "BLOCK_NODES": chosen.block_nodes}
    above = SUMS | RING | OTHERS | size | ints("n", "run", "depth") | ints("words", large=large)
    specs = [
        AotSpec(
            WRITE + "trajectories_top_kernel",
            above | {"first_level": "i32"},
            nodes,
            SUMS_WARPS,
        ),
        AotSpec(
            WRITE + "trajectories_sums_kernel",
            {name: kind for name, kind in above.items() if name != "depth"} | {"level": "i32"},
            nodes,
            SUMS_WARPS,
        ),
    ]
    blocks = {name: size for name, size in COMPARED.items() if name != "num_warps"}
    for flag in flags:
        specs.append(
            AotSpec(
                WRITE + "trajectories_compare_kernel",
                {"breaks_ptr": "*u8", "pairs_ptr": "*i64", "index_ptr": "*i64"}
                | RING
                | size
                | ints("n_pairs", "count"),
                blocks | {"HAS_INDEX": flag},
                COMPARED["num_warps"],
            )
        )  # fmt: skip
        chosen = config.index_update(fan_out, n, run_words, envs, by_id=flag)
        bits = {"BY_ID": flag, "BLOCK_BYTES": chosen.block_bytes}
        if chosen.block_envs:
            specs.append(
                AotSpec(
                    WRITE + "trajectories_update_envs_kernel",
                    ENDS | SUMS | RING | SIGNALS | OTHERS | RULE | size | run
                    | ints("words", large=large) | ints("depth", "levels"),
                    bits | {
                        "SPAN": config.index_span(n, flag),
                        "SHIFT": shift,
                        "BLOCK_NODES": chosen.block_nodes,
                        "BY_TRANSITION": flag,
                        "SUMS": envs <= chosen.block_envs,
                        "BLOCK_ENVS": chosen.block_envs,
                        "BLOCK_WEIGHTS": chosen.block_weights,
                    },
                    chosen.num_warps,
                    UPDATE_REGISTERS,
                )
            )  # fmt: skip
        else:
            specs += [
                AotSpec(
                    WRITE + "trajectories_bits_kernel",
                    ENDS | RING | SIGNALS | size | {"n": "i32"},
                    bits | {"SPAN": config.index_span(n, flag)},
                    chosen.num_warps,
                ),
                AotSpec(
                    WRITE + "trajectories_bits_above_kernel",
                    ENDS | RING | size | ints("n", "level"),
                    bits,
                    chosen.num_warps,
                ),
                AotSpec(
                    WRITE + "trajectories_weights_kernel",
                    ENDS | SUMS | RING | OTHERS | RULE | size | run | {"levels": "i32"},
                    {"BY_TRANSITION": flag, "BLOCK_WEIGHTS": chosen.block_weights},
                    chosen.num_warps,
                ),
            ]
        specs.append(
            AotSpec(
                WRITE + "trajectories_update_eligible_kernel",
                {"eligible_ptr": "*i64", "rows_ptr": "*i64"} | ENDS | RING | size
                | ints("n_rows", "touched", "need", "run", "levels"),
                {"STARTS_TOO": flag, "BLOCK_WORDS": ELIGIBLE_WORDS},
            )
        )  # fmt: skip
    return specs


# One environment; a few and thousands, a step and many at a time; and more steps than an int32 counts.
SPECS = [
    *readers(32, 256, 4, False, (False, True)),
    *readers(32, 10**5, 4, False, (True,)),
    *readers(64, 256, 100, True, (True,)),
    *writers(32, 1, 10**6, 1, False, (False, True)),
    *writers(32, 256, 10**6, 1, False, (False, True)),
    *writers(16, 1, 1000, 24, False, (False, True)),
    *writers(16, 64, 1000, 24, False, (False, True)),
    *writers(64, 1, 1000, 24, False, (False, True)),
    *writers(32, 1, 1000, 24, False, (False, True)),
    *writers(32, 1, 1000, 4096, False, (False, True)),
    *writers(32, 64, 1000, 4096, False, (False, True)),
    *writers(32, 10**6, 10**6, 1, False, (False, True)),
    *writers(64, 10**6, 2**35, 1, True, (True,)),
]
