"""The sum tree as an object: priorities in, indices and importance weights out."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gpubuf.data.arguments import warn
from gpubuf.data.samplers.base import RandomState
from gpubuf.data.samplers.priorities import check_beta, exponent, priority_vectors, vector
from gpubuf.data.storage.placement import device_name
from gpubuf.kernels import config, rows, sum_tree
from gpubuf.kernels._registry import demand_int64, is_lazy, launches_kernels, without_dispatch
from gpubuf.kernels.sum_tree import (
    ALPHA,
    BETA,
    EPS,
    LARGEST,
    MAX_PRIORITY,
    MAXIMUM,
    MINIMUM,
    REFUSED,
    SMALLEST,
    SUM,
)
from gpubuf.kernels.sum_tree._check import check_eligible

CHUNK = 1 << 24
"""Weights that a change of alpha holds in float64 at a time."""


def may_be_clamped(alpha: float, eps: float) -> bool:
    """Whether the weight of any float32 priority is out of float32's range."""
    least = eps or 2.0**-149
    return alpha * math.log2(LARGEST + eps) > math.log2(LARGEST) or alpha * math.log2(least) < math.log2(SMALLEST)


class Reweighing:
    """A change of alpha under way: ``weight ** (new / old)`` for every leaf.

    An interrupt can come anywhere, and :meth:`finish` goes on from there. The new weights of a part are kept until they
    are stored for certain: storing them twice changes nothing, computing them twice would.

    Args:
        leaves: the weights, which change in place.
        old: alpha so far. If it is 0, the weights stay: they don't tell the priorities.
        alpha: alpha from now on.
    """

    def __init__(self, leaves: Tensor, old: float, alpha: float) -> None:
        self.alpha = alpha
        self._parts = leaves.split(CHUNK) if old else ()
        self._power = alpha / old if old else 1.0
        # The part to store next, and its new weights if they have been computed: one object, replaced as a whole.
        self._next: tuple[int, Tensor | None] = 0, None

    def finish(self) -> None:
        """Change all weights that have not been changed. No host sync."""
        first, weights = self._next
        for number in range(first, len(self._parts)):
            part = self._parts[number]
            if weights is None:
                old = part.double()
                weights = torch.where(old > 0, (old**self._power).clamp_(SMALLEST, LARGEST), 0.0).to(part.dtype)
                self._next = number, weights
            part.copy_(weights)
            weights = None
            self._next = number + 1, None


_update = without_dispatch(sum_tree.update, trusted=True, given=("index", "priority", "generation"))
_mark = without_dispatch(sum_tree.mark, trusted=True, given=("index",))
_draw = without_dispatch(sum_tree.draw, trusted=True)
_refresh = without_dispatch(sum_tree.refresh, trusted=True, given=("index",))

_KINDS = 16
"""Updates of other sizes, and with or without generations, whose launches are kept."""

# Another object when launches may be configured in another way.
_choices = config.remembered(object)
_PLAIN = {Tensor}
_compiling = torch.compiler.is_compiling
_modes, _functions = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack

_SCALARS, _RING = 5, 4  # elements of `scalars` and of the ring for standalone use


class SumTree:
    """Weights of ``capacity`` rows, drawn from in proportion, updated in O(log capacity).

    A row's weight is ``q = (priority + eps) ** alpha``, clamped to the range of normal float32 numbers where it is
    positive (a warning says so, once: :meth:`warn_of_clamped`). A draw of row i comes with the importance weight
    ``(q_i / q_min) ** -beta``, q_min the smallest positive weight (Schaul, Quan, Antonoglou, Silver, "Prioritized
    Experience Replay", ICLR 2016). A row that was never given a priority weighs zero, and is never drawn. Nothing
    here synchronises with the device unless it says so.

    Draws can be restricted to *eligible* rows (:meth:`restrict`). Ineligible rows keep their weights and take new ones.
    They are not drawn, and do not count in :attr:`total`, :attr:`minimum` (hence q_min) and :attr:`maximum`.

    Args:
        capacity: number of rows.
        alpha: exponent of the priorities, at least 0.
        beta: exponent of the importance weights, at least 0; a number or a 0-dim tensor.
        eps: added to every priority, at least 0.
        device: where the tree lives.
        fan_out: children per node, a power of two; None chooses by device and capacity.

    Attributes:
        capacity: number of rows.
        fan_out: children per node.
        leaves: float32 weights, ``[capacity]`` rounded up to a multiple of the fan-out.
        nodes: float64 ``[3, n_nodes]``: sums, minima and maxima of the inner nodes.
        scalars: float64 ``[5]`` = (alpha, beta, eps, max_priority, refused).
        eligible: None if every row is eligible, or int64 ``[ceil(capacity / 64)]``: row r is bit ``r % 64`` of word
            ``r // 64``. Set by :meth:`restrict`. You own it: change it in place, then call :meth:`refresh`.

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(
        self,
        capacity: int,
        *,
        alpha: float = 1.0,
        beta: float | Tensor = 1.0,
        eps: float = 0.0,
        device: torch.device | str = "cpu",
        fan_out: int | None = None,
    ) -> None:
        if capacity < 1:
            raise ValueError(f"the capacity must be at least 1, but is {capacity}")
        self._transformed_by(exponent("alpha", alpha), exponent("eps", eps))
        self._warned_of_clamped = False
        self._reweighing: Reweighing | None = None
        device = torch.device(device)
        self.capacity = int(capacity)
        self.fan_out = config.tree_fan_out(self.capacity, device.type, device_name(device), fan_out)
        tree = sum_tree.new_tree(self.capacity, self.fan_out, device)
        self.leaves, self.nodes, self.scalars, self.eligible = tree[:4]
        self.scalars[ALPHA].fill_(self._alpha)
        self.scalars[EPS].fill_(self._eps)
        self.set_beta(beta)
        # On a GPU, what repeats the launch of an update, by all of the update but its vectors.
        self._repeated: dict[tuple[Any, ...], Any] | None = {} if launches_kernels(self.leaves) else None
        # For standalone use: a ring in which every row is valid, and was written once.
        self._full_ring = rows.new_ring(device)
        self._full_ring[: rows.SIZE + 1].fill_(self.capacity)

    def _transformed_by(self, alpha: float, eps: float) -> None:
        self._alpha, self._eps = alpha, eps
        self._may_be_clamped = may_be_clamped(alpha, eps)

    # Reading. The tensors are views: they follow the tree; clone one to keep it.

    @property
    def device(self) -> torch.device:
        """The device that the tree lives on."""
        return self.leaves.device

    @property
    def total(self) -> Tensor:
        """Sum of the weights of eligible rows: float64, 0-dim, a view."""
        return self.nodes[SUM, -1]

    @property
    def minimum(self) -> Tensor:
        """Smallest positive weight of an eligible row, +inf if there is none: float64, 0-dim, a view."""
        return self.nodes[MINIMUM, -1]

    @property
    def maximum(self) -> Tensor:
        """Largest weight of an eligible row: float64, 0-dim, a view."""
        return self.nodes[MAXIMUM, -1]

    @property
    def max_priority(self) -> Tensor:
        """Largest priority ever given, before the transformation; 1.0 until there was one: float64, 0-dim."""
        return torch.where(self.largest_given < 0, 1.0, self.largest_given)

    @property
    def largest_given(self) -> Tensor:
        """:attr:`max_priority` as it is kept, negative until there was a priority: float64, 0-dim, a view."""
        return self.scalars[MAX_PRIORITY]

    @property
    def refused(self) -> Tensor:
        """Number of priorities and indices that a GPU has refused: float64, 0-dim, a view."""
        return self.scalars[REFUSED]

    @property
    def alpha(self) -> float:
        """Exponent of the priorities."""
        return self._alpha

    @property
    def beta(self) -> Tensor:
        """Exponent of the importance weights: float64, 0-dim, a view."""
        return self.scalars[BETA]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of the tree, :attr:`eligible` not among them."""
        return sum(tensor.nbytes for tensor in (self.leaves, self.nodes, self.scalars, self._full_ring))

    @staticmethod
    def bytes_for(capacity: int, device_type: str) -> int:
        """:attr:`nbytes` of a tree of ``capacity`` rows on the current device of a type, before it exists."""
        fan_out = config.tree_fan_out(capacity, device_type, device_name(device_type))
        leaves = -(-capacity // fan_out) * fan_out
        return 4 * leaves + 3 * 8 * sum(sum_tree.level_sizes(capacity, fan_out)) + 8 * (_SCALARS + _RING)

    def __getstate__(self) -> dict[str, Any]:
        """Without launches, whose arguments are this tree's."""
        return {**vars(self), "_repeated": None if self._repeated is None else {}}

    def to(self, device: torch.device) -> SumTree:
        """This tree if it is there, else a copy with the fan-out that suits the device, without :attr:`eligible`."""
        if device == self.device:
            return self
        copy = SumTree(self.capacity, device=device)
        copy._transformed_by(self._alpha, self._eps)
        copy._warned_of_clamped = self._warned_of_clamped
        copy.leaves[: self.capacity].copy_(self.leaves[: self.capacity])
        copy.scalars.copy_(self.scalars)
        copy.rebuild()
        return copy

    # Writing and drawing

    def update(
        self, index: Tensor, priority: Tensor | float, *, ring: Tensor | None = None, generation: Tensor | None = None
    ) -> None:
        """Set priorities; of duplicates the last one wins. No host sync.

        Args:
            index: rows, any integer dtype, B elements; -1 is ignored.
            priority: B elements in any shape and real dtype, or one number for all. Transformed here.
            ring: counters of the storage, int64 ``[4]``; None: all rows are valid and were written once.
            generation: int64, B elements: the rows' write generations at the time they were sampled. A row
                overwritten since then is left alone.

        Raises:
            IndexError: an index is outside ``[-1, capacity)`` (CPU; a GPU counts it in :attr:`refused`).
            ValueError: a priority is NaN, infinite or negative (CPU; a GPU keeps the old one, and counts it in
                :attr:`refused`), or, as :class:`~gpubuf.data.samplers.priorities.CountError`, the arguments have
                different numbers of elements. Nothing has changed.
        """
        number = self.leaves.get_device()
        # The index of a sample and the errors of a loss need no conversion. The test is written out, because a call
        # would cost more than the test.
        if not (
            isinstance(priority, Tensor)
            and priority.dtype is torch.float32
            and priority.dim() == 1
            and priority.get_device() == number
            and priority.is_contiguous()
            and not priority.requires_grad
            and index.dtype is torch.int64
            and index.dim() == 1
            and index.get_device() == number
            # Those on "meta" have the number of the CPU.
            and not (index.is_meta or priority.is_meta)
            and index.layout is priority.layout is torch.strided
            and index.is_contiguous()
            and index.numel() == priority.numel()
            and (
                generation is None
                or (
                    generation.dtype is torch.int64
                    and not generation.is_meta
                    and generation.dim() == 1
                    and generation.get_device() == number
                    and generation.is_contiguous()
                    and generation.numel() == index.numel()
                )
            )
        ):
            index, priority, generation = priority_vectors(index, priority, generation, self.leaves)
        if ring is None:
            ring = self._full_ring
        elif ring.dtype is not torch.int64 or ring.dim() != 1 or ring.numel() != _RING or not ring.is_contiguous():
            demand_int64("ring", ring, (_RING,))
        update = _update if self._repeated is None else self._repeat
        update(
            self.leaves, self.nodes, self.scalars, self.eligible, self.capacity, self.fan_out,
            ring, index, priority, generation,
        )  # fmt: skip
        if self._may_be_clamped:
            self._look_at_weights()

    def _repeat(self, *arguments: Any) -> None:
        """:func:`_update`, by the launch of one before that differed in the last three arguments alone."""
        own, given = arguments[:-3], arguments[-3:] if arguments[-1] is not None else arguments[-3:-1]
        unfit = _compiling() or _modes() or _functions() or config.in_graph() or {*map(type, given)} != _PLAIN
        if unfit or True in map(Tensor.is_neg, given) or True in map(Tensor._is_zerotensor, given):
            _update(*arguments)
            return
        assert self._repeated is not None
        key = (given[0].numel(), len(given), _choices(), *map(id, own))
        ready = self._repeated.get(key)
        if ready:
            ready.launch(*given)
        elif ready is None:
            if len(self._repeated) >= _KINDS:
                self._repeated.clear()
            self._repeated[key] = self._noted(arguments, given)
        else:
            _update(*arguments)

    def _noted(self, arguments: tuple[Any, ...], given: tuple[Tensor, ...]) -> Any:
        """:func:`_update`, and what repeats its launch; False: it takes several, with memory between them."""
        # Imports Triton.
        from gpubuf.kernels._launching import Call, Ready, launches_noted

        calls: list[Call] = []
        with launches_noted(calls):
            _update(*arguments)
        # What is given is known by its address among the arguments.
        addresses = [each.data_ptr() for each in arguments if isinstance(each, Tensor)]
        apart = len({*addresses}) == len(addresses)
        return len(calls) == 1 and apart and Ready(calls, self.leaves.get_device(), given)

    def mark(self, index: Tensor, within_buffer: bool = False, touched: Tensor | None = None) -> None:
        """Give rows the weight of new ones: that of the running maximum of the priorities. No host sync.

        Args:
            index: rows, any integer dtype, any shape; -1 is ignored.
            within_buffer: use the largest weight of an eligible row instead of the maximum ever given.
            touched: int64 ``[M]``, on the tree's device: rows to :meth:`refresh` as well, all of ``index`` among them.

        Raises:
            IndexError: an index is outside ``[-1, capacity)`` (CPU; a GPU ignores it).
        """
        index = vector(index, torch.int64, self.leaves)
        _mark(
            self.leaves, self.nodes, self.scalars, self.eligible, self.capacity, self.fan_out,
            index, within_buffer, touched,
        )  # fmt: skip
        if self._may_be_clamped:
            self._look_at_weights()

    def draw(self, n: int, rng: RandomState, stratified: bool = False) -> tuple[Tensor, Tensor]:
        """Draw eligible rows in proportion to their weights, with replacement. No host sync.

        Args:
            n: number of draws.
            rng: the random stream, on the tree's device; advanced by ``n``.
            stratified: draw number i comes from the i-th of n equal parts of the total weight.

        Returns:
            The rows, int64 ``[n]``, and their importance weights, float32 ``[n]``; the caller's to keep.

        Raises:
            RuntimeError: no eligible row has a weight (CPU; on a GPU every index is then ``NO_ROW`` and every weight
            0). ValueError: ``n`` is negative.
        """
        drawn: tuple[Tensor, Tensor] = _draw(
            self.leaves, self.nodes, self.scalars, self.eligible, self.capacity, self.fan_out,
            rng.state, n, stratified,
        )  # fmt: skip
        return drawn

    def rebuild(self) -> None:
        """Recompute every inner node, after leaves or bits of :attr:`eligible` were written to. No host sync."""
        sum_tree.build(self.leaves, self.nodes, self.scalars, self.eligible, self.capacity, self.fan_out)

    def mend(self) -> None:
        """Finish an interrupted operation: a change of alpha, tags, the inner nodes. No host sync.

        A row whose new priority was on its way on a GPU, and has replaced the old one by a tag, counts as new.
        """
        self._reweigh()
        new = ((self.max_priority + self.scalars[EPS]) ** self.scalars[ALPHA]).clamp(max=torch.finfo(torch.float32).max)
        self.leaves.copy_(torch.where(self.leaves.signbit(), new.float(), self.leaves))
        self.rebuild()

    def restrict(self, eligible: Tensor | None) -> None:
        """Draw from eligible rows only, from now on. Recomputes every inner node. No host sync.

        Args:
            eligible: the bitmap :attr:`eligible`, which is kept, not copied; None: all rows are eligible again.

        Raises:
            TypeError: ``eligible`` is not int64.
            ValueError: it has another shape than ``[ceil(capacity / 64)]``, is not contiguous, is negated lazily or has
                no memory, or is on another device. Nothing has changed.
        """
        if eligible is not None:
            check_eligible(eligible, self.capacity)
            if is_lazy(eligible):
                raise ValueError("eligible must hold its bits in memory: it is negated lazily or a zero without memory")
            if eligible.device != self.device:
                raise ValueError(f"eligible must be on {self.device}, as the tree is, not on {eligible.device}")
        self.eligible = eligible
        self.rebuild()

    def refresh(self, index: Tensor) -> None:
        """Recompute the nodes above rows, after bits of :attr:`eligible` or leaves were changed there. No host sync.

        Args:
            index: the rows, any integer dtype, any shape; -1 is ignored.

        Raises:
            IndexError: an index is outside ``[-1, capacity)`` (CPU; a GPU ignores it).
        """
        index = vector(index, torch.int64, self.leaves)
        _refresh(self.leaves, self.nodes, self.scalars, self.eligible, self.capacity, self.fan_out, index)

    def set_alpha(self, alpha: float) -> None:
        """Change the exponent of the priorities, and the weights with it: ``q ** (new / old)``. No host sync.

        Rows of weight zero keep it. With alpha = 0 all priorities became 1, and stay so: a warning says that.

        Raises:
            ValueError: ``alpha`` is negative or not finite. Nothing has changed.
        """
        alpha = exponent("alpha", alpha)
        old = self._alpha
        if alpha == old:
            return
        self._reweighing = Reweighing(self.leaves, old, alpha)
        self._reweigh()
        if old == 0.0:
            warn(
                "with alpha = 0 every priority was reduced to weight 1; the rows keep that weight until they are "
                "given new priorities"
            )
        elif self._may_be_clamped:
            self._look_at_weights()

    def _reweigh(self) -> None:
        if change := self._reweighing:
            self._transformed_by(change.alpha, self._eps)
            self.scalars[ALPHA].fill_(change.alpha)
            change.finish()
            self.rebuild()
            self._reweighing = None

    def set_beta(self, beta: float | Tensor) -> None:
        """Change the exponent of the importance weights, in place, so that a captured graph sees it. No host sync.

        Args:
            beta: a number, or a 0-dim tensor, whose value is checked only on the CPU, outside of compiled code.

        Raises:
            ValueError: ``beta`` is negative or not finite, or a tensor of several elements.
        """
        check_beta(beta)
        if isinstance(beta, Tensor):
            self.scalars[BETA].copy_(beta.detach().reshape(()))
        else:
            self.scalars[BETA].fill_(beta)

    def warn_of_clamped(self) -> None:
        """Warn, once, if weights of eligible rows are out of float32's range. Synchronises.

        On the CPU every change of weights does it. On a GPU that would be a host sync: prioritized samplers do it where
        they synchronise anyway.
        """
        if self._warned_of_clamped or not self._may_be_clamped:
            return
        least, largest = self.nodes[MINIMUM:, -1].tolist()
        if least > SMALLEST and largest < LARGEST:
            return
        self._warned_of_clamped = True
        warn(
            f"with alpha = {self._alpha:g} and eps = {self._eps:g} some weights (priority + eps) ** alpha are out of "
            f"float32's range, and count as {SMALLEST:.3g} or {LARGEST:.3g}: rows are not drawn in proportion to their "
            "priorities"
        )

    def _look_at_weights(self) -> None:
        if self.nodes.is_cpu and type(self.nodes) is Tensor:
            self.warn_of_clamped()

    def clear(self, reset: bool = False) -> None:
        """Give every row weight zero; :attr:`eligible` stays. No host sync.

        Args:
            reset: forget the running maximum and the count of refusals too; the exponents stay.
        """
        self.leaves.zero_()
        self.nodes.zero_()
        self.nodes[MINIMUM].fill_(math.inf)
        if reset:
            self.scalars[MAX_PRIORITY].fill_(-1.0)
            self.scalars[REFUSED].fill_(0.0)

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Copies of all that is not derived; independent of the fan-out, hence of the device.

        Without :attr:`eligible`, which belongs to whoever maintains it.
        """
        leaves = self.leaves[: self.capacity].clone()
        return {"capacity": self.capacity, "leaves": leaves, "hyper": self.scalars.clone()}

    @staticmethod
    def check_state(state: dict[str, Any], capacity: int) -> None:
        """Raise unless a tree of ``capacity`` rows can load ``state``. Synchronises. Errors: see the next method."""
        leaves, scalars = state["leaves"], state["hyper"]
        if state["capacity"] != capacity:
            raise ValueError(f"the state is of a tree of {state['capacity']} rows, this tree has {capacity}")
        for name, tensor, dtype, length in (
            ("leaves", leaves, torch.float32, capacity),
            ("hyper", scalars, torch.float64, _SCALARS),
        ):
            if tensor.dtype != dtype:
                raise TypeError(f"{name} must be {dtype}, not {tensor.dtype}")
            if list(tensor.shape) != [length]:
                raise ValueError(f"{name} must have shape {[length]}, not {list(tensor.shape)}")
        if not bool(((leaves >= 0) & leaves.isfinite()).all()):
            raise ValueError("leaves must be finite and not negative")
        numbers = scalars.tolist()
        for name, position in (("alpha", ALPHA), ("beta", BETA), ("eps", EPS), ("the number refused", REFUSED)):
            exponent(name, numbers[position])
        if not math.isfinite(numbers[MAX_PRIORITY]):
            raise ValueError(f"the largest priority must be finite, but is {numbers[MAX_PRIORITY]}")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`, in place, under the present :attr:`eligible`. Synchronises.

        Raises:
            KeyError: an entry is missing.
            TypeError: a tensor has another dtype.
            ValueError: the capacity differs, or a shape or a value is impossible. Nothing has changed.
        """
        self.check_state(state, self.capacity)
        leaves, scalars = state["leaves"], state["hyper"]
        numbers = scalars.tolist()
        self._transformed_by(numbers[ALPHA], numbers[EPS])
        # abs: of -0.0, which the kernels would take for a tag.
        self.leaves[: self.capacity].copy_(leaves.abs())
        self.scalars.copy_(scalars)
        self.rebuild()

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(capacity={self.capacity}, alpha={self._alpha:g}, fan_out={self.fan_out}, "
            f"device={str(self.device)!r}, nbytes={self.nbytes})"
        )
