"""Bounds on the operator norm of weights, ‖W‖₂ ≤ bound, through torch.nn.utils.parametrize.

``layer.W.weight`` is always the bounded weight, ``layer.W.parametrizations.weight.original`` what
the optimizer moves.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from equilibria.engine.options import check_number, options
from equilibria.problems.operators import ConvOperator, DenseOperator, LinearOperator

__all__ = ["Constraint", "NormBounded", "OperatorNorm", "WeightNormalized", "constrain"]

_KRYLOV = 24  # vectors of one Lanczos run
_RESTARTS = 40


@options
class NormBounded:
    """‖W‖₂ ≤ bound: W is scaled by min(1, bound/σ(W)), and the gradient passes through σ.

    σ comes from power iteration and is an estimate from below: while weights train the norm may
    exceed the bound (see ``steps``), and on maps larger than ``size`` × ``size`` by a little more
    (3 × 3 on any map, against 16 × 16 pixels: 0.5% for 64 channels, 2% for 3). A certificate
    therefore takes ``operator.norm_upper()``, which is proven, not this number.
    """

    bound: float = 0.95
    """The wanted bound, positive."""
    size: int = 16
    """Convolutions: pixels of the map on which σ is taken."""
    steps: int = 4
    """Power iterations for each evaluation in training mode. While weights move fast the norm runs
    ahead of its estimate: under a bound of 0.95, in the first epochs of small convolutional layers
    at a high learning rate, it reached 1.7 with one and 1.25 with four (benchmarks/norm_lag.py)."""

    def __post_init__(self) -> None:
        check_number(self, "bound", low=0.0, low_open=True)
        check_number(self, "size", low=1, integer=True)
        check_number(self, "steps", low=1, integer=True)


@options
class WeightNormalized:
    """W = g·V/‖V‖, one g an output (Salimans and Kingma), as in the papers; no bound on ‖W‖₂."""


Constraint = NormBounded | WeightNormalized | None


class OperatorNorm(nn.Module):
    """W ↦ W·min(1, bound/σ(W)),  σ(W) = ‖Wv‖ = uᵀWv,  v the leading right singular vector.

    W is a matrix [out, in] or a convolution kernel [out, in/groups, k, k]; σ of a kernel is that of
    the zero-padded convolution itself on a ``size`` × ``size`` map, not of the reshaped kernel.
    v is a buffer: converged when the parametrization is registered or a weight is assigned, moved
    by ``steps`` power iterations for each evaluation in training mode, and fixed in eval mode, so
    that eval is deterministic. Derivatives take v as a constant: the first is that of σ itself,
    dσ = ⟨u vᵀ, dW⟩.

    A weight that is assigned (``layer.W.weight = value``) and exceeds the bound is scaled onto it.
    """

    v: Tensor | None

    def __init__(
        self,
        bound: float,
        *,
        size: int = 16,
        steps: int = 4,
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] | str = "same",
        groups: int = 1,
    ) -> None:
        super().__init__()
        checked = NormBounded(bound=bound, size=size, steps=steps)
        self.bound, self.size, self.steps = checked.bound, checked.size, checked.steps
        self.stride, self.padding, self.groups = stride, padding, groups
        self.register_buffer("v", None)

    def operator(self, weight: Tensor) -> LinearOperator:
        """The linear map whose norm is bounded."""
        if weight.ndim == 2:
            return DenseOperator(weight)
        if weight.ndim == 4:
            return ConvOperator(weight, self.stride, self.padding, self.groups)
        raise ValueError(
            "OperatorNorm bounds a matrix [out, in] or a kernel [out, in, k, k], got a weight of "
            f"shape {tuple(weight.shape)}."
        )

    def sigma(self, weight: Tensor) -> Tensor:
        """‖Wv‖, in float32 or better, with its gradient: a scalar."""
        work = torch.promote_types(weight.dtype, torch.float32)
        with without_autocast(weight):
            # A clone: the buffer moves in place, and an older graph may still need this value.
            v = _unit(self._vector().to(work, copy=True))
            norm: Tensor = torch.linalg.vector_norm(self.operator(weight.to(work))(v))
        return norm

    def excess(self, weight: Tensor) -> Tensor:
        """max(1, σ/bound), exactly 1 inside the bound; in training mode after power iterations."""
        if self.training:
            self._iterate(weight)
        return (self.sigma(weight) / self.bound).clamp_min(1.0)

    def forward(self, weight: Tensor) -> Tensor:
        return (weight / self.excess(weight)).to(weight.dtype)

    @torch.no_grad()
    def right_inverse(self, weight: Tensor) -> Tensor:
        """The weight itself; v is converged on it."""
        work = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
        shape = (1, *self._input_shape(weight))
        if weight.is_meta:
            found = weight.new_empty(shape)
        elif not bool((work.abs() < torch.finfo(work.dtype).max ** 0.4).all()):
            why = "holds NaN or infinite entries, or some whose squares overflow"
            raise ValueError(f"OperatorNorm: the weight {why}.")
        else:
            unit = work.abs().amax().clamp_min(torch.finfo(work.dtype).tiny)  # no square overflows
            found = leading_vector(self.operator(work / unit), shape).to(weight.dtype)
        if self.v is not None and self.v.shape == found.shape:
            self.v.copy_(found)
        else:
            self.v = found
        return weight

    def _vector(self) -> Tensor:
        if self.v is None:
            raise RuntimeError(
                "OperatorNorm has not seen a weight yet: register it with constrain(module, "
                "'weight', NormBounded(...)) or torch.nn.utils.parametrize."
            )
        return self.v

    def _input_shape(self, weight: Tensor) -> tuple[int, ...]:
        if weight.ndim == 2:
            return (weight.shape[1],)
        return (weight.shape[1] * self.groups, self.size, self.size)

    @torch.no_grad()
    def _iterate(self, weight: Tensor) -> None:
        """v ← WᵀWv, ``steps`` times, its largest entry 1: the sum of its squares may overflow."""
        work = torch.promote_types(weight.dtype, torch.float32)
        stored = self._vector()
        with without_autocast(weight):
            w = self.operator(weight.detach().to(work))
            v = stored.to(work)
            for _ in range(self.steps):
                v = w.adjoint(w(v), v.shape[1:])
                size = torch.linalg.vector_norm(v, torch.inf)
                v = v / size.clamp_min(torch.finfo(work).tiny)
            # Where W is still zero v stays: from zero it would never come back.
            v = torch.where((size > 0) & (size < torch.inf), v, stored)
        stored.copy_(v)

    def extra_repr(self) -> str:
        return f"bound={self.bound}, size={self.size}, steps={self.steps}"


class RowNorm(nn.Module):
    """(g, V) ↦ g·V/‖V‖ with one norm for each output.

    As torch's ``weight_norm``, with its state_dict; torch's leaves a hook that cannot be pickled.
    """

    def forward(self, g: Tensor, v: Tensor) -> Tensor:
        wide = v.to(torch.promote_types(v.dtype, torch.float32))
        norm = self._norm(wide).clamp_min(torch.finfo(wide.dtype).tiny)
        return (g * (wide / norm)).to(v.dtype)

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        g = self._norm(weight)
        if not weight.is_meta and not bool(g.isfinite().all()):
            raise ValueError(
                "WeightNormalized: the weight holds NaN or infinite entries, or rows whose norm is "
                f"beyond {weight.dtype}."
            )
        return g, weight

    def _norm(self, v: Tensor) -> Tensor:
        rest = list(range(1, v.ndim))  # in units of the largest entry no square overflows
        unit = v.detach().abs().amax(rest, keepdim=True).clamp_min(torch.finfo(v.dtype).tiny)
        norm: Tensor = unit * torch.linalg.vector_norm(v / unit, dim=rest, keepdim=True)
        return norm


def without_autocast(like: Tensor) -> contextlib.AbstractContextManager[object]:
    """Full precision inside, where the device knows autocast at all (meta does not)."""
    if like.is_meta:
        return contextlib.nullcontext()
    return torch.autocast(like.device.type, enabled=False)


def _unit(v: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(v)
    return v / norm.clamp_min(torch.finfo(v.dtype).tiny)


@torch.no_grad()
def leading_vector(w: LinearOperator, shape: tuple[int, ...]) -> Tensor:
    """The leading right singular vector of W by restarted Lanczos on WᵀW. shape [1, *in] → same.

    The start is fixed: no random numbers of the caller are used up.
    """
    source = torch.Generator("cpu").manual_seed(0)
    # The device is named: the caller may be inside `with torch.device("cuda")`.
    start = torch.randn(shape, generator=source, dtype=torch.float64, device="cpu")
    v = _unit(start.to(w.device, w.dtype))
    # ‖WᵀWv − σ²v‖ ≤ tolerance·σ² bounds the relative error of σ² by its tolerance; as a rule the
    # error is its square, and training goes on refining v anyway.
    tolerance = 1e-6 if v.dtype == torch.float64 else 1e-3
    breakdown = torch.finfo(v.dtype).eps ** 0.5
    for _ in range(_RESTARTS):
        basis, images = [v.flatten()], []
        while True:
            last = basis[-1]
            images.append(w.adjoint(w(last.view(shape)), shape[1:]).flatten())
            rest = images[-1]
            for _again in range(2):  # twice is enough to be orthogonal to rounding
                known = torch.stack(basis)
                rest = rest - known.mT @ (known @ rest)
            size = torch.linalg.vector_norm(rest)
            scale = torch.linalg.vector_norm(images[0])
            if len(basis) == min(_KRYLOV, v.numel()) or not bool(size > breakdown * scale):
                break
            basis.append(rest / size)
        known, mapped = torch.stack(basis), torch.stack(images)
        projected = known @ mapped.mT
        _values, vectors = torch.linalg.eigh(0.5 * (projected + projected.mT))
        top = vectors[:, -1]
        v = _unit((top @ known).view(shape))
        gram_v = top @ mapped
        theta = torch.linalg.vector_norm(gram_v)
        if not bool(torch.linalg.vector_norm(gram_v - theta * v.flatten()) > tolerance * theta):
            break
    return v


def constrain(module: nn.Module, name: str, spec: Constraint) -> nn.Module:
    """Put the parameter ``name`` of ``module`` under a constraint, in place; None leaves it free.

    Convolutions (nn.Conv2d) are bounded with their own stride, padding and groups. The constrained
    module also pickles, which torch's parametrized modules do not by themselves.
    """
    if spec is None:
        return module
    if isinstance(spec, NormBounded):
        made: dict[str, Any] = {}
        if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
            plain = isinstance(module, nn.Conv2d) and module.padding_mode == "zeros"
            if not plain or tuple(module.dilation) != (1, 1):
                raise ValueError(
                    f"NormBounded takes nn.Conv2d, zero-padded, of dilation 1, got {module}."
                )
            padding = (0, 0) if module.padding == "valid" else module.padding
            made = {"stride": module.stride, "padding": padding, "groups": module.groups}
        bounded = OperatorNorm(spec.bound, size=spec.size, steps=spec.steps, **made)
        parametrize.register_parametrization(module, name, bounded)
    elif isinstance(spec, WeightNormalized):
        parametrize.register_parametrization(module, name, RowNorm(), unsafe=True)
    else:
        raise TypeError(
            f"constraint={spec!r}: expected NormBounded(bound=...), WeightNormalized() or None."
        )
    _make_picklable(module)
    return module


def _make_picklable(module: nn.Module) -> None:
    """A parametrized module has a class of its own, made on the fly: teach it to be rebuilt."""
    type(module).__reduce_ex__ = _reduce  # type: ignore[assignment, method-assign]


def _reduce(module: nn.Module, protocol: Any) -> tuple[Any, ...]:
    base: Any = type(module).__bases__[0]
    names = tuple(getattr(module, "parametrizations", ()))
    return _rebuild, (base, names), base.__getstate__(module)


def _rebuild(base: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    """An empty module with its parametrized properties; pickle fills in the state afterwards."""
    module = base.__new__(base)
    nn.Module.__init__(module)
    for name in names:
        module.register_buffer(name, torch.empty(0))
        parametrize.register_parametrization(module, name, nn.Identity(), unsafe=True)
    _make_picklable(module)
    return module


@torch.no_grad()
def settle_norms(model: nn.Module) -> None:
    """Converge the singular vectors of all norm-bounded weights on the weights as they are now.

    With those that training left behind, the norm of a changed weight would be underestimated.
    """
    for module in model.modules():
        settle = getattr(module, "settle", None)
        if callable(settle):  # a module with a bound of its own kind
            settle()
        elif isinstance(module, parametrize.ParametrizationList):
            for step in module:
                if isinstance(step, OperatorNorm):
                    step.right_inverse(module.original)
