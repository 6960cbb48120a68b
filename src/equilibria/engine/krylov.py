"""Linear systems A x = b by products with A alone: GMRES with restart, and CG.

Every sample has its own Krylov space and its own stopping; where A couples samples, the batch has
one. Small systems, and the bases of half-precision ones, are in float32 or better. What a recursion
believes of its residual holds where A takes samples apart and rounds little. So b − Ax is evaluated
once at the end, of the x that is returned.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .options import check_number, options
from .result import Iterated, Result
from .tree import (
    History,
    Leaves,
    accumulation_dtype,
    add,
    join_samples,
    keep_samples,
    largest_entry,
    part_samples,
    power_of_two,
    sample_dot,
    sample_norm,
    scale_samples,
    subtract,
    where_sample,
)

MatVec = Callable[[Leaves], Leaves]

RTOL = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""The relative tolerance that each dtype can reach."""


@options
class LinearSolver(ABC):
    """Options shared by the Krylov solvers: stop at ‖b − Ax‖ ≤ atol + rtol·‖b‖, per sample."""

    rtol: float | None = None
    """Relative tolerance; None takes one for the dtype (1e-5 in float32, 1e-10 in float64)."""
    atol: float = 0.0
    max_steps: int = 100
    """Products with A, at most. One more evaluates the residual, and where that is too large two
    more tell why."""
    block: int | None = None
    """Steps between two tests; None takes 1 on the CPU and 4 on a GPU."""

    def __post_init__(self) -> None:
        check_number(self, "rtol", low=0.0, optional=True)
        check_number(self, "atol", low=0.0)
        check_number(self, "max_steps", low=1, integer=True)
        check_number(self, "block", low=1, integer=True, optional=True)

    def solve(
        self,
        matvec: MatVec,
        b: Leaves,
        x0: Leaves | None = None,
        *,
        coupled: bool = False,
        group: int | None = None,
    ) -> Iterated:
        """Solve A x = b from x0 (zero if None), and evaluate b − Ax.

        Where that is too large, one more product tells whether A couples samples; if so (or with
        ``coupled``), the system is solved as one: ``group`` samples together, None: all.
        """
        size = len(b[0]) if group is None else group
        if coupled and size > 1:
            return self._solve_joined(matvec, b, x0, size)
        check = _Check(self, matvec, b, x0)
        if check.any_missed and size > 1 and check.couples():
            joined = self._solve_joined(matvec, b, x0, size)
            joined.steps, joined.syncs = joined.steps + check.done.steps, joined.syncs + check.syncs
            return joined
        return check.outcome()

    def _solve_joined(self, matvec: MatVec, b: Leaves, x0: Leaves | None, size: int) -> Iterated:
        """The same with each group of coupled samples as one sample."""

        def whole(v: Leaves) -> Leaves:
            return join_samples(matvec(part_samples(v)), size)

        start = None if x0 is None else join_samples(x0, size)
        return _Check(self, whole, join_samples(b, size), start).outcome().spread(size)

    def _tolerance(self, b: Leaves) -> float:
        """Of the finest leaf: what a coarse one cannot resolve counts as its rounding."""
        return min(RTOL[x.dtype] for x in b) if self.rtol is None else self.rtol

    @abstractmethod
    def run(
        self, matvec: MatVec, b: Leaves, x0: Leaves | None, norm: Tensor, target: Tensor
    ) -> Iterated:
        """The same for a b of ordinary size, with ‖b‖ and the absolute tolerance, [B] each."""

    def block_length(self, device: torch.device) -> int:
        return self.block or (1 if device.type == "cpu" else 4)


class _Check:
    """A solve for each sample by itself; b − Ax of the x that is returned, and what it means where
    it is too large. Norms are in units of ``scale``."""

    def __init__(self, solver: LinearSolver, matvec: MatVec, b: Leaves, x0: Leaves | None) -> None:
        product, right, scale = _ordinary(matvec, b)
        norm, start = sample_norm(right), None
        if x0 is not None:
            wide = [x.to(c.dtype) for x, c in zip(x0, right, strict=True)]
            # Where b = 0 the answer is 0, and no other start comes to a residual of 0.
            start = keep_samples(norm > 0, scale_samples(1.0 / scale, wide))
        target = solver.atol / scale + solver._tolerance(b) * norm
        done = solver.run(product, right, start, norm, target)
        done.value = _restored(done.value, scale, b)
        self.matvec, self.scale, self.done = matvec, scale, done
        self.product = self._apply(done.value)
        self.residual = sample_norm(subtract(right, self.product))
        self.relative = self.residual / norm.clamp_min(torch.finfo(norm.dtype).tiny)
        # Twice the tolerance, because recursions round; and the rounding of b and of Ax ≈ b.
        eps = max(torch.finfo(x.dtype).eps for x in done.value)
        self.norm, self.allowed = norm, 2 * target + 8 * eps * norm
        self.missed = ~(self.residual <= self.allowed)
        believed = self.missed & (done.result == int(Result.converged))
        self.syncs = done.syncs + 1
        self.any_missed, self.surprised = torch.stack([self.missed, believed]).any(1).tolist()

    def _apply(self, x: Leaves) -> Leaves:
        return scale_samples(1.0 / self.scale, _wide(self.matvec(x)))

    def couples(self) -> bool:
        """Is the worst sample's row of Av anything but zero for a v that is zero there?"""
        excess = torch.where(self.missed, self.residual / self.allowed, -1.0).nan_to_num(0.0)
        worst = torch.arange(len(excess), device=excess.device) == excess.argmax()
        x = self.done.value
        some = [torch.arange(v.numel(), device=v.device).cos().to(v.dtype).view_as(v) for v in x]
        found = sample_norm(self.matvec(keep_samples(~worst, some)))
        self.syncs += 1
        size = found.nan_to_num(0.0, 0.0, 0.0).mean()  # another sample may have NaN, and keeps it
        return bool((worst & (found > 4 * torch.finfo(x[0].dtype).eps * size)).any())

    def outcome(self) -> Iterated:
        """What was believed converged and is not, and not because A rounds so much, is not."""
        code, value = self.done.result, self.done.value
        if self.any_missed:  # x, or Ax, may be too large for the dtype of b
            finite = torch.isfinite(self.residual)
            code = torch.where(finite, code, int(Result.nonfinite)).to(torch.int8)
            value = keep_samples(finite, value)
        if self.surprised:
            # A times 1.1x rounds differently from A times x: half-precision or TF32 products.
            again = self._apply([1.1 * v for v in self.done.value])
            again = scale_samples(torch.full_like(self.scale, 1 / 1.1), again)
            noise = sample_norm(subtract(again, self.product))
            # Where it rounds a tenth of b away, x says nothing about the system.
            noise = torch.minimum(16 * noise, 0.1 * self.norm)
            wrong = self.missed & ~(self.residual <= self.allowed + noise)
            wrong = wrong & (code == int(Result.converged))
            code = torch.where(wrong, int(Result.stagnated), code).to(torch.int8)
        said: dict[str, Any] = {"residual": self.residual * self.scale, "relative": self.relative}
        return replace(self.done, value=value, result=code, **said, syncs=self.syncs)


def _wide(leaves: Leaves) -> Leaves:
    return [x.to(accumulation_dtype(x.dtype)) for x in leaves]


def _ordinary(matvec: MatVec, b: Leaves) -> tuple[MatVec, Leaves, Tensor]:
    """A on vectors of float32 or better, and b in units [B] in which it is near 1.

    A itself still sees the dtype of b. Squares of small or large entries neither vanish nor
    overflow. Powers of two: no digit of the answer changes.
    """
    wide = _wide(b)

    def product(v: Leaves) -> Leaves:
        return _wide(matvec([x.to(y.dtype) for x, y in zip(v, b, strict=True)]))

    largest = torch.stack([largest_entry(x).to(wide[0].dtype) for x in wide]).amax(0)
    scale = power_of_two(largest)
    return product, scale_samples(1.0 / scale, wide), scale


def _restored(x: Leaves, scale: Tensor, like: Leaves) -> Leaves:
    """x in the units and the dtypes of the system that was given."""
    return [v.to(b.dtype) for v, b in zip(scale_samples(scale, x), like, strict=True)]


def _begin(matvec: MatVec, b: Leaves, x0: Leaves | None) -> tuple[Leaves, Leaves, int]:
    """The start x, its residual b − Ax, and the products that this cost."""
    if x0 is None:
        return [torch.zeros_like(v) for v in b], b, 0
    return x0, subtract(b, matvec(x0)), 1


def _finish(
    x: Leaves, done: Tensor, stuck: Tensor, steps: Tensor, left: Tensor, norm: Tensor, syncs: int
) -> Iterated:
    """The outcome; ``left`` is ‖b − Ax‖, ``norm`` ‖b‖. Who gives A counts the products with it."""
    relative = left / norm.clamp_min(torch.finfo(norm.dtype).tiny)
    code = torch.where(done, int(Result.converged), int(Result.max_steps))
    code = torch.where(stuck, int(Result.stagnated), code)
    finite = torch.isfinite(sample_norm(x)) & torch.isfinite(relative)
    code = torch.where(finite, code, int(Result.nonfinite)).to(torch.int8)
    x = keep_samples(finite, x)
    return Iterated(x, code, steps.to(torch.int32), left, relative, evaluations=0, syncs=syncs)


@options
class GMRES(LinearSolver):
    """Least ‖b − Ax‖ over the Krylov space of A, restarted every ``restart`` products.

    The residual norm is known at each step without solving: with n the left null vector of the
    Hessenberg matrix H̄ (n₀ = 1), min_y ‖βe₁ − H̄y‖ = β/‖n‖, and a new column adds one entry to n.
    """

    restart: int = 20
    """Size of the Krylov space before it is started anew; memory is restart + 3 states."""

    def __post_init__(self) -> None:
        LinearSolver.__post_init__(self)
        check_number(self, "restart", low=1, integer=True)

    def solve_blind(self, matvec: MatVec, b: Leaves) -> Leaves:
        """One cycle of ``restart`` products without a test: for a compiler, which cannot read."""
        product, right, scale = _ordinary(matvec, b)
        norm = sample_norm(right)
        limit = min(self.restart, self.max_steps)
        cycle = _Cycle(product, right, norm, norm == 0, limit)
        weight = torch.ones_like(norm)
        for _ in range(limit):
            weight = cycle.extend(weight)
        cycle.columns_of = torch.full_like(norm, limit)
        return _restored(cycle.correction(), scale, b)

    def run(
        self, matvec: MatVec, b: Leaves, x0: Leaves | None, norm: Tensor, target: Tensor
    ) -> Iterated:
        x, residual, taken = _begin(matvec, b, x0)
        current = sample_norm(residual)
        done = current <= target
        steps, stuck = torch.zeros_like(norm), torch.zeros_like(done)
        block, syncs = self.block_length(b[0].device), 0
        while True:
            limit = max(1, min(self.restart, self.max_steps - taken))
            cycle = _Cycle(matvec, residual, current, done | stuck, limit)
            cycle.run(target, block, taken)
            x = add(x, cycle.correction())
            current, done = cycle.current, cycle.done & ~stuck
            steps = torch.where(cycle.steps > 0, cycle.steps, steps)
            taken += cycle.size
            syncs += cycle.syncs
            verify = cycle.any_broken
            if (cycle.all_done and not verify) or taken + 1 > self.max_steps:
                break
            residual = subtract(b, matvec(x))
            taken += 1
            true = sample_norm(residual)
            current = torch.where((done & ~cycle.broken) | stuck, current, true)
            if verify:
                # Where the space was exhausted the estimate rests on rounding: the residual rules.
                done = torch.where(cycle.broken, true <= 2 * target, done)
                stuck = stuck | (cycle.broken & ~done & (true >= 0.99 * cycle.norm))
                syncs += 1
                if bool((done | stuck).all()):
                    break
            if taken + 1 > self.max_steps:
                break
        return _finish(x, done, stuck, steps, current, norm, syncs)


class _Cycle:
    """One Arnoldi run of a GMRES solve. Samples that are done keep still."""

    def __init__(
        self, matvec: MatVec, residual: Leaves, norm: Tensor, done: Tensor, limit: int
    ) -> None:
        self.matvec = matvec
        self.norm = norm
        self.tiny = torch.finfo(norm.dtype).tiny
        self.current, self.done = norm, done
        self.limit = limit
        self.basis = History(residual, limit + 1)
        # Samples that are done stand still: their direction is zero.
        scale = torch.where(done, 0.0, 1.0 / norm.clamp_min(self.tiny))
        self.vector = scale_samples(scale, residual)
        self.basis.write(0, self.vector)
        self.columns: list[Tensor] = []  # column j of H̄: [B, j + 2]
        self.null = [torch.ones_like(norm)]  # entries of the left null vector
        self.columns_of = torch.zeros_like(norm)  # how many columns each sample's answer uses
        self.steps = torch.zeros_like(norm)
        self.broken = torch.zeros_like(done)  # samples whose Krylov space is exhausted
        self.size = self.syncs = 0
        self.all_done = self.any_broken = False

    def run(self, target: Tensor, block: int, taken: int) -> None:
        weight = torch.ones_like(self.norm)  # ‖n‖²
        while self.size < self.limit:
            weight = self.extend(weight)
            last = self.size == self.limit
            if not last and (taken + self.size) % block:
                continue
            estimate = self.norm * weight.rsqrt()
            passed = estimate <= target
            ended = ~self.done if last else passed & ~self.done
            self.syncs += 1
            read = [ended.any(), (passed | self.done).all(), self.broken.any()]
            some, every, self.any_broken = torch.stack(read).tolist()
            if some:
                self.columns_of = torch.where(ended, float(self.size), self.columns_of)
                self.current = torch.where(ended, estimate, self.current)
                self.steps = torch.where(ended, float(taken + self.size), self.steps)
                self.done = self.done | passed
            if every:
                self.all_done = True
                return

    def extend(self, weight: Tensor) -> Tensor:
        """One product with A, orthogonalized twice against the basis; returns the new ‖n‖²."""
        w, column = orthogonalized(self.matvec(self.vector), self.basis)
        length = sample_norm(w)
        # A direction that is rounding noise beside the column is a breakdown: the space is full.
        eps, size = torch.finfo(length.dtype).eps, sample_norm([column])
        length = torch.where(length > 100 * eps * size, length, 0.0)
        self.broken = self.broken | ((length == 0) & ~self.done)
        self.size += 1
        inverse = torch.where(length > 0, 1.0 / length.clamp_min(self.tiny), 0.0)
        self.vector = scale_samples(inverse, w)
        self.basis.write(self.size, self.vector)
        self.columns.append(torch.cat([column, length.unsqueeze(1)], 1))
        null = torch.stack(self.null, 1)
        product = (null * column).sum(1)
        # At a breakdown n·h is either clearly not zero (the system is solved) or is rounding
        # (A is singular and nothing more can be gained).
        solved = product.abs() > 100 * eps * size * torch.linalg.vector_norm(null, dim=1)
        ending = torch.where(solved, 1.0 / eps, 0.0)
        entry = torch.where(length > 0, -product * inverse, ending * weight.sqrt())
        # So sudden a fall of the residual is a breakdown too, seen through rounding.
        self.broken = self.broken | ((entry * entry > weight / eps) & ~self.done)
        self.null.append(entry)
        return weight + entry * entry

    def correction(self) -> Leaves:
        """Σ yⱼvⱼ, y = argmin ‖βe₁ − H̄y‖ over each sample's own columns; zero for earlier ones."""
        size = self.size
        hessenberg = torch.stack(
            [torch.nn.functional.pad(c, (0, size + 1 - c.shape[1])) for c in self.columns], 2
        )
        unused = torch.arange(size, device=self.norm.device) >= self.columns_of.unsqueeze(1)
        hessenberg = torch.where(unused.unsqueeze(1), 0.0, hessenberg)
        if hessenberg.dtype == torch.float32:
            solved = _by_normal_equations(hessenberg, self.norm, unused)
        else:
            solved = _by_qr(hessenberg, self.norm, unused)
        padded = torch.nn.functional.pad(solved, (0, 1))
        return self.basis.combine(padded[:, : self.basis.used])


def orthogonalized(w: Leaves, basis: History) -> tuple[Leaves, Tensor]:
    """w without its part in the span of the basis, and the coefficients of that part, [B, used].

    Twice, so that the rounding of the first does not stay.
    """
    column = basis.dot(w)
    w = subtract(w, basis.combine(column))
    again = basis.dot(w)
    return subtract(w, basis.combine(again)), (column + again).squeeze(1)


def _by_qr(hessenberg: Tensor, beta: Tensor, unused: Tensor) -> Tensor:
    """argmin ‖βe₁ − H̄y‖, [B, n]; unused columns and directions of a breakdown get zero."""
    q, r = torch.linalg.qr(hessenberg)
    right = beta.unsqueeze(1) * q[:, 0, :]
    diagonal = torch.diagonal(r, dim1=1, dim2=2)
    largest = diagonal.abs().amax(1, keepdim=True)
    dead = unused | (diagonal.abs() <= 64 * torch.finfo(r.dtype).eps * largest)
    right = torch.where(dead, 0.0, right)
    eye = torch.eye(r.shape[1], dtype=r.dtype, device=r.device)
    r = torch.where(dead.unsqueeze(1) | dead.unsqueeze(2), eye, r)
    solved: Tensor = torch.linalg.solve_triangular(r, right.unsqueeze(-1), upper=True)
    return solved.squeeze(-1)


def _by_normal_equations(hessenberg: Tensor, beta: Tensor, unused: Tensor) -> Tensor:
    """The same for float32, in float64: squaring the condition costs no digit that float32 has.

    A batched QR runs matrix by matrix on a GPU; this is one call.
    """
    h = hessenberg.double()
    gram = h.mT @ h
    diagonal = torch.diagonal(gram, dim1=1, dim2=2)
    floor = 1e-13 * diagonal.amax(1, keepdim=True) + torch.finfo(torch.float64).tiny
    empty = unused | (diagonal <= floor)
    shift = torch.where(empty, 1.0, floor)
    right = torch.where(empty, 0.0, beta.double().unsqueeze(1) * h[:, 0, :])
    system = gram + torch.diag_embed(shift)
    solved: Tensor = torch.linalg.solve_ex(system, right.unsqueeze(-1)).result
    return solved.squeeze(-1).to(hessenberg.dtype)


@options
class CG(LinearSolver):
    """Conjugate gradients, for A symmetric positive definite; 4 states of memory.

    A sample that meets a direction with pᵀAp ≤ 0 (A is not positive definite) stops there and is
    reported as not converged.
    """

    def run(
        self, matvec: MatVec, b: Leaves, x0: Leaves | None, norm: Tensor, target: Tensor
    ) -> Iterated:
        x, r, taken = _begin(matvec, b, x0)
        p, rr = r, sample_dot(r, r)
        block = self.block_length(b[0].device)
        active = rr.sqrt() > target
        steps, syncs, tiny = torch.zeros_like(norm), 0, torch.finfo(norm.dtype).tiny
        for step in range(1 + taken, self.max_steps + 1):
            ap = matvec(p)
            curvature = sample_dot(p, ap)
            active = active & (curvature > 0)
            alpha = torch.where(active, rr / curvature.clamp_min(tiny), 0.0)
            x = add(x, scale_samples(alpha, p))
            r = subtract(r, scale_samples(alpha, ap))
            new = sample_dot(r, r)
            steps = torch.where(active, float(step), steps)
            beta = torch.where(active, new / rr.clamp_min(tiny), 0.0)
            p = where_sample(active, add(r, scale_samples(beta, p)), p)
            rr = torch.where(active, new, rr)
            active = active & (rr.sqrt() > target)
            if step % block == 0 or step == self.max_steps:
                syncs += 1
                if not bool(active.any()):
                    break
        left, never = rr.sqrt(), torch.zeros_like(active)
        return _finish(x, left <= target, never, steps, left, norm, syncs)
