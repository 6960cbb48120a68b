"""OptEq, one layer: f(z) = (1/ν)Wᵀσ(Wz + c). Theorems 1 and 4, Eq 4 and 13, Tables 1 and 2.

With ψ(z) = (1/ν)1ᵀσ̃(Wz + c) the layer is ∇ψ, and ψ*(f(v)) = ⟨f(v), v⟩ − ψ(v) gives
φ = ψ* − ½‖·‖² at every point of its domain without a conjugate to compute.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from equilibria.problems import Decorrelation, FeatureIncay

from .claim import Trial
from .numerics import (
    ACTIVATIONS,
    Activation,
    Random,
    bisect,
    climb,
    crossings,
    identity,
    norm,
    ones,
    relu_prox,
    solve,
    spectral,
    zeros,
)

EXACT = 1e-7
"""How far two computations of one point may lie apart, relative to its size."""


@dataclass(frozen=True)
class Layer:
    """f(z) = (1/ν)Wᵀσ(Wz + c) at one input; W [n, m], c [n]."""

    w: Tensor
    c: Tensor
    sigma: Activation
    nu: float = 1.0

    @property
    def m(self) -> int:
        return self.w.shape[1]

    def __call__(self, z: Tensor) -> Tensor:
        return self.w.mT @ self.sigma.value(self.w @ z + self.c) / self.nu

    def slope(self, z: Tensor) -> Tensor:
        return self.w.mT * self.sigma.slope(self.w @ z + self.c) @ self.w / self.nu

    def psi(self, z: Tensor) -> float:
        return float(self.sigma.integral(self.w @ z + self.c).sum()) / self.nu

    def conjugate(self, v: Tensor) -> float:
        """ψ*(f(v))."""
        return float(self(v) @ v) - self.psi(v)

    def phi(self, v: Tensor) -> float:
        """φ(f(v)) = ψ*(f(v)) − ½‖f(v)‖²."""
        u = self(v)
        return self.conjugate(v) - 0.5 * float(u @ u)

    def equilibrium(self) -> Tensor:
        return solve(self, self.slope, zeros(self.m))

    def minimizer(self, pull: Tensor | None = None, weight: Tensor | None = None) -> Tensor:
        """argmin_u φ(u) + ½uᵀQu − ⟨p, u⟩ for ReLU."""
        pull = zeros(self.m) if pull is None else pull
        weight = zeros(self.m, self.m) if weight is None else weight
        return relu_prox(self.w, self.c, pull, weight, self.nu)

    def case(self) -> dict[str, object]:
        return {"W": self.w, "c": self.c, "activation": self.sigma.name, "nu": self.nu}


def draw_layer(draw: Random, *, activation: str | None = None, slack: float = 1.02) -> Layer:
    """ν between ``slack`` and 3 times L_σ‖W‖²; slack 1 also draws the end itself."""
    m = draw.integer(1, 5)
    n = draw.integer(1, 6)
    sigma = ACTIVATIONS[activation or draw.choice(list(ACTIVATIONS))]
    w = draw.weights(n, m, draw.uniform(0.2, 2.5))
    part = slack if slack == 1.0 and draw.integer(0, 1) else draw.uniform(slack, 3.0)
    c = draw.normal(n) * draw.uniform(0.1, 3.0)
    return Layer(w, c, sigma, part * sigma.expansion * spectral(w) ** 2)


def off(a: Tensor, b: Tensor) -> float:
    """‖a − b‖ in units of what counts as equal."""
    return norm(a - b) / (EXACT * (1.0 + norm(b)))


def _excess(best: float, other: float) -> float:
    """1 + how far best lies above other, relative to their size."""
    return 1.0 + (best - other) / (1e-3 + abs(best) + abs(other))


def _theorem1(draw: Random) -> Trial:
    """The layer against competitors: prox inequality, firm nonexpansiveness, the minimizer."""
    layer = draw_layer(draw, slack=1.0)
    z, v = draw.normal(layer.m) * 2.0, draw.normal(layer.m) * draw.uniform(0.01, 5.0)
    ratio, part = _prox_ratio(layer, z, v)
    if layer.nu > 1.01 * layer.sigma.expansion * spectral(layer.w) ** 2:
        star = layer.equilibrium()
        found = _excess(layer.phi(star), layer.phi(v))  # φ(z*) ≤ φ(f(v))
        if layer.sigma.name == "relu":
            found = max(found, off(star, layer.minimizer()))
        if found > ratio:
            ratio, part = found, "the fixed point against the minimizer"
    return Trial(ratio, {**layer.case(), "z": z, "v": v, "worst part": part})


def _prox_ratio(layer: Layer, z: Tensor, v: Tensor) -> tuple[float, str]:
    """‖Δf‖²/⟨Δf, Δz⟩ (φ convex), and f(z) against f(v) in φ(u) + ½‖u − z‖²."""
    change, moved = layer(z) - layer(v), z - v
    across = float(change @ moved)
    # Rounding of f enters ⟨Δf, Δz⟩ at 1e-16 of this size; a change that small says nothing.
    slack = 1e-12 * (1.0 + norm(moved) * (norm(layer(z)) + norm(layer(v))))
    firm = float(change @ change) / (across + slack) if across > -slack else math.inf
    best = layer.conjugate(z) - float(layer(z) @ z)
    other = layer.conjugate(v) - float(layer(v) @ z)
    return max((firm, "firmly nonexpansive"), (_excess(best, other), "prox against a competitor"))


def _theorem1_adversarial(draw: Random) -> Iterator[Trial | None]:
    """W [2, 2], c, z, v moved by optimizers, ν = L_σ‖W‖² exactly."""
    for name in ("relu", "leaky relu", "tanh", "clipped relu", "sigmoid"):
        sigma = ACTIVATIONS[name]

        def attempt(at: Tensor, sigma: Activation = sigma) -> Trial | None:
            w = at[:4].reshape(2, 2)
            if spectral(w) < 1e-3 or norm(at[6:8] - at[8:]) < 1e-4:
                return None
            layer = Layer(w, at[4:6], sigma, sigma.expansion * spectral(w) ** 2)
            ratio, part = _prox_ratio(layer, at[6:8], at[8:])
            return Trial(ratio, {**layer.case(), "z": at[6:8], "v": at[8:], "worst part": part})

        yield from climb(attempt, (draw.normal(10) for _ in range(3)))


def _strictly_convex(draw: Random) -> Trial:
    """Softplus has σ′ < 1, so φ is strictly convex for every ‖W‖ ≤ 1; W diagonal, ν = 1."""
    m = draw.integer(1, 5)
    w = draw.share(m)
    w = torch.where(torch.rand(m, generator=draw.generator) < 0.3, 1.0, w)
    return _softplus_gap(w, draw.normal(m) * 2.0)


def _softplus_gap(w: Tensor, c: Tensor) -> Trial:
    def gap(z: Tensor) -> Tensor:
        return z - w * torch.nn.functional.softplus(w * z + c, threshold=500.0)

    # The gap rises in z; where it is negative at the far end, it has no zero.
    end = torch.full_like(w, 1e6)
    left = norm(gap(bisect(gap, -end, end)))
    return Trial(left / 1e-6, {"W": f"diagonal, {w.tolist()}", "c": c, "activation": "softplus"})


def _softplus_family(draw: Random) -> Iterator[Trial]:
    for c in (-2.0, -0.5, 0.1, 1.0, 3.0):
        yield _softplus_gap(ones(1), torch.tensor([c]).double())


def _contractive(draw: Random) -> Trial:
    layer = draw_layer(draw, slack=1.02)
    star = layer.equilibrium()
    again = solve(layer, layer.slope, draw.normal(layer.m) * 10.0)
    left = norm(star - layer(star)) / (1e-9 * (1.0 + norm(star)))
    return Trial(max(left, off(again, star)), layer.case())


def _eq4(draw: Random, *, at_zero: float) -> Trial:
    """φ of Eq 4 at the equilibrium; ``at_zero`` is σ̃*(0)."""
    layer = _invertible(draw)
    star = layer.equilibrium()
    zeta = torch.linalg.solve(layer.w.mT, star)
    zeta = torch.where(zeta.abs() < 1e-9, 0.0, zeta)
    if at_zero > 0 and bool((zeta == 0).any()):
        return Trial(math.inf, {**layer.case(), "W^-T z*": zeta, "phi(z*)": math.inf})
    least = layer.minimizer()
    value, bound = _eq4_value(layer, star), _eq4_value(layer, least)
    ratio = max(off(star, least), 1.0 + (value - bound) / (1e-6 + abs(bound)))
    return Trial(ratio, {**layer.case(), "z*": star, "phi(z*)": value, "minimum": bound})


def _eq4_value(layer: Layer, z: Tensor) -> float:
    zeta = torch.linalg.solve(layer.w.mT, z).clamp_min(0.0)
    return float(0.5 * zeta @ zeta - layer.c @ zeta - 0.5 * z @ z)


def _rotated(draw: Random, m: int) -> tuple[Tensor, Tensor]:
    """Two random orthogonal matrices."""
    left, _ = torch.linalg.qr(draw.normal(m, m))
    right, _ = torch.linalg.qr(draw.normal(m, m))
    return left, right


def _invertible(draw: Random) -> Layer:
    """ReLU, W square with singular values in (0.2, 0.98), ν = 1."""
    m = draw.integer(1, 5)
    left, right = _rotated(draw, m)
    values = draw.share(m) * 0.78 + 0.2
    return Layer(left * values @ right, draw.normal(m), ACTIVATIONS["relu"])


def _skip(draw: Random) -> Trial:
    """prox of αM_φ^{1−α} by one program in (u, y), against αT + (1 − α)I; and the fixed point."""
    layer = draw_layer(draw, activation="relu")
    alpha = draw.uniform(0.05, 0.95)
    z = draw.normal(layer.m) * 2.0
    # y minimizes ½‖y − z‖² + α‖u − y‖²/(2(1 − α)); inserted, u has the weight below.
    share = alpha / (1.0 - alpha)
    left = 1.0 / (1.0 + share)
    weight = (share * left) / alpha
    y = left * z + share * left * layer.minimizer(weight * z, weight * identity(layer.m))
    star = layer.equilibrium()
    pairs = [(alpha * layer(at) + (1.0 - alpha) * at, to) for at, to in ((z, y), (star, star))]
    return Trial(max(off(*pair) for pair in pairs), {**layer.case(), "alpha": alpha, "z": z})


def _affine(draw: Random, *, read: str) -> Trial:
    """A⁻¹(f(Az + t) − t) against prox of φ(A· + t), or its fixed points against the minimizer."""
    layer = draw_layer(draw, activation="relu")
    m = layer.m
    left, right = _rotated(draw, m)
    values = ones(m) if read == "orthogonal" else torch.exp(draw.normal(m) * 0.5)
    a = left * values @ right
    shift, z = draw.normal(m), draw.normal(m)
    case = {**layer.case(), "A": a, "shift": shift}
    inverse = torch.linalg.inv(a)
    if read == "fixed points":
        y = inverse @ (layer.equilibrium() - shift)
        return Trial(off(y, inverse @ (layer.minimizer() - shift)), case)
    gram = inverse.mT @ inverse
    u = layer.minimizer(inverse.mT @ z + gram @ shift, gram)
    printed = inverse @ (layer(a @ z + shift) - shift)
    return Trial(off(printed, inverse @ (u - shift)), {**case, "z": z})


def _multivariate(draw: Random, *, definite: bool) -> Trial:
    """Fixed point of WᵀS(Wz + c) against the stationary point of Table 1's quadratic."""
    draw.integer(1, 4)  # keeps the stream of the draws below
    w = _invertible(draw).w
    m = len(w)
    s = draw.normal(m, m)
    if definite:
        s = s @ s.mT + 0.1 * identity(m)
    s = s * (0.95 / spectral(w.mT @ s @ w))
    c = draw.normal(m)
    star = torch.linalg.solve(identity(m) - w.mT @ s @ w, w.mT @ s @ c)
    inverse = torch.linalg.inv(w)
    q = inverse @ torch.linalg.inv(s) @ inverse.mT
    hessian = 0.5 * (q + q.mT) - identity(m)
    lowest = float(torch.linalg.eigvalsh(hessian)[0])
    ratio = norm(hessian @ star - inverse @ c) / (EXACT * (1.0 + norm(star)) * spectral(q))
    if lowest <= 0:  # a saddle or a maximum is not a solution
        ratio = math.inf
    return Trial(ratio, {"W": w, "S": s, "c": c, "lowest curvature": lowest})


def _theorem4(draw: Random) -> Trial:
    """R(z) = ½(z − a)ᵀK(z − a), ReLU: the fixed point of f ∘ (I − γ∇R) against one program."""
    layer = draw_layer(draw, activation="relu")
    m = layer.m
    root = draw.normal(m, draw.integer(1, m))
    k, a = root @ root.mT, draw.normal(m)
    gamma = draw.uniform(0.01, 1.0) / spectral(k)

    def step(z: Tensor) -> Tensor:
        return layer(z - gamma * (k @ (z - a)))

    def slope(z: Tensor) -> Tensor:
        return layer.slope(z - gamma * (k @ (z - a))) @ (identity(m) - gamma * k)

    star = solve(step, slope, zeros(m))
    least = layer.minimizer(gamma * (k @ a), gamma * k)
    return Trial(off(star, least), {**layer.case(), "gamma": gamma, "K": k, "a": a})


def _theorem4_smooth(draw: Random) -> Iterator[Trial]:
    """Other activations and R = Σ log cosh, against points around: φ + γR is least at z*."""
    for _ in range(200):
        layer = draw_layer(draw)
        gamma = draw.uniform(0.05, 0.9)

        def step(z: Tensor, layer: Layer = layer, gamma: float = gamma) -> Tensor:
            return layer(z - gamma * torch.tanh(z))

        def slope(z: Tensor, layer: Layer = layer, gamma: float = gamma) -> Tensor:
            inner = 1.0 - gamma * (1.0 - torch.tanh(z) ** 2)
            return layer.slope(z - gamma * torch.tanh(z)) * inner

        def whole(v: Tensor, layer: Layer = layer, gamma: float = gamma) -> float:
            return layer.phi(v) + gamma * float(ACTIVATIONS["tanh"].integral(layer(v)).sum())

        star = solve(step, slope, zeros(layer.m))
        best = whole(star - gamma * torch.tanh(star))
        least = min(whole(star + draw.normal(layer.m) * 10.0 ** (-k)) for k in range(4))
        ratio = 1.0 + (best - least) / (1e-3 + abs(best) + abs(least))
        yield Trial(ratio, {**layer.case(), "gamma": gamma, "R": "log cosh"})


def _prox_form(draw: Random, *, envelope: bool) -> Trial:
    """z = f(prox_{γR}(z)) for R = ½‖z‖² against argmin φ + γR, or φ + the envelope of γR."""
    layer = draw_layer(draw, activation="relu")
    gamma = draw.uniform(0.05, 2.0)
    shrink = 1.0 / (1.0 + gamma)

    def slope(z: Tensor) -> Tensor:
        return layer.slope(shrink * z) * shrink

    star = solve(lambda z: layer(shrink * z), slope, zeros(layer.m))
    weight = gamma * shrink if envelope else gamma
    least = layer.minimizer(weight=weight * identity(layer.m))
    return Trial(off(star, least), {**layer.case(), "gamma": gamma, "z*": star, "argmin": least})


def _prox_row(draw: Random, *, kind: str) -> Trial:
    """prox_{γR} entrywise: the zero of the rising u − z + γ∂R(u)."""
    z, gamma = draw.normal(6) * 3.0, draw.uniform(0.01, 3.0)
    slope: Callable[[Tensor], Tensor] = (lambda u: u) if kind == "norm" else torch.sign
    far = torch.full_like(z, 20.0)
    least = bisect(lambda u: u - z + gamma * slope(u), -far, far)
    printed = z / (1.0 + gamma)
    if kind != "norm":
        printed = (z.abs() - gamma).clamp_min(0.0) * z.sign()
    return Trial(off(printed, least), {"z": z, "gamma": gamma})


def _gradient(value: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    """∇R by automatic differentiation of R as defined."""
    with torch.enable_grad():
        at = z.clone().requires_grad_(True)
        (found,) = torch.autograd.grad(value(at), at)
    return found


def _apart(given: Tensor, right: Tensor) -> float:
    return norm(given - right) / (1e-9 * (1.0 + norm(right)))


def _incay(draw: Random, *, sign: float) -> Trial:
    z, gamma = draw.normal(draw.integer(1, 5)), draw.uniform(0.05, 2.0)
    eps = draw.uniform(0.3, 2.0)
    right = z - gamma * _gradient(lambda v: 2.0 / (v @ v + 2.0 * eps), z)
    given = (1.0 + sign * 4.0 * gamma / (float(z @ z) + 2.0 * eps) ** 2) * z
    ratio = _apart(given, right)
    if sign > 0:  # the library's own gradient as well
        own = z - FeatureIncay(gamma, eps).grad(z[None])[0]
        ratio = max(ratio, _apart(own, right))
    return Trial(ratio, {"z": z, "gamma": gamma, "epsilon": eps})


def _cosines(z: Tensor) -> Tensor:
    """½Σ_{i≠j} cos²(z_i, z_j) over the rows of z."""
    unit = z / torch.linalg.vector_norm(z, dim=1, keepdim=True)
    gram = unit @ unit.mT
    half: Tensor = 0.5 * (gram.square().sum() - gram.diagonal().square().sum())
    return half


def _decorrelation(draw: Random, *, printed: bool) -> Trial:
    rows, length = draw.integer(2, 4), draw.integer(2, 4)
    z, gamma = draw.normal(rows, length), draw.uniform(0.1, 1.5)
    right = z - gamma * _gradient(_cosines, z)
    squares = z.square().sum(1)
    proj = z[:, :, None] * z[:, None, :] / squares[:, None, None]
    total = proj.sum(0)
    eye = identity(length)
    found = []
    for i in range(rows):
        pulled = (total - proj[i]) @ z[i] / squares[i]
        if printed:
            found.append(z[i] - (eye + proj[i]) @ pulled)
        else:
            found.append(z[i] - 2.0 * gamma * (eye - proj[i]) @ pulled)
    given = torch.stack(found)
    ratio = _apart(given, right)
    if not printed:
        own = z - Decorrelation(gamma).grad(z.mT).mT
        ratio = max(ratio, _apart(own, right))
    return Trial(ratio, {"rows": z, "gamma": gamma})


def _eq13(draw: Random) -> Trial:
    """½‖DZZᵀD − I‖²_F against Table 2's sum of squared cosines."""
    z = draw.normal(draw.integer(1, 5), draw.integer(1, 5))
    d = torch.diag(1.0 / torch.linalg.vector_norm(z, dim=1))
    eye = identity(len(z))
    whole = 0.5 * float((d @ z @ z.mT @ d - eye).square().sum())
    other = float(_cosines(z))
    return Trial(abs(whole - other) / (1e-10 * (1.0 + whole)), {"Z": z})


def _two_incays(draw: Random) -> Trial:
    """1/(‖z‖² + ε) of Section 7.2.2 against 2/(‖z‖² + 2ε) of Tables 2 and 5."""
    square, eps = draw.uniform(0.1, 5.0), draw.uniform(0.1, 2.0)
    a, b = 1.0 / (square + eps), 2.0 / (square + 2.0 * eps)
    return Trial(abs(a - b) / (1e-10 * b), {"|z|^2": square, "epsilon": eps})


def _incay_minimum(draw: Random) -> Trial:
    """σ = identity, W = w I: a fixed point of f ∘ (I − γ∇R) against the least value of φ + γR."""
    m = draw.integer(1, 4)
    w, gamma, eps = draw.uniform(0.2, 0.95), draw.uniform(0.05, 1.0), draw.uniform(0.05, 1.0)
    c = draw.normal(m) * draw.uniform(0.0, 1.0)
    return _incay_points(w, gamma, eps, c)


def _incay_family(draw: Random) -> Iterator[Trial]:
    return (_incay_points(w, 1.0, 0.2, zeros(1)) for w in (0.3, 0.6, 0.9))


def _incay_points(w: float, gamma: float, eps: float, c: Tensor) -> Trial:
    """φ(z) = ½(1/w² − 1)‖z‖² − ⟨c, z⟩/w. Along ±c all fixed points are zeros of one function."""
    size = norm(c)
    # The force is odd in its last term and grows linearly: all zeros lie within this reach.
    reach = (size / w + 4.0 * gamma / eps**2) / (1.0 / w**2 - 1.0) + 1.0
    line = torch.linspace(-reach, reach, 4000, dtype=torch.float64)

    def force(t: Tensor) -> Tensor:
        return (1.0 / w**2 - 1.0) * t - size / w - 4.0 * gamma * t / (t * t + 2.0 * eps) ** 2

    roots = crossings(force, line)
    heights = [
        float(0.5 * (1 / w**2 - 1) * t * t - size * t / w + 2 * gamma / (t * t + 2 * eps))
        for t in roots
    ]
    if not heights:
        raise RuntimeError(f"no fixed point found for w={w}, gamma={gamma}, eps={eps}, c={c}")
    worst = max(heights) - min(heights)
    case = {"w": w, "gamma": gamma, "epsilon": eps, "c": c, "fixed points along c": roots}
    return Trial(worst / (EXACT * (1.0 + abs(min(heights)))), case)
