"""Learning inside a world model, as DreamerV3 does, small.

Swings Gymnasium's pendulum up with a policy that never sees a gradient of the environment: a recurrent model learns
what observations and rewards follow, and the policy learns from steps that the model imagines:

    python examples/dreamer.py

What the buffer does for it (docs/windows.md):

* every batch has windows of consecutive steps that nobody cut out by hand, across the ends of episodes;
* windows that no batch has had come first (``OnlineFirst``), then random ones;
* each row keeps the state of the model, so that a window goes on from where the model was. The update writes the new
  states back, to rows that are still there.

On a GPU an update is one CUDA graph, draw and write-back included.

Hafner et al. 2023, "Mastering diverse domains through world models"; Hafner et al. 2021 for gradients through the
model, which suit continuous actions.
"""

import argparse
import copy

import gymnasium as gym
import torch
from rich.progress import Progress
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributions import Independent, OneHotCategoricalStraightThrough, kl_divergence
from torch.nn.functional import mse_loss

import gpubuf
from gpubuf import LazyTensorStorage, OnlineFirst, RandomSampler, TensorDictReplayBuffer, Window
from gpubuf.modules import MLP, TanhNormal

GROUPS, CLASSES, HIDDEN = 8, 8, 128
SIZE = HIDDEN + GROUPS * CLASSES  # of a state: what the cell remembers, and one class of each group
REWARD = 8.0  # rewards of a pendulum lie in -16 .. 0
DISCOUNT = 0.97


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=2_500, help="steps of each environment (default: %(default)s)")
    parser.add_argument("--envs", type=int, default=4, help="environments (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=250, help="steps with random actions (default: %(default)s)")
    parser.add_argument("--window", type=int, default=32, help="steps of a window (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=8, help="windows in a batch (default: %(default)s)")
    parser.add_argument("--horizon", type=int, default=10, help="imagined steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def classes(logits: Tensor) -> Independent:
    """A distribution over one class of each group, mixed with one percent of a uniform one."""
    probs = 0.99 * logits.unflatten(-1, (GROUPS, CLASSES)).softmax(-1) + 0.01 / CLASSES
    return Independent(OneHotCategoricalStraightThrough(probs=probs, validate_args=False), 1, validate_args=False)


class WorldModel(nn.Module):
    """A recurrent state, what it says of the next one, and what an observation adds."""

    def __init__(self, obs_dim: int, action_dim: int) -> None:
        super().__init__()
        self.cell = nn.GRUCell(GROUPS * CLASSES + action_dim, HIDDEN)
        self.prior = MLP(HIDDEN, GROUPS * CLASSES, (HIDDEN,))
        self.posterior = MLP(HIDDEN + obs_dim, GROUPS * CLASSES, (HIDDEN,))
        self.observation = MLP(SIZE, obs_dim, (HIDDEN,))
        self.reward = MLP(SIZE + action_dim, 1, (HIDDEN,))

    def remember(self, state: Tensor, action: Tensor) -> Tensor:
        """``[B, HIDDEN]``, what the cell remembers after an action."""
        memory, group = state.split((HIDDEN, GROUPS * CLASSES), -1)
        remembered: Tensor = self.cell(torch.cat([group, action], -1), memory)
        return remembered

    def observe(self, state: Tensor, action: Tensor, observation: Tensor, begins: Tensor) -> tuple[Tensor, Tensor]:
        """(state, memory) after an action and the observation that it led to, or the first of an episode."""
        goes_on = (~begins).unsqueeze(-1).to(state.dtype)
        memory = self.remember(state * goes_on, action * goes_on)
        group = classes(self.posterior(torch.cat([memory, observation], -1))).rsample()
        return torch.cat([memory, group.flatten(-2)], -1), memory

    def imagine(self, state: Tensor, action: Tensor) -> Tensor:
        """The state after an action, without an observation."""
        memory = self.remember(state, action)
        return torch.cat([memory, classes(self.prior(memory)).rsample().flatten(-2)], -1)


class Agent(nn.Module):
    """The model, a policy and a critic of its states, and their update."""

    def __init__(self, obs_dim: int, action_dim: int, horizon: int) -> None:
        super().__init__()
        self.model, self.horizon = WorldModel(obs_dim, action_dim), horizon
        self.actor, self.critic = MLP(SIZE, 2 * action_dim, (HIDDEN, HIDDEN)), MLP(SIZE, 1, (HIDDEN, HIDDEN))
        # Follows the critic slowly, and judges what is imagined: the policy's gradient must not reach the critic.
        self.judge = copy.deepcopy(self.critic).requires_grad_(False)

    def policy(self, state: Tensor) -> TanhNormal:
        loc, scale = self.actor(state).chunk(2, -1)
        # Bounded, for a saturated tanh has no gradient.
        return TanhNormal(2 * (loc / 2).tanh(), nn.functional.softplus(scale) + 0.2)

    def world_loss(self, batch: TensorDict) -> tuple[Tensor, Tensor]:
        """(loss of the model, the states of each window but for its first row): ``[B, W - 1, SIZE]``."""
        state, states, memories = batch["state"][:, 0], [], []
        for t in range(1, batch["action"].shape[1]):
            seen, begins = batch["observation"][:, t], batch["is_first"][:, t]
            state, memory = self.model.observe(state, batch["action"][:, t - 1], seen, begins)
            states.append(state)
            memories.append(memory)
        found, memory, seen = torch.stack(states, 1), torch.stack(memories, 1), batch["observation"][:, 1:]
        prior, posterior = self.model.prior(memory), self.model.posterior(torch.cat([memory, seen], -1))
        # The prior learns to foresee the posterior faster than that learns to be foreseen; below 1 nat neither does.
        dynamics = kl_divergence(classes(posterior.detach()), classes(prior)).clamp(min=1.0).mean()
        representation = kl_divergence(classes(posterior), classes(prior.detach())).clamp(min=1.0).mean()
        reward = self.model.reward(torch.cat([found, batch["action"][:, 1:]], -1))
        told = mse_loss(self.model.observation(found), seen) + mse_loss(reward, batch["next", "reward"][:, 1:] / REWARD)
        return told + 0.1 * (0.5 * dynamics + 0.1 * representation), found

    def behaviour_loss(self, state: Tensor) -> Tensor:
        """Of policy and critic, on ``horizon`` imagined steps from each state."""
        states, rewards, entropies = [state], [], []
        for _ in range(self.horizon):
            policy = self.policy(states[-1])
            action = policy.rsample()
            entropies.append(-policy.log_prob(action))
            rewards.append(self.model.reward(torch.cat([states[-1], action], -1)).squeeze(-1))
            states.append(self.model.imagine(states[-1], action))
        values = self.judge(torch.stack(states)).squeeze(-1)
        found, returns = values[-1], []
        for reward, value in zip(rewards[::-1], values[1:].flip(0), strict=True):
            found = reward + DISCOUNT * (0.05 * value + 0.95 * found)
            returns.append(found)
        target, seen = torch.stack(returns[::-1]), torch.stack(states[:-1]).detach()
        critic = mse_loss(self.critic(seen).squeeze(-1), target.detach())
        return critic - target.mean() - 0.03 * torch.stack(entropies).mean()


def main(args: argparse.Namespace) -> list[float]:
    """Trains, and returns the return of every episode."""
    torch.manual_seed(args.seed)
    env = gym.make_vec("Pendulum-v1", args.envs, vector_kwargs={"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP})
    agent = Agent(3, 1, args.horizon).to(args.device)
    actors = [agent.actor, agent.critic]
    world = torch.optim.Adam(agent.model.parameters(), 1e-3, capturable=args.device != "cpu")
    behaviour = torch.optim.Adam(nn.ModuleList(actors).parameters(), 3e-4, capturable=args.device != "cpu")
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(args.envs * args.steps, ndim=2, device=args.device),
        sampler=OnlineFirst(RandomSampler(), every=args.window),
        # The drawn row is the last of its window; the first one says where the model was.
        windows=Window(-args.window, 0, outside="cross", is_first="is_first", rows="rows"),
        batch_size=args.batch_size,
    )

    def update() -> Tensor:
        batch = buffer.sample()
        loss, states = agent.world_loss(batch)
        world.zero_grad(set_to_none=False)
        loss.backward()
        nn.utils.clip_grad_norm_(agent.model.parameters(), 100.0)
        world.step()
        behaviour.zero_grad(set_to_none=False)
        agent.behaviour_loss(states.detach().flatten(0, 1)).backward()
        nn.utils.clip_grad_norm_(nn.ModuleList(actors).parameters(), 100.0)
        behaviour.step()
        torch._foreach_lerp_([*agent.judge.parameters()], [*agent.critic.parameters()], 0.02)
        rows = TensorDict({"state": states.detach()}, states.shape[:2])
        index, generation = batch["rows", "index"][:, 1:], batch["rows", "index_generation"][:, 1:]
        buffer.update_if_present(index, rows, generation=generation)
        return loss.detach()

    update = gpubuf.capture(update, device=args.device)
    observation, _ = env.reset(seed=args.seed)
    seen = torch.as_tensor(observation, device=args.device)
    state, action = torch.zeros(args.envs, SIZE, device=args.device), torch.zeros(args.envs, 1, device=args.device)
    begins = torch.ones(args.envs, dtype=torch.bool, device=args.device)
    total, returns = torch.zeros(args.envs), list[float]()
    with Progress() as progress:
        bar = progress.add_task("", total=args.steps)
        for step in range(args.steps):
            with torch.no_grad():
                state, _ = agent.model.observe(state, action, seen, begins)
                action = agent.policy(state).sample()
                if step < args.warmup:
                    action = 2 * torch.rand_like(action) - 1
            observation, reward, terminated, truncated, _ = env.step(2.0 * action.cpu().numpy())
            rewards = torch.as_tensor(reward, dtype=torch.float32).unsqueeze(-1)
            ends = torch.as_tensor(terminated | truncated)
            row = {"observation": seen, "action": action, "state": state}
            row["next"] = TensorDict({"reward": rewards, "done": ends.unsqueeze(-1)}, [args.envs])
            buffer.extend(TensorDict(row, [args.envs]).unsqueeze(-1))
            total += rewards.squeeze(-1)
            returns += total[ends].tolist()
            total[ends] = 0.0
            begins, seen = ends.to(args.device), torch.as_tensor(observation, device=args.device)
            if step >= args.warmup:
                update()
            last = sum(returns[-args.envs :]) / args.envs if returns else float("nan")
            progress.update(bar, advance=1, description=f"return {last:.0f}")
    env.close()
    return returns


if __name__ == "__main__":
    if returns := main(parse()):
        print(f"return: {returns[0]:.0f} at first, {sum(returns[-8:]) / len(returns[-8:]):.0f} in the last episodes")
