"""GEQ's Proposition 3 and Remark 2: Lipschitz constants, with the steps of their proof."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from equilibria_papers.theory.bounds.lipschitz import eq11, eq12, ours_at_the_data
from equilibria_papers.theory.bounds.report import AssumptionError

from .claim import Claim, Trial, claim, printed, reading
from .drawing import integer, log_uniform, normal, spectral, uniform, weights
from .geq_layers import geq, opteq, scalar_geq, unit
from .searching import climb


class _Pair:
    """A layer of Eq 6 (W, U, b, γ), two inputs, their equilibria, and the numbers of Prop 3."""

    def __init__(self, W: Tensor, U: Tensor, b: Tensor, gamma: float, x: Tensor) -> None:
        self.W, self.U, self.gamma, self.x = W, U, gamma, x
        c = x @ U.mT + b
        self.z = geq(W, c, gamma)
        self.r = c - self.z @ W.mT
        self.w, self.u = (spectral(t) for t in (W, U))
        self.mu = max(self.w, self.u)
        self.beta = torch.exp(-gamma * self.r.square().sum(1))
        self.beta_max = float(self.beta.max())
        self.bound = float(torch.cat([x.norm(dim=1), self.z.norm(dim=1)]).max())
        self.moved_x = float((x[0] - x[1]).norm())
        self.moved_z = float((self.z[0] - self.z[1]).norm())

    def case(self) -> dict[str, float]:
        return {
            "mu": self.mu, "gamma": self.gamma, "beta_max": self.beta_max, "B": self.bound,
            "ratio of distances": self.moved_z / self.moved_x,
        }  # fmt: skip


def _pair(g: torch.Generator, *, bias: bool) -> _Pair:
    n, m, d = integer(g, 1, 4), integer(g, 1, 4), integer(g, 1, 4)
    mu, size = uniform(g, 0.1, 0.99), log_uniform(g, 0.1, 5.0)
    x = size * normal(g, 1, d)
    step = log_uniform(g, 1e-3, 2.0) * size
    x = torch.cat([x, x + step * unit(g, 1, d)])
    b = normal(g, m) if bias else torch.zeros(m).double()
    w, u = weights(g, m, n, mu), weights(g, m, d, mu * uniform(g, 0.3, 1.0))
    return _Pair(w, u, b, log_uniform(g, 1e-3, 10.0), x)


def _against(limit: Callable[[_Pair], float], pair: _Pair) -> Trial | None:
    try:
        constant = limit(pair)
    except AssumptionError:
        return None
    return Trial(pair.moved_z / (constant * pair.moved_x), pair.case())


def _printed(p: _Pair) -> float:
    return eq11(p.mu, p.beta_max, p.gamma, p.bound)


def _at_data(p: _Pair) -> float:
    return ours_at_the_data(p.w, p.u, p.beta_max, p.gamma, float(p.r.norm(dim=1).max()))


def _scalar_ratio(
    w: float, u: float, b: float, gamma: float, x: float, step: float
) -> float | None:
    """‖Δz‖/(L‖Δx‖) of Eq 11 in one dimension; None outside its premise."""
    points = (x - step, x + step)
    cs = [u * p + b for p in points]
    zs = [scalar_geq(w, c, gamma) for c in cs]
    beta = max(math.exp(-gamma * (c - w * z) ** 2) for c, z in zip(cs, zs, strict=True))
    bound = max(*map(abs, points), *zs)
    try:
        limit = eq11(max(abs(w), abs(u)), beta, gamma, bound)
    except (AssumptionError, ValueError):
        return None
    return abs(zs[0] - zs[1]) / (limit * 2.0 * abs(step)) if step else None


def _search(g: torch.Generator, *, bias: bool) -> Iterator[Trial | None]:
    """Optimizers over layers of one dimension, from random starts."""

    def attempt(p: Tensor) -> Trial | None:
        w = 0.999 / (1.0 + math.exp(-float(p[0].clamp(-30, 30))))
        gamma = math.exp(float(p[2].clamp(-9, 6)))
        b, x = (float(p[1]) if bias else 0.0), float(p[3])
        case = {"w": w, "u": w, "b": b, "gamma": gamma, "x": x}
        found = _scalar_ratio(w, w, b, gamma, x, 1e-4)
        return None if found is None else Trial(found, {**case, "half step": 1e-4})

    low, high = torch.tensor([-2.0, 0, -4, -1]), torch.tensor([3.0, 3, 2, 2])
    starts = (low + (high - low) * torch.rand(4, generator=g) for _ in range(6))
    yield from climb(attempt, starts, methods=("Nelder-Mead",))


def _known(g: torch.Generator) -> Iterator[Trial | None]:
    """μ = 0.5, γ = 1, b = 1.29306, x = ±5e-5: 0.12557 against 0.07859; then a search."""
    one = torch.ones(1, 1, dtype=torch.float64)
    x = torch.tensor([[5e-5], [-5e-5]], dtype=torch.float64)
    yield _against(_printed, _Pair(0.5 * one, 0.5 * one, 1.29306 * one[0], 1.0, x))
    yield from _search(g, bias=True)


def _eq12(g: torch.Generator) -> Trial:
    n, m, d, mu = integer(g, 1, 4), integer(g, 1, 4), integer(g, 1, 4), uniform(g, 0.1, 0.97)
    w, u = weights(g, m, n, mu), weights(g, n, d, mu)
    x = normal(g, 2, d)
    z = opteq(w, x @ u.mT + normal(g, n))
    moved = float((z[0] - z[1]).norm() / (x[0] - x[1]).norm())
    return Trial(moved / eq12(mu), {"mu": mu, "n": n})


def _eq12_worst(g: torch.Generator) -> Iterator[Trial]:
    """W = U = μI, both inputs positive: z = μx/(1 − μ²), so the constant is attained."""
    for mu in (0.3, 0.6, 0.9, 0.97):
        w = mu * torch.eye(2, dtype=torch.float64)
        x = torch.rand(2, 2, generator=g, dtype=torch.float64) + 0.1
        z = opteq(w, mu * x)
        yield Trial(float((z[0] - z[1]).norm() / (x[0] - x[1]).norm()) / eq12(mu), {"mu": mu})


def _eq44(g: torch.Generator) -> Trial:
    """‖Wᵀ(Ux − Wz*)‖ ≤ Bμ², as the step |β₁ − β₂|·Bμ² of Eq 44 takes it."""
    p = _pair(g, bias=False)
    left = float((p.r @ p.W).norm(dim=1).max())
    return Trial(left / (p.bound * p.mu**2), p.case())


def _eq44_worst(g: torch.Generator) -> Iterator[Trial | None]:
    """Optimizers over W = μQ·diag(1, t) with two coordinates, U = μI and the input."""

    def attempt(p: Tensor) -> Trial:
        mu = 0.999 / (1.0 + math.exp(-float(p[0].clamp(-30, 30))))
        turn = torch.tensor([[p[1].cos(), -p[1].sin()], [p[1].sin(), p[1].cos()]]).double()
        w = mu * turn @ torch.diag(torch.stack([torch.ones_like(p[2]), p[2].tanh()]))
        back = torch.tensor([[p[3].cos(), -p[3].sin()], [p[3].sin(), p[3].cos()]]).double()
        x = torch.stack([p[4:6], p[4:6] + 1e-3])
        eye = mu * torch.eye(2, dtype=torch.float64)
        pair = _Pair(w @ back, eye, torch.zeros(2).double(), 10 ** float(p[6].clamp(-3, 1)), x)
        left = float((pair.r @ pair.W).norm(dim=1).max())
        return Trial(left / (pair.bound * pair.mu**2), pair.case())

    yield from climb(attempt, (normal(g, 7) for _ in range(4)), methods=("Nelder-Mead",))


def _eq46(g: torch.Generator) -> Trial:
    """|β₁ − β₂| ≤ √γ·|‖r₁‖ − ‖r₂‖| (the steepest slope of e^{−t²} is 0.858)."""
    p = _pair(g, bias=True)
    sizes = p.r.norm(dim=1)
    left, right = (
        abs(float(p.beta[0] - p.beta[1])),
        math.sqrt(p.gamma) * abs(float(sizes[0] - sizes[1])),
    )
    return Trial(left / right if right > 1e-12 else 0.0, p.case())


def _remark2(g: torch.Generator, *, layer: bool, bias: bool) -> Trial | None:
    """L_geq < L_opteq where β_max < 0.8, B < 1, √γ < 0.2, on a layer or as algebra alone."""
    if layer:
        p = _pair(g, bias=bias)
        mu, beta, bound, gamma = p.mu, p.beta_max, p.bound, p.gamma
        if bias:  # a large bias is what brings β down
            d = p.x.shape[1]
            x = uniform(g, 0.1, 0.9) * unit(g, 2, d)
            b = log_uniform(g, 1.0, 30.0) * unit(g, p.W.shape[0])
            p = _Pair(p.W, p.U, b, uniform(g, 0.005, 0.039), x)
            mu, beta, bound, gamma = p.mu, p.beta_max, p.bound, p.gamma
    else:
        mu, beta = uniform(g, 0.01, 0.999), uniform(g, 0.0, 0.8)
        bound, gamma = uniform(g, 0.0, 1.0), uniform(g, 1e-6, 0.2) ** 2
    if not (beta < 0.8 and bound < 1.0 and math.sqrt(gamma) < 0.2):
        return None
    case = {"mu": mu, "beta_max": beta, "B": bound, "gamma": gamma}
    return Trial(eq11(mu, beta, gamma, bound) / eq12(mu), case)


CLAIMS: tuple[Claim, ...] = (
    claim(
        "geq.prop3.eq11",
        "Proposition 3, Eq 11",
        r"For the layer of Eq 6, $\|z^*(x_1) - z^*(x_2)\| \le \frac{\beta_{\max}\mu^2 + "
        r"\sqrt\gamma B\mu^3}{1 - \beta_{\max}\mu^2 - \sqrt\gamma B\mu^3}\|x_1 - x_2\|$.",
        printed(lambda g: _against(_printed, _pair(g, bias=True)), _known, cost=4),
        reading(
            "without a bias",
            "b = 0, as the proof writes the layer",
            lambda g: _against(_printed, _pair(g, bias=False)),
            lambda g: _search(g, bias=False),
            cost=4,
        ),
        reading(
            "ours: from the largest residual",
            "κ = β_max + 0.1972√γ·max‖Ux + b − Wz‖ in place of β_max + √γBμ",
            lambda g: _against(_at_data, _pair(g, bias=True)),
            cost=4,
        ),
        note="The proof bounds ‖Ux − Wz‖ by norms of x and z alone; a bias is not in them. Without "
        "one the proof is sound, and 0.1972√γBμ³ would do for √γBμ³.",
    ),
    claim(
        "geq.prop3.eq12",
        "Proposition 3, Eq 12",
        r"For $z = \sigma(W^\top Wz + Ux + b)$, $\|z^*(x_1) - z^*(x_2)\| \le "
        r"\frac{\mu}{1-\mu^2}\|x_1 - x_2\|$.",
        printed(_eq12, _eq12_worst, cost=4),
    ),
    claim(
        "geq.eq44",
        "Eq 44 (proof of Proposition 3)",
        r"$\|W^\top(Ux - Wz^*)\| \le B\mu^2$ without a bias.",
        printed(_eq44, _eq44_worst, cost=4),
        note="At an equilibrium ⟨Wz, r⟩ = ‖z‖²/β ≥ 0, so ‖r‖ ≤ ‖Ux‖ and no factor 2 is needed. "
        "It is not true of any x and z bounded by B.",
    ),
    claim(
        "geq.eq46",
        "Eq 46 (proof of Proposition 3)",
        r"$|\beta_{x_1} - \beta_{x_2}| \le \sqrt\gamma\,\big|\|r_1\| - \|r_2\|\big|$.",
        printed(_eq46, cost=4),
    ),
    claim(
        "geq.remark2",
        "Remark 2",
        r"If $\beta_{\max} < 0.8$, $B < 1$ and $\sqrt\gamma < 0.2$, then "
        r"$L_{geq} < L_{opteq}$.",
        printed(lambda g: _remark2(g, layer=True, bias=False), cost=4),
        reading(
            "the algebra alone",
            "β_max, B and γ taken as free numbers, of no layer",
            lambda g: _remark2(g, layer=False, bias=False),
        ),
        reading(
            "with a bias",
            "a bias, with which Eq 11 itself fails",
            lambda g: _remark2(g, layer=True, bias=True),
            cost=4,
        ),
        note="Without a bias γ‖Ux − Wz‖² ≤ γ‖Ux‖² < 0.04, so β_max > e^{−0.04} = 0.961: no layer "
        "of Proposition 3 meets the premise.",
    ),
)
