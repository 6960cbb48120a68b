"""W of convolutional monotone layers, on one map or on several of halving resolution.

One tier: Wz = ((1 − m)I − AᵀA + B − Bᵀ)z is one convolution of 2k − 1 taps. With tiers
z = (z₀, z₁, …) (monDEQ's multi-tier form) A gets a lower diagonal of stride-2 convolutions
Nᵢ: zᵢ → zᵢ₊₁ and the skew part is chosen so that the upper diagonal of W vanishes,

    (Wz)ᵢ = ((1 − m)I − AᵢᵀAᵢ − NᵢᵀNᵢ + Bᵢ − Bᵢᵀ)zᵢ − 2AᵢᵀNᵢ₋₁zᵢ₋₁.

The symmetric part of I − W is mI plus that of AᵀA, A the block matrix of Aᵢ and Nᵢ: monotone
whatever the weights. W is block triangular, so its resolvent goes tier by tier.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from equilibria.engine.dense import inverse_each
from equilibria.problems.monotone_geometry import (
    Geometry,
    Plane,
    Torus,
    composed_kernel,
    delta,
    transposed_kernel,
)
from equilibria.problems.monotone_operator import MonotoneOperator, States, gram_bound, widened
from equilibria.problems.monotone_symbol import (
    kernel_norm_bound,
    phase_kernel,
    phase_kernel_down,
    symbol,
)
from equilibria.problems.norms import convolution_norm_upper, exact
from equilibria.problems.rounding import UNIT

__all__ = ["TieredMonotone", "TieredResolvent"]


class TieredMonotone(MonotoneOperator):
    """The operator above; kernels of odd size k, maps of even size where another tier follows.

    a, b: [cᵢ, cᵢ, k, k] a tier; n: [cᵢ₊₁, cᵢ, k, k] between tiers. z: ([B, cᵢ, Hᵢ, Wᵢ], …), each
    map half the size of the one before. ``dtype`` is the precision of the products (autocast).
    """

    def __init__(
        self,
        a: Sequence[Tensor],
        b: Sequence[Tensor],
        n: Sequence[Tensor],
        m: float,
        sizes: Sequence[tuple[int, int]],
        geometry: Geometry,
        dtype: torch.dtype | None = None,
    ) -> None:
        if not len(a) == len(b) == len(n) + 1 == len(sizes):
            raise ValueError(
                f"TieredMonotone takes as many A, B and sizes as tiers and one N fewer, got "
                f"{len(a)}, {len(b)}, {len(sizes)} and {len(n)}."
            )
        self.m = m
        self.sign = -1.0  # of the couplings; +1 where sizes are added up
        self.geometry = geometry
        self.sizes = tuple(sizes)
        cast = b[0].dtype if dtype is None else dtype
        self.a = tuple(t.to(cast) for t in a)
        self.b = tuple(t.to(cast) for t in b)
        self.n = tuple(t.to(cast) for t in n)
        # Composed from the weights as used, so that W is monotone in the lower precision too.
        self.kernels = tuple(
            composed_kernel(widened(p), widened(q), m).to(cast)
            for p, q in zip(self.a, self.b, strict=True)
        )

    def _with(self, **changes: object) -> TieredMonotone:
        twin = object.__new__(TieredMonotone)
        twin.__dict__.update(self.__dict__)
        twin.__dict__.update(changes)
        return twin

    def __call__(self, z: States) -> States:
        space, out = self.geometry, []
        below: Tensor | None = None
        for i, part in enumerate(z):
            value = space.same(part, self.kernels[i])
            if below is not None:
                value = value + 2.0 * self.sign * space.out_adjoint(below, self.a[i])
            if i < len(self.n):
                below = space.down(part, self.n[i])
                value = value + self.sign * space.down_adjoint(below, self.n[i])
            out.append(value)
        return tuple(out)

    def adjoint(self, g: States) -> States:
        space, out = self.geometry, []
        for i, part in enumerate(g):
            value = space.same(part, transposed_kernel(self.kernels[i]))
            if i < len(self.n):
                y = space.down(part, self.n[i]) + 2.0 * space.out(g[i + 1], self.a[i + 1])
                value = value + self.sign * space.down_adjoint(y, self.n[i])
            out.append(value)
        return tuple(out)

    # ------------------------------------------------------------------ bounds

    def _difference(self, i: int) -> Tensor:
        """The kernel of I − Wᵢᵢ without NᵢᵀNᵢ."""
        kernel = widened(self.kernels[i])
        return delta(kernel.shape[0], kernel, kernel.shape[-1] // 2) - kernel

    def norm_bound(self) -> Tensor:
        """The norm of the matrix of the blocks' norms."""
        size, norm = len(self.kernels), kernel_norm_bound
        diagonal = [norm(self._difference(i)) for i in range(size)]
        if size == 1:
            return diagonal[0]
        down = [norm(phase_kernel_down(widened(n), self.geometry.p)[0]) for n in self.n]
        outs = [norm(a) for a in self.a[1:]]
        zero = torch.zeros_like(diagonal[0])
        rows = []
        for i in range(size):
            row = [zero] * size
            row[i] = diagonal[i] + down[i].square() if i < size - 1 else diagonal[i]
            if i:
                row[i - 1] = 2.0 * outs[i - 1] * down[i - 1]
            rows.append(torch.stack(row))
        return gram_bound(torch.stack(rows))

    def scale(self) -> Tensor:
        """Of the diagonal blocks, without NᵀN; each tier weighs as many entries as it has."""
        total, entries = torch.zeros((), device=self.kernels[0].device), 0
        for i, (height, width) in enumerate(self.sizes):
            kernel = self._difference(i).detach()
            total = total + height * width * kernel.square().sum()
            entries += height * width * kernel.shape[0]
        return (total / entries).sqrt()

    def norm_uppers(self) -> tuple[float, float]:
        twin = self.double()
        size = len(twin.kernels)
        down = [convolution_norm_upper(n, stride=(2, 2)) for n in twin.n]
        outs = [convolution_norm_upper(a) for a in twin.a]
        found = []
        for kernels in ([twin._difference(i) for i in range(size)], list(twin.kernels)):
            norms = torch.zeros(size, size, dtype=torch.float64)
            for i, kernel in enumerate(kernels):
                norms[i, i] = convolution_norm_upper(kernel)
                if i < size - 1:
                    norms[i, i] += down[i] ** 2
                if i:
                    norms[i, i - 1] = 2.0 * outs[i] * down[i - 1]
            # The subtraction and these few sums and products round too.
            slack = 1.0 + 64 * UNIT * (size + 1)
            off = 2 * UNIT * max(float(k.abs().sum()) for k in kernels)
            found.append(float(torch.linalg.matrix_norm(norms, 2)) * slack + off)
        return found[0], found[1]

    def modulus_lower(self) -> float:
        """m less the norm of what rounding did to the symmetric part of the composed kernels.

        ‖E‖ ≤ Σ_a ‖E_a‖_F over the taps; Nᵢ and the Aᵢ beside it are used as they are.
        """
        twin = self.double()
        worst = 0.0
        for a, b, kernel in zip(twin.a, twin.b, twin.kernels, strict=True):
            error = kernel - composed_kernel(a, b, self.m)
            error = 0.5 * (error + transposed_kernel(error))
            terms = a.shape[0] * a.shape[-1] ** 2 + 8
            size = -composed_kernel(a.abs(), torch.zeros_like(b), 1.0)  # |A|ᵀ|A|
            size = size + abs(1.0 - self.m) * delta(b.shape[0], b, a.shape[-1] - 1)
            size = size + F.pad(b.abs() + transposed_kernel(b.abs()), (a.shape[-1] // 2,) * 4)
            worst = max(worst, _taps_norm(error) + 2 * terms * UNIT * _taps_norm(size))
        return self.m - worst * (1.0 + 1e-12)

    def double(self) -> TieredMonotone:
        cast = {name: tuple(map(exact, getattr(self, name))) for name in ("a", "b", "n", "kernels")}
        return self._with(**cast)

    def rounding(self, z: States, *, transposed: bool = False) -> States:
        """γ times |K||z| + |N|ᵀ|N||z| + 2|A|ᵀ|N||z|: the sums in a row have their γ added up."""
        kernel, a = self.kernels[0], self.a[0]
        widest = max(k.shape[0] for k in self.kernels)
        terms = widest * (kernel.shape[-1] ** 2 + 3 * a.shape[-1] ** 2) + 8
        cast = {name: tuple(t.abs() for t in getattr(self, name)) for name in ("a", "n", "kernels")}
        sizes = self._with(sign=1.0, **cast)
        parts = tuple(part.abs() for part in z)
        gamma = terms * UNIT / (1.0 - terms * UNIT)
        return tuple(gamma * t for t in (sizes.adjoint(parts) if transposed else sizes(parts)))

    # ------------------------------------------------------------------ the resolvent

    @property
    def border(self) -> int:
        return self.geometry.border if isinstance(self.geometry, Torus) else 0

    def lifted(self) -> TieredMonotone:
        """The same weights on the torus around each map."""
        if isinstance(self.geometry, Torus):
            return self
        p = self.geometry.p
        sizes = tuple((h + 2 * p, w + 2 * p) for h, w in self.sizes)
        return self._with(geometry=Torus(p, border=p), sizes=sizes)

    def resolvent(self, alpha: float | Tensor) -> TieredResolvent:
        if not isinstance(self.geometry, Torus):
            raise ValueError(
                "On a plane I + α(I − W) has no cheap inverse; take the resolvent of lifted()."
            )
        with torch.autocast(self.kernels[0].device.type, enabled=False):
            inverses = [self._inverse(i, alpha) for i in range(len(self.kernels))]
        return TieredResolvent(self, alpha, inverses)

    def _inverse(self, i: int, alpha: float | Tensor) -> Tensor:
        """(I + α(I − Wᵢᵢ))⁻¹ frequency by frequency, transposed for rows: [h, w, C, C]."""
        assert isinstance(self.geometry, Torus)
        rows, cols = self.sizes[i]
        kernel = self._difference(i)
        if i == len(self.n):
            system = alpha * symbol(kernel, kernel.shape[-1] // 2, rows, cols)
        else:
            rows, cols = rows // 2, cols // 2
            phases, origin = phase_kernel(kernel)
            down, shift = phase_kernel_down(widened(self.n[i]), self.geometry.shift)
            n = symbol(down, shift, rows, cols)
            system = alpha * (symbol(phases, origin, rows, cols) + n.mH @ n)
        eye = torch.eye(system.shape[-1], dtype=system.dtype, device=system.device)
        inverse = inverse_each(eye + system)
        return inverse.mT


class TieredResolvent:
    """V u by forward substitution, each tier's diagonal block inverted by FFT."""

    def __init__(
        self, operator: TieredMonotone, alpha: float | Tensor, inverses: Sequence[Tensor]
    ) -> None:
        self.geometry = operator.geometry
        self.alpha = alpha
        self.inverses = tuple(inverses)
        self.a = tuple(widened(t) for t in operator.a)
        self.n = tuple(widened(t) for t in operator.n)

    def __call__(self, u: States) -> States:
        space, out = self.geometry, []
        last: Tensor | None = None
        with torch.autocast(u[0].device.type, enabled=False):
            for i, part in enumerate(u):
                right = widened(part)
                if last is not None:
                    coupled = space.out_adjoint(space.down(last, self.n[i - 1]), self.a[i])
                    right = right - 2.0 * self.alpha * coupled
                last = self._solve(right, i, self.inverses[i])
                out.append(last.to(part.dtype))
        return tuple(out)

    def transposed(self, u: States) -> States:
        """Vᵀu, by backward substitution."""
        space, out = self.geometry, []
        last: Tensor | None = None
        with torch.autocast(u[0].device.type, enabled=False):
            for i in reversed(range(len(u))):
                right = widened(u[i])
                if last is not None:
                    coupled = space.down_adjoint(space.out(last, self.a[i + 1]), self.n[i])
                    right = right - 2.0 * self.alpha * coupled
                # Of a real map the transpose is the adjoint, whose symbol is V̂ᴴ.
                last = self._solve(right, i, self.inverses[i].mH)
                out.append(last.to(u[i].dtype))
        return tuple(reversed(out))

    def _solve(self, x: Tensor, i: int, inverse: Tensor) -> Tensor:
        """One diagonal block: [B, c, H, W] → the same."""
        coupled = i < len(self.n)
        if coupled:
            x = F.pixel_unshuffle(x, 2)
        size = x.shape[-2:]
        waves = torch.fft.rfft2(x).permute(2, 3, 0, 1) @ inverse
        found = torch.fft.irfft2(waves.permute(2, 3, 0, 1), s=size)
        return F.pixel_shuffle(found, 2) if coupled else found


def _taps_norm(kernel: Tensor) -> float:
    """Σ_a ‖K_a‖_F ≥ sup_θ ‖K̂(θ)‖."""
    return float(torch.linalg.vector_norm(kernel, dim=(0, 1)).sum())


def make_geometry(padding: str, kernel_size: int) -> Geometry:
    """The plane for "zeros", the torus for "circular"."""
    p = kernel_size // 2
    return Plane(p) if padding == "zeros" else Torus(p)
