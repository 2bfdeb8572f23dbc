"""Around the rows kernels: configurations, grids, argument checks, torch.library's own checks, no host sync."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from gpubuf.kernels import config, philox, rows
from gpubuf.kernels.config import RowsConfig
from gpubuf.kernels.rows import _launch
from gpubuf.kernels.rows._launch import copying_programs, encode_arguments, padded_keys
from tests.support.fake_cuda import DataDependentOutputException, fake_cuda
from tests.support.rows_setup import ROWS, Store, assert_same

TWO_KEYS = [(torch.float32, (3,)), (torch.bool, (1,))]


class TestGrid:
    @pytest.mark.parametrize("n", [1, 64, 256, 4096, 32768, 65536])
    def test_every_tile_of_a_usual_batch_has_a_program(self, n):
        """Rows of 68, 24, 68, 4, 1 and 1 bytes, read in elements of 4, 8, 4, 4, 1 and 1: one tile a program."""
        widths, units = (68, 24, 68, 4, 1, 1), (4, 8, 4, 4, 1, 1)
        n_bytes = rows.arena_offsets(widths, n)[1]
        tile = config.rows_copy(n_bytes).tile
        tiles = sum(-(-n * width // unit // tile) for width, unit in zip(widths, units, strict=True))
        assert tiles <= copying_programs(6, n, n_bytes, tile) <= 1.05 * tiles + 7

    @pytest.mark.parametrize("n", [1, 64, 256, 4096])
    def test_images_have_no_crowd_of_idle_programs(self, n):
        n_bytes = rows.arena_offsets((28224, 28224, 8, 1), n)[1]
        tile = config.rows_copy(n_bytes).tile
        tiles = 2 * -(-n * 28224 // 16 // tile) + 2 * -(-n // tile)
        assert min(tiles, _launch.MAX_COPYING) - 2 <= copying_programs(4, n, n_bytes, tile) <= 1.05 * tiles + 4

    @pytest.mark.usefixtures("interpreter")
    @pytest.mark.parametrize("programs", [1, 2, 7])
    def test_fewer_programs_than_tiles_copy_all(self, programs, monkeypatch):
        """The number of programs is a guess: any will do. Wide and narrow keys, aligned and not."""
        types = [*ROWS, (torch.uint8, (200,)), (torch.int64, (40,))]
        store = Store(types, 50, written=50)
        index = torch.randint(-50, 50, (40,), generator=torch.Generator().manual_seed(1))
        monkeypatch.setattr(_launch, "copying_programs", lambda *_: programs)
        with config.using(rows_copy=RowsConfig(64, 4)):
            arena, _ = _launch.gather(store.table, store.ring, index, 50, store.arena_bytes(40))
            assert_same(store.cut(arena, 40), [t[index] for t in store.tensors])
            rng = philox.new_state(3, "cpu")
            arena, drawn, _ = _launch.sample(store.table, store.ring, rng, 40, 50, store.arena_bytes(40))
            assert_same(store.cut(arena, 40), [t[drawn] for t in store.tensors])
            assert rng[philox.OFFSET] == 40
            assert rng[2] == 0
            sources = [torch.cat([s, s])[3:43] for s in store.batch(40, 7)]
            at = _launch.extend(store.table, sources, store.ring, 40, 50)
            assert_same([t[at] for t in store.tensors], sources)
            assert store.counters == [90, 50, 0, 0]
            order = torch.randperm(50, generator=torch.Generator().manual_seed(2))[:40]
            _launch.write(store.table, sources, store.ring, order, 50)
            assert_same([t[order] for t in store.tensors], sources)

    def test_keys_are_padded(self):
        assert [padded_keys(n) for n in (0, 1, 32, 33, 500)] == [32, 32, 32, 64, 512]

    def test_arguments_give_triton_nothing_to_specialise_on(self):
        """Case 48: an address or a stride of 0, of an empty tensor or a broadcast one, is no 1 either."""
        values = [0, 8, 16, 2**47, 68]
        encoded = encode_arguments(values)
        assert [(e - 3) >> 1 for e in encoded] == [*values, 68, 68, 68]
        assert all(e % 16 and e != 1 for e in encoded)


class TestArguments:
    """Both backends refuse the same things, and nothing is written."""

    @pytest.fixture
    def store(self, backend):
        store = Store(TWO_KEYS, 5, written=3)
        before = store.snapshot()
        yield store
        assert_same(store.tensors, before)
        assert store.counters == [3, 3, 0, 0]

    def test_index(self, store):
        sources = store.batch(4, 1)
        for refused, error, text in (
            (torch.zeros(4), TypeError, "index must be int64, not torch.float32"),
            (torch.zeros(4, dtype=torch.int32), TypeError, "not torch.int32"),
            (torch.zeros(2, 2, dtype=torch.int64), ValueError, r"shape \[4\], not \[2, 2\]"),
            (torch.zeros(8, dtype=torch.int64)[::2], ValueError, "contiguous"),
        ):
            with pytest.raises(error, match=text):
                store.gather(refused)
            with pytest.raises(error, match=text):
                store.write(sources, refused)

    def test_sources(self, store):
        floats, bools = store.batch(2, 1)
        for refused, text in (
            ([floats], "2 keys, but there are 1 sources"),
            ([floats, bools, bools], "2 keys, but there are 3 sources"),
            ([floats, bools[:1]], r"\[1, 1\]"),
            ([floats[:0], bools], r"\[0, 3\]"),
            ([floats, bools[0, 0]], r"\[\]"),
            ([floats[0].expand(3, 3), bools], r"\[3, 3\]"),
        ):
            with pytest.raises(ValueError, match=text):
                store.extend(refused, 2)
            with pytest.raises(ValueError, match=text):
                store.write(refused, torch.tensor([1, 0]))
        with pytest.raises(ValueError, match="2 keys, but there are 0 sources"):
            store.extend([], 0)

    def test_ring_and_table(self, store):
        index = torch.tensor([0])
        size = store.arena_bytes(1)
        for table, ring, capacity, error, text in (
            (store.table.int(), store.ring, 5, TypeError, "table must be int64, not torch.int32"),
            (store.table.t().contiguous().t(), store.ring, 5, ValueError, "contiguous"),
            (store.table.flatten(), store.ring, 5, ValueError, r"shape \[2, 5\], not \[10\]"),
            (store.table, store.ring.double(), 5, TypeError, "ring must be int64, not torch.float64"),
            (store.table, store.ring[:3], 5, ValueError, r"shape \[4\], not \[3\]"),
            (store.table, store.ring.repeat(2)[::2], 5, ValueError, "contiguous"),
            (store.table, store.ring, 0, ValueError, "at least 1, but is 0"),
        ):
            with pytest.raises(error, match=text):
                rows.gather(table, ring, index, capacity, size)
            with pytest.raises(error, match=text):
                rows.sample(table, ring, philox.new_state(0, "cpu"), 1, capacity, size)
            with pytest.raises(error, match=text):
                rows.extend(table, store.batch(1, 1), ring, 1, capacity)
            with pytest.raises(error, match=text):
                rows.write(table, store.batch(1, 1), ring, index, capacity)

    def test_counts(self, store):
        with pytest.raises(ValueError, match="negative, but is -1"):
            store.extend(store.batch(1, 1), -1)
        with pytest.raises(ValueError, match="negative, but is -2"):
            rows.sample(store.table, store.ring, philox.new_state(0, "cpu"), -2, 5, 0)
        with pytest.raises(TypeError, match="random state"):
            rows.sample(store.table, store.ring, torch.zeros(3), 1, 5, 128)


def test_sizes_that_only_the_cpu_can_check():
    """On a GPU the table's values are out of the host's reach."""
    store = Store(TWO_KEYS, 5, written=3)
    before = store.snapshot()
    with pytest.raises(ValueError, match=r"an arena of 64 bytes does not fit 2 rows of \[12, 1\] bytes"):
        rows.gather(store.table, store.ring, torch.tensor([0, 1]), 5, 64)
    rng = philox.new_state(0, "cpu")
    with pytest.raises(ValueError, match="an arena of 192 bytes does not fit 2 rows"):
        rows.sample(store.table, store.ring, rng, 2, 5, 192)
    wide = [torch.zeros(2, 4), torch.zeros(2, 1, dtype=torch.bool)]
    with pytest.raises(ValueError, match=r"key 0: expected 2 rows of 12 bytes, .* shape \[2, 4\] and 32 bytes"):
        store.extend(wide, 2)
    with pytest.raises(ValueError, match="key 0: expected 2 rows of 12 bytes"):
        store.write(wide, torch.tensor([0, 1]))
    assert rng.tolist() == [0, 0, 0]
    assert_same(store.tensors, before)
    assert store.counters == [3, 3, 0, 0]


def test_rows_too_large_for_32_bits():
    with pytest.raises(ValueError, match="at most, but takes 1073741825"):
        _launch.check_row_bytes(2**30 * 3 + 3, 3)
    _launch.check_row_bytes(2**30 * 3, 3)


class TestLibrary:
    """torch.library.opcheck: schema, fake implementation, autograd registration, torch.compile with dynamic shapes."""

    # opcheck compares whole arenas, and their padding is not defined
    UNPADDED = ((torch.float32, (16,)), (torch.uint8, (64,)))

    def test_gather(self, backend):
        store = Store(self.UNPADDED, 5, written=7)
        arguments = (store.table, store.ring, torch.tensor([3, -1, 0]), 5, store.arena_bytes(3))
        torch.library.opcheck(torch.ops.gpubuf.rows_gather.default, arguments)

    def test_sample(self, backend):
        store = Store(self.UNPADDED, 5, written=7)
        arguments = (store.table, store.ring, philox.new_state(3, "cpu"), 6, 5, store.arena_bytes(6))
        torch.library.opcheck(torch.ops.gpubuf.rows_sample.default, arguments)

    def test_extend(self, backend):
        store = Store(self.UNPADDED, 5, written=7)
        arguments = (store.table, store.batch(3, 1), store.ring, 3, 5)
        torch.library.opcheck(torch.ops.gpubuf.rows_extend.default, arguments)

    def test_write(self, backend):
        store = Store(self.UNPADDED, 5, written=7)
        arguments = (store.table, store.batch(3, 1), store.ring, torch.tensor([3, -1, 0]), 5)
        torch.library.opcheck(torch.ops.gpubuf.rows_write.default, arguments)
        torch.library.opcheck(torch.ops.gpubuf.rows_write.default, (*arguments, torch.tensor([1, 1, 2])))


class TestNoSync:
    """On fake CUDA tensors, where reading a value on the host raises."""

    def test_operations(self):
        with fake_cuda():
            table = torch.zeros(2, 5, dtype=torch.int64, device="cuda")
            ring, rng = rows.new_ring("cuda"), torch.zeros(3, dtype=torch.int64, device="cuda")
            sources = [torch.zeros(4, 3, device="cuda"), torch.zeros(4, 1, dtype=torch.bool, device="cuda")]
            index = rows.extend(table, sources, ring, 4, 9)
            rows.write(table, sources, ring, index, 9)
            rows.write(table, sources, ring, index, 9, index)
            arena, generation = rows.gather(table, ring, index, 9, 128)
            batch, drawn, _ = rows.sample(table, ring, rng, 6, 9, 256)
        for x, shape, dtype in (
            (index, (4,), torch.int64),
            (arena, (128,), torch.uint8),
            (generation, (4,), torch.int64),
            (batch, (256,), torch.uint8),
            (drawn, (6,), torch.int64),
        ):
            assert (x.device.type, tuple(x.shape), x.dtype) == ("cuda", shape, dtype)

    def test_launchers(self, monkeypatch):
        """What the launchers do around their kernels; the fake implementations above never run them."""
        launched = []

        class Recorder:
            def __init__(self, name):
                self.name = name

            def __getitem__(self, grid):
                launched.append((self.name, *grid))
                return lambda *_, **__: None

        for name in ("gather", "sample", "extend", "write"):
            monkeypatch.setattr(_launch, f"rows_{name}_kernel", Recorder(name))
        # a fake tensor has no address, and an absent device no name
        monkeypatch.setattr(torch.Tensor, "data_ptr", lambda _: 4096)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "none")
        with fake_cuda():
            table = torch.zeros(130, 5, dtype=torch.int64, device="cuda")
            ring, rng = rows.new_ring("cuda"), torch.zeros(3, dtype=torch.int64, device="cuda")
            sources = [torch.zeros(4, 3, device="cuda"), torch.zeros(3, device="cuda").expand(4, 3)] * 65
            index = _launch.extend(table, sources, ring, 4, 9)
            _launch.write(table, sources, ring, index, 9)
            _launch.gather(table, ring, index, 9, 130 * 64)
            _launch.sample(table, ring, rng, 4, 9, 130 * 64)
            with pytest.raises(DataDependentOutputException):
                ring[0].item()
        # 48 bytes a key: a program for each, one for the rows, and one for each KiB of elements of 4 bytes
        assert launched == [
            ("extend", 1 + 128 + 6),
            ("extend", 2),
            ("write", 1 + 128 + 6),
            ("write", 2),
            ("gather", 1 + 130 + 8),
            ("sample", 1 + 130 + 8),
        ]

    def test_devices_must_agree(self):
        with fake_cuda():
            table = torch.zeros(1, 5, dtype=torch.int64, device="cuda")
            other = SimpleNamespace(device=torch.device("cpu"))
            with pytest.raises(ValueError, match="must be on one device, not on"):
                _launch.check_devices(table, other)


def test_duplicates_are_resolved_by_sorting():
    """CASES 11."""
    index = torch.tensor([4, 1, -2, 9, 1, 0, 4, -1, -7])
    last = _launch.last_of_duplicates(index, 6)
    # -2 is 4 and -1 is 5; 9 and -7 are out of range, equal to no other
    assert last.tolist() == [False, False, False, True, True, True, True, True, True]


@pytest.mark.usefixtures("interpreter")
def test_the_kernel_writes_winners_only(monkeypatch):
    """The interpreter's order would let the last duplicate win anyway; here another entry is told to."""
    monkeypatch.setattr(_launch, "last_of_duplicates", lambda index, capacity: torch.tensor([False, True, False]))
    store = Store(TWO_KEYS, 5)
    sources, expected = store.batch(3, 1), store.snapshot()
    for tensor, source in zip(expected, sources, strict=True):
        tensor[2] = source[1]
    _launch.write(store.table, sources, store.ring, torch.tensor([2, 2, 2]), 5)
    assert_same(store.tensors, expected)


@pytest.mark.usefixtures("interpreter")
def test_all_keys_share_one_launch():
    """The kernels are launched once for each operation, whatever the number of keys."""
    launched = []

    class Counting:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            launched.append(self.kernel)
            return self.kernel[grid]

    store = Store(ROWS, 5, written=5)
    arguments = (store.table, store.ring, torch.tensor([1]), 5, store.arena_bytes(1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_launch, "rows_gather_kernel", Counting(_launch.rows_gather_kernel))
        _launch.gather(*arguments)
    assert len(launched) == 1
