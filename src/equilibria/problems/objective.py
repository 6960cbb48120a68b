"""Smooth parts of an objective: any function of yours, and least squares.

    ``q(z) = fn(z, x, theta)``,   ``q(z) = (w/2)|Az - c|^2``

Both are couplings, so they mix with the kernels: ``eq.Gaussian(W, c) + eq.LeastSquares(A, x)``. The
bounds on the Hessian of least squares are proven. Those of a function are given by the user, or
estimated; neither is called proven.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from equilibria.engine.options import shown
from equilibria.engine.transforms import is_captured, transforms_active
from equilibria.engine.tree import sample_norm
from equilibria.problems.kernels import Coupling, Curvature, ImageCoupling, Reasoned, inner
from equilibria.problems.norms import UNIT, sum_error, top_ritz
from equilibria.problems.operators import IdentityOperator, LinearOperator, Weights
from equilibria.problems.parts import in_double, replaced
from equilibria.problems.priors import at_least_float32, step_of_samples

Function = Callable[..., Tensor]
Bounds = tuple[float | Tensor, float | Tensor]

_RITZ = 24  # products with the Hessian to estimate one end of its spectrum
_MARGIN = 1.1  # a Ritz value is from below


def _tensors(tree: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(tree) if isinstance(t, Tensor)]


def _double(part: Any) -> Any:
    """The same numbers in float64, also of modules."""
    return copy.deepcopy(part).double() if isinstance(part, nn.Module) else in_double(part)


class Smooth(Coupling):
    """``q(z) = fn(z, x, theta)``, any function that autograd differentiates twice.

    Gradients and Hessian products are autograd's.

    Args:
        fn: ``[B, *state]`` to one number per sample, ``[B]``. It is called as ``fn(z)``,
            ``fn(z, x)`` or ``fn(z, x, theta)``, with what is given; samples must not mix.
        x: What differs from sample to sample: a tensor ``[B, ...]`` or a tuple of them.
        theta: What all samples share: tensors, modules, a tuple or dict of them.
        bounds: ``(m, L)`` with ``m <= Hessian <= L`` for every ``z``, numbers or ``[B]``. None:
            estimated at the start by Lanczos's method, about 100 Hessian products a solve.
        state: The shape of ``z`` without the batch; None: that of ``x`` (of its first tensor).
    """

    parameters = ("x", "bounds")

    def __init__(
        self,
        fn: Function,
        x: Tensor | tuple[Tensor, ...] | None = None,
        theta: Any = None,
        *,
        bounds: Bounds | None = None,
        state: Sequence[int] | None = None,
    ) -> None:
        if not callable(fn):
            raise TypeError(
                f"smooth got a {type(fn).__name__}, takes a function of z or a Coupling"
            )
        for t in _tensors(x):
            if not t.is_floating_point() or t.ndim < 1:
                raise TypeError(
                    f"x got a tensor {tuple(t.shape)} of {t.dtype}, takes floating point tensors "
                    "[B, ...]; what all samples share belongs in theta"
                )
        if theta is not None and x is None:
            raise TypeError("theta is passed after x, and x was not given; fn may capture it")
        self.x = x if x is None or isinstance(x, Tensor) else tuple(x)
        self.fn, self.theta = fn, theta
        try:
            self.state = None if state is None else torch.Size(state)
        except TypeError:
            takes = "the shape of one tensor, as (8,); of more variables: u, v = z.split((6, 2), 1)"
            raise TypeError(f"state got {state!r}, takes {takes}") from None
        self.bounds = None if bounds is None else _checked(bounds)
        self._given = bounds is not None

    def _call(self, z: Tensor) -> Tensor:
        if z.ndim < 2:
            raise ValueError(
                f"smooth got a state of shape {tuple(z.shape)}, takes [B, ...]: one number per "
                "sample is [B, 1], as x.unsqueeze(1) or with state=(1,)"
            )
        args = [part for part in (self.x, self.theta) if part is not None]
        value: Any = self.fn(z, *args)
        if not isinstance(value, Tensor) or value.shape != z.shape[:1]:
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"smooth returned {got} for a state of shape {tuple(z.shape)}, takes one number "
                f"per sample, ({z.shape[0]},): sum over all dimensions but the first"
            )
        return value

    def value(self, z: Tensor) -> Tensor:
        return at_least_float32(self._call(z))

    def grad(self, z: Tensor) -> Tensor:
        return _derivative(lambda t: self._call(t).sum(), z)

    def hvp(self, z: Tensor, v: Tensor) -> Tensor:
        return _derivative(lambda t: (self.grad(t) * v).sum(), z)

    def curvature(self) -> Curvature:
        if self._given and self.bounds is not None:
            return Curvature(*self.bounds, False, "given as bounds=(m, L)", "given")
        if self.bounds is None:
            self.bounds = self._ends(self.default_start())
        return Curvature(*self.bounds, False, "Ritz values at two states", "estimated")

    @torch.no_grad()
    def _ends(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Ritz values at z and after a gradient step from it, with a margin."""
        low, high = ritz_ends(self, z)
        info = torch.finfo(high.dtype)
        flat = info.tiny + info.eps * sample_norm([self.grad(z)])
        tau = 1.0 / torch.maximum(torch.maximum(high, -low), flat)
        other = ritz_ends(self, shortened(tau, lambda v, _: v, self.grad, z)[1])
        high = _MARGIN * torch.maximum(high, other[1])
        low = torch.minimum(low, other[0])
        # Of a sample that failed nothing is known; its result code will say so.
        known = torch.isfinite(low) & torch.isfinite(high)
        return torch.where(known, low, 0.0), torch.where(known & (high > 0), high, 1.0)

    def local_curvature(self, z: Tensor) -> Curvature:
        if self._given:
            return self.curvature()
        return Curvature(*ritz_ends(self, z), False, "Ritz values at this z", "estimated")

    def check_state(self, z: Tensor) -> None:
        self._call(z)

    def default_start(self, shape: Sequence[int] | None = None) -> Tensor:
        held = _tensors(self.x)
        if not held:
            raise TypeError("smooth without x does not say the shape of z: give z0, or x and state")
        given = held[0].shape[1:] if self.state is None else self.state
        full = (held[0].shape[0], *given) if shape is None else tuple(shape)
        return held[0].new_zeros(full)

    def in_double(self) -> Self:
        bounds = self.bounds if self._given else None
        x, theta, bounds = (pytree.tree_map(_double, t) for t in (self.x, self.theta, bounds))
        twin = replaced(self, x=x, theta=theta, bounds=bounds)
        if not self.inputs():
            return twin
        try:
            twin.value(twin.default_start())
        except RuntimeError as error:
            raise TypeError(
                f"certify evaluates in float64, and smooth does not take it ({error}). Pass the "
                "tensors that it captures as theta, or make them float64."
            ) from error
        return twin


@torch.no_grad()
def shortened(
    tau: Tensor, prox: Callable[[Tensor, Any], Tensor], grad: Function, z: Tensor
) -> tuple[Tensor, Tensor]:
    """``tau`` halved until ``<g(u) - g(z), u - z> <= |u - z|^2/tau``; ``u = prox(z - tau g(z))``.

    So a solve does not diverge where L was estimated too small. The host reads each test: compiled
    code, CUDA graphs and torch.func keep ``tau``.
    """
    fixed = transforms_active() or torch.compiler.is_compiling() or is_captured(z)
    slope = grad(z)
    rounding = 64 * torch.finfo(slope.dtype).eps * sample_norm([slope])
    for _ in range(100):
        step = step_of_samples(tau, z)
        u = prox((z - step * slope).to(z.dtype), step)
        move = (u - z).to(slope.dtype)
        square = inner(move, move)
        bent = inner(grad(u) - slope, move) - rounding * square.sqrt()
        steep = ~(tau * bent <= 1.001 * square) & rounding.isfinite()
        if fixed or not steep.any():
            break
        tau = torch.where(steep, 0.5 * tau, tau)
    return tau, u


def _checked(bounds: Bounds) -> Bounds:
    try:
        m, upper = bounds
    except (TypeError, ValueError):
        raise TypeError(f"bounds got {bounds!r}, takes a pair (m, L)") from None
    low, high = (torch.as_tensor(t, dtype=torch.float64) for t in (m, upper))
    if low.ndim > 1 or high.ndim > 1 or not bool((low <= high).all() & (high > 0).all()):
        raise ValueError(
            f"bounds got {bounds!r}, takes (m, L) with m <= L and L > 0: numbers, or one per sample"
        )
    return tuple(t if isinstance(t, Tensor) and t.ndim else float(t) for t in (m, upper))  # type: ignore[return-value]


def _derivative(fn: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    """The gradient of a scalar function; it can be differentiated where gradients are enabled."""
    if transforms_active() or torch.compiler.is_compiling():
        found: Tensor = torch.func.grad(fn)(z)
        return found
    live = torch.is_grad_enabled()
    with torch.enable_grad():
        point = z if live and z.requires_grad else z.detach().requires_grad_()
        value = fn(point)
        if not value.requires_grad:
            return torch.zeros_like(z)
        slope: Any = torch.autograd.grad(value, point, create_graph=live, allow_unused=True)[0]
    return torch.zeros_like(z) if slope is None else slope


@torch.no_grad()
def ritz_ends(q: Coupling, z: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers inside of the spectrum of the Hessian at z, near its ends. ``[B]`` each."""
    # As good as random, which vmap refuses.
    place = torch.arange(1, 1 + math.prod(z.shape[1:]), dtype=torch.float64)
    start = (43758.5453 * (12.9898 * place).sin()).frac().view(z.shape[1:]).to(z).expand_as(z)
    high = top_ritz(lambda v: q.hvp(z, v), start, steps=_RITZ)
    return -top_ritz(lambda v: -q.hvp(z, v), start, steps=_RITZ), high


def _float(weight: float | Tensor) -> float:
    return float(weight.detach() if isinstance(weight, Tensor) else weight)


class LeastSquares(ImageCoupling):
    """``q(z) = (weight/2)|Az - c|^2``: a fit to ``c``, ``[B, *out]``; ``A = None``: to ``c = z``.

    ``weight sigma_min(A)^2 <= Hessian <= weight |A|^2``. ``weight`` is a positive number, or a
    tensor with one number (learned).
    """

    def __init__(self, A: Weights | None, c: Tensor, weight: float | Tensor = 1.0) -> None:
        super().__init__(IdentityOperator(c) if A is None else A, c)
        if (isinstance(weight, Tensor) and weight.numel() != 1) or not _float(weight) > 0.0:
            raise ValueError(f"LeastSquares(weight={shown(weight)}): expected one positive number.")
        self.weight = weight

    def _residual(self, z: Tensor) -> Tensor:
        self.check_state(z)
        return self.operator(z) - self.c

    def value(self, z: Tensor) -> Tensor:
        r = self._residual(z)
        return 0.5 * self.weight * inner(r, r)

    def grad(self, z: Tensor) -> Tensor:
        return self.weight * self.operator.adjoint(self._residual(z), z.shape[1:])

    def hvp(self, z: Tensor, v: Tensor) -> Tensor:
        return self.weight * self.operator.adjoint(self.operator(v), z.shape[1:])

    def curvature(self) -> Curvature:
        w, most = _float(self.weight), self.norm_upper()
        least = self._once("least", self.operator.norm_lower)
        low, high = w * least * least * (1.0 - 4 * UNIT), w * most * most * (1.0 + 4 * UNIT)
        info = torch.finfo(at_least_float32(self.c).dtype)
        if 0.0 < most < math.inf and not info.tiny <= high <= info.max:
            raise ValueError(
                f"LeastSquares: weight·|A|² is beyond {info.dtype} for |A| = {most:.3g} and the "
                f"weight {w:.3g}. Scale A and the data, or use float64."
            )
        return Curvature(low, high, True, "every z: the Hessian is weight AᵀA")

    def hessian_lipschitz(self) -> float:
        return 0.0

    def _rounding(self, z: Tensor, size: LinearOperator, terms: int) -> Tensor:
        r = self._residual(z).abs()
        off = sum_error(terms + 2) * (size(z.abs()) + self.c.abs() + r)
        return _float(self.weight) * (1 + 8 * UNIT) * size.adjoint(off + 4 * UNIT * r, z.shape[1:])

    def lipschitz(self, modulus: float, rest: Tensor, reach: float, *, in_x: bool) -> Reasoned:
        """``weight |A| reach/m``: the derivative of the gradient in c is ``-weight A'``."""
        return self._steep() * reach / modulus, "every input: weight ‖A‖/m·‖U‖"

    def _steep(self) -> float:
        return _float(self.weight) * self.norm_upper() * (1.0 + 1e-14)

    def local_lipschitz(
        self, z: Tensor, error: Tensor, modulus: Tensor, local: Tensor, rest: Tensor
    ) -> tuple[Tensor | None, str]:
        m = modulus.expand_as(error)
        return torch.where(m > 0, self._steep() / m, math.inf), "as for every input"
