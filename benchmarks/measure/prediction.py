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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpubuf.kernels.perceptrons import WEIGHT_TILE


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
    """A GPU. Processors, clock and products are published; latency and the H200's bandwidth are those of :data:`WARM`.

    Other bandwidths are assumed, as nobody has measured them here.

    Attributes:
        processors: multiprocessors.
        clock: cycles a microsecond.
        products: floating-point operations a cycle of a multiprocessor, by TF32 and in float32.
        bandwidth: bytes a microsecond from the second level of cache, all multiprocessors together.
    """

    processors: int
    clock: float
    products: tuple[float, float]
    bandwidth: float


TARGETS = {
    "H200": Target(PROCESSORS, CLOCK, (2048, 256), WARM.bandwidth),
    "A100": Target(108, 1410, (1024, 128), 3.5e6),
    "RTX 4090": Target(128, 2520, (256, 256), 4e6),
    "RTX 5090": Target(170, 2410, (256, 256), 5e6),
}

REACHED = {"tf32": 0.5, "tf32x3": 0.5 / 4, "ieee": 0.6}
"""The part of the rate of products that warps reach: ``mma.sync`` half of it, three products and the parts of numbers a
quarter of that."""


def of_perceptrons(
    n: int,
    target: Target,
    precision: str,
    tiles: tuple[int, int, int, int],
    states: int = 17,
    actions: int = 6,
    width: int = 256,
) -> dict[str, tuple[int, int, float, float, float]]:
    """The five launches of an update of soft actor-critic with two critics, two hidden layers each.

    A program goes through its layers in steps of ``tiles``, see :mod:`gpubuf.kernels.perceptrons`. Each takes as long
    as the slowest of its products, its bytes (of a multiprocessor's share of the bandwidth), and a load's latency, of
    which two are under way. A layer begins after three such waits: for what the layer before has stored, the first
    tiles, and the barrier.

    Returns:
        By kernel: programs, waves of them, products' operations, bytes read, microseconds.
    """
    blocks = -(-n // tiles[0])
    actor = [(states, width), (width, width), (width, 2 * actions)]
    critic = [(states, width), (actions, width), (width, width), (width, 1)]
    back = [(width, width), (width, actions)]
    height, across = WEIGHT_TILE
    high, wide = -(-width // height), -(-width // across)
    weights = 2 * (wide * (1 + 1 + high) + high) + wide * (1 + high) + high
    launches = {
        "sac_act": (2 * blocks, actor, tiles),
        "sac_values": (6 * blocks, critic, tiles),
        "sac_value_gradients": (4 * blocks + 1, back, tiles),
        "sac_action_gradients": (blocks, [(2 * actions, width), (width, width)], tiles),
        "weight_gradients": (weights, [(n, across)], (height, across, 32)),
    }
    rate = target.products[precision == "ieee"] * REACHED[precision] * target.clock
    share, found = target.bandwidth / target.processors, {}
    for name, (programs, layers, (rows, outputs, depth, *_)) in launches.items():
        took = flops = read = 0.0
        for fan_in, fan_out in layers:
            steps, columns = -(-fan_in // depth) * -(-fan_out // outputs), min(outputs, max(fan_out, 16))
            work, size = 2 * rows * columns * depth, 4 * depth * (rows + columns)
            took += 3 * WARM.cache + steps * max(work / rate, size / share, WARM.cache / 2)
            flops += programs * 2 * rows * fan_in * fan_out
            read += programs * steps * size
        waves = -(-programs // target.processors)
        found[name] = programs, waves, flops, read, LAUNCH + WARM.memory + waves * took
    return found
