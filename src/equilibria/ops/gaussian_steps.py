"""Messages and their derivatives without autograd, for solves that know what they need.

    message(a) = scale·e·v,   pull(a, g) = (dr, dM, dγ) of ⟨scale·g, e·v⟩,   r = a − c cut into rows

and those of the linear kernel, scale·σ(Wz + c) with σ = ReLU. Fused on a GPU where ``can_fuse`` or
cuDNN allows it, plain elsewhere; all leave out samples that failed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from equilibria.engine.result import Result
from equilibria.engine.transforms import transforms_active
from equilibria.engine.tree import sample_norm

from .convolutions import convolve, convolve_add_relu
from .gaussian import (
    gaussian_message,
    gaussian_message_jvp,
    is_channels_last,
    merge_rows,
    permuted,
    restored,
    split_rows,
)
from .gaussian_patches import TRITON, Cut, can_fuse


class PatchMessage:
    """The message of one batch: c [B, C, H, W], metric M [k, k], gamma [B], cut = (c_s, p).

    ``failed`` [B] names samples that are read as if a = c, so that their NaN reaches nothing.
    """

    def __init__(
        self, c: Tensor, metric: Tensor, gamma: Tensor, cut: Cut, failed: Tensor | None = None
    ) -> None:
        self.c, self.metric, self.cut = c, metric.to(c.dtype), cut
        self.failed = failed
        self.fused = can_fuse(c, c, self.metric, *cut)
        wide = torch.promote_types(gamma.dtype, torch.float32)
        self.gamma = gamma.to(wide).expand(c.shape[0])
        if failed is not None:
            self.gamma = torch.where(failed, 1.0, self.gamma)  # it may be NaN there
        if self.fused:
            self._metric = permuted(self.metric, *cut)
            rate = self.gamma.to(torch.float32)
            # The kernels know a failed sample by γ < 0.
            self._rate = (rate if failed is None else torch.where(failed, -1.0, rate)).contiguous()

    def image(self, z: Tensor | None, weight: Tensor, *, first: bool = False) -> Tensor | None:
        """Wz; None is z = 0."""
        return None if z is None else convolve(z, weight)

    def message(self, a: Tensor | None, scale: float) -> Tensor:
        """scale·e·v, [B, C, H, W] lying in memory as c; None is a = 0."""
        if self.fused:
            from . import gaussian_triton as kernels

            given = a, self.c, self._metric, self._rate, *self.cut
            return kernels.forward(*given, kernels.direct, scale)
        rows = self._rows(a)
        message, _ = gaussian_message(rows, self.metric, self.gamma)
        return self._merge(scale * message)

    def pull(
        self, a: Tensor, g: Tensor, scale: float, *, with_metric: bool, with_gamma: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(dr [B, C, H, W], dM [k, k] or None, dγ [B] or None) of ⟨scale·g, message⟩."""
        if self.fused:
            from . import gaussian_triton as kernels

            given = a, self.c, self._metric, self._rate, g, *self.cut
            found = kernels.backward(*given, with_metric, with_gamma, kernels.direct, scale)
            metric = restored(found[1], *self.cut) if with_metric else None
            return found[0], metric, found[2] if with_gamma else None
        rows, up = self._rows(a), scale * split_rows(self._sound(g), *self.cut)
        # The derivative of the message is symmetric: what pushes forward pulls back.
        dr = self._merge(gaussian_message_jvp(rows, up, self.metric, self.gamma))
        if not (with_metric or with_gamma):
            return dr, None, None
        message, s = gaussian_message(rows, self.metric, self.gamma)
        along = (up.to(s.dtype) * message.to(s.dtype)).sum(-1)  # e⟨g, v⟩, [B, P]
        dm = dgamma = None
        if with_metric:
            e = torch.exp(-self.gamma.unsqueeze(-1) * s).unsqueeze(-1)
            weight = (self.gamma.unsqueeze(-1) * along).unsqueeze(-1)
            wide = rows.to(s.dtype)
            dm = torch.einsum("bpi,bpj->ij", wide, e * up.to(s.dtype) - weight * wide)
        if with_gamma:
            dgamma = -(s * along).sum(-1)
        return dr, dm, dgamma

    def _rows(self, a: Tensor | None) -> Tensor:
        return split_rows(self._sound(-self.c if a is None else a - self.c), *self.cut)

    def _sound(self, t: Tensor) -> Tensor:
        """t with zeros for the samples that failed."""
        return t if self.failed is None else torch.where(self.failed.view(-1, 1, 1, 1), 0.0, t)

    def _merge(self, rows: Tensor) -> Tensor:
        last = is_channels_last(self.c)
        return merge_rows(rows, self.c.shape, *self.cut, channels_last=last).to(self.c.dtype)


class ReluMessage:
    """σ(Wz + c) of one batch, c [B, C, H, W], with the methods of ``PatchMessage``.

    The image is σ(Wz + c) itself, which says where σ′ = 1; 0 for the samples of ``failed`` [B].
    """

    def __init__(self, c: Tensor, failed: Tensor | None = None) -> None:
        self.c, self.failed = c, failed

    def image(self, z: Tensor | None, weight: Tensor, *, first: bool = False) -> Tensor:
        """σ(Wz + c); None is z = 0. The ``first`` one of a solve shows the NaN of c."""
        if z is None:
            return self.c.relu()
        a = convolve_add_relu(z, weight, self.c, 1.0, keep_nan=first)
        return a if self.failed is None else blank(a, self.failed)

    def message(self, a: Tensor | None, scale: float) -> Tensor:
        assert a is not None
        return a if scale == 1.0 else scale * a

    def pull(
        self, a: Tensor | None, g: Tensor, scale: float, *, with_metric: bool, with_gamma: bool
    ) -> tuple[Tensor, None, None]:
        """The gradient of ⟨scale·g, σ(Wz + c)⟩ in Wz, which is that in c."""
        found: Tensor = torch.ops.aten.threshold_backward(g, a, 0)
        return (found if scale == 1.0 else found.mul_(scale)), None, None


def residual_norms(f: Tensor, z: Tensor | None) -> Tensor:
    """(‖f − z‖, ‖f‖) of the parts of every sample, [B, parts, 2], for ``judge``; None is z = 0."""
    if _vectors(f, f if z is None else z):
        from .pointwise_triton import residual_norms as fused

        return fused(f, z)
    scale = sample_norm([f])
    moved = scale if z is None else sample_norm([f - z])
    return torch.stack([moved, scale], 1).unsqueeze(1)


def judge(z: Tensor, first: Tensor, last: Tensor, limit: float, steps: int) -> tuple[Tensor, ...]:
    """(failed, residual, residual/‖f‖, ``Result``, steps), [B], by ``residual_norms`` of two steps.

    A sample diverged if its last residual is above limit·(residual + ‖f‖) of the first. In
    place, z gets zeros for the samples that failed; the others are not touched.
    """
    if _vectors(z):
        from .pointwise_triton import judge as fused

        return fused(z, first, last, limit, steps)
    residual, scale = last[:, 0].unbind(1)
    start = first[:, 0].sum(1)
    # Norms are not negative, and NaN is below nothing. Later steps may hide that of the first.
    finite = (residual + scale < torch.inf) & (start < torch.inf)
    diverged = finite & (residual > limit * start)
    ended = torch.where(diverged, int(Result.diverged), int(Result.fixed_steps))
    code = torch.where(finite, ended, int(Result.nonfinite)).to(torch.int8)
    relative = residual / scale.clamp_min(torch.finfo(scale.dtype).tiny)
    failed = diverged | ~finite
    z.masked_fill_(failed.view(-1, *[1] * (z.ndim - 1)), 0.0)
    return failed, residual, relative, code, torch.full_like(code, steps, dtype=torch.int32)


def blank(z: Tensor, failed: Tensor) -> Tensor:
    """z, in place, with zeros for the samples of ``failed`` [B]; the others are not touched."""
    norms = torch.where(failed, torch.inf, 0.0).view(-1, 1, 1).expand(-1, 1, 2).contiguous()
    judge(z, norms, norms, 1.0, 0)
    return z


def mean_rate(energies: Tensor, scale: float, floor: float) -> Tensor | None:
    """γ of ``MeanPatchEnergy`` [B] by one kernel; None where it does not serve. [B, P] → [B]."""
    graph = energies.requires_grad and torch.is_grad_enabled()
    if graph or torch.compiler.is_compiling() or transforms_active() or not _vectors(energies):
        return None
    from .pointwise_triton import mean_rate as fused

    return fused(energies, scale, floor)


def threshold_sum(z: Tensor | None, g: Tensor, d: Tensor, y: Tensor, kappa: float) -> Tensor:
    """g + κd + y where z > 0, else 0; with None everywhere, in place of y."""
    if z is None:
        total = y.add_(g)
        return total if kappa == 0.0 else total.add_(d, alpha=kappa)
    if _vectors(z, g, d, y):
        from .pointwise_triton import masked_sum

        return masked_sum(z, g, d, y, kappa)
    return torch.where(z > 0, torch.add(g, d, alpha=kappa) + y, 0.0)


def _vectors(*tensors: Tensor) -> bool:
    """Whether the kernels serve: on a GPU, of one dtype, dense and alike in memory."""
    first = tensors[0]
    if not TRITON or not first.is_cuda or first.dtype == torch.float64:
        return False
    dense = first.is_contiguous() or first.is_contiguous(memory_format=torch.channels_last)
    return dense and all(
        t.dtype == first.dtype and t.stride() == first.stride() for t in tensors[1:]
    )
