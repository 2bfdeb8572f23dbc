"""The pendulum of Gymnasium as tensor operations."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gpubuf.train.torch_environments.base import TorchEnvironments, Transition


class Pendulum(TorchEnvironments):
    """Gymnasium's ``Pendulum-v1``: swing a pendulum up, and hold it there.

    The state is (angle, angular velocity), 0 upright; the observation (cos, sin, velocity). As in Gymnasium, the state
    is float64, and what the torque contributes is computed in float32.
    """

    observation_size = 3
    action_size = 1
    state_size = 2
    random_numbers = 2
    time_limit = 200

    _GRAVITY, _MASS, _LENGTH, _SECONDS = 10.0, 1.0, 1.0, 0.05
    _MOST_TORQUE, _MOST_SPEED = 2.0, 8.0
    _FIRST_ANGLE, _FIRST_SPEED = math.pi, 1.0

    def begin(self, uniform: Tensor) -> Tensor:
        """Angles in [-pi, pi), velocities in [-1, 1)."""
        angle, speed = (2 * uniform - 1).unbind(1)
        return torch.stack([angle * self._FIRST_ANGLE, speed * self._FIRST_SPEED], 1)

    def transition(self, state: Tensor, action: Tensor) -> Transition:
        """Semi-implicit Euler: the velocity first, then the angle with the new velocity."""
        angle, speed = state.unbind(1)
        torque = (action[:, 0] * self._MOST_TORQUE).clamp(-self._MOST_TORQUE, self._MOST_TORQUE)
        # The distance from upright, as an angle in [-pi, pi).
        tilt = torch.remainder(angle + math.pi, 2 * math.pi) - math.pi
        cost = tilt.square() + 0.1 * speed.square() + 0.001 * torque.square()
        pull = 3 * self._GRAVITY / (2 * self._LENGTH) * angle.sin()
        push = 3.0 / (self._MASS * self._LENGTH**2) * torque
        speed = (speed + (pull + push) * self._SECONDS).clamp(-self._MOST_SPEED, self._MOST_SPEED)
        angle = angle + speed * self._SECONDS
        return Transition(torch.stack([angle, speed], 1), -cost, torch.zeros_like(cost, dtype=torch.bool))

    def observe(self, state: Tensor) -> Tensor:
        """(cos, sin, velocity)."""
        angle, speed = state.unbind(1)
        return torch.stack([angle.cos(), angle.sin(), speed], 1).float()
