"""Certificates: what is proven about the equilibrium of a layer, and about the z that it returned.

``certify(layer, x)`` looks at the hidden problem G = f + g with m ⪯ ∇²g ⪯ L. The layer's map T has
the factor ρ = max(|1 − m|, |L − 1|). ρ < 1: T is a contraction. m > 0: G is strongly convex, so
there is one equilibrium z*, and ‖z − z*‖ ≤ (1 + ρ/m)·‖z − T(z)‖ for every z
(docs/facts.md, facts 2–4).
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import Any, Protocol, overload, runtime_checkable

import torch
from torch import Tensor, nn

from equilibria.engine.result import Solution
from equilibria.engine.tree import sample_norm
from equilibria.problems.kernels import Curvature
from equilibria.problems.norms import UNIT, NormBound, exact
from equilibria.problems.problem import AffineProblem, HiddenProblem, MoreauProblem, Problem
from equilibria.problems.solving import minimize

from .error_bounds import global_bound, local_bound, local_modulus, tight_curvature
from .guarantee import Guarantee, Guaranteed, either, guarantee_rows, lines, number, solved, spread
from .lipschitz import Variable, global_lipschitz, local_lipschitz
from .rounding import direct_convolutions, residual_rounding

__all__ = ["Certifiable", "Certificate", "Guarantee", "Numbers", "certify"]


@runtime_checkable
class Certifiable(Protocol):
    """What ``certify`` asks of a layer. It may also have ``input_norm_upper() -> float``.

    That is a rigorous bound on the norm of x → c̃, the (patch rows of Ux)W_h of a Gaussian
    coupling or Ux of the others; with it the Lipschitz constants are in x, without it in c.
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


@dataclass(frozen=True, eq=False)
class Certificate(Guaranteed):
    """What is proven for a batch; [B] tensors are float64. ``print`` it to read it."""

    kinds: tuple[Guarantee, ...]
    """The guarantee of each sample; ``kind`` is the weakest."""
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
    residual: Tensor
    """‖z − T(z)‖ as computed in float64, [B]."""
    error_bound: Tensor
    """‖z − z*‖ is at most this, rounding included; inf where nothing is proven. For ``local`` z* is
    the only equilibrium that close. [B]."""
    rounding: Tensor
    """The exact residual is within this of ``residual``; ``error_bound`` has it paid for. [B]."""
    lipschitz: float | None
    """A Lipschitz constant of x → z* for all inputs, or None; ``lipschitz_note`` says why."""
    lipschitz_note: str
    lipschitz_local: Tensor | None
    """The same at this input alone, [B]; ``lipschitz_local_note`` says what is held fixed."""
    lipschitz_local_note: str
    lipschitz_in: Variable
    """Whether both are in the layer's input x or, where its norm is not known, in c."""
    numbers: Numbers
    solver: str
    """What made z, and how it ended."""
    rigorous: bool
    """Whether every bound is proven; False where an estimate had to be used (see ``notes``)."""
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return _described(self)


@overload
def certify(layer: SelfCertifying, x: Tensor | None = None, z: Any = None) -> Any: ...


@overload
def certify(
    layer: Certifiable | HiddenProblem, x: Tensor | None = None, z: Tensor | None = None
) -> Certificate: ...


@torch.no_grad()
def certify(layer: Any, x: Tensor | None = None, z: Any = None) -> Any:
    """What is proven about the equilibrium of ``layer`` at x, and about z.

    ``certify(layer, x)`` solves with the layer's own solver (of a copy in eval mode: the layer is
    left as it is); ``certify(layer, x, z)`` judges a given state [B, *state], at any stage of a
    solve. ``certify(problem, z=z)`` takes a problem in place of the layer. A layer with a method
    ``certify(x, z)`` (those without a hidden problem: MonotoneDEQ, DeepOptEq, DEQ, MultiBranch)
    is asked itself, and answers with a ``MapCertificate`` or a ``CompositeCertificate``.

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
    elif isinstance(layer, SelfCertifying):
        return layer.certify(_needed(layer, x), z)
    elif isinstance(layer, Certifiable):
        x = _needed(layer, x)
        model = copy.deepcopy(layer).eval() if isinstance(layer, nn.Module) else layer
        problem = model.problem(x)
        bound = getattr(model, "input_norm_upper", None)
        input_norm = None if bound is None else float(bound())
        z, solver = solved(lambda: model.solve(x), z)
    else:
        raise TypeError(
            "certify takes a layer with problem(x) and solve(x), one with certify(x, z), or a "
            "Problem, got "
            f"{type(layer).__name__}."
        )
    with direct_convolutions(z):
        return _certify(problem, z, input_norm, solver)


def _needed(layer: object, x: Tensor | None) -> Tensor:
    if x is None:
        raise TypeError(f"certify({type(layer).__name__}, x) needs the input x [B, ...].")
    return x


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
    if not curvature.rigorous:
        notes.append("the bounds on the Hessian are estimates")
    sampled = isinstance(problem, Problem) and problem.effective_prior.sampled
    if sampled:
        notes.append(
            "the activation is monotone and nonexpansive at the samples that CustomPrior took; "
            "that it is so everywhere, and its rounding, are assumed"
        )
    near = local_modulus(problem, z)
    finite = (residual + off).isfinite()
    error = torch.minimum(
        global_bound(problem, z, residual + off, m, high, together=together),
        local_bound(problem, z, image, residual + off, off, m, high),
    )
    error = torch.where(finite, error, math.inf)
    objective = problem.objective(z)
    outside = int((objective.isinf() & finite).sum())
    if outside:
        notes.append(
            f"{outside} of {batch} states lie outside the domain of the prior, where G is infinite "
            "(a solver extrapolated); T(z) lies inside, within the residual of z"
        )
    kinds = _kinds(finite, rho < 1, m > 0, error.isfinite())

    reach = input_norm
    if reach is None:
        reach = problem.coupling.features_norm() if isinstance(problem, Problem) else math.inf
    lipschitz, lipschitz_note = global_lipschitz(problem, _number(lower), input_norm)
    local, local_note = local_lipschitz(problem, z, error, _number(lower), reach)
    if isinstance(problem, Problem) and problem.effective_prior.has_tensors:
        if input_norm is not None:
            lipschitz = local = None
            lipschitz_note = local_note = "a parameter of the prior is a tensor: it may depend on x"
        else:
            notes.append("Lipschitz constants are in c alone, the parameters of the prior fixed")
    return Certificate(
        kinds=kinds,
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
        numbers=_numbers(problem, z, input_norm),
        solver=solver,
        rigorous=derived and curvature.rigorous and not sampled,
        notes=tuple(notes),
    )


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


def _kinds(
    finite: Tensor, contracts: Tensor, convex: Tensor, bounded: Tensor
) -> tuple[Guarantee, ...]:
    found: list[Guarantee] = []
    columns = (t.tolist() for t in (finite, contracts, convex, bounded))
    for known, contracting, strongly, near in zip(*columns, strict=True):
        if known and strongly:
            best = Guarantee.contraction if contracting else Guarantee.strong_convexity
        else:
            best = Guarantee.local if known and near else Guarantee.none
        found.append(best)
    return tuple(found)


def _numbers(problem: HiddenProblem, z: Tensor, input_norm: float | None) -> Numbers:
    if not isinstance(problem, Problem):
        return Numbers(input_norm=input_norm)
    return Numbers(**problem.coupling.numbers(tuple(z.shape[1:])), input_norm=input_norm)


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


def _origins(certificate: Certificate) -> list[tuple[str, str]]:
    numbers = certificate.numbers
    rows = []
    for name, bound in (("‖W‖", numbers.norm), ("μ", numbers.mu)):
        if bound is not None:
            rows.append((name, f"{number(bound.estimate)}, at most {number(bound.upper)}"))
    if numbers.hidden_norm is not None:
        rows.append(("‖W_h‖", f"at most {number(numbers.hidden_norm)}"))
    if numbers.gamma is not None:
        rows.append(("γ", numbers.gamma))
    if numbers.input_norm is not None:
        rows.append(("‖x → c̃‖", f"at most {number(numbers.input_norm)}"))
    return rows


def _described(c: Certificate) -> str:
    lipschitz = "none" if c.lipschitz is None else number(c.lipschitz)
    rows = [
        *guarantee_rows(c),
        ("contraction ρ", either(c.contraction)),
        ("modulus m", either(c.modulus)),
        ("smoothness L", either(c.smoothness)),
        ("modulus at z", spread(c.modulus_local)),
        ("objective", spread(c.objective)),
        ("stationarity", spread(c.stationarity)),
        ("residual", spread(c.residual)),
        ("‖z − z*‖ ≤", spread(c.error_bound)),
        ("rounding", f"{spread(c.rounding)} (of the residual; paid for in the bound)"),
        (f"Lipschitz in {c.lipschitz_in}", f"{lipschitz} ({c.lipschitz_note})"),
    ]
    if c.lipschitz_local is not None:
        text = f"{spread(c.lipschitz_local)} ({c.lipschitz_local_note})"
        rows.append(("  at this input", text))
    rows += [*_origins(c), ("solver", c.solver)]
    rows += [("note", note) for note in c.notes]
    return lines(c, rows, rigorous=c.rigorous)
