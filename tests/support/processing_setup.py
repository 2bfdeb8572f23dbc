"""What the tests of processing share: steps of an environment, and pipelines without a buffer."""

import torch
from tensordict import TensorDict
from torch import Tensor

from gpubuf.data.processing.pipeline import Pipeline
from gpubuf.data.storages.layout import RowLayout

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


def bound(*objects: object, data: TensorDict | None = None, envs: int = 1) -> Pipeline:
    pipeline = Pipeline(objects)
    pipeline.bind(RowLayout(steps(1) if data is None else data, 1).leaves, envs, CPU)
    return pipeline


def close(a: Tensor, b: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
