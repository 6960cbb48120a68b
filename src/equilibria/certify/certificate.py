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
import inspect
import math
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from equilibria.engine.result import Solution
from equilibria.engine.tree import sample_norm
from equilibria.problems.kernels import Curvature, as_number
from equilibria.problems.norms import UNIT, NormBound, exact
from equilibria.problems.problem import HiddenProblem, Problem
from equilibria.problems.solving import minimize
from equilibria.problems.splitting import Composite

from .claims import refuted, stretched
from .error_bounds import error_bound, local_modulus, tight_curvature
from .gap import certify_sum
from .guarantee import SAMPLED, Guarantee, Proven, Rows, number, solved, spread
from .rounding import direct_convolutions, residual_rounding


@runtime_checkable
class Certifiable(Protocol):
    """What ``certify`` asks of a layer.

    It may also have ``input_norm_upper() -> float``, a rigorous bound on the norm of x → c̃, the
    features that the coupling sees; with it the Lipschitz constants are in x, without it in c. If
    it takes an argument, that is the shape of x without the batch: small maps have closer bounds.
    With ``input_operator()``, the linear part of x → c, it is checked at x that c is made by it.
    And ``input_rounding(x) -> Tensor [B]``, a bound on how far float64 moves c, which the
    certificate of a network counts; for a single layer c is what it is.
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

    def rows(self) -> Rows:
        """The known ones, in words."""
        known: Rows = []
        for name, bound in (("‖W‖", self.norm), ("μ", self.mu)):
            if bound is not None:
                estimate = f"{number(bound.estimate)}, " if bound.estimate else ""
                known.append((name, f"{estimate}at most {number(bound.upper)}"))
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

    def first_rows(self) -> Rows:
        return [
            ("contraction ρ", spread(self.contraction)),
            ("modulus m", spread(self.modulus)),
            ("smoothness L", spread(self.smoothness)),
            ("modulus at z", spread(self.modulus_local)),
            ("objective", spread(self.objective)),
            ("stationarity", f"{spread(self.stationarity)} (jumps at a kink of the prior)"),
        ]

    def last_rows(self, of: str = "x") -> Rows:
        rows = super().last_rows(self.lipschitz_in)
        if self.lipschitz_local is not None:
            text = f"{spread(self.lipschitz_local)} ({self.lipschitz_local_note})"
            rows.append(("  at this input", text))
        return rows + self.numbers.rows()


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
        input_norm = _input_norm(model, x, problem)
        z, solver = solved(lambda: model.solve(x), z)
    with direct_convolutions(z):
        if isinstance(problem, Composite):
            return certify_sum(problem, z, solver)
        return _certify(problem, z, input_norm, solver)


def _input_norm(layer: Any, x: Tensor, problem: HiddenProblem) -> float | None:
    bound = getattr(layer, "input_norm_upper", None)
    if bound is None:
        return None
    linear = getattr(layer, "input_operator", None)
    c = getattr(getattr(problem, "coupling", None), "c", None)
    if linear is not None and c is not None:
        start = layer.problem(torch.zeros_like(x[:1])).coupling.c
        if stretched(c, start, linear()(x)):
            return math.inf
    return float(bound(x.shape[1:]) if inspect.signature(bound).parameters else bound())


def _certify(
    given: HiddenProblem, state: Tensor, input_norm: float | None, solver: str
) -> Certificate:
    found = _Measured(given, state, input_norm)
    problem, z = found.problem, found.z
    lower, upper, factor = found.bounds
    m, high, rho = (t.expand(len(z)) for t in found.bounds)
    gap = found.residual + found.off
    finite = gap.isfinite()
    error = error_bound(problem, z, found.image, gap, found.off, m, high)
    error = torch.where(finite, error, math.inf)
    objective = problem.objective(z)
    wrong = refuted(problem, z) if isinstance(problem, Problem) else []
    notes = _notes(found, wrong, error, int((objective.isinf() & finite).sum()))
    believed = found.curvature.basis != "estimated" and not wrong
    error = error if believed else torch.full_like(error, math.inf)
    columns = (t.tolist() for t in (finite & (m > 0) & believed, rho < 1, error.isfinite()))
    shown: dict[str, Any] = {}
    reach = math.inf if input_norm is None else input_norm
    if isinstance(problem, Problem):
        shown = problem.coupling.numbers(tuple(z.shape[1:]))
        reach = problem.coupling.features_norm() if input_norm is None else input_norm
    lipschitz, note = found.lipschitz, found.lipschitz_note
    local, local_note = local_lipschitz(problem, z, error, as_number(lower), reach)
    if not believed:
        lipschitz = local = None
        note = local_note = "m and L are not known"
    elif found.prior_varies and input_norm is not None:
        local, local_note = None, note
    elif found.prior_varies:
        notes.append("Lipschitz constants are in c alone, the parameters of the prior fixed")
    return Certificate(
        kinds=tuple(_kind(*row) for row in zip(*columns, strict=True)),
        contraction=as_number(factor),
        modulus=as_number(lower),
        smoothness=as_number(upper),
        modulus_local=torch.maximum(local_modulus(problem, z), m),
        objective=objective,
        stationarity=problem.stationarity(z),
        residual=found.residual,
        error_bound=error,
        rounding=found.off,
        lipschitz=lipschitz,
        lipschitz_note=note,
        lipschitz_local=local,
        lipschitz_local_note=local_note,
        lipschitz_in="c" if input_norm is None else "x",
        numbers=Numbers(**shown, input_norm=input_norm),
        solver=solver,
        rigorous=found.rigorous and not wrong,
        notes=tuple(notes),
    )


def _notes(found: _Measured, wrong: list[str], error: Tensor, outside: int) -> list[str]:
    """What a reader must know of the bounds; ``outside`` states are not in the prior's domain."""
    basis, notes = found.curvature.basis, list[str]()
    if found.problem.couples_batch:
        notes.append("the regularizer couples the batch: error bounds are those of all samples")
    if not found.derived:
        notes.append("rounding is an estimate: none is derived for this kind of problem")
    if basis == "given":
        notes.append("m and L were given: the certificate is as good as they are")
    elif not found.curvature.rigorous:
        notes.append("the bounds on the Hessian are estimates")
    notes += [f"REFUTED: {text}" for text in wrong]
    if found.sampled:
        notes.append(SAMPLED)
    if basis == "estimated" and not wrong:
        notes.append(f"nothing follows from estimates; if m and L hold, ‖z − z*‖ ≤ {spread(error)}")
    if outside:
        notes.append(
            f"{outside} of {len(error)} states lie outside the domain of the prior, where G is "
            "infinite (a solver extrapolated); T(z) lies inside, within the residual of z"
        )
    return notes


class _Measured:
    """What one evaluation of T at z says, in float64; the rest of a certificate costs more."""

    def __init__(self, given: HiddenProblem, state: Tensor, input_norm: float | None) -> None:
        self.problem, self.z = problem, z = given.in_double(), exact(state)
        self.sampled = self.prior_varies = False
        if isinstance(problem, Problem):
            problem.coupling.check_state(z)
            self.sampled = problem.effective_prior.sampled
            self.prior_varies = problem.effective_prior.has_tensors  # which may depend on x
        self.curvature = tight_curvature(problem)
        # m, L and ρ, each [] or [B].
        self.bounds = _outward(self.curvature, z, together=problem.couples_batch)
        self.image = problem.step(z)
        self.residual = sample_norm([z - self.image])
        # The exact residual is within ``off`` [B] of this one.
        self.off, self.derived = residual_rounding(problem, z, self.image)
        self.rigorous = self.derived and self.curvature.rigorous and not self.sampled
        modulus = as_number(self.bounds[0])
        self.lipschitz, self.lipschitz_note = global_lipschitz(problem, modulus, input_norm)
        if self.prior_varies and input_norm is not None:
            self.lipschitz = None
            self.lipschitz_note = "a parameter of the prior is a tensor: it may depend on x"


@dataclass(frozen=True, eq=False)
class Distance:
    """‖z − z*‖ for the only equilibrium z* of each sample, and how far an input moves z*."""

    error: Tensor
    """A proven bound [B], float64, for z* of the exact c; inf where none is proven, or not that
    there is one z*."""
    lipschitz: float | None
    """A Lipschitz constant of x → z* for all inputs, or None; ``note`` says why."""
    note: str


@torch.no_grad()
def distance(layer: Any, x: Tensor, z: Any) -> Distance:
    """What ``certify_layer(layer, x, z)`` proves of ‖z − z*‖ by one evaluation of the layer's map.

    The layer is in eval mode; the bounds of a tree are those of all its tensors together. Of a
    hidden problem the bound is (1 + ρ/m)·‖z − T(z)‖ alone.
    """
    nothing = torch.full((x.shape[0],), math.inf, dtype=torch.float64, device=x.device)
    found: Any
    if not isinstance(layer, (SelfCertifying, Certifiable)):
        return Distance(nothing, None, "nothing is proven of it")
    if isinstance(layer, SelfCertifying):
        found = layer.certify(x, z)
        error, known = found.error_bound, found.certified
        lipschitz, note = found.lipschitz, found.lipschitz_note
        moved = getattr(found, "input_rounding", None)
        error = error if moved is None else (error + moved) * (1.0 + 4 * UNIT)
    else:
        problem = layer.problem(x)
        bound = _input_norm(layer, x, problem)
        with direct_convolutions(z):
            found = _Measured(problem, z, bound)
        lipschitz, note = found.lipschitz, found.lipschitz_note
        m, _, rho = (t.expand(len(nothing)) for t in found.bounds)
        error = (1.0 + rho / m) * (found.residual + found.off) + _input_rounding(layer, x, found)
        error = error * (1.0 + 32 * UNIT)
        known = (m > 0) & error.isfinite() & (not found.problem.couples_batch)
        if bound is None:
            lipschitz, note = None, "no bound on the norm of its input map is known"
        wrong = refuted(found.problem, found.z) if isinstance(found.problem, Problem) else []
        if wrong:
            return Distance(nothing, None, f"REFUTED: {wrong[0]}")
    if not found.rigorous:
        return Distance(nothing, None, "its bounds are estimates")
    return Distance(torch.where(known, error, math.inf), lipschitz, note)


def _input_rounding(layer: Any, x: Tensor, found: _Measured) -> Tensor:
    """‖z* − z*′‖ for the c that float64 made and the exact one, bounded; inf where not known."""
    own = getattr(layer, "input_rounding", None)
    steep = global_lipschitz(found.problem, float(found.bounds[0].min()), None)[0]
    if own is None or steep is None:
        return torch.full_like(found.residual, math.inf)
    moved: Tensor = own(x)
    return moved * steep


def _kind(unique: bool, contracts: bool, near: bool) -> Guarantee:
    if unique:
        return Guarantee.contraction if contracts else Guarantee.strong_convexity
    return Guarantee.local if near else Guarantee.none


def _outward(curvature: Curvature, z: Tensor, *, together: bool) -> tuple[Tensor, Tensor, Tensor]:
    """m rounded down, L rounded up, and ρ = max(|1 − m|, |L − 1|); of the worst where together."""
    lower, upper = curvature.ends(z)
    lower = lower - 16 * UNIT * (1.0 + lower.abs())
    upper = upper + 16 * UNIT * (1.0 + upper.abs())
    if together:
        lower, upper = lower.min(), upper.max()
    return lower, upper, torch.maximum((1.0 - lower).abs(), (upper - 1.0).abs())


def _own_modulus(problem: Problem) -> Tensor:
    """a: the modulus of everything in G but the prior and the coupling (without R, 1 or 0)."""
    if problem.regularizer is None:
        return torch.full((), problem.ridge, dtype=torch.float64)
    whole, part = (p.curvature().ends()[0] for p in (problem, problem.coupling))
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
    if not m > 0.0:
        return None, "the equilibrium is not certified to be unique for every input"
    if not math.isfinite(reach):
        return None, "no bound on the norm of U is known"
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
    if found is None:
        return None, note
    bound = found * input_norm
    return torch.where(bound >= 0.0, bound, math.inf), note  # NaN or a negative one is no bound
