"""GEQ's layers, small and by themselves: Eq 1–6, Table 4, Propositions 1 and 3, Remark 2.

    z = σ(e^{−γ‖c−Wz‖²}Wᵀ(c − Wz))  (Eq 6)      z = σ(WᵀWz + c)  (Eq 4)      σ = ReLU

Both by proximal steps τ = 2/(m + L), batched over c: the trials share no code with nn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from equilibria_papers.theory.bounds.lipschitz import eq11, eq12, ours_at_the_data
from equilibria_papers.theory.bounds.report import AssumptionError

from .claim import Trial
from .numerics import Random, climb, exponential, identity, logistic, ones, spectral, tensor, zeros

_B = 2.0 * math.exp(-1.5)
_SMALL = 1e-8  # a residual counts as zero below this


def unit(g: Random, *shape: int) -> Tensor:
    """Rows of length 1."""
    made = g.normal(*shape)
    length: Tensor = torch.linalg.vector_norm(made, dim=-1, keepdim=True)
    return made / length


def iterate(step: Callable[[Tensor], Tensor], z: Tensor, limit: int) -> Tensor:
    for i in range(limit):
        moved = step(z)
        if i % 16 == 15:
            change, size = float((moved - z).abs().max()), float(moved.abs().max())
            if change <= 1e-15 * (1 + size):
                return moved
        z = moved
    return z


def geq(W: Tensor, c: Tensor, gamma: float, limit: int = 4000) -> Tensor:
    """z of Eq 6. W [m, n], c [B, m] → [B, n]; needs ‖W‖ < 1.4969."""
    top = spectral(W) ** 2
    tau = 2.0 / (2.0 + top - _B * top)

    def step(z: Tensor) -> Tensor:
        r = c - z @ W.mT
        push = torch.exp(-gamma * r.square().sum(-1, keepdim=True)) * r @ W
        return ((1.0 - tau) * z + tau * push).clamp_min(0.0)

    return iterate(step, c.new_zeros(*c.shape[:-1], W.shape[1]), limit)


def opteq(W: Tensor, c: Tensor, limit: int = 20_000) -> Tensor:
    """z of Eq 4. W [m, n], c [B, n] → [B, n]; needs ‖W‖ < 1."""
    gram = W.mT @ W
    tau = 2.0 / (2.0 - spectral(gram))

    def step(z: Tensor) -> Tensor:
        return ((1.0 - tau) * z + tau * (z @ gram + c)).clamp_min(0.0)

    return iterate(step, torch.zeros_like(c), limit)


def scalar_geq(w: float, c: float, gamma: float) -> float:
    """z of Eq 6 in one dimension, by bisection: z ↦ z − σ(e^{−γ(c−wz)²}w(c − wz)) increases."""

    def gap(z: float) -> float:
        r = c - w * z
        return z - max(0.0, math.exp(-gamma * r * r) * w * r)

    low, high = 0.0, max(0.0, w * c) + 1e-300
    for _ in range(200):
        middle = 0.5 * (low + high)
        if middle in (low, high):
            break
        low, high = (middle, high) if gap(middle) < 0.0 else (low, middle)
    return 0.5 * (low + high)


def scalar_beta(w: float, c: float, gamma: float, z: float) -> float:
    """e^{−γ(c−wz)²}."""
    return math.exp(-gamma * (c - w * z) ** 2)


def _eq4(g: Random) -> Trial:
    """The z of Eq 4 gives the z̃ of Eq 1 by z̃ = W̃ᵀz."""
    n = g.integer(1, 5)
    tilde = g.weights(n, n, g.uniform(0.2, 0.95))  # W̃, and W = W̃ᵀ
    c = g.normal(n)
    z = opteq(tilde.mT, c[None])[0]
    state = tilde.mT @ z
    gap = (state - tilde.mT @ (tilde @ state + c).clamp_min(0.0)).norm()
    return Trial(float(gap) / (_SMALL * (1 + float(state.norm()))), {"n": n})


def _table4(g: Random) -> Trial:
    """A row of Table 4 by autograd: Eq 5 → Eq 6, or a kernel of ⟨c, z⟩."""
    kernels = ("linear", "polynomial", "sigmoid")
    kernel = "gaussian" if g.integer(0, 3) == 0 else g.choice(kernels)
    n = g.integer(1, 4)
    if kernel == "gaussian":
        m, gamma = g.integer(1, 4), g.uniform(0.1, 2.0)
        w, c, z = g.weights(m, n, g.uniform(0.2, 0.9)), g.normal(m), g.normal(n)
        r = c - w @ z.requires_grad_(True)
        q = torch.exp(-gamma * r.square().sum()) / (2 * gamma)
        claimed, case = 2 * gamma * q * w.mT @ r, {"gamma": gamma}
    else:
        degree = g.integer(2, 4)
        w, c, z = g.weights(g.integer(1, 4), n, g.uniform(0.2, 0.9)), g.normal(n), g.normal(n)
        t = c @ z.requires_grad_(True)
        value, slope = {
            "linear": (t, torch.ones_like(t)),
            "polynomial": (t**degree, degree * t ** (degree - 1)),
            "sigmoid": (t.tanh(), 1 - t.tanh() ** 2),
        }[kernel]
        q = value + 0.5 * (w @ z).square().sum()
        claimed, case = w.mT @ (w @ z) + slope * c, {"degree": degree}
    (pushed,) = torch.autograd.grad(q, z)
    gap = float((pushed - claimed.detach()).norm()) / (1 + float(pushed.norm()))
    return Trial(gap / _SMALL, {"kernel": kernel, **case})


def feature_map_trial(g: Random, *, square: bool, half: bool, constant: bool = False) -> Trial:
    """Is GEQ's output an equilibrium of 1ᵀf + ½‖z‖² − λ⟨Φ(c), Φ(Wz)⟩, all terms of Φ kept?

    ``square``: λ with ‖Wz‖²; ``half``: with the factor 1/2γ; ``constant``: λ held while ∂/∂z.
    """
    n, m = g.integer(1, 3), g.integer(1, 3)
    w, gamma = g.weights(m, n, g.uniform(0.3, 0.95)), g.uniform(0.1, 2.0)
    c = 2 * g.normal(m)
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
        moved = {"ratio of distances": self.moved_z / self.moved_x}
        sizes = {"mu": self.mu, "gamma": self.gamma, "beta_max": self.beta_max, "B": self.bound}
        return sizes | moved

    def eq44(self) -> Trial:
        """‖Wᵀ(Ux − Wz*)‖ ≤ Bμ², as the step |β₁ − β₂|·Bμ² of Eq 44 takes it."""
        left = float((self.r @ self.W).norm(dim=1).max())
        return Trial(left / (self.bound * self.mu**2), self.case())


def _pair(g: Random, *, bias: bool) -> _Pair:
    n, m, d = g.integer(1, 4), g.integer(1, 4), g.integer(1, 4)
    mu, size = g.uniform(0.1, 0.99), g.log_uniform(0.1, 5.0)
    x = size * g.normal(1, d)
    step = g.log_uniform(1e-3, 2.0) * size
    x = torch.cat([x, x + step * unit(g, 1, d)])
    b = g.normal(m) if bias else zeros(m)
    w, u = g.weights(m, n, mu), g.weights(m, d, mu * g.uniform(0.3, 1.0))
    return _Pair(w, u, b, g.log_uniform(1e-3, 10.0), x)


def _printed(p: _Pair) -> float:
    return eq11(p.mu, p.beta_max, p.gamma, p.bound)


def _at_data(p: _Pair) -> float:
    return ours_at_the_data(p.w, p.u, p.beta_max, p.gamma, float(p.r.norm(dim=1).max()))


def _ours(g: Random) -> Trial | None:
    return _against(_at_data, _pair(g, bias=True))


def _against(limit: Callable[[_Pair], float], pair: _Pair) -> Trial | None:
    try:
        constant = limit(pair)
    except AssumptionError:
        return None
    return Trial(pair.moved_z / (constant * pair.moved_x), pair.case())


def _eq11(g: Random, *, bias: bool) -> Trial | None:
    return _against(_printed, _pair(g, bias=bias))


def _scalar_ratio(w: float, b: float, gamma: float, x: float, step: float) -> float | None:
    """‖Δz‖/(L‖Δx‖) of Eq 11 in one dimension, u = w; None outside its premise."""
    points = (x - step, x + step)
    cs = [w * p + b for p in points]
    zs = [scalar_geq(w, c, gamma) for c in cs]
    beta = max(scalar_beta(w, c, gamma, z) for c, z in zip(cs, zs, strict=True))
    try:
        limit = eq11(abs(w), beta, gamma, max(*map(abs, points), *zs))
    except (AssumptionError, ValueError):
        return None
    return abs(zs[0] - zs[1]) / (limit * 2.0 * abs(step)) if step else None


def _search(g: Random, *, bias: bool) -> Iterator[Trial | None]:
    """Optimizers over layers of one dimension, from random starts."""

    def attempt(p: Tensor) -> Trial | None:
        w, gamma = logistic(p[0], 0.999), exponential(p[2], -9, 6)
        b, x = (float(p[1]) if bias else 0.0), float(p[3])
        found = _scalar_ratio(w, b, gamma, x, 1e-4)
        case = {"w": w, "u": w, "b": b, "gamma": gamma, "x": x, "half step": 1e-4}
        return None if found is None else Trial(found, case)

    low, high = torch.tensor([-2.0, 0, -4, -1]), torch.tensor([3.0, 3, 2, 2])
    starts = (low + (high - low) * torch.rand(4, generator=g.generator) for _ in range(6))
    yield from climb(attempt, starts, methods=("Nelder-Mead",))


def _known(g: Random, *, bias: bool) -> Iterator[Trial | None]:
    """μ = 0.5, γ = 1, b = 1.29306, x = ±5e-5: 0.12557 against 0.07859; then a search."""
    one = ones(1, 1)
    x = tensor([[5e-5], [-5e-5]])
    yield _against(_printed, _Pair(0.5 * one, 0.5 * one, 1.29306 * one[0], 1.0, x))
    yield from _search(g, bias=bias)


def _moved(z: Tensor, x: Tensor) -> float:
    return float((z[0] - z[1]).norm() / (x[0] - x[1]).norm())


def _eq12(g: Random) -> Trial:
    n, m, d, mu = g.integer(1, 4), g.integer(1, 4), g.integer(1, 4), g.uniform(0.1, 0.97)
    w, u = g.weights(m, n, mu), g.weights(n, d, mu)
    x = g.normal(2, d)
    z = opteq(w, x @ u.mT + g.normal(n))
    return Trial(_moved(z, x) / eq12(mu), {"mu": mu, "n": n})


def _eq12_worst(g: Random) -> Iterator[Trial]:
    """W = U = μI, both inputs positive: z = μx/(1 − μ²), so the constant is attained."""
    for mu in (0.3, 0.6, 0.9, 0.97):
        x = g.share(2, 2) + 0.1
        yield Trial(_moved(opteq(mu * identity(2), mu * x), x) / eq12(mu), {"mu": mu})


def _eq44(g: Random) -> Trial:
    return _pair(g, bias=False).eq44()


def _eq44_worst(g: Random) -> Iterator[Trial | None]:
    """Optimizers over W = μQ·diag(1, t) with two coordinates, U = μI and the input."""

    def turned(angle: Tensor) -> Tensor:
        return tensor([[angle.cos(), -angle.sin()], [angle.sin(), angle.cos()]])

    def attempt(p: Tensor) -> Trial:
        mu = logistic(p[0], 0.999)
        w = mu * turned(p[1]) @ torch.diag(torch.stack([torch.ones_like(p[2]), p[2].tanh()]))
        x = torch.stack([p[4:6], p[4:6] + 1e-3])
        gamma: float = 10 ** float(p[6].clamp(-3, 1))
        return _Pair(w @ turned(p[3]), mu * identity(2), zeros(2), gamma, x).eq44()

    yield from climb(attempt, (g.normal(7) for _ in range(4)), methods=("Nelder-Mead",))


def _eq46(g: Random) -> Trial:
    """|β₁ − β₂| ≤ √γ·|‖r₁‖ − ‖r₂‖| (the steepest slope of e^{−t²} is 0.858)."""
    p = _pair(g, bias=True)
    sizes = p.r.norm(dim=1)
    left = abs(float(p.beta[0] - p.beta[1]))
    right = math.sqrt(p.gamma) * abs(float(sizes[0] - sizes[1]))
    return Trial(left / right if right > 1e-12 else 0.0, p.case())


def _remark2(g: Random, *, layer: bool, bias: bool = False) -> Trial | None:
    """L_geq < L_opteq where β_max < 0.8, B < 1, √γ < 0.2, on a layer or as algebra alone."""
    if layer:
        p = _pair(g, bias=bias)
        if bias:  # a large bias is what brings β down
            x = g.uniform(0.1, 0.9) * unit(g, 2, p.x.shape[1])
            b = g.log_uniform(1.0, 30.0) * unit(g, p.W.shape[0])
            p = _Pair(p.W, p.U, b, g.uniform(0.005, 0.039), x)
        mu, beta, bound, gamma = p.mu, p.beta_max, p.bound, p.gamma
    else:
        mu, beta = g.uniform(0.01, 0.999), g.uniform(0.0, 0.8)
        bound, gamma = g.uniform(0.0, 1.0), g.uniform(1e-6, 0.2) ** 2
    if not (beta < 0.8 and bound < 1.0 and math.sqrt(gamma) < 0.2):
        return None
    case = {"mu": mu, "beta_max": beta, "B": bound, "gamma": gamma}
    return Trial(eq11(mu, beta, gamma, bound) / eq12(mu), case)
