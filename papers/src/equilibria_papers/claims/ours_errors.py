"""Our fact 4: how far z is from z*, from one residual; and the error bound of ``certify``."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from equilibria.certify import certify

from .claim import Trial, claim, reading
from .drawing import integer, norm, normal, uniform
from .ours_layers import B, GaussLayer, draw_gauss, scalar_layer
from .searching import climb
from .solving import Unsolved, newton


def _near(draw: torch.Generator, star: Tensor) -> Tensor:
    far: float = 10.0 ** uniform(draw, -5.0, 0.7)
    return star + far * normal(draw, len(star))


def _fact4(draw: torch.Generator, *, simple: bool) -> Trial:
    """‖T_τ(z) − z*‖ ≤ max(|1/τ − m|, |L − 1/τ|)‖R‖/m, or ‖z − z*‖ ≤ (1 + μ²/m)‖z − T(z)‖."""
    layer = draw_gauss(draw, 0.05, 1.45)
    star = layer.equilibrium()
    z = _near(draw, star)
    m, top = layer.modulus, 1.0 + layer.mu**2
    taus = (2.0 / (m + top), 1.0, uniform(draw, 0.05, 2.0))
    tau = 1.0 if simple else taus[integer(draw, 0, 2)]
    after = layer.problem().step(layer.state(z), tau).flatten()
    gap = norm(z - after)
    factor = max(abs(1.0 / tau - m), abs(top - 1.0 / tau))
    true, allowed = norm(after - star), factor / m * gap
    if simple:
        true, allowed = norm(z - star), (1.0 + layer.mu**2 / m) * gap
    case = {**layer.case(), "z": z, "tau": tau, "error": true, "bound": allowed}
    return Trial(true / (allowed + 1e-11 * (1.0 + norm(star)) / m), case)


def _tightness(layer: GaussLayer, z: Tensor, *, usual: bool) -> Trial | None:
    """The bound over the true error, against what is claimed of it."""
    star = layer.equilibrium()
    true = norm(z - star)
    if true < 1e-6:
        return None
    gap = norm(z - layer.problem().step(layer.state(z)).flatten())
    if usual:
        ratio = gap / (1.0 - layer.mu**2) / (10.0 * true)
    else:
        ratio = (1.0 + layer.mu**2 / layer.modulus) * gap / (2.0 * (1.0 + 1.0 / (1.0 - B)) * true)
    return Trial(ratio, {**layer.case(), "z": z, "z*": star})


def _tight(draw: torch.Generator, high: float, *, usual: bool) -> Trial | None:
    layer = draw_gauss(draw, 0.05, high)
    return _tightness(layer, _near(draw, layer.equilibrium()), usual=usual)


def _tight_adversarial(
    draw: torch.Generator, high: float, *, usual: bool
) -> Iterator[Trial | None]:
    """n = 1, identity: energies near 0 make the residual (1 + μ²) times the error."""

    def attempt(at: Tensor) -> Trial | None:
        mu = high / (1.0 + math.exp(-float(at[0].clamp(-30, 30))))
        layer = scalar_layer(torch.tensor([mu], dtype=torch.float64), at[1:2], 1.0)
        return _tightness(layer, layer.equilibrium() + 0.1 * at[2:3], usual=usual)

    starts = (torch.tensor([4.0, 0.1, 0.5], dtype=torch.float64) for _ in range(1))
    yield from climb(attempt, starts, evaluations=300)
    yield from climb(attempt, (normal(draw, 3) for _ in range(2)), evaluations=200)


@torch.no_grad()
def _certificate(draw: torch.Generator) -> Trial | None:
    """certify's error_bound against the equilibrium that Newton finds from z, eight states each."""
    layer = draw_gauss(draw, 0.05, 2.2, flat=True)
    try:
        star = layer.equilibrium(normal(draw, layer.w.shape[1]))
    except Unsolved:
        return None
    states = [star + normal(draw, len(star)) * 10.0 ** (-k) for k in range(8)]
    found = certify(layer.problem(8), z=layer.state(*states))
    ratios = []
    for z, bound in zip(states, found.error_bound.tolist(), strict=True):
        if math.isinf(bound):
            continue
        # Beyond the threshold the certificate speaks of the only equilibrium that close to z.
        known = star if layer.modulus > 0 else newton(layer, layer.slope, z)[0]
        ratios.append((norm(z - known) - 1e-11 * (1.0 + norm(star))) / bound)
    if not ratios:
        return None
    return Trial(max(ratios), {**layer.case(), "kinds": [str(kind) for kind in found.kinds]})


CLAIMS = (
    claim(
        "ours.fact4",
        "Fact 4, error from the residual, any step",
        r"$\|T_\tau(z) - z^*\| \le \max(|1/\tau - m|, |L - 1/\tau|)"
        r"\,\|z - T_\tau(z)\|/m$.",
        reading(
            "ours",
            "",
            lambda draw: _fact4(draw, simple=False),
            cost=2.0,
            proof=r"at $T_\tau(z)$ the objective has a subgradient of at most "
            r"$\max(|1/\tau - m|, |L - 1/\tau|)\|z - T_\tau(z)\|$, and it is $m$-strongly "
            "convex",
        ),
    ),
    claim(
        "ours.fact4.plain",
        "Fact 4, error from the residual, plain step",
        r"$\|z - z^*\| \le (1 + \mu^2/m)\|z - T(z)\|$ for every $\mu < 1.4969$.",
        reading(
            "ours",
            "",
            lambda draw: _fact4(draw, simple=True),
            cost=2.0,
            proof=r"fact 4 at $\tau = 1$, where the maximum is $\mu^2$, and the triangle "
            "inequality",
        ),
    ),
    claim(
        "ours.fact4.tight",
        "Fact 4 is at most 5.61 times the error",
        r"For $\mu \le 1$ the bound $(1 + \mu^2/m)\|z - T(z)\|$ is at most "
        r"$2(1 + 1/(1 - 2e^{-3/2})) = 5.61$ times the true error.",
        reading(
            "ours",
            "",
            lambda draw: _tight(draw, 0.999, usual=False),
            lambda draw: _tight_adversarial(draw, 0.999, usual=False),
            cost=2.0,
            proof=r"$\|z - T(z)\| \le (1 + \mu^2)\|z - z^*\|$ by fact 2, and "
            r"$(1 + \mu^2/m)(1 + \mu^2)$ grows with $\mu$",
        ),
    ),
    claim(
        "ours.fact4.usual",
        "The usual bound is not that tight",
        r"For $\mu < 1$ the usual bound $\|z - T(z)\|/(1 - \mu^2)$ is at most ten times "
        r"the true error.",
        reading(
            "for every mu < 1",
            "",
            lambda draw: _tight(draw, 0.999, usual=True),
            lambda draw: _tight_adversarial(draw, 0.999, usual=True),
            cost=2.0,
        ),
        reading(
            "mu at most 0.9045",
            r"$\mu^2 \le 9/11$, $\mu \le 0.9045$",
            lambda draw: _tight(draw, 0.9045, usual=True),
            lambda draw: _tight_adversarial(draw, 0.9045, usual=True),
            cost=2.0,
            proof=r"$(1 + \mu^2)/(1 - \mu^2) \le 10$",
        ),
    ),
    claim(
        "ours.certificate",
        "certify: the error bound",
        r"`certify(problem, z).error_bound` is at least $\|z - z^*\|$; where only a "
        r"local guarantee is given ($\mu > 1.4969$), there is an equilibrium that close to $z$.",
        reading("ours", "", _certificate, cost=4.0),
    ),
)
