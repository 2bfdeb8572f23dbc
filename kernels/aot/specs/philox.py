"""Specialisations of the Philox kernel, as its launcher chooses them."""

from gpubuf.kernels.aot.compiler import AotSpec

SPECS = [
    AotSpec(
        kernel="gpubuf.kernels.philox._triton:philox_uniform_kernel",
        signature={"rng_ptr": "*i64", "out_ptr": "*fp64", "n": "i32"},
        constexprs={"BLOCK": 512},
    ),
]
