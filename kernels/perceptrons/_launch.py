"""Launches the kernels of whole perceptrons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gpubuf.kernels._launching import all_registers, cdiv, launch
from gpubuf.kernels.perceptrons import BF16, IEEE, SHAPE, TF32, TF32X3, tiles_of, weight_tile
from gpubuf.kernels.perceptrons import _triton as layers
from gpubuf.kernels.perceptrons import _triton_sac as kernels

# AMD's products of float32 are float32's.
_PRECISIONS = {IEEE: "ieee", TF32X3: "ieee", TF32: "ieee"} if torch.version.hip else {TF32X3: "tf32x3", TF32: "tf32"}
_PRECISIONS |= {IEEE: "ieee", BF16: "bf16"}


def _power(width: int) -> int:
    """A power of two of at least ``width``, and of what a product takes."""
    return max(16, 1 << (width - 1).bit_length())


def _tiles(rows: int, sizes: Sequence[int], precision: int) -> tuple[dict[str, Any], dict[str, int]]:
    """How programs cover rows, those of all nets, and layers, and what their threads have."""
    block, width, depth, warps = tiles_of(rows, precision)
    tile = _PRECISIONS[precision], min(width, max(map(_power, sizes[1:]))), depth, 3
    return {"TILES": tile, "BLOCK": block}, {"num_warps": warps, "maxnreg": all_registers(warps)}


def _sums(n: int) -> int:
    """Rows that the sums over a batch of n take at a time: each step waits for its loads."""
    return 256 if n <= 256 else 1024


def _sizes(params: Sequence[Tensor], turned: bool, eps: float | None) -> tuple[int, ...]:
    """The widths of a network, inputs first."""
    # Of L hidden layers: L + 1 layers, and L norms.
    linear = params[::2] if eps is None else params[: len(params) // 2 + 1 : 2]
    shapes = [weight.shape[-2:][::-1] if turned else weight.shape[-2:] for weight in linear]
    return (shapes[0][0], *[out for _, out in shapes])


def sac_act(
    next_state: Tensor, state: Tensor, noise: Tensor, low: Tensor | None, high: Tensor | None,
    target: Sequence[Tensor], online: Sequence[Tensor], activation: int, eps: float | None, head: int,
    head_values: Sequence[float], bounds: Sequence[float], policy: bool, precision: int, hidden: Sequence[Tensor],
    action: Tensor, log_prob: Tensor,
) -> None:  # fmt: skip
    n, sizes = len(state), _sizes(online, True, eps)
    tiles, threads = _tiles((1 + policy) * n, sizes, precision)
    how = {
        "SIZES": sizes, "NET": (activation, True, eps), "HEAD": (head, *head_values),
        "BOUNDS": (low is not None, *bounds),
        "DELAYED": any(a.data_ptr() != b.data_ptr() for a, b in zip(target, online, strict=True)), **tiles,
        "COLUMNS": _power(action.shape[1]),
    }  # fmt: skip
    given = (next_state, state, noise, noise if low is None else low, noise if high is None else high)
    arguments = (*given, tuple(target), tuple(online), tuple(hidden), action, log_prob, n)
    launch(kernels.perceptrons_sac_act_kernel, (1 + policy) * cdiv(n, tiles["BLOCK"]), *arguments, **threads, **how)


def sac_values(
    next_state: Tensor, state: Tensor, action: Tensor, drawn: Tensor, target: Sequence[Tensor],
    online: Sequence[Tensor], columns: Sequence[int], activation: int, eps: float | None, turned: bool,
    support: Sequence[float], policy: bool, precision: int, hidden: Sequence[Tensor], q: Tensor | None,
) -> None:  # fmt: skip
    (n, width), nets, sizes = state.shape, hidden[0].shape[1], _sizes(online, turned, eps)
    tiles, threads = _tiles((2 + policy) * nets * n, sizes, precision)
    how = {
        "NETS": nets, "SIZES": sizes, "INPUTS": (columns[0], width, columns[1], action.shape[1]),
        "NET": (activation, turned, eps), "SUPPORT": (*support,), **tiles, "COLUMNS": _power(sizes[-1]),
    }  # fmt: skip
    results = (tuple(hidden), hidden[0] if q is None else q)
    arguments = (next_state, state, action, drawn, tuple(target), tuple(online), *results, n)
    programs = (2 + policy) * nets * cdiv(n, tiles["BLOCK"])
    launch(kernels.perceptrons_sac_values_kernel, programs, *arguments, **threads, **how)


def sac_value_gradients(
    q: Tensor, log_prob: Tensor, log_alpha: Tensor, target_entropy: Tensor, reward: Tensor, terminated: Tensor,
    gamma: Tensor, steps: Tensor | None, mass: Tensor | None, weight: Tensor | None, online: Sequence[Tensor],
    columns: Sequence[int], activation: int, eps: float | None, turned: bool, support: Sequence[float],
    loss_function: int, reduction: int, combine: int, average: bool, next_entropy: bool, by_alpha: bool, policy: bool,
    precision: int, hidden: Sequence[Tensor], deltas: Sequence[Tensor], grad_action: Tensor, td_error: Tensor,
    scalars: Tensor,
) -> None:  # fmt: skip
    (nets, n, size), sizes = grad_action.shape, _sizes(online, turned, eps)
    tiles, threads = _tiles((1 + policy) * nets * n, sizes, precision)
    how = {
        "NETS": nets, "SIZES": sizes, "INPUTS": (columns[0], sizes[0] - size, columns[1], size),
        "NET": (activation, turned, eps), "SUPPORT": (*support,), "LOSS_FUNCTION": loss_function,
        "REDUCTION": reduction, "COMBINE": combine, "VALUE_FACTOR": 1 / nets if average else 1.0,
        "SHARED": mass is not None and mass.numel() < nets * n * sizes[-1], "HAS_STEPS": steps is not None,
        "HAS_WEIGHT": weight is not None, "NEXT_ENTROPY": next_entropy, "BY_ALPHA": by_alpha, "POLICY": policy,
        **tiles, "ATOM_COLUMNS": _power(sizes[-1]), "COLUMNS": _power(size), "SUMS": _sums(n),
    }  # fmt: skip
    given = (reward, terminated, gamma, *(reward if each is None else each for each in (steps, mass, weight)))
    results = (tuple(hidden), tuple(deltas), grad_action, td_error, scalars)
    arguments = (q, log_prob, log_alpha, target_entropy, *given, tuple(online), *results, n)
    programs = (1 + policy) * nets * cdiv(n, tiles["BLOCK"]) + 1
    launch(kernels.perceptrons_sac_value_gradients_kernel, programs, *arguments, **threads, **how)


def sac_action_gradients(
    grad_action: Tensor, log_alpha: Tensor, weight: Tensor | None, noise: Tensor, low: Tensor | None,
    high: Tensor | None, online: Sequence[Tensor], activation: int, eps: float | None, head: int,
    head_values: Sequence[float], bounds: Sequence[float], reduction: int, precision: int, hidden: Sequence[Tensor],
    deltas: Sequence[Tensor],
) -> None:  # fmt: skip
    (nets, n, size), sizes = grad_action.shape, _sizes(online, True, eps)
    tiles, threads = _tiles(n, sizes, precision)
    how = {
        "NETS": nets, "SIZES": sizes, "NET": (activation, True, eps), "HEAD": (head, *head_values),
        "BOUNDS": (low is not None, *bounds), "REDUCTION": reduction, "HAS_WEIGHT": weight is not None, **tiles,
        "COLUMNS": _power(size), "SUMS": _sums(n),
    }  # fmt: skip
    given = (noise if weight is None else weight, noise, noise if low is None else low, noise if high is None else high)
    arguments = (grad_action, log_alpha, *given, tuple(online), tuple(hidden), tuple(deltas), n)
    launch(kernels.perceptrons_sac_action_gradients_kernel, cdiv(n, tiles["BLOCK"]), *arguments, **threads, **how)


def _products(shapes: Sequence[int], places: Sequence[int], precision: int) -> tuple[int, dict[str, Any]]:
    """(programs, constants and threads) of products of weights' gradients."""
    products = tuple(zip(*[iter(shapes)] * SHAPE, strict=True))
    weights = sum(nets * width * fan_out for nets, _, _, width, fan_in, fan_out, _ in products if fan_in)
    (height, across, depth, warps), begins = weight_tile(weights, precision), [0]
    for nets, _, _, width, fan_in, fan_out, _ in products:
        begins.append(begins[-1] + nets * (cdiv(width, height) if fan_in else 1) * cdiv(fan_out, across))
    tiles = _PRECISIONS[precision], across, depth, 3
    how = {"SHAPES": products, "FIRST": (*begins,), "PLACES": (*places,), "HEIGHT": height, "TILES": tiles}
    return begins[-1], how | {"num_warps": warps, "maxnreg": all_registers(warps)}


def weight_gradients(
    first: Tensor, inputs: Sequence[Tensor], grads: Sequence[Tensor], weights: Sequence[Tensor],
    biases: Sequence[Tensor], shapes: Sequence[int], precision: int,
) -> None:  # fmt: skip
    programs, how = _products(shapes, [0] * 2 * len(inputs), precision)
    tensors = (tuple(inputs), tuple(grads), tuple(weights), tuple(biases))
    launch(layers.perceptrons_weight_gradients_kernel, programs, *tensors, grads[0].shape[-2], **how)


def step(
    table: Tensor, inputs: Sequence[Tensor], grads: Sequence[Tensor], slope: Tensor | None, shapes: Sequence[int],
    places: Sequence[int], precision: int, hyper: Tensor, averages: bool, steps: Tensor, ticket: Tensor,
    params: Sequence[Tensor], moments: Sequence[Tensor], targets: Sequence[Tensor],
) -> None:  # fmt: skip
    programs, how = _products(shapes, places, precision)
    count, has_number = 2 * len(inputs), slope is not None
    weights, biases = (tuple(params[place] for place in places[i:count:2]) for i in (0, 1))
    number = (params[places[-1]], slope) if has_number else (steps, steps)
    tensors = (tuple(inputs), tuple(grads), weights, biases, *number, table, hyper, steps, ticket)
    flags = {"AVERAGES": averages, "HAS_NUMBER": has_number}
    launch(layers.perceptrons_step_kernel, programs + has_number, *tensors, grads[0].shape[-2], **how, **flags)
