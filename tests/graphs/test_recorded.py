"""Steps on a CPU that `gpubuf.capture` records: replays give what the step itself gives, bit for bit."""

import random

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from gpubuf import CaptureError, HardUpdate, LazyTensorStorage, SACLoss, TensorDictReplayBuffer, capture
from gpubuf.modules import make_sac_actor, make_sac_critic
from gpubuf.optim import AdamW
from gpubuf.train.algorithms import ALGORITHMS, Agent
from gpubuf.train.config import TrainConfig

ROWS = 16


def transitions(seed: int, algo: str = "sac") -> TensorDict:
    generator = torch.Generator().manual_seed(seed)

    def drawn(*size: int) -> Tensor:
        return torch.randn(ROWS, *size, generator=generator)

    action = drawn(2).tanh() if algo != "discrete-sac" else nn.functional.one_hot(drawn(2).argmax(-1), 2).float()
    following = {
        "observation": drawn(3),
        "reward": drawn(1),
        "terminated": drawn(1) > 1,
        "done": drawn(1) > 1,
    }
    rows = {"observation": drawn(3), "action": action, "priority_weight": drawn().exp(), "next": following}
    return TensorDict(rows, [ROWS])


@pytest.mark.parametrize("bfloat16", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_recorded_updates_have_the_bits_of_eager_ones(algo, bfloat16):
    def learnt(recorded: bool) -> tuple[list[Tensor], Agent]:
        torch.manual_seed(0)
        config = TrainConfig(env="any", algo=algo, hidden=(16, 16), bfloat16=bfloat16)
        agent = Agent(config, 3, 2, torch.device("cpu"), recorded=recorded)
        seen = []
        for i in range(9):
            batch = transitions(i, algo)
            # The policy rests at every third.
            seen += [agent.update(batch, i % 3 > 0).clone(), batch["td_error"].clone()]
        state = agent.state_dict()
        moments = [each for each in state["optimizer"]["state"].values() for each in each.values()]
        return [*seen, *(each for each in state["loss"].values() if isinstance(each, Tensor)), *moments], agent

    eager, _ = learnt(recorded=False)
    replayed, agent = learnt(recorded=True)
    assert all(step.captured for step in agent._updates.values())
    assert len(eager) == len(replayed)
    assert all(map(torch.equal, eager, replayed))


def learner() -> tuple[SACLoss, AdamW, HardUpdate]:
    torch.manual_seed(0)
    loss = SACLoss(make_sac_actor(3, 2, (8, 8)), make_sac_critic(3, 2, (8, 8)), target_entropy=-2.0)
    optimizer = AdamW(loss.parameters(), 1e-2, max_grad_norm=0.1)
    return loss, optimizer, HardUpdate(loss, value_network_update_interval=3)


def test_what_a_step_leaves_behind_is_that_of_the_last_replay():
    """Gradients, attributes that the step has set, counters of the host, and hyperparameters that change in between."""

    def run(on_cpu: bool) -> list[Tensor]:
        loss, optimizer, targets = learner()

        def update(batch: TensorDict) -> dict[str, Tensor]:
            losses = loss(batch)
            optimizer.zero_grad()
            (losses["loss_qvalue"] + losses["loss_actor"] + losses["loss_alpha"]).backward()
            optimizer.step()
            targets.step()
            return {"losses": losses, "td_error": batch["td_error"]}

        step, seen = capture(update, warmup=2, on_cpu=on_cpu), []
        for i in range(8):
            optimizer.param_groups[0]["lr"] = 1e-2 / (i + 1)
            found = step(transitions(i))
            seen += [found["losses"]["loss_qvalue"], found["losses"]["entropy"], found["td_error"], optimizer.grad_norm]
            seen += [p.grad for p in loss.parameters() if p.grad is not None]
            seen = [each.clone() for each in seen]
        assert step.captured == on_cpu
        assert targets.counter == 8 % 3
        return [*seen, *(p.detach() for p in loss.parameters())]

    assert all(map(torch.equal, run(on_cpu=False), run(on_cpu=True)))


@pytest.mark.parametrize("empty", [False, True])
def test_the_optimizer_finds_gradients_wherever_they_are(empty):
    """That of ``tanh`` is in new memory at every replay, that of a weight is not. An empty one has no address."""

    def run(on_cpu: bool) -> list[Tensor]:
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(size)) for size in ((4,), (2, 2), (4,), (0,))]
        optimizer, kept = AdamW(parameters, 1e-2), []

        def update(x: Tensor) -> None:
            bias, weight, _, last = parameters
            optimizer.zero_grad()
            ((bias.tanh() * x).sum() + (x.view(2, 2) @ weight).sum() + (last.sum() if empty else 0)).backward()
            optimizer.step()

        step = capture(update, warmup=1, on_cpu=on_cpu)
        for i in range(6):
            step(torch.randn(4))
            # Freed memory would be used again at once.
            kept += [torch.empty(4) for _ in range(i)]
        assert step.captured == on_cpu
        return [*parameters, *(each for state in optimizer.state.values() for each in state.values())]

    assert all(map(torch.equal, run(on_cpu=False), run(on_cpu=True)))


def test_results_without_arguments_noise_and_numbers_of_the_host():
    total = torch.zeros(())

    def step() -> tuple[Tensor, Tensor]:
        noise = nn.functional.dropout(torch.ones(4), 0.5)
        counted = torch.tensor(1.0)
        counted.add_(noise.sum())
        total.add_(counted)
        return counted, total.expand(2)

    def run(on_cpu: bool) -> list[Tensor]:
        torch.manual_seed(0)
        total.zero_()
        taken = capture(step, warmup=1, on_cpu=on_cpu, device=None if on_cpu else "cpu")
        return [each.clone() for _ in range(6) for each in taken()]

    assert all(map(torch.equal, run(on_cpu=False), run(on_cpu=True)))


REFUSED = {
    "reads a value": lambda x: x * x.sum().item(),
    "size depends": lambda x: x[x > 0],
    "another shape in place": lambda x: (x + 1).unsqueeze_(0),
    r"Tensor.numpy\(\)": lambda x: torch.from_numpy(x.numpy() + 1),
    r"Tensor.tolist\(\)": lambda x: torch.tensor(x.tolist()),
    "Python's random": lambda x: x * random.random(),
    "numpy.random": lambda x: x * np.random.random(),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_a_replay_would_not_follow_is_refused(reason):
    step = capture(REFUSED[reason], warmup=1, on_cpu=True)
    x = torch.ones(3)
    step(x)
    with pytest.raises(CaptureError, match=reason):
        step(x)
    assert not step.captured


def test_a_buffer_is_not_recorded():
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(32), batch_size=4)
    buffer.extend(transitions(0))
    step = capture(lambda: buffer.sample()["observation"], warmup=1, on_cpu=True, device="cpu")
    step()
    with pytest.raises(CaptureError, match="with a buffer in it"):
        step()


def test_a_parameter_that_moves_is_noticed():
    layer = nn.Linear(3, 3)
    step = capture(lambda x: layer(x).detach(), warmup=1, on_cpu=True)
    x = torch.ones(2, 3)
    for _ in range(3):
        step(x)
    with torch.no_grad():
        layer.weight.data = torch.zeros(3, 3)
    with pytest.raises(CaptureError, match="was moved"):
        step(x)
    step.reset()
    for _ in range(3):
        assert torch.equal(step(x), layer.bias.expand(2, 3))


def test_indices_are_recorded_and_masks_are_not_needed():
    table = torch.arange(8.0)
    step = capture(lambda at: table[at] * 2, warmup=1, on_cpu=True)
    for seed in range(4):
        at = torch.randint(8, (5,), generator=torch.Generator().manual_seed(seed))
        assert torch.equal(step(at), table[at] * 2)
    assert step.captured


def test_compiled_code_is_recorded_as_what_it_was_compiled_from():
    compiled = torch.compile(lambda x: (x * 2).sin(), fullgraph=True, backend="aot_eager")
    step = capture(compiled, warmup=1, on_cpu=True)
    for seed in range(4):
        x = torch.randn(5, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(step(x), (x * 2).sin())
    assert step.captured
