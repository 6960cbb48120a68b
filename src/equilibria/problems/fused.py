"""The fused path: a fixed number of steps on a convolutional problem, with nothing between them.

    z ← T_τ(z) = ReLU((1 − τ)z − τWᵀm(Wz − c)),   m(r) = e·rM patch by patch (Gaussian),
    z ← T_τ(z) = (1 − τ)z + (τ/ν)Wᵀσ(Wz + c),     σ = ReLU (OptEq's state), ``max_steps`` times

and, in the backward pass, u = Σₖ (Jᵀ)ᵏ g for k < ``steps`` of Phantom(form="neumann"), J = ∂T_τ/∂z:

    Jᵀu = (1 − τ)d − τWᵀH(Wd),   d = u where T_τ(z) > 0,   H = the derivative of m (symmetric),
    Jᵀu = (1 − τ)u + (τ/ν)WᵀD(Wu),   D = 1 where Wz + c > 0, else 0.

The answer is that of the general path (any solver, any adjoint, autograd). What is saved is
everything around the arithmetic: one kernel a message, the update inside the second convolution,
no pass for tests and clean-ups, no graph in the forward pass. For the linear kernel σ(Wz + c) is
one kernel of cuDNN; τ/ν is put into Wᵀ.

J and the gradients of c and W are those of the last step: z there is the state before it, and the
answer is T_τ(z). The general path evaluates T_τ once more, at the answer: so its gradient after k
steps is the one here after k + 1, at the same cost.

The output is kept for the backward pass: what follows must not change it in place. A sample that
diverges or meets NaN returns its start, gets no gradient and harms no other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equilibria.adjoints import Phantom
from equilibria.engine.adjoint import Adjoint
from equilibria.engine.result import BackwardStats, Solution, Stats
from equilibria.engine.solver import Choice, Solver
from equilibria.engine.transforms import functorch_active, transforms_active
from equilibria.ops.convolutions import convolve, convolve_add_relu, padding
from equilibria.ops.gaussian_steps import (
    PatchMessage,
    ReluMessage,
    blank,
    judge,
    residual_norms,
    threshold_sum,
)
from equilibria.solvers import Picard, ProximalGradient

from .gaussian import Gaussian
from .kernels import Activated
from .operators import ConvOperator
from .parts import times
from .priors import Free, NonNegative
from .problem import Problem


def serves(problem: Problem, choice: Choice, adjoint: Adjoint | None) -> bool:
    """Whether the fused path gives what these options ask for."""
    q = problem.coupling
    if problem.regularizer is not None or not problem.ridge:
        return False
    if type(q) is Activated:
        known = type(problem.prior) is Free and type(q.prior) is NonNegative
    elif type(q) is Gaussian:
        cut = q.patches is not None and q.metric is not None
        known = type(problem.prior) is NonNegative and cut
    else:
        return False
    if not known or not _plain(q.operator, q.c):
        return False
    if not isinstance(choice.tau, float) or not _steps_alone(choice.solver):
        return False
    if transforms_active() or functorch_active():
        return False
    if not torch.is_grad_enabled():
        return True
    return isinstance(adjoint, Phantom) and adjoint.form == "neumann" and adjoint.damping == 1.0


def _steps_alone(solver: Solver) -> bool:
    """Whether a step of the solver is the map itself, a given number of times."""
    if not solver.fixed_steps:
        return False
    if isinstance(solver, ProximalGradient):
        return not solver.accelerate
    return type(solver) is Picard and solver.damping == 1.0


def _plain(w: object, c: Tensor) -> bool:
    """A convolution that keeps the pixels, in the precision of c."""
    if type(w) is not ConvOperator or w.groups != 1 or w.stride != (1, 1):
        return False
    kh, kw = w.weight.shape[2:]
    return kh % 2 == kw % 2 == 1 and w.padding == (kh // 2, kw // 2) and w.weight.dtype == c.dtype


@dataclass
class _Solve:
    """What is fixed in one solve, and what it found."""

    tau: float
    steps: int
    terms: int
    cut: tuple[int, int] | None  # the Gaussian's patches; None: the linear kernel
    nu: float
    divergence: float
    zero_start: bool
    derived: bool  # whether a backward pass may follow
    kernels: tuple[Tensor, ...] = ()  # W and its flipped kernel, as the maps lie
    found: tuple[Tensor, ...] = ()  # what ``judge`` says

    def __post_init__(self) -> None:
        linear = self.cut is None
        self.kappa = 1.0 - self.tau
        self.inner = 1.0 if linear else -self.tau  # the factor of the message
        self.outer = self.tau / self.nu if linear else 1.0  # and that of Wᵀ
        self.sign = 1.0 if linear else -1.0  # of c in the message

    def kernel(
        self, c: Tensor, metric: Tensor | None, gamma: Tensor | None, failed: Tensor | None = None
    ) -> PatchMessage | ReluMessage:
        if self.cut is None:
            return ReluMessage(c, failed)
        assert metric is not None
        assert gamma is not None
        return PatchMessage(c, metric, gamma, self.cut, failed)

    def advance(self, message: Tensor, flipped: Tensor, z: Tensor | None) -> Tensor:
        """T_τ(z)."""
        if self.cut is not None:
            return convolve_add_relu(message, flipped, z, self.kappa)
        found = convolve(message, flipped)
        return found if z is None or self.kappa == 0.0 else found.add_(z, alpha=self.kappa)


def fused_solve(
    problem: Problem, z0: Tensor, choice: Choice, adjoint: Adjoint | None, *, zero_start: bool
) -> Solution[Tensor]:
    """Solve from z0 [B, C, H, W]; ``zero_start`` says that z0 = 0, which saves a convolution."""
    q = problem.coupling
    assert isinstance(q, Gaussian | Activated)
    assert isinstance(q.operator, ConvOperator)
    assert isinstance(choice.tau, float)
    q.check_state(z0)
    cut, metric, gamma = None, None, None
    if isinstance(q, Gaussian):
        assert q.patches is not None
        cut, metric, gamma = (q.patches.channels, q.patches.size), q.metric, q.gamma
    run = _Solve(
        tau=choice.tau,
        steps=choice.solver.max_steps,
        terms=adjoint.steps if isinstance(adjoint, Phantom) else 1,
        cut=cut,
        nu=q.nu if isinstance(q, Activated) else 1.0,
        divergence=choice.solver.divergence,
        zero_start=zero_start,
        derived=torch.is_grad_enabled(),
        kernels=q.operator.laid_out(_layout(z0)),
    )
    with torch.autocast(z0.device.type, enabled=False):
        value: Tensor = _FusedSteps.apply(  # type: ignore[no-untyped-call]
            q.c, q.operator.weight, metric, gamma, z0.to(q.c.dtype), run
        )
    _failed, residual, relative, code, steps = run.found
    stats = Stats(steps, residual, relative, run.steps, 0, BackwardStats())
    return Solution(value, code, stats)


class _FusedSteps(torch.autograd.Function):
    """(c, W, M, γ, z₀) ↦ z after ``steps`` steps; gradients by the truncated series."""

    @staticmethod
    def forward(
        ctx: Any,
        c: Tensor,
        weight: Tensor,
        metric: Tensor | None,
        gamma: Tensor | None,
        z0: Tensor,
        run: _Solve,
    ) -> Tensor:
        kernel = run.kernel(c, metric, gamma)
        (weight, flipped), run.kernels = run.kernels, ()
        # At stride 1 the adjoint of a convolution is the one with the flipped kernel.
        flipped = times(run.outer, flipped)
        following: Tensor | None = None if run.zero_start else z0
        for step in range(run.steps):
            z = following
            a = kernel.image(z, weight, first=step == 0)
            following = run.advance(kernel.message(a, run.inner), flipped, z)
            if step in (0, run.steps - 1):
                last = residual_norms(following, z)
                if step == 0:
                    first = last
        assert following is not None
        clean = following if run.zero_start else following.clone()
        run.found = judge(clean, first, last, run.divergence, run.steps)
        failed = run.found[0]
        if run.derived:
            if z is not None:
                z = blank(z.clone() if z is z0 else z, failed)
            if run.cut is None:
                assert a is not None
                a = blank(a, failed)
            ctx.run = run
            ctx.save_for_backward(c, weight, flipped, metric, gamma, z, a, clean, failed)
        if run.zero_start:
            return clean
        return torch.where(failed.view(-1, 1, 1, 1), z0, following)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "Phantom(form='neumann') has no second derivative; use Phantom(form='unrolled') or "
                "Implicit()."
            )
        run: _Solve = ctx.run
        g = gradients[0]
        with torch.autocast(g.device.type, enabled=False):  # it may be on around backward()
            return (*_pull(run, ctx.saved_tensors, g, ctx.needs_input_grad), None, None)


def _pull(
    run: _Solve, saved: tuple[Any, ...], gradient: Tensor, needs: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """Gradients of c, W, M and γ."""
    c, weight, flipped, metric, gamma, z, a, active, failed = saved
    kernel = run.kernel(c, metric, gamma, failed)
    g = _as(gradient, active)
    if a is None:
        a = torch.zeros_like(c)
    message = kernel.message(a, run.inner)
    if run.cut is None:
        active = None
        d = g = torch.where(failed.view(-1, 1, 1, 1), 0.0, g)
    else:
        d = torch.ops.aten.threshold_backward(g, active, 0)
    for _ in range(run.terms - 1):
        p = convolve(d, weight)
        dr, _m, _y = kernel.pull(a, p, run.inner, with_metric=False, with_gamma=False)
        d = threshold_sum(active, g, d, convolve(dr, flipped), run.kappa)
    p = convolve(d, weight)
    # The gradient of c, which is that of a but for the sign; all of r's, so M and γ have it too.
    scale = run.sign * run.inner * run.outer
    dc, dm, dgamma = kernel.pull(a, p, scale, with_metric=needs[2], with_gamma=needs[3])
    dw = None
    if needs[1]:
        dw = times(run.outer, _weight_gradient(d, message, weight))
        if z is not None:
            dw = dw.add_(_weight_gradient(z, dc, weight), alpha=run.sign)
    return (
        dc if needs[0] else None,
        dw,
        None if dm is None else -dm.to(metric.dtype),
        None if dgamma is None else -dgamma.to(gamma.dtype),
    )


def _layout(maps: Tensor) -> torch.memory_format:
    """How weights should lie: a convolution would bring them there each time."""
    last = maps.is_contiguous(memory_format=torch.channels_last) and not maps.is_contiguous()
    return torch.channels_last if last else torch.contiguous_format


def _weight_gradient(x: Tensor, g: Tensor, weight: Tensor) -> Tensor:
    """The gradient of ⟨g, Wx⟩ in W."""
    found: Tensor = torch.ops.aten.convolution_backward(
        g, x, weight, None, [1, 1], padding(weight), [1, 1], False, [0, 0], 1, [False, True, False]
    )[1]
    return found


def _as(g: Tensor, like: Tensor) -> Tensor:
    """g in the dtype of ``like``, lying in memory as it does."""
    g = g.to(like.dtype)
    return g if g.stride() == like.stride() else torch.empty_like(like).copy_(g)
