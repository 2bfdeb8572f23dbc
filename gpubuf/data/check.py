"""Looks at the rows of a buffer for what goes wrong in practice: :meth:`gpubuf.data.ReplayBuffer.check`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gpubuf.data.samplers.row_order import turns_in
from gpubuf.data.storage.schema import NEXT_KEY, continued_keys
from gpubuf.data.storage.storage import TensorStorage
from gpubuf.terminal import aligned

#: Bytes of rows that are read at a time.
CHUNK_BYTES = 1 << 26
#: Rows that are named where many are wrong.
_NAMED = 3
#: The share of rows that must continue along the other dimension.
_ENOUGH = 0.9
#: The share of rows of a flag that must lead to a reset's observation: single ones may do so by chance.
_RESETS = 0.5
FLAGS = ("done", "terminated", "truncated")


@dataclass
class Column:
    """What was found of a key.

    Attributes:
        key: nested ones joined by dots.
        shape, dtype: of a row.
        lowest, highest: of all finite elements (of the parts of complex ones); NaN if there are none.
        not_finite: rows with NaN or infinity.
        constant: whether all rows are alike.
    """

    key: str
    shape: tuple[int, ...]
    dtype: str
    lowest: float
    highest: float
    not_finite: int
    constant: bool


@dataclass(frozen=True)
class Finding:
    """Something that should be looked at.

    Attributes:
        text: what it is, and what to do.
        rows: flat positions of the first rows that show it.
    """

    text: str
    rows: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.text} (rows {', '.join(map(str, self.rows))})" if self.rows else self.text


@dataclass
class Report:
    """What :meth:`ReplayBuffer.check` found. ``print`` shows it to people; :meth:`as_dict` is for programs.

    Attributes:
        rows, envs: stored rows, and environments side by side.
        columns: of each key.
        rates: share of rows with each flag.
        compared, broken: rows whose next observation was compared with the observation of the next row, and those that
            differ, though no flag ends the trajectory there.
        resets: for each flag the share of its rows whose next observation is the one that the next row begins with:
            that of a reset.
        lengths, returns: of all episodes that are stored from their first to their last row, int64 and float64 ``[N]``
            on the CPU. Returns are undiscounted sums of ``("next", "reward")``; zeros without rewards.
        findings: the worst first; empty where nothing is wrong.
    """

    rows: int
    envs: int
    columns: list[Column] = field(default_factory=list)
    rates: dict[str, float] = field(default_factory=dict)
    compared: int = 0
    broken: int = 0
    resets: dict[str, float] = field(default_factory=dict)
    lengths: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64, device="cpu"))
    returns: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64, device="cpu"))
    findings: list[Finding] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Everything as numbers, texts, lists and dicts."""
        found = dataclasses.asdict(self)
        return {**found, "lengths": self.lengths.tolist(), "returns": self.returns.tolist()}

    def __str__(self) -> str:
        environments = "" if self.envs == 1 else f" of {self.envs} environments"
        lines = [f"{self.rows:,} rows{environments}", ""]
        cells = [["key", "shape", "dtype", "lowest", "highest"]]
        for column in self.columns:
            shape = "x".join(map(str, column.shape)) or "-"
            cells.append([column.key, shape, column.dtype, f"{column.lowest:.4g}", f"{column.highest:.4g}"])
        lines += [aligned(cells), ""]
        lines += [f"{name}: {rate:.2%} of rows" for name, rate in self.rates.items()]
        if self.compared:
            lines.append(f"continued by the next row: {1 - self.broken / self.compared:.2%} of {self.compared:,}")
        if len(self.lengths):
            for name, values in (("length", self.lengths.double()), ("return", self.returns)):
                middle = f"{values.min():.4g} to {values.max():.4g}, median {values.median():.4g}"
                lines.append(f"{len(values):,} whole episodes, {name} {middle}")
        lines.append("")
        lines += [f"- {finding}" for finding in self.findings] or ["Nothing looks wrong."]
        return "\n".join(lines)


def check(storage: TensorStorage) -> Report:
    """The report on all rows of a storage, oldest first. Reads them in chunks, and synchronises.

    Raises:
        TypeError: the rows are no tensors.
    """
    if storage.takes_objects:
        raise TypeError(f"check() looks at tensors, and a {type(storage).__name__} holds any objects")
    if not storage.initialized or not len(storage):
        return Report(len(storage), 1, findings=[Finding("nothing is stored")])
    looked = _Look(storage)
    for positions, rows in _chunks(storage):
        looked.at(positions, rows)
    if looked.mostly_broken and looked.envs == 1:
        looked.turns = _advice(turns_in(storage), storage.ndim)
    return looked.report()


def _advice(envs: int | None, ndim: int) -> str | None:
    """What to do where ``envs`` environments take turns in a storage of one."""
    if envs is None:
        return None
    if ndim > 1:
        return (
            f"the rows of {envs} environments take turns along the dimension of time: write [{envs}, steps], or give "
            "the buffer dim_extend=0"
        )
    return (
        f"the rows of {envs} environments take turns, and slices and n-step returns would mix them: store them in two "
        f"dimensions, LazyTensorStorage(..., ndim=2), and write [{envs}, steps]"
    )


def _chunks(storage: TensorStorage) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """(flat positions ``[C, E]``, values of each key ``[C, E, elements of a row]``) of the stored steps; the first step
    of a chunk is the last of the one before it.
    """
    steps, envs, layout = storage.shape[0], storage.shape[1:].numel(), storage.written_layout
    count, newest = len(storage) // envs, storage.written // envs
    chunk = max(1, CHUNK_BYTES // max(1, layout.row_bytes * envs))
    for begin in range(0, count, chunk):
        first = max(begin - 1, 0)
        step = (torch.arange(first, min(begin + chunk, count), device="cpu") + (newest - count)) % steps
        positions = step[:, None] * envs + torch.arange(envs, device="cpu")
        tensors = layout.collect(storage.get(positions.flatten().to(storage.device)), 1)
        rows = [t.reshape(len(step), envs, leaf.n_elements) for t, leaf in zip(tensors, layout.leaves, strict=True)]
        yield positions, rows


class _Look:
    """Adds up chunk after chunk."""

    def __init__(self, storage: TensorStorage) -> None:
        self.leaves = storage.written_layout.leaves
        self.place = {leaf.key: i for i, leaf in enumerate(self.leaves)}
        self.rows, self.envs = len(storage), storage.shape[1:].numel()
        keys = continued_keys(self.leaves)
        self.pairs = [(self.place[NEXT_KEY, *key], self.place[key]) for key in keys]
        nothing = torch.tensor([torch.inf, -torch.inf], dtype=torch.float64, device=storage.device)
        self.bounds = [(nothing[0], nothing[1])] * len(self.leaves)
        self.alike = [torch.tensor(True, device=storage.device)] * len(self.leaves)
        self.first: list[Tensor] = []
        self.not_finite = [0] * len(self.leaves)
        self.flags = dict.fromkeys((name for name in FLAGS if self._flag(name) is not None), 0)
        self.compared = self.broken = 0
        # Of each flag: rows that have it and a row after them, and those whose next observation is that row's.
        self.followed, self.resets = dict.fromkeys(self.flags, 0), dict.fromkeys(self.flags, 0)
        self.named: dict[str, list[int]] = {}
        self.turns: str | None = None
        # Of each environment: steps and rewards so far, and those at its last end; -1 before the first.
        self.steps = 0
        self.sums = torch.zeros(self.envs, dtype=torch.float64, device="cpu")
        self.ended = (
            torch.full((self.envs,), -1, device="cpu"),
            torch.zeros(self.envs, dtype=torch.float64, device="cpu"),
        )
        self.marks = storage.marks.rows
        self.episodes: list[tuple[Tensor, Tensor]] = []

    @property
    def mostly_broken(self) -> bool:
        """Whether most rows are not continued by the next one."""
        return self.broken > 0.5 * self.compared

    def _flag(self, name: str) -> int | None:
        found: int | None = self.place.get((NEXT_KEY, name), self.place.get((name,)))
        return found

    def at(self, positions: Tensor, rows: list[Tensor]) -> None:
        # The first step of all chunks but the first was looked at already.
        new = 0 if not self.steps else 1
        self._columns(positions[new:], [values[new:] for values in rows])
        flags = {name: rows[self._flag(name) or 0].bool().any(-1) for name in self.flags}
        for name, flag in flags.items():
            self.flags[name] += int(flag[new:].sum())
        done = next((flags[name] for name in FLAGS if name in flags), None)
        if done is not None:
            for name in FLAGS[1:]:
                # A row that is over must be done.
                if name in flags and "done" in flags:
                    self._name("done", positions[new:], (flags[name] & ~done)[new:].cpu())
        else:
            done = torch.zeros(positions.shape, dtype=torch.bool, device=rows[0].device)
        # Trajectories end at marks, which are no ends of whole episodes.
        over = done if self.marks is None else done | (self.marks[positions.to(self.marks.device)] != 0)
        self._continuity(positions, rows, over, flags)
        self._episodes(rows, done, over, new)
        self.steps += len(positions) - new

    def _name(self, what: str, positions: Tensor, wrong: Tensor) -> int:
        """Keep the first rows that are wrong. Returns how many are."""
        found = positions[wrong]
        named = self.named.setdefault(what, [])
        named += found[: _NAMED - len(named)].tolist()
        return len(found)

    def _columns(self, positions: Tensor, rows: list[Tensor]) -> None:
        if not self.steps:
            self.first = [values[0, 0] for values in rows]
        for i, values in enumerate(rows):
            if not values.numel():
                continue
            self.alike[i] = self.alike[i] & (values == self.first[i]).all()
            if values.is_complex():
                values = torch.view_as_real(values).flatten(-2)
            # Images stay as small as they are. Not all dtypes have a minimum.
            if values.dtype not in (torch.bool, torch.uint8):
                values = values.double()
                finite = values.isfinite()
                self.not_finite[i] += self._name(f"finite {i}", positions, ~finite.all(-1).cpu())
                low, high = values.where(finite, torch.inf).amin(), values.where(finite, -torch.inf).amax()
            else:
                low, high = values.amin().double(), values.amax().double()
            self.bounds[i] = low.minimum(self.bounds[i][0]), high.maximum(self.bounds[i][1])

    def _continuity(self, positions: Tensor, rows: list[Tensor], over: Tensor, flags: dict[str, Tensor]) -> None:
        if not self.pairs or len(positions) < 2:
            return

        def leads(lag: int, env: int = 0) -> Tensor:
            """Whether the next observations are the observations of the row so far on."""
            same = torch.ones_like(over[: len(over) - lag, : self.envs - env])
            for coming, root in self.pairs:
                one = rows[coming][: len(over) - lag, : self.envs - env]
                other = rows[root][lag:, env:]
                same &= ((one == other) | ((one != one) & (other != other))).all(-1)
            return same

        first, following, open_rows = self.compared == 0, leads(1), ~over[:-1]
        self.compared += int(open_rows.sum())
        self.broken += self._name("broken", positions[:-1], (open_rows & ~following).cpu())
        # Where the observation of the row itself does not change, the one of a reset can't be told from it.
        reset = following & ~leads(0)[:-1]
        for name, flag in flags.items():
            self.followed[name] += int(flag[:-1].sum())
            self.resets[name] += self._name(f"reset {name}", positions[:-1], (flag[:-1] & reset).cpu())
        # Rows of several environments are compared with those beside them at once: they are here.
        beside = first and self.mostly_broken and self.envs > 1
        if beside and (leads(0, 1) | over[:, :-1]).double().mean() >= _ENOUGH:
            self.turns = (
                "steps follow each other along the second dimension, [T, E], which is that of environments: write "
                "[envs, steps], or give the buffer dim_extend=0"
            )

    def _episodes(self, rows: list[Tensor], done: Tensor, over: Tensor, new: int) -> None:
        done, over = done[new:].cpu(), over[new:].cpu()
        reward = self.place.get((NEXT_KEY, "reward"), self.place.get(("reward",)))
        if reward is None:
            sums = self.sums.expand(len(over), -1)
        else:
            sums = self.sums + rows[reward][new:].double().sum(-1).cpu().cumsum(0)
        env, step = over.T.nonzero(as_tuple=True)
        count, total = self.steps + step + 1, sums[step, env]
        # Ends of an environment follow each other; before its first one here lies the last one of earlier chunks.
        same = torch.zeros(len(env), dtype=torch.bool, device="cpu")
        same[1:] = env[1:] == env[:-1]
        count_before = torch.where(same, count.roll(1), self.ended[0][env])
        total_before = torch.where(same, total.roll(1), self.ended[1][env])
        whole = (count_before >= 0) & done[step, env]
        self.episodes.append(((count - count_before)[whole], (total - total_before)[whole]))
        last = ~torch.cat([same[1:], same.new_zeros(1)])[: len(env)]
        self.ended[0][env[last]], self.ended[1][env[last]] = count[last], total[last]
        if len(sums):
            self.sums = sums[-1].clone()

    def report(self) -> Report:
        """What was found, and what of it is wrong."""
        columns = list[Column]()
        for i, leaf in enumerate(self.leaves):
            low, high = map(float, self.bounds[i])
            if low > high:
                low = high = torch.nan
            constant = bool(self.alike[i]) and self.rows > 1
            key, dtype = ".".join(leaf.key) or "row", str(leaf.dtype).removeprefix("torch.")
            columns.append(Column(key, tuple(leaf.shape), dtype, low, high, self.not_finite[i], constant))
        lengths, returns = (torch.cat(parts) for parts in zip(*self.episodes, strict=True))
        rates = {name: count / self.rows for name, count in self.flags.items()}
        resets = {name: count / max(self.followed[name], 1) for name, count in self.resets.items()}
        found = Report(self.rows, self.envs, columns, rates, self.compared, self.broken, resets, lengths, returns)
        found.findings = list(self._findings(found))
        return found

    def _findings(self, found: Report) -> Iterator[Finding]:
        for i, column in enumerate(found.columns):
            if column.not_finite:
                text = f"{column.key}: {column.not_finite:,} rows have NaN or infinity, and one can end a training"
                yield Finding(text, self._rows(f"finite {i}"))
        if self.turns is not None:
            yield Finding(self.turns)
        elif found.broken:
            share = found.broken / max(found.compared, 1)
            yield Finding(
                f"{found.broken:,} rows ({share:.1%}) lead to another observation than the next row begins with, and "
                "no flag ends the episode there: store the last observation of an episode, not the first of the next, "
                "or call buffer.end_trajectories() where an episode is left",
                self._rows("broken"),
            )
        # A row that is truncated alone tells most: its value is that of its next observation.
        name = next((name for name in reversed(FLAGS) if found.resets.get(name, 0) >= _RESETS), None)
        if name is not None:
            yield Finding(
                f"{found.resets[name]:.1%} of the rows that are {name} have the first observation of the next episode "
                "as their next one: store the last observation of the episode, which Gymnasium's vector environments "
                'give as info["final_obs"]',
                self._rows(f"reset {name}"),
            )
        if self.named.get("done"):
            text = "rows are terminated or truncated, but not done: done must be true where one of them is"
            yield Finding(text, self._rows("done"))
        if not self.flags:
            yield Finding("no key says where episodes end: store done, terminated and truncated under next")
        elif not any(self.flags.values()):
            yield Finding("no episode ends: is done stored, and true at the last step?")
        elif "done" in self.flags and "terminated" not in self.flags:
            yield Finding("terminated is not stored: losses take done for it, also where a time limit cut the episode")
        for column in found.columns:
            if column.constant and not column.key.endswith(FLAGS):
                yield Finding(f"{column.key} is the same in all rows")
            if column.dtype == "float64":
                yield Finding(f"{column.key} is float64, twice the memory of float32: is that meant?")
            scaled = column.dtype.startswith(("float", "bfloat")) and column.lowest >= 0 and column.highest <= 1
            for other in found.columns if scaled and column.shape else ():
                if other.dtype == "uint8" and other.shape == column.shape and other.highest > 1:
                    text = f"{other.key} is uint8 of up to {other.highest:.0f}, and {column.key} lies in [0, 1]"
                    yield Finding(f"{text}: is one of them scaled, and the other not?")

    def _rows(self, what: str) -> tuple[int, ...]:
        return tuple(self.named.get(what, ()))
