"""An adversarial search: random hostile solves, each judged by float64 algebra of its own.

    python -m tests.adversarial --minutes 10 --seed 0 --state search.json

Case i of a seed is drawn from (seed, i) alone, so that every failure can be run again with
``--only i``, and a search that was stopped goes on from its state file. A case is wrong if a sample
is called converged and is not, if a stated residual is not that of the returned value, or if a
gradient that nobody warned of is not the gradient: against dense Jacobians in float64 for plain
maps, against central differences for layers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import equilibria as eq

EPS = {d: torch.finfo(d).eps for d in (torch.float64, torch.float32, torch.float16, torch.bfloat16)}
RTOL = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
BACKWARD_RTOL = {torch.float64: 1e-10, torch.float32: 1e-5}
DECADES = {torch.float64: 140, torch.float32: 28, torch.bfloat16: 28, torch.float16: 2}

Fn = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(z [B, n], x [B, n], mask [B, n], W [n, n]) ↦ T(z)."""


@dataclass(frozen=True)
class Family:
    fn: Fn
    kink: bool = False
    """Whether the derivative jumps, so that a gradient near a kink is not checked."""
    coupled: bool = False
    expands: bool = False


def _batch_mean(z: Tensor, x: Tensor, mask: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(0.6 * z @ w.T + x) + 0.3 * torch.tanh(z).mean(0)


def _batch_norm(z: Tensor, x: Tensor, mask: Tensor, w: Tensor) -> Tensor:
    return 0.3 * F.batch_norm(z @ w.T + 3.0 * x, None, None, training=True) + 0.2 * x


def _covariance(z: Tensor, x: Tensor, mask: Tensor, w: Tensor) -> Tensor:
    t = torch.tanh(z)
    return torch.tanh(0.5 * z @ w.T + x) - 0.1 * (t @ t.T) @ t / len(z)


FAMILIES = {
    "affine": Family(lambda z, x, mask, w: z @ w.T + x),
    "tanh": Family(lambda z, x, mask, w: torch.tanh(z @ w.T + x)),
    "relu": Family(lambda z, x, mask, w: torch.relu(z @ w.T + x), kink=True),
    "attention": Family(lambda z, x, mask, w: x + 0.5 * torch.softmax(z @ w.T + mask, 1)),
    # −mask is 0 or +∞: a one-sided bound.
    "clamped": Family(lambda z, x, mask, w: torch.minimum(z @ w.T + x, -mask), kink=True),
    "root": Family(lambda z, x, mask, w: torch.sqrt(z @ w.T + x + 3.0)),
    "logarithm": Family(lambda z, x, mask, w: 0.5 * torch.log(4.0 + z @ w.T + x)),
    "rational": Family(lambda z, x, mask, w: torch.tanh(x) / (1.5 + (z @ w.T).square())),
    "expanding": Family(lambda z, x, mask, w: 2.5 * z @ w.T + x, expands=True),
    "swinging": Family(lambda z, x, mask, w: torch.tanh(-3.0 * z @ w.T + x), expands=True),
    "batch mean": Family(_batch_mean, coupled=True),
    "batch norm": Family(_batch_norm, coupled=True),
    "covariance": Family(_covariance, coupled=True),
}


@dataclass
class Case:
    """A plain map with everything that was drawn for it."""

    family: str
    dtype: torch.dtype
    batch: int
    size: int
    scale: float
    tree: bool
    solver: Any
    adjoint: Any
    bad: int | None
    x: Tensor
    mask: Tensor
    w: Tensor
    z0: Tensor
    g: Tensor
    warm: bool = False

    def __str__(self) -> str:
        return (
            f"{self.family}, {self.dtype}, [{self.batch}, {self.size}], scale {self.scale:.1e}, "
            f"{'tree, ' if self.tree else ''}{'warm, ' if self.warm else ''}bad={self.bad}, "
            f"{self.solver!r}, {self.adjoint!r}"
        )

    def apply(self, z: Tensor, x: Tensor, mask: Tensor, w: Tensor) -> Tensor:
        """s·T(z/s): the same map at another scale."""
        s = self.scale
        return FAMILIES[self.family].fn(z / s, x, mask, w) * s


def draw(seed: int, number: int) -> Case:
    """Case ``number`` of a seed."""
    r = Random(f"{seed}/{number}")
    gen = torch.Generator().manual_seed(r.randrange(1 << 30))
    name = r.choice(list(FAMILIES))
    dtype = r.choices(list(DECADES), (4, 4, 1, 1))[0]
    batch, size = r.randint(1, 5), r.randint(1, 6)
    if name == "batch norm":
        batch, size = max(batch, 3), max(size, 2)  # of one feature ∂/∂W is all cancellation
    decades = DECADES[dtype]
    scale = 10.0 ** r.uniform(-decades, decades) if r.random() < 0.3 else 1.0
    w = torch.randn(size, size, generator=gen, dtype=torch.float64)
    w = w * (r.choice((0.3, 0.7, 0.95)) / torch.linalg.matrix_norm(w, 2))
    if name == "affine" and r.random() < 0.3:  # far from normal: ‖W‖ large, one eigenvalue
        w = 0.5 * torch.eye(size, dtype=torch.float64) + torch.triu(3.0 * w, 1)
    x = torch.randn(batch, size, generator=gen, dtype=torch.float64)
    mask = torch.where(torch.rand(batch, size, generator=gen) < 0.3, -math.inf, 0.0).double()
    mask[:, 0] = 0.0
    bad = None
    if batch > 1 and not FAMILIES[name].coupled and r.random() < 0.25:
        bad = r.randrange(batch)
        x[bad] = r.choice((math.nan, math.inf, -1e4))
    z0 = torch.randn(batch, size, generator=gen, dtype=torch.float64) * (r.random() < 0.3)
    g = torch.randn(batch, size, generator=gen, dtype=torch.float64)
    if bad is not None:
        g[bad] = 0.0
    if r.random() < 0.2 and dtype in BACKWARD_RTOL:
        g = g * 10.0 ** r.uniform(-decades, decades / 2)
    x, mask, w, g = (t.to(dtype) for t in (x, mask, w, g))
    return Case(
        family=name,
        dtype=dtype,
        batch=batch,
        size=size,
        scale=scale,
        tree=size > 1 and r.random() < 0.2,
        solver=_solver(r, compact=not FAMILIES[name].coupled),
        adjoint=_adjoint(r),
        bad=bad,
        x=x,
        mask=mask,
        w=w,
        z0=(z0 * scale).to(dtype),
        g=g,
        warm=r.random() < 0.05,
    )


def _solver(r: Random, *, compact: bool) -> Any:
    options: dict[str, Any] = {"max_steps": r.choice((5, 60, 200))}
    options["compact"] = compact and r.random() < 0.3
    if r.random() < 0.15:
        options |= {"rtol": 0.0, "atol": 0.0, "max_steps": r.choice((1, 4, 20)), "compact": False}
    if r.random() < 0.3:
        options["block"] = r.choice((1, 3, 4))
    kind = r.choice((eq.Picard, eq.Anderson, eq.Broyden, eq.BestIterate))
    if kind is eq.BestIterate:
        return eq.BestIterate(r.choice((eq.Picard, eq.Anderson))(**options))
    if kind is eq.Anderson:
        options["memory"] = r.choice((1, 3, 5))
    return kind(**options)


def _adjoint(r: Random) -> Any:
    return r.choice(
        (
            eq.Implicit(),
            eq.Implicit(solver=eq.Anderson()),
            eq.Implicit(solver=eq.GMRES(restart=3, max_steps=200)),
            eq.Unrolled(),
            eq.Phantom(),
            eq.Phantom(form="neumann", steps=3),
            eq.OneStep(),
        )
    )


def _split(z: Tensor) -> tuple[Tensor, Tensor]:
    return z[:, :1], z[:, 1:]


def judge(case: Case) -> list[str]:
    """What is wrong with our answer to a case; empty if nothing is."""
    leaf = [t.clone().requires_grad_() for t in (case.x, case.w)]
    x, w = leaf

    def fn(z: Any, x: Tensor, mask: Tensor) -> Any:
        whole = torch.cat(z, 1) if case.tree else z
        out = case.apply(whole, x, mask, w)
        return _split(out) if case.tree else out

    z0 = case.z0
    if case.warm:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            known = eq.fixed_point(lambda z, x: case.apply(z, x, case.mask, w), z0, (x,))
            z0 = case.z0 = known.value.detach()
    start = _split(z0) if case.tree else z0
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        args = (x, case.mask)
        sol = eq.fixed_point(fn, start, args, solver=case.solver, adjoint=case.adjoint)
        value = torch.cat(sol.value, 1) if case.tree else sol.value
        if value.requires_grad:
            healthy = [b for b in range(case.batch) if b != case.bad]
            (value[healthy] * case.g[healthy]).sum().backward()
    found = _judge_value(case, sol, value.detach())
    if not any("backward" in str(h.message) for h in heard):
        found += _judge_gradient(case, sol, value.detach(), x.grad, w.grad)
    return found


def _wide(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    return case.x.double(), case.mask.double(), case.w.double()


def _rows_norm(t: Tensor) -> Tensor:
    """‖·‖ of each row in float64, safe against overflow."""
    top = t.abs().amax(1).clamp_min(1e-300)
    return (t / top[:, None]).norm(dim=1) * top


def _unconverged(wrong: Tensor, residual: Tensor, scale: Tensor) -> list[str]:
    """The first of the samples that are called converged and are not."""
    text = "sample {} is called converged with the relative residual {:.1e}"
    first = wrong.nonzero().flatten().tolist()[:1]
    return [text.format(b, float(residual[b] / scale[b])) for b in first]


def _misstated(off: Tensor, stated: Tensor, residual: Tensor) -> list[str]:
    """The first of the samples whose stated residual is not theirs."""
    first = off.nonzero().flatten().tolist()[:1]
    return [
        f"sample {b} states {float(stated[b]):.2e} and has {float(residual[b]):.2e}" for b in first
    ]


def _judge_value(case: Case, sol: Any, value: Tensor) -> list[str]:
    z = value.double()
    image = case.apply(z, *_wide(case))
    residual, scale = _rows_norm(image - z), _rows_norm(image)
    noise = 40 * case.size * EPS[case.dtype] * (scale + _rows_norm(z) + case.scale)
    fixed = case.solver.fixed_steps
    rtol = 2 * EPS[case.dtype] if fixed else RTOL[case.dtype]
    converged = sol.result == int(eq.Result.converged)
    wrong = converged & ~(residual <= 1.01 * rtol * scale + noise)
    if fixed:  # judged one step earlier: a contraction comes closer, nothing more is claimed
        wrong = wrong & FAMILIES[case.family].expands
    found = _unconverged(wrong, residual, scale)
    ended = (sol.result != int(eq.Result.nonfinite)) & (sol.result != int(eq.Result.diverged))
    stated = sol.stats.residual.double()
    off = ended & ~((stated - residual).abs() <= 0.05 * residual + noise)
    if FAMILIES[case.family].coupled:  # stated for the batch, or before the others ended
        off = ended & (residual > 1.05 * torch.maximum(stated, rtol * scale) + noise)
    if not fixed:
        found += _misstated(off, stated, residual)
    if not bool(torch.isfinite(value).all()):
        found.append("the value holds NaN or infinity")
    return found


def _judge_gradient(
    case: Case, sol: Any, value: Tensor, x_grad: Tensor | None, w_grad: Tensor | None
) -> list[str]:
    if x_grad is None or w_grad is None:
        # An unrolled solve whose start is the answer has taken no step.
        return [] if bool((sol.stats.steps[sol.result == 0] == 1).all()) else ["no gradient"]
    healthy = [b for b in range(case.batch) if b != case.bad]
    if not bool(torch.isfinite(w_grad).all() and torch.isfinite(x_grad[healthy]).all()):
        # The gradient itself may lie outside the dtype: it is about g times the scale.
        size = float(case.g.double().abs().max()) * max(case.scale, 1.0)
        fits = case.dtype in BACKWARD_RTOL and size < 1e-3 * torch.finfo(case.dtype).max
        fits = fits and bool(torch.isfinite(value).all())
        return ["a gradient is NaN or infinite"] if fits else []
    unrolled = isinstance(case.adjoint, eq.Unrolled)
    if case.dtype not in BACKWARD_RTOL or not (unrolled or isinstance(case.adjoint, eq.Implicit)):
        return []
    if case.solver.fixed_steps:
        picard = unrolled and isinstance(case.solver, eq.Picard)
        return _judge_unrolled(case, x_grad, w_grad, healthy) if picard else []
    if not bool((sol.result[healthy] == int(eq.Result.converged)).all()):
        return []
    return _judge_implicit(case, value, x_grad, w_grad, healthy, unrolled=unrolled)


def _reference_inputs(case: Case, rows: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    x, mask, w = _wide(case)
    return x[rows].requires_grad_(), mask[rows], w.requires_grad_()


def _compare(
    ours: tuple[Tensor, Tensor],
    truth: tuple[Tensor, Tensor],
    allowed: float,
    what: str,
    floor: float = 1e-37,
) -> list[str]:
    found = []
    for name, a, b in zip(("x", "W"), ours, truth, strict=True):
        size = float(b.abs().amax())
        gap = float((a.double() - b).abs().amax())
        if gap > max(allowed * size, floor):
            found.append(f"{what} in {name} is off by {gap / max(size, 1e-300):.1e}")
    return found


def _judge_unrolled(case: Case, x_grad: Tensor, w_grad: Tensor, rows: list[int]) -> list[str]:
    """Fixed steps of Picard, back-propagated by a plain loop in float64."""
    x, mask, w = _reference_inputs(case, rows)
    z, beta = case.z0.double()[rows], case.solver.damping
    for _ in range(case.solver.max_steps):
        z = (1.0 - beta) * z + beta * case.apply(z, x, mask, w)
    if FAMILIES[case.family].kink or FAMILIES[case.family].expands or not z.isfinite().all():
        return []
    truth = torch.autograd.grad((z * case.g.double()[rows]).sum(), (x, w))
    allowed = 1e3 * EPS[case.dtype] * case.solver.max_steps
    return _compare((x_grad[rows], w_grad), truth, allowed, "the unrolled gradient")


def _judge_implicit(
    case: Case, value: Tensor, x_grad: Tensor, w_grad: Tensor, rows: list[int], *, unrolled: bool
) -> list[str]:
    """(∂T/∂θ)ᵀ(I − J)⁻ᵀg at our z with the dense joint Jacobian of the healthy rows."""
    x, mask, w = _reference_inputs(case, rows)
    z = value.double()[rows]
    if FAMILIES[case.family].kink and _near_kink(case, z, x, mask, w):
        return []
    if unrolled and FAMILIES[case.family].expands:
        return []  # the derivative of a path that expands need not come near that of its end
    truth, condition = _dense_gradient(
        lambda z, x, w: case.apply(z, x, mask, w), z, (x, w), case.g.double()[rows]
    )
    allowed = 20 * (BACKWARD_RTOL[case.dtype] + 50 * EPS[case.dtype]) * condition
    if isinstance(getattr(case.adjoint, "solver", None), eq.Anderson):
        allowed = 20 * RTOL[case.dtype] * condition
    if unrolled:
        allowed = max(allowed, 2e3 * math.sqrt(RTOL[case.dtype]) * RTOL[case.dtype] ** 0.4)
        allowed *= condition
    if not allowed < 0.3:
        return []
    name = "the unrolled gradient" if unrolled else "the implicit gradient"
    # The gradient in W is a sum over samples, whose terms may cancel.
    terms = float((truth[0].abs().T @ (z / case.scale).abs()).amax())
    return _compare((x_grad[rows], w_grad), truth, allowed, name, max(1e-37, allowed * terms))


def _joint_jacobian(fn: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    """∂T/∂z of the whole batch, [Bn, Bn]."""
    found: Tensor = torch.autograd.functional.jacobian(
        lambda v: fn(v.view_as(z)).flatten(), z.detach().flatten()
    )
    return found


def _dense_gradient(
    fn: Callable[..., Tensor], z: Tensor, leaves: tuple[Tensor, ...], g: Tensor
) -> tuple[tuple[Tensor, ...], float]:
    """(∂T/∂leaves)ᵀ(I − J)⁻ᵀg at z in float64, and the condition of I − J."""
    jacobian = _joint_jacobian(lambda v: fn(v, *leaves), z)
    system = torch.eye(len(jacobian), dtype=torch.float64) - jacobian
    u = torch.linalg.solve(system.T, g.flatten()).view_as(z)
    leaves = tuple(t.detach().requires_grad_() for t in leaves)
    image = fn(z.detach().requires_grad_(), *leaves)  # T may be a gradient, and needs a graph
    return torch.autograd.grad(image, leaves, u), float(torch.linalg.cond(system))


def _near_kink(case: Case, z: Tensor, x: Tensor, mask: Tensor, w: Tensor) -> bool:
    s, r = case.scale, RTOL[case.dtype]
    inside = (z / s) @ w.T + x
    return bool((inside.abs() < 100 * r).any())


# ---------------------------------------------------------------------- layers


def _layers(r: Random) -> tuple[str, Callable[[], torch.nn.Module], tuple[int, ...]]:
    """A layer by name, how it is made, and the shape of one input."""
    n = r.randint(3, 6)
    weight = 10.0 ** r.uniform(-3, -0.6)
    patch = eq.Patches(channels=2, size=2)
    gamma = r.choice((0.3, eq.MeanPatchEnergy(0.2), eq.MinPatchEnergy(0.2)))
    regularizer = r.choice(
        (None, eq.SquaredNorm(weight), eq.Decorrelation(weight), eq.HSIC(weight))
    )
    made: dict[str, tuple[Callable[[], torch.nn.Module], tuple[int, ...]]] = {
        "GEQ dense": (lambda: eq.nn.GEQ(n, n + 2, gamma=gamma), (n,)),
        "GEQ patches": (
            lambda: eq.nn.GEQ(2, 4, in_channels=2, patch=patch, hidden=4, gamma=gamma),
            (2, 4, 4),
        ),
        "OptEq": (lambda: eq.nn.OptEq(n, n + 1), (n,)),
        "DeepOptEq": (lambda: eq.nn.DeepOptEq(n, (n, n + 1), regularizer=regularizer), (n,)),
        "SigmoidEq": (lambda: eq.nn.SigmoidEq(n, n + 1, radius=0.6), (n,)),
        "MonotoneDEQ": (lambda: eq.nn.MonotoneDEQ(n, in_channels=n), (n,)),
    }
    name = r.choice(list(made))
    about = {"G": f", γ = {gamma!r}", "D": f", {regularizer!r}"}.get(name[0], "")
    return name + about, *made[name]


def judge_layer(seed: int, number: int) -> tuple[str, list[str]]:
    """The gradient of a layer in float64 against central differences of its own answers."""
    r = Random(f"layer/{seed}/{number}")
    torch.manual_seed(r.randrange(1 << 30))
    text, make, shape = _layers(r)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        layer = make().double().eval()
        batch = r.randint(2, 4)
        x = torch.randn(batch, *shape, dtype=torch.float64)
        bad = r.randrange(batch) if r.random() < 0.2 and "Decor" not in text else None
        if "HSIC" in text:
            bad = None
        keep = [b for b in range(batch) if b != bad]
        if bad is not None:
            x[bad, 0] = math.nan
        z = layer(x)
        g = torch.randn_like(z)[keep]
        names = [n for n, p in layer.named_parameters() if p.requires_grad]
        parameter = dict(layer.named_parameters())[r.choice(names)]
        direction = torch.randn_like(parameter)
        direction /= direction.norm()
        parameters = list(layer.parameters())
        grads = torch.autograd.grad((z[keep] * g).sum(), parameters, allow_unused=True)
        if any(t is not None and not t.isfinite().all() for t in grads):
            return text, [f"a gradient is NaN (bad={bad})"]
        ours = grads[[p is parameter for p in parameters].index(True)]
        slope = 0.0 if ours is None else float((ours * direction).sum())
        healthy = x[keep]

        def loss(step: float) -> float:
            with torch.no_grad():
                parameter.add_(direction, alpha=step)
                out = float((layer(healthy) * g).sum())
                parameter.add_(direction, alpha=-step)
            return out

        def difference(step: float) -> float:
            return (loss(step) - loss(-step)) / (2.0 * step)

        coarse, fine = difference(1e-3), difference(1e-4)
        nearer = [difference(step) for step in (1e-5, 1e-6)]  # a kink, or a jump, may be between
    if any("converge" in str(h.message) or "tolerance" in str(h.message) for h in heard):
        return text, []
    error = abs(coarse - fine) + 1e-3 * (abs(fine) + 1e-4)  # kinks and curvature, solver noise
    if min(abs(slope - found) for found in (fine, *nearer)) > 5.0 * error:
        return text, [f"the gradient is {slope:.6g}, central differences {fine:.6g} (bad={bad})"]
    return text, []


# ---------------------------------------------------------------------- problems

PRIORS: dict[str, tuple[eq.Prior, Callable[[Tensor], Tensor]]] = {
    "free": (eq.Free(), lambda v: v),
    "relu": (eq.NonNegative(), torch.relu),
    "leaky": (eq.LeakyNonNegative(0.1), lambda v: F.leaky_relu(v, 0.1)),
    "box": (eq.Box(-0.5, 1.0), lambda v: v.clamp(-0.5, 1.0)),
    "soft": (eq.SoftThreshold(0.2), lambda v: F.softshrink(v, 0.2)),
    "shifted": (eq.ShiftedNonNegative(0.2), lambda v: torch.relu(v - 0.2)),
    "tanh": (eq.Tanh(), torch.tanh),
    "logistic": (eq.Logistic(), torch.sigmoid),
    # F.softplus(v) is v above 20, off by up to 2e-9.
    "softplus": (eq.Softplus(), lambda v: torch.logaddexp(v, torch.zeros_like(v))),
}
"""A prior and its activation, prox_f."""

Energy = Callable[[Tensor, Tensor, Tensor], Tensor]


def _linear_energy(z: Tensor, c: Tensor, w: Tensor) -> Tensor:
    return -(c * z).sum() - 0.5 * (z @ w.T).square().sum()


def _sigmoid_energy(z: Tensor, c: Tensor, w: Tensor) -> Tensor:
    return -torch.tanh((c * z).sum(1)).sum() - 0.5 * (z @ w.T).square().sum()


def _square_energy(z: Tensor, c: Tensor, w: Tensor) -> Tensor:
    return -(1.0 + (c * z).sum(1)).square().sum() - 0.5 * (z @ w.T).square().sum()


def _gaussian_energy(gamma: float) -> Energy:
    def energy(z: Tensor, c: Tensor, w: Tensor) -> Tensor:
        return -0.5 / gamma * torch.exp(-gamma * (c - z @ w.T).square().sum(1)).sum()

    return energy


def _correlation(weight: float) -> Callable[[Tensor], Tensor]:
    def energy(z: Tensor) -> Tensor:
        dead = (z == 0).all(0)  # has no direction
        unit = z / (z.square().sum(0) + dead).sqrt()
        gram = unit.T @ unit
        return 0.5 * weight * (gram.square().sum() - gram.diagonal().square().sum())

    return energy


def _dependence(weight: float) -> Callable[[Tensor], Tensor]:
    def energy(z: Tensor) -> Tensor:
        b, n = z.shape
        center = torch.eye(b, dtype=z.dtype) - 1.0 / b
        k = [center @ torch.exp(-0.5 * (z[:, [i]] - z[:, i]) ** 2) @ center for i in range(n)]
        pairs = itertools.combinations(k, 2)
        return weight * sum(((p * q).sum() for p, q in pairs), z.sum() * 0.0) / max(b - 1, 1) ** 2

    return energy


def judge_problem(seed: int, number: int) -> tuple[str, list[str]]:
    """minimize on a problem, against T(z) = prox_f(−∇(q + R)(z)) by autograd in float64."""
    r = Random(f"problem/{seed}/{number}")
    torch.manual_seed(r.randrange(1 << 30))
    dtype, name, kind = (
        r.choice((torch.float64, torch.float32)),
        r.choice(list(PRIORS)),
        r.choice(("linear", "gaussian", "sigmoidal", "square")),
    )
    batch, n, s = r.randint(1, 4), r.randint(1, 5), 1.0
    weight = 10.0 ** r.uniform(-3, -0.7)
    if name in ("free", "relu", "leaky") and kind == "linear" and r.random() < 0.5:
        s = 10.0 ** r.uniform(-DECADES[dtype] / 2, DECADES[dtype] / 2)
    rest, energy = r.choice(
        (
            (None, None),
            (eq.SquaredNorm(weight), lambda z: 0.5 * weight * z.square().sum()),
            (eq.Decorrelation(weight * s * s), _correlation(weight * s * s)),  # s·T(z/s)
            (eq.HSIC(weight), _dependence(weight)),
        )
    )
    w = torch.randn(n, n, dtype=torch.float64)
    w = (w * (r.choice((0.3, 0.8, 0.95)) / torch.linalg.matrix_norm(w, 2))).to(dtype)
    size = 0.3 if kind == "square" else r.choice((0.3, 1.0, 3.0))
    c = (torch.randn(batch, n, dtype=torch.float64) * size * s).to(dtype)
    gamma = r.choice((0.1, 0.5, 2.0))
    couplings: dict[str, tuple[Any, Energy]] = {
        "linear": (eq.Linear, _linear_energy),
        "gaussian": (lambda w, c: eq.Gaussian(w, c, gamma=gamma), _gaussian_energy(gamma)),
        "sigmoidal": (eq.Sigmoidal, _sigmoid_energy),
        "square": (lambda w, c: eq.Polynomial(w, c, degree=2), _square_energy),
    }
    couple, q = couplings[kind]
    unbounded = isinstance(rest, (eq.Decorrelation, eq.HSIC))
    steps: dict[str, Any] = {"max_steps": r.choice((20, 600)), "compact": r.random() < 0.2}
    if r.random() < 0.1:
        steps |= {"rtol": 0.0, "compact": False}
    tau = 10.0 ** r.uniform(-2, -0.3)
    solver = r.choice(
        (
            eq.Auto(**steps),
            eq.ProximalGradient(**steps, tau=tau if unbounded else None),
            eq.ProximalGradient(**steps, tau=tau, accelerate=False),
            eq.Anderson(**steps),
            eq.Broyden(**steps),
        )
    )
    if r.random() < 0.2:
        solver = eq.BestIterate(solver)
    adjoint = r.choice((eq.Implicit(), eq.Unrolled(), eq.Phantom()))
    text = (
        f"{name}, {kind}, {rest!r}, {dtype}, [{batch}, {n}], scale {s:.1e}, {solver!r}, {adjoint!r}"
    )

    def own(z: Tensor, c: Tensor, w: Tensor) -> Tensor:
        with torch.enable_grad():
            at = z if z.requires_grad else z.detach().requires_grad_()
            total = q(at, c, w) if energy is None else q(at, c, w) + energy(at)
            return PRIORS[name][1](-torch.autograd.grad(total, at, create_graph=True)[0])

    leaf = [t.clone().requires_grad_() for t in (c, w)]
    shown: list[Tensor] = []
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        problem = eq.Problem(PRIORS[name][0], couple(leaf[1], leaf[0]), rest)
        callback = (lambda _, z, norm: shown.append(norm)) if r.random() < 0.3 else None
        sol = eq.minimize(problem, solver=solver, adjoint=adjoint, callback=callback)
        g = torch.randn_like(sol.value)
        if sol.value.requires_grad:
            (sol.value * g).sum().backward()
    z, wide = sol.value.detach().double(), (c.double(), w.double())
    image = own(z, *wide).detach()
    residual, scale = _rows_norm(image - z), _rows_norm(image)
    jacobian = _joint_jacobian(lambda v: own(v, *wide), z)
    slope = float(torch.linalg.matrix_norm(jacobian, 2))
    noise = 100 * n * EPS[dtype] * (1 + slope) * (scale + _rows_norm(z) + _rows_norm(c.double()))
    if isinstance(rest, eq.Decorrelation):  # divides by the norm of a feature
        short = z.norm(dim=0)
        least = float(torch.where(short > 0, short, math.inf).amin())
        noise = noise + 100 * n * EPS[dtype] * rest.weight / least
    found = []
    allowed = (1.01 + slope) * RTOL[dtype]  # a value may be moved into the domain
    if not solver.fixed_steps:
        stated = sol.stats.residual.double()
        wrong = sol.converged & ~(residual <= allowed * scale + noise)
        # Far from an answer the move into the domain is long, and the slope here bounds nothing.
        off = sol.converged & ~(residual <= 1.05 * (1 + slope) * stated + noise)
        found = _unconverged(wrong, residual, scale) + _misstated(off, stated, residual)
    if shown and len(shown[0]) != batch:
        found.append(f"the callback saw {len(shown[0])} residuals of {batch} samples")
    exact = sol.converged.all() and not isinstance(adjoint, eq.Phantom) and not solver.fixed_steps
    if isinstance(adjoint, eq.Unrolled) and (slope >= 1.0 or int(sol.stats.steps.max()) >= 40):
        exact = False  # an expanding or long path may be chaotic, and so its derivative
    if not exact or any("backward" in str(h.message) for h in heard):
        return text, found
    if leaf[0].grad is None or leaf[1].grad is None:
        started = bool((sol.stats.steps == 1).all())  # unrolled, no step was taken
        return text, found if started else [*found, "no gradient"]
    truth, condition = _dense_gradient(own, z, wide, g.double())
    nearby = z + 100 * RTOL[dtype] * _rows_norm(z).view(-1, 1) * torch.randn_like(z).sign()
    beside, _ = _dense_gradient(own, nearby, wide, g.double())
    allowed = 1e3 * (RTOL[dtype] ** 0.9) * condition * (1 + slope)
    if isinstance(adjoint, eq.Unrolled):
        allowed *= 30  # derivatives of steps converge after the steps
    kink = any(
        float((a - b).abs().amax()) > 0.5 * allowed * float(a.abs().amax())
        for a, b in zip(truth, beside, strict=True)
    )
    if allowed < 0.3 and not kink:
        ours = (leaf[0].grad, leaf[1].grad)
        # Where every entry is clamped the truth is zero, and steps before it leave rounding.
        floor = 100 * EPS[dtype] * float(g.abs().amax())
        if isinstance(adjoint, eq.Unrolled):
            floor = 30 * RTOL[dtype] * float(g.abs().amax())  # as above: the truth may be zero
        found += _compare(ours, (truth[0], truth[1]), allowed, "the gradient", floor)
    return text, found


# ---------------------------------------------------------------------- monotone layers


def judge_monotone(seed: int, number: int) -> tuple[str, list[str]]:
    """z = relu(Wz + Ux + b), W = (1 − m)I − AᵀA + B − Bᵀ, written out in float64."""
    r = Random(f"monotone/{seed}/{number}")
    torch.manual_seed(r.randrange(1 << 30))
    n, batch, m = r.randint(2, 7), r.randint(1, 5), 10.0 ** r.uniform(-2, 0.3)
    dtype = r.choices((torch.float64, torch.float32, torch.bfloat16), (3, 3, 1))[0]
    options: dict[str, Any] = {"max_steps": r.choice((100, 3000))}
    if r.random() < 0.4:
        solver: Any = eq.ForwardBackward(**options)
    else:
        alpha = r.choice((None, 10.0 ** r.uniform(-2, 1)))
        solver = eq.PeacemanRachford(alpha=alpha, **options)
    if r.random() < 0.2:
        solver = eq.Anderson(**options)
    adjoint = r.choice((None, None, eq.Implicit(), eq.Unrolled()))
    layer = eq.nn.MonotoneDEQ(n, in_channels=n, m=m, solver=solver, adjoint=adjoint).double()
    with torch.no_grad():
        for part in (layer.W.A, layer.W.B, layer.U.weight, layer.U.bias):
            part.mul_(10.0 ** r.uniform(-1, 0.8))
        layer.U.bias.add_(r.choice((0.0, -2.0)))
    x = torch.randn(batch, n, dtype=torch.float64) * r.choice((1.0, 1.0, 1e-6, 1e5))
    if r.random() < 0.3:
        x[0, 0] = -1e4
    layer, x = layer.to(dtype), x.to(dtype).requires_grad_()
    a, b, u, bias = (
        t.detach().double() for t in (layer.W.A, layer.W.B, layer.U.weight, layer.U.bias)
    )
    w = (1.0 - m) * torch.eye(n, dtype=torch.float64) - a.T @ a + b - b.T

    def own(z: Tensor, x: Tensor) -> Tensor:
        return torch.relu(z @ w.T + x @ u.T + bias)

    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        sol = layer.solve(x)
        g = torch.randn_like(sol.value)
        if sol.value.requires_grad:
            (sol.value * g).sum().backward()
    text = f"monotone, m = {m:.1e}, {dtype}, [{batch}, {n}], {solver!r}, {adjoint!r}"
    z, wide = sol.value.detach().double(), x.detach().double()
    image, norm = own(z, wide), float(torch.linalg.matrix_norm(w, 2))
    residual, scale = _rows_norm(image - z), _rows_norm(image)
    rounding = 8 * n * EPS[dtype] * (norm * _rows_norm(z) + _rows_norm(wide @ u.T + bias))
    limit = 1.01 + (norm if isinstance(solver, eq.Anderson) else 0.0)  # moved into the domain
    wrong = sol.converged & ~(residual <= limit * RTOL[dtype] * scale + rounding)
    found = _unconverged(wrong, residual, scale)
    noisy = any("backward" in str(h.message) for h in heard)
    # The path of an expanding map's Anderson steps may be chaotic, and so its derivative.
    noisy = noisy or (isinstance(adjoint, eq.Unrolled) and isinstance(solver, eq.Anderson))
    if noisy or dtype == torch.bfloat16 or not sol.converged.all() or x.grad is None:
        return text, found
    inside = z @ w.T + wide @ u.T + bias
    near = inside.abs() < 1e3 * RTOL[dtype] * (scale.view(-1, 1) + 1e-300)
    truth, condition = _dense_gradient(own, z, (wide,), g.double())
    # The error of a backward solve is relative to g, not to the gradient that is left of it.
    allowed = 20 * RTOL[dtype] * condition * max(1.0, 1.0 / m)
    if isinstance(adjoint, eq.Unrolled):
        allowed = 2e3 * RTOL[dtype] ** 0.9 * condition * max(1.0, 1.0 / m)
    size = float(g.abs().amax()) * float(torch.linalg.matrix_norm(u, 2)) + float(
        truth[0].abs().amax()
    )
    gap = float((x.grad.double() - truth[0]).abs().amax())
    if not near.any() and allowed < 0.3 and gap > allowed * size:
        found.append(f"the gradient in x is off by {gap / size:.1e}")
    return text, found


# ---------------------------------------------------------------------- the search


def run_case(seed: int, number: int) -> tuple[str, list[str]]:
    """Half of the cases are plain maps. Returns what was tried and what was wrong."""
    torch.manual_seed(0)
    other = (judge_layer, judge_problem, judge_monotone) * 2
    if number % 2:
        return other[number // 2 % len(other)](seed, number)
    case = draw(seed, number)
    return str(case), judge(case)


Run = Callable[[int, int], tuple[str, list[str]]]


def search(
    seed: int,
    *,
    cases: int | None = None,
    seconds: float | None = None,
    state: Path | None = None,
    run: Run = run_case,
) -> tuple[int, list[str]]:
    """Run cases until a count or a time is reached; (cases run, failures). Resumes from state."""
    first, failures = 0, []
    if state is not None and state.exists():
        kept = json.loads(state.read_text(encoding="utf-8"))
        if kept["seed"] == seed:
            first, failures = kept["next"], kept["failures"]
    end = None if seconds is None else time.monotonic() + seconds
    number = first
    for number in itertools.count(first):
        if (cases is not None and number >= cases) or (end is not None and time.monotonic() > end):
            break
        text, wrong = run(seed, number)
        failures += [f"case {number} of seed {seed}: {text}: {w}" for w in wrong]
        if state is not None and number % 200 == 0:
            _save(state, seed, number + 1, failures)
    if state is not None:
        _save(state, seed, number, failures)
    return number, failures


def _save(state: Path, seed: int, following: int, failures: list[str]) -> None:
    part = state.with_suffix(".part")
    text = json.dumps({"seed": seed, "next": following, "failures": failures}, indent=1)
    part.write_text(text, encoding="utf-8")
    part.replace(state)


def main(run: Run = run_case, text: str | None = __doc__) -> None:
    """The command; tests/fuzz.py has the same."""
    parser = argparse.ArgumentParser(description=(text or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--cases", type=int, default=None, help="stop after this many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--state", type=Path, default=None, help="resume from and save to this")
    parser.add_argument("--only", type=int, default=None, help="run one case and tell about it")
    given = parser.parse_args()
    if given.only is not None:
        text, wrong = run(given.seed, given.only)
        print(text, *wrong, sep="\n  ")  # noqa: T201
        return
    seconds = None if given.cases is not None else 60.0 * given.minutes
    count, failures = search(
        given.seed, cases=given.cases, seconds=seconds, state=given.state, run=run
    )
    print(*failures, f"{count} cases, {len(failures)} wrong", sep="\n")  # noqa: T201
    raise SystemExit(bool(failures))


if __name__ == "__main__":
    main()
