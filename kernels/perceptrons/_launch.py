"""Launches the kernels of whole perceptrons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gpubuf.kernels._launching import all_registers, cdiv, launch
from gpubuf.kernels.perceptrons import BF16, IEEE, SHAPE, TF32, TF32X3, WEIGHT_TILE, tiles_of
from gpubuf.kernels.perceptrons import _triton as layers
from gpubuf.kernels.perceptrons import _triton_sac as kernels

# AMD's products of float32 are float32's.
_PRECISIONS = {IEEE: "ieee", TF32X3: "ieee", TF32: "ieee"} if torch.version.hip else {TF32X3: "tf32x3", TF32: "tf32"}
_PRECISIONS |= {IEEE: "ieee", BF16: "bf16"}

SUMS = 256
"""Rows that the sums of losses take at a time."""

WARPS: dict[str, Any] = {"num_warps": 4, "maxnreg": all_registers(4)}
"""Of programs that compute gradients of weights."""


def _power(width: int) -> int:
    """A power of two of at least ``width``, and of what a product takes."""
    return max(16, 1 << (width - 1).bit_length())


def _tiles(n: int, widths: Sequence[int], precision: int) -> tuple[dict[str, Any], dict[str, int]]:
    """How programs cover rows and layers, and what their threads have."""
    block, width, depth, warps = tiles_of(n, precision)
    of_tiles = {"BLOCK": block, "WIDTH": min(width, max(map(_power, widths))), "DEPTH": depth, "STAGES": 3}
    return {"PRECISION": _PRECISIONS[precision], **of_tiles}, {"num_warps": warps, "maxnreg": all_registers(warps)}


def _sizes(params: Sequence[Tensor], turned: bool) -> tuple[int, ...]:
    """The widths of a network, inputs first."""
    shapes = [weight.shape[-2:][::-1] if turned else weight.shape[-2:] for weight in params[::2]]
    return (shapes[0][0], *[out for _, out in shapes])


def sac_act(
    next_state: Tensor, state: Tensor, noise: Tensor, low: Tensor | None, high: Tensor | None,
    target: Sequence[Tensor], online: Sequence[Tensor], activation: int, shift: float, smallest_scale: float,
    low_value: float, high_value: float, policy: bool, precision: int, hidden: Sequence[Tensor], head: Tensor,
    action: Tensor, log_prob: Tensor,
) -> None:  # fmt: skip
    n, sizes = len(state), _sizes(online, True)
    tiles, threads = _tiles(n, sizes[1:-1], precision)
    how = {
        "SIZES": sizes, "ACTIVATION": activation, "SHIFT": shift, "SMALLEST_SCALE": smallest_scale,
        "HAS_LOW": low is not None, "LOW_VALUE": low_value or 0, "HIGH_VALUE": high_value or 0,
        "DELAYED": any(a.data_ptr() != b.data_ptr() for a, b in zip(target, online, strict=True)), **tiles,
        "COLUMNS": _power(sizes[-1] // 2),
    }  # fmt: skip
    bounds = (noise if low is None else low, noise if high is None else high)
    results = (tuple(hidden), head, action, log_prob)
    arguments = (next_state, state, noise, *bounds, tuple(target), tuple(online), *results, n)
    launch(kernels.perceptrons_sac_act_kernel, (1 + policy) * cdiv(n, tiles["BLOCK"]), *arguments, **threads, **how)


def sac_values(
    next_state: Tensor, state: Tensor, action: Tensor, drawn: Tensor, target: Sequence[Tensor],
    online: Sequence[Tensor], columns: Sequence[int], activation: int, turned: bool, policy: bool, precision: int,
    hidden: Sequence[Tensor], q: Tensor,
) -> None:  # fmt: skip
    (n, width), nets, sizes = state.shape, q.shape[1], _sizes(online, turned)
    tiles, threads = _tiles(n, sizes[1:-1], precision)
    inputs = (columns[0], width, columns[1], action.shape[1])
    how = {"NETS": nets, "SIZES": sizes, "INPUTS": inputs, "ACTIVATION": activation, "TURNED": turned, **tiles}
    programs = (2 + policy) * nets * cdiv(n, tiles["BLOCK"])
    arguments = (next_state, state, action, drawn, tuple(target), tuple(online), tuple(hidden), q, n)
    launch(kernels.perceptrons_sac_values_kernel, programs, *arguments, **threads, **how)


def sac_value_gradients(
    q: Tensor, log_prob: Tensor, log_alpha: Tensor, target_entropy: Tensor, reward: Tensor, terminated: Tensor,
    gamma: Tensor, steps: Tensor | None, weight: Tensor | None, online: Sequence[Tensor], hidden: Sequence[Tensor],
    columns: Sequence[int], activation: int, turned: bool, loss_function: int, reduction: int, policy: bool,
    precision: int, deltas: Sequence[Tensor], grad_q: Tensor, grad_action: Tensor, td_error: Tensor, scalars: Tensor,
) -> None:  # fmt: skip
    (nets, n, size), sizes = grad_action.shape, _sizes(online, turned)
    tiles, threads = _tiles(n, sizes[1:-1], precision)
    inputs = (columns[0], sizes[0] - size, columns[1], size)
    how = {
        "NETS": nets, "SIZES": sizes, "INPUTS": inputs, "ACTIVATION": activation, "TURNED": turned,
        "LOSS_FUNCTION": loss_function, "REDUCTION": reduction, "HAS_STEPS": steps is not None,
        "HAS_WEIGHT": weight is not None, "POLICY": policy, **tiles, "COLUMNS": _power(size), "SUMS": SUMS,
    }  # fmt: skip
    given = (reward, terminated, gamma, reward if steps is None else steps, reward if weight is None else weight)
    results = (tuple(deltas), grad_q, grad_action, td_error, scalars)
    arguments = (q, log_prob, log_alpha, target_entropy, *given, tuple(online), tuple(hidden), *results, n)
    programs = (1 + policy) * nets * cdiv(n, tiles["BLOCK"]) + 1
    launch(kernels.perceptrons_sac_value_gradients_kernel, programs, *arguments, **threads, **how)


def sac_action_gradients(
    grad_action: Tensor, log_alpha: Tensor, weight: Tensor | None, noise: Tensor, low: Tensor | None,
    high: Tensor | None, head: Tensor, online: Sequence[Tensor], hidden: Sequence[Tensor], activation: int,
    reduction: int, smallest_scale: float, low_value: float, high_value: float, precision: int,
    deltas: Sequence[Tensor], grad_head: Tensor,
) -> None:  # fmt: skip
    (nets, n, size), sizes = grad_action.shape, _sizes(online, True)
    tiles, threads = _tiles(n, sizes[1:-1], precision)
    how = {
        "NETS": nets, "SIZES": sizes, "ACTIVATION": activation, "REDUCTION": reduction,
        "HAS_WEIGHT": weight is not None, "SMALLEST_SCALE": smallest_scale, "HAS_LOW": low is not None,
        "LOW_VALUE": low_value or 0, "HIGH_VALUE": high_value or 0, **tiles, "COLUMNS": _power(size), "SUMS": SUMS,
    }  # fmt: skip
    given = (noise if weight is None else weight, noise, noise if low is None else low, noise if high is None else high)
    arguments = (grad_action, log_alpha, *given, head, tuple(online), tuple(hidden), tuple(deltas), grad_head, n)
    launch(kernels.perceptrons_sac_action_gradients_kernel, cdiv(n, tiles["BLOCK"]), *arguments, **threads, **how)


def _products(shapes: Sequence[int], places: Sequence[int], activation: int, precision: int) -> dict[str, Any]:
    """Constants of products of weights' gradients."""
    products = tuple(zip(*[iter(shapes)] * SHAPE, strict=True))
    (height, width), begins = WEIGHT_TILE, [0]
    for nets, _, _, fan_in, _, fan_out, *_ in products:
        begins.append(begins[-1] + nets * cdiv(fan_in, height) * cdiv(fan_out, width))
    tile = {"WIDTH": width, "HEIGHT": height, "DEPTH": 32, "STAGES": 3}
    of_tiles = {"PRECISION": _PRECISIONS[precision], **tile}
    return {"SHAPES": products, "FIRST": (*begins,), "PLACES": (*places,), "ACTIVATION": activation, **of_tiles}


def weight_gradients(
    first: Tensor, inputs: Sequence[Tensor], grads: Sequence[Tensor], weights: Sequence[Tensor],
    biases: Sequence[Tensor], shapes: Sequence[int], activation: int, precision: int,
) -> None:  # fmt: skip
    how = _products(shapes, [0] * 2 * len(inputs), activation, precision)
    tensors = (tuple(inputs), tuple(grads), tuple(weights), tuple(biases))
    launch(layers.perceptrons_weight_gradients_kernel, how["FIRST"][-1], *tensors, len(first), **WARPS, **how)


def step(
    table: Tensor, first: Tensor, inputs: Sequence[Tensor], grads: Sequence[Tensor], slope: Tensor | None,
    shapes: Sequence[int], places: Sequence[int], activation: int, precision: int, hyper: Tensor, averages: bool,
    steps: Tensor, ticket: Tensor, params: Sequence[Tensor], moments: Sequence[Tensor], targets: Sequence[Tensor],
) -> None:  # fmt: skip
    how = _products(shapes, places, activation, precision)
    count, has_number = 2 * len(inputs), slope is not None
    weights, biases = (tuple(params[place] for place in places[i:count:2]) for i in (0, 1))
    number = (params[places[-1]], slope) if has_number else (steps, steps)
    arguments = (tuple(inputs), tuple(grads), weights, biases, *number, table, hyper, steps, ticket, len(first))
    order = {name: how.pop(name) for name in ("SHAPES", "FIRST", "PLACES")}
    flags = {"AVERAGES": averages, "HAS_NUMBER": has_number}
    programs = order["FIRST"][-1] + has_number
    launch(layers.perceptrons_step_kernel, programs, *arguments, **WARPS, **order, **flags, **how)
