"""Our facts 5 to 7: how far z* moves with the input, other kernels, the optimal value.

Λ is the library's ``gaussian_sensitivity``, the factor of the mean rule its own
``MeanPatchEnergy.lipschitz_factor``, the local constant that of ``certify``.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from equilibria.certify import certify
from equilibria.problems import (
    Coupling,
    DegenerateKernelWarning,
    Linear,
    MeanPatchEnergy,
    Polynomial,
    Problem,
    Sigmoidal,
    gaussian_sensitivity,
)

from .claim import Trial
from .numerics import (
    ACTIVATIONS,
    Activation,
    Random,
    climb,
    evolve,
    identity,
    newton,
    norm,
    solve,
    spectral,
    tensor,
    zeros,
)
from .ours_gaussian import PRIORS, B, GaussLayer, draw_gauss, scalar_layer

Rule = Callable[[Tensor], float]
"""Patch energies at z = 0, [P] → γ."""


def _mean_rule(energies: Tensor) -> float:
    return 0.2 / float(energies.mean())


def _min_rule(energies: Tensor) -> float:
    return 0.2 / float(energies.min())


def _moved(layer: GaussLayer, features: Tensor, rule: Rule | None) -> GaussLayer:
    """The same weights with W_h absorbed, at these features c̃ [P, k]; γ by the rule if given."""
    k = features.shape[1]
    gamma = layer.gamma if rule is None else rule(features.square().sum(1))
    a, c = layer.a.flatten(0, 1), features.flatten()
    return GaussLayer(a, identity(k), c, gamma, layer.sigma)


def _constant(mu: float, kind: str) -> float:
    """Λ(μ), μ/m, or the mean rule's factor times μ/m."""
    if kind == "sharp":
        return float(gaussian_sensitivity(mu))
    factor = MeanPatchEnergy(0.2).lipschitz_factor if kind == "mean" else 1.0
    assert factor is not None
    return factor * mu / (1.0 - B * mu**2)


def _two_inputs(
    layer: GaussLayer, first: Tensor, second: Tensor, rule: Rule | None, kind: str
) -> Trial | None:
    """‖z*(c̃₁) − z*(c̃₂)‖ over the constant times ‖c̃₁ − c̃₂‖."""
    apart = norm(first - second)
    smallest = min(float(f.square().sum(1).min()) for f in (first, second))
    if apart < 1e-7 or (rule is not None and smallest < 1e-6):
        return None
    one, two = _moved(layer, first, rule), _moved(layer, second, rule)
    start = one.equilibrium()
    moved = norm(start - two.equilibrium(start))
    case = {"mu": layer.mu, "gamma": [one.gamma, two.gamma], "activation": layer.sigma.name}
    case |= {"A": one.w, "features 1": first, "features 2": second}
    return Trial(moved / (_constant(layer.mu, kind) * apart + 1e-11), case)


def _random_inputs(draw: Random, *, kind: str, rule: Rule | None = None) -> Trial | None:
    layer = draw_gauss(draw, 0.05, 1.45)
    first = layer.features
    change = draw.normal(*first.shape) * 10.0 ** draw.uniform(-4.0, 0.5)
    return _two_inputs(layer, first, first + change / math.sqrt(layer.gamma), rule, kind)


def _search_inputs(draw: Random, *, kind: str, rule: Rule | None = None) -> Iterator[Trial | None]:
    """n = 1, two patches of one channel, two nearby inputs; Nelder–Mead, Powell, evolution."""
    for mu in (0.4, 0.7, 0.95, 1.3):
        for name in ("identity", "relu"):

            def attempt(at: Tensor, mu: float = mu, name: str = name) -> Trial | None:
                if norm(at[:2]) < 1e-6 or norm(at[4:6]) < 1e-9:
                    return None
                a = at[:2] * (mu / norm(at[:2]))
                layer = scalar_layer(a, at[2:4], 1.0, name)
                near = at[2:4] + at[4:6] * (1e-4 / norm(at[4:6]))
                return _two_inputs(layer, at[2:4, None], near[:, None], rule, kind)

            yield from climb(attempt, [draw.normal(6)], evaluations=150)
            if name == "identity":
                box = [(-1.0, 1.0)] * 2 + [(-3.0, 3.0)] * 2 + [(-1.0, 1.0)] * 2
                yield from evolve(attempt, box, draw, generations=5, population=6)


def _sharp(draw: Random) -> Trial:
    """n = 1, two patches at s = 0 and s = 3/2, the best split of ρ ≤ μ: Λ(μ) over what is met."""
    mu, gamma = draw.uniform(0.05, 1.45), 10.0 ** draw.uniform(-1.0, 1.0)
    angle = torch.linspace(0.0, math.pi / 2.0, 20001, dtype=torch.float64)
    sizes = mu * torch.linspace(0.02, 1.0, 50, dtype=torch.float64)[:, None]
    cos2, sin2 = angle.cos().square(), angle.sin().square()
    found = sizes * (cos2 + B**2 * sin2).sqrt() / (1.0 + sizes**2 * (cos2 - B * sin2))
    row, column = divmod(int(found.argmax()), len(angle))
    a = sizes[row] * torch.stack([angle[column].cos(), angle[column].sin()])
    h = tensor([0.0, math.sqrt(1.5 / gamma)])
    star = float((a * torch.exp(-gamma * h * h) * h).sum())
    c = h + a * star
    push = a * tensor([1.0, -B])
    step = push * (1e-5 / (norm(push) * math.sqrt(gamma)))
    layer = scalar_layer(a, c, gamma)
    sides = [dataclasses.replace(layer, c=c + sign * step).equilibrium() for sign in (1.0, -1.0)]
    met = norm(sides[0] - sides[1]) / norm(2.0 * step)
    case = {"mu": mu, "gamma": gamma, "A": a, "c": c, "direction": push, "met": met}
    return Trial(_constant(mu, "sharp") / met, case)


def _min_growth(draw: Random) -> Trial:
    """P patches of μ/√P at s = 3/2 and one that sets γ: at least 1.8332√P·μ/m."""
    patches = 4 ** draw.integer(0, 5)
    return _min_family(patches, draw.uniform(0.1, 1.3), 10.0 ** draw.uniform(-1.0, 1.0))


def _min_family(patches: int, mu: float, gamma: float) -> Trial:
    layer, features, change = _min_layer(patches, mu, gamma)
    sides = [
        _moved(layer, features + sign * change, _min_rule).equilibrium() for sign in (1.0, -1.0)
    ]
    met = norm(sides[0] - sides[1]) / norm(2.0 * change)
    wanted = 2.0 * (1.5 / math.e) ** 1.5 / math.sqrt(0.2) * math.sqrt(patches)
    ratio = wanted * _constant(mu, "plain") / met
    return Trial(ratio, {"patches": patches, "mu": mu, "gamma": gamma, "met": met})


def _min_layer(patches: int, mu: float, gamma: float) -> tuple[GaussLayer, Tensor, Tensor]:
    a = torch.full((patches + 1,), mu / math.sqrt(patches), dtype=torch.float64)
    a[-1] = 0.0
    h = math.sqrt(1.5 / gamma)
    star = math.sqrt(patches) * mu * math.exp(-1.5) * h
    features = (h + a * star)[:, None]
    features[-1, 0] = math.sqrt(0.2 / gamma)
    change = torch.zeros_like(features)
    change[-1, 0] = 1e-5 / math.sqrt(gamma)
    return scalar_layer(a, features[:, 0], gamma), features, change


def _any_rule(draw: Random, *, rule: Rule, kind: str) -> Iterator[Trial | None]:
    """The min rule's family: the ratio grows with the number of patches."""
    for patches in (1, 4, 16, 64, 256):
        layer, features, change = _min_layer(patches, 0.6, 1.0)
        found = _two_inputs(layer, features, features + change, rule, kind)
        if found is not None:
            details = "P rows 0.6/sqrt(P) at energy 1.5, one row 0 whose energy 0.2 sets gamma = 1"
            yield Trial(found.ratio, {"patches P": patches, "mu": 0.6, "layer": details})
    yield from _search_inputs(draw, rule=rule, kind=kind)


def _response(layer: GaussLayer, star: Tensor) -> tuple[Tensor, Tensor]:
    """dz*/dc̃ [n, P·k] by the implicit function theorem, and the messages' slope [P·k, P·k]."""
    block = torch.block_diag(*layer.inner_hessian(star))
    slope = layer.sigma.slope(layer.force(star))[:, None]
    whole = identity(len(star)) - layer.slope(star)
    return torch.linalg.solve(whole, slope * (layer.a.flatten(0, 1).mT @ block)), block


@torch.no_grad()
def _local(draw: Random) -> Trial:
    """dz*/dc against certify's lipschitz_local, γ held fixed."""
    layer = draw_gauss(draw, 0.05, 1.45, flat=True)
    star = layer.equilibrium()
    moved = spectral(_response(layer, star)[0])
    found = certify(layer.problem(), z=layer.state(star))
    assert found.lipschitz_local is not None
    local = float(found.lipschitz_local[0])
    everywhere = _constant(layer.mu, "sharp")
    ratio = max(moved / (local + 1e-12), moved / everywhere)
    return Trial(ratio, {**layer.case(), "true": moved, "local bound": local})


def _value_hessian(layer: GaussLayer) -> Tensor:
    """∇²φ(c̃), φ(c̃) = min_z G: ∇φ = (e^{−sᵢ}hᵢ)ᵢ at z*."""
    moved, block = _response(layer, layer.equilibrium())
    a = layer.a.flatten(0, 1)
    hessian: Tensor = block @ (identity(len(a)) - a @ moved)
    return hessian


def _value_trial(layer: GaussLayer) -> Trial:
    values = torch.linalg.eigvals(_value_hessian(layer)).real
    kappa = B / layer.modulus
    ratio = max(float(values.max()), -float(values.min()) / kappa)
    return Trial(ratio, {**layer.case(), "least": float(values.min()), "kappa": kappa})


def _value_random(draw: Random) -> Trial:
    return _value_trial(draw_gauss(draw, 0.05, 1.45))


def _value_search(draw: Random) -> Iterator[Trial | None]:
    """n = 1, two patches of one channel: where the optimal value bends most."""
    for mu in (0.4, 0.95, 1.3, 1.45):
        for name in ("identity", "relu", "tanh"):

            def attempt(at: Tensor, mu: float = mu, name: str = name) -> Trial | None:
                if norm(at[:2]) < 1e-6:
                    return None
                return _value_trial(scalar_layer(at[:2] * (mu / norm(at[:2])), at[2:4], 1.0, name))

            yield from climb(
                attempt, [draw.normal(4), tensor([1.0, 0.0, 1.5, 0.0])], evaluations=200
            )


def _envelope(layer: GaussLayer, u: Tensor, x: Tensor) -> Tensor:
    """x − 2/(L‖U‖²)·Uᵀ(∇φ + κc̃) at c̃ = Ux, written out."""
    kappa = B / layer.modulus
    c = (u @ x).reshape(layer.features.shape)
    at = _moved(layer, c, None)
    h = c - layer.a @ at.equilibrium()
    message = torch.exp(-layer.gamma * h.square().sum(1, keepdim=True)) * h
    step = 2.0 / ((1.0 + kappa) * spectral(u) ** 2)
    return x - step * u.mT @ (message + kappa * c).flatten()


def _envelope_random(draw: Random) -> Trial:
    """Two inputs, near or far: their distance after the layer over that before."""
    layer = draw_gauss(draw, 0.05, 1.45)
    size = layer.features.numel()
    u = draw.normal(size, draw.integer(1, 5))
    first = draw.normal(u.shape[1]) / math.sqrt(layer.gamma)
    second = first + draw.normal(u.shape[1]) * 10.0 ** draw.uniform(-3.0, 0.5)
    after = norm(_envelope(layer, u, first) - _envelope(layer, u, second))
    case = {**layer.case(), "U": u, "x1": first, "x2": second}
    return Trial((after - 1e-10) / norm(first - second), case)


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
