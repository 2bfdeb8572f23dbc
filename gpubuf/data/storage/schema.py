"""Per-key dtypes as written, stored and drawn.

The schema of a storage says for each key that is written which column holds it, in which dtype and with which codec,
and which dtype it has in batches.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from gpubuf.data.arguments import as_tensor, check_count
from gpubuf.data.recording import host_can_read
from gpubuf.data.storage.layout import Key, Leaf, RowLayout, as_key, as_written
from gpubuf.kernels.rows import DTYPES, FAULTS, CodecNumbers


@dataclass(frozen=True)
class Codec:
    """How the numbers of a key are stored: ``stored = (written - offset) / scale``, and back.

    Integers are rounded to the nearest, half to even. Numbers that don't fit an integer dtype are refused at the write
    (on a GPU they are cut to the range, and count as faults).

    A codec lies between floating-point numbers and what is stored. Integers are taken as they are: pixels that are
    written as uint8 come out as float32, scaled, if ``batch_dtypes`` says so.

    Args:
        dtype: of what is stored.
        scale: of the numbers.
        offset: of the numbers.

    Raises:
        TypeError: ``dtype`` is no dtype.
        ValueError: the dtype can't be converted, or has no room for a scale (``torch.bool``); or ``scale`` is 0, or
            one of the two is not finite.
    """

    dtype: torch.dtype
    scale: float = 1.0
    offset: float = 0.0

    def __post_init__(self) -> None:
        check_dtype(self.dtype)
        object.__setattr__(self, "scale", float(self.scale))
        object.__setattr__(self, "offset", float(self.offset))
        if self.scale == 0 or not (math.isfinite(self.scale) and math.isfinite(self.offset)):
            raise ValueError(f"a codec needs a finite scale other than 0, and a finite offset, got {self}")
        if self.dtype is torch.bool and self.numbers != CodecNumbers():
            raise ValueError(f"flags have neither scale nor offset, got {self}")

    @property
    def numbers(self) -> CodecNumbers:
        """What the kernels compute with, and a checkpoint says."""
        return CodecNumbers(self.scale, self.offset)


def check_dtype(dtype: torch.dtype) -> None:
    """Check that the numbers of a dtype can be converted.

    Raises:
        TypeError: it is no dtype.
        ValueError: they can't.
    """
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"expected a torch.dtype, got {dtype!r}")
    if dtype in DTYPES:
        return
    known = ", ".join(str(each).removeprefix("torch.") for each in DTYPES)
    if "float8" in str(dtype):
        raise ValueError(
            f"{dtype} can't be converted: GPUs of compute capability 8.0, such as the A100, have no instruction for "
            f"it. Choose one of {known}; a Codec scales numbers to int8 or uint8"
        )
    raise ValueError(f"{dtype} can't be converted: choose one of {known}")


def as_numbers(value: Any) -> Tensor:
    """A tensor, or numbers of Python's and NumPy's as one: without loss, which float32 for Python's floats would be."""
    tensor = as_tensor(value)
    from_python = tensor.dtype is torch.float32 and not hasattr(value, "dtype")
    return torch.as_tensor(value, dtype=torch.float64, device="cpu") if from_python else tensor.detach()


def stored_as(values: Tensor, dtype: torch.dtype, name: str, ring: Tensor | None = None) -> Tensor:
    """``values`` in the dtype of a key, as ``to()`` of tensors converts them, if the key has room for them.

    Args:
        values: real numbers of any dtype; complex ones for a complex key.
        dtype: of the key.
        name: of the key.
        ring: counters of the storage: what a GPU, or captured code, can't refuse is cut to the range, NaN
            becomes 0 in an integer, and each row with such a number counts as a fault.

    Raises:
        ValueError: a number is out of the range of the dtype, or NaN and the dtype has none; not on a GPU, and not in
            captured code.
    """
    if values.dtype is dtype:
        return values
    if values.is_complex() and not dtype.is_complex:
        raise ValueError(f"key {name} holds {dtype}, which has no room for {values.dtype}")
    if dtype.is_floating_point or dtype.is_complex:
        out = values.to(dtype)
        lost = (out if dtype.is_complex else out.to(torch.float64)).isfinite() != values.isfinite()
    elif dtype is torch.bool:
        out, lost = values != 0, values.isnan()
    else:
        out, lost = _integers(values, dtype)
    if host_can_read(values):
        if bool(lost.any()):
            # Not `values[lost]`: PyTorch before 2.9 has no such index of uint64.
            first = values.flatten()[int(lost.flatten().int().argmax())].item()
            raise ValueError(f"key {name} holds {dtype}, which has no room for {first!r}")
    elif ring is not None:
        ring[FAULTS].add_(lost.reshape(lost.shape[0] if lost.dim() else 1, -1).any(1).sum().to(ring.device))
    return out


def refuse_rounding(schema: Schema, values: Sequence[Tensor]) -> None:
    """Raise if the first rows show that a key loses all it says: fractions of [-1, 1] that are stored as integers.

    Rows on a GPU, and captured code, are not looked at.

    Args:
        schema: of the storage.
        values: of each of its ``written`` leaves.

    Raises:
        ValueError: a key does; a :class:`Codec` serves it.
    """
    for leaf, source, value in zip(schema.written.leaves, schema.sources, values, strict=True):
        whole = source.stored.is_floating_point or source.stored.is_complex or source.stored is torch.bool
        if whole or not leaf.dtype.is_floating_point or source.codec != CodecNumbers():
            continue
        if host_can_read(value) and bool((value.abs() <= 1).all() & (value != value.round()).any()):
            raise ValueError(
                f"key {leaf.name} has fractions in [-1, 1], which {source.stored} would round to whole numbers: "
                f"Codec({source.stored}, scale=1 / {torch.iinfo(source.stored).max}) keeps them"
            )


def _integers(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Numbers as integers, cut to their range, and which of them are out of it."""
    limits = torch.iinfo(dtype)
    if values.is_floating_point():
        numbers = values.to(torch.float64).trunc()
        # The number beyond is a power of two, which float64 has.
        least, beyond = float(limits.min), float(limits.max + 1)
        held = (numbers >= least) & (numbers < beyond)
        numbers = torch.where(numbers.isnan(), 0.0, numbers)
        return numbers.clamp(least, math.nextafter(beyond, 0)).to(dtype), ~held
    numbers = values.to(torch.int64)
    greatest = min(limits.max, 2**63 - 1)
    out = numbers.clamp(max(limits.min, -(2**63)), greatest)
    # Numbers of uint64 above those of int64 are negative here.
    huge = (numbers < 0) if values.dtype is torch.uint64 else torch.zeros_like(numbers, dtype=torch.bool)
    return torch.where(huge, greatest, out).to(dtype), huge | (out != numbers)


NEXT_KEY = "next"
END_NAMES = ("done", "terminated", "truncated")


def default_ends(stored: Callable[[Key], bool]) -> list[Key]:
    """The flags that end trajectories where none are named: those that are stored under "next", or else at the root."""
    below, at_root = ([key for name in END_NAMES if stored(key := (*parent, name))] for parent in ((NEXT_KEY,), ()))
    return below or at_root


#: Keys that ``share_next=True`` leaves out: flags and rewards belong to steps, not states.
OF_A_STEP = frozenset({*END_NAMES, "reward"})


@dataclass(frozen=True)
class Options:
    """How keys are to be stored and given out. A key at the root also means the same key under "next".

    Attributes:
        dtypes: how keys are stored.
        batch_dtypes: of keys in batches; of others it is the dtype that was written.
        share_next: whether keys under "next" share the memory of those at the root: True for :func:`continued_keys`, or
            the keys at the root.
        next_capacity: room for next observations that are not those of the next row; None: the default.
    """

    dtypes: Mapping[Key, Codec] = field(default_factory=dict)
    batch_dtypes: Mapping[Key, torch.dtype] = field(default_factory=dict)
    share_next: bool | tuple[Key, ...] = False
    next_capacity: int | None = None

    @classmethod
    def of(
        cls,
        dtypes: Mapping[Any, torch.dtype | Codec] | None = None,
        batch_dtypes: Mapping[Any, torch.dtype] | None = None,
        share_next: bool | Sequence[Any] = False,
        next_capacity: int | None = None,
    ) -> Options:
        """The options as users give them.

        Raises:
            TypeError: a dtype is none, or ``share_next`` is one key.
            ValueError: a dtype can't be converted, or options contradict each other.
        """
        if isinstance(share_next, str):
            raise TypeError(f"share_next is True or a list of keys, got {share_next!r}")
        if next_capacity is not None:
            if not share_next:
                raise ValueError("next_capacity is for storages with share_next")
            check_count(next_capacity, "next_capacity")
        shared = share_next if isinstance(share_next, bool) else tuple(map(as_key, share_next))
        codecs = {
            as_key(key): given if isinstance(given, Codec) else Codec(given) for key, given in (dtypes or {}).items()
        }
        for dtype in (batch_dtypes or {}).values():
            check_dtype(dtype)
        drawn = {as_key(key): dtype for key, dtype in (batch_dtypes or {}).items()}
        return cls(codecs, drawn, shared, next_capacity)

    def __bool__(self) -> bool:
        return bool(self.dtypes or self.batch_dtypes or self.share_next)

    @property
    def keys(self) -> set[Key]:
        """All keys that are named."""
        return {*self.dtypes, *self.batch_dtypes}


def _given(options: Mapping[Key, Any], key: Key) -> Any:
    """What was said about a key, or about the one at the root that it follows; None: nothing."""
    return options.get(key, options.get(key[1:]) if key[:1] == (NEXT_KEY,) else None)


@dataclass(frozen=True)
class Source:
    """What one key of a batch is read from.

    Attributes:
        owner: the key whose column that is, by its position among the leaves; its own if it has one.
        stored: the dtype of that column.
        codec: the numbers of its codec.
        batch: the dtype in batches.
        follows: whether it is read where the row's next observation is: see :mod:`gpubuf.kernels.rows`.
    """

    owner: int
    stored: torch.dtype
    codec: CodecNumbers
    batch: torch.dtype
    follows: bool = False


def sources(leaves: Sequence[Leaf], options: Options) -> list[Source]:
    """What each of the keys that are written is read from.

    Raises:
        ValueError: an option names a key that there is not, or can't be met.
    """
    positions = {leaf.key: position for position, leaf in enumerate(leaves)}
    for key in options.keys - positions.keys():
        raise ValueError(
            f"an option of the storage names {as_written(key)!r}, the batch has {[as_written(k) for k in positions]}"
        )
    found = [_own_column(position, leaf, options) for position, leaf in enumerate(leaves)]
    shared = shared_keys(leaves, options.share_next)
    for position, leaf in enumerate(leaves):
        if leaf.key[:1] == (NEXT_KEY,) and leaf.key[1:] in shared:
            root = positions[leaf.key[1:]]
            # Shapes and dtypes are equal: the key is one of :func:`shared_keys`.
            own, other = ((source.stored, *source.codec) for source in (found[position], found[root]))
            if own != other:
                raise ValueError(
                    f"{leaf.name} can't share the memory of {leaves[root].name}: it is stored with (dtype, scale, "
                    f"offset) = {own}, the other with {other}"
                )
            found[position] = replace(found[position], owner=root, follows=True)
    for leaf, source in zip(leaves, found, strict=True):
        _check_conversion(leaf, source)
    return found


def continued_keys(leaves: Sequence[Leaf]) -> tuple[Key, ...]:
    """The keys at the root that are under ``"next"`` too, with the same shape and dtype, but for :data:`OF_A_STEP`."""
    by_key = {leaf.key: leaf for leaf in leaves}
    return tuple(
        leaf.key
        for leaf in leaves
        if leaf.key
        and leaf.key[-1] not in OF_A_STEP
        and (other := by_key.get((NEXT_KEY, *leaf.key))) is not None
        and (other.dtype, other.shape) == (leaf.dtype, leaf.shape)
    )


def shared_keys(leaves: Sequence[Leaf], share_next: bool | Sequence[Key]) -> tuple[Key, ...]:
    """The keys whose next values are not stored: those at the root.

    Args:
        leaves: the keys that have columns.
        share_next: True for :func:`continued_keys`, or a list of keys at the root.

    Raises:
        ValueError: a key of the list is missing at the root or under ``"next"``, or differs there; or no key is found.
    """
    if not share_next:
        return ()
    by_key = {leaf.key: leaf for leaf in leaves}
    if share_next is not True:
        return tuple(dict.fromkeys(_shared_key(by_key, key) for key in share_next))
    found = continued_keys(leaves)
    if not found:
        raise ValueError(
            "share_next=True finds no key to share: it takes those at the root and under 'next', of one shape and "
            f"dtype, but for flags and rewards; there are {[as_written(key) for key in by_key]}. Name others in a "
            "list, or leave share_next out"
        )
    return found


def _shared_key(leaves: dict[Key, Leaf], key: Key) -> Key:
    own, coming = leaves.get(key), leaves.get((NEXT_KEY, *key))
    if own is None or coming is None:
        missing = as_written(key if own is None else (NEXT_KEY, *key))
        raise ValueError(f"share_next names {as_written(key)!r}, but {missing!r} is not stored")
    if (own.dtype, own.shape) != (coming.dtype, coming.shape):
        raise ValueError(
            f"share_next names {as_written(key)!r}, which has rows of shape {own.shape} and {own.dtype}, and of shape "
            f"{coming.shape} and {coming.dtype} under 'next': only equal ones can share a column"
        )
    if own.row_bytes == 0:
        raise ValueError(f"share_next names {as_written(key)!r}, whose rows have no bytes")
    return key


def _own_column(position: int, leaf: Leaf, options: Options) -> Source:
    batch = _given(options.batch_dtypes, leaf.key) or leaf.dtype
    codec = _given(options.dtypes, leaf.key)
    if codec is None:
        return Source(position, leaf.dtype, CodecNumbers(), batch)
    return Source(position, codec.dtype, codec.numbers, batch)


def _check_conversion(leaf: Leaf, source: Source) -> None:
    kinds = {leaf.dtype, source.stored, source.batch}
    if len(kinds) > 1 or source.codec != CodecNumbers():
        for dtype in kinds:
            try:
                check_dtype(dtype)
            except ValueError as error:
                raise ValueError(f"key {leaf.name}: {error}") from None


@dataclass(frozen=True)
class Schema:
    """The layouts of a storage's rows as written, stored and drawn. Without options they are one.

    Attributes:
        written: of a batch that is written.
        stored: of the columns.
        batch: of a batch that is drawn: the keys and shapes of ``written``.
        sources: for each leaf of these what it is read from.
        columns: for each leaf of these the position of its column among the leaves of ``stored``.
    """

    written: RowLayout
    stored: RowLayout
    batch: RowLayout
    sources: tuple[Source, ...]
    columns: tuple[int, ...]

    @classmethod
    def of(cls, written: RowLayout, options: Options) -> Schema:
        """The schema of rows like those of ``written``.

        Raises:
            ValueError: as :func:`sources`.
        """
        leaves = written.leaves
        if not options:
            own = tuple([Source(number, leaf.dtype, CodecNumbers(), leaf.dtype) for number, leaf in enumerate(leaves)])
            return cls(written, written.plain, written, own, tuple(range(len(leaves))))
        found = sources(leaves, options)
        owners = [position for position, source in enumerate(found) if source.owner == position]
        columns = {owner: column for column, owner in enumerate(owners)}
        return cls(
            written,
            written.plain.with_leaves([replace(leaves[own], dtype=found[own].stored) for own in owners]),
            written.with_leaves([replace(leaf, dtype=s.batch) for leaf, s in zip(leaves, found, strict=True)]),
            tuple(found),
            tuple(columns[source.owner] for source in found),
        )

    @property
    def computed(self) -> bool:
        """Whether rows are computed while they are written and read: see :class:`~.plan.RowPlan`."""
        return self.batch is not self.written

    @functools.cached_property
    def shared(self) -> dict[int, Leaf]:
        """The columns that hold next observations too, by their positions, as they are stored."""
        found = {column for column, source in zip(self.columns, self.sources, strict=True) if source.follows}
        return {number: self.stored.leaves[number] for number in sorted(found)}

    @functools.cached_property
    def full(self) -> RowLayout:
        """A row as it is stored, with the next observations that are stored once."""
        leaves = zip(self.written.leaves, self.sources, strict=True)
        stored = [replace(leaf, dtype=source.stored) for leaf, source in leaves]
        return self.written.plain.with_leaves(stored)


def check_tells_ends(schema: Schema, columns: Sequence[int], by_id: bool) -> None:
    """Check that the bytes of some columns tell where trajectories end, as what was written does.

    Args:
        schema: of a storage.
        columns: their positions among the leaves of ``schema.stored``.
        by_id: they hold identifiers, instead of flags.

    Raises:
        ValueError: a codec moves zero, or identifiers lose their differences.
    """
    for leaf, source, column in zip(schema.written.leaves, schema.sources, schema.columns, strict=True):
        if column not in columns:
            continue
        exact = source.stored is leaf.dtype or not (by_id and source.stored.is_floating_point)
        if source.codec != CodecNumbers() or not exact:
            raise ValueError(
                f"{leaf.name} tells where trajectories end, and can't be stored as {source.stored} with "
                f"{_numbers(source.codec._asdict())}: give it a dtype alone" + (", of integers" if by_id else "")
            )


def keys_told(schema: Schema) -> list[str]:
    """Each key for people: its shape and dtype, and how it is stored if that differs."""
    leaves, found = schema.written.leaves, list[str]()
    for position, (leaf, source) in enumerate(zip(leaves, schema.sources, strict=True)):
        text = f"{leaf.name}: {list(leaf.shape)} {leaf.dtype}"
        if source.owner != position:
            text += f" in {leaves[source.owner].name}"
        elif source.stored is not leaf.dtype:
            text += f" as {source.stored}"
        found.append(text)
    found += [f"{as_written(key)!r}: on the host" for key in schema.written.host]
    return found


# The schema in a state


def described(schema: Schema) -> list[dict[str, Any]]:
    """What is written and how it is stored, as plain values: an entry for each leaf of ``schema.written``."""
    leaves = schema.written.leaves
    return [
        {
            "key": list(leaf.key),
            "shape": list(leaf.shape),
            "written": _name(leaf.dtype),
            "stored": _name(source.stored),
            **source.codec._asdict(),
            "column": list(leaves[source.owner].key),
            "follows": source.follows,
        }
        for leaf, source in zip(leaves, schema.sources, strict=True)
    ]


def written_leaves(saved: Any) -> list[Leaf]:
    """The keys, shapes and dtypes that were written, from the result of :func:`described`.

    Raises:
        ValueError: it is something else.
    """
    try:
        leaves = [_leaf_of(entry) for entry in saved]
    except (KeyError, TypeError) as error:
        raise ValueError(f"the state does not say what was written: {error!r}") from None
    if not _in_order([leaf.key for leaf in leaves]):
        raise ValueError("the state does not say what was written: its keys contradict each other")
    return leaves


def _leaf_of(entry: Any) -> Leaf:
    key, shape = entry["key"], entry["shape"]
    names = all(isinstance(name, str) for name in key)
    lengths = all(type(length) is int and length >= 0 for length in shape)
    if not (names and lengths and isinstance(entry["column"], list) and type(entry["follows"]) is bool):
        raise TypeError(f"{entry!r} describes no key")
    return Leaf(tuple(key), _DTYPES[entry["written"]], tuple(shape))


def _in_order(keys: Sequence[Key]) -> bool:
    """Whether the keys are those of a nested dictionary, in the order in which it is walked through."""
    current, begun, left = set[Key](), set[Key](), set[Key]()
    for key in keys:
        above = {key[:length] for length in range(len(key))}
        if above & left or key in begun or key in left:
            return False
        left |= current - above | {key}
        begun |= above
        current = above
    return True


def check_same(schema: Schema, saved: Any) -> None:
    """Check that rows are stored in the same way, but for observations that are stored once.

    Args:
        schema: of a storage.
        saved: :func:`described`, of another.

    Raises:
        ValueError: they are not; the text names the first key that differs, and both ways.
    """
    written_leaves(saved)
    own, other = ({tuple(e["key"]): _unshared(e) for e in entries} for entries in (described(schema), saved))
    for key in [*own, *(key for key in other if key not in own)]:
        if own.get(key) != other.get(key):
            raise ValueError(
                f"the rows are stored in another way: {as_written(key)!r} {_told(other.get(key))} there, "
                f"{_told(own.get(key))} in this storage. Give the storage the same dtypes"
            )


def _unshared(entry: dict[str, Any]) -> dict[str, Any]:
    """The description of a key, if no column were shared."""
    column = entry.get("column")
    if entry.get("follows") is not True or not isinstance(column, list):
        return entry
    return {**entry, "column": [NEXT_KEY, *column], "follows": False}


def _numbers(codec: dict[str, Any]) -> str:
    return " and ".join(f"{name} {number}" for name, number in codec.items())


def _told(entry: dict[str, Any] | None) -> str:
    if entry is None:
        return "is missing"
    text = f"is {entry['written']} of shape {entry['shape']}, stored as {entry.get('stored')}"
    numbers = {name: entry.get(name) for name in CodecNumbers._fields}
    if numbers != CodecNumbers()._asdict():
        text += f" with {_numbers(numbers)}"
    return text if entry.get("column") == entry["key"] else f"{text} in {entry.get('column')}"


_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
