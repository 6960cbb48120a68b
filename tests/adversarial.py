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
from dataclasses import dataclass, field
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


def _affine(z: Tensor, x: Tensor, mask: Tensor, w: Tensor) -> Tensor:
    return z @ w.T + x


def _attention(z: Tensor, x: Tensor, mask: Tensor, w: Tensor) -> Tensor:
    return x + 0.5 * torch.softmax(z @ w.T + mask, 1)


def _clamped(z: Tensor, x: Tensor, mask: Tensor, w: Tensor) -> Tensor:
    return torch.minimum(z @ w.T + x, -mask)  # −mask is 0 or +∞: a one-sided bound


def _root(z: Tensor, x: Tensor, mask: Tensor, w: Tensor) -> Tensor:
    return torch.sqrt(z @ w.T + x + 3.0)


def _logarithm(z: Tensor, x: Tensor, mask: Tensor, w: Tensor) -> Tensor:
    return 0.5 * torch.log(4.0 + z @ w.T + x)


def _rational(z: Tensor, x: Tensor, mask: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x) / (1.5 + (z @ w.T).square())


def _batch_mean(z: Tensor, x: Tensor, mask: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(0.6 * z @ w.T + x) + 0.3 * torch.tanh(z).mean(0)


def _batch_norm(z: Tensor, x: Tensor, mask: Tensor, w: Tensor) -> Tensor:
    return 0.3 * F.batch_norm(z @ w.T + 3.0 * x, None, None, training=True) + 0.2 * x


def _covariance(z: Tensor, x: Tensor, mask: Tensor, w: Tensor) -> Tensor:
    t = torch.tanh(z)
    return torch.tanh(0.5 * z @ w.T + x) - 0.1 * (t @ t.T) @ t / len(z)


FAMILIES = {
    "affine": Family(_affine),
    "tanh": Family(lambda z, x, mask, w: torch.tanh(z @ w.T + x)),
    "relu": Family(lambda z, x, mask, w: torch.relu(z @ w.T + x), kink=True),
    "attention": Family(_attention),
    "clamped": Family(_clamped, kink=True),
    "root": Family(_root),
    "logarithm": Family(_logarithm),
    "rational": Family(_rational),
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
    notes: list[str] = field(default_factory=list)

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
        batch = max(batch, 3)
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
            z0 = known.value.detach()
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


def _judge_value(case: Case, sol: Any, value: Tensor) -> list[str]:
    z = value.double()
    image = case.apply(z, *_wide(case))
    residual, scale = _rows_norm(image - z), _rows_norm(image)
    noise = 40 * case.size * EPS[case.dtype] * (scale + _rows_norm(z) + case.scale)
    fixed = case.solver.fixed_steps
    rtol = 2 * EPS[case.dtype] if fixed else RTOL[case.dtype]
    converged = sol.result == int(eq.Result.converged)
    wrong = converged & ~(residual <= 1.01 * rtol * scale + noise)
    found = []
    if fixed:  # judged one step earlier: a contraction comes closer, nothing more is claimed
        wrong = wrong & FAMILIES[case.family].expands
    if wrong.any():
        b = int(wrong.nonzero()[0])
        found.append(
            f"sample {b} is called converged with the relative residual "
            f"{float(residual[b] / scale[b]):.1e}"
        )
    ended = (sol.result != int(eq.Result.nonfinite)) & (sol.result != int(eq.Result.diverged))
    stated = sol.stats.residual.double()
    off = ended & ~((stated - residual).abs() <= 0.05 * residual + noise)
    if FAMILIES[case.family].coupled:  # stated for the batch, or before the others ended
        off = ended & (residual > 1.05 * torch.maximum(stated, rtol * scale) + noise)
    if not fixed and off.any():
        b = int(off.nonzero()[0])
        found.append(f"sample {b} states {float(stated[b]):.2e} and has {float(residual[b]):.2e}")
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
        finite_range = bool(torch.isfinite(value).all()) and case.dtype in BACKWARD_RTOL
        return ["a gradient is NaN or infinite"] if finite_range else []
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
    ours: tuple[Tensor, Tensor], truth: tuple[Tensor, Tensor], allowed: float, what: str
) -> list[str]:
    found = []
    for name, a, b in zip(("x", "W"), ours, truth, strict=True):
        size = float(b.abs().amax())
        gap = float((a.double() - b).abs().amax())
        if gap > allowed * size and gap > 1e-37:
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
    z = value.double()[rows].requires_grad_()
    n = z.numel()

    def flat(v: Tensor) -> Tensor:
        return case.apply(v.view_as(z), x, mask, w).flatten()

    jacobian = torch.autograd.functional.jacobian(flat, z.detach().flatten())
    system = torch.eye(n, dtype=torch.float64) - jacobian
    condition = float(torch.linalg.cond(system))
    if FAMILIES[case.family].kink and _near_kink(case, z.detach(), x, mask, w):
        return []
    u = torch.linalg.solve(system.T, case.g.double()[rows].flatten()).view_as(z)
    truth = torch.autograd.grad(case.apply(z, x, mask, w), (x, w), u)
    allowed = 20 * (BACKWARD_RTOL[case.dtype] + 50 * EPS[case.dtype]) * condition
    if isinstance(getattr(case.adjoint, "solver", None), eq.Anderson):
        allowed = 20 * RTOL[case.dtype] * condition
    if unrolled:
        allowed = max(allowed, 2e3 * math.sqrt(RTOL[case.dtype]) * RTOL[case.dtype] ** 0.4)
        allowed *= condition
    if not allowed < 0.3:
        return []
    name = "the unrolled gradient" if unrolled else "the implicit gradient"
    return _compare((x_grad[rows], w_grad), truth, allowed, name)


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
    if any("converge" in str(h.message) or "tolerance" in str(h.message) for h in heard):
        return text, []
    error = abs(coarse - fine) + 1e-3 * (abs(fine) + 1e-4)  # kinks and curvature, solver noise
    if abs(slope - fine) > 5.0 * error:
        return text, [f"the gradient is {slope:.6g}, central differences {fine:.6g} (bad={bad})"]
    return text, []


# ---------------------------------------------------------------------- the search


def run_case(seed: int, number: int) -> tuple[str, list[str]]:
    """Every fourth case is a layer. Returns what was tried and what was wrong."""
    torch.manual_seed(0)
    if number % 4 == 3:
        return judge_layer(seed, number)
    case = draw(seed, number)
    return str(case), judge(case)


def search(
    seed: int, *, cases: int | None = None, seconds: float | None = None, state: Path | None = None
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
        text, wrong = run_case(seed, number)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--cases", type=int, default=None, help="stop after this many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--state", type=Path, default=None, help="resume from and save to this")
    parser.add_argument("--only", type=int, default=None, help="run one case and tell about it")
    given = parser.parse_args()
    if given.only is not None:
        text, wrong = run_case(given.seed, given.only)
        print(text, *wrong, sep="\n  ")  # noqa: T201
        return
    seconds = None if given.cases is not None else 60.0 * given.minutes
    count, failures = search(given.seed, cases=given.cases, seconds=seconds, state=given.state)
    print(*failures, f"{count} cases, {len(failures)} wrong", sep="\n")  # noqa: T201
    raise SystemExit(bool(failures))


if __name__ == "__main__":
    main()
