"""GEQ's hidden problems: Eq 1–6, Table 4 and Proposition 1."""

from __future__ import annotations

import torch

from .claim import Claim, Trial, claim, printed, reading
from .drawing import choice, integer, normal, uniform, weights
from .geq_layers import geq, opteq

_SMALL = 1e-8  # a residual counts as zero below this


def _eq4(g: torch.Generator) -> Trial:
    """The z of Eq 4 gives the z̃ of Eq 1 by z̃ = W̃ᵀz."""
    n = integer(g, 1, 5)
    tilde = weights(g, n, n, uniform(g, 0.2, 0.95))  # W̃, and W = W̃ᵀ
    c = normal(g, n)
    z = opteq(tilde.mT, c[None])[0]
    state = tilde.mT @ z
    gap = (state - tilde.mT @ (tilde @ state + c).clamp_min(0.0)).norm()
    return Trial(float(gap) / (_SMALL * (1 + float(state.norm()))), {"n": n})


def _gaussian_gap(g: torch.Generator) -> Trial:
    """Eq 5 → Eq 6 by autograd."""
    n, m, gamma = integer(g, 1, 4), integer(g, 1, 4), uniform(g, 0.1, 2.0)
    w, c, z = weights(g, m, n, uniform(g, 0.2, 0.9)), normal(g, m), normal(g, n)
    z.requires_grad_(True)
    (pushed,) = torch.autograd.grad(torch.exp(-gamma * (c - w @ z).square().sum()) / (2 * gamma), z)
    with torch.no_grad():
        r = c - w @ z
        claimed = torch.exp(-gamma * r.square().sum()) * w.mT @ r
    gap = float((pushed - claimed).norm()) / (1 + float(pushed.norm()))
    return Trial(gap / _SMALL, {"kernel": "gaussian", "gamma": gamma})


def _inner_gap(g: torch.Generator) -> Trial:
    """The rows of Table 4 that depend on ⟨c, z⟩, by autograd."""
    kernel, n, degree = (
        choice(g, ("linear", "polynomial", "sigmoid")),
        integer(g, 1, 4),
        integer(g, 2, 4),
    )
    w, c, z = weights(g, integer(g, 1, 4), n, uniform(g, 0.2, 0.9)), normal(g, n), normal(g, n)
    z.requires_grad_(True)
    t = c @ z
    value, slope = {
        "linear": (t, torch.ones_like(t)),
        "polynomial": (t**degree, degree * t.detach() ** (degree - 1)),
        "sigmoid": (t.tanh(), 1 - t.detach().tanh() ** 2),
    }[kernel]
    (pushed,) = torch.autograd.grad(value + 0.5 * (w @ z).square().sum(), z)
    claimed = w.mT @ (w @ z.detach()) + slope * c
    gap = float((pushed - claimed).norm()) / (1 + float(pushed.norm()))
    return Trial(gap / _SMALL, {"kernel": kernel, "degree": degree})


def _table4(g: torch.Generator) -> Trial:
    return _gaussian_gap(g) if integer(g, 0, 3) == 0 else _inner_gap(g)


def feature_map_trial(g: torch.Generator, *, square: bool, half: bool, constant: bool) -> Trial:
    """Is GEQ's output an equilibrium of 1ᵀf + ½‖z‖² − λ⟨Φ(c), Φ(Wz)⟩, all terms of Φ kept?

    ``square``: λ with ‖Wz‖²; ``half``: with the factor 1/2γ; ``constant``: λ held while ∂/∂z.
    """
    n, m = integer(g, 1, 3), integer(g, 1, 3)
    w, gamma = weights(g, m, n, uniform(g, 0.3, 0.95)), uniform(g, 0.1, 2.0)
    c = 2 * normal(g, m)
    z = geq(w, c[None], gamma)[0]
    if float(z.norm()) < 1e-3:  # both problems have z = 0 here: nothing to tell apart
        return Trial(0.0, {})
    point = z.clone().requires_grad_(True)
    y = w @ point
    size = y.square().sum() if square else y.norm()
    scale = torch.exp(-gamma * (c.square().sum() + size))
    if constant:
        scale = scale.detach()
    q = scale * torch.exp(2 * gamma * (c @ y)) * (1 / (2 * gamma) if half else 1.0)
    (push,) = torch.autograd.grad(q, point)
    gap = float((push.clamp_min(0.0) - z).norm() / z.norm())
    return Trial(gap / _SMALL, {"n": n, "m": m, "gamma": gamma, "relative distance": gap})


CLAIMS: tuple[Claim, ...] = (
    claim(
        "geq.eq4",
        "Eq 1 and 4",
        r"With $W = \tilde W^\top$ and $z = \tilde W^{-1\top}\tilde z$ the equilibrium "
        r"$\tilde z = \tilde W^\top\sigma(\tilde W\tilde z + Ux + b)$ becomes "
        r"$z = \sigma(W^\top Wz + Ux + b)$.",
        printed(_eq4),
    ),
    claim(
        "geq.table4",
        "Eq 5–6, Table 4",
        "The equilibrium equations of the linear, polynomial, sigmoid and Gaussian "
        r"kernels are $z = \sigma(-\nabla q(z))$ of their hidden problems.",
        printed(_table4),
    ),
    claim(
        "geq.prop1",
        "Proposition 1, Eq 7",
        r"GEQ's output minimizes $1^\top f + \frac12\|z\|^2 - \lambda\langle\Phi(c), "
        r"\Phi(Wz)\rangle$ with $\lambda = e^{-\gamma\|c\|^2}e^{-\gamma\|Wz\|}$.",
        printed(lambda g: feature_map_trial(g, square=False, half=False, constant=False)),
        reading(
            "with the square only",
            "‖Wz‖² in λ (exact only at γ = 1/2)",
            lambda g: feature_map_trial(g, square=True, half=False, constant=False),
        ),
        reading(
            "with 1/2γ and the square",
            "λ = e^{−γ‖c‖²}e^{−γ‖Wz‖²} and a factor 1/(2γ)",
            lambda g: feature_map_trial(g, square=True, half=True, constant=False),
        ),
        note="Eq 7 drops 1/(2γ), and λ lacks a square. λ depends on z: a linear kernel of the "
        "features with λ held constant has another equilibrium.",
    ),
)
