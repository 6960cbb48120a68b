"""Our fact 5: how far z* moves with the input, for a fixed γ (sharp), and for a γ from the input.

Λ is the library's ``gaussian_sensitivity``, the factor of the mean rule its own
``MeanPatchEnergy.lipschitz_factor``, the local constant that of ``certify``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from equilibria.certify import certify
from equilibria.problems import MeanPatchEnergy, gaussian_sensitivity

from .claim import Trial, claim, reading
from .drawing import ACTIVATIONS, integer, norm, normal, spectral, uniform
from .ours_layers import B, GaussLayer, draw_gauss
from .searching import climb, evolve

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
    return GaussLayer(
        layer.a.flatten(0, 1),
        torch.eye(k, dtype=torch.float64),
        features.flatten(),
        gamma,
        layer.sigma,
    )


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
    case = {
        "mu": layer.mu,
        "gamma": [one.gamma, two.gamma],
        "activation": layer.sigma.name,
        "A": one.w,
        "features 1": first,
        "features 2": second,
    }
    return Trial(moved / (_constant(layer.mu, kind) * apart + 1e-11), case)


def _random_inputs(
    draw: torch.Generator, rule: Rule | None, kind: str, high: float = 1.45
) -> Trial | None:
    layer = draw_gauss(draw, 0.05, high)
    first = layer.features
    change = normal(draw, *first.shape) * 10.0 ** uniform(draw, -4.0, 0.5)
    return _two_inputs(layer, first, first + change / math.sqrt(layer.gamma), rule, kind)


def _search_inputs(draw: torch.Generator, rule: Rule | None, kind: str) -> Iterator[Trial | None]:
    """n = 1, two patches of one channel, two nearby inputs; Nelder–Mead, Powell, evolution."""
    for mu in (0.4, 0.7, 0.95, 1.3):
        for name in ("identity", "relu"):

            def attempt(at: Tensor, mu: float = mu, name: str = name) -> Trial | None:
                if norm(at[:2]) < 1e-6 or norm(at[4:6]) < 1e-9:
                    return None
                a = at[:2] * (mu / norm(at[:2]))
                one = torch.ones(1, 1, dtype=torch.float64)
                layer = GaussLayer(a[:, None], one, at[2:4], 1.0, ACTIVATIONS[name])
                near = at[2:4] + at[4:6] * (1e-4 / norm(at[4:6]))
                return _two_inputs(layer, at[2:4, None], near[:, None], rule, kind)

            yield from climb(attempt, [normal(draw, 6)], evaluations=150)
            if name == "identity":
                box = [(-1.0, 1.0)] * 2 + [(-3.0, 3.0)] * 2 + [(-1.0, 1.0)] * 2
                yield from evolve(attempt, box, draw, generations=5, population=6)


def _sharp(draw: torch.Generator) -> Trial:
    """n = 1, two patches at s = 0 and s = 3/2, the best split of ρ ≤ μ: Λ(μ) over what is met."""
    mu, gamma = uniform(draw, 0.05, 1.45), 10.0 ** uniform(draw, -1.0, 1.0)
    angle = torch.linspace(0.0, math.pi / 2.0, 20001, dtype=torch.float64)
    best, rho, theta = 0.0, mu, 0.0
    for size in mu * torch.linspace(0.02, 1.0, 50, dtype=torch.float64):
        cos2, sin2 = angle.cos().square(), angle.sin().square()
        found = size * (cos2 + B**2 * sin2).sqrt() / (1.0 + size**2 * (cos2 - B * sin2))
        at = int(found.argmax())
        if float(found[at]) > best:
            best, rho, theta = float(found[at]), float(size), float(angle[at])
    a = rho * torch.tensor([math.cos(theta), math.sin(theta)], dtype=torch.float64)
    h = torch.tensor([0.0, math.sqrt(1.5 / gamma)], dtype=torch.float64)
    star = float((a * torch.exp(-gamma * h * h) * h).sum())
    c = h + a * star
    push = a * torch.tensor([1.0, -B], dtype=torch.float64)
    step = push * (1e-5 / (norm(push) * math.sqrt(gamma)))
    one = torch.ones(1, 1, dtype=torch.float64)
    layer = GaussLayer(a[:, None], one, c, gamma, ACTIVATIONS["identity"])
    sides = [dataclasses.replace(layer, c=c + sign * step).equilibrium() for sign in (1.0, -1.0)]
    met = norm(sides[0] - sides[1]) / norm(2.0 * step)
    case = {"mu": mu, "gamma": gamma, "A": a, "c": c, "direction": push, "met": met}
    return Trial(_constant(mu, "sharp") / met, case)


def _min_growth(draw: torch.Generator) -> Trial:
    """P patches of μ/√P at s = 3/2 and one that sets γ: at least 1.8332√P·μ/m."""
    patches = 4 ** integer(draw, 0, 5)
    return _min_family(patches, uniform(draw, 0.1, 1.3), 10.0 ** uniform(draw, -1.0, 1.0))


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
    one = torch.ones(1, 1, dtype=torch.float64)
    layer = GaussLayer(a[:, None], one, features[:, 0], gamma, ACTIVATIONS["identity"])
    return layer, features, change


def _any_rule(draw: torch.Generator) -> Iterator[Trial | None]:
    """The min rule's family: the ratio grows with the number of patches."""
    for patches in (1, 4, 16, 64, 256):
        layer, features, change = _min_layer(patches, 0.6, 1.0)
        found = _two_inputs(layer, features, features + change, _min_rule, "plain")
        if found is not None:
            told = "P rows 0.6/sqrt(P) at energy 1.5, one row 0 whose energy 0.2 sets gamma = 1"
            yield Trial(found.ratio, {"patches P": patches, "mu": 0.6, "layer": told})
    yield from _search_inputs(draw, _min_rule, "plain")


@torch.no_grad()
def _local(draw: torch.Generator) -> Trial:
    """dz*/dc by the implicit function theorem against certify's lipschitz_local, γ held fixed."""
    layer = draw_gauss(draw, 0.05, 1.45, flat=True)
    star = layer.equilibrium()
    h = layer.features[0] - layer.a[0] @ star
    s = layer.gamma * float(h @ h)
    eye = torch.eye(len(h), dtype=torch.float64)
    block = math.exp(-s) * (eye - 2.0 * layer.gamma * torch.outer(h, h))
    slope = layer.sigma.slope(layer.force(star))[:, None]
    whole = torch.eye(len(star), dtype=torch.float64) - layer.slope(star)
    moved = spectral(torch.linalg.solve(whole, slope * (layer.a[0].mT @ block)))
    found = certify(layer.problem(), z=layer.state(star))
    assert found.lipschitz_local is not None
    local = float(found.lipschitz_local[0])
    everywhere = _constant(layer.mu, "sharp")
    ratio = max(moved / (local + 1e-12), moved / everywhere)
    return Trial(ratio, {**layer.case(), "true": moved, "local bound": local})


_SHARP = (
    r"monotonicity of $\partial f$ and $-bI \preceq \bar B \preceq I$ for the mean Hessian blocks, "
    r"so $\bar B^2 \preceq (1-b)\bar B + bI$; then the maximum over $\rho \le \mu$"
)

CLAIMS = (
    claim(
        "ours.fact5",
        "Fact 5, Lipschitz constant for a fixed γ",
        r"$\|z^*(x_1) - z^*(x_2)\| \le \Lambda(\mu)\|\tilde c_1 - \tilde c_2\|$, "
        r"$b = 2e^{-3/2}$: $\Lambda = \mu/(1+\mu^2)$ for $\mu^2 \le (1-b)/(1+b)$, "
        r"$(1-b)/(2\sqrt{1-b-b\mu^2})$ up to $\mu^2 = (1-b)/(b(1+b))$, $b\mu/(1-b\mu^2)$ above.",
        reading(
            "ours",
            "",
            lambda draw: _random_inputs(draw, None, "sharp"),
            lambda draw: _search_inputs(draw, None, "sharp"),
            tolerance=1e-5,
            cost=2.0,
            proof=_SHARP,
        ),
    ),
    claim(
        "ours.fact5.sharp",
        "Fact 5 is sharp",
        r"For every $\mu < 1.4969$ a layer with $n = 1$ and two patches, $s = 0$ and "
        r"$s = 3/2$, has the Lipschitz constant $\Lambda(\mu)$; the ratio is $\Lambda$ over met.",
        reading(
            "ours",
            "",
            _sharp,
            tolerance=1e-3,
            cost=8.0,
            proof="the two blocks of this layer are the ends of the interval, so every step of "
            "fact 5's proof is an equality",
        ),
    ),
    claim(
        "ours.fact5.local",
        "Fact 5 at one input",
        r"`certify(...).lipschitz_local` bounds $\|\partial z^*/\partial c\|_2$ there.",
        reading("ours", "", _local, cost=4.0),
    ),
    claim(
        "ours.fact5.rule",
        "Fact 5 and the rule for γ",
        r"$\|z^*(x_1) - z^*(x_2)\| \le (\mu/m)\|\tilde c_1 - \tilde c_2\|$ whatever rule "
        r"gives $\gamma$, since $\gamma$ is detached.",
        reading(
            "gamma = 0.2 / min energy (GEQ Section 4.1)",
            "",
            lambda draw: _random_inputs(draw, _min_rule, "plain"),
            _any_rule,
            tolerance=1e-5,
            cost=2.0,
        ),
        reading(
            "gamma fixed",
            r"$\gamma$ does not depend on the input",
            lambda draw: _random_inputs(draw, None, "plain"),
            lambda draw: _search_inputs(draw, None, "plain"),
            tolerance=1e-5,
            cost=2.0,
            proof=r"$-\nabla q$ moves by at most $\mu\|\tilde c_1 - \tilde c_2\|$, and the "
            "objective is $m$-strongly convex",
        ),
        note="Detaching changes the gradient, not the map. With the minimum of the patch energies "
        "no constant exists that does not grow with the number of patches.",
    ),
    claim(
        "ours.fact5.mean",
        "Fact 5 for the mean rule",
        r"With $\gamma = 0.2/\text{mean energy}$ the constant is at most "
        r"$(1 + 2(3/2)^{3/2}e^{-3/2}/\sqrt{0.2})\,\mu/m = 2.833\,\mu/m$.",
        reading(
            "ours",
            "",
            lambda draw: _random_inputs(draw, _mean_rule, "mean"),
            lambda draw: _search_inputs(draw, _mean_rule, "mean"),
            tolerance=1e-5,
            cost=2.0,
            proof=r"$|d\gamma| \le 2\gamma|d\tilde c|/\sqrt{PE}$, "
            r"$|d(e^{-\gamma h^2}h)/d\gamma| \le 0.40992\,\gamma^{-3/2}$ for each "
            r"patch, and $\gamma E = 0.2$",
        ),
    ),
    claim(
        "ours.fact5.mean_sharp",
        "The sharp constant and the mean rule",
        r"$\Lambda(\mu)$ of a fixed $\gamma$ also bounds the mean rule.",
        reading(
            "gamma = 0.2 / mean energy",
            "",
            lambda draw: _random_inputs(draw, _mean_rule, "sharp"),
            lambda draw: _search_inputs(draw, _mean_rule, "sharp"),
            tolerance=1e-5,
            cost=2.0,
        ),
        reading(
            "gamma fixed",
            r"$\gamma$ does not depend on the input",
            lambda draw: _random_inputs(draw, None, "sharp"),
            tolerance=1e-5,
            cost=2.0,
            proof=_SHARP,
        ),
    ),
    claim(
        "ours.fact5.min",
        "Fact 5: no constant for the min rule",
        r"With $\gamma = 0.2/\text{least energy}$ there are layers of $P + 1$ patches "
        r"whose Lipschitz constant is at least $2(3/2)^{3/2}e^{-3/2}/\sqrt{0.2}\cdot\sqrt P\,\mu/m "
        r"= 1.833\sqrt P\,\mu/m$; the ratio is that over met.",
        reading(
            "ours",
            "",
            _min_growth,
            tolerance=1e-4,
            cost=2.0,
            proof="the derivative of this equilibrium in the last patch, in closed form",
        ),
    ),
)
