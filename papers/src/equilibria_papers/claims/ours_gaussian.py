"""Our facts 1–4 on the Gaussian layer: curvature, contraction, uniqueness, error from a residual.

The layer is written down anew, dense, one sample: hᵢ = c̃ᵢ − Aᵢz, sᵢ = γ‖hᵢ‖²,

    T(z) = σ(Σᵢ e^{−sᵢ}Aᵢᵀhᵢ),   ∇²q = Σᵢ Aᵢᵀe^{−sᵢ}(I − 2γhᵢhᵢᵀ)Aᵢ.

``GaussLayer.problem`` is the library's own object for it, whose bounds the claims are about;
eigenvalues and equilibria are the audit's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from equilibria import problems
from equilibria.certify import certify
from equilibria.problems import Gaussian, Patches, Prior, Problem

from .claim import Trial
from .numerics import (
    ACTIVATIONS,
    Activation,
    Random,
    Unsolved,
    climb,
    crossings,
    evolve,
    exponential,
    identity,
    logistic,
    newton,
    norm,
    ones,
    solve,
    spectral,
    tensor,
    zeros,
)

B = 2.0 * math.exp(-1.5)
THRESHOLD = math.exp(0.75) / math.sqrt(2.0)
"""μ = 1.49694…, where 1 − 2e^{−3/2}μ² = 0."""

PRIORS: dict[str, Prior] = {
    "identity": problems.Free(),
    "relu": problems.NonNegative(),
    "clipped relu": problems.Box(0.0, 1.0),
    "soft threshold": problems.SoftThreshold(0.3),
    "leaky relu": problems.LeakyNonNegative(0.1),
    "tanh": problems.Tanh(),
    "sigmoid": problems.Logistic(),
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
        return self.hidden.mT @ self.w.reshape(-1, self.hidden.shape[0], self.n)

    @cached_property
    def features(self) -> Tensor:
        """c̃ [P, k]."""
        return self.c.reshape(-1, self.hidden.shape[0]) @ self.hidden

    @cached_property
    def mu(self) -> float:
        return spectral(self.a.flatten(0, 1))

    @property
    def n(self) -> int:
        return self.w.shape[1]

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

    def inner_hessian(self, z: Tensor) -> Tensor:
        """e^{−sᵢ}(I − 2γhᵢhᵢᵀ) of each patch, [P, k, k]."""
        h = self.features - self.a @ z
        e = torch.exp(-self.gamma * h.square().sum(1))
        eye = identity(h.shape[1])
        return e[:, None, None] * (eye - 2.0 * self.gamma * h[:, :, None] * h[:, None, :])

    def hessian(self, z: Tensor) -> Tensor:
        return (self.a.mT @ self.inner_hessian(z) @ self.a).sum(0)

    def __call__(self, z: Tensor) -> Tensor:
        return self.sigma.value(self.force(z))

    def slope(self, z: Tensor) -> Tensor:
        return -self.sigma.slope(self.force(z))[:, None] * self.hessian(z)

    def equilibrium(self, start: Tensor | None = None) -> Tensor:
        zero = zeros(self.n)
        return solve(self, self.slope, zero if start is None else start)

    @cached_property
    def flat(self) -> bool:
        """Whether a dense W says it all: one patch and no W_h."""
        k = self.hidden.shape[0]
        return len(self.w) == k and torch.equal(self.hidden, identity(k))

    def problem(self, copies: int = 1) -> Problem:
        """The library's problem, the sample repeated; states as ``state`` shapes them."""
        gamma = tensor(self.gamma)
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
        sizes = {"mu": self.mu, "gamma": self.gamma, "activation": self.sigma.name}
        return {**sizes, "W": self.w, "W_h": self.hidden, "c": self.c}


def draw_gauss(
    draw: Random,
    low: float,
    high: float,
    *,
    flat: bool | None = None,
    activations: tuple[str, ...] = tuple(ACTIVATIONS),
) -> GaussLayer:
    """μ between low and high; γ, patches, W_h, activation and the size of c at random."""
    n, patches, width = draw.integer(1, 4), draw.integer(1, 3), draw.integer(1, 3)
    hidden = draw.normal(width, draw.integer(1, 3))
    if flat or (flat is None and draw.integer(0, 1)):
        patches, hidden = 1, identity(width)
    gamma = 10.0 ** draw.uniform(-1.5, 1.5)
    w = draw.weights(patches * width, n, 1.0)
    c = draw.normal(patches * width) * (draw.uniform(0.0, 2.5) / math.sqrt(gamma))
    sigma = ACTIVATIONS[draw.choice(activations)]
    made = GaussLayer(w, hidden, c, gamma, sigma)
    mu = draw.uniform(low, high)
    if made.mu < 1e-6:  # W_h may annihilate W
        return draw_gauss(draw, low, high, flat=flat, activations=activations)
    return GaussLayer(w * (mu / made.mu), hidden, c, gamma, sigma)


def scalar_layer(a: Tensor, c: Tensor, gamma: float, name: str = "identity") -> GaussLayer:
    """n = 1: patches of one channel with rows a [P] and features c [P]."""
    one = ones(1, 1)
    return GaussLayer(a[:, None], one, c, gamma, ACTIVATIONS[name])


def _number(value: float | Tensor) -> float:
    return float(torch.as_tensor(value).reshape(-1)[0])


def _fact1(draw: Random) -> Trial:
    layer = draw_gauss(draw, 0.05, 3.0)
    return _curvature_ratio(layer, draw.normal(layer.n))


def _curvature_ratio(layer: GaussLayer, z: Tensor) -> Trial:
    """Eigenvalues of the Hessian (autograd of q as defined) against the library's bounds."""
    with torch.enable_grad():
        found = torch.autograd.functional.hessian(layer.value, z)
    values = torch.linalg.eigvalsh(found)
    problem, state = layer.problem(len(z)), layer.state(*[z] * len(z))
    scale = 1e-9 * (1.0 + norm(found))
    own = problem.coupling.hvp(state, layer.state(*identity(len(z)))).flatten(1)
    ratio = max(norm(found - layer.hessian(z)), norm(own - found)) / scale
    slack = 1e-12 * layer.mu**2
    for bounds in (problem.coupling.curvature(), problem.coupling.local_curvature(state)):
        top, low = _number(bounds.upper), _number(bounds.lower)
        ratio = max(ratio, float(values[-1]) / (top + slack), float(-values[0]) / (slack - low))
    return Trial(ratio, {**layer.case(), "z": z, "eigenvalues": values})


def _fact1_adversarial(draw: Random) -> Iterator[Trial | None]:
    """n = 1 and two patches: energies moved by optimizers; both ends are nearly reached."""

    def attempt(at: Tensor) -> Trial | None:
        layer = scalar_layer(at[:2], at[2:4], exponential(at[4], -4, 4))
        return None if layer.mu < 1e-2 else _curvature_ratio(layer, at[5:6])

    yield from climb(attempt, (draw.normal(6) for _ in range(2)), evaluations=150)


def _fact1_sharp(draw: Random) -> Trial:
    """A patch at s = 0 has the curvature μ², one at s = 3/2 has −2e^{−3/2}μ²."""
    mu, gamma = draw.uniform(0.1, 3.0), 10.0 ** draw.uniform(-2.0, 2.0)
    zero = zeros(1)
    ends = []
    for energy in (0.0, 1.5):
        c = tensor([math.sqrt(energy / gamma)])
        layer = scalar_layer(tensor([mu]), c, gamma)
        ends.append(float(torch.autograd.functional.hessian(layer.value, zero)))
    bounds = layer.problem().coupling.curvature()
    ratio = max(_number(bounds.upper) / ends[0], _number(bounds.lower) / ends[1])
    return Trial(ratio, {"mu": mu, "gamma": gamma, "curvatures": ends})


def _bend(draw: Random) -> Trial:
    """‖∇²q(a) − ∇²q(b)‖ ≤ 1.9518√γ μ³‖a − b‖."""
    layer = draw_gauss(draw, 0.1, 2.0)
    n = layer.n
    a = draw.normal(n) * 2.0
    b = a + draw.normal(n) * 10.0 ** draw.uniform(-4.0, 0.5)
    change = float(torch.linalg.matrix_norm(layer.hessian(a) - layer.hessian(b), 2))
    allowed = problems.GAUSSIAN_BEND * math.sqrt(layer.gamma) * layer.mu**3 * norm(a - b)
    return Trial(change / (allowed + 1e-13 * layer.mu**2), {**layer.case(), "a": a, "b": b})


def _pair(draw: Random, n: int) -> tuple[Tensor, Tensor]:
    a = draw.normal(n) * draw.uniform(0.0, 3.0)
    return a, a + draw.normal(n) * 10.0 ** draw.uniform(-3.0, 0.7)


def _step_ratio(layer: GaussLayer, a: Tensor, b: Tensor, *, best: bool) -> Trial:
    """‖T_τ(a) − T_τ(b)‖/‖a − b‖ of the library's step, over μ² or (L − m)/(L + m)."""
    problem, states = layer.problem(2), layer.state(a, b)
    m, top = layer.modulus, 1.0 + layer.mu**2
    tau = 2.0 / (m + top) if best else 1.0
    after = problem.step(states, tau).flatten(1)
    allowed = (top - m) / (top + m) if best else layer.mu**2
    ratio = norm(after[0] - after[1]) / (allowed * norm(a - b) + 1e-13)
    return Trial(ratio, {**layer.case(), "a": a, "b": b, "tau": tau})


def _step(draw: Random, *, best: bool) -> Trial:
    layer = draw_gauss(draw, 0.05, 1.49 if best else 0.999)
    return _step_ratio(layer, *_pair(draw, layer.n), best=best)


def _step_adversarial(draw: Random, *, best: bool) -> Iterator[Trial | None]:
    """n = 1, three patches: everything but μ moved by optimizers."""
    for mu in (0.5, 0.95) if not best else (0.7, 1.2, 1.48):

        def attempt(at: Tensor, mu: float = mu) -> Trial | None:
            if norm(at[:3]) < 1e-6 or abs(float(at[7] - at[6])) < 1e-6:
                return None
            layer = scalar_layer(at[:3] * (mu / norm(at[:3])), at[3:6], 1.0)
            return _step_ratio(layer, at[6:7], at[7:8], best=best)

        yield from climb(attempt, (draw.normal(8) for _ in range(2)), evaluations=250)


def _convexity_ratio(layer: GaussLayer, a: Tensor, b: Tensor) -> float:
    """m‖a − b‖²/⟨∇g(a) − ∇g(b), a − b⟩, g = ½‖·‖² + q, with the library's m and gradient."""
    problem, states = layer.problem(2), layer.state(a, b)
    force = problem.gradient(states).flatten(1)
    moved = a - b
    across = float((force[0] - force[1]) @ moved)
    m = _number(problem.curvature().lower)
    return m * float(moved @ moved) / across if across > 0 else math.inf


def _fact3(draw: Random) -> Trial:
    layer = draw_gauss(draw, 0.05, 1.4969)
    a, b = _pair(draw, layer.n)
    return Trial(_convexity_ratio(layer, a, b), {**layer.case(), "a": a, "b": b})


def _fact3_adversarial(draw: Random) -> Iterator[Trial | None]:
    """Optimizers on n = 1, then equilibria of layers at μ up to 1.4969 from many starts."""

    def attempt(at: Tensor) -> Trial | None:
        if norm(at[:2]) < 1e-6 or abs(float(at[4] - at[5])) < 1e-6:
            return None
        layer = scalar_layer(at[:2] * (1.49 / norm(at[:2])), at[2:4], 1.0)
        return Trial(_convexity_ratio(layer, at[4:5], at[5:6]), layer.case())

    yield from climb(attempt, (draw.normal(6) for _ in range(2)), evaluations=250)
    yield from evolve(attempt, [(-2.0, 2.0)] * 4 + [(-3.0, 3.0)] * 2, draw)
    for _ in range(60):
        layer = draw_gauss(draw, 1.3, 1.4969, activations=("identity", "relu"))
        found = _equilibria(layer, draw, starts=8)
        spread = max(norm(z - found[0]) for z in found)
        yield Trial(spread / 1e-5, {**layer.case(), "equilibria": found})


def _equilibria(layer: GaussLayer, draw: Random, starts: int) -> list[Tensor]:
    """What Newton finds from random starts, at residuals below 1e-12."""
    found = []
    for _ in range(starts):
        start = draw.normal(layer.n) * 3.0
        z, size = newton(layer, layer.slope, start)
        if size > 1e-12:
            try:
                z = layer.equilibrium(start)
            except Unsolved:
                continue
        found.append(z)
    return found or [layer.equilibrium()]


def _fact3_sharp(draw: Random) -> Trial:
    """n = 1, μ just above the threshold: √γc = t(1 + μ²e^{−t²}) has three solutions t."""
    mu: float = THRESHOLD * (1.0 + 10.0 ** draw.uniform(-6.0, 0.0))
    gamma = 10.0 ** draw.uniform(-1.0, 1.0)
    middle = math.sqrt(1.5)

    level: float = middle * (1.0 + mu**2 * math.exp(-1.5))

    def rise(t: Tensor) -> Tensor:
        return t * (1.0 + mu**2 * torch.exp(-t * t)) - level

    far = torch.logspace(-5.0, 1.0, 400, dtype=torch.float64)
    line = torch.cat([middle - far.flip(0), middle + far])
    away = [t for t in crossings(rise, line) if abs(float(t) - middle) > 1e-5]
    roots = [tensor(middle), *away]
    c = tensor([level / math.sqrt(gamma)])
    name = ("identity", "relu")[draw.integer(0, 1)]
    layer = scalar_layer(tensor([mu]), c, gamma, name)
    states = [(layer.c - t / math.sqrt(gamma)) / mu for t in roots]
    after = layer.problem(len(states)).step(layer.state(*states)).flatten(1)
    left = max(norm(a - z) for a, z in zip(after, states, strict=True))
    ratio = max(3.0 / len(states), left / (1e-9 * (1.0 + norm(layer.c))))
    case = {"mu": mu, "gamma": gamma, "c": layer.c, "activation": name, "equilibria": states}
    return Trial(ratio, case)


def _near(draw: Random, star: Tensor) -> Tensor:
    far: float = 10.0 ** draw.uniform(-5.0, 0.7)
    return star + far * draw.normal(len(star))


def _fact4(draw: Random, *, simple: bool) -> Trial:
    """‖T_τ(z) − z*‖ ≤ max(|1/τ − m|, |L − 1/τ|)‖R‖/m, or ‖z − z*‖ ≤ (1 + μ²/m)‖z − T(z)‖."""
    layer = draw_gauss(draw, 0.05, 1.45)
    star = layer.equilibrium()
    z = _near(draw, star)
    m, top = layer.modulus, 1.0 + layer.mu**2
    taus = (2.0 / (m + top), 1.0, draw.uniform(0.05, 2.0))
    tau = 1.0 if simple else taus[draw.integer(0, 2)]
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


def _tight(draw: Random, *, high: float, usual: bool) -> Trial | None:
    layer = draw_gauss(draw, 0.05, high)
    return _tightness(layer, _near(draw, layer.equilibrium()), usual=usual)


def _tight_adversarial(draw: Random, *, high: float, usual: bool) -> Iterator[Trial | None]:
    """n = 1, identity: energies near 0 make the residual (1 + μ²) times the error."""

    def attempt(at: Tensor) -> Trial | None:
        layer = scalar_layer(tensor([logistic(at[0], high)]), at[1:2], 1.0)
        return _tightness(layer, layer.equilibrium() + 0.1 * at[2:3], usual=usual)

    yield from climb(attempt, [tensor([4.0, 0.1, 0.5])], evaluations=300)
    yield from climb(attempt, (draw.normal(3) for _ in range(2)), evaluations=200)


@torch.no_grad()
def _certificate(draw: Random) -> Trial | None:
    """certify's error_bound against the equilibrium that Newton finds from z, eight states each."""
    layer = draw_gauss(draw, 0.05, 2.2, flat=True)
    try:
        star = layer.equilibrium(draw.normal(layer.n))
    except Unsolved:
        return None
    states = [star + draw.normal(len(star)) * 10.0 ** (-k) for k in range(8)]
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
