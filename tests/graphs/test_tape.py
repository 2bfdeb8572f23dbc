"""Steps of random operations: a replay has the bits of the step, whatever is computed where."""

import operator
from array import array

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gpubuf import capture
from gpubuf.kernels.tape import DEPTH, POSITIVE, _records
from gpubuf.kernels.tape import WIDTH as TILE_WIDTH
from gpubuf.tape import Tape

ROWS, WIDTH = 6, 5


def _times(x: Tensor, rows: slice) -> Tensor:
    return x * x[rows]


def _long(x: Tensor, c: dict[str, Tensor], nets: int | None = None) -> Tensor:
    square = (c["tall"] * x[:1]) @ c["tall"].t()
    squares = square if nets is None else square.expand(nets, -1, -1)
    return (squares @ square.t() if nets is None else torch.bmm(squares, squares.mT)[-1])[:ROWS, :WIDTH] * x


def _shifted(x: Tensor) -> Tensor:
    x[:, :2].add_(1)
    x[1:4, 2:].mul_(2)
    return x


#: Operations of one tensor ``[ROWS, WIDTH]`` that return another. ``c`` are constants, some of them written to.
ONE = {
    "relu": lambda x, c: x.relu(),
    "in place": lambda x, c: x.clone().relu_().add_(1).mul_(x).sub_(x),
    "numbers": lambda x, c: (x + 2) * 0.3 - 1,
    "times a row": lambda x, c: x * c["row"],
    "plus a column": lambda x, c: c["column"] + x,
    "minus one number": lambda x, c: x - c["number"],
    "outer": lambda x, c: x[:, :1] * c["row"],
    "product": lambda x, c: x @ c["square"],
    "transposed product": lambda x, c: x @ c["square"].t() + c["row"],
    "one column": lambda x, c: torch.addmm(c["number"], x, c["row"].t()) * x,
    "inner one": lambda x, c: torch.addmm(x, x[:, 1:2], c["row"]),
    "gram": lambda x, c: x @ (x.t() @ x),
    "nets": lambda x, c: torch.baddbmm(c["biases"], x.expand(3, -1, -1), c["nets"]).sum(0),
    "nets of one column": lambda x, c: torch.bmm(x.expand(3, -1, -1), c["nets"][:, :, :1])[1] * x,
    "few columns": lambda x, c: (c["tall"] @ c["tall"].t())[:ROWS] @ c["tall"] * x,
    "gradient of a weight": lambda x, c: (c["tall"].t() @ (c["tall"] @ c["square"]))[:1] * x,
    "gradient of a wide weight": lambda x, c: ((c["tall"] @ c["square"]).t() @ c["tall"][:, :3])[:, 0] * x,
    "long product": _long,
    "long products": lambda x, c: _long(x, c, 3),
    "joined": lambda x, c: torch.cat([x[:, 3:], x[:, :3]], -1),
    "stacked": lambda x, c: torch.stack([x[0], x[2], x[1], x[3], x[5], x[4]]),
    "turned": lambda x, c: (x + 1).t().contiguous().t() + x,
    "times its own row": lambda x, c: _times(x + 1, slice(0, 1)),
    "times a first row": lambda x, c: (x + 1)[:1] * x,
    "a layer": lambda x, c: torch.addmm(c["row"], x, c["square"]).relu_(),
    "layers of nets": lambda x, c: torch.baddbmm(c["biases"], x.expand(3, -1, -1), c["nets"]).relu_()[1],
    "sums of few columns": lambda x, c: (c["tall"][:, :4] * x[:1, :4]).sum(0, keepdim=True)[:, 1:2] * x,
    "sums of one column": lambda x, c: (c["tall"][:, :1] * x[:1, :1]).sum(0, keepdim=True) * x,
    "a part in place": lambda x, c: _shifted(x.clone()),
    "other dtype": lambda x, c: ((x + 1).view(torch.int32) & 0x7FFFFFFF).view(torch.float32),
    "a part for PyTorch": lambda x, c: torch.cat([(x + 1)[2:].tanh(), x[:2]]),
    "a constant of another shape": lambda x, c: x + torch.ops.aten._unsafe_view(c["square"], [25])[3:8].tanh(),
    "no inner elements": lambda x, c: torch.addmm(x, x[:, :0], c["biases"].view(1, 15)[:0, :5]),
    "a copy and a part": lambda x, c: operator.mul(*torch.ops.aten.native_dropout(x + 1, 0.5, False)) + x,
    "whole numbers beside": lambda x, c: torch.cat([x[:3], torch.ones(3, WIDTH, dtype=torch.int64)]),
    "overlapping": lambda x, c: torch.cat([x[1:], x[:1]]) + x.roll(1, 0),
    "filled": lambda x, c: torch.zeros_like(x).add_(x) + torch.ones_like(x),
    "PyTorch's own": lambda x, c: x.tanh().softmax(-1),
    "of a view of a result": lambda x, c: x.exp().t()[1:4].t() @ c["square"][:3],
    "drawn": lambda x, c: x + torch.randn(ROWS, WIDTH),
    "counted": lambda x, c: x + c["count"].add_(1),
    "double": lambda x, c: (x.double() * 2).float(),
    "not a number": lambda x, c: x.relu() + torch.where(x > 9, torch.nan, x),
}
TWO = {
    "plus": operator.add,
    "minus": operator.sub,
    "times": operator.mul,
    "gradient of relu": lambda x, y: torch.ops.aten.threshold_backward(x, y, 0),
    "product": lambda x, y: x @ (y.t() @ x),
    "scaled": lambda x, y: torch.add(x, y, alpha=0.5),
}
STEP = st.one_of(
    st.tuples(st.sampled_from(sorted(ONE)), st.integers(0, 9)),
    st.tuples(st.sampled_from(sorted(TWO)), st.integers(0, 9), st.integers(0, 9)),
)


def constants() -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(1)
    sizes = {"row": (1, WIDTH), "column": (ROWS, 1), "number": (), "square": (WIDTH, WIDTH)}
    sizes |= {"nets": (3, WIDTH, WIDTH), "biases": (3, 1, WIDTH), "count": (1,), "tall": (48, WIDTH)}
    return {name: torch.randn(size, generator=drawn) for name, size in sizes.items()}


def run(steps: list[tuple], returned: list[int], on_cpu: bool) -> list[Tensor]:
    own = constants()

    def step(x: Tensor) -> list[Tensor]:
        found = [x]
        for name, *of in steps:
            given_to = [found[i % len(found)] for i in of]
            found.append(TWO[name](*given_to) if len(of) == 2 else ONE[name](*given_to, own))
            # Large numbers would overflow, and hide what comes later.
            found[-1] = found[-1] * 0.1
        return [found[i % len(found)] for i in (*returned, -1)]

    torch.manual_seed(0)
    taken, inputs = capture(step, warmup=1, on_cpu=on_cpu, device=None if on_cpu else "cpu"), torch.Generator()
    inputs.manual_seed(2)
    return [each.clone() for _ in range(4) for each in taken(torch.randn(ROWS, WIDTH, generator=inputs))] + [
        own["count"]
    ]


#: PyTorch multiplies small batches of matrices without BLAS: some processors round as our own loop does.
WITHOUT_BLAS = {"nets", "nets of one column", "layers of nets"}
#: What is left to PyTorch.
CALLED = {"overlapping": 1, "PyTorch's own": 2, "of a view of a result": 1}
CALLED |= {"drawn": 1, "double": 3, "not a number": 3, "a constant of another shape": 3, "a copy and a part": 2}
CALLED |= {"a part for PyTorch": 1, "no inner elements": 1, "other dtype": 1, "whole numbers beside": 2}


@given(st.lists(STEP, min_size=1, max_size=14), st.lists(st.integers(0, 14), max_size=2))
@settings(deadline=None, max_examples=60)
def test_replays_of_random_steps_have_their_bits(steps, returned):
    expected, found = (run(steps, returned, on_cpu) for on_cpu in (False, True))
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one.view(torch.int32), other.view(torch.int32))


@pytest.mark.parametrize("name", sorted(ONE))
def test_each_operation_has_its_bits(name):
    test_replays_of_random_steps_have_their_bits.hypothesis.inner_test([(name, 0), (name, 1)], [1])


@pytest.mark.parametrize("name", sorted(ONE))
def test_operations_that_records_can_do_are_records(name):
    own, tape = constants(), Tape()
    x = torch.randn(ROWS, WIDTH) + 0
    with tape:
        ONE[name](x, own)
    tape.finish()
    called = tape.source.count(" = kept_")
    assert called == CALLED.get(name, 0) or (name in WITHOUT_BLAS and called == 1), tape.source


def carry_out(records: list[_records.Record]) -> Tensor:
    """Returns what else they have written to, of what held 255 everywhere."""
    numbers = _records.table([(fields, [(0, each.data_ptr()) for each in tensors]) for fields, tensors in records])
    room, slots = _records.room_for([fields for fields, _ in records]).fill_(255), array("q", [0])
    _records.run(numbers.buffer_info()[0], 0, len(records), slots.buffer_info()[0], room.data_ptr(), *_records.blas())
    return room


@pytest.mark.parametrize("nets", [(), (3,)])
@pytest.mark.parametrize("columns", [1, 7])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_each_way_to_multiply(nets, columns, turned, biased):
    """Which of them has PyTorch's bits depends on the processor."""
    x, y = torch.randn(*nets, 6, 12), torch.randn(*nets, columns, 12).mT
    y, bias = y if turned else y.contiguous(), torch.randn(*nets, 1, columns) if biased else None
    expected, out = x @ y + (0 if bias is None else bias), torch.empty(*nets, 6, columns)
    ways = [way for way in _records._products(out, x, y, bias) if way]
    assert ways
    for way in ways:
        out.fill_(torch.nan)
        carry_out(way)
        torch.testing.assert_close(out, expected)


SIZES = st.tuples(st.integers(4, 40), st.integers(1, 300), st.integers(16, 70))


def matrix(drawn: torch.Generator, shape: tuple[int, ...], turned: bool) -> Tensor:
    """Numbers whose rows lie side by side, or whose columns do."""
    *many, down, right = shape
    return torch.randn(*many, right, down, generator=drawn).mT if turned else torch.randn(shape, generator=drawn)


def tiled(out: Tensor, x: Tensor, y: Tensor, bias: Tensor | None, positive: bool) -> tuple[Tensor, bool]:
    """A product by tiles, in ``out``; and whether it was one of copies of the factors."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_records, "amd_with_avx512", lambda: "znver4")
        (record,) = _records._tiled(out, x, y, bias)
    room = carry_out([record._replace(fields={**record.fields, POSITIVE: int(positive)})])
    return out, bool((room[4 * DEPTH * TILE_WIDTH :] != 255).any())


@given(SIZES, st.sampled_from([None, 2]), st.booleans(), st.booleans(), st.booleans(), st.booleans())
@settings(deadline=None, max_examples=80)
def test_tiled_products(sizes, nets, turned_x, turned_y, biased, positive):
    """As in float64, whatever lies how; nothing else is written, and numbers that are none stay."""
    rows, inner, columns = sizes
    drawn, many = torch.Generator().manual_seed(sum(sizes)), () if nets is None else (nets,)
    x = matrix(drawn, (*many, rows, inner), turned_x)
    y = matrix(drawn, (*many, inner, columns), turned_y)
    x[..., 1, 0] = torch.nan
    bias = torch.randn(*many, 1, columns, generator=drawn) if biased else None
    memory = torch.full((2 + (nets or 1) * rows * columns,), 7.0)
    out, _ = tiled(memory[1:-1].view(*many, rows, columns), x, y, bias, positive)
    expected = x.double() @ y.double() + (0 if bias is None else bias)
    expected = expected.relu() if positive else expected
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-4, equal_nan=True)
    assert memory[0] == memory[-1] == 7


ZEROS = st.sampled_from([0.0, 0.05, 0.5, 0.95])
TURNED = st.tuples(st.booleans(), st.booleans())
INFINITE = st.sampled_from([None, torch.inf, -torch.inf, torch.nan])


@given(SIZES, ZEROS, ZEROS, ZEROS | st.just(1), ZEROS, st.sampled_from([0, 1, 150]), TURNED, INFINITE)
@settings(deadline=None, max_examples=200)
def test_tiled_products_without_what_is_zero(sizes, of_rows, of_x, of_y, of_columns, first, turned, infinite):
    """The bits are those of the whole product. What is infinite isn't left out, since 0 times that is no number."""
    rows, inner, columns = sizes
    drawn = torch.Generator().manual_seed(sum(sizes))
    x, y = matrix(drawn, (2, rows, inner), turned[0]), matrix(drawn, (2, inner, columns), turned[1])

    def some(share: float, n: int) -> Tensor:
        return torch.rand(n, generator=drawn) < share

    x[0, some(of_rows, rows)] = 0
    x[0, :, some(of_x, inner)] = -0.0
    x[0, :, :first] = 0
    # Of all those that x has, too.
    y[0, (x[0] != 0).any(0) if of_y == 1 else some(of_y, inner)] = 0
    y[0, :, some(of_columns, columns)] = 0
    if infinite is not None:
        y[0, 0, 0] = infinite
    whole, memory = torch.empty(2, rows, columns), torch.full((2 + 2 * rows * columns,), 7.0)
    # What is added keeps zeros in.
    tiled(whole, x, y, torch.zeros(2, 1, columns), False)
    out, copied = tiled(memory[1:-1].view_as(whole), x, y, None, False)
    torch.testing.assert_close(out, whole, rtol=0, atol=0, equal_nan=True)
    kept = [(x[0] != 0).any(1), (x[0] != 0).any(0) & (y[0] != 0).any(1), (y[0] != 0).any(0)]
    some_are_left_out = any((~each).sum() > len(each) // 8 for each in kept)
    if all(each.any() for each in kept):
        assert copied == (infinite is None and some_are_left_out)
    assert memory[0] == memory[-1] == 7
