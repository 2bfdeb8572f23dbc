"""What the tests of processing share: steps of an environment, and pipelines without a buffer."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from gpubuf.data import (
    Compose,
    LazyTensorStorage,
    Normalize,
    PrioritizedSampler,
    RandomSampler,
    RandomShift,
    TensorDictReplayBuffer,
)
from gpubuf.data.processing.pipeline import Pipeline
from gpubuf.data.storage.layout import RowLayout
from gpubuf.kernels import philox

CPU = torch.device("cpu")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def steps(n: int, width: int = 3, seed: int = 0, ends: float = 0.2) -> TensorDict:
    g = generator(seed)
    done = torch.rand(n, 1, generator=g) < ends
    return TensorDict(
        {
            "observation": torch.randn(n, width, generator=g) * 5 + 2,
            "action": torch.randn(n, 2, generator=g),
            "pixels": torch.randint(0, 256, (n, 2, 4, 5), generator=g, dtype=torch.uint8),
            "next": {
                "observation": torch.randn(n, width, generator=g),
                "reward": torch.randn(n, 1, generator=g),
                "done": done,
                "terminated": done & (torch.rand(n, 1, generator=g) < 0.5),
            },
        },
        [n],
    )


def apart(*objects: Any) -> dict[str, Any]:
    """Objects as arguments of a buffer: those for the launch, and the others as transforms."""
    process = [each for each in objects if isinstance(each, (Normalize, RandomShift))]
    transforms = [each for each in objects if not isinstance(each, (Normalize, RandomShift))]
    return {"process": process, "transform": Compose(*transforms) if transforms else None}


def bound(*objects: Any, data: TensorDict | None = None, envs: int = 1) -> Pipeline:
    transforms = apart(*objects)["transform"]
    pipeline = Pipeline(apart(*objects)["process"], () if transforms is None else transforms)
    pipeline.bind(RowLayout(steps(1) if data is None else data, 1).leaves, envs, CPU)
    return pipeline


def close(a: Tensor, b: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


class Twins:
    """Two buffers of the same rows that draw alike: one gives batches as they are stored, the other processes them.

    Args:
        objects: what happens to the batches of the second, transforms in this order.
        envs: environments, of which each write has whole steps; None: rows of one dimension.
        prioritized: whether rows are drawn by priority.
        storage: arguments of the storages.
        **arguments: of both buffers.
    """

    def __init__(
        self,
        *objects: Any,
        envs: int | None = None,
        prioritized: bool = False,
        storage: dict[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        self.envs = envs
        made = []
        for chosen in ((), objects):
            sampler = PrioritizedSampler(64, 0.7, 0.5) if prioritized else RandomSampler()
            rows = LazyTensorStorage(64, ndim=1 if envs is None else 2, **(storage or {}))
            given = {"batch_size": 16, **arguments}
            made.append(TensorDictReplayBuffer(storage=rows, sampler=sampler, **apart(*chosen), **given))
            sampler.random_state("cpu").manual_seed(7)
        self.plain, self.processed = made
        self.written: list[TensorDict] = []

    def write(self, n: int, seed: int) -> TensorDict:
        """Write ``n`` steps of every environment to both."""
        data = steps(n * (self.envs or 1), seed=seed)
        data["next", "pixels"] = data["pixels"].roll(-1, 0)
        data["td_error"] = torch.rand(data.batch_size, generator=generator(seed)) + 0.1
        if self.envs is not None:
            data = data.view(self.envs, n)
        for buffer in (self.plain, self.processed):
            buffer.extend(data.clone())
        self.written.append(data)
        return data

    def rows(self, key: Any) -> Tensor:
        """All rows of a key that were ever written, as float64 ``[n, elements]``."""
        return torch.cat([data.reshape(-1)[key].flatten(1) for data in self.written]).double()

    def sample(self) -> tuple[TensorDict, TensorDict]:
        """A batch of each, of the same rows."""
        return self.plain.sample(), self.processed.sample()


def normalised(batch: Tensor, rows: Tensor, eps: float = 1e-8) -> Tensor:
    """A batch after the fact: by the mean and the variance of all rows, ``[n, elements]``."""
    variance, mean = torch.var_mean(rows, 0, correction=0)
    shape = batch.shape[1:]
    return (batch.double() - mean.view(shape)) / (variance + eps).sqrt().view(shape)


def uniforms(pipeline: Pipeline, n: int) -> Tensor:
    """The random numbers of the next ``n`` rows, float64 ``[n, draws]``."""
    assert pipeline.noise is not None
    return philox.uniform(pipeline.noise.clone(), n * pipeline.draws).view(n, pipeline.draws)


def shifted(image: Tensor, down: int, right: int) -> Tensor:
    """``[..., H, W]``, with the pixels at the edge repeated."""
    height, width = image.shape[-2:]
    rows = (torch.arange(height) + down).clamp(0, height - 1)
    columns = (torch.arange(width) + right).clamp(0, width - 1)
    return image[..., rows[:, None], columns]
