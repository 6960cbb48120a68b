"""Newton's method for f(z) = 0 with GMRES for its linear systems and a dogleg as a safeguard."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from equilibria.engine.iterate import in_state_dtype
from equilibria.engine.krylov import GMRES, RTOL, LinearSolver
from equilibria.engine.maps import Map
from equilibria.engine.options import check_number, options
from equilibria.engine.result import Iterated, Result
from equilibria.engine.spectral import pull
from equilibria.engine.tree import (
    Leaves,
    accumulation_dtype,
    add,
    join_samples,
    keep_samples,
    per_sample,
    power_of_two,
    repeat_samples,
    rows,
    sample_dot,
    sample_norm,
    scale_samples,
    subtract,
    where_sample,
)

_ACCEPT = 1e-4
"""The part of the predicted decrease that a step must reach to be taken."""
_FALL = 0.99
"""A norm below this times the least one so far counts as a fall."""
_GROWTH = 1e3
"""‖f‖ over that of the start at which full Newton steps are given up."""
_FORCING = 1e-3
"""The loosest relative tolerance of a linear system. With 1e-2 one of the 23 systems of
benchmarks/nonlinear_suite.py is not solved."""


@options
class NewtonKrylov:
    """z ← z + p,  p on the dogleg 0 → Cauchy point → Newton step d,  Jd ≈ −f(z),  ‖p‖ ≤ Δ.

    Inexact Newton with a trust region of radius Δ (Powell 1970; Pawlowski et al. 2008). The Cauchy
    point minimizes ‖f + Jp‖ along −Jᵀf. A step is taken only if ‖f‖ falls, so the method cannot
    diverge; it may end in a local minimum of ‖f‖ that is no root, and says so (``stagnated``).

    A sample has converged when ‖f(z)‖ ≤ atol + rtol·‖J(z)w‖, |w| = |z| + |z − z0| in each entry: f
    is no larger than what a relative change of z by rtol makes of it. Neither the scale of f nor
    that of z matters, and a start far away does not loosen the test.
    """

    rtol: float | None = None
    """Relative tolerance; None takes one for the dtype: 1e-10 in float64, 1e-5 in float32."""
    atol: float = 0.0
    """Absolute tolerance, in units of f."""
    max_steps: int = 500
    """Evaluations of f, at most; products with its Jacobian are not counted here."""
    linear: LinearSolver = GMRES(restart=50)
    """How the systems Jd = −f are solved. Its tolerances are not used: the tolerance of each system
    follows from how ‖f‖ falls (Eisenstat and Walker 1996)."""
    patience: int = 48
    """Steps without a fall of ‖f‖ by 1% that end a sample as stagnated."""
    undamped: int = 50
    """Full Newton steps, at most, before the dogleg: they may pass a local minimum of ‖f‖. A sample
    whose ‖f‖ grows a thousandfold goes back to its start."""

    def __post_init__(self) -> None:
        check_number(self, "rtol", low=0.0, optional=True)
        check_number(self, "atol", low=0.0)
        check_number(self, "max_steps", low=1, integer=True)
        check_number(self, "patience", low=1, integer=True)
        check_number(self, "undamped", low=0, integer=True)
        given: object = self.linear
        if not isinstance(given, LinearSolver):
            raise TypeError(f"NewtonKrylov(linear={given!r}): expected GMRES(...) or CG(...).")

    def relative_tolerance(self, dtype: torch.dtype) -> float:
        return RTOL[dtype] if self.rtol is None else self.rtol

    def solve(self, fn: Map, z0: Leaves) -> tuple[Iterated, Tensor]:
        """Solve f(z) = 0, each sample by itself; and about ‖J‖ at the answer, [B].

        Samples that f couples, as declared or as found where some did not converge, are one system.
        """
        if torch.is_autocast_enabled(z0[0].device.type):
            return in_state_dtype(fn, z0, lambda cast: self.solve(cast, z0))
        size, spent, waited = fn.group, 0, 0
        if not (fn.coupled and size > 1):
            done, norm = _Run(fn, z0, self).solve()
            if not done.coupled:
                return done, norm
            spent, waited = done.evaluations, done.syncs
        joined, norm = _Run(fn.joined(), join_samples(z0, size), self).solve()
        joined.evaluations, joined.syncs = joined.evaluations + spent, joined.syncs + waited
        return joined.spread(size), repeat_samples(norm, size)


class Linearized:
    """f at z, with products with its Jacobian J and with Jᵀ from the graph of one evaluation."""

    def __init__(self, fn: Map, z: Leaves) -> None:
        with torch.enable_grad():
            self.inside = [x.detach().requires_grad_() for x in z]
            self.outputs = fn(self.inside)
        self.pulled: tuple[Leaves, Leaves] | None = None
        self.dtypes = [accumulation_dtype(x.dtype) for x in z]
        self.f = self.wide(self.narrow())

    def narrow(self) -> Leaves:
        """f in the dtype of z."""
        return [y.detach() for y in self.outputs]

    def wide(self, leaves: Leaves) -> Leaves:
        return [x.to(d) for x, d in zip(leaves, self.dtypes, strict=True)]

    def push(self, v: Leaves) -> Leaves:
        """Jv: Jᵀu is linear in u, and its derivative pulls v back to Jv."""
        with torch.enable_grad():
            if self.pulled is None:
                u = [torch.zeros_like(y).requires_grad_() for y in self.narrow()]
                self.pulled = pull(self.outputs, self.inside, u, create_graph=True), u
            through, u = self.pulled
            given = [x.to(y.dtype) for x, y in zip(v, through, strict=True)]
            return self.wide(pull(through, u, given))

    def pull(self, v: Leaves) -> Leaves:
        """Jᵀv."""
        given = [x.to(y.dtype) for x, y in zip(v, self.outputs, strict=True)]
        return self.wide(pull(self.outputs, self.inside, given))


@dataclass
class _Model:
    """What is known of f near z, a row a sample: f(z + p) ≈ f + Jp."""

    f: Leaves
    norm: Tensor  # ‖f‖
    newton: Leaves  # d
    left: Tensor  # ‖f + Jd‖
    gradient: Leaves  # g = Jᵀf/‖Jᵀf‖
    image: Leaves  # Jg
    cauchy: Tensor  # the Cauchy point is −cauchy·g

    def where(self, mask: Tensor, other: _Model) -> _Model:
        """Its rows where mask, else the other's."""

        def rows(a: Tensor, b: Tensor) -> Tensor:
            return torch.where(per_sample(mask, a), a, b)

        return _Model(**pytree.tree_map(rows, vars(self), vars(other)))

    def dogleg(self, radius: Tensor) -> tuple[Leaves, Tensor, Tensor]:
        """The step p with ‖p‖ ≤ radius, ‖p‖, and a bound on ‖f + Jp‖."""
        tiny = torch.finfo(self.norm.dtype).tiny
        cauchy = self.cauchy
        at_cauchy = self._bound(cauchy, torch.zeros_like(cauchy))
        length = sample_norm(self.newton)
        usable = torch.isfinite(length) & (self.left < at_cauchy)
        full = usable & (length <= radius)
        short = ~full & ((cauchy >= radius) | ~usable)
        # Between them: −cauchy·g + t(d + cauchy·g) of length radius.
        between = add(self.newton, scale_samples(cauchy, self.gradient))
        a = sample_norm(between)
        b = -cauchy * sample_dot(scale_samples(1.0 / a.clamp_min(tiny), between), self.gradient)
        c = (radius - cauchy).clamp_min(0.0) * (radius + cauchy)
        t = c / (b + (b.square() + c).sqrt()).clamp_min(tiny) / a.clamp_min(tiny)
        t = torch.where(full, 1.0, torch.where(short, 0.0, t.nan_to_num(0.0).clamp(0.0, 1.0)))
        along = torch.where(short, torch.minimum(cauchy, radius), cauchy * (1 - t))
        along = torch.where(full, 0.0, along)
        step = keep_samples(t > 0, scale_samples(t, self.newton))
        step = subtract(step, scale_samples(along, self.gradient))
        return step, sample_norm(step), self._bound(along, t)

    def _bound(self, along: Tensor, t: Tensor) -> Tensor:
        """‖f + Jp‖ for p = t·d − along·g, at most."""
        rest = subtract(scale_samples(1.0 - t, self.f), scale_samples(along, self.image))
        return sample_norm(rest) + torch.where(t > 0, t * self.left, 0.0)


class _Run:
    """One solve. Rows of samples that are done, or whose step was refused, stand still."""

    def __init__(self, fn: Map, z0: Leaves, solver: NewtonKrylov) -> None:
        self.fn, self.z0, self.solver = fn, z0, solver
        self.rtol = max(solver.relative_tolerance(x.dtype) for x in z0)
        self.evaluations = self.syncs = 0

    def _linearize(self, z: Leaves) -> Tensor:
        """f and its derivatives at z from here on; ‖f(z)‖."""
        self.at = Linearized(self.fn, z)
        self.evaluations += 1
        return sample_norm(self.at.f)

    def solve(self) -> tuple[Iterated, Tensor]:
        solver, z, norm = self.solver, self.z0, self._linearize(self.z0)
        finite = torch.isfinite(norm)
        passed = self._passes(z, norm, finite)
        code = torch.where(finite, int(Result.max_steps), int(Result.nonfinite))
        code = torch.where(passed, int(Result.converged), code)
        steps = torch.ones_like(norm)
        active = finite & ~passed
        self.syncs += 1
        if solver.max_steps == 1 or not bool(active.any()):
            return self._outcome(z, code, steps)
        radius = torch.full_like(norm, torch.inf)
        best, best_step = norm, torch.ones_like(norm)
        model = origin = self._model(active, torch.full_like(norm, _FORCING), sloped=True)
        free = active  # samples that take full Newton steps
        for step in range(2, solver.max_steps + 1):
            if step == solver.undamped + 2:
                # What came nearer to a root goes on from where it is.
                back = free & ~(model.norm < origin.norm)
                z, model = where_sample(back, self.z0, z), origin.where(back, model)
                best = torch.where(free, model.norm, best)
                free = torch.zeros_like(free)
            p, length, predicted = model.dogleg(radius)
            p = where_sample(free, model.newton, p)
            moved = [(x + d).to(x.dtype) for x, d in zip(z, p, strict=True)]
            trial = where_sample(active, moved, z)
            eps = torch.finfo(norm.dtype).eps
            still = _same(trial, z) | (~free & ~(predicted < model.norm * (1 - 4 * eps)))
            norm = self._linearize(trial)
            # Of squares, as products: the squares may overflow.
            ratio = (1 - norm / model.norm) * (1 + norm / model.norm)
            hoped = (1 - predicted / model.norm) * (1 + predicted / model.norm)
            taken = torch.where(free, norm <= _GROWTH * origin.norm, ratio > _ACCEPT * hoped)
            taken = taken & active & ~still
            held = active & ~free
            radius = torch.where(held & ~(ratio >= 0.25 * hoped), 0.25 * length, radius)
            wide = held & (ratio > 0.75 * hoped)
            radius = torch.where(wide, torch.maximum(radius, 2 * length), radius)
            forcing = (0.9 * (norm / model.norm).square()).clamp(1e-6, _FORCING)
            z = where_sample(taken, trial, z)
            steps = torch.where(active, float(step), steps)
            passed = self._passes(z, norm, taken)
            fell = taken & (norm < _FALL * best)
            best = torch.where(fell, norm, best)
            best_step = torch.where(fell | free, float(step), best_step)
            back = free & ~taken
            z, model = where_sample(back, self.z0, z), origin.where(back, model)
            best = torch.where(back, origin.norm, best)
            late = still | (step - best_step >= solver.patience)
            stuck = active & ~passed & ~back & late
            code = torch.where(passed, int(Result.converged), code)
            code = torch.where(stuck, int(Result.stagnated), code)
            active = active & ~passed & ~stuck
            free = free & taken & active
            anew = taken & active
            self.syncs += 1
            reads = [active.any(), anew.any(), (anew & ~free).any()]
            some, more, sloped = torch.stack(reads).tolist()
            if not some:
                break
            if more and step < solver.max_steps:
                sloped = sloped or step > solver.undamped
                model = self._model(anew, forcing, sloped=sloped).where(anew, model)
        return self._outcome(z, code, steps)

    def _push(self, v: Leaves) -> Leaves:
        self.evaluations += 1
        return self.at.push(v)

    def _reference(self, z: Leaves) -> tuple[Tensor, Tensor]:
        """‖Jw‖, |w| = |z| + |z − z0|, and about ‖J‖: ‖Jw‖/‖w‖ of this w, or of ones where w = 0."""
        w = []
        for x, x0 in zip(self.at.wide(z), self.at.wide(self.z0), strict=True):
            w.append(x + torch.where(x < 0, -1.0, 1.0) * (x - x0).abs())
        none = sample_norm(w) == 0
        w = where_sample(none, [torch.ones_like(x) for x in w], w)
        image = sample_norm(self._push(w))
        return torch.where(none, 0.0, image), image / sample_norm(w)

    def _passes(self, z: Leaves, norm: Tensor, asked: Tensor) -> Tensor:
        """Which of the samples ``asked`` have converged; z is where f was evaluated for them."""
        allowed = torch.full_like(norm, self.solver.atol)
        if self.rtol > 0:
            reference = self._reference(z)[0]
            allowed = allowed + self.rtol * reference.nan_to_num(0.0, 0.0, 0.0)
        return asked & (norm <= allowed)

    def _model(self, wanted: Tensor, forcing: Tensor, *, sloped: bool) -> _Model:
        """The model at z for the samples ``wanted``; of others nothing is computed.

        Without ``sloped`` the Cauchy point is left out: full Newton steps do not need it.
        """
        at, norm = self.at, sample_norm(self.at.f)
        unit = torch.where(wanted, power_of_two(norm), 1.0)
        f = keep_samples(wanted, at.f)
        right = scale_samples(-1.0 / unit, f)
        size = sample_norm(right)

        def product(v: Leaves) -> Leaves:
            return keep_samples(wanted, self._push(v))

        done = self.solver.linear.run(product, right, None, size, forcing * size)
        self.syncs += done.syncs
        newton = keep_samples(wanted, scale_samples(unit, done.value))
        if sloped:
            self.evaluations += 1
            gradient = keep_samples(wanted, at.pull(scale_samples(1.0 / unit, f)))
            slope, tiny = sample_norm(gradient), torch.finfo(norm.dtype).tiny
            gradient = scale_samples(1.0 / slope.clamp_min(tiny), gradient)
            image = product(gradient)
            # The least ‖f − c·Jg‖ is at c = ‖Jᵀf‖/‖Jg‖².
            size = sample_norm(image)
            cauchy = (slope / size) * (unit / size)
            cauchy = torch.where(torch.isfinite(cauchy), cauchy, 0.0)
        else:
            gradient = image = [torch.zeros_like(x) for x in f]
            cauchy = torch.zeros_like(norm)
        return _Model(f, norm, newton, done.relative * norm, gradient, image, cauchy)

    def _outcome(self, z: Leaves, code: Tensor, steps: Tensor) -> tuple[Iterated, Tensor]:
        """f is evaluated once more, at the answers of all samples together."""
        norm = self._linearize(z)
        reference, slope = self._reference(z)
        allowed = self.solver.atol + self.rtol * reference.nan_to_num(0.0, 0.0, 0.0)
        slack = 4 * torch.finfo(norm.dtype).eps * reference  # f may round differently each time
        lost = (code == int(Result.converged)) & ~(norm <= 1.01 * allowed + slack)
        code = torch.where(lost, int(Result.stagnated), code).to(torch.int8)
        relative = torch.where(norm == 0, norm, norm / reference)
        self.syncs += 1
        found = torch.bincount(code.long(), minlength=len(Result)).tolist()
        counts = {c: found[c] for c in Result if found[c]}
        numbers = norm, relative, self.evaluations, self.syncs, counts
        done = Iterated(z, code, steps.to(torch.int32), *numbers)
        if set(counts) != {Result.converged}:
            done.coupled = self.fn.couples(z, self.at.narrow())
        return done, slope


def _same(a: Leaves, b: Leaves) -> Tensor:
    """[B] bool: whether no entry differs."""
    equal = [rows(x == y).all(1) for x, y in zip(a, b, strict=True)]
    return torch.stack(equal).all(0)
