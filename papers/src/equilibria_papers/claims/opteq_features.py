"""OptEq, regularized features: Theorem 4, the prox form of Section 5.1, Table 2, Eq 13."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from equilibria.problems import Decorrelation, FeatureIncay

from .claim import Trial, claim, printed, reading
from .drawing import ACTIVATIONS, integer, norm, normal, spectral, uniform
from .opteq_layer import EXACT, Layer, draw_layer, off
from .solving import bisect, relu_prox, solve

# ---------------------------------------------------------------------- Theorem 4 and Section 5.1


def _theorem4(draw: torch.Generator) -> Trial:
    """R(z) = ½(z − a)ᵀK(z − a), ReLU: the fixed point of f ∘ (I − γ∇R) against one program."""
    layer = draw_layer(draw, activation="relu")
    m = layer.w.shape[1]
    root = normal(draw, m, integer(draw, 1, m))
    k, a = root @ root.mT, normal(draw, m)
    gamma = uniform(draw, 0.01, 1.0) / spectral(k)
    eye = torch.eye(m, dtype=torch.float64)

    def step(z: Tensor) -> Tensor:
        return layer(z - gamma * (k @ (z - a)))

    def slope(z: Tensor) -> Tensor:
        return layer.slope(z - gamma * (k @ (z - a))) @ (eye - gamma * k)

    star = solve(step, slope, torch.zeros(m, dtype=torch.float64))
    least = relu_prox(layer.w, layer.c, gamma * (k @ a), gamma * k, layer.nu)
    return Trial(off(star, least), {**layer.case(), "gamma": gamma, "K": k, "a": a})


def _theorem4_smooth(draw: torch.Generator) -> Iterator[Trial]:
    """Other activations and R = Σ log cosh, against points around: φ + γR is least at z*."""
    for _ in range(200):
        layer = draw_layer(draw)
        m = layer.w.shape[1]
        gamma = uniform(draw, 0.05, 0.9)

        def step(z: Tensor, layer: Layer = layer, gamma: float = gamma) -> Tensor:
            return layer(z - gamma * torch.tanh(z))

        def slope(z: Tensor, layer: Layer = layer, gamma: float = gamma) -> Tensor:
            inner = 1.0 - gamma * (1.0 - torch.tanh(z) ** 2)
            return layer.slope(z - gamma * torch.tanh(z)) * inner

        def whole(v: Tensor, layer: Layer = layer, gamma: float = gamma) -> float:
            return layer.phi(v) + gamma * float(ACTIVATIONS["tanh"].integral(layer(v)).sum())

        star = solve(step, slope, torch.zeros(m, dtype=torch.float64))
        best = whole(star - gamma * torch.tanh(star))
        others = [whole(star + normal(draw, m) * 10.0 ** (-k)) for k in range(4)]
        least = min(others)
        ratio = 1.0 + (best - least) / (1e-3 + abs(best) + abs(least))
        yield Trial(ratio, {**layer.case(), "gamma": gamma, "R": "log cosh"})


def _prox_form(draw: torch.Generator, *, envelope: bool) -> Trial:
    """z = f(prox_{γR}(z)) for R = ½‖z‖² against argmin φ + γR, or φ + the envelope of γR."""
    layer = draw_layer(draw, activation="relu")
    m = layer.w.shape[1]
    gamma = uniform(draw, 0.05, 2.0)
    eye = torch.eye(m, dtype=torch.float64)
    shrink = 1.0 / (1.0 + gamma)

    def step(z: Tensor) -> Tensor:
        return layer(shrink * z)

    star = solve(
        step, lambda z: layer.slope(shrink * z) * shrink, torch.zeros(m, dtype=torch.float64)
    )
    weight = gamma * shrink if envelope else gamma
    zero = torch.zeros(m, dtype=torch.float64)
    least = relu_prox(layer.w, layer.c, zero, weight * eye, layer.nu)
    return Trial(off(star, least), {**layer.case(), "gamma": gamma, "z*": star, "argmin": least})


# ---------------------------------------------------------------------------------------- Table 2


def _prox_row(draw: torch.Generator, kind: str) -> Trial:
    """prox_{γR} entrywise: the zero of the rising u − z + γ∂R(u)."""
    z, gamma = normal(draw, 6) * 3.0, uniform(draw, 0.01, 3.0)
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


def _incay(draw: torch.Generator, *, sign: float) -> Trial:
    z, gamma = normal(draw, integer(draw, 1, 5)), uniform(draw, 0.05, 2.0)
    eps = uniform(draw, 0.3, 2.0)
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


def _decorrelation(draw: torch.Generator, *, printed: bool) -> Trial:
    rows, length = integer(draw, 2, 4), integer(draw, 2, 4)
    z, gamma = normal(draw, rows, length), uniform(draw, 0.1, 1.5)
    right = z - gamma * _gradient(_cosines, z)
    squares = z.square().sum(1)
    proj = z[:, :, None] * z[:, None, :] / squares[:, None, None]
    total = proj.sum(0)
    eye = torch.eye(length, dtype=torch.float64)
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


def _eq13(draw: torch.Generator) -> Trial:
    """½‖DZZᵀD − I‖²_F against Table 2's sum of squared cosines."""
    z = normal(draw, integer(draw, 1, 5), integer(draw, 1, 5))
    d = torch.diag(1.0 / torch.linalg.vector_norm(z, dim=1))
    eye = torch.eye(len(z), dtype=torch.float64)
    whole = 0.5 * float((d @ z @ z.mT @ d - eye).square().sum())
    other = float(_cosines(z))
    return Trial(abs(whole - other) / (1e-10 * (1.0 + whole)), {"Z": z})


def _two_incays(draw: torch.Generator) -> Trial:
    """1/(‖z‖² + ε) of Section 7.2.2 against 2/(‖z‖² + 2ε) of Tables 2 and 5."""
    square, eps = uniform(draw, 0.1, 5.0), uniform(draw, 0.1, 2.0)
    a, b = 1.0 / (square + eps), 2.0 / (square + 2.0 * eps)
    return Trial(abs(a - b) / (1e-10 * b), {"|z|^2": square, "epsilon": eps})


def _incay_minimum(draw: torch.Generator) -> Trial:
    """σ = identity, W = w I: a fixed point of f ∘ (I − γ∇R) against the least value of φ + γR."""
    m = integer(draw, 1, 4)
    w, gamma, eps = uniform(draw, 0.2, 0.95), uniform(draw, 0.05, 1.0), uniform(draw, 0.05, 1.0)
    c = normal(draw, m) * uniform(draw, 0.0, 1.0)
    return _incay_points(w, gamma, eps, c)


def _incay_points(w: float, gamma: float, eps: float, c: Tensor) -> Trial:
    """φ(z) = ½(1/w² − 1)‖z‖² − ⟨c, z⟩/w. Along ±c all fixed points are zeros of one function."""
    size = norm(c)
    # The force is odd in its last term and grows linearly: all zeros lie within this reach.
    reach = (size / w + 4.0 * gamma / eps**2) / (1.0 / w**2 - 1.0) + 1.0
    line = torch.linspace(-reach, reach, 4000, dtype=torch.float64)

    def force(t: Tensor) -> Tensor:
        return (1.0 / w**2 - 1.0) * t - size / w - 4.0 * gamma * t / (t * t + 2.0 * eps) ** 2

    values = force(line)
    change = values[:-1] * values[1:] < 0
    roots = []
    for low, high in zip(line[:-1][change], line[1:][change], strict=True):
        sign = float(torch.sign(force(high)))
        roots.append(bisect(lambda t, sign=sign: sign * force(t), low, high))  # type: ignore[misc]
    heights = [
        float(0.5 * (1 / w**2 - 1) * t * t - size * t / w + 2 * gamma / (t * t + 2 * eps))
        for t in roots
    ]
    if not heights:
        raise RuntimeError(f"no fixed point found for w={w}, gamma={gamma}, eps={eps}, c={c}")
    worst = max(heights) - min(heights)
    case = {"w": w, "gamma": gamma, "epsilon": eps, "c": c, "fixed points along c": roots}
    return Trial(worst / (EXACT * (1.0 + abs(min(heights)))), case)


def _convex_minimum(draw: torch.Generator) -> Trial:
    """The same with R = ½‖z‖²: one fixed point, the minimizer."""
    return _theorem4(draw)


CLAIMS = (
    claim(
        "opteq.theorem4",
        "Theorem 4; Table 1, row 5",
        r"The fixed point of $f \circ (\mathcal I - \gamma\,\partial\mathcal R_z)$ "
        r"minimizes the convex function $\varphi + \gamma\mathcal R_z$.",
        printed(_theorem4, _theorem4_smooth, cost=2.0),
    ),
    claim(
        "opteq.section5.1",
        "Section 5.1, prox form",
        r"With $\mathcal T_{\mathcal R} = \mathrm{prox}_{\gamma\mathcal R_z}$ too, "
        r"$z = \mathcal T(\mathcal T_{\mathcal R}(z))$ belongs to the objective "
        r"$\varphi + \gamma\mathcal R_z$.",
        printed(lambda draw: _prox_form(draw, envelope=False), cost=2.0),
        reading(
            "with the envelope",
            r"the objective is $\varphi$ plus the envelope of $\gamma\mathcal R_z$",
            lambda draw: _prox_form(draw, envelope=True),
            cost=2.0,
        ),
    ),
    claim(
        "opteq.table2.norm",
        "Table 2, row 1 (feature decay)",
        r"$\mathrm{prox}_{\gamma\mathcal R}(z) = z/(1+\gamma)$ for "
        r"$\mathcal R = \frac12\|z\|^2$.",
        printed(lambda draw: _prox_row(draw, "norm")),
    ),
    claim(
        "opteq.table2.l1",
        "Table 2, row 2 (sparsity)",
        r"$\mathrm{prox}_{\gamma\mathcal R}(z) = (|z| - \gamma)_+ \odot \mathrm{sgn}(z)$ "
        r"for $\mathcal R = \|z\|_1$.",
        printed(lambda draw: _prox_row(draw, "l1")),
    ),
    claim(
        "opteq.table2.incay",
        "Table 2, row 3 (feature incay)",
        r"$\mathcal I - \gamma\,\partial\mathcal R$ is $(1 - 4\gamma/(\|z\|^2 + "
        r"2\epsilon)^2)z$ for $\mathcal R = 2/(\|z\|^2 + 2\epsilon)$.",
        printed(lambda draw: _incay(draw, sign=-1.0)),
        reading("plus", r"the sign is $+$", lambda draw: _incay(draw, sign=1.0)),
        note="The printed sign shrinks features; incay is meant to expand them.",
    ),
    claim(
        "opteq.table2.decorrelation",
        "Table 2, row 4 (decorrelation)",
        r"$\mathcal I - \gamma\,\partial\mathcal R/\partial z_i$ is $z_i - (\mathcal I + "
        r"\mathrm{Proj}(z_i))\sum_{j\ne i}\mathrm{Proj}(z_j)\,z_i/\|z_i\|^2$ for $\mathcal R = "
        r"\frac12\sum_{i\ne j}\cos^2(z_i, z_j)$.",
        printed(lambda draw: _decorrelation(draw, printed=True)),
        reading(
            "corrected",
            r"$z_i - 2\gamma(\mathcal I - \mathrm{Proj}(z_i))\sum_{j\ne i}"
            r"\mathrm{Proj}(z_j)\,z_i/\|z_i\|^2$",
            lambda draw: _decorrelation(draw, printed=False),
        ),
    ),
    claim(
        "opteq.table2.convex",
        "Table 2 under Theorem 4",
        r"With the $\mathcal R_z$ of Table 2 the fixed point minimizes "
        r"$\varphi + \gamma\mathcal R_z$; tried with feature incay.",
        printed(
            _incay_minimum,
            lambda draw: (
                _incay_points(w, 1.0, 0.2, torch.zeros(1).double()) for w in (0.3, 0.6, 0.9)
            ),
        ),
        reading(
            "convex",
            r"$\mathcal R_z$ convex, as Theorem 4 asks; incay, decorrelation and HSIC "
            "are not",
            _convex_minimum,
            cost=2.0,
        ),
        note="A fixed point is a stationary point: with incay it can be a maximum.",
    ),
    claim(
        "opteq.eq13",
        "Eq 13 and Table 2, row 4",
        r"$\frac12\|DZZ^\top D - I\|_F^2 = \frac12\sum_{i\ne j}"
        r"(z_i^\top z_j/\|z_i\|\|z_j\|)^2$.",
        printed(_eq13),
    ),
    claim(
        "opteq.section7.2.2",
        "Section 7.2.2, setting 3",
        r"Feature incay is $1/(\|z\|^2 + \epsilon)$ (Section 7.2.2) and "
        r"$2/(\|z\|^2 + 2\epsilon)$ (Tables 2 and 5): one function.",
        printed(_two_incays),
        note=r"They differ by a factor of up to 2. We take the tables' form.",
    ),
)
