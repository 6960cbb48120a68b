"""Our fact 6: linear, sigmoid and polynomial kernels, and the degenerate printed polynomial."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from equilibria.certify import certify
from equilibria.problems import (
    Coupling,
    DegenerateKernelWarning,
    Linear,
    Polynomial,
    Problem,
    Sigmoidal,
)

from .claim import Trial
from .numerics import ACTIVATIONS, Activation, Random, newton, norm, solve, spectral, zeros
from .ours_gaussian import PRIORS

_STEEP = 4.0 / (3.0 * math.sqrt(3.0))


def _draw(draw: Random, high: float) -> tuple[Tensor, Tensor, Activation]:
    """W [k, n] of norm up to ``high``, c [n] and an activation."""
    n = draw.integer(1, 4)
    w = draw.weights(draw.integer(1, 4), n, draw.uniform(0.05, high))
    return w, draw.normal(n), ACTIVATIONS[draw.choice(list(ACTIVATIONS))]


def _linear(draw: Random) -> Trial:
    """Contraction, modulus and Lipschitz constant of z = σ(WᵀWz + c) from the library's numbers."""
    w, c, sigma = _draw(draw, 0.97)
    other = c + draw.normal(len(c)) * 10.0 ** draw.uniform(-3.0, 0.5)
    gram = w.mT @ w

    def star(at: Tensor) -> Tensor:
        return solve(
            lambda z: sigma.value(gram @ z + at),
            lambda z: sigma.slope(gram @ z + at)[:, None] * gram,
            torch.zeros_like(at),
        )

    problem = Problem(PRIORS[sigma.name], Linear(w, torch.stack([c, other])))
    found = certify(problem, z=zeros(2, len(c)))
    assert found.lipschitz is not None
    one, two = star(c), star(other)
    moved = norm(one - two) / (found.lipschitz * norm(c - other) + 1e-11)
    a, b = draw.normal(len(c)), draw.normal(len(c))
    same = Problem(PRIORS[sigma.name], Linear(w, torch.stack([c, c])))
    after = same.step(torch.stack([a, b]))
    rho = float(torch.as_tensor(found.contraction).max())
    shrinks = norm(after[0] - after[1]) / (rho * norm(a - b) + 1e-12)
    known = [norm(one) / float(found.error_bound[0]), norm(two) / float(found.error_bound[1])]
    ratio = max(moved, shrinks, *known)
    return Trial(ratio, {"W": w, "c": c, "c'": other, "activation": sigma.name})


def _spectrum(
    coupling: Coupling, kernel: Callable[[Tensor], Tensor], w: Tensor, c: Tensor, z: Tensor
) -> Trial:
    """∇² of q = −kernel(⟨c, z⟩) − ½‖Wz‖² by autograd against the library's bounds.

    The ratio is 1 + how far an eigenvalue lies outside, in units of their width.
    """

    def q(v: Tensor) -> Tensor:
        return -kernel(c @ v) - 0.5 * (w @ v).square().sum()

    values = torch.linalg.eigvalsh(torch.autograd.functional.hessian(q, z))
    bounds = coupling.curvature()
    low, high = (float(torch.as_tensor(t).reshape(-1)[0]) for t in (bounds.lower, bounds.upper))
    width = 1e-9 + high - low
    ratio = 1.0 + max(float(values[-1]) - high, low - float(values[0])) / width
    return Trial(ratio, {"W": w, "c": c, "z": z})


def _sigmoid(draw: Random) -> Trial:
    """−(k‖c‖² + ‖W‖²) ≤ ∇²q ≤ k‖c‖², k = 4/(3√3)."""
    w, c, _ = _draw(draw, 2.0)
    return _spectrum(Sigmoidal(w, c[None]), torch.tanh, w, c, draw.normal(len(c)))


def _sigmoid_unique(draw: Random) -> Trial:
    """‖W‖² + 0.7698‖c‖² < 1: Newton from six far starts finds one equilibrium."""
    w, c, sigma = _draw(draw, 0.95)
    c = c * (math.sqrt((1.0 - spectral(w) ** 2) / _STEEP) * draw.uniform(0.1, 0.999) / norm(c))
    gram = w.mT @ w

    def force(z: Tensor) -> Tensor:
        return gram @ z + (1.0 - torch.tanh(c @ z) ** 2) * c

    def slope(z: Tensor) -> Tensor:
        t = torch.tanh(c @ z)
        inner = gram - 2.0 * t * (1.0 - t * t) * torch.outer(c, c)
        return sigma.slope(force(z))[:, None] * inner

    found = [solve(lambda z: sigma.value(force(z)), slope, torch.zeros_like(c))]
    for _ in range(6):
        z, left = newton(lambda v: sigma.value(force(v)), slope, draw.normal(len(c)) * 5.0)
        if left < 1e-12:
            found.append(z)
    spread = max(norm(z - found[0]) for z in found)
    return Trial(spread / (1e-6 * (1.0 + norm(found[0]))), {"W": w, "c": c, "equilibria": found})


def _kernel(w: Tensor, c: Tensor, degree: int, offset: float) -> Polynomial:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DegenerateKernelWarning)
        return Polynomial(w, c[None], degree, offset=offset)


def _polynomial(draw: Random) -> Trial:
    """d = 2: −2‖c‖² − ‖W‖² ≤ ∇²q ≤ 0."""
    w, c, _ = _draw(draw, 2.0)
    return _spectrum(_kernel(w, c, 2, 0.0), lambda t: t**2, w, c, draw.normal(len(c)))


def _degenerate(draw: Random, *, offset: float) -> Trial:
    """An equilibrium that tells inputs apart: T(0) ≠ 0. The ratio is tiny/‖T(0)‖."""
    w, c, _ = _draw(draw, 0.9)
    degree = draw.integer(2, 4)
    problem = Problem(PRIORS["identity"], _kernel(w, c, degree, offset))
    after = norm(problem.step(zeros(1, len(c))))
    case = {"W": w, "c": c, "degree": degree, "T(0)": after}
    return Trial(1e-6 * norm(c) / after if after > 0 else math.inf, case)
