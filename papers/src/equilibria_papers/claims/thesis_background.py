"""The NTK thesis, chapter 2 and appendices A and B: what the thesis builds on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .claim import Trial
from .numerics import Random, identity, norm, ones, spectral, zeros

EXACT = 1e-8
"""How far two computations of one number may lie apart, relative to its size."""


def _subgradients(draw: Random) -> Trial:
    """∂f for f = Σ wᵢ|x − tᵢ| + ½qx² is monotone, and I + ∂f is onto (Minty: maximal)."""
    count = draw.integer(1, 5)
    w, t = draw.normal(count).abs(), draw.normal(count)
    q = draw.uniform(0.0, 2.0)

    def edge(x: float, side: float) -> float:
        signs = torch.where(t == x, torch.full_like(t, side), torch.sign(x - t))
        return float((w * signs).sum()) + q * x

    a, b = sorted((draw.uniform(-2, 2), draw.uniform(-2, 2)))
    falls = max(0.0, edge(a, 1.0) - edge(b, -1.0)) if a < b else 0.0
    target, low, high = draw.uniform(-9, 9), -100.0, 100.0
    for knot in sorted(t.tolist()):
        # A knot takes a whole interval of targets: bisection alone would only come near it.
        if knot + edge(knot, -1.0) <= target <= knot + edge(knot, 1.0):
            low = high = knot
    for _ in range(200):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if middle + edge(middle, 1.0) < target else (low, middle)
    x = high
    miss = max(0.0, x + edge(x, -1.0) - target, target - x - edge(x, 1.0))
    return Trial((falls + miss) / EXACT, {"weights": w.tolist(), "knots": t.tolist(), "q": q})


def _strongly(draw: Random, factor: float) -> Trial:
    n, m = draw.integer(1, 5), draw.log_uniform(0.05, 3.0)
    W = draw.normal(n, n)
    low = float(torch.linalg.eigvalsh(W + W.T)[0])
    W = W + 0.5 * (factor * m - low) * identity(n)  # W + Wᵀ ⪰ factor·m·I
    v = torch.linalg.eigh(W + W.T).eigenvectors[:, 0]
    return Trial(m / float(v @ W @ v), {"n": n, "m": m})


def _parametrized(draw: Random) -> Trial:
    """Every W with I − W ⪰ mI is (1 − m)I − AᵀA + B − Bᵀ, and every such W has I − W ⪰ mI."""
    n, m = draw.integer(1, 6), draw.log_uniform(0.05, 3.0)
    eye = identity(n)
    W = draw.normal(n, n) * draw.log_uniform(0.1, 5.0)
    low = float(torch.linalg.eigvalsh(2 * eye - W - W.T)[0]) / 2
    W = W + (low - m - draw.uniform(0.0, 1.0)) * eye
    values, vectors = torch.linalg.eigh(eye - (W + W.T) / 2 - m * eye)
    A = values.clamp_min(0).sqrt()[:, None] * vectors.T
    B = (W - W.T) / 4
    made = (1 - m) * eye - A.T @ A + B - B.T
    back = torch.linalg.eigvalsh(2 * eye - made - made.T)[0] / 2
    error = max(norm(made - W), m - float(back)) / (1 + norm(W))
    return Trial(error / EXACT, {"n": n, "m": m})


def _square(draw: Random, *, normal_only: bool = False) -> Tensor:
    n = draw.integer(2, 5)
    J = draw.normal(n, n)
    if normal_only:
        q, _ = torch.linalg.qr(J)
        J = q @ torch.diag(draw.normal(n)) @ q.T
    return J * (draw.uniform(0.1, 0.95) / float(torch.linalg.eigvals(J).abs().max()))


def _radius(J: Tensor) -> float:
    return float(torch.linalg.eigvals(J).abs().max())


def _norm_is_radius(draw: Random, normal_only: bool) -> Trial:
    J = _square(draw, normal_only=normal_only)
    return Trial(spectral(J) / _radius(J), {"J": J.tolist()})


def _least_singular(draw: Random, by_norm: bool) -> Trial | None:
    J = _square(draw)
    size = spectral(J) if by_norm else _radius(J)
    if size >= 1:
        return None
    least = float(torch.linalg.svdvals(identity(len(J)) - J)[-1])
    return Trial((1 - size) / least, {"J": J.tolist()})


@dataclass(frozen=True)
class Smooth:
    """f(x) = ½xᵀHx + Σ cₖ g(wₖᵀx), least at 0 with f = 0; L ≥ ‖∇²f‖, μ ≤ ∇²f."""

    H: Tensor
    w: Tensor
    c: Tensor
    waves: bool  # g(t) = 1 − cos t, which is not convex; else log cosh t

    def value(self, x: Tensor) -> float:
        t = self.w @ x
        g = 1 - torch.cos(t) if self.waves else torch.logaddexp(t, -t) - math.log(2.0)
        return 0.5 * float(x @ self.H @ x) + float(self.c @ g)

    def gradient(self, x: Tensor) -> Tensor:
        t = self.w @ x
        return self.H @ x + self.w.T @ (self.c * (torch.sin(t) if self.waves else torch.tanh(t)))

    @property
    def smoothness(self) -> float:
        return spectral(self.H + self.w.T @ (self.c[:, None] * self.w))

    @property
    def strength(self) -> float:
        return float(torch.linalg.eigvalsh(self.H)[0])


def _smooth(draw: Random, *, waves: bool, strong: bool) -> tuple[Smooth, Tensor]:
    n, k = draw.integer(1, 4), draw.integer(1, 4)
    root = draw.normal(n, n)
    H = root @ root.T + draw.log_uniform(1e-3, 1.0) * identity(n)
    if not strong:
        H = torch.zeros_like(H)
    return Smooth(H, draw.normal(k, n), draw.normal(k).abs(), waves), 3 * draw.normal(n)


def _cocoercive(draw: Random, reverse: bool) -> Trial | None:
    f, x = _smooth(draw, waves=False, strong=True)
    y = x + draw.normal(len(x)) * draw.log_uniform(1e-2, 3.0)
    d = f.gradient(x) - f.gradient(y)
    inner, square = float((x - y) @ d), float(d @ d) / f.smoothness
    return Trial(square / inner if reverse else inner / square, {"n": len(x)})


def _descent(draw: Random) -> Trial | None:
    f, x = _smooth(draw, waves=True, strong=False)
    eta = draw.uniform(0.05, 1.0) / f.smoothness
    g = f.gradient(x)
    if norm(g) < 1e-4:
        return None
    fall = f.value(x) - f.value(x - eta * g)
    return Trial(0.5 * eta * float(g @ g) / max(fall, 1e-300), {"n": len(x), "eta": eta})


def _critical(draw: Random) -> Trial | None:
    f, x = _smooth(draw, waves=True, strong=False)
    L, start = f.smoothness, f.value(x)
    eps = math.sqrt(2 * L * start / draw.integer(3, 60)) if start > 0 else 0.0
    if eps == 0.0:
        return None
    most = math.floor(2 * L * start / eps**2 + 1e-9)
    least = norm(f.gradient(x))
    for _ in range(most):
        x = x - f.gradient(x) / L
        least = min(least, norm(f.gradient(x)))
    return Trial(least / eps, {"n": len(x), "iterations": most})


def _gradient_bounds(draw: Random) -> Trial:
    f, x = _smooth(draw, waves=False, strong=True)
    mu, value, g = f.strength, f.value(x), f.gradient(x)
    upper, lower = float(g @ g) / (2 * mu), mu / 2 * float(x @ x)
    return Trial(max(value / upper, lower / value), {"n": len(x), "mu": mu})


def _rate(draw: Random) -> Trial:
    f, x = _smooth(draw, waves=False, strong=True)
    return _descend(f, x, 1 - f.strength / f.smoothness, draw.integer(1, 30))


def _descend(f: Smooth, x: Tensor, factor: float, steps: int) -> Trial:
    first, case = f.value(x), {"x": x.tolist(), "factor": factor, "steps": steps}
    for _ in range(steps):
        x = x - f.gradient(x) / f.smoothness
    bound = factor**steps * first
    left = f.value(x)
    if left < 1e-26 * first and bound >= 0:
        return Trial(0.0, case)  # rounding; nothing is left of f
    return Trial(left / bound if bound > 0 else math.inf, case)


def _pl_rate(draw: Random, half: bool) -> Trial:
    """‖∇f‖² ≥ μf holds with μ = 2λ_min(H) on a quadratic, with equality along an eigenvector."""
    n = draw.integer(1, 4)
    root = draw.normal(n, n)
    H = root @ root.T + 0.05 * identity(n)
    f = Smooth(H, zeros(1, n), zeros(1), False)
    factor = 1 - (0.5 if half else 1.0) * 2 * f.strength / f.smoothness
    return _descend(f, draw.normal(n), factor, draw.integer(1, 10))


def _pl_family(draw: Random, half: bool) -> Iterator[Trial]:
    # f = ½x²: ‖f′‖² = 2f, so μ = 2 and L = 1: the printed factor 1 − μ/L is −1.
    one = ones(1, 1)
    f = Smooth(one, 0 * one, 0 * one[0], False)
    yield _descend(f, one[0], 1 - (1.0 if half else 2.0), 1)
    # f = x² + 3 sin²x = x² + (3/2)(1 − cos 2x), not convex: μ = 1/16 (Karimi et al.), L = 8.
    wave = Smooth(2 * one, 2 * one, 1.5 * one[0], True)
    for start in (0.5, 1.5, 2.5, 4.0, 9.0):
        x = start * one[0]
        yield _descend(wave, x, 1 - (0.5 if half else 1.0) / 16 / 8, 12)


def _path_length(draw: Random, constant: float) -> Trial:
    f, x = _smooth(draw, waves=False, strong=True)
    mu, L = 2 * f.strength, f.smoothness  # ‖∇f‖² ≥ 2·strength·f
    bound, length = constant * math.sqrt(f.value(x) / mu), 0.0
    for _ in range(200):
        g = f.gradient(x)
        length += norm(g) / L
        x = x - g / L
    return Trial(length / bound, {"n": len(x), "mu": mu, "L": L})


def _spectral_theorem(draw: Random) -> Trial:
    n = draw.integer(1, 7)
    S = draw.normal(n, n)
    S = S + S.T
    values, vectors = torch.linalg.eigh(S)
    error = norm(vectors @ torch.diag(values) @ vectors.T - S) / norm(S)
    error += norm(vectors.T @ vectors - identity(n))
    return Trial(error / EXACT, {"n": n})


def _output_flow(draw: Random, mean: bool) -> Trial:
    """dŷ/dt along θ̇ = −∇L, by a central difference, against −K(ŷ − y), for a tanh network."""
    d, h, N = draw.integer(1, 3), draw.integer(2, 5), draw.integer(2, 4)
    X, y = draw.normal(N, d), draw.normal(N)
    theta = draw.normal(h * d + h)

    def outputs(v: Tensor) -> Tensor:
        return torch.tanh(X @ v[: h * d].reshape(d, h)) @ v[h * d :] / h

    J: Tensor = torch.func.jacrev(outputs)(theta)
    rest = outputs(theta) - y
    move = -(J.T @ rest) / (N if mean else 1)
    step = 1e-5 / (1 + norm(move))
    speed = (outputs(theta + step * move) - outputs(theta - step * move)) / (2 * step)
    wanted = -(J @ J.T) @ rest
    rounding = 1e-9 * (1 + norm(move))  # of the difference, where K(ŷ − y) is small
    return Trial(norm(speed - wanted) / (1e-5 * norm(wanted) + rounding), {"N": N, "hidden": h})


def _warped(draw: Random) -> tuple[Tensor, float, Tensor, Tensor]:
    """F(θ) = t + ε sin t, t = Mθ: J = diag(1 + ε cos t)M, so λ_min(K) ≥ (1 − ε)²σ_min(M)²."""
    N = draw.integer(1, 4)
    M = draw.normal(N, N + draw.integer(0, 4))
    return M, draw.uniform(0.0, 0.5), draw.normal(N), draw.normal(M.shape[1])


def _uniformly_conditioned(draw: Random) -> Trial:
    M, eps, y, theta = _warped(draw)
    t = M @ theta
    J = (1 + eps * torch.cos(t))[:, None] * M
    rest = t + eps * torch.sin(t) - y
    mu = float(torch.linalg.eigvalsh(J @ J.T)[0])
    g = J.T @ rest
    return Trial(mu * 0.5 * float(rest @ rest) / float(g @ g), {"N": len(y), "eps": eps})


def _globally(draw: Random) -> Trial | None:
    """Theorem 2.6.3 with κ = ημ/2, η = 1/β, and the ball of R = 4√(L₀/μ)."""
    M, eps, y, theta = _warped(draw)
    mu = 2 * ((1 - eps) * float(torch.linalg.svdvals(M)[-1])) ** 2
    if mu < 1e-3:
        return None
    first, t = theta, M @ theta
    rest = t + eps * torch.sin(t) - y
    start = 0.5 * float(rest @ rest)
    beta = spectral(M) ** 2 * ((1 + eps) ** 2 + eps * norm(rest))
    worst = 0.0
    for k in range(1, 60):
        theta = theta - M.T @ ((1 + eps * torch.cos(t)) * rest) / beta
        t = M @ theta
        rest = t + eps * torch.sin(t) - y
        left = 0.5 * float(rest @ rest)
        if left < 1e-26 * start:
            break
        worst = max(worst, left / ((1 - mu / (2 * beta)) ** k * start))
    worst = max(worst, norm(theta - first) / (4 * math.sqrt(start / mu)))
    return Trial(worst, {"N": len(y), "eps": eps, "mu": mu, "beta": beta})


def _implicit_function(draw: Random) -> Trial:
    """z = tanh(Wz + Vp), ‖W‖ < 1: dz/dp by central differences against −(∂g/∂z)⁻¹∂g/∂p."""
    n, k = draw.integer(1, 4), draw.integer(1, 3)
    W, V = draw.normal(n, n), draw.normal(n, k)
    W = W * (0.8 / spectral(W))
    p, move = draw.normal(k), draw.normal(k)

    def solved(at: Tensor) -> Tensor:
        z = zeros(n)
        for _ in range(200):
            z = torch.tanh(W @ z + V @ at)
        return z

    slope = 1 - solved(p) ** 2
    eye = identity(n)
    wanted = torch.linalg.solve(eye - slope[:, None] * W, slope * (V @ move))
    found = (solved(p + 1e-5 * move) - solved(p - 1e-5 * move)) / 2e-5
    # Where tanh is flat the difference is rounding, about 1e-11.
    return Trial(norm(found - wanted) / (1e-5 * norm(wanted) + 1e-9), {"n": n, "k": k})


def _weight_tied(draw: Random) -> Trial:
    """Block i of the tied state holds the i-th layer's activation after i steps."""
    depth, n = draw.integer(1, 5), draw.integer(1, 4)
    Ws, bs = [draw.normal(n, n) for _ in range(depth)], [draw.normal(n) for _ in range(depth)]
    sigmas = [(torch.tanh, torch.relu, torch.sigmoid)[draw.integer(0, 2)] for _ in range(depth)]
    x = draw.normal(n)
    wanted = x
    for W, b, sigma in zip(Ws, bs, sigmas, strict=True):
        wanted = sigma(W @ wanted + b)
    big = zeros(depth * n, depth * n)
    for i in range(1, depth):
        big[i * n : (i + 1) * n, (i - 1) * n : i * n] = Ws[i]
    source = torch.cat([Ws[0] @ x, zeros((depth - 1) * n)])
    z = draw.normal(depth * n)  # the start does not matter
    for _ in range(depth):
        parts = (big @ z + source + torch.cat(bs)).split(n)
        z = torch.cat([sigma(part) for sigma, part in zip(sigmas, parts, strict=True)])
    return Trial(norm(z[-n:] - wanted) / EXACT, {"depth": depth, "n": n})
