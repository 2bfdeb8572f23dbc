"""Whole perceptrons in one launch: an update of soft actor-critic in five, with the step of the optimiser.

A product of small matrices takes a GPU several microseconds, whatever it computes: it is made of waiting. Here a
program takes some rows of the batch through all layers of a net, forward or backward, with what comes before and after
the layers: the policy's head, the target of the critics, the slopes of the losses. The launches, in order:

* :data:`sac_act`: the policy in the next states and in the states, its head, actions and log-densities;
* :data:`sac_values`: target critics of the next actions, critics of the batch's actions, critics of the policy's;
* :data:`sac_value_gradients`: losses, priorities, and the gradients by all layers of the critics, once from their own
  loss and once from the policy's, down to the actions;
* :data:`sac_action_gradients`: the same of the policy;
* :data:`weight_gradients`: of all parameters of critics and policy; or :data:`step`: an optimiser's step by them.

Between the second and the third one, critics that return logits need :mod:`gpubuf.kernels.categorical` for what they
learn, their loss and the priorities.

A *net* is a perceptron with at least one hidden layer, and an activation between its layers, a code of
:mod:`gpubuf.kernels.norms`: RELU or SILU. With ``eps``, which is added to variances, there is a layer norm in front of
each activation; None: there is none. ``params`` of a net are weight and bias of each layer, in order, and then scale
and shift of each norm, all float32 and contiguous. Critics are stacked: weights ``[N, in, out]``, or ``[N, out, in]``
where ``turned``; the policy's are ``[out, in]``. Their input is state and action, of which ``columns`` are the first
columns. They have one output, the value, or logits of several atoms.

The policy's result is ``[n, 2 A]``: ``loc``, and ``raw``, of which ``head`` makes a scale: SOFTPLUS is
``softplus(raw + first) + second``, SQUASHED ``exp(first + second tanh(raw))``, with the numbers ``head_values``.

``hidden`` has, for each hidden layer, what it computes before norm and activation, and then the result. Where
parameters learn, the operations of gradients replace the former by the layer's output, which the gradients of weights
need. ``deltas`` has gradients by what layers compute before norm and activation, and then that by the result. With
norms, ``hidden`` has ``[..., 2]`` besides for each hidden layer, the mean and the inverse standard deviation of each
row, and ``deltas`` sums of the gradients of scale and shift of each norm, over the rows of each program, of which
:func:`parts_of` a net has. All results are written into memory that the caller owns.

``precision`` is that of products on a GPU, whose sums are float32: :data:`IEEE`, :data:`TF32X3` (each number as the sum
of two of TF32, three products; tests/kernels/test_perceptrons.py says how near that is), :data:`TF32` or :data:`BF16`.
A CPU multiplies float32, or for :data:`BF16` what is rounded to it.

References: Haarnoja et al., "Soft Actor-Critic Algorithms and Applications", arXiv 1812.05905; Markidis et al., "NVIDIA
Tensor Core Programmability, Performance & Precision", arXiv 1803.04014 (products in parts).
"""

from __future__ import annotations

import torch

from gpubuf.kernels._registry import define

IEEE, TF32X3, TF32, BF16 = range(4)
"""Values of ``precision``."""

IN_PARTS = ((8, 0), (9, 0), (10, 0))
"""Compute capabilities of the GPUs on which three products of TF32 take less time than one of float32."""

WEIGHT_TILE = (32, 64)
"""Inputs and outputs of a weight whose gradients are one program's."""


def float32_on(device: torch.device) -> int:
    """The precision by which a device multiplies float32 fastest: :data:`IEEE` or :data:`TF32X3`."""
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return IEEE
    return TF32X3 if torch.cuda.get_device_capability(device) in IN_PARTS else IEEE


def tiles_of(rows: int, precision: int) -> tuple[int, int, int, int]:
    """(rows of a program, outputs, and inputs that it multiplies at a time, its warps) of a launch.

    A program of more rows reads weights more rarely. It has as many as leave a program for most multiprocessors.

    Args:
        rows: how many the launch has, those of all its nets together.
    """
    block = next((size for size in (64, 32) if rows >= 96 * size), 16)
    if precision in (IEEE, TF32X3):
        return block, 64 if block == 64 else 128, 16, 4 if block == 16 else 8
    return block, 128, 32 if block == 32 else 16, 4 if block == 16 else 8


def weight_tile(weights: int, precision: int) -> tuple[int, int, int, int]:
    """(inputs and outputs of a weight whose gradients are one program's, rows that it multiplies at a time, its warps).

    Args:
        weights: numbers in all weights together. Few of them would make too few programs of larger tiles.
    """
    if precision in (TF32, BF16) and weights >= 2**19:
        return 64, 64, 32, 8
    return *WEIGHT_TILE, 16 if precision == IEEE else 32, 4


def parts_of(n: int, nets: int, precision: int) -> int:
    """Programs that share n rows, where a launch takes so many of each of its nets."""
    return -(-n // tiles_of(nets * n, precision)[0])


SCALARS = ("slope", "loss_qvalue", "alpha", "loss_actor", "loss_alpha", "entropy")
"""What :data:`sac_value_gradients` computes of a batch. ``slope`` is the derivative of ``loss_alpha`` by log_alpha; it
comes first, where its address is as aligned as that of a parameter."""

SOFTPLUS, SQUASHED = range(2)
"""Values of ``head``."""

SHAPE = 7
"""Numbers of a product of :data:`weight_gradients`."""


def _none(*_: object) -> None:
    pass


sac_act = define(
    "perceptrons_sac_act(Tensor next_state, Tensor state, Tensor noise, Tensor? low, Tensor? high, Tensor[] target,"
    " Tensor[] online, int activation, float? eps, int head, float[] head_values, float[] bounds, bool policy,"
    " int precision, Tensor(a!)[] hidden, Tensor(b!) action, Tensor(c!) log_prob) -> ()",
    __name__,
    fake=_none,
)
"""Actions of the policy in the next states and, with ``policy``, in the states, which are the last n of ``2 n`` rows.

Args:
    next_state, state: float32 ``[n, in]``.
    noise: float32 ``[2 n, A]``, standard normal; without ``policy`` the first n rows are enough, as of ``hidden``.
    low, high: bounds of the action, float32 ``[A]``, or None for the two numbers ``bounds``.
    target, online: the policy of the next states, and the one that learns.
    hidden: float32 ``[2 n, width]`` each, the last one ``[2 n, 2 A]``, out.
    action: float32 ``[2 n, A]``, out; see :data:`gpubuf.kernels.tanh_normal.sample`.
    log_prob: float32 ``[2 n]``, out.
"""

sac_values = define(
    "perceptrons_sac_values(Tensor next_state, Tensor state, Tensor action, Tensor drawn, Tensor[] target,"
    " Tensor[] online, int[] columns, int activation, float? eps, bool turned, float[] support, bool policy,"
    " int precision, Tensor(a!)[] hidden, Tensor(b!)? q) -> ()",
    __name__,
    fake=_none,
)
"""Values of the next actions, of the batch's actions and, with ``policy``, of the policy's actions.

Args:
    next_state, state: float32 ``[n, width]``.
    action: float32 ``[n, A]``.
    drawn: float32 ``[2 n, A]``, of :data:`sac_act`.
    target, online: the critics of the next states, and those that learn.
    support: values of the first and the last atom.
    hidden: float32 ``[3, N, n, width]`` each, out; without ``policy`` two of the three are enough, as of ``q``.
    q: expected values of logits, float32 ``[3, N, n]``, out; None where critics have one output.
"""

sac_value_gradients = define(
    "perceptrons_sac_value_gradients(Tensor q, Tensor log_prob, Tensor log_alpha, Tensor target_entropy, Tensor reward,"
    " Tensor terminated, Tensor gamma, Tensor? steps, Tensor? mass, Tensor? weight, Tensor[] online, int[] columns,"
    " int activation, float? eps, bool turned, float[] support, int loss_function, int reduction, int combine,"
    " bool average, bool next_entropy, bool by_alpha, bool policy, int precision, Tensor(a!)[] hidden,"
    " Tensor(b!)[] deltas, Tensor(c!) grad_action, Tensor(d!) td_error, Tensor(e!) scalars) -> ()",
    __name__,
    fake=_none,
)
"""The losses of a batch, and gradients by all that critics compute::

    y = r + gamma^steps (1 - terminated) (min_k q[0, k] - alpha log_prob[:n]),  alpha = exp(log_alpha)
    loss_qvalue = norm sum_i w_i sum_k distance(q[1, k, i] - y_i)
    loss_actor = norm sum_i w_i (alpha log_prob[n + i] - min_k q[2, k, i])
    loss_alpha = log_alpha slope,  slope = -norm sum_i w_i (log_prob[n + i] + target_entropy)

``norm`` is 1, or 1 / sum(w) with the reduction MEAN; distances and reductions are those of :mod:`gpubuf.kernels.td`. Of
critics that return logits, ``loss_qvalue`` and errors are not computed here (see
:data:`gpubuf.kernels.categorical.categorical_loss`), and their gradients are those of its cross entropy.

Args:
    q: float32 ``[3, N, n]``, of :data:`sac_values`, or its ``hidden`` where critics have one output.
    log_prob: float32 ``[2 n]``, of :data:`sac_act`.
    log_alpha, target_entropy: float32, one element.
    reward, terminated, steps, weight: one element for each row; ``steps`` None: 1; ``weight`` None: 1.
    gamma: float64, one element.
    mass: what logits learn, float32 ``[N or 1, n, atoms]``; None where critics have one output.
    combine: SMALLEST, or AVERAGE for the mean over the critics in place of the minimum in ``loss_actor``.
    average: divide the cross entropy by N.
    next_entropy: the temperature learns from ``log_prob[:n]``, also without ``policy``.
    by_alpha: ``loss_alpha`` is alpha times that sum, and so is ``slope``.
    deltas: float32 ``[2, N, n, width]`` each, out: from the critics' loss, and with ``policy`` from the policy's. Sums
        of programs: ``[N, parts, width]``.
    grad_action: float32 ``[N, n, A]``, out with ``policy``: of its actions.
    td_error: float32 ``[n]``, out where critics have one output: ``max_k |q[1, k] - y|``.
    scalars: float32 ``[6]``, out: :data:`SCALARS`. ``loss_qvalue`` is there where critics have one output, ``slope``
        and ``loss_alpha`` with ``policy`` or ``next_entropy``, ``loss_actor`` and ``entropy`` with ``policy``.
"""

sac_action_gradients = define(
    "perceptrons_sac_action_gradients(Tensor grad_action, Tensor log_alpha, Tensor? weight, Tensor noise, Tensor? low,"
    " Tensor? high, Tensor[] online, int activation, float? eps, int head, float[] head_values, float[] bounds,"
    " int reduction, int precision, Tensor(a!)[] hidden, Tensor(b!)[] deltas) -> ()",
    __name__,
    fake=_none,
)
"""Gradients of ``loss_actor`` by all that the policy computes in the states.

Args:
    deltas: float32 ``[n, width]`` each, the last one ``[n, 2 A]``, out. Sums of programs: ``[parts, width]``.
"""

weight_gradients = define(
    "perceptrons_weight_gradients(Tensor first, Tensor[] inputs, Tensor[] grads, Tensor(a!)[] weights,"
    " Tensor(b!)[] biases, int[] shapes, int precision) -> ()",
    __name__,
    fake=_none,
)
"""``weights[p] = inputs[p]^T grads[p]``, and ``biases[p]``, the sums of the columns of ``grads[p]``.

``shapes`` has seven numbers for each product p: (nets N, whether all nets have one input, first row of the weight,
width of the input, inputs of the layer, outputs of the layer, whether the weight is turned). A product whose first row
is not 0 is a part of a layer, and leaves its bias alone. Where the layer has no inputs, there are sums alone, each of
so many rows as the fourth number says, and ``weights[p]`` is not written.

Args:
    first: a tensor on the device.
    inputs: float32 ``[N, n, width]`` or ``[n, width]``.
    grads: float32 ``[N, n, outputs]``, of the first product in any case; of layers without inputs
        ``[N, parts, outputs]``.
    weights, biases: float32, out.
"""

step = define(
    "perceptrons_step(Tensor table, Tensor[] inputs, Tensor[] grads, Tensor? slope, int[] shapes, int[] places,"
    " int precision, Tensor hyper, bool averages, Tensor(a!) steps, Tensor(b!) ticket, Tensor(c!)[] params,"
    " Tensor(d!)[] moments, Tensor(e!)[] targets) -> ()",
    __name__,
    fake=_none,
)
"""The step of :data:`gpubuf.kernels.optim.adamw` by the gradients that :data:`weight_gradients` would store.

Args:
    table, hyper, steps, ticket, params, moments, targets: of the optimiser's only bucket, whose gradients are not
        clipped, whose rows are free, and whose addresses are multiples of 16.
    inputs, grads, shapes: as of :data:`weight_gradients`.
    slope: gradient of one more parameter, which is a number, or None.
    places: the entries of weight and bias of each product, and then that of the number. Others stay as they are, and so
        do their targets.
    averages: whether targets move.
"""
