"""W of convolutional monotone layers, on one map or on several of halving resolution.

One tier: Wz = ((1 − m)I − AᵀA + B − Bᵀ)z is one convolution of 2k − 1 taps. With tiers
z = (z₀, z₁, …) (monDEQ's multi-tier form) A gets a lower diagonal of stride-2 convolutions
Nᵢ: zᵢ → zᵢ₊₁ and the skew part is chosen so that the upper diagonal of W vanishes,

    (Wz)ᵢ = ((1 − m)I − AᵢᵀAᵢ − NᵢᵀNᵢ + Bᵢ − Bᵢᵀ)zᵢ − 2AᵢᵀNᵢ₋₁zᵢ₋₁.

The symmetric part of I − W is mI plus that of AᵀA, A the block matrix of Aᵢ and Nᵢ: monotone
whatever the weights. W is block triangular, so its resolvent goes tier by tier.

Padding. On the plane (zeros) every map is part of an infinite one that is zero elsewhere: A and N
keep all of their outputs that a map can reach, p = k//2 more pixels on each side than the map, so
that AᵀA is a compression of the infinite one and its kernel can be composed. On a torus (circular)
FFT inverts. The torus that stands for a plane has a border of p pixels around each map: where it
holds zeros nothing that leaves one side reaches the other, so circular convolutions compute the
zero-padded ones; the prior holds it at zero (monDEQ's border ReLU).

Frequencies. K̂(θ) = Σ_a K_a e^{i⟨a, θ⟩}. A stride-2 convolution N, and so NᵀN, commutes with shifts
by two pixels only. Written on the four phases of a map (``pixel_unshuffle``: c channels on H × W
become 4c on H/2 × W/2), it is a plain convolution again: every symbol is a matrix a frequency.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from equilibria.engine.dense import inverse_each
from equilibria.problems.monotone_operator import MonotoneOperator, Resolvent, States, gram_bound
from equilibria.problems.norms import (
    UNIT,
    convolution_norm_upper,
    exact,
    sum_error,
    waves,
)
from equilibria.problems.parts import replaced
from equilibria.problems.priors import at_least_float32


def transposed_kernel(kernel: Tensor) -> Tensor:
    """The kernel of Kᵀ: channels exchanged, taps mirrored. [o, i, k, k] → [i, o, k, k]."""
    return kernel.transpose(0, 1).flip(2, 3)


def delta(channels: int, like: Tensor, reach: int) -> Tensor:
    """The kernel of I with 2·reach + 1 taps, [channels, channels, ., .]."""
    eye = torch.eye(channels, dtype=like.dtype, device=like.device)
    return F.pad(eye[:, :, None, None], (reach,) * 4)


def composed_kernel(a: Tensor, b: Tensor, m: float) -> Tensor:
    """The one kernel of (1 − m)I − AᵀA + B − Bᵀ; a, b [c, c, k, k] → [c, c, 2k − 1, 2k − 1].

    (AᵀA)[c, c', s] = Σ_o Σ_a A[o, c', a + s]A[o, c, a], the correlation of A with itself.
    """
    k = a.shape[-1]
    maps = a.transpose(0, 1)
    gram = F.conv2d(maps, maps, padding=k - 1).transpose(0, 1)
    skew = F.pad(b - transposed_kernel(b), (k // 2,) * 4)
    return (1.0 - m) * delta(b.shape[0], b, k - 1) - gram + skew


@dataclass(frozen=True)
class Plane:
    """Zero padding. ``out`` has p more pixels on each side; N's output j reads 2j − p … 2j + p.

    p is half the taps of A, B and N, rounded down.
    """

    p: int

    def out(self, z: Tensor, a: Tensor) -> Tensor:
        """Az with every output that it reaches; with the composed kernel, on the map itself."""
        return F.conv2d(z, a, padding=2 * self.p)

    def out_adjoint(self, y: Tensor, a: Tensor) -> Tensor:
        """Aᵀy."""
        return F.conv_transpose2d(y, a, padding=2 * self.p)

    def down(self, z: Tensor, n: Tensor) -> Tensor:
        """Nz with stride 2, on the grid of ``out`` of the next tier."""
        return F.conv2d(z, n, stride=2, padding=3 * self.p)

    def down_adjoint(self, y: Tensor, n: Tensor) -> Tensor:
        """Nᵀy."""
        return F.conv_transpose2d(y, n, stride=2, padding=3 * self.p, output_padding=1)


@dataclass(frozen=True)
class Torus:
    """Circular padding; with ``border`` p the torus around a plane's maps, without it a map itself.

    With a border a map of H pixels sits in a torus of H + 2p. N leads to a torus of half its size,
    (H + 2p)/2 = H/2 + p pixels, which lie inside the next tier's H/2 + 2p where the plane has
    them; the others are zero.
    """

    p: int
    border: int = 0

    @property
    def shift(self) -> int:
        """N's first output reads from the pixel −shift on."""
        return 2 * (self.p // 2) if self.border else self.p

    def out(self, z: Tensor, a: Tensor) -> Tensor:
        side = a.shape[-1] // 2
        return F.conv2d(_wrap(z, side, side), a)

    def out_adjoint(self, y: Tensor, a: Tensor) -> Tensor:
        return self.out(y, transposed_kernel(a))

    def _sides(self) -> tuple[int, int]:
        return self.shift, max(0, 2 * self.p - 1 - self.shift)

    def _margins(self) -> tuple[int, int]:
        """The zeros around N's output in the next tier's torus, on the left and on the right."""
        return (self.border - self.border // 2, self.border // 2)

    def down(self, z: Tensor, n: Tensor) -> Tensor:
        y = F.conv2d(_wrap(z, *self._sides()), n, stride=2)
        return F.pad(y, self._margins() * 2) if self.border else y

    def down_adjoint(self, y: Tensor, n: Tensor) -> Tensor:
        left, right = self._margins()
        if self.border:
            y = y[..., left : y.shape[-2] - right, left : y.shape[-1] - right]
        spread = F.conv_transpose2d(y, n, stride=2, output_padding=0 if self.p else 1)
        return _unwrap(spread, *self._sides())


Geometry = Plane | Torus
"""How maps continue beyond their edges."""


def _wrap(z: Tensor, left: int, right: int) -> Tensor:
    return F.pad(z, (left, right, left, right), mode="circular") if left or right else z


def _unwrap(y: Tensor, left: int, right: int) -> Tensor:
    """The adjoint of :func:`_wrap`: what was copied to the sides is added where it came from."""
    for dim in (-1, -2):
        size = y.shape[dim] - left - right
        core = y.narrow(dim, left, size)
        before = (0, 0) if dim == -2 else ()
        if left:
            core = core + F.pad(y.narrow(dim, 0, left), (*before, size - left, 0))
        if right:
            core = core + F.pad(y.narrow(dim, left + size, right), (*before, 0, size - right))
        y = core
    return y


# Samples per tap and axis: cos(π/10)² = 0.905, so the grid costs at most 10% of the bound.
_SAMPLES_PER_TAP = 5
_SQUARINGS = 4


def symbol(kernel: Tensor, origin: int, rows: int, cols: int) -> Tensor:
    """K̂ at the frequencies of rfft2 on a rows × cols torus: [o, c, t, t] → [rows, ., o, c].

    ``origin`` is the tap that stands over the output pixel.
    """
    taps = kernel.shape[-1]
    down = waves(rows, rows, taps, kernel, origin)
    across = waves(cols // 2 + 1, cols, taps, kernel, origin)
    half = torch.einsum("lb,ocab->laoc", across, kernel.to(down.dtype))
    return torch.einsum("ja,laoc->jloc", down, half)


def phase_kernel(kernel: Tensor) -> tuple[Tensor, int]:
    """K on the four phases: [o, c, 4p + 1, .] centered → [4o, 4c, 2p + 1, .], and its origin.

    Output pixel 2i + φ reads 2(i + τ) + ψ with the tap a = 2τ + ψ − φ + 2p.
    """
    taps = (kernel.shape[-1] + 1) // 2
    rows = [_input_phases(kernel, taps, 1 - i, 1 - j) for i in (0, 1) for j in (0, 1)]
    return torch.stack(rows, 1).flatten(0, 1), taps // 2


def phase_kernel_down(kernel: Tensor, shift: int) -> tuple[Tensor, int]:
    """A stride-2 N on the phases of its input: [o, c, k, k] → [o, 4c, ., .], and its origin.

    Output pixel j reads 2j − shift + a = 2(j + τ) + ψ.
    """
    origin = (shift + 1) // 2
    taps = (kernel.shape[-1] - 1 - shift) // 2 + origin + 1
    first = shift + 1 - 2 * origin
    return _input_phases(kernel, taps, first, first), origin


def _input_phases(kernel: Tensor, taps: int, top: int, left: int) -> Tensor:
    """Every second tap from (top + i, left + j) on, for the phases (i, j) of the input."""
    padded = F.pad(kernel, (1, 1, 1, 1))
    length = 2 * taps - 1
    parts = [
        padded[..., top + i : top + i + length : 2, left + j : left + j + length : 2]
        for i in (0, 1)
        for j in (0, 1)
    ]
    return torch.stack(parts, 2).flatten(1, 2)


def kernel_norm_bound(kernel: Tensor) -> Tensor:
    """sup_θ ‖K̂(θ)‖ from above (up to rounding) as in ``norms.py``: a number on the device."""
    with torch.no_grad():
        kernel = at_least_float32(kernel.detach())
        taps = kernel.shape[-1]
        points = max(1, _SAMPLES_PER_TAP * (taps - 1))
        shrink = math.cos(math.pi * (taps - 1) / 2 / points) ** 2
        found = gram_bound(symbol(kernel, 0, points, points), _SQUARINGS)
        return found.amax() / shrink


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
            composed_kernel(at_least_float32(p), at_least_float32(q), m).to(cast)
            for p, q in zip(self.a, self.b, strict=True)
        )

    def __call__(self, z: States) -> States:
        space, out = self.geometry, []
        below: Tensor | None = None
        for i, part in enumerate(z):
            value = space.out(part, self.kernels[i])
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
            value = space.out(part, transposed_kernel(self.kernels[i]))
            if i < len(self.n):
                y = space.down(part, self.n[i]) + 2.0 * space.out(g[i + 1], self.a[i + 1])
                value = value + self.sign * space.down_adjoint(y, self.n[i])
            out.append(value)
        return tuple(out)

    def _difference(self, i: int) -> Tensor:
        """The kernel of I − Wᵢᵢ without NᵢᵀNᵢ."""
        kernel = at_least_float32(self.kernels[i])
        return delta(kernel.shape[0], kernel, kernel.shape[-1] // 2) - kernel

    def norm_bound(self) -> Tensor:
        """The norm of the matrix of the blocks' norms."""
        norm = kernel_norm_bound
        diagonal = [norm(self._difference(i)) for i in range(len(self.kernels))]
        if len(diagonal) == 1:
            return diagonal[0]
        down = [norm(phase_kernel_down(at_least_float32(n), self.geometry.p)[0]) for n in self.n]
        return gram_bound(_block_norms(diagonal, down, [norm(a) for a in self.a[1:]]))

    def scale(self) -> Tensor:
        """Of the diagonal blocks, without NᵀN; each tier weighs as many entries as it has."""
        total, entries = torch.zeros((), device=self.kernels[0].device), 0
        for i, (height, width) in enumerate(self.sizes):
            kernel = self._difference(i).detach()
            total = total + height * width * kernel.square().sum()
            entries += height * width * kernel.shape[0]
        return (total / entries).sqrt()

    def norm_uppers(self) -> tuple[float, float]:
        def upper(kernel: Tensor, stride: int = 1) -> Tensor:
            found = convolution_norm_upper(kernel, stride=(stride, stride))
            return torch.tensor(found, dtype=torch.float64)

        twin = self.double()
        size = len(twin.kernels)
        down, outs = [upper(n, 2) for n in twin.n], [upper(a) for a in twin.a[1:]]
        found = []
        for kernels in ([twin._difference(i) for i in range(size)], list(twin.kernels)):
            norms = _block_norms([upper(kernel) for kernel in kernels], down, outs)
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
        return replaced(self, **cast)

    def rounding(self, z: States, *, transposed: bool = False) -> States:
        """γ times |K||z| + |N|ᵀ|N||z| + 2|A|ᵀ|N||z|: the sums in a row have their γ added up."""
        kernel, a = self.kernels[0], self.a[0]
        widest = max(k.shape[0] for k in self.kernels)
        terms = widest * (kernel.shape[-1] ** 2 + 3 * a.shape[-1] ** 2) + 8
        cast = {name: tuple(t.abs() for t in getattr(self, name)) for name in ("a", "n", "kernels")}
        sizes = replaced(self, sign=1.0, **cast)
        parts = tuple(part.abs() for part in z)
        found = sizes.adjoint(parts) if transposed else sizes(parts)
        return tuple(sum_error(terms) * t for t in found)

    @property
    def border(self) -> int:
        return self.geometry.border if isinstance(self.geometry, Torus) else 0

    def lifted(self) -> TieredMonotone:
        """The same weights on the torus around each map."""
        if isinstance(self.geometry, Torus):
            return self
        p = self.geometry.p
        sizes = tuple((h + 2 * p, w + 2 * p) for h, w in self.sizes)
        return replaced(self, geometry=Torus(p, border=p), sizes=sizes)

    def resolvent(self, alpha: float | Tensor) -> Resolvent:
        """V u by forward substitution, each tier's diagonal block inverted by FFT."""
        space = self.geometry
        if not isinstance(space, Torus):
            raise ValueError(
                "On a plane I + α(I − W) has no cheap inverse; take the resolvent of lifted()."
            )
        with torch.autocast(self.kernels[0].device.type, enabled=False):
            inverses = [self._inverse(i, alpha, space) for i in range(len(self.kernels))]
        a, n = (tuple(map(at_least_float32, weights)) for weights in (self.a, self.n))

        def apply(u: States) -> States:
            out: list[Tensor] = []
            last: Tensor | None = None
            with torch.autocast(u[0].device.type, enabled=False):
                for i, part in enumerate(u):
                    right = at_least_float32(part)
                    if last is not None:
                        coupled = space.out_adjoint(space.down(last, n[i - 1]), a[i])
                        right = right - 2.0 * alpha * coupled
                    last = _divided(right, inverses[i], coupled=i < len(n))
                    out.append(last.to(part.dtype))
            return tuple(out)

        return apply

    def _inverse(self, i: int, alpha: float | Tensor, space: Torus) -> Tensor:
        """(I + α(I − Wᵢᵢ))⁻¹ frequency by frequency, transposed for rows: [h, w, C, C]."""
        rows, cols = self.sizes[i]
        kernel = self._difference(i)
        if i == len(self.n):
            system = alpha * symbol(kernel, kernel.shape[-1] // 2, rows, cols)
        else:
            rows, cols = rows // 2, cols // 2
            phases, origin = phase_kernel(kernel)
            down, shift = phase_kernel_down(at_least_float32(self.n[i]), space.shift)
            n = symbol(down, shift, rows, cols)
            system = alpha * (symbol(phases, origin, rows, cols) + n.mH @ n)
        eye = torch.eye(system.shape[-1], dtype=system.dtype, device=system.device)
        return inverse_each(eye + system).mT


def _divided(x: Tensor, inverse: Tensor, *, coupled: bool) -> Tensor:
    """One diagonal block by FFT, on the four phases where a tier follows: [B, c, H, W] → same."""
    if coupled:
        x = F.pixel_unshuffle(x, 2)
    waves = torch.fft.rfft2(x).permute(2, 3, 0, 1) @ inverse
    found = torch.fft.irfft2(waves.permute(2, 3, 0, 1), s=x.shape[-2:])
    return F.pixel_shuffle(found, 2) if coupled else found


def _block_norms(diagonal: list[Tensor], down: list[Tensor], outs: list[Tensor]) -> Tensor:
    """‖Wᵢᵢ‖ + ‖Nᵢ‖² on the diagonal, 2‖Aᵢ‖‖Nᵢ₋₁‖ beside it; ``outs`` has the ‖Aᵢ‖ from A₁ on."""
    size = len(diagonal)
    zero = torch.zeros_like(diagonal[0])
    rows = []
    for i in range(size):
        row = [zero] * size
        row[i] = diagonal[i] + down[i].square() if i < size - 1 else diagonal[i]
        if i:
            row[i - 1] = 2.0 * outs[i - 1] * down[i - 1]
        rows.append(torch.stack(row))
    return torch.stack(rows)


def _taps_norm(kernel: Tensor) -> float:
    """Σ_a ‖K_a‖_F ≥ sup_θ ‖K̂(θ)‖."""
    return float(torch.linalg.vector_norm(kernel, dim=(0, 1)).sum())


def make_geometry(padding: str, kernel_size: int) -> Geometry:
    """The plane for "zeros", the torus for "circular"."""
    p = kernel_size // 2
    return Plane(p) if padding == "zeros" else Torus(p)
