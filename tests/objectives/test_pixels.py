"""Networks that see images: their shapes, their beginnings, and who trains an encoder that networks share."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from gpubuf import DQNLoss, LazyTensorStorage, Learner, SACLoss, TensorDictReplayBuffer
from gpubuf.data import RandomShift
from gpubuf.modules import ENCODERS, Dueling, PixelEncoder, make_dqn, make_sac_actor, make_sac_critic
from gpubuf.optim import AdamW

SHAPE = (3, 19, 21)


def images(*batch: int, shape: tuple[int, ...] = SHAPE, seed: int = 0) -> torch.Tensor:
    return torch.randint(256, (*batch, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def transitions(rows: int, action: torch.Tensor) -> TensorDict:
    flags = {name: torch.zeros(rows, 1, dtype=torch.bool) for name in ("done", "terminated")}
    after = {"pixels": images(rows, seed=1), "reward": torch.randn(rows, 1), **flags}
    return TensorDict({"pixels": images(rows), "action": action, "next": TensorDict(after, [rows])}, [rows])


@pytest.mark.parametrize(
    ("layers", "shape", "features"),
    [
        # 7x7 as in CleanRL's and DQN's programs, 35x35 as in DrQ's, and 8x8 as in MinAtar's.
        ("nature", (4, 84, 84), 64 * 7 * 7),
        ("drq", (9, 84, 84), 32 * 35 * 35),
        ("minatar", (4, 10, 10), 16 * 8 * 8),
        (((5, (3), 2),), (2, 8, 9), 5 * 3 * 4),
    ],
)
def test_features_are_those_of_the_programs(layers, shape, features):
    encoder = PixelEncoder(shape, layers)
    assert encoder.features == features
    out = encoder(images(2, 3, shape=shape))
    assert out.shape == (2, 3, features)
    torch.testing.assert_close(encoder(images(2, 3, shape=shape)[1, 2]), out[1, 2])


def test_bytes_are_divided_and_floats_are_not():
    """By 255, and with DrQ's convolutions a half is subtracted."""
    for name, (layers, centre) in ENCODERS.items():
        shape = (2, 40, 41)
        encoder, image = PixelEncoder(shape, name), images(3, shape=shape)
        x = image.double() / 255 - centre
        for part in encoder.layers:
            x = part.double()(x)
        encoder.float()
        torch.testing.assert_close(encoder(image), x.flatten(1).float(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(encoder(image.float() / 255), encoder(image))
        kinds = [(p.out_channels, p.kernel_size[0], p.stride[0]) for p in encoder.layers if isinstance(p, nn.Conv2d)]
        assert tuple(kinds) == layers


def test_drq_begins_orthogonal():
    for part in PixelEncoder(SHAPE, "drq").layers[::2]:
        rows = part.weight.flatten(1).double()
        small = rows @ rows.T if len(rows) <= rows.shape[1] else rows.T @ rows
        torch.testing.assert_close(small, 2 * torch.eye(len(small), dtype=torch.float64), atol=1e-4, rtol=0)
        assert not part.bias.any()


def test_what_makes_no_encoder():
    with pytest.raises(ValueError, match=r"one of \['nature', 'minatar', 'drq'\].*got 'atari'"):
        PixelEncoder(SHAPE, "atari")
    with pytest.raises(ValueError, match=r"shape \[C, H, W\], got \[84, 84\]"):
        PixelEncoder((84, 84))
    with pytest.raises(ValueError, match=r"images of \[1, 10, 5\] are too small"):
        PixelEncoder((1, 10, 5))


def test_dueling_values_differ_from_their_mean_by_the_advantage():
    network = Dueling(nn.Linear(3, 1), nn.Linear(3, 4))
    x = torch.randn(5, 3)
    q, advantage = network(x), network.advantage(x)
    torch.testing.assert_close(q.mean(-1, keepdim=True), network.value(x))
    torch.testing.assert_close(q - q.mean(-1, keepdim=True), advantage - advantage.mean(-1, keepdim=True))


@pytest.mark.parametrize("dueling", [False, True])
def test_a_value_network_learns_from_images(dueling):
    """Every parameter has a gradient, and the values of a batch become those of its targets."""
    torch.manual_seed(0)
    network = make_dqn(SHAPE, 4, (32,), layers="drq", dueling=dueling, in_key="pixels")
    loss = DQNLoss(network, action_space="categorical", double_dqn=True).make_value_estimator(gamma=0.0)
    batch = transitions(16, torch.randint(4, (16,)))
    learner = Learner(loss, AdamW(list(network.parameters()), 1e-3, targets=loss, tau=0.1))
    losses = [float(learner(batch)["loss"]) for _ in range(60)]
    assert all(parameter.grad.any() for parameter in network.parameters())
    assert losses[-1] < 0.05 * losses[0]
    assert batch["td_error"].shape == (16,)


def sac(**options):
    encoder = PixelEncoder(SHAPE, "drq")
    actor = make_sac_actor(10, 2, (16,), encoder=encoder, in_keys=["pixels"])
    critic = make_sac_critic(10, 2, (16,), encoder=encoder, in_keys=["pixels", "action"])
    return encoder, SACLoss(actor, critic, target_entropy=-2.0, **options)


def test_critics_alone_train_the_encoder_that_the_actor_sees_through():
    """One set of weights for both, with a target of its own; the actor's loss reaches its trunk and not the encoder."""
    encoder, loss = sac()
    own = dict(encoder.named_parameters())
    for name in ("actor_network", "qvalue_network"):
        found = [p for key, p in getattr(loss, f"{name}_params").items(True, True) if "encoder" in key]
        assert {id(each) for each in found} == {id(each) for each in own.values()}
    targets = [p for key, p in loss.target_qvalue_network_params.items(True, True) if "encoder" in key]
    assert len(targets) == len(own)
    assert not {id(each) for each in targets} & {id(each) for each in own.values()}
    assert sum(any(each is p for p in loss.parameters()) for each in own.values()) == len(own)

    out = loss(transitions(6, torch.rand(6, 2) * 2 - 1))
    out["loss_actor"].backward(retain_graph=True)
    assert all(parameter.grad is None for parameter in own.values())
    trunk = loss.actor_network[0].module[0].trunk
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in trunk.parameters())
    out["loss_qvalue"].backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in own.values())


def test_soft_actor_critic_learns_from_shifted_images():
    """A bandit that pays for moving as the picture says, through a buffer that shifts images as it draws."""
    torch.manual_seed(0)
    _, loss = sac(fixed_alpha=True, alpha_init=0.05)
    loss.make_value_estimator(gamma=0.0)
    rows = 200
    batch = transitions(rows, torch.rand(rows, 2) * 2 - 1)
    sign = torch.randint(2, (rows,)) * 2 - 1
    batch["pixels"] = (120 + 80 * sign)[:, None, None, None].to(torch.uint8).expand(rows, *SHAPE).clone()
    batch["next", "reward"] = (batch["action"][:, 0] * sign).unsqueeze(-1)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(rows), batch_size=32, process=[RandomShift(["pixels"], pad=2)]
    )
    buffer.extend(batch)
    parameters = [parameter for parameter in loss.parameters() if parameter.requires_grad]
    learner = Learner(loss, AdamW(parameters, 3e-3, targets=loss, tau=0.05), buffer=buffer)
    for _ in range(60):
        learner()
    with torch.no_grad():
        action = loss.actor_network.get_dist(batch[:32].select("pixels")).deterministic_sample[:, 0]
    assert (action * sign[:32] > 0.3).all()
