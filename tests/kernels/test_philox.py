"""Random numbers: Philox4x32-10 against the published vectors, and the same bits from both backends."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gpubuf.data.samplers.base import RandomState
from gpubuf.kernels import philox
from tests.kernels.reference import philox as reference
from tests.support.fake_cuda import fake_cuda

MASK = 0xFFFFFFFF

# (counter, key, output): the known answers of Random123, kat_vectors, "philox4x32 10".
KNOWN_ANSWERS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([MASK] * 4, [MASK] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_known_answers(counter, key, words):
    assert reference.words(counter, key) == words
    pytest.importorskip("numba")
    from gpubuf.kernels.philox._numba_kernels import philox_4x32

    assert list(map(int, philox_4x32(*map(np.uint64, counter + key)))) == words


@pytest.mark.parametrize(
    ("seed", "offset"),
    [(0, 0), (1, 7), (-1, -300), (2**63 - 5, 2**32 - 2), (-(2**63), 2**31 - 1), (2**64 - 3, 2**62)],
)
def test_uniforms_are_those_of_the_contract(backend, seed, offset):
    """Bit for bit, over word boundaries of the counter, and over several programs of the kernel."""
    n = 1100 if seed == 0 else 5
    state = philox.new_state(seed, "cpu")
    state[philox.OFFSET] = offset
    drawn = philox.uniform(state, n)
    assert drawn.dtype is torch.float64
    assert drawn.tolist() == reference.uniforms(seed, offset, n)
    assert state[philox.OFFSET] == offset + n
    assert state[philox.TICKET] == 0


def test_a_stream_goes_on_where_it_stopped(backend):
    whole, parts = RandomState(3), RandomState(3)
    assert whole.uniform(9).tolist() == [*parts.uniform(4), *parts.uniform(0), *parts.uniform(5)]


def test_what_is_refused(backend):
    state = philox.new_state(0, "cpu")
    with pytest.raises(ValueError, match="not be negative, but is -1"):
        philox.uniform(state, -1)
    with pytest.raises(TypeError, match="int64"):
        philox.uniform(state.double(), 1)
    with pytest.raises(ValueError, match=r"\[3\]"):
        philox.uniform(state[:2], 1)
    with pytest.raises(ValueError, match="contiguous"):
        philox.uniform(torch.zeros(6, dtype=torch.int64)[::2], 1)
    assert state.tolist() == [0, 0, 0]


def test_opcheck(backend):
    torch.library.opcheck(torch.ops.gpubuf.philox_uniform.default, (philox.new_state(5, "cpu"), 7))


class TestRandomState:
    def test_the_global_generator_makes_a_run_repeatable(self):
        with torch.random.fork_rng():
            torch.manual_seed(5)
            first, second = RandomState().uniform(3), RandomState().uniform(3)
            torch.manual_seed(5)
            again = RandomState().uniform(3)
        assert first.tolist() == again.tolist()
        assert first.tolist() != second.tolist()

    def test_a_generator_of_ones_own(self):
        before = torch.random.get_rng_state()
        states = [RandomState(generator=torch.Generator().manual_seed(8)).state.tolist() for _ in range(2)]
        assert states[0] == states[1]
        assert torch.equal(torch.random.get_rng_state(), before)
        with pytest.raises(ValueError, match="not both"):
            RandomState(seed=1, generator=torch.Generator())

    def test_seeding_again_is_in_place(self):
        random = RandomState(1)
        state = random.state
        first = random.uniform(4).tolist()
        assert random.manual_seed(1) is random
        assert random.state is state
        assert random.uniform(4).tolist() == first

    def test_a_restored_state_goes_on_in_place(self):
        random, other = RandomState(1), RandomState(2)
        random.uniform(5)
        saved = random.state_dict()
        due = random.uniform(4).tolist()
        state = other.state
        other.load_state_dict(saved)
        assert other.state is state
        assert other.uniform(4).tolist() == due
        with pytest.raises(TypeError, match="int64"):
            other.load_state_dict({"state": torch.zeros(3)})
        with pytest.raises(ValueError, match=r"\[3\]"):
            other.load_state_dict({"state": torch.zeros(4, dtype=torch.int64)})

    def test_moving(self):
        random = RandomState(1)
        assert random.to("cpu") is random
        assert random.to("meta").device.type == "meta"
        assert random.device.type == "cpu"
        assert repr(random) == "RandomState(device='cpu')"

    def test_no_sync(self):
        """On fake CUDA tensors, where reading a value on the host raises."""
        with fake_cuda():
            random = RandomState(device="cuda")
            drawn = random.uniform(6)
            random.manual_seed(3)
            random.load_state_dict(random.state_dict())
        assert (drawn.device.type, drawn.dtype, tuple(drawn.shape)) == ("cuda", torch.float64, (6,))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_draws_the_bits_of_the_cpu():
    for seed, n in ((0, 1), (-7, 100_000)):
        on_cpu, on_gpu = RandomState(seed), RandomState(seed, device="cuda")
        for _ in range(2):
            assert torch.equal(on_cpu.uniform(n), on_gpu.uniform(n).cpu())
        assert on_gpu.state.tolist() == on_cpu.state.tolist()
