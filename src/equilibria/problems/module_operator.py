"""Any linear callable with its adjoint as an operator, checked by a dot test."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from equilibria.problems.linear_operator import LinearOperator
from equilibria.problems.norms import (
    dense_norm,
    exact,
)

__all__ = ["ModuleOperator", "in_double"]

_DENSE_LIMIT = 2048  # largest small side of a module that is made into a matrix for its norm

_DOT_TOLERANCE = {
    torch.float64: 1e-11,
    torch.float32: 1e-5,
    torch.float16: 5e-3,
    torch.bfloat16: 4e-2,
}


class ModuleOperator(LinearOperator):
    """Any linear map given by two callables, checked by ⟨Wz, y⟩ = ⟨z, Wᵀy⟩ at construction.

    The dot test uses random z and y per sample, so it also catches a bias, a nonlinearity and a
    mixing of the batch. It runs in float64 if both callables take it (modules are evaluated with
    their parameters in float64), else in ``dtype``.

    Args:
        forward: [B, *in_shape] → [B, *out_shape].
        adjoint: [B, *out_shape] → [B, *in_shape].
        in_shape: shape of one input.
        norm_bound: a known upper bound on ‖W‖₂. Without one, and where the smaller side is above
            2048, the upper bound of the norm is inf: no certificate can be given.
        dtype: dtype of the callables' weights. None: that of a module's parameters, else float32.
        device: likewise; None: the parameters' device, else the CPU.
    """

    def __init__(
        self,
        forward: Callable[[Tensor], Tensor],
        adjoint: Callable[[Tensor], Tensor],
        in_shape: Sequence[int],
        *,
        norm_bound: float | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if norm_bound is not None and not (math.isfinite(norm_bound) and norm_bound >= 0):
            raise ValueError(f"norm_bound={norm_bound!r}: expected a finite number ≥ 0 or None.")
        owned = [
            p
            for part in (forward, adjoint)
            if isinstance(part, nn.Module)
            for p in part.parameters()
        ]
        self._forward, self._adjoint = forward, adjoint
        self._in_shape = tuple(in_shape)
        self._dtype = dtype or (owned[0].dtype if owned else torch.float32)
        self._device = torch.device(device or (owned[0].device if owned else "cpu"))
        self.norm_bound = norm_bound
        self._out_shape = self._dot_test()

    @torch.no_grad()
    def _dot_test(self) -> tuple[int, ...]:
        try:
            return self._dot_test_in(
                in_double(self._forward), in_double(self._adjoint), torch.float64
            )
        except (RuntimeError, TypeError):
            return self._dot_test_in(self._forward, self._adjoint, self._dtype)

    def _dot_test_in(
        self,
        forward: Callable[[Tensor], Tensor],
        adjoint: Callable[[Tensor], Tensor],
        dtype: torch.dtype,
    ) -> tuple[int, ...]:
        source = torch.Generator().manual_seed(0)

        def draw(shape: Sequence[int]) -> Tensor:
            t = torch.randn((3, *shape), generator=source, dtype=torch.float64)
            return t.to(self._device, dtype)

        z = draw(self._in_shape)
        wz = forward(z)
        # y = Wz sees a wrong adjoint at full size, a random y sees the parts that Wz is blind to.
        for y in (wz, draw(wz.shape[1:])):
            wty = adjoint(y.to(dtype))
            if wz.shape[:1] != z.shape[:1] or wty.shape != z.shape:
                raise ValueError(
                    f"forward takes {tuple(z.shape)} to {tuple(wz.shape)} and adjoint takes that "
                    f"to {tuple(wty.shape)}: the adjoint must come back to the input's shape."
                )
            allowed = max(_DOT_TOLERANCE[t.dtype] for t in (z, wz, wty))
            a, b, p, q = (t.flatten(1).double() for t in (wz, y, z, wty))
            left, right = (a * b).sum(1), (p * q).sum(1)
            scale = a.norm(dim=1) * b.norm(dim=1) + p.norm(dim=1) * q.norm(dim=1)
            gaps = (left - right).abs() / scale.clamp_min(1e-300)
            if not bool((gaps <= allowed).all()):
                worst = int(gaps.nan_to_num(math.inf).argmax())
                raise ValueError(
                    "adjoint is not the adjoint of forward (or forward is not linear): ⟨Wz, y⟩ = "
                    f"{float(left[worst]):.6g} but ⟨z, Wᵀy⟩ = {float(right[worst]):.6g}, "
                    f"relative gap {float(gaps[worst]):.2e}, allowed {allowed:.0e} in {dtype}."
                )
        return tuple(wz.shape[1:])

    def __call__(self, z: Tensor) -> Tensor:
        return self._forward(z)

    def adjoint(self, y: Tensor, in_shape: Sequence[int] | None = None) -> Tensor:
        return self._adjoint(y)

    def output_shape(self, in_shape: Sequence[int]) -> tuple[int, ...]:
        if tuple(in_shape) != self._in_shape:
            raise ValueError(
                f"The module W was given for inputs {self._in_shape}, got {tuple(in_shape)}."
            )
        return self._out_shape

    def check_output(self, out_shape: Sequence[int]) -> None:
        if tuple(out_shape) != self._out_shape:
            raise ValueError(
                f"The module W gives {self._out_shape}, which does not fit {tuple(out_shape)}."
            )

    def cast(self, dtype: torch.dtype) -> ModuleOperator:
        return self

    @torch.no_grad()
    def norm_upper(self) -> float:
        """The given bound, or that of the materialized matrix, or inf where that is too large.

        The matrix is what the callables return in their own dtype; their rounding of each entry
        is added to the bound.
        """
        if self.norm_bound is not None:
            return float(self.norm_bound)
        n_in, n_out = math.prod(self._in_shape), math.prod(self._out_shape)
        if min(n_in, n_out) > _DENSE_LIMIT:
            return math.inf
        small, shape, apply = (
            (n_in, self._in_shape, self._forward)
            if n_in <= n_out
            else (n_out, self._out_shape, self._adjoint)
        )
        columns = [
            apply(block.reshape(-1, *shape)).flatten(1)
            for block in torch.split(torch.eye(small, dtype=self._dtype, device=self._device), 64)
        ]
        matrix = exact(torch.cat(columns))
        return dense_norm(matrix).upper + 4 * torch.finfo(self._dtype).eps * float(matrix.norm())

    @property
    def in_shape(self) -> tuple[int, ...] | None:
        return self._in_shape

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def device(self) -> torch.device:
        return self._device


def in_double(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A module evaluated with its parameters in float64; any other callable unchanged."""
    if not isinstance(function, nn.Module):
        return function
    state = {
        name: t.detach().double() if t.is_floating_point() else t
        for name, t in [*function.named_parameters(), *function.named_buffers()]
    }
    return lambda z: torch.func.functional_call(function, state, (z,))
