"""The Gaussian coupling q(z) = −(1/2γ) Σᵢ exp(−γ‖(c − Wz)ᵢW_h‖²) (GEQ Eq 5–6 and 16)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from equilibria.engine.transforms import is_captured
from equilibria.ops.gaussian import (
    gaussian_energies,
    gaussian_message,
    gaussian_message_jvp,
    gaussian_weights,
    is_channels_last,
)
from equilibria.ops.gaussian_patches import (
    can_fuse,
    can_unshuffle,
    fused_message,
    merge_planes,
    patch_energies,
    plane_rows,
)
from equilibria.problems.gamma import GammaPolicy, as_gamma
from equilibria.problems.kernels import LARGE, Curvature, ImageCoupling, Reasoned
from equilibria.problems.norms import (
    FUNCTION,
    UNIT,
    NormBound,
    convolution_norm_upper,
    dense_norm,
    estimated_norm,
    exact,
    is_flat,
    metric_root,
    patched_kernel,
    sum_error,
)
from equilibria.problems.operators import (
    ConvOperator,
    DenseOperator,
    LinearOperator,
    SeparableConvOperator,
    Weights,
)
from equilibria.problems.patches import Patches

GAUSSIAN_CONCAVITY = 2.0 * math.exp(-1.5)
"""b = 2e^{−3/2} = 0.4463: −bμ²I ⪯ ∇²q ⪯ μ²I for every γ and every input (docs/facts.md, fact 1)."""

_TINY = 1e-300  # where exp underflows
_EDGE = (3.0 - math.sqrt(6.0)) / 2.0
GAUSSIAN_BEND = (6.0 - 4.0 * _EDGE) * math.sqrt(_EDGE) * math.exp(-_EDGE) * (1.0 + 1e-14)
"""max |(4a³ − 6a)e^{−a²}| = 1.9518: ‖∇³(−e^{−γ‖h‖²}/2γ)‖ ≤ 1.9518·√γ for every h.

A symmetric trilinear form attains its norm at u, u, u, and along u the function is −e^{−a²}/2 times
a factor of at most 1, whose third derivative is (4a³ − 6a)e^{−a²}, largest at a² = (3 − √6)/2.
"""

_UNKNOWN = Curvature(
    -math.inf, math.inf, True, "no bound on the norm of W is known; give ModuleOperator norm_bound"
)


def gaussian_sensitivity(
    mu: float | Tensor,
    *,
    concavity: float | Tensor = GAUSSIAN_CONCAVITY,
    top: float | Tensor = 1.0,
    modulus: float | Tensor = 1.0,
) -> Tensor:
    """Λ(μ; b, β, a) = √(β/a)·Λ₁ with μ₁ = μ√(β/a), b₁ = b/β, and inf where bμ² ≥ a. [B] or scalar.

    ‖Δz‖/‖Δc̃‖ ≤ Λ = sup_{ρ ≤ μ, Y} ρ√((β − b)Y + bβ)/(a + ρ²Y) for a fixed γ, where a is the
    modulus of G without the coupling and −bI ⪯ B ⪯ βI for the mean Hessian block B (docs/facts.md,
    fact 5). Globally b = 2e^{−3/2} and β = 1, and it is attained; at one z they are those of its
    patches. Λ₁ = μ₁/(1 + μ₁²) for μ₁² ≤ (1 − b₁)/(1 + b₁); (1 − b₁)/(2√(1 − b₁ − b₁μ₁²)) up to
    μ₁² = (1 − b₁)/(b₁(1 + b₁)); b₁μ₁/(1 − b₁μ₁²) above. Rounded up.
    """
    given = (mu, concavity, top, modulus)
    device = next((t.device for t in given if isinstance(t, Tensor)), None)
    m, b, beta, a = torch.broadcast_tensors(
        *[torch.as_tensor(t, dtype=torch.float64, device=device) for t in given]
    )
    up = 1.0 + 1e-14
    scale = (beta.clamp_min(1e-300) / a).sqrt() * up
    ratio = b / beta.clamp_min(1e-300) * up
    t = (m * scale).square()
    low = m * scale / (1.0 + t)
    middle = (1.0 - ratio) / (2.0 * (1.0 - ratio - ratio * t).clamp_min(0.0).sqrt())
    high = ratio * m * scale / (1.0 - ratio * t)
    found = torch.where(t * (ratio * (1.0 + ratio)) <= 1.0 - ratio, middle, high)
    found = torch.where(t * (1.0 + ratio) <= 1.0 - ratio, low, found)
    return torch.where((ratio * t < 1.0) & (a > 0.0), found * scale * up, math.inf)


def _energies_with_error(
    r: Tensor, r_off: Tensor, metric: Tensor | None, gamma: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """v = rM and t = γ⟨r, v⟩, each with the error of what float64 makes, for an r off by r_off."""
    k = r.shape[-1]
    v, v_off = r, r_off
    if metric is not None:
        size = metric.abs()
        v = r @ metric
        v_off = r_off @ size + sum_error(k) * (r.abs() @ size)
    s = (r * v).sum(-1).clamp_min(0.0)
    s_off = (r_off * v.abs() + (r.abs() + r_off) * v_off).sum(-1)
    s_off = s_off + sum_error(k + 1) * (r * v).abs().sum(-1)
    t = gamma * s
    return v, v_off, t, gamma * s_off + 2 * UNIT * t


def _holds(condition: Tensor) -> bool:
    """Whether a condition on values holds; unread (compile, vmap, CUDA graph capture) it passes."""
    if torch.compiler.is_compiling() or is_captured(condition):
        return True
    try:
        return bool(condition.all())
    except RuntimeError:
        return True


class Gaussian(ImageCoupling):
    """q(z) = −(1/2γ) Σᵢ exp(−γsᵢ), sᵢ = rᵢMrᵢᵀ, r = c − Wz; −∇q = Wᵀ·merge(e^{−γsᵢ}rᵢM).

    GEQ Eq 5–6 with one patch, Eq 16 and Algorithm 1 with patches; M = W_hW_hᵀ is all that is
    needed of W_h. c has the shape of Wz. Without patches a row is the whole of a sample's r.

    Args:
        W: matrix, kernel, layer or operator; z [B, *state] → Wz, shaped like c.
        c: Ux + b, [B, *out].
        gamma: γ > 0: a number, a tensor [B] or scalar (checked, which waits for the device), or a
            policy, which sees this sample's own patch energies at z = 0. Gradients pass γ to c and
            W_h, unless the policy says ``detach=True``.
        patches: how [B, C, H, W] is cut into rows of width k; None: one row per sample.
        hidden: W_h, [k, c_hid]. None (with metric None): the identity.
        metric: M, [k, k] symmetric positive semidefinite, in place of hidden.
    """

    parameters = ("c", "gamma")

    def __init__(
        self,
        W: Weights,
        c: Tensor,
        gamma: float | Tensor | GammaPolicy = 0.5,
        *,
        patches: Patches | None = None,
        hidden: Tensor | None = None,
        metric: Tensor | None = None,
    ) -> None:
        super().__init__(W, c)
        if patches is not None:
            patches.check(c.shape)
        self.patches = patches
        self.width = c[0].numel() if patches is None else patches.width
        self.metric = self._make_metric(hidden, metric)
        self._rank_one = self.width == 1 or (hidden is not None and hidden.shape[1] == 1)
        self.policy: GammaPolicy | None = None
        if isinstance(gamma, Tensor):
            self.gamma = self._check_gamma(gamma)
        else:
            self.policy = as_gamma(gamma)
            self.gamma = self.policy(self._start_energies())
            if self.policy.per_sample:  # as a tensor that is given: it may depend on x
                self.policy = None

    def at(self, c: Tensor) -> Self:
        """The same weights at another c, not checked anew; γ is that of the policy there."""
        moved = self.with_inputs(c, self.gamma)
        if self.policy is not None:
            moved.gamma = self.policy(moved._start_energies())
        return moved

    def _start_energies(self) -> Tensor:
        """‖rᵢW_h‖² at z = 0, where r = c, with its gradient. [B, P]."""
        if self.patches is None:
            return gaussian_energies(self._rows(self.c), self.metric)
        return patch_energies(self.c, self.metric, self.patches.channels, self.patches.size)

    def _make_metric(self, hidden: Tensor | None, metric: Tensor | None) -> Tensor | None:
        width = self.width
        if hidden is not None and metric is not None:
            raise ValueError("Gaussian takes hidden (W_h) or metric (M = W_hW_hᵀ), not both.")
        if hidden is not None:
            if hidden.ndim != 2 or hidden.shape[0] != width:
                got = tuple(hidden.shape)
                raise ValueError(
                    f"hidden (W_h) must be [{width}, c_hid] for rows of {width}, got {got}."
                )
            metric = hidden @ hidden.mT
        elif metric is None:
            return None
        elif tuple(metric.shape) != (width, width):
            got = tuple(metric.shape)
            raise ValueError(
                f"metric (M) must be [{width}, {width}] for rows of {width}, got {got}."
            )
        else:
            rounding = 16 * torch.finfo(metric.dtype).eps * metric.detach().abs().amax()
            if not _holds((metric - metric.mT).detach().abs() <= rounding):
                raise ValueError("metric (M = W_hW_hᵀ) must be symmetric.")
        # Exactly symmetric, so that the gradient is one: ∇sᵢ = 2rᵢM needs M = Mᵀ.
        return 0.5 * (metric + metric.mT)

    def _check_gamma(self, gamma: Tensor) -> Tensor:
        batch = self.c.shape[0]
        if tuple(gamma.shape) not in ((), (1,), (batch,)):
            raise ValueError(
                f"gamma as a tensor is a scalar or [B] = [{batch}], got {tuple(gamma.shape)}."
            )
        if not _holds((gamma > 0) & gamma.isfinite()):
            raise ValueError(f"gamma must be positive and finite for every sample, got {gamma}.")
        return gamma.to(torch.promote_types(gamma.dtype, torch.float32)).expand(batch)

    def _rows(self, r: Tensor) -> Tensor:
        """[B, *out] → [B, P, k]."""
        return r.flatten(1).unsqueeze(1) if self.patches is None else self.patches.split(r)

    def _merge(self, rows: Tensor, like: Tensor) -> Tensor:
        """[B, P, k] → [B, *out], in the memory format of ``like``."""
        if self.patches is None:
            return rows.reshape(like.shape)
        layout = torch.channels_last if is_channels_last(like) else torch.contiguous_format
        return self.patches.merge(rows, like.shape, layout)

    def _residual(self, z: Tensor) -> Tensor:
        """Wz − c = −r. The sign saves a pass: messages are odd in r, so they give ∇q itself."""
        self.check_state(z)
        return self.operator(z) - self.c

    def energies(self, z: Tensor) -> Tensor:
        """sᵢ = ‖rᵢW_h‖² of every patch, without γ. [B, *state] → [B, P], float32 or better."""
        return gaussian_energies(self._rows(self._residual(z)), self.metric)

    def value(self, z: Tensor) -> Tensor:
        weights = gaussian_weights(self.energies(z), self.gamma)
        return -0.5 * weights.sum(-1) / self.gamma

    def grad(self, z: Tensor) -> Tensor:
        return self._pull(z, down=False)

    def descent(self, z: Tensor) -> Tensor:
        """−∇q(z) = Wᵀ·merge(e^{−γsᵢ}rᵢM), r = c − Wz: the sign costs no pass."""
        return self._pull(z, down=True)

    def value_gradient(self, z: Tensor) -> Tensor:
        """∇Q(c − Wz) = merge(e^{−γsᵢ}rᵢM), where q(z; c) = Q(c − Wz)."""
        self.check_state(z)
        return self._message(self.operator(z), True)

    def value_curvature(self, norm: float | Tensor | None = None) -> Curvature:
        """−w²b/(1 − bμ²) ≤ ∇²φ ≤ w² with w = ‖W_h‖ and b = 2e^{−3/2}, γ fixed."""
        w = self.features_norm() if norm is None else 1.0
        mu = self.mu_upper(tight=True) if norm is None else norm
        room = 1.0 - GAUSSIAN_CONCAVITY * mu**2
        unique = norm is not None or room > 0.0
        lower = -(w**2) * GAUSSIAN_CONCAVITY / room * (1.0 + 1e-14) if unique else -math.inf
        return Curvature(lower, w**2, norm is None, "every c, every convex prior, γ fixed")

    def value_slope(self) -> float:
        """‖W_h‖μ: e^{−s}max(1, |1 − 2s|) ≤ 1."""
        return self.features_norm() * self.mu_upper(tight=True) * (1.0 + 1e-14)

    def _pull(self, z: Tensor, *, down: bool) -> Tensor:
        self.check_state(z)
        return self.operator.adjoint(self._message(self.operator(z), down), z.shape[1:])

    def _message(self, image: Tensor, down: bool) -> Tensor:
        """The message of Wz − c, or of c − Wz: it is odd in r."""
        first, second = (self.c, image) if down else (image, self.c)
        if self.patches is not None and self.metric is not None:
            cut = self.patches.channels, self.patches.size
            if can_fuse(image, self.c, self.metric, *cut):
                return fused_message(first, second, self.metric, self.gamma, *cut)
            r = first - second
            if can_unshuffle(r):
                message, _ = gaussian_message(plane_rows(r, *cut), self.metric, self.gamma)
                return merge_planes(message, r.shape, cut[1])
        else:
            r = first - second
        message, _ = gaussian_message(self._rows(r), self.metric, self.gamma)
        return self._merge(message, r)

    def hvp(self, z: Tensor, v: Tensor) -> Tensor:
        r = self._residual(z)
        tangent = self._rows(self.operator(v))
        change = gaussian_message_jvp(self._rows(r), tangent, self.metric, self.gamma)
        return self.operator.adjoint(self._merge(change, r), z.shape[1:])

    def mu_upper(self, *, tight: bool = False) -> float:
        """Rigorous upper bound on μ = ‖A‖₂, A: z → (rows of Wz)W_h, for maps as large as c.

        A dense W gives ‖W_hᵀW‖₂ itself. Otherwise it is ‖W‖₂‖W_h‖₂; ``tight`` (convolutions with
        patches) takes A as the one strided convolution that it is: tighter, and slower to compute.
        Where W_h scales all directions alike, as a fresh one does, the product is as close.
        """
        return self._once(("mu", tight), partial(self._compute_mu_upper, tight))

    def _compute_mu_upper(self, tight: bool) -> float:
        if self.metric is None:
            return self.norm_upper()
        root, root_norm = metric_root(self.metric)
        product = self.norm_upper() * root_norm
        w, cut = self.operator, self.patches
        tight = tight and not is_flat(root)
        if isinstance(w, DenseOperator):
            through = dense_norm(root.mT @ exact(w.weight)).upper
        elif tight and cut is not None and isinstance(w, (ConvOperator, SeparableConvOperator)):
            kernel, stride = patched_kernel(
                w.cast(torch.float64).kernel,
                root,
                stride=w.stride,
                channels=cut.channels,
                size=cut.size,
            )
            patches = tuple(side // cut.size for side in self.c.shape[2:])
            through = convolution_norm_upper(kernel, stride=stride, out_size=patches)
        else:
            return product
        # R carries the rounding of M's eigenvalues: relative to ‖M‖, so added to μ².
        slack = 64 * torch.finfo(torch.float64).eps * self.width
        return min(math.sqrt(through**2 + slack * product**2), product)

    def mu(self, in_shape: Sequence[int] | None = None, *, tight: bool = False) -> NormBound:
        """μ = ‖A‖₂ on states of ``in_shape``: Lanczos's method on AᵀA, and the rigorous bound."""
        shape = self.operator.in_shape if in_shape is None else tuple(in_shape)
        if shape is None:
            raise ValueError("Gaussian.mu needs in_shape, e.g. (channels, H, W).")
        self.check_state(self.c.new_empty((self.c.shape[0], *shape)))
        w = self.operator.cast(torch.float64)
        metric = None if self.metric is None else self.metric.detach().to(w.dtype)

        def gram(v: Tensor) -> Tensor:
            wv = w(v)
            rows = self._rows(wv)
            return w.adjoint(self._merge(rows if metric is None else rows @ metric, wv), shape)

        upper = self.mu_upper(tight=tight)
        return estimated_norm(gram, shape, upper, dtype=w.dtype, device=w.device)

    def curvature(self, *, tight: bool = False) -> Curvature:
        """−2e^{−3/2}μ² ≤ ∇²q ≤ μ², whatever γ and z (docs/facts.md, fact 1)."""
        mu2 = self.mu_upper(tight=tight) ** 2
        if math.isinf(mu2):
            return _UNKNOWN
        note = "every z and γ: e^{−s}max(1, |1−2s|) ≤ 1, e^{−s}(1−2s) ≥ −2e^{−3/2}"
        return Curvature(-GAUSSIAN_CONCAVITY * mu2, mu2, True, note)

    @torch.no_grad()
    def local_curvature(self, z: Tensor, *, tight: bool = False) -> Curvature:
        """min(0, minᵢ e^{−sᵢ}(1−2sᵢ))μ² ≤ ∇²q(z) ≤ maxᵢ e^{−sᵢ}μ², with sᵢ = γ‖hᵢ‖² at z. [B].

        The block of patch i, e^{−sᵢ}(I − 2γhᵢhᵢᵀ), has the eigenvalues e^{−sᵢ}(1−2sᵢ) along hᵢ and
        e^{−sᵢ} across (none across where W_h has one column).
        """
        self.check_state(z)
        mu2 = self.mu_upper(tight=tight) ** 2
        if math.isinf(mu2):
            return _UNKNOWN
        w = self.operator.cast(torch.float64)
        r = exact(w(z.to(w.dtype))) - exact(self.c)
        metric = None if self.metric is None else exact(self.metric)
        slack: float | Tensor = 1e-10  # float64 rounding of e^{−s} and of products with it
        magnitude = w.magnitude()
        off = UNIT * r.abs()
        if magnitude is not None:
            off = off + sum_error(magnitude[1]) * exact(magnitude[0](z.to(w.dtype).abs()))
        gamma = exact(self.gamma).unsqueeze(-1)
        _, _, s, s_off = _energies_with_error(self._rows(r), self._rows(off), metric, gamma)
        across = torch.exp(-s)
        along = across * (1.0 - 2.0 * s)
        slack = slack + 3.0 * s_off  # the slopes of both are 3 at most
        top = (slack + (along if self._rank_one else across)).amax(-1).clamp_min(0.0)
        return Curvature(
            lower=((along - slack).amin(-1).clamp(-GAUSSIAN_CONCAVITY, 0.0)) * mu2,
            upper=(top.clamp_max(1.0)) * mu2,
            rigorous=w.dtype == torch.float64,
            note="at this z, from its patch energies and the upper bound on μ",
        )

    def tight_curvature(self) -> Curvature:
        return self.curvature(tight=True)

    def tight_local_curvature(self, z: Tensor) -> Curvature:
        return self.local_curvature(z, tight=True)

    def _rounding(self, z: Tensor, size: LinearOperator, terms: int) -> Tensor:
        """∇q = Wᵀ merge(e v), v = rM, s = ⟨r, v⟩, e = exp(−γs), r = Wz − c, line by line."""
        gamma = self.gamma.unsqueeze(-1)
        wz = self.operator(z)
        r = self._rows(wz - self.c)
        r_off = self._rows(sum_error(terms) * size(z.abs()) + UNIT * (wz - self.c).abs())
        v, v_off, t, t_off = _energies_with_error(r, r_off, self.metric, gamma)
        # e^{−t} is at most e^{−(t − off)}, and differs from it by the factor 1 − e^{−off} at most.
        e = torch.exp(-t)
        e_off = torch.exp(-(t - t_off).clamp_min(0.0)) * -torch.expm1(-t_off) + FUNCTION * e + _TINY
        e_off = torch.where(t_off.isfinite(), e_off, 1.0).clamp_max(1.0)
        e, e_off = e.unsqueeze(-1), e_off.unsqueeze(-1)
        message = e * v
        off = e_off * (v.abs() + v_off) + e * v_off + 2 * UNIT * message.abs()
        merged = self._merge(off + sum_error(terms) * message.abs(), wz)
        return size.adjoint(merged, z.shape[1:])

    def hessian_lipschitz(self) -> Tensor | float | None:
        """1.9518·√γ μ³."""
        mu = self.mu_upper(tight=True)
        return None if math.isinf(mu) else GAUSSIAN_BEND * mu**3 * self.gamma.sqrt() * (1.0 + 1e-14)

    def features_norm(self) -> float:
        """‖W_h‖: c̃ is (rows of c)W_h."""
        return 1.0 if self.metric is None else metric_root(self.metric)[1]

    def lipschitz(self, modulus: float, rest: Tensor, reach: float, *, in_x: bool) -> Reasoned:
        """Λ(μ) for a fixed γ; one that changes with the input changes the map too, detached or not:
        its policy has a factor F, Λ = Fμ/m, or none.
        """
        policy, mu = self.policy, self.mu_upper(tight=True)
        if policy is None and in_x:
            return None, "γ came as a tensor, so it may depend on x; lipschitz_local holds γ fixed"
        if policy is None or not policy.input_dependent:
            sharp = float(gaussian_sensitivity(mu, modulus=rest))
            return reach * sharp, "every input, γ fixed: Λ(μ)·‖x → c̃‖, sharp"
        factor = policy.lipschitz_factor
        if factor is None:
            return None, f"none exists for {policy!r}: it grows with the number of patches"
        found = factor * mu / modulus * reach * (1.0 + 1e-14)
        return found, f"every input, γ by {policy!r}: {factor:.3f}·(μ/m)·‖x → c̃‖"

    def local_lipschitz(
        self, z: Tensor, error: Tensor, modulus: Tensor, local: Tensor, rest: Tensor
    ) -> tuple[Tensor | None, str]:
        note = "at the equilibrium near this z, from its patch energies; γ held fixed"
        mu = self.mu_upper(tight=True)
        if math.isinf(mu):
            return torch.full_like(error, math.inf), note
        if mu == 0.0:
            return torch.zeros_like(error), note
        here = self.local_curvature(z, tight=True)
        moved = GAUSSIAN_BEND * mu * self.gamma.sqrt() * error * (1.0 + 1e-14)
        concavity = (moved - here.lower / mu**2).clamp_max(GAUSSIAN_CONCAVITY)
        top = (moved + here.upper / mu**2).clamp_max(1.0)
        found = gaussian_sensitivity(
            mu, concavity=concavity, top=top, modulus=rest.to(error.device)
        )
        return torch.where(found.isnan(), math.inf, found), note

    def numbers(self, in_shape: Sequence[int]) -> dict[str, Any]:
        return super().numbers(in_shape) | {
            "hidden_norm": self.features_norm(),
            "mu": self.mu(in_shape, tight=True)
            if math.prod(in_shape) <= LARGE
            else NormBound(0.0, self.mu_upper(tight=True)),
            "gamma": "given for each sample" if self.policy is None else repr(self.policy),
        }

    def in_double(self) -> Self:
        """An M that rounding left with negative eigenvalues becomes positive semidefinite."""
        twin = super().in_double()
        if self.metric is not None:
            root, upper = metric_root(self.metric)
            nearest = root @ root.mT
            allowed = 64 * torch.finfo(torch.float64).eps * len(nearest) * upper**2
            if float((nearest - exact(self.metric)).abs().max()) > allowed:
                twin.metric = 0.5 * (nearest + nearest.mT)
        return twin


# exp(−γ‖c − y‖²) = λ⟨Φ(c), Φ(y)⟩ with λ = e^{−γ‖c‖²}e^{−γ‖y‖²}, and Φ(x) stacks √((2γ)^k/k!)·x^{⊗k}
# for k = 0, 1, … (GEQ Prop 1; the paper's Eq 7 drops 1/2γ, and λ lacks a square there).


def _exponents(c: Tensor, y: Tensor, gamma: float, terms: int) -> tuple[Tensor, Tensor]:
    """2γ⟨c, y⟩ and log λ = −γ(‖c‖² + ‖y‖²), [B] each, of checked arguments."""
    as_gamma(gamma)  # checks it
    if isinstance(terms, bool) or int(terms) != terms or terms < 1:
        raise ValueError(f"terms={terms!r}: expected an integer of at least 1.")
    if c.ndim != 2 or c.shape != y.shape:
        raise ValueError(
            f"Expected vectors [B, n], all of one shape; got {tuple(c.shape)}, {tuple(y.shape)}."
        )
    return 2.0 * gamma * (c * y).sum(-1), -gamma * (c.square().sum(-1) + y.square().sum(-1))


def truncated_gaussian_coupling(c: Tensor, y: Tensor, gamma: float, terms: int) -> Tensor:
    """q_K = −(λ/2γ) Σ_{k<K} (2γ⟨c, y⟩)^k/k! → −(1/2γ)exp(−γ‖c − y‖²) as K grows (GEQ Prop 1).

    c and y = Wz [B, n] → [B]. The sum starts from λ, so every term is at most 1; with
    γ(‖c‖² + ‖y‖²) beyond the logarithm of the smallest number (745 in float64) it is 0.
    """
    exponent, log_scale = _exponents(c, y, gamma, terms)
    total = term = torch.exp(log_scale)
    for k in range(1, terms):
        term = term * exponent / k
        total = total + term
    return -total / (2.0 * gamma)


def truncation_error_bound(c: Tensor, y: Tensor, gamma: float, terms: int) -> Tensor:
    """|q − q_K| ≤ (λ/2γ)·(|t|^K/K!)·e^{max(t, 0)}, t = 2γ⟨c, y⟩ (Lagrange's remainder). [B]."""
    t, log_scale = _exponents(c, y, gamma, terms)
    power = torch.special.xlogy(torch.full_like(t, float(terms)), t.abs())
    log_bound = log_scale + power - math.lgamma(terms + 1) + t.clamp_min(0.0)
    return torch.exp(log_bound) / (2.0 * gamma)
