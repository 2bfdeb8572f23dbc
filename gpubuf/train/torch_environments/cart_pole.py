"""Swinging up a pole on a cart, from the equations of motion."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gpubuf.train.torch_environments.base import TorchEnvironments, Transition


class CartPoleSwingUp(TorchEnvironments):
    """A pole hangs from a cart on a track. Push the cart so that the pole swings up, and hold it there.

    The state is (x, v, angle, angular velocity): the cart's position and velocity, and the pole's angle from upright,
    positive when it leans towards positive x. The observation is (x, v, cos, sin, angular velocity). The action is the
    force on the cart, in units of 10 N.

    **Equations.** A cart of mass M with viscous friction b carries a uniform rod of mass m and half length l on a hinge
    without friction. The rod's moment of inertia about its centre is m l^2 / 3. Lagrange's equations of

        T = (M + m) v^2 / 2 + m l v w cos(angle) + (2 / 3) m l^2 w^2,    V = m g l cos(angle)

    are solved for the accelerations:

        v' = (F - b v + m l w^2 sin - (3 / 4) m g sin cos) / (M + m - (3 / 4) m cos^2)
        w' = (3 / 4) (g sin - v' cos) / l

    They are those of R. V. Florian, "Correct equations for the dynamics of the cart-pole system" (2007), with friction
    of the cart instead of the track's; the masses, the length, the friction and the force are those of the swing-up in
    M. P. Deisenroth and C. E. Rasmussen, "PILCO" (2011). A step is one of the classical Runge-Kutta method (RK4), of
    0.02 s, with a constant force.

    **Reward**, of the state that the step led to: (1 + cos(angle)) / 2, 1 upright and 0 hanging, times
    cos(pi x / (2 X)), 1 in the middle of the track and 0 at its ends, |x| = X = 2.4 m.

    **Episodes** begin at rest with the pole hanging, up to 0.2 off in every component. They are truncated after 500
    steps. They terminate, with a reward of 0, when the cart leaves the track.
    """

    observation_size = 5
    action_size = 1
    state_size = 4
    random_numbers = 4
    time_limit = 500

    _GRAVITY, _CART_MASS, _POLE_MASS, _HALF_LENGTH = 9.82, 0.5, 0.5, 0.3
    _FRICTION, _SECONDS = 0.1, 0.02
    _MOST_FORCE, _TRACK = 10.0, 2.4
    _FIRST_OFFSET = 0.2

    def begin(self, uniform: Tensor) -> Tensor:
        """Every component within 0.2 of the cart at rest and the pole hanging."""
        x, speed, angle, turn = ((2 * uniform - 1) * self._FIRST_OFFSET).unbind(1)
        return torch.stack([x, speed, angle + math.pi, turn], 1)

    def transition(self, state: Tensor, action: Tensor) -> Transition:
        """One step of RK4."""
        force = (action[:, 0].double() * self._MOST_FORCE).clamp(-self._MOST_FORCE, self._MOST_FORCE)
        after = self._moved(state, force)
        x, angle = after[:, 0], after[:, 2]
        terminated = x.abs() > self._TRACK
        reward = 0.5 * (1 + angle.cos()) * (x * (math.pi / 2 / self._TRACK)).cos()
        return Transition(after, reward.masked_fill(terminated, 0.0), terminated)

    def _moved(self, state: Tensor, force: Tensor) -> Tensor:
        """The state after a step with a constant ``force`` `[E]`."""
        h = self._SECONDS
        k1 = self._derivative(state, force)
        k2 = self._derivative(torch.add(state, k1, alpha=h / 2), force)
        k3 = self._derivative(torch.add(state, k2, alpha=h / 2), force)
        k4 = self._derivative(torch.add(state, k3, alpha=h), force)
        return torch.add(state, k1 + 2 * (k2 + k3) + k4, alpha=h / 6)

    def _derivative(self, state: Tensor, force: Tensor) -> Tensor:
        """Velocities and accelerations `[E, 4]`."""
        m, length, g = self._POLE_MASS, self._HALF_LENGTH, self._GRAVITY
        _, speed, angle, turn = state.unbind(1)
        sin, cos = angle.sin(), angle.cos()
        push = force - self._FRICTION * speed + m * sin * (length * turn.square() - 0.75 * g * cos)
        pushed = push / (self._CART_MASS + m - 0.75 * m * cos.square())
        turned = 0.75 / length * (g * sin - pushed * cos)
        return torch.stack([speed, pushed, turn, turned], 1)

    def observe(self, state: Tensor) -> Tensor:
        """(position, velocity, cos, sin, angular velocity)."""
        x, speed, angle, turn = state.unbind(1)
        return torch.stack([x, speed, angle.cos(), angle.sin(), turn], 1).float()
