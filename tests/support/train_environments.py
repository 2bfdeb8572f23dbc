"""Tiny environments for the tests of training, with Gymnasium ids that import this module."""

import signal
from typing import ClassVar

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Sequence

PREFIX = "tests.support.train_environments:"

#: Signals for `Signalling` to raise at its n-th step in this process: {n: [signals]}.
signals_at: dict[int, list[int]] = {}
steps_taken = 0


class Counting(gym.Env):
    """Observes (episode, step in it); the third step ends an odd episode as terminated, an even one as truncated."""

    observation_space = Box(-1e6, 1e6, (2,), np.float64)
    action_space = Box(np.array([-3.0, 0.1], np.float32), np.array([1.0, 0.7], np.float32))

    def __init__(self):
        self.episode = 0
        self.actions = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode += 1
        self.count = 0
        return np.array([self.episode, 0.0]), {}

    def step(self, action):
        self.actions.append(action)
        self.count += 1
        over = self.count == 3
        observation = np.array([self.episode, float(self.count)])
        return observation, float(self.count), over and self.episode % 2 == 1, over and self.episode % 2 == 0, {}


class OwnArray(Counting):
    """Gives the same array each time, and writes it anew."""

    def __init__(self):
        super().__init__()
        self.own = np.zeros(2)

    def reset(self, *, seed=None, options=None):
        self.own[:], info = super().reset(seed=seed, options=options)
        return self.own, info

    def step(self, action):
        self.own[:], *rest = super().step(action)
        return self.own, *rest


class Walk(gym.Env):
    """A random walk that the action pushes: randomness from ``np_random`` in every step and every reset."""

    observation_space = Box(-np.inf, np.inf, (2,), np.float64)
    action_space = Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position = self.np_random.normal()
        self.time = 0
        return self._observation(), {}

    def step(self, action):
        self.position += float(action[0]) + 0.1 * self.np_random.normal()
        self.time += 1
        over = abs(self.position) > 3
        return self._observation(), -abs(self.position), over, self.time >= 20 and not over, {}

    def _observation(self):
        return np.array([self.position, self.time / 20])


class Signalling(Walk):
    """A walk at whose n-th step, over all of them, the process gets a signal."""

    def step(self, action):
        global steps_taken
        steps_taken += 1
        for number in signals_at.get(steps_taken, []):
            signal.raise_signal(number)
        return super().step(action)


class Drawn(Counting):
    """Draws its count as a grey picture, and has actions of two rows."""

    metadata: ClassVar = {"render_modes": ["rgb_array"], "render_fps": 5}
    action_space = Box(np.array([[-3.0], [0.1]], np.float32), np.array([[1.0], [0.7]], np.float32))

    def __init__(self, render_mode=None):
        super().__init__()
        self.render_mode = render_mode

    def render(self):
        return np.full((4, 6, 3), 60 * self.count, np.uint8)


class Choices(Walk):
    """Has the actions 7 and 8, and observes the last one."""

    action_space = Discrete(2, start=7)

    def step(self, action):
        assert self.action_space.contains(action)
        self.last = action
        return super().step(np.array([action - 7.5]))

    def reset(self, *, seed=None, options=None):
        self.last = 0
        return super().reset(seed=seed)

    def _observation(self):
        return np.array([self.last, self.position])


class Unrepeatable(Walk):
    """A walk whose randomness comes from elsewhere."""

    generator = np.random.default_rng(0)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position = self.generator.normal()
        return self._observation(), {}


class Infinite(Walk):
    """Rewards whose squares are not finite: nothing can be learnt from them."""

    def step(self, action):
        observation, _, terminated, truncated, info = super().step(action)
        return observation, 3e38, terminated, truncated, info


class Spaces(Counting):
    """Any spaces: only for being looked at."""

    def __init__(self, action_space=None, observation_space=None):
        super().__init__()
        self.action_space = action_space or self.action_space
        self.observation_space = observation_space or self.observation_space


class Broken(Walk):
    """A walk whose 70th step, over all of them, fails, or gives something that is no number in float32."""

    def __init__(self, what):
        super().__init__()
        self.what = what

    def step(self, action):
        global steps_taken
        steps_taken += 1
        observation, reward, *rest = super().step(action)
        if steps_taken == 70:
            if self.what == "error":
                raise OSError("the simulator is gone")
            if self.what == "reward":
                reward = float("nan")
            elif self.what == "large":
                reward = 1e39
            else:
                observation = np.full_like(observation, np.inf)
        return observation, reward, *rest


class Nested(Walk):
    """Observations in a dictionary."""

    observation_space = Dict(
        {"image": Box(0, 1, (2, 3), np.float32), "speed": Box(-np.inf, np.inf, (1,), np.float32), "gear": Discrete(4)}
    )

    def _observation(self):
        image = np.full((2, 3), 0.5, np.float32)
        return {"image": image, "speed": np.array([self.position], np.float32), "gear": 2}


class Moving(gym.Env):
    """A lit pixel that the action moves along a row, as an image with the channels last; the far end pays.

    Args:
        dtype: of the images.
        shape: of an image.
    """

    action_space = Discrete(2)

    def __init__(self, dtype=np.uint8, shape=(6, 5, 2)):
        self.observation_space = Box(0, 1 if dtype is np.bool_ else 255, shape, dtype)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = int(self.np_random.integers(3))
        self.time = 0
        return self._observation(), {}

    def step(self, action):
        self.place = max(0, min(4, self.place + 2 * int(action) - 1))
        self.time += 1
        return self._observation(), float(self.place == 4), self.place == 4, self.time == 12 and self.place != 4, {}

    def _observation(self):
        image = np.zeros(self.observation_space.shape, self.observation_space.dtype)
        image.reshape(-1)[self.place] = self.observation_space.high.flat[0]
        return image


def needs_package():
    raise ModuleNotFoundError("No module named 'some_simulator'")


gym.register("Counting-v0", Counting)
gym.register("OwnArray-v0", OwnArray)
gym.register("Walk-v0", Walk)
gym.register("Signalling-v0", Signalling)
gym.register("Drawn-v0", Drawn)
gym.register("Choices-v0", Choices)
gym.register("Unrepeatable-v0", Unrepeatable)
gym.register("Infinite-v0", Infinite)
for broken in ("reward", "observation", "large", "error"):
    gym.register(f"Broken-{broken}-v0", Broken, kwargs={"what": broken})
gym.register("Nested-v0", Nested)
gym.register("NeedsPackage-v0", needs_package)
gym.register("Several-v0", Spaces, kwargs={"action_space": MultiDiscrete([2, 3])})
gym.register("Whole-v0", Spaces, kwargs={"action_space": Box(-2, 2, (1,), np.int64)})
gym.register("Boundless-v0", Spaces, kwargs={"action_space": Box(-np.inf, np.inf, (1,), np.float32)})
PIXELS = Box(0, 255, (8, 8, 3), np.uint8)
gym.register("Pixels-v0", Spaces, kwargs={"observation_space": PIXELS})
gym.register("Moving-v0", Moving)
gym.register("MovingBits-v0", Moving, kwargs={"dtype": np.bool_})
gym.register("MovingFirst-v0", Moving, kwargs={"shape": (2, 6, 5)})
gym.register("MovingGrey-v0", Moving, kwargs={"shape": (6, 5)})
gym.register("PixelsBeside-v0", Spaces, kwargs={"observation_space": Dict({"camera": PIXELS, "gear": Discrete(4)})})
gym.register("Lists-v0", Spaces, kwargs={"observation_space": Sequence(Discrete(2))})
