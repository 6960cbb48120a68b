"""Our facts 1–3 on the Gaussian layer: curvature, contraction, uniqueness.

The bounds are the library's (``Problem.curvature``); eigenvalues and equilibria are the audit's
own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from equilibria.problems.gaussian import GAUSSIAN_BEND

from .claims import Claim, Trial, Variant
from .drawing import integer, norm, normal, uniform
from .ours_layers import THRESHOLD, GaussLayer, draw_gauss, scalar_layer
from .searching import climb, evolve
from .solving import Unsolved, bisect, newton

__all__ = ["CLAIMS"]


def _number(value: float | Tensor) -> float:
    return float(torch.as_tensor(value).reshape(-1)[0])


# ----------------------------------------------------------------------------------------- fact 1


def _basis(z: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.eye(len(z), dtype=z.dtype))


def _fact1(draw: torch.Generator) -> Trial:
    layer = draw_gauss(draw, 0.05, 3.0)
    return _curvature_ratio(layer, normal(draw, layer.w.shape[1]))


def _curvature_ratio(layer: GaussLayer, z: Tensor) -> Trial:
    """Eigenvalues of the Hessian (autograd of q as defined) against the library's bounds."""
    with torch.enable_grad():
        found = torch.autograd.functional.hessian(layer.value, z)
    values = torch.linalg.eigvalsh(found)
    problem, state = layer.problem(len(z)), layer.state(*[z] * len(z))
    scale = 1e-9 * (1.0 + norm(found))
    own = problem.coupling.hvp(state, layer.state(*_basis(z))).flatten(1)
    ratio = max(norm(found - layer.hessian(z)), norm(own - found)) / scale
    slack = 1e-12 * layer.mu**2
    for bounds in (problem.coupling.curvature(), problem.coupling.local_curvature(state)):
        top, low = _number(bounds.upper), _number(bounds.lower)
        ratio = max(ratio, float(values[-1]) / (top + slack), float(-values[0]) / (slack - low))
    return Trial(ratio, {**layer.case(), "z": z, "eigenvalues": values})


def _fact1_adversarial(draw: torch.Generator) -> Iterator[Trial | None]:
    """n = 1 and two patches: energies moved by optimizers; both ends are nearly reached."""

    def attempt(at: Tensor) -> Trial | None:
        layer = scalar_layer(at[:2], at[2:4], math.exp(float(at[4].clamp(-4, 4))))
        return None if layer.mu < 1e-2 else _curvature_ratio(layer, at[5:6])

    yield from climb(attempt, (normal(draw, 6) for _ in range(2)), evaluations=150)


def _fact1_sharp(draw: torch.Generator) -> Trial:
    """A patch at s = 0 has the curvature μ², one at s = 3/2 has −2e^{−3/2}μ²."""
    mu, gamma = uniform(draw, 0.1, 3.0), 10.0 ** uniform(draw, -2.0, 2.0)
    zero = torch.zeros(1, dtype=torch.float64)
    ends = []
    for energy in (0.0, 1.5):
        c = torch.tensor([math.sqrt(energy / gamma)], dtype=torch.float64)
        layer = scalar_layer(torch.tensor([mu], dtype=torch.float64), c, gamma)
        ends.append(float(torch.autograd.functional.hessian(layer.value, zero)))
    bounds = layer.problem().coupling.curvature()
    ratio = max(_number(bounds.upper) / ends[0], _number(bounds.lower) / ends[1])
    return Trial(ratio, {"mu": mu, "gamma": gamma, "curvatures": ends})


def _bend(draw: torch.Generator) -> Trial:
    """‖∇²q(a) − ∇²q(b)‖ ≤ 1.9518√γ μ³‖a − b‖."""
    layer = draw_gauss(draw, 0.1, 2.0)
    n = layer.w.shape[1]
    a = normal(draw, n) * 2.0
    b = a + normal(draw, n) * 10.0 ** uniform(draw, -4.0, 0.5)
    change = float(torch.linalg.matrix_norm(layer.hessian(a) - layer.hessian(b), 2))
    allowed = GAUSSIAN_BEND * math.sqrt(layer.gamma) * layer.mu**3 * norm(a - b)
    return Trial(change / (allowed + 1e-13 * layer.mu**2), {**layer.case(), "a": a, "b": b})


# ----------------------------------------------------------------------------------- facts 2 and 3


def _pair(draw: torch.Generator, n: int) -> tuple[Tensor, Tensor]:
    a = normal(draw, n) * uniform(draw, 0.0, 3.0)
    return a, a + normal(draw, n) * 10.0 ** uniform(draw, -3.0, 0.7)


def _step_ratio(layer: GaussLayer, a: Tensor, b: Tensor, *, best: bool) -> Trial:
    """‖T_τ(a) − T_τ(b)‖/‖a − b‖ of the library's step, over μ² or (L − m)/(L + m)."""
    problem, states = layer.problem(2), layer.state(a, b)
    m, top = layer.modulus, 1.0 + layer.mu**2
    tau = 2.0 / (m + top) if best else 1.0
    after = problem.step(states, tau).flatten(1)
    allowed = (top - m) / (top + m) if best else layer.mu**2
    ratio = norm(after[0] - after[1]) / (allowed * norm(a - b) + 1e-13)
    return Trial(ratio, {**layer.case(), "a": a, "b": b, "tau": tau})


def _fact2(draw: torch.Generator) -> Trial:
    layer = draw_gauss(draw, 0.05, 0.999)
    return _step_ratio(layer, *_pair(draw, layer.w.shape[1]), best=False)


def _fact3_rate(draw: torch.Generator) -> Trial:
    layer = draw_gauss(draw, 0.05, 1.49)
    return _step_ratio(layer, *_pair(draw, layer.w.shape[1]), best=True)


def _step_adversarial(draw: torch.Generator, *, best: bool) -> Iterator[Trial | None]:
    """n = 1, three patches: everything but μ moved by optimizers."""
    for mu in (0.5, 0.95) if not best else (0.7, 1.2, 1.48):

        def attempt(at: Tensor, mu: float = mu) -> Trial | None:
            if norm(at[:3]) < 1e-6 or abs(float(at[7] - at[6])) < 1e-6:
                return None
            layer = scalar_layer(at[:3] * (mu / norm(at[:3])), at[3:6], 1.0)
            return _step_ratio(layer, at[6:7], at[7:8], best=best)

        yield from climb(attempt, (normal(draw, 8) for _ in range(2)), evaluations=250)


def _convexity_ratio(layer: GaussLayer, a: Tensor, b: Tensor) -> float:
    """m‖a − b‖²/⟨∇g(a) − ∇g(b), a − b⟩, g = ½‖·‖² + q, with the library's m and gradient."""
    problem, states = layer.problem(2), layer.state(a, b)
    force = problem.gradient(states).flatten(1)
    moved = a - b
    across = float((force[0] - force[1]) @ moved)
    m = _number(problem.curvature().lower)
    return m * float(moved @ moved) / across if across > 0 else math.inf


def _fact3(draw: torch.Generator) -> Trial:
    layer = draw_gauss(draw, 0.05, 1.4969)
    a, b = _pair(draw, layer.w.shape[1])
    return Trial(_convexity_ratio(layer, a, b), {**layer.case(), "a": a, "b": b})


def _fact3_adversarial(draw: torch.Generator) -> Iterator[Trial | None]:
    """Optimizers on n = 1, then equilibria of layers at μ up to 1.4969 from many starts."""

    def attempt(at: Tensor) -> Trial | None:
        if norm(at[:2]) < 1e-6 or abs(float(at[4] - at[5])) < 1e-6:
            return None
        layer = scalar_layer(at[:2] * (1.49 / norm(at[:2])), at[2:4], 1.0)
        return Trial(_convexity_ratio(layer, at[4:5], at[5:6]), layer.case())

    yield from climb(attempt, (normal(draw, 6) for _ in range(2)), evaluations=250)
    yield from evolve(attempt, [(-2.0, 2.0)] * 4 + [(-3.0, 3.0)] * 2, draw)
    for _ in range(60):
        layer = draw_gauss(draw, 1.3, 1.4969, activations=("identity", "relu"))
        found = _equilibria(layer, draw, starts=8)
        spread = max(norm(z - found[0]) for z in found)
        yield Trial(spread / 1e-5, {**layer.case(), "equilibria": found})


def _equilibria(layer: GaussLayer, draw: torch.Generator, starts: int) -> list[Tensor]:
    """What Newton finds from random starts, at residuals below 1e-12."""
    found = []
    for _ in range(starts):
        start = normal(draw, layer.w.shape[1]) * 3.0
        z, size = newton(layer, layer.slope, start)
        if size > 1e-12:
            try:
                z = layer.equilibrium(start)
            except Unsolved:
                continue
        found.append(z)
    return found or [layer.equilibrium()]


def _fact3_sharp(draw: torch.Generator) -> Trial:
    """n = 1, μ just above the threshold: √γc = t(1 + μ²e^{−t²}) has three solutions t."""
    mu: float = THRESHOLD * (1.0 + 10.0 ** uniform(draw, -6.0, 0.0))
    gamma = 10.0 ** uniform(draw, -1.0, 1.0)
    middle = math.sqrt(1.5)

    level: float = middle * (1.0 + mu**2 * math.exp(-1.5))

    def rise(t: Tensor) -> Tensor:
        return t * (1.0 + mu**2 * torch.exp(-t * t)) - level

    far = torch.logspace(-5.0, 1.0, 400, dtype=torch.float64)
    line = torch.cat([middle - far.flip(0), middle + far])
    values = rise(line)
    change = values[:-1] * values[1:] < 0
    roots = [torch.tensor(middle, dtype=torch.float64)]
    for low, high in zip(line[:-1][change], line[1:][change], strict=True):
        if low < middle < high:
            continue
        sign = 1.0 if float(rise(high)) > 0 else -1.0
        roots.append(bisect(lambda t, sign=sign: sign * rise(t), low, high))  # type: ignore[misc]
    c = torch.tensor([level / math.sqrt(gamma)], dtype=torch.float64)
    name = ("identity", "relu")[integer(draw, 0, 1)]
    layer = scalar_layer(torch.tensor([mu], dtype=torch.float64), c, gamma, name)
    states = [(layer.c - t / math.sqrt(gamma)) / mu for t in roots]
    after = layer.problem(len(states)).step(layer.state(*states)).flatten(1)
    left = max(norm(a - z) for a, z in zip(after, states, strict=True))
    ratio = max(3.0 / len(states), left / (1e-9 * (1.0 + norm(layer.c))))
    case = {"mu": mu, "gamma": gamma, "c": layer.c, "activation": name, "equilibria": states}
    return Trial(ratio, case)


CLAIMS = (
    Claim(
        id="ours.fact1",
        paper="ours",
        where="Fact 1, curvature",
        statement=r"$-2e^{-3/2}\mu^2I \preceq \nabla^2q \preceq \mu^2I$ for every $\gamma$ and "
        r"input, $\mu$ the norm of $z \mapsto (\text{rows of }Wz)W_h$; at one $z$ "
        r"$\min(0, \min_ie^{-s_i}(1-2s_i))\mu^2$ and $\max_ie^{-s_i}\mu^2$.",
        variants=(
            Variant(
                name="ours",
                random=_fact1,
                adversarial=_fact1_adversarial,
                cost=2.0,
                proof=r"$\nabla^2q = \sum_iA_i^\top e^{-s_i}(I - 2\gamma h_ih_i^\top)A_i$, and "
                r"$-2e^{-3/2} \le e^{-s}(1 - 2s) \le e^{-s} \le 1$ for $s \ge 0$",
            ),
        ),
    ),
    Claim(
        id="ours.fact1.sharp",
        paper="ours",
        where="Fact 1, both ends are attained",
        statement=r"For every $\mu$ and $\gamma$ there are layers with $\nabla^2q = \mu^2$ and "
        r"$= -2e^{-3/2}\mu^2$; the ratio is bound over attained.",
        variants=(
            Variant(
                name="ours",
                random=_fact1_sharp,
                proof=r"$n = 1$ with $s = 0$, and with $s = 3/2$, where $e^{-s}(1 - 2s)$ is least",
            ),
        ),
    ),
    Claim(
        id="ours.bend",
        paper="ours",
        where="Lipschitz constant of the Hessian",
        statement=r"$\|\nabla^2q(a) - \nabla^2q(b)\|_2 \le 1.9518\sqrt\gamma\,\mu^3\|a-b\|$.",
        variants=(
            Variant(
                name="ours",
                random=_bend,
                proof=r"a symmetric trilinear form attains its norm at $u, u, u$, and "
                r"$\max|(4a^3 - 6a)e^{-a^2}| = 1.9518$",
            ),
        ),
    ),
    Claim(
        id="ours.fact2",
        paper="ours",
        where="Fact 2, contraction",
        statement=r"$\|T(a) - T(b)\| \le \mu^2\|a-b\|$ for every $\gamma$ and prior, so $T$ "
        r"contracts for $\mu < 1$.",
        variants=(
            Variant(
                name="ours",
                random=_fact2,
                adversarial=lambda draw: _step_adversarial(draw, best=False),
                proof=r"fact 1 bounds $\nabla q$'s Lipschitz constant by $\mu^2$, and a proximal "
                "map does not expand",
            ),
        ),
    ),
    Claim(
        id="ours.fact3",
        paper="ours",
        where="Fact 3, uniqueness",
        statement=r"$G$ is strongly convex with modulus $m = 1 - 2e^{-3/2}\mu^2$; so there is one "
        r"equilibrium for $\mu^2 < e^{3/2}/2$, $\mu < 1.4969$.",
        variants=(
            Variant(
                name="ours",
                random=_fact3,
                adversarial=_fact3_adversarial,
                proof=r"fact 1: $\nabla^2(\frac12\|z\|^2 + q) \succeq (1 - 2e^{-3/2}\mu^2)I$",
            ),
        ),
    ),
    Claim(
        id="ours.fact3.sharp",
        paper="ours",
        where="Fact 3 is sharp",
        statement=r"For every $\mu > e^{3/4}/\sqrt2 = 1.4969$ there is a layer with three "
        r"equilibria: $n = 1$, $\sqrt\gamma c = \sqrt{3/2}(1 + \mu^2e^{-3/2})$.",
        variants=(
            Variant(
                name="ours",
                random=_fact3_sharp,
                cost=4.0,
                proof=r"$t \mapsto t(1 + \mu^2e^{-t^2})$ falls at $t^2 = 3/2$, so its value there "
                "is taken three times",
            ),
        ),
    ),
    Claim(
        id="ours.fact3.rate",
        paper="ours",
        where="Fact 3, damped rate",
        statement=r"With $\tau = 2/(m+L)$, $L = 1+\mu^2$, $T_\tau$ contracts with the factor "
        r"$(L-m)/(L+m)$ for every $\mu < 1.4969$.",
        variants=(
            Variant(
                name="ours",
                random=_fact3_rate,
                adversarial=lambda draw: _step_adversarial(draw, best=True),
                proof=r"$\|I - \tau H\| \le \max(|1 - \tau m|, |\tau L - 1|)$ for "
                r"$mI \preceq H \preceq LI$, and a proximal map does not expand",
            ),
        ),
    ),
)
