"""Objectives without a single prox, and splittings that minimize them.

    ``G(z) = f(z) + g(z) + sum_i h_i(K_i z)``

with priors ``f`` and ``h_i``, a smooth ``g`` and linear operators ``K_i``. A splitting is a map S
of a state ``u``, a tuple of tensors, that does not expand (in a suitable norm). From its fixed
point ``z`` and the duals ``y_i`` in ``dh_i(K_i z)`` are read. The engine does the rest.
"""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from equilibria.adjoints import Implicit
from equilibria.adjoints.graph import host_may_read
from equilibria.engine.adjoint import Adjoint
from equilibria.engine.krylov import GMRES
from equilibria.engine.options import check_number, options
from equilibria.engine.result import NotConvergedError, Result, Solution, warn_user
from equilibria.engine.solver import Bounds, Choice, SolverOptions
from equilibria.engine.tree import per_sample, sample_norm
from equilibria.entry import TrajectoryCallback, fixed_point
from equilibria.problems.kernels import Coupling, Curvature, inner, parts_of
from equilibria.problems.objective import LeastSquares
from equilibria.problems.operators import IDENTITY, IdentityOperator, Weights, as_operator
from equilibria.problems.parts import replaced, times
from equilibria.problems.priors import Free, Prior
from equilibria.problems.problem import HiddenProblem
from equilibria.solvers import Auto
from equilibria.solvers.guarded import Guarded

State = tuple[Tensor, ...]
Inverse = Callable[[Tensor, float], Tensor]
Advanced = tuple[State, Tensor, list[Tensor]]

_STEPS = ("rho", "gamma", "tau", "sigma")
_SHARED = tuple(field.name for field in dataclasses.fields(SolverOptions))
_DENSE = 2048  # largest state of which ADMM inverts a matrix
_PLAIN = Implicit()
_ADJOINT = Implicit(solver=GMRES(restart=60, max_steps=2000))  # J may have eigenvalues near 1


def _prox(h: Prior, k: float, v: Tensor, tau: float) -> Tensor:
    """``prox`` of ``v -> h(kv)``."""
    return times(1.0 / k, h.prox(times(k, v), k * k * tau))


class Composite(HiddenProblem):
    """``G(z) = f(z) + g(z) + sum_i h_i(K_i z)``, for ``minimize`` by a splitting.

    Args:
        prior: ``f``; ``Free()`` for none.
        terms: Pairs ``(h, K)`` of a prior and an operator (a matrix, a kernel, a
            ``LinearOperator``); ``K = None`` is the identity.
        smooth: ``g``, such as ``LeastSquares(A, x)`` or ``Smooth(fn, x)``; None for none.
        inverse: ``(rhs, rho) -> z`` with ``(H + rho (sum K'K + P)) z = rhs``, ``H`` the Hessian of
            ``g``, ``P = I`` if there is a prior, else 0; where ADMM shall not invert a matrix.
    """

    parameters = ("prior", "terms", "smooth")
    scales: tuple[float, ...]
    """What each ``K_i`` is divided by in ``images`` and ``pull``: 1 but inside of a solve."""

    def __init__(
        self,
        prior: Prior,
        terms: Sequence[tuple[Prior, Weights | None]],
        smooth: Coupling | None = None,
        *,
        inverse: Inverse | None = None,
    ) -> None:
        self.terms = tuple((h, IDENTITY if K is None else as_operator(K)) for h, K in terms)
        self.prior, self.smooth, self.inverse = prior, smooth, inverse
        self.scales = (1.0,) * len(self.terms)
        held: list[tuple[Any, Any]] = [(f, Prior) for f in (prior, *(h for h, _ in self.terms))]
        held.append((smooth, Coupling | None))
        wrong = [type(part).__name__ for part, kind in held if not isinstance(part, kind)]
        if wrong:
            raise TypeError(
                f"Composite got a {wrong[0]}, takes priors f and (h, K), and smooth "
                "as LeastSquares(A, x) or Smooth(fn, x)"
            )

    @property
    def has_prior(self) -> bool:
        """Whether ``f`` is one more term; a sum of ``g`` alone has it, too."""
        return not isinstance(self.prior, Free) or not self.terms

    @property
    def quadratic(self) -> bool:
        """Whether ``g`` is known to be quadratic, with one Hessian for all samples."""
        q = self.smooth
        return q is None or all(isinstance(part, LeastSquares) for part, _ in parts_of(q))

    def images(self, z: Tensor) -> list[Tensor]:
        """``K_i z``."""
        return [times(1.0 / k, K(z)) for (_, K), k in zip(self.terms, self.scales, strict=True)]

    def pull(self, y: Sequence[Tensor], z: Tensor) -> Tensor:
        """``sum_i K_i' y_i``, shaped as ``z``."""
        total = torch.zeros_like(z)
        for (_, K), k, part in zip(self.terms, self.scales, y, strict=True):
            total = total + K.adjoint(times(1.0 / k, part), z.shape[1:])
        return total

    def sizes(self) -> tuple[float, float, float]:
        """``sqrt(max(m, L/100) L)`` (1 without a smooth part), L, and ``sum_i |K_i|^2``."""
        bounds = self.curvature()
        ends = bounds.lower, bounds.upper
        m, high = (float(t.max()) if isinstance(t, Tensor) else float(t) for t in ends)
        middle = math.sqrt(max(m, 0.01 * high) * high) if high > 0 else 1.0
        pairs = zip(self.terms, self.scales, strict=True)
        norms = [K.norm_upper() / k for (_, K), k in pairs]
        return middle, high, float(sum(norm * norm for norm in norms))

    def objective(self, z: Tensor) -> Tensor:
        total = self.prior.sample_value(z)
        total = total if self.smooth is None else total + self.smooth.value(z)
        for h, K in self.terms:
            total = total + h.sample_value(K(z))
        return total

    def gradient(self, z: Tensor) -> Tensor:
        return torch.zeros_like(z) if self.smooth is None else self.smooth.grad(z)

    def curvature(self) -> Curvature:
        if self.smooth is None:
            return Curvature(0.0, 0.0, True, "no smooth part")
        return self.smooth.curvature()

    def step(self, z: Tensor, tau: float | Tensor = 1.0) -> NoReturn:
        raise TypeError(
            "A Composite has no single prox, so no step and no stationarity. minimize solves it by "
            "ADMM(), DouglasRachford() or ChambollePock(); certify(problem, z=z) judges an answer."
        )

    def minimal_subgradient(self, z: Tensor) -> NoReturn:
        self.step(z)

    def default_start(self, shape: Sequence[int] | None = None) -> Tensor:
        if self.smooth is not None:
            return self.smooth.default_start(shape)
        rows = self.inputs()
        state = next((K.in_shape for _, K in self.terms if K.in_shape is not None), None)
        if not rows or state is None:
            raise TypeError("Composite: z has no known shape without a smooth part; give z0")
        return rows[0].new_zeros((rows[0].shape[0], *state) if shape is None else tuple(shape))

    # (H + rho (sum K'K [+ I])) z = rhs, for a quadratic g; with I where ``has_prior``.

    def normal(self, v: Tensor, rho: float) -> Tensor:
        found = rho * (self.pull(self.images(v), v) + (v if self.has_prior else 0.0))
        return found if self.smooth is None else found + self.smooth.hvp(v, v)

    def factor(self, z: Tensor, rho: float) -> Tensor | None:
        """The inverse of the matrix, ``[n, n]``; None where ``inverse`` is there to do it."""
        if self.inverse is not None:
            probe = torch.linspace(1.0, 2.0, z[0].numel(), dtype=z.dtype, device=z.device)
            probe = probe.reshape(1, *z.shape[1:]).expand_as(z)
            off = (self.normal(self.inverse(probe, rho), rho) - probe).flatten(1).norm(dim=1)
            if host_may_read(off) and bool((off > 0.01 * probe[0].norm()).any()):
                raise ValueError(
                    "Composite(inverse=...) does not solve (H + rho (sum K'K + P)) z = rhs, P = "
                    f"{'I, as there is a prior' if self.has_prior else '0'}, for the Hessian H of "
                    "smooth."
                )
            return None
        n = z[0].numel()
        if not self.quadratic or n > _DENSE:
            raise TypeError(
                "ADMM and DouglasRachford need a quadratic smooth part (LeastSquares, a sum of "
                f"them, or none) and at most {_DENSE} unknowns (here {n}), or "
                "Composite(inverse=...); ChambollePock() takes every smooth part and size."
            )
        try:  # rounded to float32, eigenvalues that are 0 would be inverted
            twin, dtype = self.in_double(), torch.float64
        except TypeError:  # callables in an operator that take one type alone
            twin, dtype = self, z.dtype
        eye = torch.eye(n, dtype=dtype, device=z.device).reshape(n, *z.shape[1:])
        matrix = twin.normal(eye, rho).reshape(n, n).double()
        inverse: Tensor = torch.linalg.pinv(matrix, hermitian=True).to(z.dtype)
        return inverse

    def solve(self, rhs: Tensor, rho: float, factor: Tensor | None) -> Tensor:
        if factor is None:
            assert self.inverse is not None
            return self.inverse(rhs, rho)

        def apply(t: Tensor) -> Tensor:
            return (t.flatten(1) @ factor).reshape(t.shape)

        z = apply(rhs.detach())
        # Steps of refinement on the live numbers carry derivatives: the first and the second.
        for _ in range(2 if torch.is_grad_enabled() else 0):
            z = z + apply(rhs - self.normal(z, rho))
        return z


@options
class SplittingOfSum(SolverOptions):
    """A splitting of a ``Composite``: its steps, its map, and how ``u`` gives ``z`` and ``y``."""

    max_steps: int = 4000
    patience: int = 2000

    def __post_init__(self) -> None:
        SolverOptions.__post_init__(self)
        for name in {*_STEPS} & {f.name for f in dataclasses.fields(self)}:
            check_number(self, name, low=0.0, low_open=True, optional=True)

    def given(self) -> list[str]:
        """The steps that are the user's."""
        return [name for name in _STEPS if getattr(self, name, None) is not None]

    def in_units(self, problem: Composite) -> Composite:
        """With ``|K_i| = 1``: beside a large image the convergence of others is not seen. Steps and
        an inverse of the user's are for the problem as it is."""
        if self.given() or problem.inverse is not None:
            return problem
        # Without g K is measured against the identity, and most singular values are below |K|.
        most = 1.0 if problem.smooth is not None else 3.0
        norms = [K.norm_upper() for _, K in problem.terms]
        units = [k if k == 1.0 else k / most for k in norms]
        return replaced(problem, scales=tuple(k if 0.0 < k < math.inf else 1.0 for k in units))

    @abstractmethod
    def prepare(self, problem: Composite, z: Tensor) -> Any:
        """What is computed once a solve, without gradients: steps, checked, and a factor."""

    @abstractmethod
    def start(self, problem: Composite, z: Tensor) -> State:
        """The ``u`` to start from, for a guess of ``z``."""

    @abstractmethod
    def advance(self, problem: Composite, u: State, prepared: Any) -> Advanced:
        """``S(u)``, ``z`` and the duals."""

    def for_map(self) -> NoReturn:
        name = type(self).__name__
        raise TypeError(f"{name} splits a Composite; elsewhere use Auto() or Anderson().")

    def for_problem(self, bounds: Bounds) -> Choice:
        self.for_map()


@options
class ADMM(SplittingOfSum):
    """``w = prox_{h/rho}(s)``, ``z = argmin g + rho/2 |Kz - 2w + s|^2``, ``s <- s + Kz - w``.

    The alternating direction method of multipliers, for a quadratic ``g``; ``y = rho (s - w)``. A
    prior ``f`` is one more term. The matrix of the linear system is inverted once a solve.
    """

    rho: float | None = None
    """None takes ``sqrt(max(m, L/100) L)/n`` with n terms, each K divided by ``|K|`` (with
    ``inverse`` the sum of ``|K|^2`` for n, and K as it is); without ``g`` 1, each K but the
    identity divided by ``|K|/3``; best is the size of a subgradient over that of ``z``."""

    def prepare(self, problem: Composite, z: Tensor) -> tuple[float, Tensor | None]:
        rho = self.rho
        if rho is None:
            middle, high, norm = problem.sizes()
            size = norm + problem.has_prior
            rho = middle / size if high > 0 and size > 0 else 1.0  # K = 0: any step does
        if not 0.0 < rho < math.inf:
            raise ValueError("ADMM: no bound on a norm is known; give rho")
        return rho, problem.factor(z, rho)

    def start(self, problem: Composite, z: Tensor) -> State:
        return (*problem.images(z), *([z] if problem.has_prior else []))

    def advance(self, problem: Composite, u: State, prepared: Any) -> Advanced:
        (rho, factor), own = prepared, problem.has_prior
        held = [*(h for h, _ in problem.terms), *([problem.prior] if own else [])]
        parts = list(zip(held, (*problem.scales, 1.0), u, strict=False))
        w = [_prox(h, k, s, 1.0 / rho) for h, k, s in parts]
        aim = [2.0 * a - s for a, s in zip(w, u, strict=True)]
        like = aim[-1] if own else problem.terms[0][1].adjoint(aim[0])
        rhs = rho * aim.pop() if own else torch.zeros_like(like)
        rhs = rhs + rho * problem.pull(aim, like) - problem.gradient(torch.zeros_like(like))
        z = problem.solve(rhs, rho, factor)
        new = tuple(s + b - a for a, b, s in zip(w, self.start(problem, z), u, strict=True))
        y = [rho / k * (s - a) for a, (_, k, s) in zip(w, parts, strict=True)]
        return (new, w[-1], y[:-1]) if own else (new, z, y)


@options
class DouglasRachford(SplittingOfSum):
    """``z = prox_{gamma f}(s)``, ``w = prox_{gamma h}(2z - s)``, ``s <- s + w - z``.

    For a sum of two: a prior and one term without an operator, or a prior and a quadratic ``g``.
    """

    gamma: float | None = None
    """None takes ``1/sqrt(max(m, L/100) L)``; without ``g`` 1; best is the size of ``z`` over
    that of a subgradient."""

    def prepare(self, problem: Composite, z: Tensor) -> tuple[float, Tensor | None]:
        plain = all(isinstance(K, IdentityOperator) for _, K in problem.terms)
        if len(problem.terms) + (problem.smooth is not None) != 1 or not plain:
            raise TypeError(
                "DouglasRachford takes a sum of two: Composite(f, [(h, None)]) or "
                "Composite(f, [], LeastSquares(...)); ADMM() and ChambollePock() take h(Kz) and "
                "any number of terms."
            )
        gamma = self.gamma or 1.0 / problem.sizes()[0]
        return gamma, None if problem.terms else problem.factor(z, 1.0 / gamma)

    def start(self, problem: Composite, z: Tensor) -> State:
        return (z,)

    def advance(self, problem: Composite, u: State, prepared: Any) -> Advanced:
        gamma, factor = prepared
        z = problem.prior.prox(u[0], gamma)
        aim = 2.0 * z - u[0]
        if problem.terms:
            w = problem.terms[0][0].prox(aim, gamma)
        else:
            rhs = aim / gamma - problem.gradient(torch.zeros_like(aim))
            w = problem.solve(rhs, 1.0 / gamma, factor)
        return (u[0] + w - z,), z, [(aim - w) / gamma] if problem.terms else []


@options
class ChambollePock(SplittingOfSum):
    """``z+ = prox_{tau f}(z - tau (dg(z) + K'y))``, ``y+ = prox_{sigma h*}(y + sigma K(2z+ - z))``.

    The primal-dual method of Chambolle and Pock, with the gradient of a smooth part (Condat, Vu).
    No linear system. It converges for ``tau (L/2 + sigma sum |K|^2) <= 1``. Where neither step is
    given each K is divided by ``|K|``, without ``g`` all but the identity by ``|K|/3``.
    """

    tau: float | None = None
    """None takes the largest."""
    sigma: float | None = None
    """None takes ``L/(2 sum |K|^2)``, or ``1/sqrt(sum |K|^2)`` without ``g``."""

    def prepare(self, problem: Composite, z: Tensor) -> tuple[float, float]:
        _, high, norm = problem.sizes()
        if not math.isfinite(high + norm):
            raise ValueError(
                f"ChambollePock needs finite bounds and found L = {high:g}, Σ‖K‖² = {norm:g}. Give "
                "bounds=(m, L) to Smooth, and norm_bound to ModuleOperator."
            )
        norm = norm if norm > 1e-100 * high else max(high, 1.0)  # K = 0: any step does
        sigma = self.sigma or (0.5 * high / norm if high > 0 else norm**-0.5)
        limit = 1.0 / (0.5 * high + sigma * norm)
        if self.tau is not None and self.tau > limit * (1 + 1e-9):
            raise ValueError(
                f"ChambollePock(tau={self.tau:g}) is too large: with sigma = {sigma:g} it "
                f"converges for tau up to 1/(L/2 + sigma·Σ‖K‖²) = {limit:.4g}."
            )
        return self.tau or limit, sigma

    def start(self, problem: Composite, z: Tensor) -> State:
        return (z, *(torch.zeros_like(t) for t in problem.images(z)))

    def advance(self, problem: Composite, u: State, prepared: Any) -> Advanced:
        tau, sigma = prepared
        unit = math.sqrt(sigma / tau)  # u holds the duals in the unit of z
        z, y = u[0], [unit * t for t in u[1:]]
        force = problem.gradient(z) + problem.pull(y, z)
        new = problem.prior.prox(z - tau * force, tau)
        found = []
        images = problem.images(2.0 * new - z)
        for (h, _), k, dual, image in zip(problem.terms, problem.scales, y, images, strict=True):
            v = dual / sigma + image
            found.append(sigma * (v - _prox(h, k, v, 1.0 / sigma)))  # Moreau's identity
        duals = [times(1.0 / k, t) for k, t in zip(problem.scales, found, strict=True)]
        return (new, *(math.sqrt(tau / sigma) * t for t in found)), new, duals


def split(
    problem: Composite,
    z0: Tensor,
    *,
    solver: SolverOptions | None = None,
    adjoint: Adjoint | None = None,
    throw: bool = False,
    callback: TrajectoryCallback | None = None,
) -> tuple[Solution[Tensor], list[Tensor]]:
    """The minimizer of a ``Composite``, with gradients, and the duals."""
    way = Auto() if solver is None else solver
    if isinstance(way, Auto):
        shared = {k: v for k, v in dataclasses.asdict(way).items() if v != getattr(Auto, k)}
        direct = problem.inverse or (problem.quadratic and z0[0].numel() <= _DENSE)
        way = ADMM(**shared) if direct else ChambollePock(**shared)
    if not isinstance(way, SplittingOfSum):
        raise TypeError(
            f"solver got {solver!r}; a Composite takes ADMM(...), DouglasRachford(...), "
            "ChambollePock(...) or Auto(), as it has no single prox."
        )
    chosen, inner = way, way.in_units(problem)
    with torch.no_grad():
        prepared = way.prepare(inner, z0)

    def step(u: State, *given: Any) -> tuple[State, Any]:
        new, z, y = chosen.advance(inner.with_inputs(*given), u, prepared)
        return new, (z, y)

    found = fixed_point(
        step,
        way.start(inner, z0),
        inner.inputs(),
        solver=Guarded(**{name: getattr(way, name) for name in _SHARED}),
        adjoint=_ADJOINT if adjoint is None or adjoint == _PLAIN else adjoint,
        throw=throw,
        callback=callback,
        aux=True,  # its graph leaves out samples that failed
    )
    z, y = found.aux
    numbers = () if torch.compiler.is_compiling() else prepared  # may be symbols there
    steps = ", ".join(f"{step:.4g}" for step in numbers if isinstance(step, float))
    reason = f"{type(way).__name__} with the steps {steps}"
    done = dataclasses.replace(found, value=z, choice=reason, aux=None)
    if (inner is problem or problem.smooth is None) and host_may_read(z):
        done = _checked(problem, done, tuple(y), way, throw)
    return done, y


@torch.no_grad()
def _checked(
    problem: Composite, done: Solution[Tensor], y: State, way: SplittingOfSum, throw: bool
) -> Solution[Tensor]:
    """Steps of the user's, and those of a problem without a smooth part, which do not know its
    scale, may hardly move a state far from the minimum: there it has not converged.

    What they leave is measured without them, by a step as long as z and its image are large.
    """
    z = done.value.detach()
    limit = 100.0 * way.relative_tolerance(z.dtype, z.device.type)
    far = done.converged & (_distance(problem, z, y, limit) > limit)
    if problem.smooth is None and bool(far.any()):
        far = far & ~_minimizes_each(problem, z, limit)
    if not bool(far.any()):
        return done
    result = torch.where(far, int(Result.stagnated), done.result).to(done.result.dtype)
    done = dataclasses.replace(done, result=result)
    own = ", ".join(f.name for f in dataclasses.fields(way) if f.name in _STEPS)
    advice = f"give {own} by the scale of z and of a subgradient"
    if way.given():
        advice = f"leave out {', '.join(way.given())}, or give a value nearer to the default"
    message = (
        f"{type(way).__name__} did not converge for all samples: {int(far.sum())} of {len(far)} "
        f"samples stagnated (they hardly move by {done.choice}, and are not optimal: {advice})."
    )
    if throw:
        raise NotConvergedError(message, done)
    warn_user(message)
    return done


def _norm(t: Tensor) -> Tensor:
    return sample_norm([t])


def _minimizes_each(problem: Composite, z: Tensor, limit: float) -> Tensor:
    """Whether z is a minimizer of every part, as where sets meet, [B]: the duals are 0 there, and
    what is left of them is rounding."""
    step = torch.finfo(z.dtype).max ** 0.8  # it moves whatever is no minimizer
    parts = [(problem.prior, z)]
    parts += [(h, image) for (h, _), image in zip(problem.terms, problem.images(z), strict=True)]
    still = [_norm(h.prox(at, step) - at) <= limit * _norm(at) for h, at in parts]
    return torch.stack(still).all(0)


def _distance(problem: Composite, z: Tensor, y: Sequence[Tensor], limit: float) -> Tensor:
    """Of z from what a proximal step makes of it, and of its images from points with these
    subgradients, relative to their size, [B]."""
    near = _subgradients(problem, z, y)
    slope, pulled = problem.gradient(z), problem.pull([dual for _, _, dual in near], z)
    low, high = problem.curvature().ends(_norm(z))
    # A z that is nothing beside a gradient step 1/L is 0, of which no part is small.
    zero = (_norm(slope) > 0) & (high * _norm(z) <= limit * _norm(slope))
    reach = torch.where(zero, _norm(slope) / high, _norm(z))
    pairs = zip(near, problem.terms, strict=True)
    gaps = [
        _norm(image - w) / (reach * (K.norm_upper() or math.inf)) for (image, w, _), (_, K) in pairs
    ]
    size = _norm(slope) + _norm(pulled)
    unit = torch.where((size > 0) & (_norm(z) > 0), _norm(z) / size, 1.0)
    # No longer than the curvature asks for: where little pulls, rounding would move it far.
    least = torch.maximum(low, torch.finfo(unit.dtype).eps ** 0.5 * high)
    at = per_sample(torch.minimum(unit, 1.0 / least), z)
    moved = _norm(problem.prior.prox(z - at * (slope + pulled), at) - z)
    ratios = [moved / (unit * size), *gaps]
    return torch.stack([t.nan_to_num(0.0) for t in ratios]).amax(0)


def _subgradients(
    problem: Composite, z: Tensor, y: Sequence[Tensor]
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Of each term ``(K_i z, w_i, an element of dh_i(w_i))``, for a ``w_i`` near ``K_i z``."""
    norms = [K.norm_upper() for _, K in problem.terms]
    size = sum(k * _norm(dual) for k, dual in zip(norms, y, strict=True))
    # By a step of g, or one that moves z by its size: no image, no dual is lost in their sum.
    high = problem.curvature().ends(_norm(z))[1]
    step = torch.where(high > 0, 1.0 / high, _norm(z) / size)
    found = []
    for (h, _), k, image, dual in zip(problem.terms, norms, problem.images(z), y, strict=True):
        unit = k * k * step
        unit = per_sample(torch.where(unit.isfinite() & (unit > 0), unit, 1.0), image)
        v = image + unit * dual
        w = h.prox(v, unit)
        found.append((image, w, (v - w) / unit))
    return found


def duality_gap(problem: Composite, z: Tensor, y: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """``|r|`` and ``gap``, ``[B]`` each: ``G(z) - min G <= gap + |r|^2/(2m)``, m that of ``f + g``.

    ``y_i`` becomes an element of ``dh_i(w_i)`` for a ``w_i`` near ``K_i z``, so its conjugate is
    known: ``gap = sum_i h_i(K_i z) - h_i(w_i) - <y_i, K_i z - w_i>``. ``r`` is the element of least
    norm of ``df(z) + grad g(z) + K'y``. And ``m |z - z*|^2 <= |r| |z - z*| + gap``.
    """
    gap, near = z.new_zeros(z.shape[0]), _subgradients(problem, z, y)
    for (h, _), (image, w, dual) in zip(problem.terms, near, strict=True):
        ends = h.sample_value(image), h.sample_value(w), inner(dual, image - w)
        noise = torch.finfo(w.dtype).eps * math.sqrt(w[0].numel()) * sum(t.abs() for t in ends)
        gap = gap + (ends[0] - ends[1] - ends[2]).clamp_min(0.0) + 8.0 * noise
    force = problem.gradient(z) + problem.pull([dual for _, _, dual in near], z)
    return problem.prior.least_subgradient(z, force).flatten(1).norm(dim=1), gap
