"""Specialisations of the sum tree's kernels, as their launcher chooses them by rule."""

from gpubuf.kernels import config
from gpubuf.kernels._launching import all_registers
from gpubuf.kernels.aot.compiler import AotSpec
from gpubuf.kernels.sum_tree._launch import TOP_WARPS, run_block, top_block

DRAW = "gpubuf.kernels.sum_tree._triton:"
UPDATE = "gpubuf.kernels.sum_tree._triton_update:"

TREE = {"leaves_ptr": "*fp32", "nodes_ptr": "*fp64", "scalars_ptr": "*fp64"}
ELIGIBLE = {"eligible_ptr": "*i64"}
WEIGHT = {"weight_ptr": "*fp32"}
ENTRIES = {"ring_ptr": "*i64", "index_ptr": "*i64", "priority_ptr": "*fp32", "generation_ptr": "*i64"}
SIZES = {"n": "i32", "capacity": "i32", "n_nodes": "i32"}
HUGE = {"n": "i32", "capacity": "i64", "n_nodes": "i64"}


def pick(source: dict[str, str], *names: str) -> dict[str, str]:
    return {name: source[name] for name in names}


def specs_of(fan_out: int, sizes: dict[str, str], flags: tuple[tuple[bool, bool], ...]) -> list[AotSpec]:
    """Every kernel for one shape of tree: small and large batches.

    ``flags`` are pairs: whether there is a bitmap of eligible rows, and the value of a kernel's other flag, if it has
    one. A spec that comes twice is compiled once.
    """
    small, large = config.tree_update(fan_out, 256), config.tree_update(fan_out, 65536)
    shift = fan_out.bit_length() - 1
    entries = {"BLOCK_ENTRIES": large.block_entries}
    nodes = {"SHIFT": shift, "BLOCK_NODES": large.block_nodes}
    one_program = {
        "SHIFT": shift,
        "BLOCK_ENTRIES": small.block_entries,
        "BLOCK_NODES": small.block_nodes,
    }
    of_a_run = one_program | {"BLOCK_NODES": run_block(small)}
    index = pick(ENTRIES, "index_ptr")
    specs = [
        AotSpec(
            UPDATE + "sum_tree_refresh_kernel",
            pick(TREE, "nodes_ptr") | index | sizes | {"level": "i32"},
            nodes,
            large.num_warps,
        ),
        AotSpec(
            UPDATE + "sum_tree_top_kernel",
            pick(TREE, "nodes_ptr") | index | sizes | {"first_level": "i32", "depth": "i32"},
            {"SHIFT": shift, "BLOCK_NODES": top_block(fan_out)},
            TOP_WARPS,
        ),
    ]
    for eligible, flag in flags:
        has_eligible = {"HAS_ELIGIBLE": eligible}
        specs += [
            AotSpec(
                UPDATE + "sum_tree_refresh_leaves_kernel",
                pick(TREE, "leaves_ptr", "nodes_ptr") | ELIGIBLE | WEIGHT | index | sizes,
                has_eligible | {"HAS_TAGS": flag} | nodes,
                large.num_warps,
            ),
            AotSpec(
                UPDATE + "sum_tree_refresh_small_kernel",
                pick(TREE, "leaves_ptr", "nodes_ptr") | ELIGIBLE | index | sizes | {"depth": "i32"},
                of_a_run | has_eligible,
                small.num_warps,
            ),
            AotSpec(
                UPDATE + "sum_tree_claim_kernel",
                pick(TREE, "leaves_ptr", "scalars_ptr") | ENTRIES | WEIGHT | pick(sizes, "n", "capacity"),
                entries | {"HAS_GENERATION": flag},
                large.num_warps,
            ),
            AotSpec(
                UPDATE + "sum_tree_mark_kernel",
                TREE | index | sizes,
                entries | {"WITHIN_BUFFER": flag},
                large.num_warps,
            ),
            AotSpec(
                UPDATE + "sum_tree_update_small_kernel",
                TREE | ELIGIBLE | ENTRIES | sizes | {"depth": "i32"},
                one_program | has_eligible | {"HAS_GENERATION": flag},
                small.num_warps,
                all_registers(small.num_warps),
            ),
            AotSpec(
                UPDATE + "sum_tree_mark_small_kernel",
                TREE | ELIGIBLE | index | sizes | {"depth": "i32"},
                of_a_run | has_eligible | {"WITHIN_BUFFER": flag},
                small.num_warps,
            ),
        ]
    for n in (256, 4096):
        draw = config.tree_draw(fan_out, n)
        specs += [
            AotSpec(
                DRAW + "sum_tree_draw_kernel",
                TREE
                | ELIGIBLE
                | {"rng_ptr": "*i64", "index_ptr": "*i64", "weight_ptr": "*fp32"}
                | sizes
                | {"depth": "i32"},
                {"HAS_ELIGIBLE": eligible, "STRATIFIED": stratified, "SHIFT": shift, "BLOCK_DRAWS": draw.block_draws},
                draw.num_warps,
            )
            for eligible, stratified in flags
        ]
    return specs


# The tree of a million rows, one with more rows than an int32 counts, and what needs most registers in between.
SPECS = [
    *specs_of(32, SIZES, ((False, False), (True, True))),
    *specs_of(64, HUGE, ((False, True), (True, False))),
    *(spec for spec in specs_of(64, SIZES, ((False, True),)) if "refresh" in spec.kernel),
]
