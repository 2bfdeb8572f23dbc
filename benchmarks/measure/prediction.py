"""How long a call should take on an H200, from what its kernels execute: launches, instructions, bytes and trips.

On the device a launch takes ``launch + trips + max(bytes, instructions)``:

* all trips but one find what they look for in a cache; one goes to where rows lie;
* bytes are those that warps ask for: a number that all threads of a warp read comes once. A multiprocessor gets no
  more than its share of the bandwidth, also where the others ask for nothing;
* instructions are issued by the multiprocessors side by side, of which none is done before its program that has most.
  A multiprocessor with few warps waits for each instruction of a warp before the next.

An eager call takes at least the host's time for its launches. The constants fit replayed graphs on an H200, most calls
within 25 %; the price of a launch on the host, and the bandwidth of copies, are those that a run has measured.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from gpubuf.kernels import perceptrons


@dataclass(frozen=True)
class Caches:
    """What a launch in a replayed graph meets.

    Attributes:
        cache: microseconds until a load returns that hits the second level of cache.
        memory: those of one that misses it.
        bandwidth: bytes a microsecond that all multiprocessors get together.
    """

    cache: float
    memory: float
    bandwidth: float


COLD = Caches(cache=0.18, memory=1.0, bandwidth=4.3e6)
"""Emptied, from the launch before to the one after."""

WARM = Caches(cache=0.1, memory=0.25, bandwidth=4e6)
"""With all data in the second level of cache."""

LAUNCH = 1.2
"""Microseconds of an empty kernel in a graph."""

PROCESSORS, CLOCK = 132, 1970.0
"""Multiprocessors, and their cycles a microsecond."""

MACHINE_CODE = 1.3
"""Instructions that ptxas makes of one of PTX, on average over four kernels."""

FULL, ALONE = 2.5, 0.25
"""Warp instructions a cycle of a multiprocessor: the most, and for each warp that is there."""


def on_device(launches: Sequence[Mapping[str, Any]], caches: Caches, others: int = 0) -> float:
    """Microseconds of a call in a graph, of whose launches ``tests.gates.ptx.counts`` tells what they execute.

    ``others`` are kernels of PyTorch, each of a few numbers: it takes one trip.
    """
    total = others * (LAUNCH + caches.memory)
    for launch in launches:
        trips = max(launch["trips"] - 1, 0) * caches.cache + caches.memory * (launch["trips"] > 0)
        warps = -(-launch["programs"] // PROCESSORS) * launch["warps"]
        instructions = max(launch["most_instructions"], launch["instructions"] / PROCESSORS) * MACHINE_CODE
        issued = instructions / min(FULL, warps * ALONE) / CLOCK
        share = caches.bandwidth * min(launch["programs"] / PROCESSORS, 1)
        total += LAUNCH + trips + max((launch["bytes_loaded"] + launch["bytes_stored"]) / share, issued)
    return total


@dataclass(frozen=True)
class Target:
    """A GPU, as published, but for bandwidths of caches: the H200's is that of :data:`WARM`, others are assumed.

    Attributes:
        processors: multiprocessors.
        clock: cycles a microsecond.
        products: floating-point operations a cycle of a multiprocessor, of bfloat16, by TF32 and in float32.
        bandwidth: bytes a microsecond from the second level of cache, all multiprocessors together.
        memory: those from memory.
        cache: bytes of the second level of cache.
    """

    processors: int
    clock: float
    products: tuple[float, float, float]
    bandwidth: float
    memory: float
    cache: float


TARGETS = {
    "H200": Target(PROCESSORS, CLOCK, (4096, 2048, 256), WARM.bandwidth, COLD.bandwidth, 50e6),
    "A100": Target(108, 1410, (2048, 1024, 128), 3.5e6, 2e6, 40e6),
    "RTX 4090": Target(128, 2520, (512, 256, 256), 4e6, 1e6, 72e6),
    "RTX 5090": Target(170, 2410, (512, 256, 256), 5e6, 1.8e6, 96e6),
}

PRECISIONS = {
    "ieee": (perceptrons.IEEE, 2, 0.6),
    "tf32x3": (perceptrons.TF32X3, 1, 0.5 / 4),
    "tf32": (perceptrons.TF32, 1, 0.5),
    "bf16": (perceptrons.BF16, 0, 0.5),
}
"""The value of a precision, which of a target's products it has, and the part of their rate that warps reach:
``mma.sync`` half of it, three products and the parts of numbers a quarter of that."""


class Networks(NamedTuple):
    """What an update of soft actor-critic computes with, and what of it learns.

    Attributes:
        actor, critic: widths of the inputs, of each hidden layer, and of the outputs.
        critics: how many.
        norm: whether each hidden layer has a layer norm.
        policy: whether the actor learns, or the critics alone.
    """

    actor: tuple[int, ...] = (17, 256, 256, 12)
    critic: tuple[int, ...] = (23, 256, 256, 1)
    critics: int = 2
    norm: bool = False
    policy: bool = True

    @property
    def weights(self) -> int:
        """Numbers in the weights that learn."""
        learning = [self.critic] * self.critics + [self.actor] * self.policy
        return sum(i * o for widths in learning for i, o in pairwise(widths))


FASTSAC = Networks((100, 512, 256, 128, 58), (129, 768, 384, 192, 101), norm=True)
"""Those of make_fastsac_actor and make_fastsac_critic for a humanoid."""

ATOMS = {"target": (920, 2), "loss": (655, 2), "loss_sum": (0, 0)}
"""Launches of :mod:`gpubuf.kernels.categorical`: warp instructions for a row of 101 atoms, which ``tests.gates.ptx``
has counted, and numbers that they read or write for each atom."""


class Work(NamedTuple):
    """What a program does between two barriers."""

    steps: int
    operations: float
    bytes: float


Programs = list[tuple[int, list[Work]]]
"""Of a launch: how many do what."""


class Launched(NamedTuple):
    """What a launch does, and how long it should take."""

    programs: int
    operations: float
    bytes: float
    microseconds: float


def product(rows: int, fan_in: int, fan_out: int, tiles: Sequence[int], others: float) -> Work:
    """``[rows, fan_in]`` times ``[fan_in, fan_out]``, and ``others``, numbers that it reads or writes besides."""
    _, outputs, depth, *_ = tiles
    across = -(-fan_out // outputs)
    steps = across * -(-fan_in // depth)
    columns = min(outputs, 1 << max(4, (fan_out - 1).bit_length()))
    return Work(steps, 2 * rows * depth * steps * columns, 4 * (fan_in * (rows * across + fan_out) + others))


def of_perceptrons(
    n: int,
    target: Target,
    precision: str,
    networks: Networks,
    tiles_of: Callable[[int, int], Sequence[int]] = perceptrons.tiles_of,
    weight_tile: Callable[[int, int], Sequence[int]] = perceptrons.weight_tile,
    parts: int = 1,
) -> dict[str, Launched]:
    """The launches of an update of soft actor-critic, but for the noise.

    A program goes through its layers in tiles, see :mod:`gpubuf.kernels.perceptrons`, each of which takes as long as
    the slowest of its products, its bytes (of a multiprocessor's share of the bandwidth), and a load's latency, of
    which two are under way. A layer begins after three such waits: for what the layer before has stored, the first
    tiles, and the barrier. A layer norm forward is made of numbers that are there; backward it twice reads two numbers
    for each of a layer's, and writes one. Outputs replace there what layers that learn have left. A multiprocessor has
    one program at a time.

    What layers leave goes to memory and comes from there, as far as it is more than the second level of cache.

    Args:
        tiles_of, weight_tile: those of the kernels, or others.
        parts: programs that share the rows of a batch where they multiply them for the gradients of weights.
    """
    actor, critic, nets, norm, policy = networks
    code, which, reached = PRECISIONS[precision]
    height, across, *_ = tile = weight_tile(networks.weights, code)
    actions = actor[-1] // 2

    def forward(rows: int, widths: Sequence[int]) -> Programs:
        block, *_ = tiles = tiles_of(rows, code)
        works = [product(block, i, o, tiles, block * o) for i, o in pairwise(widths)]
        return [(-(-rows // block), works)]

    def backward(rows: int, widths: Sequence[int], to: int = 0, of: int = 0) -> Programs:
        """``of`` the rows go to the gradients by ``to`` inputs, and not to those by weights."""
        block, *_ = tiles = tiles_of(rows, code)
        learn, more = (
            [product(block, o, i, tiles, block * i * (moved + 4 * norm)) for o, i in pairwise(widths[:0:-1])]
            for moved in (3, 2)
        )
        more.append(product(block, widths[1], to, tiles, block * to))
        return [(-(-(rows - of) // block), learn), (-(-of // block), more)]

    def gradients(fan_in: int, fan_out: int) -> tuple[int, list[Work]]:
        high, wide = min(height, fan_in), min(across, fan_out)
        # The optimiser reads and writes each weight, its target and two moments; parts leave sums for each other.
        work = product(high, -(-n // parts), wide, tile, high * wide * (8 + 2 * (parts > 1)))
        return -(-fan_in // height) * -(-fan_out // across) * parts, [work]

    layers = [(critic[0] - actions, critic[1]), (actions, critic[1]), *pairwise(critic[1:])] * nets
    layers += [*pairwise(actor)] * policy
    by_actor, by_critics = n * sum(actor[1:]), n * nets * sum(critic[1:])
    losses = Work(-(-n // 256), 0, 4 * n * (3 * nets + 6))
    of_values = backward((1 + policy) * nets * n, critic, actions, policy * nets * n)
    # What programs do; and how many numbers of layers they read for the first time, or leave.
    launches: dict[str, tuple[Programs, int]] = {
        "sac_act": (forward((1 + policy) * n, actor), (1 + policy) * by_actor),
        "sac_values": (forward((2 + policy) * nets * n, critic), (2 + policy) * by_critics),
        "sac_value_gradients": ([(1, [losses]), *of_values], (3 + 2 * policy) * by_critics),
        "sac_action_gradients": (backward(n, actor), 3 * by_actor),
        "weight_gradients": ([gradients(*layer) for layer in layers], 2 * (by_critics + policy * by_actor)),
    }
    if not policy:
        del launches["sac_action_gradients"]
    left = 4 * ((3 + 2 * policy) * by_critics + (1 + 2 * policy) * by_actor)
    beyond = max(0, 1 - target.cache / left) / target.memory
    rate, share = target.products[which] * reached * target.clock, target.bandwidth / target.processors
    found = {}
    for name, (kinds, numbers) in launches.items():
        free = [0.0] * target.processors
        for count, works in kinds:
            took = sum(max(o / rate, b / share, steps * WARM.cache / 2) for steps, o, b in works)
            took += 3 * (1 + norm * name.startswith("sac") * name.endswith("gradients")) * WARM.cache * len(works)
            for _ in range(count):
                heapq.heapreplace(free, free[0] + took)
        operations, moved = (sum(count * work[i] for count, works in kinds for work in works) for i in (1, 2))
        took = LAUNCH + WARM.memory + max(*free, 4 * numbers * beyond)
        found[name] = Launched(sum(count for count, _ in kinds), operations, moved, took)
    for name, (instructions, numbers) in ATOMS.items() if critic[-1] > 1 else ():
        issued = nets * n * instructions * MACHINE_CODE / FULL / target.processors / target.clock
        moved = 4.0 * nets * n * critic[-1] * numbers
        took = LAUNCH + WARM.memory + max(issued, moved / target.bandwidth)
        found[f"categorical_{name}"] = Launched(nets * n, 0, moved, took)
    return found
