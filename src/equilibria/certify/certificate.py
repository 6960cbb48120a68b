"""Certificates: what is proven about the equilibrium of a layer, and about the z that it returned.

``certify(layer, x)`` looks at the hidden problem G = f + g with m ⪯ ∇²g ⪯ L. The layer's map T has
the factor ρ = max(|1 − m|, |L − 1|). ρ < 1: T is a contraction. m > 0: G is strongly convex, so
there is one equilibrium z*, and ‖z − z*‖ ≤ (1 + ρ/m)·‖z − T(z)‖ for every z
(docs/facts.md, facts 2–4).

The Lipschitz constant of x → z* that a coupling states (``Coupling.lipschitz``) is in c̃, the
features that the coupling sees; ‖x → c̃‖ or ‖c → c̃‖ leads to x or c (docs/facts.md, fact 5).
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from equilibria.engine.result import Solution
from equilibria.engine.tree import sample_norm
from equilibria.problems.kernels import Curvature
from equilibria.problems.norms import UNIT, NormBound, exact
from equilibria.problems.problem import AffineProblem, HiddenProblem, MoreauProblem, Problem
from equilibria.problems.solving import minimize
from equilibria.problems.splitting import Composite

from .claims import refuted
from .error_bounds import global_bound, local_bound, local_modulus, tight_curvature
from .gap import certify_sum
from .guarantee import (
    SAMPLED,
    Guarantee,
    Proven,
    either,
    guarantee_rows,
    lines,
    number,
    solved,
    spread,
)
from .rounding import direct_convolutions, residual_rounding

__all__ = [
    "Certifiable",
    "Certificate",
    "Guarantee",
    "Numbers",
    "SelfCertifying",
    "certify_layer",
    "global_lipschitz",
    "local_lipschitz",
]


@runtime_checkable
class Certifiable(Protocol):
    """What ``certify`` asks of a layer.

    It may also have ``input_norm_upper() -> float``, a rigorous bound on the norm of x → c̃, the
    features that the coupling sees; with it the Lipschitz constants are in x, without it in c.
    """

    def problem(self, x: Tensor) -> HiddenProblem: ...
    def solve(self, x: Tensor) -> Solution[Tensor]: ...


@runtime_checkable
class SelfCertifying(Protocol):
    """A layer with no hidden problem (a map, several branches) says by itself what is proven."""

    def certify(self, x: Tensor, z: Any = None) -> Any: ...


@dataclass(frozen=True)
class Numbers:
    """What the bounds were made of; None where the problem has no such number."""

    norm: NormBound | None = None
    """‖W‖₂."""
    hidden_norm: float | None = None
    """An upper bound on ‖W_h‖₂ (Gaussian coupling)."""
    mu: NormBound | None = None
    """μ = ‖z → (rows of Wz)W_h‖₂ (Gaussian coupling); bounds use ``upper``."""
    gamma: str | None = None
    """The γ policy (Gaussian coupling)."""
    input_norm: float | None = None
    """An upper bound on ‖x → c̃‖₂, where the layer gives one."""

    def rows(self) -> list[tuple[str, str]]:
        """The known ones, in words."""
        known = []
        for name, bound in (("‖W‖", self.norm), ("μ", self.mu)):
            if bound is not None:
                known.append((name, f"{number(bound.estimate)}, at most {number(bound.upper)}"))
        if self.hidden_norm is not None:
            known.append(("‖W_h‖", f"at most {number(self.hidden_norm)}"))
        if self.gamma is not None:
            known.append(("γ", self.gamma))
        if self.input_norm is not None:
            known.append(("‖x → c̃‖", f"at most {number(self.input_norm)}"))
        return known


@dataclass(frozen=True, eq=False, kw_only=True)
class Certificate(Proven):
    """What is proven for a batch; [B] tensors are float64. ``print`` it to read it.

    With a ``local`` guarantee z* is the only equilibrium within ``error_bound`` of z.
    """

    contraction: float | Tensor
    """ρ = max(|1 − m|, |L − 1|), a Lipschitz constant of T; one number, or [B] where it depends on
    the input (so also ``modulus`` and ``smoothness``)."""
    modulus: float | Tensor
    """m: G is strongly convex with this modulus where it is positive; rounded down."""
    smoothness: float | Tensor
    """L ≥ ∇²g; rounded up."""
    modulus_local: Tensor
    """The same as ``modulus``, from the Hessian at this z; −inf where not known. [B]."""
    objective: Tensor
    """G(z), [B]."""
    stationarity: Tensor
    """dist(0, ∂G(z)), [B]; inf outside the domain of the prior."""
    lipschitz_local: Tensor | None
    """As ``lipschitz``, at this input alone, [B]; ``lipschitz_local_note`` says what is fixed."""
    lipschitz_local_note: str
    lipschitz_in: Literal["x", "c"]
    """Whether both are in the layer's input x or, where its norm is not known, in c."""
    numbers: Numbers

    def __str__(self) -> str:
        lipschitz = "none" if self.lipschitz is None else number(self.lipschitz)
        rows = [
            *guarantee_rows(self),
            ("contraction ρ", either(self.contraction)),
            ("modulus m", either(self.modulus)),
            ("smoothness L", either(self.smoothness)),
            ("modulus at z", spread(self.modulus_local)),
            ("objective", spread(self.objective)),
            ("stationarity", spread(self.stationarity)),
            ("residual", spread(self.residual)),
            ("‖z − z*‖ ≤", spread(self.error_bound)),
            ("rounding", f"{spread(self.rounding)} (of the residual; included in the bound)"),
            (f"Lipschitz in {self.lipschitz_in}", f"{lipschitz} ({self.lipschitz_note})"),
        ]
        if self.lipschitz_local is not None:
            text = f"{spread(self.lipschitz_local)} ({self.lipschitz_local_note})"
            rows.append(("  at this input", text))
        rows += [*self.numbers.rows(), ("solver", self.solver)]
        rows += [("note", note) for note in self.notes]
        return lines(self, rows, rigorous=self.rigorous)


@torch.no_grad()
def certify_layer(layer: Any, x: Tensor | None = None, z: Any = None) -> Any:
    """``certify`` of a layer or a problem.

    The problem is the one that the layer made in its own dtype: its constrained weights, c and γ,
    cast up to float64 without computing them anew, and z is what the layer returned. So the
    function certified is the one that is computed, and the bounds contain the rounding of the
    layer's iterations; the rounding of c = Ux + b belongs to the input. All else is in float64,
    with its own rounding bounded (``rounding``) and added.
    """
    if isinstance(layer, HiddenProblem):
        if x is not None:
            raise TypeError("A problem is bound to its input: call certify(problem, z=z).")
        problem, input_norm = layer, None
        z, solver = solved(lambda: minimize(problem), z)
    elif not isinstance(layer, (SelfCertifying, Certifiable)):
        raise TypeError(
            "certify takes a layer with problem(x) and solve(x), one with certify(x, z), or a "
            f"Problem, got {type(layer).__name__}."
        )
    elif x is None:
        raise TypeError(f"certify({type(layer).__name__}, x) needs the input x [B, ...].")
    elif isinstance(layer, SelfCertifying):
        return layer.certify(x, z)
    else:
        model = copy.deepcopy(layer).eval() if isinstance(layer, nn.Module) else layer
        problem = model.problem(x)
        bound = getattr(model, "input_norm_upper", None)
        input_norm = None if bound is None else float(bound())
        z, solver = solved(lambda: model.solve(x), z)
    with direct_convolutions(z):
        if isinstance(problem, Composite):
            return certify_sum(problem, z, solver)
        return _certify(problem, z, input_norm, solver)


def _number(values: Tensor) -> float | Tensor:
    return float(values) if values.ndim == 0 else values


def _certify(
    given: HiddenProblem, state: Tensor, input_norm: float | None, solver: str
) -> Certificate:
    plain = _unwrap(given.in_double(), exact(state))
    problem, z, notes = plain.problem, plain.z, list(plain.notes)
    batch = z.shape[0]
    if isinstance(problem, Problem):
        problem.coupling.check_state(z)
    together = problem.couples_batch
    if together:
        notes.append("the regularizer couples the batch: error bounds are those of all samples")

    curvature = tight_curvature(problem)
    lower, upper, factor = _outward(curvature, z, together=together)
    m, high, rho = (t.expand(batch) for t in (lower, upper, factor))

    image = problem.step(z)
    residual = sample_norm([z - image])
    off, derived = residual_rounding(problem, z, image)
    if not derived:
        notes.append("rounding is an estimate: none is derived for this kind of problem")
    if curvature.basis == "given":
        notes.append("m and L were given: the certificate is as good as they are")
    elif not curvature.rigorous:
        notes.append("the bounds on the Hessian are estimates")
    wrong = refuted(problem, z) if isinstance(problem, Problem) else []
    notes += [f"REFUTED: {text}" for text in wrong]
    sampled = isinstance(problem, Problem) and problem.effective_prior.sampled
    if sampled:
        notes.append(SAMPLED)
    near = local_modulus(problem, z)
    finite = (residual + off).isfinite()
    error = torch.minimum(
        global_bound(problem, z, residual + off, m, high, together=together),
        local_bound(problem, z, image, residual + off, off, m, high),
    )
    error = torch.where(finite, error, math.inf)
    if curvature.basis == "estimated" and not wrong:
        notes.append(f"nothing follows from estimates; if m and L hold, ‖z − z*‖ ≤ {spread(error)}")
    believed = curvature.basis != "estimated" and not wrong
    error = error if believed else torch.full_like(error, math.inf)
    objective = problem.objective(z)
    outside = int((objective.isinf() & finite).sum())
    if outside:
        notes.append(
            f"{outside} of {batch} states lie outside the domain of the prior, where G is infinite "
            "(a solver extrapolated); T(z) lies inside, within the residual of z"
        )
    columns = (t.tolist() for t in (finite & (m > 0) & believed, rho < 1, error.isfinite()))
    reach, shown = input_norm, {}
    if isinstance(problem, Problem):
        reach = problem.coupling.features_norm() if reach is None else reach
        shown = problem.coupling.numbers(tuple(z.shape[1:]))
    reach = math.inf if reach is None else reach
    lipschitz, lipschitz_note = global_lipschitz(problem, _number(lower), input_norm)
    local, local_note = local_lipschitz(problem, z, error, _number(lower), reach)
    if not believed:
        lipschitz = local = None
        lipschitz_note = local_note = "m and L are not known"
    elif isinstance(problem, Problem) and problem.effective_prior.has_tensors:
        if input_norm is not None:
            lipschitz = local = None
            lipschitz_note = local_note = "a parameter of the prior is a tensor: it may depend on x"
        else:
            notes.append("Lipschitz constants are in c alone, the parameters of the prior fixed")
    return Certificate(
        kinds=tuple(_kind(*row) for row in zip(*columns, strict=True)),
        contraction=_number(plain.relaxation * factor + (1.0 - plain.relaxation)),
        modulus=_number(lower),
        smoothness=_number(upper),
        modulus_local=torch.maximum(near, m),
        objective=objective,
        stationarity=problem.stationarity(z),
        residual=residual,
        error_bound=plain.scale * (error + plain.off),
        rounding=off,
        lipschitz=None if lipschitz is None else plain.scale * lipschitz,
        lipschitz_note=lipschitz_note,
        lipschitz_local=None if local is None else plain.scale * local,
        lipschitz_local_note=local_note,
        lipschitz_in="c" if input_norm is None else "x",
        numbers=Numbers(**shown, input_norm=input_norm),
        solver=solver,
        rigorous=derived and curvature.rigorous and not sampled and not wrong,
        notes=tuple(notes),
    )


def _kind(unique: bool, contracts: bool, near: bool) -> Guarantee:
    if unique:
        return Guarantee.contraction if contracts else Guarantee.strong_convexity
    return Guarantee.local if near else Guarantee.none


def _outward(curvature: Curvature, z: Tensor, *, together: bool) -> tuple[Tensor, Tensor, Tensor]:
    """m rounded down, L rounded up, and ρ = max(|1 − m|, |L − 1|); of the worst where together."""
    lower, upper = (
        torch.as_tensor(t, dtype=z.dtype, device=z.device)
        for t in (curvature.lower, curvature.upper)
    )
    lower = lower - 16 * UNIT * (1.0 + lower.abs())
    upper = upper + 16 * UNIT * (1.0 + upper.abs())
    if together:
        lower, upper = lower.min(), upper.max()
    return lower, upper, torch.maximum((1.0 - lower).abs(), (upper - 1.0).abs())


@dataclass(frozen=True)
class _Plain:
    """A problem at z = Ay + shift in place of the one at y: ‖y − y*‖ ≤ scale·(‖z − z*‖ + off)."""

    problem: HiddenProblem
    z: Tensor
    scale: float = 1.0
    off: float | Tensor = 0.0
    relaxation: float = 1.0
    """α of the skip connections αT + (1 − α)I around the layer's map."""
    notes: tuple[str, ...] = ()


def _unwrap(problem: HiddenProblem, z: Tensor) -> _Plain:
    """Look through skip connections (same fixed points) and affine changes of variable."""
    if isinstance(problem, MoreauProblem):
        inner = _unwrap(problem.problem, z)
        note = f"skip connection α = {problem.alpha:g}: bounds are those of the map T inside it"
        alpha = inner.relaxation * problem.alpha
        return replace(inner, relaxation=alpha, notes=(*inner.notes, note))
    if isinstance(problem, AffineProblem):
        moved = problem.to_state(z)
        inner = _unwrap(problem.problem, moved)
        low, high = _singular_values(problem.matrix)
        size = z[0].numel() if isinstance(problem.matrix, Tensor) else 1
        scale = torch.linalg.vector_norm(z.flatten(1), dim=1) * high
        scale = scale + torch.linalg.vector_norm(moved.flatten(1), dim=1)
        off = inner.off + 4e-16 * (size + 4) * math.sqrt(size) * scale
        note = "change of variable z = Ay + shift: m, L, residual and stationarity are those of z"
        notes = (*inner.notes, note)
        return replace(inner, scale=inner.scale / low, off=off, notes=notes)
    return _Plain(problem, z)


def _singular_values(matrix: float | Tensor) -> tuple[float, float]:
    """Bounds on the extreme singular values of A, in float64."""
    if not isinstance(matrix, Tensor):
        return abs(float(matrix)), abs(float(matrix))
    values = torch.linalg.svdvals(exact(matrix))
    slack = 16 * torch.finfo(torch.float64).eps * 2 * len(values) * float(values[0])
    return float(values[-1]) - slack, float(values[0]) + slack


def _own_modulus(problem: Problem) -> Tensor:
    """a: the modulus of everything in G but the prior and the coupling (without R, 1 or 0)."""
    if problem.regularizer is None:
        return torch.full((), problem.ridge, dtype=torch.float64)
    whole = torch.as_tensor(problem.curvature().lower, dtype=torch.float64)
    part = torch.as_tensor(problem.coupling.curvature().lower, dtype=torch.float64)
    return (whole - part) * (1.0 - 1e-14)


def global_lipschitz(
    problem: HiddenProblem, modulus: float | Tensor, input_norm: float | None
) -> tuple[float | None, str]:
    """A Lipschitz constant of x → z* that holds for all inputs, or None, and why.

    ``input_norm`` bounds x → c̃ (x → c for the linear coupling); None: the constant is in c.
    """
    if not isinstance(problem, Problem):
        return None, f"no constant is derived for {type(problem).__name__}"
    if problem.couples_batch:
        return None, "the regularizer couples the samples of a batch"
    q = problem.coupling
    m = float(torch.as_tensor(modulus, dtype=torch.float64).min())
    reach = q.features_norm() if input_norm is None else input_norm
    return q.lipschitz(m, _own_modulus(problem), reach, in_x=input_norm is not None)


def local_lipschitz(
    problem: HiddenProblem, z: Tensor, error: Tensor, modulus: float | Tensor, input_norm: float
) -> tuple[Tensor | None, str]:
    """limsup ‖z*(x′) − z*(x)‖/‖x′ − x‖ as x′ → x, bounded, with γ held fixed; [B], inf where none.

    From the curvature at z, widened to all points within ``error`` of it, so that it holds at the
    equilibrium and not only at z.
    """
    if not isinstance(problem, Problem):
        return None, f"nothing is derived for {type(problem).__name__}"
    if problem.couples_batch:
        return None, "the regularizer couples the samples of a batch"
    m, here = (
        torch.as_tensor(t, dtype=z.dtype, device=z.device)
        for t in (modulus, problem.local_curvature(z).lower)
    )
    rest = _own_modulus(problem)
    found, note = problem.coupling.local_lipschitz(z, error, m, here, rest)
    return None if found is None else found * input_norm, note
