"""Running statistics against their definition in plain Python, through both backends."""

import math

import pytest
import torch
from torch import Tensor

from gpubuf.kernels import moments
from gpubuf.kernels.moments import COUNT, M2, MEAN, Rule, new_state
from gpubuf.kernels.moments._launch import plan_update
from tests.kernels.reference.moments import factors
from tests.kernels.reference.moments import returns as reference_returns
from tests.kernels.reference.moments import update as reference_update

pytestmark = pytest.mark.usefixtures("backend")

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bool,
]


def rule_of(**given: float) -> Tensor:
    return torch.tensor(Rule(**{"eps": 1e-8, **given}), dtype=torch.float64)


def numbers(n: int, elements: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(n, elements, generator=g, dtype=torch.float64) * 7 + 100).to(dtype)


def close(a: Tensor, b: Tensor | list, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(a, torch.as_tensor(b, dtype=a.dtype), rtol=tolerance, atol=tolerance)


def check(parts: list[Tensor], elements: int, rule: Rule) -> Tensor:
    """Give the parts to both, one after the other. The state at the end."""
    state, mean, factor, tickets = new_state(elements, "cpu")
    expected = state.tolist()
    for part in parts:
        moments.update(state, part, mean, factor, torch.tensor(rule, dtype=torch.float64), tickets)
        expected = reference_update(part.double().tolist(), expected, rule)
        close(state, expected, 1e-9)
        close(mean, expected[MEAN], 1e-6)
        close(factor, factors(expected, rule), 1e-6)
    return state


@pytest.mark.parametrize("elements", [1, 3, 32, 33, 70])
@pytest.mark.parametrize("sizes", [(1,), (0, 1, 2), (64, 65, 3)])
def test_update(sizes, elements):
    check(list(numbers(sum(sizes), elements).split(list(sizes))), elements, Rule(1e-8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype):
    check([numbers(5, 3, dtype), numbers(70, 3, dtype, 1)], 3, Rule(1e-8, peak_at=5.0))


def test_strided_rows():
    check([numbers(9, 8)[:, ::2], numbers(4, 9).T], 4, Rule(1e-8))


@pytest.mark.parametrize(("n", "elements"), [(640, 17), (1300, 33), (2561, 3), (1 << 14, 1)])
def test_rows_of_several_programs(n, elements):
    """Some of them find only numbers that are not finite; twice the same bits, whichever program is the last."""
    rows = numbers(n, elements)
    rows[: n // 2, 0] = math.nan
    rows[n // 3, -1] = -math.inf
    plan = plan_update(n, elements)
    assert plan.parts > 3
    first = check([rows, rows[:5]], elements, Rule(1e-8))
    assert torch.equal(first, check([rows, rows[:5]], elements, Rule(1e-8)))


def test_parts_of_different_sizes_and_levels():
    """What is between the parts counts as what is in them, and is no less exact."""
    rows = numbers(1500, 16) * 1e-3 + 1e5 * torch.arange(1500, dtype=torch.float64)[:, None].div(
        128, rounding_mode="floor"
    )
    state, mean, factor, tickets = new_state(16, "cpu")
    for _ in range(2):
        moments.update(state, rows, mean, factor, rule_of(), tickets)
        assert not tickets.any()
    variance, expected = torch.var_mean(torch.cat((rows, rows)), 0, correction=0)
    close(state[MEAN], expected, 1e-14)
    close(state[M2] / state[COUNT], variance, 1e-13)


def test_numbers_that_are_not_finite():
    """Case 44: they are left out, each for its own element."""
    rows = torch.tensor([[1.0, math.nan], [3.0, 5.0], [math.inf, 7.0], [5.0, -math.inf]])
    state = check([*rows.split(2), torch.full((3, 2), math.nan)], 2, Rule(1e-8))
    assert state[COUNT].tolist() == [3, 2]
    assert state[MEAN].tolist() == [3, 6]


def test_rules():
    parts = list(numbers(20, 3).split(4))
    assert check(parts, 3, Rule(1e-8, until=10))[COUNT].tolist() == [12] * 3
    assert not check(parts, 3, Rule(1e-8, active=0.0)).any()
    check([part * 0 + 3 for part in parts], 3, Rule(1e-8, peak_at=0.5))


def test_a_count_beyond_what_a_float_can_count():
    """Case 44: the count stops, and nothing becomes infinite or NaN."""
    state, mean, factor, tickets = new_state(1, "cpu")
    state.copy_(torch.tensor([[2.0**53], [4.0], [2.0**53], [9.0]]))
    for _ in range(3):
        moments.update(state, torch.full((1, 1), 1000.0), mean, factor, rule_of(), tickets)
    assert state[COUNT].item() == 2.0**53
    close(mean, [4.0])
    close(factor, [1.0], 1e-6)


def test_no_rows_compute_mean_and_factor_anew():
    state, mean, factor, tickets = new_state(2, "cpu")
    state.copy_(torch.tensor([[4.0, 0.0], [5.0, 0.0], [16.0, 0.0], [7.0, 0.0]]))
    moments.update(state, torch.empty(0, 2), mean, factor, rule_of(), tickets)
    assert mean.tolist() == [5, 0]
    close(factor, [0.5, 1.0], 1e-6)
    moments.update(state, torch.empty(0, 2), mean, factor, rule_of(peak_at=0.7), tickets)
    close(factor, [0.1, 1.0], 1e-6)


@pytest.mark.parametrize(("steps", "envs", "elements"), [(1, 1, 1), (7, 3, 1), (40, 1, 2), (5, 65, 2), (3, 200, 1)])
def test_returns(steps, envs, elements):
    g = torch.Generator().manual_seed(steps)
    rewards = torch.randn(steps, envs, elements, generator=g)
    rewards[steps // 2, 0, 0] = math.nan
    ends = torch.rand(steps, envs, generator=g) < 0.3
    before = torch.randn(envs, elements, generator=g, dtype=torch.float64)
    start = before.clone()
    out = moments.returns(before, rewards, ends, rule_of(gamma=0.9))
    assert out.dtype is torch.float64
    for e in range(envs):
        for j in range(elements):
            expected, after = reference_returns(rewards[:, e, j].tolist(), ends[:, e].tolist(), start[e, j].item(), 0.9)
            close(out[:, e, j], expected)
            close(before[e, j], after)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64])
def test_returns_of_other_dtypes_go_on(dtype):
    """Three calls are one."""
    rewards, ends = numbers(12, 2, dtype).unsqueeze(-1), numbers(12, 2, seed=4) > 108
    whole, parts = torch.zeros(2, 1, dtype=torch.float64), torch.zeros(2, 1, dtype=torch.float64)
    expected = moments.returns(whole, rewards, ends, rule_of(gamma=0.97))
    found = [
        moments.returns(parts, r, e, rule_of(gamma=0.97)) for r, e in zip(rewards.split(5), ends.split(5), strict=True)
    ]
    assert torch.equal(torch.cat(found), expected)
    assert torch.equal(whole, parts)


def test_no_steps_and_no_environments():
    before = torch.ones(2, 1, dtype=torch.float64)
    assert moments.returns(before, torch.empty(0, 2, 1), torch.empty(0, 2, dtype=torch.bool), rule_of()).numel() == 0
    assert before.tolist() == [[1], [1]]
    none = torch.empty(0, 1, dtype=torch.float64)
    moments.returns(none, torch.empty(3, 0, 1), torch.empty(3, 0, dtype=torch.bool), rule_of())
    state, mean, factor, tickets = new_state(0, "cpu")
    moments.update(state, torch.empty(3, 0), mean, factor, rule_of(), tickets)


def test_opcheck():
    state, mean, factor, tickets = new_state(3, "cpu")
    torch.library.opcheck(moments.update, (state, numbers(4, 3), mean, factor, rule_of(), tickets))
    before = torch.zeros(2, 1, dtype=torch.float64)
    given = (before, numbers(4, 2).unsqueeze(-1), numbers(4, 2) > 100, rule_of(gamma=0.9))
    torch.library.opcheck(moments.returns, given)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("source", torch.zeros(3)),
        ("source", torch.zeros(3, 2, dtype=torch.complex64)),
        ("state", torch.zeros(4, 3, dtype=torch.float64)),
        ("state", torch.zeros(4, 2)),
        ("mean", torch.zeros(2, dtype=torch.float64)),
        ("factor", torch.zeros(3)),
        ("rule", torch.zeros(4, dtype=torch.float64)),
        ("source", torch.zeros(3, 2, device="meta")),
    ],
)
def test_update_refuses(name, value):
    state, mean, factor, _ = new_state(2, "cpu")
    given = {
        "source": torch.zeros(3, 2),
        "state": state,
        "mean": mean,
        "factor": factor,
        "rule": rule_of(),
        name: value,
    }
    from gpubuf.kernels.moments import check_update

    with pytest.raises(ValueError, match=r"must be"):
        check_update(**given)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rewards", torch.zeros(3, 2)),
        ("rewards", torch.zeros(3, 4, 1)),
        ("ends", torch.zeros(3, 2)),
        ("ends", torch.zeros(2, 2, dtype=torch.bool)),
        ("before", torch.zeros(2, 1)),
        ("rule", torch.zeros(5)),
    ],
)
def test_returns_refuse(name, value):
    before = torch.zeros(2, 1, dtype=torch.float64)
    given = {"rewards": torch.zeros(3, 2, 1), "ends": torch.zeros(3, 2, dtype=torch.bool), "before": before}
    with pytest.raises(ValueError, match=r"must be"):
        moments.returns(**({**given, "rule": rule_of()} | {name: value}))


@pytest.mark.parametrize("n", [0, 1, 5, 600, 4096, 10**6])
@pytest.mark.parametrize("elements", [1, 7, 48, 310, 10**5])
def test_plan_covers_all_numbers(n, elements):
    plan = plan_update(n, elements)
    assert (plan.blocks - 1) * plan.block_width < elements <= plan.blocks * plan.block_width
    assert n <= plan.parts * plan.part_rows
    assert plan.parts == 1 or (plan.parts - 1) * plan.part_rows < n
    assert plan.blocks <= new_state(elements, "meta")[-1].numel()
    assert plan.block_rows * plan.block_width <= 2048


def test_plan_covers_the_device():
    """Few rows are one program for each block of elements; of many rows a program reads few at a time."""
    assert plan_update(512, 48).parts == 1
    large = plan_update(4096, 48)
    assert (large.parts, large.blocks, large.part_rows) == (32, 3, large.block_rows)
    assert 64 < plan_update(10**6, 48).parts <= 128
    assert plan_update(4096, 28224).parts == 1
