"""‖W‖₂ of linear maps: an estimate from below beside a rigorous upper bound.

Convolutions. A zero-padded convolution on a finite map, with any padding, is a compression
(rows and columns left out) of the bi-infinite one, so ‖K‖ ≤ sup_θ ‖K̂(θ)‖₂ with the symbol
K̂(θ) = Σ_a K_a e^{i⟨a,θ⟩}. With stride s the same holds for the polyphase kernel of ⌈k/s⌉ taps.

Maps of a known size. An axis of n outputs reads n + ⌈k/s⌉ − 1 blocks of s pixels, so on a circle
of N ≥ n + ⌈k/s⌉ − 1 blocks no window meets itself: the convolution is a compression of the circular
one, and θ need only take the values 2πj/N. Of the p zeros on either side at stride 1 one half may
serve for both, N ≥ n + k − 1 − p. Small maps have few frequencies, and no step from a grid to a
supremum.

From a grid to the supremum. With unit u, v and a phase chosen at the maximiser θ°, the function
f(θ) = Re e^{iφ}u*K̂(θ)v is, along each axis and after centering, a real function of exponential
type d = (taps − 1)/2 with f(θ°) = sup|f| = M, and then f(θ° + t) ≥ M cos(dt) for |t| ≤ π/d
(Ehlich–Zeller; Duffin–Schaeffer). The nearest of N > 2d equispaced points is within π/N, one axis
after the other, so sup ‖K̂‖ ≤ max_grid ‖K̂‖ / (cos(πd₁/N₁) cos(πd₂/N₂)).

Everything is computed in float64, detached, with a slack for its rounding; nothing here belongs
in a solver's loop.

Rounding, for operators and kernels that bound their own. With the unit roundoff u = 2⁻⁵³ and
γ_n = nu/(1 − nu), a sum of n products in any order, with or without fused operations, obeys
|fl(Σab) − Σab| ≤ γ_n Σ|a||b| (Higham, Accuracy and Stability of Numerical Algorithms, §3.1), so for
a matrix or a convolution W of n terms an output, and an argument ẑ that itself is off by at most e,

    |fl(Wẑ) − Wz| ≤ |W|e + γ_n |W||ẑ|       entrywise; |W| is W with its weights made positive.

The library functions exp, tanh, log and division are taken to be accurate to 4 units in the last
place. States and the numbers of a problem (weights, c, γ) are exact: they are what is certified.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from equilibria.engine.transforms import functorch_active
from equilibria.engine.tree import sample_norm

UNIT = 2.0**-53
FUNCTION = 8 * UNIT  # 4 units in the last place, of a number in [1, 2)
SAFETY = 2.0  # covers terms of order u² and the rounding of the bounds themselves
_EPS = torch.finfo(torch.float64).eps
# Samples per tap and axis: cos(π/32)² = 0.990, so the grid costs at most 1% of the bound.
_SAMPLES_PER_TAP = 16
_CHUNK = 1 << 21  # complex numbers per block of symbols (32 MiB)


@dataclass(frozen=True)
class NormBound:
    """‖W‖₂ between an estimate from below and a proven upper bound (inf where none is known)."""

    estimate: float
    upper: float


def sum_error(n: int) -> float:
    """γ_n = nu/(1 − nu)."""
    return n * UNIT / (1.0 - n * UNIT)


def norm_upper(t: Tensor) -> Tensor:
    """‖·‖ per sample in float64, rounded up. [B, ...] → [B]."""
    return sample_norm([t]) * (1.0 + 2e-16 * (t[0].numel() + 8))


def exact(t: Tensor) -> Tensor:
    """The same numbers in float64, detached (on the CPU where the device has no float64)."""
    device = torch.device("cpu") if t.device.type == "mps" else t.device
    return t.detach().to(device=device, dtype=torch.float64)


def _finite(t: Tensor, what: str) -> Tensor:
    t = exact(t)
    try:
        finite = bool(torch.isfinite(t).all())
    except RuntimeError as error:
        if not functorch_active():
            raise
        raise RuntimeError(
            f"{what} has a norm for each level of torch.vmap, and bounds are single numbers: take "
            "solver=Anderson(), which needs none, give bounds=(m, L), or loop in place of vmap."
        ) from error
    if not finite:
        raise ValueError(f"{what} holds NaN or infinite entries: it has no norm.")
    return t


def dense_norm(matrix: Tensor) -> NormBound:
    """‖A‖₂ by a float64 SVD; the upper bound adds the SVD's backward error. matrix [m, n]."""
    a = _finite(matrix, "The matrix")
    if a.numel() == 0:
        return NormBound(0.0, 0.0)
    sigma = float(torch.linalg.svdvals(a)[0])
    return NormBound(sigma, sigma * (1.0 + 16 * _EPS * sum(a.shape)))


def metric_root(metric: Tensor) -> tuple[Tensor, float]:
    """R with RRᵀ = M (float64, null directions left out), and a rigorous upper bound on ‖R‖₂.

    M [k, k] must be symmetric positive semidefinite up to rounding in its own dtype → R [k, rank].
    """
    m = _finite(metric, "The metric M")
    values, vectors = torch.linalg.eigh(0.5 * (m + m.mT))
    top = max(float(values[-1]), 0.0)
    rounding = 8 * len(values) * max(torch.finfo(metric.dtype).eps, _EPS)
    size = float(m.abs().max())
    if float(values[0]) < -rounding * max(top, size):
        raise ValueError(
            "The metric M = W_hW_hᵀ must be positive semidefinite: its smallest eigenvalue is "
            f"{float(values[0]):.3e}, its largest {float(values[-1]):.3e}."
        )
    keep = values > 0
    root = vectors[:, keep] * values[keep].sqrt()
    # Eigenvalues that rounding made negative are dropped from R but not from the bound's slack.
    slack = 16 * len(values) * _EPS
    return root, math.sqrt(top * (1.0 + slack))


def is_flat(factor: Tensor) -> bool:
    """Whether σmin ≥ (1 − 1e-4)·σmax > 0 for the factor [k, m] of a metric, one value for each row.

    Then ‖AR‖ ≥ (1 − 1e-4)·‖A‖‖R‖ for every A: no bound on it is closer to it than the product.
    """
    if factor.shape[0] > factor.shape[1]:
        return False
    sigma = torch.linalg.svdvals(exact(factor))
    return float(sigma[-1]) >= (1.0 - 1e-4) * float(sigma[0]) > 0.0


def _polyphase(weight: Tensor, stride: tuple[int, int]) -> Tensor:
    """[G, o, i, kh, kw] with stride s → stride 1: [G, o, i·s_h·s_w, ⌈kh/s_h⌉, ⌈kw/s_w⌉]."""
    g, o, i, kh, kw = weight.shape
    sh, sw = stride
    padded = F.pad(weight, (0, -kw % sw, 0, -kh % sh))
    th, tw = padded.shape[-2] // sh, padded.shape[-1] // sw
    phases = padded.reshape(g, o, i, th, sh, tw, sw).permute(0, 1, 2, 4, 6, 3, 5)
    return phases.reshape(g, o, i * sh * sw, th, tw)


def waves(points: int, size: int, taps: int, like: Tensor, origin: int = 0) -> Tensor:
    """e^{iθ(a − origin)} for the first ``points`` frequencies of ``size``, [points, taps]."""
    steps = torch.arange(taps, dtype=torch.float64) - origin
    angles = torch.outer(torch.arange(points, dtype=torch.float64), steps) * (2 * math.pi / size)
    kind = torch.complex128 if like.dtype == torch.float64 else torch.complex64
    return torch.complex(angles.cos(), angles.sin()).to(device=like.device, dtype=kind)


def convolution_norm_upper(
    weight: Tensor,
    *,
    stride: tuple[int, int] = (1, 1),
    groups: int = 1,
    padding: tuple[int, int] = (0, 0),
    out_size: Sequence[int] | None = None,
) -> float:
    """Rigorous sup_θ ‖K̂(θ)‖₂ of a convolution, for every map size and every zero padding.

    weight [out, in/groups, kh, kw] → float, at most 1.0% above the supremum (exact for one tap).
    With ``out_size``, the pixels of its output, for maps of that size alone: closer, and much
    faster where they are small. ``padding`` may be left out.
    """
    w = _finite(weight, "The convolution kernel")
    axes = zip(w.shape[2:], stride, padding, out_size or (None, None), strict=True)
    grid = tuple(_points(*axis) for axis in axes)
    key = _fingerprint(w, stride, groups, grid)
    if key not in _KNOWN:
        if len(_KNOWN) >= _REMEMBERED:
            _KNOWN.pop(next(iter(_KNOWN)), None)
        _KNOWN[key] = _symbol_norm_upper(w, stride, groups, grid)
    return _KNOWN[key]


def _points(kernel: int, stride: int, padding: int, outputs: int | None) -> tuple[int, float]:
    """How many frequencies of an axis, and which part of the supremum their maximum is at least."""
    taps = -(-kernel // stride)
    free = max(1, _SAMPLES_PER_TAP * (taps - 1))
    if outputs is not None and taps > 1:
        circle = outputs + taps - 1 - (padding if stride == 1 else 0)
        if circle <= free + free // 8:  # a little more work is worth the last percent
            return circle, 1.0
    return free, math.cos(math.pi * (taps - 1) / 2 / free)


_REMEMBERED = 256
# Bounds of kernels seen lately, by their contents: a certificate asks for the same one several
# times, from copies of the layer, and each costs many eigenvalue problems.
_KNOWN: dict[bytes, float] = {}


def _fingerprint(w: Tensor, *how: object) -> bytes:
    said = f"{tuple(w.shape)} {w.dtype} {how}".encode()
    plain = w.detach().cpu().contiguous()
    while torch._C._functorch.is_gradtrackingtensor(plain):  # of torch.func.grad, vjp or jvp
        plain = torch._C._functorch.get_unwrapped(plain)
    data = ctypes.string_at(plain.data_ptr(), plain.numel() * plain.element_size())
    return hashlib.blake2b(said + data, digest_size=32).digest()


def _symbol_norm_upper(
    w: Tensor, stride: tuple[int, int], groups: int, grid: Sequence[tuple[int, float]]
) -> float:
    scale = float(w.abs().max()) if w.numel() else 0.0
    if scale == 0.0:
        return 0.0
    # Squares of tiny entries would underflow, and the bound with them.
    w = _polyphase((w / scale).reshape(groups, -1, *w.shape[1:]), stride)
    w = w if w.shape[1] <= w.shape[2] else w.transpose(1, 2)  # ‖K̂‖ = ‖K̂ᵀ‖: the smaller Gram matrix
    g, n, terms, th, tw = w.shape
    (nh, least), (nw, also) = grid
    lags, even, odd = _autocorrelation(w)
    # A real kernel has K̂(−θ) = conj K̂(θ): one of each pair is enough.
    i, j = torch.cartesian_prod(torch.arange(nh), torch.arange(nw // 2 + 1)).unbind(1)
    once = (2 * j % nw != 0) | (2 * i <= nh)
    turns = torch.stack([i[once].double() / nh, j[once].double() / nw], 1)
    angles = (2 * math.pi * turns @ lags.T).to(w.device)
    best, block = 0.0, _CHUNK * (16 if w.is_cuda else 1)
    for part in angles.split(max(1, block // (g * n * n))):
        real, imaginary = part.cos() @ even, part.sin() @ odd
        best = _largest(torch.complex(real, imaginary).reshape(-1, n, n), best)
    # Rounding of the Gram matrices: sums of that many products, of the size (Σ_a ‖K_a‖)² at most.
    taps = th * tw
    rounding = 16 * _EPS * (terms * taps + len(lags) + 4) * taps * float(w.square().sum())
    return scale * math.sqrt(best + rounding) / (least * also) * (1.0 + 8 * _EPS)


def _autocorrelation(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """C_l = Σ_a K_{a+l}K_aᵀ for one of each pair ±l of lags, as C_l + C_lᵀ and C_l − C_lᵀ.

    K̂(θ)K̂(θ)* = Σ_l (C_l + C_lᵀ) cos⟨l,θ⟩ + i(C_l − C_lᵀ) sin⟨l,θ⟩ with C_0 halved: the sums over
    taps are made once, not for every frequency. w [G, n, m, th, tw] → lags float64 [L, 2], and
    [L, G·n·n] twice.
    """
    g, n, _, th, tw = w.shape
    lags = [(p, q) for p in range(th) for q in range(1 - tw, tw) if p > 0 or q >= 0]
    products = []
    for p, q in lags:
        far = w[..., p:, max(q, 0) : tw + min(q, 0)]
        near = w[..., : th - p, max(-q, 0) : tw - max(q, 0)]
        products.append(far.reshape(g, n, -1) @ near.reshape(g, n, -1).mT)
    products[lags.index((0, 0))] *= 0.5
    c = torch.stack(products)
    even, odd = ((c + sign * c.mT).flatten(1) for sign in (1, -1))
    return torch.tensor(lags, dtype=torch.float64), even, odd


_CHEAP = 16  # rows up to which eigenvalues cost no more than what avoids them
_FEW = 12  # steps that tell which of many has the largest eigenvalue, more or less
_ABOVE = 1e-5  # what a bound by Cholesky lies above an eigenvalue that was computed


def _largest(gram: Tensor, best: float) -> float:
    """max(best, λmax of each), from above by at most 2e-5. gram [N, n, n], Hermitian, ≥ 0.

    G ≤ t·I exactly where t·I − G has a Cholesky factor, at a tenth of the price of eigenvalues. So
    all are compared with the largest seen so far. Of those above it a few steps of Lanczos's method
    choose one, which raises it by many steps or, where these are not enough, by an eigenvalue.
    """
    n = gram.shape[-1]
    if n <= _CHEAP or (gram.shape[0] == 1 and best == 0.0):
        return max(best, float(torch.linalg.eigvalsh(gram).amax()))
    # The factor is exact for a matrix within (n + 1)² eps of the given one (Higham, Theorem 10.3).
    slack = 1.0 + 16 * (n + 1) ** 2 * _EPS
    level = best / slack
    source = torch.Generator().manual_seed(0)
    start = torch.randn(n, 1, generator=source, dtype=torch.float64).to(gram)
    while True:
        gram = gram[~_below(gram, level)] if level > 0.0 else gram
        if gram.shape[0] == 0:
            return max(best, level * slack)
        v = start.expand(len(gram), -1, -1)
        top = int(top_ritz(partial(torch.matmul, gram), v, steps=_FEW).argmax())
        found = float(top_ritz(partial(torch.matmul, gram[top, None]), start[None]))
        if not found > level:  # NaN too: of what overflows there is no eigenvalue, an error
            found = float(torch.linalg.eigvalsh(gram[top])[-1])
        level = max(level, found * (1.0 + _ABOVE))
        if level <= 0.0:  # zero at all frequencies of this block: a difference, along one axis
            return max(best, float(torch.linalg.eigvalsh(gram).amax()))


def _below(gram: Tensor, bound: float) -> Tensor:
    """[N] bool: bound·I − G has a Cholesky factor, so that G ≤ bound·I up to its rounding."""
    distance = -gram
    distance.diagonal(dim1=1, dim2=2).add_(bound)
    failed: Tensor = torch.linalg.cholesky_ex(distance).info
    return failed == 0


def top_ritz(
    apply: Callable[[Tensor], Tensor], v: Tensor, *, steps: int = 96, rtol: float = 1e-7
) -> Tensor:
    """λmax of self-adjoint maps by Lanczos's method: from below, up to rounding. v [N, ...] → [N].

    It ends when the largest Ritz value has not changed by ``rtol`` in the last eight steps. A loss
    of orthogonality gives copies of Ritz values, and does not raise the largest one.
    """
    dims = tuple(range(1, v.ndim))
    shape = (-1, *[1] * (v.ndim - 1))

    def length(t: Tensor) -> Tensor:
        found: Tensor = torch.linalg.vector_norm(t, dim=dims)
        return found

    tiny = torch.finfo(length(v).dtype).tiny
    v = v / length(v).clamp_min(tiny).reshape(shape)
    before, beta = torch.zeros_like(v), torch.zeros_like(length(v))
    diagonal: list[Tensor] = []
    beside: list[Tensor] = []
    found = torch.zeros_like(beta)
    for step in range(1, steps + 1):
        image = apply(v)
        alpha = (v.conj() * image).sum(dims).real
        if diagonal:  # an invariant space is exhausted where v = 0: repeat a value inside
            alpha = torch.where(length(v) > 0, alpha, diagonal[0])
        image = image - alpha.reshape(shape) * v - beta.reshape(shape) * before
        diagonal.append(alpha)
        if step % 8 == 0 or step == steps:
            last, t = found, torch.diag_embed(torch.stack(diagonal, 1))
            if beside:
                off = torch.stack(beside, 1)
                t = t + torch.diag_embed(off, 1) + torch.diag_embed(off, -1)
            size = t.abs().amax((1, 2)).clamp_min(tiny)  # LAPACK fails on numbers near underflow
            scaled = t / size[:, None, None]
            known = torch.isfinite(scaled).all(2).all(1)  # one map with NaN harms no other
            found = torch.linalg.eigvalsh(torch.where(known[:, None, None], scaled, 0.0))[:, -1]
            found = torch.where(known, found * size, torch.nan)
            if not functorch_active() and bool((~known | (found <= last * (1.0 + rtol))).all()):
                break
        beta = length(image)
        beside.append(beta)
        before, v = v, image / beta.clamp_min(tiny).reshape(shape)
    return found


def patched_kernel(
    weight: Tensor, root: Tensor, *, stride: tuple[int, int], channels: int, size: int
) -> tuple[Tensor, tuple[int, int]]:
    """The convolution that A: z → (patch rows of Wz)R is, with its stride s·p.

    A patch is p × p outputs of the stride-s convolution W, so A reads windows of k + s(p − 1)
    pixels every s·p pixels. weight [C, in, kh, kw], root [c_s·p², m] →
    [(C/c_s)·m, in, kh + s(p−1), kw + s(p−1)].
    """
    w = exact(weight)
    out, cin, kh, kw = w.shape
    sh, sw = stride
    grouped = w.reshape(out // channels, channels, cin, kh, kw)
    r = exact(root).reshape(channels, size, size, -1)
    height, width = kh + sh * (size - 1), kw + sw * (size - 1)
    full = w.new_zeros(out // channels, r.shape[-1], cin, height, width)
    for i in range(size):
        for j in range(size):
            window = full[..., sh * i : sh * i + kh, sw * j : sw * j + kw]
            window += torch.einsum("gcxab,cm->gmxab", grouped, r[:, i, j])
    return full.flatten(0, 1), (sh * size, sw * size)


@torch.no_grad()
def estimated_norm(
    gram: Callable[[Tensor], Tensor],
    shape: Sequence[int],
    upper: float,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> NormBound:
    """‖A‖₂ from z → AᵀAz by Lanczos's method, from below to rounding, beside a bound on it.

    Two fixed starts run side by side in the batch, and the larger value is returned.
    """
    source = torch.Generator().manual_seed(0)
    work = torch.promote_types(dtype, torch.float32)
    start = torch.randn((2, *shape), generator=source, dtype=work).to(device)
    top = float(top_ritz(lambda v: gram(v.to(dtype)).to(work), start).amax())
    return NormBound(min(math.sqrt(max(top, 0.0)), upper), upper)
