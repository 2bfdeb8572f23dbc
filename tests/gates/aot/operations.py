"""The calls whose launches are compiled ahead of time: every operation, in the shapes that make different kernels.

A family is a function that runs its operations on tensors without memory. Launches that come twice are recorded once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gpubuf.kernels import (
    categorical,
    discrete_sac,
    moments,
    norms,
    optim,
    perceptrons,
    philox,
    rows,
    sac,
    sum_tree,
    tanh_normal,
    td,
    trajectories,
)
from tests.gates.aot.recorder import Recorder
from tests.gates.aot.spec import AotSpec
from tests.support.perceptrons_setup import Problem, run

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
HUGE = 2**38
"""So many rows that not even the nodes above them can be counted by an int32."""


def floats(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def ints(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def flags(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bool)


def computed(dtype: torch.dtype) -> torch.dtype:
    """What tensors of ``dtype`` are computed in."""
    return F64 if dtype is F64 else F32


# --- losses -----------------------------------------------------------------------------------------------------------


def run_td(record: Recorder) -> None:
    one, discount = floats(), floats(dtype=F64)

    def loss(
        n: int, given: torch.dtype, distance: int, reduction: int, weighted: bool, masked: bool,
        combine: int = td.SMALLEST, entropy: bool = True,
    ) -> None:  # fmt: skip
        q, target = floats(2, n, dtype=given), floats(n, dtype=computed(given))
        log_prob, alpha = (target, one) if entropy else (None, None)
        weight, mask = floats(n) if weighted else None, flags(n) if masked else None
        steps = ints(n) if weighted else None
        record.run(td.soft_td_target, q, log_prob, alpha, floats(n), flags(n), discount, steps, combine)
        found, _, norm = record.run(td.td_loss, q, target, weight, mask, distance, reduction)
        record.run(td.td_loss_backward, found, q, target, weight, mask, norm, distance, reduction)

    loss(256, F32, td.SMOOTH_L1, td.MEAN, False, False)
    loss(256, F32, td.L2, td.MEAN, True, False, entropy=False)
    loss(32, BF16, td.L1, td.SUM, True, True)
    loss(4096, F32, td.SMOOTH_L1, td.MEAN, True, True)
    loss(4096, F64, td.L2, td.SUM, False, False, entropy=False)
    loss(4096, F16, td.L2, td.NONE, False, True)
    loss(8192, F32, td.L2, td.MEAN, False, False, combine=td.AVERAGE)
    for given, entropy, steps, mask, combine in (
        (F32, True, None, None, td.SMALLEST),
        (BF16, True, ints(640), flags(640), td.SMALLEST),
        (F64, False, ints(640), None, td.AVERAGE),
    ):
        log_prob, alpha = (floats(640), one) if entropy else (None, None)
        q, ended = floats(2, 640, dtype=given), flags(640)
        arguments = (q, log_prob, alpha, floats(640), ended, ended, mask, discount, discount, steps, 20, 1, combine)
        record.run(td.soft_lambda_return, *arguments)


def run_sac(record: Recorder) -> None:
    one = floats()
    for n, given, reduction, weighted, masked, combine in (
        (256, F32, td.MEAN, False, False, td.SMALLEST),
        (256, F32, td.MEAN, True, False, td.SMALLEST),
        (32, BF16, td.SUM, True, True, td.SMALLEST),
        (4096, F32, td.MEAN, True, True, td.SMALLEST),
        (4096, F64, td.SUM, False, False, td.SMALLEST),
        (4096, F16, td.NONE, False, True, td.SMALLEST),
        (256, F32, td.MEAN, False, False, td.AVERAGE),
        (8192, BF16, td.MEAN, True, True, td.AVERAGE),
    ):
        q, log_prob = floats(2, n, dtype=given), floats(n, dtype=computed(given))
        weighting = floats(n) if weighted else None, flags(n) if masked else None
        loss, _, norm = record.run(sac.actor_loss, q, log_prob, one, *weighting, reduction, combine)
        record.run(sac.actor_loss_backward, loss, q, log_prob, one, *weighting, norm, reduction, combine)
        record.run(sac.temperature_loss, one, log_prob, one, *weighting, reduction)


def run_discrete_sac(record: Recorder) -> None:
    one = floats()
    for n, actions, given, reduction, weighted, masked, with_q in (
        (256, 4, F32, td.MEAN, False, False, False),
        (256, 18, F32, td.MEAN, True, False, False),
        (32, 2, BF16, td.SUM, True, True, False),
        (4096, 200, F32, td.MEAN, True, True, True),
        (4096, 6, F64, td.SUM, False, False, True),
        (4096, 5, F16, td.NONE, False, True, False),
    ):
        q, logits = floats(2, n, actions, dtype=given), floats(n, actions, dtype=given)
        weighting = floats(n) if weighted else None, flags(n) if masked else None
        record.run(discrete_sac.soft_value, q, logits, one)
        loss, _, _, norm = record.run(discrete_sac.actor_loss, q, logits, one, *weighting, reduction)
        record.run(discrete_sac.actor_loss_backward, loss, q, logits, one, *weighting, norm, reduction, with_q)


def run_categorical(record: Recorder) -> None:
    one, discount, support = floats(), floats(dtype=F64), (-20.0, 20.0)
    for n, atoms, given, target, priority, reduction, options in (
        (8192, 101, F32, categorical.OWN, categorical.DIVERGENCE, td.MEAN, True),
        (256, 51, BF16, categorical.MIN, categorical.VALUE_ERROR, td.SUM, True),
        (4, 2, F16, categorical.MIXTURE, categorical.DIVERGENCE, td.MEAN, False),
        (256, 101, F64, categorical.MIN, categorical.DIVERGENCE, td.NONE, True),
        (256, 256, F32, categorical.MIXTURE, categorical.VALUE_ERROR, td.MEAN, False),
        (256, 1001, F32, categorical.OWN, categorical.DIVERGENCE, td.NONE, True),
    ):
        logits = floats(2, n, atoms, dtype=given)
        entropy = (floats(n, dtype=computed(given)), one) if options else (None, None)
        steps, scale = (ints(n), one) if options else (None, None)
        weighting = (floats(n), flags(n)) if options else (None, None)
        reward = (floats(n), flags(n), discount, steps, scale)
        mass = record.run(categorical.categorical_target, logits, *entropy, *reward, *support, target)
        loss, _, norm = record.run(
            categorical.categorical_loss, logits, mass, *weighting, *support, priority, options, reduction
        )
        record.run(categorical.categorical_loss_backward, loss, logits, mass, *weighting, norm, options, reduction)
        value = record.run(categorical.expected_value, logits, *support)
        record.run(categorical.expected_value_backward, value, logits, value, *support)


def run_tanh_normal(record: Recorder) -> None:
    limits = (-1.0, 1.0, 1)

    def call(
        n: int, width: int, given: torch.dtype, bounded: bool, by_action: bool = True, by_log_prob: bool = True
    ) -> None:
        loc, noise = floats(n, width, dtype=given), floats(n, width, dtype=computed(given))
        bounds = (floats(width, dtype=given),) * 2 if bounded else (None, None)
        action, log_prob = record.run(tanh_normal.sample, loc, loc, noise, *bounds, *limits)
        grads = action if by_action else None, log_prob if by_log_prob else None
        record.run(tanh_normal.sample_backward, loc, loc, noise, *bounds, *grads, *limits)

    for given, bounded in ((F32, False), (F32, True), (BF16, False), (F64, True)):
        call(256, 6, given, bounded)
    call(256, 6, F32, False, by_log_prob=False)
    call(256, 6, F32, False, by_action=False)
    call(3, 1, F32, False)
    call(4096, 1000, F32, True)


# --- networks and their statistics ------------------------------------------------------------------------------------


def run_norms(record: Recorder) -> None:
    for n, width, given, norm, activation, weights, biased in (
        (256, 768, F32, norms.LAYER, norms.SILU, F32, True),
        (8192, 768, BF16, norms.LAYER, norms.SILU, F32, True),
        (8192, 768, BF16, norms.LAYER, norms.SILU, BF16, True),
        (8192, 192, F32, norms.LAYER, norms.SILU, F32, True),
        (256, 256, F32, norms.LAYER, norms.RELU, F32, True),
        (2048, 256, BF16, norms.RMS, norms.NONE, F32, False),
        (256, 256, F64, norms.LAYER, norms.SILU, F64, True),
        (256, norms.MAX_WIDTH, F32, norms.LAYER, norms.SILU, F32, True),
        (256, norms.MAX_WIDTH, F64, norms.LAYER, norms.SILU, F64, True),
        (3, 5, F32, norms.RMS, norms.NONE, F32, False),
    ):
        x, weight = floats(2, n, width, dtype=given), floats(2, 1, width, dtype=weights)
        bias = weight if biased else None
        y, statistics = record.run(norms.norm_activation, x, weight, bias, 1e-5, norm, activation)
        record.run(norms.norm_activation_backward, y, x, weight, bias, statistics, norm, activation)
    for n, width, given, activation in (
        (256, 1024, F32, norms.RELU),
        (2048, 1024, BF16, norms.SILU),
        (256, 5, F32, norms.NONE),
        (256, 256, F64, norms.SILU),
        (32768, 512, F64, norms.SILU),
    ):
        x, weight = floats(2, n, width, dtype=given), floats(2, 1, width, dtype=computed(given))
        moved = record.run(norms.batch_moments, x, weight)
        y = record.run(norms.batch_norm_activation, x, weight, weight, *moved, 1e-5, activation, True)
        for own in (True, False):
            record.run(norms.batch_norm_activation_backward, y, x, weight, weight, *moved, 1e-5, activation, own)


def run_perceptrons(record: Recorder) -> None:
    """Updates of small and large batches, in each precision of products, of both kinds of weights."""

    def update(n: int, hidden: tuple[int, ...], **options: Any) -> None:
        given = Problem(n, hidden, **options)
        inputs, grads, weights, _, shapes = run(given, record.run)["products"]
        entries = 2 * len(weights) + 1
        # Of a bucket with as many entries, one for each part of each product.
        params = [each for weight in weights for each in (weight, weight)] + [floats(1)]
        rule = (floats(), shapes, [*range(entries)], given.precision, floats(1, optim.HYPER, dtype=F64), True)
        bucket = (floats(entries), ints(1), params, params, params)
        record.run(perceptrons.step, ints(entries, optim.ENTRY), inputs, grads, *rule, *bucket)

    small: dict[str, Any] = {"observation": 17, "size": 6}
    humanoid: dict[str, Any] = {"observation": 98, "size": 23, "weighted": True, "bounded": True}
    fastsac: dict[str, Any] = {"head": perceptrons.SQUASHED, "combine": td.AVERAGE, "next_entropy": True}
    fastsac |= {"activation": norms.SILU, "atoms": 101, "critics_eps": 1e-5, "actor_eps": 1e-5, "by_alpha": True}
    for precision in (perceptrons.TF32X3, perceptrons.IEEE, perceptrons.TF32, perceptrons.BF16):
        update(256, (256, 256), precision=precision, **small)
        update(8192, (768, 384, 192), precision=precision, **humanoid, **fastsac)
    large = {"weighted": True, "bounded": True, "activation": norms.SILU, "precision": perceptrons.TF32X3}
    update(256, (256, 256), observation=376, size=17, turned=True, **large)
    update(2048, (256, 256), precision=perceptrons.TF32X3, turned=True, **small)
    update(8192, (768, 384), precision=perceptrons.BF16, observation=98, size=23)


def run_optim(record: Recorder) -> None:
    def step(given: torch.dtype, entries: int, clipped: bool = False, rows: bool = False, aligned: bool = True) -> None:
        some = [floats(1024, dtype=given)] * entries
        table, tiles, hyper = ints(entries, optim.ENTRY), ints(entries, 2), floats(1, optim.HYPER, dtype=F64)
        norm, steps, ticket = floats() if clipped else None, floats(entries), ints(1)
        none: list[Tensor] = []
        bucket = (table, tiles, hyper, some, [False] * entries, norm, steps, ticket, some, none, none, aligned, rows)
        record.run(optim.adamw, *bucket)

    step(F32, 13)
    step(F32, 13, aligned=False)
    step(F32, 30, clipped=True, rows=True)
    step(F32, optim.MAX_ENTRIES, clipped=True, rows=True)
    step(BF16, 30, clipped=True, rows=True)
    step(BF16, 13)
    step(F64, 13, clipped=True, rows=True)


def run_moments(record: Recorder) -> None:
    rule = floats(5, dtype=F64)
    for n, elements, given in (
        (4096, 310, F32),
        (4096, 310, BF16),
        (1, 17, F32),
        (4096, 1, F64),
        (32768, 48, F64),
        (256, 48, F32),
        (256, 28224, torch.uint8),
    ):
        state, mean, factor, tickets = moments.new_state(elements, "meta")
        source = torch.empty(n, elements, dtype=given)
        record.run(moments.update, state, source, mean, factor, rule, tickets)
    for envs, given in ((128, F32), (1, F64)):
        record.run(moments.returns, floats(envs, 1, dtype=F64), floats(16, envs, 1, dtype=given), flags(16, envs), rule)


# --- rows -------------------------------------------------------------------------------------------------------------


def run_philox(record: Recorder) -> None:
    record.run(philox.uniform, ints(3), 1000)


def keys(n: int, n_keys: int, n_bytes: int) -> list[Tensor]:
    """Rows of ``n_keys`` keys, about ``n_bytes`` bytes together."""
    return [ints(n, n_bytes // (n * n_keys), dtype=torch.uint8)] * n_keys


def run_rows(record: Recorder) -> None:
    """Copies of small and large batches, and of as many keys as one launch can write; then the fields of a plan."""
    from gpubuf.kernels.rows._launch import MAX_SOURCES

    ring, rng, stored = ints(4), ints(3), 10**6
    for n, n_keys, n_bytes, capacity in (
        (256, 8, 2**16, stored),
        (65536, 8, 2**24, stored),
        (16384, MAX_SOURCES, 2**24, HUGE),
    ):
        table, index = ints(n_keys, rows.ENTRY), ints(n)
        record.run(rows.gather, table, ring, index, capacity, n_bytes)
        record.run(rows.sample, table, ring, rng, n, capacity, n_bytes)
        for law in (rows.GEOMETRIC, rows.LINEAR, rows.RECENT, rows.BALANCED):
            how = rows.Reading(law=law, numbers=floats(4 if law == rows.BALANCED else 2, dtype=torch.float64))
            record.run(rows.sample, table, ring, rng, n, capacity, n_bytes, *how)
        record.run(rows.extend, table, keys(n, n_keys, n_bytes), ring, n, capacity)
        for generation in (None, index):
            record.run(rows.write, table, keys(n, n_keys, n_bytes), ring, index, capacity, generation)
    # Codecs alone; transitions; observations stored once with random processing; windows; and all in a huge storage.
    index = ints(256)
    for capacity, n_steps, links, noise, windows in (
        (stored, 1, None, None, False),
        (stored, 3, None, None, False),
        (stored, 3, ints(stored, dtype=torch.int32), rng, False),
        (stored, 1, None, None, True),
        (HUGE, 3, ints(HUGE, dtype=torch.int32), rng, True),
    ):
        table, ends = ints(8, rows.FIELD), ints(-(-capacity // 64))
        how = rows.Reading(ends, links, noise, 1, n_steps, 0.99, windows=windows)
        record.run(rows.gather, table, ring, index, capacity, 2**16, *how)
        record.run(rows.sample, table, ring, rng, 256, capacity, 2**16, *how)
        for law, count in ((rows.GEOMETRIC, 2), (rows.BALANCED, 4)):
            by_law = how._replace(law=law, numbers=floats(count, dtype=torch.float64))
            record.run(rows.sample, table, ring, rng, 256, capacity, 2**16, *by_law)
    for n_keys, capacity in ((8, stored), (MAX_SOURCES, HUGE)):
        table, given = ints(n_keys, rows.FIELD), keys(256, n_keys, 2**16)
        links, owners = ints(capacity, dtype=torch.int32), ints(1001)
        record.run(rows.extend, table, given, ring, 256, capacity)
        record.run(rows.extend, table, given, ring, 256, capacity, 1, links, owners)
        record.run(rows.write, table, given, ring, index, capacity)
    links = ints(stored, dtype=torch.int32)
    record.run(rows.relink, ints(8, rows.FIELD), keys(256, 8, 2**16), ring, index, stored, 1, links, owners)


def run_sum_tree(record: Recorder) -> None:
    """The tree of a million rows, one of a huge storage, and what needs most registers in between."""
    ring, rng = ints(4), ints(3)
    for fan_out, capacity, variants in (
        (32, 10**6, ((False, False), (True, True))),
        (64, HUGE, ((False, True), (True, False))),
        (64, 10**6, ((False, True),)),
    ):
        tree = sum_tree.new_tree(capacity, fan_out, "meta")
        for limited, flag in variants:
            tree = tree._replace(eligible=ints(sum_tree.eligible_words(capacity)) if limited else None)
            for n in (256, 4096, 65536):
                index = ints(n)
                record.run(sum_tree.refresh, *tree, index)
                record.run(sum_tree.update, *tree, ring, index, floats(n), index if flag else None)
                record.run(sum_tree.mark, *tree, index, flag)
                record.run(sum_tree.mark, *tree, index, flag, index)
            for n in (256, 4096):
                record.run(sum_tree.draw, *tree, rng, n, flag)
            record.run(sum_tree.build, *tree)


def run_trajectories(record: Recorder) -> None:
    """One environment; a few and thousands, a step and many at a time; and more steps than an int32 counts."""
    ring = ints(4)

    def index(steps: int, envs: int, fan_out: int) -> tuple[Tensor, Tensor]:
        words = sum(trajectories.bit_levels(steps, envs))
        return ints(words), ints(sum(trajectories.level_sizes(steps, envs, fan_out)))

    def read(fan_out: int, n: int, slice_len: int, steps: int, variants: tuple[bool, ...]) -> None:
        ends, sums = index(steps, 1, fan_out)
        for ranked in variants:
            for by_transition in variants:
                rank, rule = ints(n) if ranked else None, (slice_len, 1, 0, 0, by_transition, 0)
                record.run(trajectories.draw, ends, sums, ring, ints(3), rank, n, steps, 1, fan_out, *rule)
        record.run(trajectories.slices, ends, ring, ints(n), slice_len, steps, 1)
        record.run(trajectories.bounds, ends, ring, ints(n), steps, 1)

    def write(fan_out: int, n: int, steps: int, envs: int, variants: tuple[bool, ...] = (False, True)) -> None:
        ends, sums = index(steps, envs, fan_out)
        eligible = ints(trajectories.eligible_words(steps * envs))
        for flag in variants:
            shape, rule = (steps, envs, fan_out), (4, 1, 0, 0, flag, 0)
            for weights in (sums, None):
                record.run(trajectories.update, ends, weights, ring, ints(1, rows.ENTRY), flag, n, *shape, *rule)
            record.run(trajectories.resum, ends, sums, ring, *shape, *rule)
            record.run(trajectories.update_eligible, eligible, ends, ring, n, 3, flag, steps, envs)
            record.run(trajectories.update_eligible, eligible, ends, ring, n, 3, flag, steps, envs, 2, 5)
        returns, rule = torch.empty(steps * envs, 1), torch.empty(3, dtype=torch.float64)
        for dtype in map(rows.dtype_code, (torch.float32, torch.bfloat16)):
            entry = ints(1, rows.ENTRY)
            record.run(trajectories.update_returns, returns, ends, ring, entry, rule, dtype, n, steps, envs)

    read(32, 256, 4, 10**6, (False, True))
    read(32, 10**5, 4, 10**6, (True,))
    read(64, 256, 100, HUGE, (True,))
    for fan_out, n, steps, envs in (
        (32, 1, 10**6, 1),
        (32, 256, 10**6, 1),
        (16, 1, 1000, 24),
        (16, 64, 1000, 24),
        (64, 1, 1000, 24),
        (32, 1, 1000, 24),
        (32, 1, 1000, 4096),
        (32, 64, 1000, 4096),
        (32, 10**6, 10**6, 1),
    ):
        write(fan_out, n, steps, envs)
    write(64, 10**6, HUGE, 1, (True,))


FAMILIES: dict[str, Any] = {
    name.removeprefix("run_"): function for name, function in sorted(globals().items()) if name.startswith("run_")
}


def specs_of(family: str) -> list[AotSpec]:
    """What the operations of one family launch."""
    record = Recorder()
    with torch.device("meta"):
        FAMILIES[family](record)
    return record.specs


def all_specs() -> list[AotSpec]:
    """What all operations launch, each specialisation once: different families may share one."""
    return list({repr(spec): spec for family in FAMILIES for spec in specs_of(family)}.values())
