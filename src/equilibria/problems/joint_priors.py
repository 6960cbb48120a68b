"""Priors that are not elementwise: sets and norms that tie the entries of a state together.

Each has ``value``, ``prox`` and ``least_subgradient`` in closed form or by a method that ends:

- ``Simplex``, ``Entropy``: ``z >= 0`` with a given sum, without or with ``sum z log z``;
- ``HalfSpace``, ``Ball``: ``<a, z> <= b``, ``|z| <= r``;
- ``GroupSoftThreshold``, ``NuclearNorm``: a weighted sum of norms, or of singular values;
- ``TotalVariation``, ``Isotonic``: along one dimension, by ``chain_prox``.

What needs no separability holds for them as for every convex ``f``: the step, strong convexity and
the error bounds of a certificate. What does need it refuses them: ``WithL1``, ``Activated``, the
layers whose prior is an activation, ``subdifferential``.

Conventions are those of ``priors``, but ``value`` is one number per sample, and so is ``tau``. The
dimension ``dim`` counts as in torch, the batch is 0. A point counts as on the boundary of a set, or
at a kink, if it rounds to one: what a prox returned does.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from equilibria.adjoints.graph import host_may_read
from equilibria.engine.tree import per_sample, strange
from equilibria.problems.priors import (
    Parameter,
    Prior,
    aligned,
    at_least_float32,
    check_parameter,
    graph_zero,
    log_wright_omega,
    per_sample_sum,
    step_of_samples,
)


def _slack(z: Tensor, terms: int) -> float:
    """How far, relatively, the rounding of ``z`` may move a sum of so many terms."""
    return (terms + 8) * torch.finfo(z.dtype).eps


class JointPrior(Prior):
    """``f: R^n -> (-inf, inf]``, closed and convex, of the whole state ``[B, *state]`` of a sample.

    Write ``value`` (``[B]``), ``prox`` and ``least_subgradient``.
    """

    separable: ClassVar[bool] = False

    @abstractmethod
    def value(self, z: Tensor) -> Tensor:
        """``f(z)`` of each sample: ``[B, *state]`` to ``[B]``; ``+inf`` outside the domain."""

    @abstractmethod
    def prox(self, v: Tensor, tau: float | Tensor = 1.0) -> Tensor:
        """``argmin_z f(z) + |z - v|^2/(2 tau)``; ``tau`` is a number or one per sample."""

    @abstractmethod
    def least_subgradient(self, z: Tensor, g: Tensor) -> Tensor:
        """The element of least norm of ``df(z) + g``: ``-prox_h(-g)``, ``h(d) = f'(z; d)``."""

    def subdifferential(self, z: Tensor) -> tuple[Tensor, Tensor]:
        raise TypeError(
            f"{type(self).__name__} is not elementwise: its subdifferential is no interval per "
            "entry. least_subgradient(z, g) has the element of least norm of df(z) + g."
        )

    def into_domain(self, z: Tensor) -> Tensor:
        outside = per_sample(torch.isinf(self.value(z)), z)
        return torch.where(outside, self.prox(z, 1e-12), z)

    def _where_finite(self, z: Tensor, least: Tensor) -> Tensor:
        return torch.where(per_sample(torch.isinf(self.value(z)), z), math.inf, least)


@dataclass(frozen=True)
class Translated(Prior):
    """``f(z) = prior(z + by)`` for a norm, such as ``|z - b|``; ``by`` is ``[B or 1, ...]``."""

    prior: Prior
    by: Tensor
    parameters = ("by", "prior")

    @property
    def separable(self) -> bool:  # type: ignore[override]
        return self.prior.separable

    def value(self, z: Tensor) -> Tensor:
        return self.prior.value(z + self.by)

    def prox(self, v: Tensor, tau: float | Tensor = 1.0) -> Tensor:
        return self.prior.prox(v + self.by, tau) - self.by

    def subdifferential(self, z: Tensor) -> tuple[Tensor, Tensor]:
        return self.prior.subdifferential(z + self.by)

    def into_domain(self, z: Tensor) -> Tensor:
        return z  # a norm is finite

    def least_subgradient(self, z: Tensor, g: Tensor) -> Tensor:
        return self.prior.least_subgradient(z + self.by, g)


class _AlongDims(JointPrior):
    """Of lines or groups along ``dim``; parameters are at least 0, or above it (``above``)."""

    dim: int | tuple[int, ...] | None = None
    above: ClassVar[bool] = False

    def _check(self) -> None:
        for name in self.parameters:
            check_parameter(self, name, low=0.0, low_open=self.above)

    def _dims(self, z: Tensor) -> tuple[int, ...]:
        given = tuple(range(1, z.ndim)) if self.dim is None else self.dim
        dims = (given,) if isinstance(given, int) else given
        if any(not -z.ndim < d < z.ndim or d == 0 for d in dims):
            raise ValueError(
                f"{type(self).__name__}(dim={self.dim}): got a state of shape {tuple(z.shape)}, "
                "takes dimensions of it that are not the batch (0)"
            )
        return dims


def _indicator(z: Tensor, inside: Tensor) -> Tensor:
    """0 where ``inside`` ``[B]`` holds, else ``+inf``."""
    return torch.where(inside, per_sample_sum(graph_zero(at_least_float32(z))), math.inf)


def _all(t: Tensor) -> Tensor:
    """Whether all entries of a sample hold. [B, ...] → [B]."""
    return t.flatten(1).all(1) if t.ndim > 1 else t


class _AlongDim(_AlongDims):
    """A sum over all lines of the state along ``dim``, which is one."""

    def _lines(self, z: Tensor) -> Tensor:
        """``z`` in float32 or better, ``dim`` last."""
        return at_least_float32(z).movedim(self._dims(z)[0], -1)

    def _like_lines(self, name: str, z: Tensor) -> Parameter:
        """A parameter that broadcasts over the lines of ``z``."""
        value = aligned(self, name, z.narrow(self._dims(z)[0], 0, 1))
        if not isinstance(value, Tensor) or value.ndim == 0:
            return value
        return value.movedim(self._dims(z)[0], -1)

    def _back(self, lines: Tensor, z: Tensor) -> Tensor:
        return lines.movedim(-1, self._dims(z)[0])


def _level(ordered: Tensor, base: Parameter, free: Tensor | int) -> tuple[Tensor, Tensor]:
    """``t`` with ``base + sum max(ordered - t, 0) = free t``; how many are above. ``[..., 1]``."""
    count = torch.arange(1, ordered.shape[-1] + 1, dtype=ordered.dtype, device=ordered.device)
    sums = torch.where(ordered > -math.inf, ordered, 0.0).cumsum(-1)
    level = (base + sums) / (free + count)
    kept = (ordered > level).sum(-1, keepdim=True)
    return level.gather(-1, (kept - 1).clamp(min=0)), kept


def _simplex_level(v: Tensor, total: Parameter) -> Tensor:
    """The ``t`` with ``sum max(v - t, 0) = total``, detached. ``[..., n]`` to ``[..., 1]``."""
    limit = total.detach() if isinstance(total, Tensor) else total
    return _level(v.detach().sort(-1, descending=True).values, -limit, 0)[0]


def _onto_simplex(v: Tensor, total: Parameter) -> Tensor:
    """The projection of each line ``[..., n]`` onto ``z >= 0``, ``sum z = total``."""
    v = v - v.detach().amax(-1, keepdim=True)  # changes nothing but the rounding
    kept = v.detach() > _simplex_level(v, total)
    level = (torch.where(kept, v, 0.0).sum(-1, keepdim=True) - total) / kept.sum(-1, keepdim=True)
    return torch.relu(v - level)


def _onto_tangent(h: Tensor, zero: Tensor) -> Tensor:
    """The projection of ``h`` onto ``sum d = 0``, ``d >= 0`` where ``zero`` holds, line by line."""
    free = (~zero).sum(-1, keepdim=True)
    base = torch.where(zero, 0.0, h).sum(-1, keepdim=True)
    inner, kept = _level(
        torch.where(zero, h, -math.inf).sort(-1, descending=True).values, base, free
    )
    nu = torch.where(kept > 0, inner, base / free)
    moved = h - nu
    return torch.where(zero, torch.relu(moved), moved)


@dataclass(frozen=True)
class Simplex(_AlongDim):
    """``f(z) = 0`` if ``z >= 0`` and ``sum z = total`` along ``dim``, else ``+inf``.

    ``sigma`` is the projection (sparsemax for ``total = 1``), by sorting.
    """

    total: Parameter = 1.0
    dim: int = -1
    parameters = ("total",)
    above = True

    def value(self, z: Tensor) -> Tensor:
        lines, total = self._lines(z), self._like_lines("total", z)
        off = (lines.sum(-1, keepdim=True) - total).abs()
        near = off <= _slack(z, lines.shape[-1]) * total
        return _indicator(z, _all(near) & _all(lines >= 0))

    def prox(self, v: Tensor, tau: float | Tensor = 1.0) -> Tensor:
        step_of_samples(tau, v)
        lines = _onto_simplex(self._lines(v), self._like_lines("total", v))
        return self._back(lines, v).to(v.dtype)

    def least_subgradient(self, z: Tensor, g: Tensor) -> Tensor:
        least = -_onto_tangent(-self._lines(g), self._lines(z) <= 0)
        return self._where_finite(z, self._back(least, z))


_NEWTON = 8  # for the sum of an entropy prox


@dataclass(frozen=True)
class Entropy(_AlongDim):
    """``f(z) = weight sum z log z`` if ``z >= 0`` and ``sum z = 1`` along ``dim``, else ``+inf``.

    The prox solves ``z + s log z = v - nu``, ``s = tau weight``, with the ``nu`` that makes the sum
    1. The sum is convex and decreasing in ``nu``, so Newton's method is monotone from a ``nu``
    where it is at least 1: ``s logsumexp(v/s) - 1``, as ``log z >= (v - nu - 1)/s`` for ``z <= 1``,
    or the level of the projection onto the simplex, as ``z >= v - nu`` there. The first is close
    for a large ``s``, the second for a small one. Two more steps on the live tensors carry
    derivatives, exact to the third.
    """

    weight: Parameter = 1.0
    dim: int = -1
    parameters = ("weight",)
    above = True

    def value(self, z: Tensor) -> Tensor:
        lines = self._lines(z)
        near = (lines.sum(-1) - 1.0).abs() <= _slack(z, lines.shape[-1])
        inside = _all(near) & _all(lines >= 0)
        safe = torch.where(per_sample(inside, lines), lines, 0.5)
        entropy = (safe * safe.clamp(min=torch.finfo(z.dtype).tiny).log()).sum(-1, keepdim=True)
        value = per_sample_sum((self._like_lines("weight", z) * entropy).to(lines.dtype))
        return torch.where(inside, value, math.inf)

    def prox(self, v: Tensor, tau: float | Tensor = 1.0) -> Tensor:
        lines = self._lines(v)
        scale = step_of_samples(tau, v) * self._like_lines("weight", v)
        s = torch.as_tensor(scale, dtype=lines.dtype, device=lines.device)
        return self._back(_entropy_prox(lines, s), v).to(v.dtype)

    def least_subgradient(self, z: Tensor, g: Tensor) -> Tensor:
        lines = self._lines(z)
        # Zero stands for all numbers that round to it, as in SmoothPrior.
        tiny = torch.finfo(z.dtype).tiny
        slope = lines.clamp(min=tiny).log()
        pull = self._lines(g) + (self._like_lines("weight", z) * slope).to(lines.dtype)
        return self._where_finite(z, self._back(-_onto_tangent(-pull, lines < tiny), z))


def _entropy_prox(v: Tensor, s: Tensor) -> Tensor:
    v = v - v.detach().amax(-1, keepdim=True)  # changes nu alone
    level, scale = v.detach(), s.detach()
    nu = scale * torch.logsumexp(level / scale, -1, keepdim=True) - 1.0
    nu = torch.maximum(nu, _simplex_level(level, 1.0))
    for _ in range(_NEWTON):
        y = log_wright_omega((level - nu) / scale - scale.log()) + scale.log()
        x = y.exp()
        nu = nu + (x.sum(-1, keepdim=True) - 1.0) / (x / (x + scale)).sum(-1, keepdim=True)
    y = log_wright_omega((level - nu) / scale - scale.log()) + scale.log()
    for step in range(5):  # Newton's method for y and nu together; live at the end
        at, width = (v, s) if step >= 3 else (level, scale)
        x = y.exp()
        miss = x + width * y - at + nu
        share = x / (x + width)
        gap = x.sum(-1, keepdim=True) - 1.0
        move = (gap - (share * miss).sum(-1, keepdim=True)) / share.sum(-1, keepdim=True)
        y = y - (miss + move) / (x + width)
        nu = nu + move
    return y.exp()


@dataclass(frozen=True)
class HalfSpace(JointPrior):
    """``f(z) = 0`` if ``<normal, z> <= offset``, else ``+inf``; the product is of whole states.

    ``prox(v) = v - max(<normal, v> - offset, 0) normal / |normal|^2``.
    """

    normal: Parameter
    offset: Parameter = 0.0
    parameters = ("normal", "offset")

    def _check(self) -> None:
        check_parameter(self, "normal")
        check_parameter(self, "offset")
        rows = torch.as_tensor(self.normal).detach()
        rows = rows.reshape(len(rows) if rows.ndim else 1, -1)
        if host_may_read(rows) and not bool(rows.any(1).all()):
            raise ValueError("HalfSpace(normal=...): got 0, takes a normal that is not 0")

    def _measured(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``normal/|normal|``, shaped as ``z``; then ``[B]``: how far ``z`` is outside, and the
        rounding of that."""
        wide = at_least_float32(z)
        normal = torch.as_tensor(aligned(self, "normal", z), dtype=wide.dtype, device=z.device)
        normal = normal.expand_as(wide)
        offset = torch.as_tensor(self.offset, dtype=wide.dtype, device=z.device)
        if offset.ndim and offset.numel() != offset.shape[0]:
            raise ValueError(
                f"HalfSpace(offset=...): got a tensor of shape {tuple(offset.shape)}, takes a "
                "number or [B], one per sample"
            )
        length = sizes(normal.reshape(len(z), -1), 1).flatten()
        normal, offset = normal / per_sample(length, z), offset.flatten() / length
        size = per_sample_sum((normal * wide).abs().detach()) + offset.detach().abs()
        return normal, per_sample_sum(normal * wide) - offset, _slack(z, z[0].numel()) * size

    def value(self, z: Tensor) -> Tensor:
        _, excess, off = self._measured(z)
        return _indicator(z, excess <= off)

    def prox(self, v: Tensor, tau: float | Tensor = 1.0) -> Tensor:
        step_of_samples(tau, v)
        z = at_least_float32(v)
        for _ in range(2):  # the first is off by the rounding of v, which may be large
            normal, excess, _ = self._measured(z)
            z = z - per_sample(torch.relu(excess), v) * normal
        return z.to(v.dtype)

    def least_subgradient(self, z: Tensor, g: Tensor) -> Tensor:
        normal, excess, off = self._measured(z)
        pull = torch.relu(-per_sample_sum(normal * g))
        held = torch.where(excess >= -off, pull, 0.0)
        return self._where_finite(z, g + per_sample(held, z) * normal)


def sizes(t: Tensor, dims: int | tuple[int, ...]) -> Tensor:
    """``|t|`` along dims, which stay, at any scale; 30 times as fast as ``vector_norm`` along a
    short one."""
    # Float64 holds the squares of every float32; its own are taken in units where they leave it.
    wide = t if t.dtype == torch.float64 or t.device.type == "mps" else t.double()
    largest = wide.detach().abs().amax(dims, keepdim=True)
    unit = torch.where(strange(largest) & (largest > 0) & (largest < math.inf), largest, 1.0)
    square = (wide / unit).square().sum(dims, keepdim=True)
    zero = square == 0
    return (torch.where(zero, 0.0, torch.where(zero, 1.0, square).sqrt()) * unit).to(t.dtype)


class _OfNorms(_AlongDims):
    """Of the norms of groups: all entries of a state, or those along ``dim`` (one or several)."""

    def _norm(self, z: Tensor) -> tuple[Tensor, Parameter]:
        """``|z|`` of each group, kept as dimensions of size 1, and the parameter of each."""
        size = sizes(at_least_float32(z), self._dims(z))
        return size, aligned(self, self.parameters[0], size)


@dataclass(frozen=True)
class Ball(_OfNorms):
    """``f(z) = 0`` if ``|z| <= radius``, else ``+inf``; the norm of a state, or along ``dim``.

    ``prox(v) = min(1, radius/|v|) v``.
    """

    radius: Parameter = 1.0
    dim: int | tuple[int, ...] | None = None
    parameters = ("radius",)
    above = True

    def value(self, z: Tensor) -> Tensor:
        size, radius = self._norm(z)
        return _indicator(z, _all(size <= (1.0 + _slack(z, z[0].numel())) * radius))

    def prox(self, v: Tensor, tau: float | Tensor = 1.0) -> Tensor:
        step_of_samples(tau, v)
        size, radius = self._norm(v)
        far = size > radius
        return torch.where(far, v / torch.where(far, size, 1.0) * radius, v).to(v.dtype)

    def least_subgradient(self, z: Tensor, g: Tensor) -> Tensor:
        size, radius = self._norm(z)
        outward = at_least_float32(z) / size.clamp(min=torch.finfo(size.dtype).tiny)
        inward = torch.relu(-(outward * g).sum_to_size(size.shape))
        held = torch.where(size >= (1.0 - _slack(z, z[0].numel())) * radius, inward, 0.0)
        return self._where_finite(z, g + held * outward)


@dataclass(frozen=True)
class GroupSoftThreshold(_OfNorms):
    """``f(z) = weight sum |z_g|`` over groups ``g``: a state, or its entries along ``dim``.

    ``prox(v)_g = max(1 - tau weight/|v_g|, 0) v_g``, which sets whole groups to 0.
    """

    weight: Parameter = 1.0
    dim: int | tuple[int, ...] | None = None
    parameters = ("weight",)

    def value(self, z: Tensor) -> Tensor:
        size, weight = self._norm(z)
        return per_sample_sum((weight * size).to(size.dtype))

    @staticmethod
    def _shrink(v: Tensor, size: Tensor, threshold: Parameter) -> Tensor:
        kept = size > threshold
        return v * torch.where(kept, 1.0 - threshold / torch.where(kept, size, 1.0), 0.0)

    def prox(self, v: Tensor, tau: float | Tensor = 1.0) -> Tensor:
        size, weight = self._norm(v)
        return self._shrink(v, size, step_of_samples(tau, v) * weight).to(v.dtype)

    def least_subgradient(self, z: Tensor, g: Tensor) -> Tensor:
        size, weight = self._norm(z)
        zero = size == 0
        along = g + weight * (at_least_float32(z) / torch.where(zero, 1.0, size))
        return torch.where(zero, self._shrink(g, self._norm(g)[0], weight), along).to(size.dtype)


def _shrunk_derivative(
    u: Tensor, sigma: Tensor, vh: Tensor, t: Tensor, change: Tensor
) -> tuple[Tensor, Tensor]:
    """The derivative of ``X -> U max(sigma - t, 0) V'`` at ``X`` along ``change``, and ``U'HV``.

    It is symmetric. No divided difference cancels, and equal singular values are no exception.
    """
    kept = (sigma > t).to(sigma.dtype)
    shrunk = torch.relu(sigma - t)
    row, column = sigma.unsqueeze(-1), sigma.unsqueeze(-2)
    mixed = kept.unsqueeze(-1) != kept.unsqueeze(-2)
    high = torch.maximum(row, column)
    gap = torch.where(mixed, (row - column).abs(), 1.0)
    both = kept.unsqueeze(-1) * kept.unsqueeze(-2)
    even = torch.where(mixed, (high - t.unsqueeze(-1)) / gap, both)
    around = (row + column).clamp(min=torch.finfo(sigma.dtype).tiny)
    odd = (shrunk.unsqueeze(-1) + shrunk.unsqueeze(-2)) / around
    inner = u.mT @ change @ vh.mT
    core = 0.5 * (even * (inner + inner.mT) + odd * (inner - inner.mT))
    ratio = shrunk / sigma.clamp(min=torch.finfo(sigma.dtype).tiny)
    left = change @ vh.mT - u @ inner  # of the columns, outside of the range of U
    right = u.mT @ change - inner @ vh
    moved = u @ core @ vh + (left * ratio.unsqueeze(-2)) @ vh + (u * ratio.unsqueeze(-2)) @ right
    return moved, inner.diagonal(dim1=-2, dim2=-1) * kept


class _Shrunk(torch.autograd.Function):
    """``U max(sigma - t, 0) V'`` of ``X = U sigma V'``, ``[..., m, n]``, ``t`` ``[..., 1]``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, t: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        u, sigma, vh = torch.linalg.svd(x, full_matrices=False)
        return (u * torch.relu(sigma - t).unsqueeze(-2)) @ vh, u, sigma, vh

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, u, sigma, vh = output
        ctx.mark_non_differentiable(u, sigma, vh)
        ctx.save_for_backward(*inputs, u, sigma, vh)
        ctx.save_for_forward(inputs[1], u, sigma, vh)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
        return _ShrunkSlope.apply(grad, *ctx.saved_tensors)  # type: ignore[no-untyped-call]


class _ShrunkEager(_Shrunk):
    """The same with a forward derivative, which torch.compile cannot trace."""

    @staticmethod
    def jvp(ctx: Any, x: Tensor | None, t: Tensor | None) -> tuple[Tensor, None, None, None]:
        at, u, sigma, vh = ctx.saved_tensors
        moved = torch.zeros_like(u @ vh)
        if x is not None:
            moved = moved + _shrunk_derivative(u, sigma, vh, at, x)[0]
        if t is not None:
            moved = moved - (u * ((sigma > at) * t).unsqueeze(-2)) @ vh
        return moved, None, None, None


class _ShrunkSlope(torch.autograd.Function):
    """The derivative of ``_Shrunk``, with ``X`` and ``t`` as inputs: a second one raises."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        grad: Tensor, x: Tensor, t: Tensor, u: Tensor, sigma: Tensor, vh: Tensor
    ) -> tuple[Tensor, Tensor]:
        moved, along = _shrunk_derivative(u, sigma, vh, t, grad)
        return moved, -along.sum(-1, keepdim=True)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError("NuclearNorm.prox can be differentiated once, not twice.")

    jvp = backward


def _finite_matrices(x: Tensor) -> Tensor:
    """``[..., 1, 1]``. An SVD raises where an entry is not finite, for the whole batch."""
    return x.detach().isfinite().all(-1, keepdim=True).all(-2, keepdim=True)


@dataclass(frozen=True)
class NuclearNorm(_AlongDims):
    """``f(z) = weight sum sigma_i(z)``, of the matrices in the last two dimensions of a state.

    The prox shrinks singular values: ``U max(sigma - tau weight, 0) V'``. Its derivative is exact
    also at equal singular values; a second derivative raises an error.
    """

    weight: Parameter = 1.0
    parameters = ("weight",)

    def _weight(self, z: Tensor) -> Parameter:
        """``[..., 1, 1]`` over the matrices."""
        if z.ndim < 3:
            raise ValueError(
                f"NuclearNorm takes states of matrices, [B, ..., m, n], got {tuple(z.shape)}"
            )
        return aligned(self, "weight", z[..., :1, :1])

    def value(self, z: Tensor) -> Tensor:
        weight = self._weight(z)
        wide = at_least_float32(z)
        finite = _finite_matrices(wide)
        sigma = torch.linalg.svdvals(torch.where(finite, wide, 0.0)).unsqueeze(-1)
        sigma = torch.where(finite, sigma, math.nan)
        return per_sample_sum((weight * sigma).to(sigma.dtype))

    def prox(self, v: Tensor, tau: float | Tensor = 1.0) -> Tensor:
        return self._shrink(v, step_of_samples(tau, v) * self._weight(v)).to(v.dtype)

    @staticmethod
    def _shrink(v: Tensor, threshold: Parameter) -> Tensor:
        wide = at_least_float32(v)
        t = torch.as_tensor(threshold, dtype=wide.dtype, device=wide.device)
        t = t.expand(*wide.shape[:-2], 1, 1).squeeze(-1)
        finite = _finite_matrices(wide)
        safe = torch.where(finite, wide, 0.0)
        shrink = _Shrunk if torch.compiler.is_compiling() else _ShrunkEager
        shrunk: Tensor = shrink.apply(safe, t)[0]  # type: ignore[no-untyped-call]
        return torch.where(finite, shrunk, math.nan)

    def least_subgradient(self, z: Tensor, g: Tensor) -> Tensor:
        """``g + weight UV'`` on the ranges of ``z``; outside, the singular values of ``g`` less
        ``weight``."""
        weight = self._weight(z)
        wide, g = at_least_float32(z), at_least_float32(g)
        finite = _finite_matrices(wide)
        u, sigma, vh = torch.linalg.svd(torch.where(finite, wide, 0.0), full_matrices=False)
        there = sigma > _slack(z, max(z.shape[-2:])) * sigma[..., :1]
        u, vh = u * there.unsqueeze(-2), vh * there.unsqueeze(-1)
        beside = g - u @ (u.mT @ g)
        beside = beside - (beside @ vh.mT) @ vh
        least = g - beside + weight * (u @ vh) + self._shrink(beside, weight)
        return torch.where(finite, least.to(sigma.dtype), math.nan)


def _messages(c: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """``a_i = m_{i-1} + c_i`` with ``m_i = min(max(a_i, low_i), high_i)``, by doubling.

    The maps ``x -> min(max(x + c, low), high)`` are closed under composition.
    """
    shift, floor, ceiling = c, low, high
    reach, n = 1, c.shape[-1]
    while reach < n:
        held = (shift, floor, ceiling)
        by, least, most = (t[..., reach:] for t in held)
        moved = [t[..., :-reach] + by for t in held]
        new = [moved[0], *(t.clamp(least, most) for t in moved[1:])]
        shift, floor, ceiling = (
            torch.cat([t[..., :reach], found], -1) for t, found in zip(held, new, strict=True)
        )
        reach *= 2
    message = shift.clamp(floor, ceiling)
    return torch.cat([c[..., :1], message[..., :-1] + c[..., 1:]], -1)


def _segments(cut: Tensor) -> Tensor:
    """The number of the segment of each entry, ``[..., n]``, for cuts ``[..., n-1]``."""
    steps = torch.cat([torch.zeros_like(cut[..., :1]), cut.abs()], -1)
    return steps.cumsum(-1)


def _sum_of_segments(t: Tensor, label: Tensor) -> Tensor:
    """The sum over its segment for each entry."""
    return torch.zeros_like(t).scatter_add(-1, label, t).gather(-1, label)


def _pushed(v: Tensor, cut: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """``v`` less the gradient of the terms at cuts: there the sign of the jump is known."""
    force = torch.where(cut > 0, down, torch.where(cut < 0, -up, 0.0))
    zero = torch.zeros_like(v[..., :1])
    return v - torch.cat([force, zero], -1) + torch.cat([zero, force], -1)


_CUTS = "(Tensor v, Tensor down, Tensor up) -> Tensor"


@torch.library.custom_op("equilibria::chain_cuts", mutates_args=(), schema=_CUTS)
def _chain_cuts(v: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """Where the solution of ``chain_prox`` jumps: 1 down, -1 up, 0 not. ``[..., n-1]``, int64.

    An operator of its own, so that compilers and ``vmap`` need not follow the loop.
    """
    cut = torch.zeros_like(down, dtype=torch.int64)
    n = v.shape[-1]
    eps = torch.finfo(v.dtype).eps
    place = torch.arange(n, device=v.device).expand(v.shape)
    edge = torch.zeros_like(v[..., :1])
    ones = torch.ones_like(v)
    for _ in range(n):  # each round but the last cuts somewhere
        label = _segments(cut)
        held = _pushed(v, cut, down, up)
        length = _sum_of_segments(ones, label)
        c = held - _sum_of_segments(held, label) / length
        noise = 4.0 * eps * _sum_of_segments(held.abs(), label)
        high = torch.cat([torch.where(cut == 0, down, 0.0), edge], -1)
        low = torch.cat([torch.where(cut == 0, -up, 0.0), edge], -1)
        a = _messages(c, low, high)
        # Which entries lie above the level of their segment: known here, else as on the right.
        ends = torch.cat([cut != 0, torch.ones_like(cut[..., :1], dtype=torch.bool)], -1)
        above = a > high + noise
        known = above | (a < low - noise) | ends
        right = torch.where(known, place, n - 1).flip(-1).cummin(-1).values.flip(-1)
        above = above.gather(-1, right)
        found = above[..., :-1].long() - above[..., 1:].long()
        found = torch.where(cut == 0, found, 0)
        if not bool(found.any()):
            break
        cut = cut + found
    return cut


@_chain_cuts.register_fake
def _(v: Tensor, down: Tensor, up: Tensor) -> Tensor:
    return torch.empty_like(down, dtype=torch.int64)


@_chain_cuts.register_vmap
def _(info: Any, in_dims: Any, v: Tensor, down: Tensor, up: Tensor) -> tuple[Tensor, int]:
    size = info.batch_size
    moved = [
        t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0)
        for t, dim in zip((v, down, up), in_dims, strict=True)
    ]
    return _chain_cuts(*moved), 0


def chain_prox(v: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """``argmin_z |z - v|^2/2 + sum_i down_i max(z_i - z_{i+1}, 0) + up_i max(z_{i+1} - z_i, 0)``.

    ``v`` ``[..., n]``; ``down`` and ``up`` ``[..., n-1]``, not negative, perhaps infinite (but not
    both). Exact: the entries above a level ``t`` solve a problem of labels on a chain
    (Darbon and Sigelle 2006), by dynamic programming. With ``t`` the mean of a
    segment, either the segment splits or it is constant with the value ``t``, so at most ``n``
    rounds, about ``log n`` as a rule, all lines at once. A round asks the device whether there is
    another. Derivatives are those of the means of the segments, of all orders.
    """
    if v.shape[-1] == 1:
        return v
    # Sums over long segments, and what of them is rounding, want float64.
    kind = v.dtype if v.device.type == "mps" else torch.float64
    wide = v.to(kind)
    down, up = (t.to(kind).expand(*v.shape[:-1], v.shape[-1] - 1) for t in (down, up))
    cut = _chain_cuts(wide.detach(), down.detach(), up.detach())
    label = _segments(cut)
    held = _pushed(wide, cut, down, up)
    mean = _sum_of_segments(held, label) / _sum_of_segments(torch.ones_like(held), label)
    return mean.to(v.dtype)


def _jumps(lines: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``z_{i+1} - z_i`` and whether it is more than rounding."""
    left, right = lines[..., :-1], lines[..., 1:]
    jump = right - left
    return jump, jump.abs() > 8.0 * eps * torch.maximum(left.abs(), right.abs())


class _Chain(_AlongDim):
    """A price for each jump along ``dim``, down and up; the prox is that of ``chain_prox``."""

    @abstractmethod
    def _prices(self, z: Tensor, tau: float | Tensor) -> tuple[Parameter, Parameter]:
        """Of a jump down, and up, times tau; shaped to broadcast over the lines."""

    def _edges(self, z: Tensor, tau: float | Tensor = 1.0) -> Iterator[Tensor]:
        """The prices at every edge of the lines, ``[..., n-1]``."""
        lines = self._lines(z)
        for price in self._prices(z, tau):
            made = torch.as_tensor(price, dtype=lines.dtype, device=lines.device)
            yield made.expand(*lines.shape[:-1], lines.shape[-1] - 1)

    def prox(self, v: Tensor, tau: float | Tensor = 1.0) -> Tensor:
        found = chain_prox(self._lines(v), *self._edges(v, step_of_samples(tau, v)))
        return self._back(found, v).to(v.dtype)

    def least_subgradient(self, z: Tensor, g: Tensor) -> Tensor:
        down, up = self._edges(z)
        jump, real = _jumps(self._lines(z), torch.finfo(z.dtype).eps)
        finite = torch.where(down.isinf(), 0.0, down)
        pull = _pushed(-self._lines(g), torch.where(real, -jump.sign(), 0.0), finite, up)
        least = -chain_prox(pull, *(torch.where(real, 0.0, t) for t in (down, up)))
        return self._back(least, z)


@dataclass(frozen=True)
class TotalVariation(_Chain):
    """``f(z) = weight sum |z_{i+1} - z_i|`` along ``dim`` (total variation of signals).

    The prox is exact (``chain_prox``) and differentiable, also in ``weight``.
    """

    weight: Parameter = 1.0
    dim: int = -1
    parameters = ("weight",)

    def _prices(self, z: Tensor, tau: float | Tensor) -> tuple[Parameter, Parameter]:
        price = tau * self._like_lines("weight", z)
        return price, price

    def value(self, z: Tensor) -> Tensor:
        lines = self._lines(z)
        jumps = lines.diff(dim=-1).abs().sum(-1, keepdim=True)
        return per_sample_sum((self._like_lines("weight", z) * jumps).to(lines.dtype))


@dataclass(frozen=True)
class Isotonic(_Chain):
    """``f(z) = 0`` if ``z_1 <= z_2 <= ...`` along ``dim``, else ``+inf``.

    The prox is isotonic regression, exact (``chain_prox``) and differentiable.
    """

    dim: int = -1

    def _prices(self, z: Tensor, tau: float | Tensor) -> tuple[Parameter, Parameter]:
        return math.inf, 0.0

    def value(self, z: Tensor) -> Tensor:
        jump, real = _jumps(self._lines(z), torch.finfo(z.dtype).eps)
        return _indicator(z, _all((jump >= 0) | ~real))

    def least_subgradient(self, z: Tensor, g: Tensor) -> Tensor:
        return self._where_finite(z, super().least_subgradient(z, g))
