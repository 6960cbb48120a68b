"""The Gaussian layer written down anew, dense, one sample: hᵢ = c̃ᵢ − Aᵢz, sᵢ = γ‖hᵢ‖².

T(z) = σ(Σᵢ e^{−sᵢ}Aᵢᵀhᵢ), ∇²q = Σᵢ Aᵢᵀe^{−sᵢ}(I − 2γhᵢhᵢᵀ)Aᵢ. ``problem`` is the library's own
object for the same layer, which is what the claims are about.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from equilibria.problems import (
    Box,
    Free,
    Gaussian,
    LeakyNonNegative,
    Logistic,
    NonNegative,
    Patches,
    Prior,
    Problem,
    SoftThreshold,
    Tanh,
)

from .drawing import ACTIVATIONS, Activation, choice, integer, normal, spectral, uniform, weights
from .solving import solve

B = 2.0 * math.exp(-1.5)
THRESHOLD = math.exp(0.75) / math.sqrt(2.0)
"""μ = 1.49694…, where 1 − 2e^{−3/2}μ² = 0."""

PRIORS: dict[str, Prior] = {
    "identity": Free(),
    "relu": NonNegative(),
    "clipped relu": Box(0.0, 1.0),
    "soft threshold": SoftThreshold(0.3),
    "leaky relu": LeakyNonNegative(0.1),
    "tanh": Tanh(),
    "sigmoid": Logistic(),
}


@dataclass(frozen=True)
class GaussLayer:
    """W [P·c_s, n], W_h [c_s, k], c [P·c_s]: P patches of c_s channels each."""

    w: Tensor
    hidden: Tensor
    c: Tensor
    gamma: float
    sigma: Activation

    @cached_property
    def a(self) -> Tensor:
        """A [P, k, n]."""
        return self.hidden.mT @ self.w.reshape(-1, self.hidden.shape[0], self.w.shape[1])

    @cached_property
    def features(self) -> Tensor:
        """c̃ [P, k]."""
        return self.c.reshape(-1, self.hidden.shape[0]) @ self.hidden

    @cached_property
    def mu(self) -> float:
        return spectral(self.a.flatten(0, 1))

    @property
    def modulus(self) -> float:
        return 1.0 - B * self.mu**2

    def value(self, z: Tensor) -> Tensor:
        """q(z)."""
        energies = (self.features - self.a @ z).square().sum(1)
        return -torch.exp(-self.gamma * energies).sum() / (2.0 * self.gamma)

    def force(self, z: Tensor) -> Tensor:
        """−∇q(z)."""
        h = self.features - self.a @ z
        e = torch.exp(-self.gamma * h.square().sum(1, keepdim=True))
        return torch.einsum("pkn,pk->n", self.a, e * h)

    def hessian(self, z: Tensor) -> Tensor:
        h = self.features - self.a @ z
        e = torch.exp(-self.gamma * h.square().sum(1))
        eye = torch.eye(h.shape[1], dtype=z.dtype)
        inner = e[:, None, None] * (eye - 2.0 * self.gamma * h[:, :, None] * h[:, None, :])
        return (self.a.mT @ inner @ self.a).sum(0)

    def __call__(self, z: Tensor) -> Tensor:
        return self.sigma.value(self.force(z))

    def slope(self, z: Tensor) -> Tensor:
        return -self.sigma.slope(self.force(z))[:, None] * self.hessian(z)

    def equilibrium(self, start: Tensor | None = None) -> Tensor:
        zero = torch.zeros(self.w.shape[1], dtype=torch.float64)
        return solve(self, self.slope, zero if start is None else start)

    @cached_property
    def flat(self) -> bool:
        """Whether a dense W says it all: one patch and no W_h."""
        k = self.hidden.shape[0]
        return len(self.w) == k and torch.equal(self.hidden, torch.eye(k, dtype=self.w.dtype))

    def problem(self, copies: int = 1) -> Problem:
        """The library's problem, the sample repeated; states as ``state`` shapes them."""
        gamma = torch.tensor(self.gamma, dtype=torch.float64)
        prior = PRIORS[self.sigma.name]
        if self.flat:
            return Problem(prior, Gaussian(self.w, self.c.expand(copies, -1), gamma))
        coupling = Gaussian(
            self.w[:, :, None, None],
            self.c[None, :, None, None].expand(copies, -1, 1, 1),
            gamma,
            patches=Patches(channels=self.hidden.shape[0], size=1),
            hidden=self.hidden,
        )
        return Problem(prior, coupling)

    def state(self, *z: Tensor) -> Tensor:
        """States [n] as a batch of the library's shape."""
        stacked = torch.stack(z)
        return stacked if self.flat else stacked[:, :, None, None]

    def case(self) -> dict[str, object]:
        return {
            "mu": self.mu,
            "gamma": self.gamma,
            "activation": self.sigma.name,
            "W": self.w,
            "W_h": self.hidden,
            "c": self.c,
        }


def draw_gauss(
    draw: torch.Generator,
    low: float,
    high: float,
    *,
    flat: bool | None = None,
    activations: tuple[str, ...] = tuple(ACTIVATIONS),
) -> GaussLayer:
    """μ between low and high; γ, patches, W_h, activation and the size of c at random."""
    n, patches, width = integer(draw, 1, 4), integer(draw, 1, 3), integer(draw, 1, 3)
    hidden = normal(draw, width, integer(draw, 1, 3))
    if flat or (flat is None and integer(draw, 0, 1)):
        patches, hidden = 1, torch.eye(width, dtype=torch.float64)
    gamma = 10.0 ** uniform(draw, -1.5, 1.5)
    w = weights(draw, patches * width, n, 1.0)
    c = normal(draw, patches * width) * (uniform(draw, 0.0, 2.5) / math.sqrt(gamma))
    sigma = ACTIVATIONS[choice(draw, activations)]
    made = GaussLayer(w, hidden, c, gamma, sigma)
    mu = uniform(draw, low, high)
    if made.mu < 1e-6:  # W_h may annihilate W
        return draw_gauss(draw, low, high, flat=flat, activations=activations)
    return GaussLayer(w * (mu / made.mu), hidden, c, gamma, sigma)


def scalar_layer(a: Tensor, c: Tensor, gamma: float, name: str = "identity") -> GaussLayer:
    """n = 1: patches of one channel with rows a [P] and features c [P]."""
    one = torch.ones(1, 1, dtype=torch.float64)
    return GaussLayer(a[:, None], one, c, gamma, ACTIVATIONS[name])
