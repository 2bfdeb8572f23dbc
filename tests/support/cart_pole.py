"""The cart and its pole again, in NumPy: from the motion of the points of the rod, not from a formula for its angle."""

import math

import numpy as np

GRAVITY, CART, POLE, LENGTH, FRICTION = 9.82, 0.5, 0.5, 0.6, 0.1
SECONDS, FORCE, TRACK = 0.02, 10.0, 2.4

# Points and weights of a quadrature that is exact for polynomials of degree 5; integrands here have degree 2.
_POINTS, _WEIGHTS = np.polynomial.legendre.leggauss(3)


def accelerations(state, force, friction=FRICTION):
    """(of the cart, of the angle), by d'Alembert's principle: a 2 x 2 linear system of sums over points of the rod.

    The point at a distance s from the hinge is at (x + s sin, s cos). Its velocity is J (v, w), and its acceleration
    J (v', w') + (dJ/dt) (v, w), with the Jacobian J = [[1, s cos], [0, -s sin]].
    """
    _, v, angle, w = state
    sin, cos = math.sin(angle), math.cos(angle)
    mass = np.array([[CART, 0.0], [0.0, 0.0]])
    forces = np.array([force - friction * v, 0.0])
    for point, weight in zip(_POINTS, _WEIGHTS, strict=True):
        s, dm = (point + 1) / 2 * LENGTH, weight / 2 * POLE
        jacobian = np.array([[1.0, s * cos], [0.0, -s * sin]])
        its_change = np.array([[0.0, -s * w * sin], [0.0, -s * w * cos]])
        mass += dm * jacobian.T @ jacobian
        forces += dm * jacobian.T @ (np.array([0.0, -GRAVITY]) - its_change @ np.array([v, w]))
    return np.linalg.solve(mass, forces)


def step(state, action, friction=FRICTION):
    """(state, reward, terminated) after an action in [-1, 1], by the classical Runge-Kutta method."""
    force = min(max(float(action), -1.0), 1.0) * FORCE

    def slope(at):
        of_cart, of_angle = accelerations(at, force, friction)
        return np.array([at[1], of_cart, at[3], of_angle])

    first = slope(state)
    second = slope(state + SECONDS / 2 * first)
    third = slope(state + SECONDS / 2 * second)
    fourth = slope(state + SECONDS * third)
    after = state + SECONDS * (first + 2 * second + 2 * third + fourth) / 6
    gone = bool(abs(after[0]) > TRACK)
    reward = (1 + math.cos(after[2])) / 2 * math.cos(math.pi * after[0] / (2 * TRACK))
    return after, 0.0 if gone else reward, gone
