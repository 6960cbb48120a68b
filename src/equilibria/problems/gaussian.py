"""The Gaussian coupling q(z) = −(1/2γ) Σᵢ exp(−γ‖(c − Wz)ᵢW_h‖²) (GEQ Eq 5–6 and 16)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor, nn

from equilibria.ops.gaussian import (
    gaussian_energies,
    gaussian_message,
    gaussian_message_jvp,
    gaussian_weights,
)
from equilibria.ops.gaussian_patches import can_fuse, fused_message, patch_energies
from equilibria.ops.gaussian_planes import can_unshuffle, merge_planes, plane_rows
from equilibria.problems.gamma import GammaPolicy, as_gamma
from equilibria.problems.kernels import Coupling, Curvature
from equilibria.problems.norms import (
    NormBound,
    convolution_norm_upper,
    dense_norm,
    exact,
    metric_root,
    patched_kernel,
    power_norm,
)
from equilibria.problems.operators import (
    ConvOperator,
    DenseOperator,
    LinearOperator,
    SeparableConvOperator,
)
from equilibria.problems.patches import Patches

__all__ = ["GAUSSIAN_CONCAVITY", "Gaussian"]

GAUSSIAN_CONCAVITY = 2.0 * math.exp(-1.5)
"""b = 2e^{−3/2} = 0.4463: −bμ²I ⪯ ∇²q ⪯ μ²I for every γ and every input (docs/facts.md, fact 1)."""

_UNKNOWN = Curvature(
    -math.inf, math.inf, True, "no bound on the norm of W is known; give ModuleOperator norm_bound"
)


def _holds(condition: Tensor) -> bool:
    """Whether a condition on values holds; where they are not known (compile, vmap) it passes."""
    if torch.compiler.is_compiling():
        return True
    try:
        return bool(condition.all())
    except RuntimeError:
        return True


class Gaussian(Coupling):
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

    def __init__(
        self,
        W: LinearOperator | Tensor | nn.Module,
        c: Tensor,
        gamma: float | Tensor | GammaPolicy = 0.5,
        *,
        patches: Patches | None = None,
        hidden: Tensor | None = None,
        metric: Tensor | None = None,
    ) -> None:
        super().__init__(W, c)
        try:
            self.operator.check_output(c.shape[1:])
        except ValueError as error:
            raise ValueError(f"Gaussian: c has the shape of Wz. {error}") from None
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
        self._mu_upper: dict[bool, float] = {}

    def _start_energies(self) -> Tensor:
        """‖rᵢW_h‖² at z = 0, where r = c, with its gradient. [B, P]."""
        if self.patches is None:
            return gaussian_energies(self._rows(self.c), self.metric)
        return patch_energies(self.c, self.metric, self.patches.channels, self.patches.size)

    def _make_metric(self, hidden: Tensor | None, metric: Tensor | None) -> Tensor | None:
        if hidden is not None and metric is not None:
            raise ValueError("Gaussian takes hidden (W_h) or metric (M = W_hW_hᵀ), not both.")
        if hidden is not None:
            if hidden.ndim != 2 or hidden.shape[0] != self.width:
                raise ValueError(
                    f"hidden (W_h) must be [{self.width}, c_hid] for rows of {self.width}, "
                    f"got {tuple(hidden.shape)}."
                )
            metric = hidden @ hidden.mT
        elif metric is None:
            return None
        elif tuple(metric.shape) != (self.width, self.width):
            raise ValueError(
                f"metric (M) must be [{self.width}, {self.width}] for rows of {self.width}, "
                f"got {tuple(metric.shape)}."
            )
        else:
            rounding = 16 * torch.finfo(metric.dtype).eps * metric.detach().abs().amax()
            if not _holds((metric - metric.mT).detach().abs() <= rounding):
                raise ValueError("metric (M = W_hW_hᵀ) must be symmetric.")
        # Exactly symmetric, so that the gradient is one: ∇sᵢ = 2rᵢM needs M = Mᵀ.
        return 0.5 * (metric + metric.mT)

    def _check_gamma(self, gamma: Tensor) -> Tensor:
        batch = self.c.shape[0]
        if gamma.ndim > 1 or (gamma.ndim == 1 and gamma.shape[0] not in (1, batch)):
            raise ValueError(
                f"gamma as a tensor is a scalar or [B] = [{batch}], got {tuple(gamma.shape)}."
            )
        if not _holds((gamma > 0) & gamma.isfinite()):
            raise ValueError(f"gamma must be positive and finite for every sample, got {gamma}.")
        return gamma.to(torch.promote_types(gamma.dtype, torch.float32)).expand(batch)

    def inputs(self) -> tuple[Tensor, ...]:
        """c and γ."""
        return self.c, self.gamma

    def with_inputs(self, *inputs: Tensor) -> Self:
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.c, other.gamma = inputs
        return other

    def _rows(self, r: Tensor) -> Tensor:
        """[B, *out] → [B, P, k]."""
        return r.flatten(1).unsqueeze(1) if self.patches is None else self.patches.split(r)

    def _merge(self, rows: Tensor, like: Tensor) -> Tensor:
        """[B, P, k] → [B, *out], in the memory format of ``like``."""
        if self.patches is None:
            return rows.reshape(like.shape)
        dense_channels = like.stride(1) == 1 and like.shape[1] > 1
        layout = torch.channels_last if dense_channels else torch.contiguous_format
        return self.patches.merge(rows, like.shape, layout)

    def check_state(self, z: Tensor) -> None:
        expected = (z.shape[0], *self.operator.output_shape(z.shape[1:])) if z.ndim else ()
        if expected != tuple(self.c.shape):
            raise ValueError(
                f"Gaussian: W takes a state {tuple(z.shape)} to {expected}, "
                f"but c is {tuple(self.c.shape)}."
            )

    def default_start(self, shape: Sequence[int] | None = None) -> Tensor:
        """z₀ = 0. ``shape`` [B, *state] is needed for convolutions."""
        if shape is None:
            if self.operator.in_shape is None:
                raise ValueError("default_start needs shape=[B, C, H, W]: c does not determine it.")
            shape = (self.c.shape[0], *self.operator.in_shape)
        start = self.c.new_zeros(tuple(shape))
        self.check_state(start)
        return start

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

    def _pull(self, z: Tensor, *, down: bool) -> Tensor:
        """Wᵀ of the message of Wz − c, or of c − Wz: messages are odd in r."""
        self.check_state(z)
        image = self.operator(z)
        first, second = (self.c, image) if down else (image, self.c)
        if self.patches is not None and self.metric is not None:
            cut = self.patches.channels, self.patches.size
            if can_fuse(image, self.c, self.metric, *cut):
                message = fused_message(first, second, self.metric, self.gamma, *cut)
                return self.operator.adjoint(message, z.shape[1:])
            r = first - second
            if can_unshuffle(r):
                message, _ = gaussian_message(plane_rows(r, *cut), self.metric, self.gamma)
                return self.operator.adjoint(merge_planes(message, r.shape, cut[1]), z.shape[1:])
        else:
            r = first - second
        message, _ = gaussian_message(self._rows(r), self.metric, self.gamma)
        return self.operator.adjoint(self._merge(message, r), z.shape[1:])

    def hvp(self, z: Tensor, v: Tensor) -> Tensor:
        r = self._residual(z)
        tangent = self._rows(self.operator(v))
        change = gaussian_message_jvp(self._rows(r), tangent, self.metric, self.gamma)
        return self.operator.adjoint(self._merge(change, r), z.shape[1:])

    def mu_upper(self, *, tight: bool = False) -> float:
        """Rigorous upper bound on μ = ‖A‖₂, A: z → (rows of Wz)W_h, for every map size.

        A dense W gives ‖W_hᵀW‖₂ itself. Otherwise it is ‖W‖₂‖W_h‖₂; ``tight`` (convolutions with
        patches) takes A as the one strided convolution that it is: closer, and dearer to compute.
        """
        if tight not in self._mu_upper:
            self._mu_upper[tight] = self._compute_mu_upper(tight)
        return self._mu_upper[tight]

    def _compute_mu_upper(self, tight: bool) -> float:
        if self.metric is None:
            return self.norm_upper()
        root, root_norm = metric_root(self.metric)
        product = self.norm_upper() * root_norm
        w = self.operator
        if isinstance(w, DenseOperator):
            # R carries the rounding of M's eigenvalues: relative to ‖M‖, so added to μ².
            slack = 64 * torch.finfo(torch.float64).eps * self.width
            through = dense_norm(root.mT @ exact(w.weight)).upper
            return min(math.sqrt(through**2 + slack * product**2), product)
        if (
            tight
            and self.patches is not None
            and isinstance(w, (ConvOperator, SeparableConvOperator))
        ):
            slack = 64 * torch.finfo(torch.float64).eps * self.width
            kernel, stride = patched_kernel(
                w.cast(torch.float64).kernel,
                root,
                stride=w.stride,
                channels=self.patches.channels,
                size=self.patches.size,
            )
            through = convolution_norm_upper(kernel, stride=stride)
            return min(math.sqrt(through**2 + slack * product**2), product)
        return product

    def mu(self, in_shape: Sequence[int] | None = None, *, tight: bool = False) -> NormBound:
        """μ = ‖A‖₂ on states of ``in_shape``: power iteration on A, and the rigorous bound."""
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
        estimate = power_norm(gram, shape, dtype=w.dtype, device=w.device)
        return NormBound(min(estimate, upper), upper)

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
        e^{−sᵢ} across (none across where W_h has one column). Energies are taken in float64.
        """
        self.check_state(z)
        mu2 = self.mu_upper(tight=tight) ** 2
        if math.isinf(mu2):
            return _UNKNOWN
        w = self.operator.cast(torch.float64)
        r = exact(w(z.to(w.dtype))) - exact(self.c)
        metric = None if self.metric is None else exact(self.metric)
        s = exact(self.gamma).unsqueeze(-1) * gaussian_energies(self._rows(r), metric)
        across = torch.exp(-s)
        along = across * (1.0 - 2.0 * s)
        slack = 1e-10  # float64 rounding of s, e^{−s} and their products
        top = (along if self._rank_one else across).amax(-1).clamp_min(0.0)
        return Curvature(
            lower=((along.amin(-1) - slack).clamp(-GAUSSIAN_CONCAVITY, 0.0)) * mu2,
            upper=((top + slack).clamp_max(1.0)) * mu2,
            rigorous=w.dtype == torch.float64,
            note="at this z, from its patch energies and the upper bound on μ",
        )
