"""OptEq, regularized features: Theorem 4, the prox form of Section 5.1, Table 2, Eq 13."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from equilibria.problems import Decorrelation, FeatureIncay

from .claim import Trial
from .drawing import ACTIVATIONS, Random, identity, norm, spectral, zeros
from .numerics import bisect, crossings, solve
from .opteq_layer import EXACT, Layer, draw_layer, off


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
