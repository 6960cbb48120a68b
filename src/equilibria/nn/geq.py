"""GEQ: the equilibrium layer of the Gaussian kernel, vector and convolutional; and KerDEQ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Unpack, cast

import torch
from torch import Tensor, nn

from equilibria.engine.transforms import (
    autocasts,
    for_any_mode,
    may_keep,
    may_reuse,
    version,
)
from equilibria.engine.tree import sample_norm
from equilibria.problems import (
    GAUSSIAN_CONCAVITY,
    FixedGamma,
    GammaPolicy,
    Gaussian,
    HiddenProblem,
    LearnedGamma,
    MeanPatchEnergy,
    Patches,
    Problem,
    as_gamma,
)
from equilibria.problems.norms import (
    SAFETY,
    convolution_norm_upper,
    dense_norm,
    exact,
    is_flat,
    metric_root,
    patched_kernel,
    sum_error,
)

from .constraints import NormBounded, constrain
from .inputs import check_sizes, marked
from .layer import LayerOptions, WeightedLayer


class GEQ(WeightedLayer):
    """z* = argmin 1ᵀf(z) + ½‖z‖² − (1/2γ) Σᵢ exp(−γ‖(Ux + b − Wz)ᵢW_h‖²) (GEQ Eq 5–6, Eq 16).

    The layer map is T(z) = prox_f(Wᵀ·unpatch(eᵢrᵢM)), rᵢ the patches of Ux + b − Wz,
    eᵢ = exp(−γrᵢMrᵢᵀ) and M = W_hW_hᵀ.

    With patches it is convolutional: x [B, in_channels, H, W] → z [B, channels, H, W], U and W are
    k × k, W_h is [c_s·p², hidden]. Without, it is a layer of vectors: x [B, in_channels] →
    z [B, channels], W [mid, channels], U [mid, in_channels], W_h [mid, hidden], and a sample is one
    patch. ``hidden=None`` leaves W_h out (W_h = I: Eq 5–6 as written).

    With ``NormBounded(bound=β)`` W is held at ‖W‖ ≤ β and W_h at ‖W_h‖ ≤ 1, so that μ ≤ β: T
    contracts with factor β² for β < 1, and the equilibrium is unique for β < 1.4969 (docs/facts.md,
    fact 3). The bounds are nominal; ``problem(x).coupling.mu_upper()`` proves one.

    Args:
        channels, mid: channels of z; of Ux and Wz.
        patch: how Wz is cut; ``patch.channels`` must divide ``mid``, ``patch.size`` H and W.
        hidden: columns of W_h, or None.
        gamma: γ, a positive number or a policy. A ``LearnedGamma`` becomes the parameter
            ``log_gamma``. Gradients pass γ, so that they are those of the function x ↦ z*;
            ``MeanPatchEnergy(0.2, detach=True)`` holds γ fixed in the backward pass, as the papers
            do.
        options: see ``LayerOptions``. ``kernel_size`` goes with patches, where it is 3 if not
            given; the constraint holds W_h too.
    """

    shown = (*WeightedLayer.shown, "patch", "gamma")
    log_gamma: nn.Parameter | None
    _kept: tuple[Any, ...] | None = None  # frozen: the weights' state, a coupling, the weights

    def __init__(
        self,
        channels: int,
        mid: int,
        *,
        patch: Patches | None = None,
        hidden: int | None = 64,
        gamma: float | GammaPolicy = MeanPatchEnergy(0.2),  # noqa: B008 — frozen
        **options: Unpack[LayerOptions],
    ) -> None:
        name, kernel_size = type(self).__name__, options.get("kernel_size")
        if patch is not None and not isinstance(patch, Patches):
            raise TypeError(f"{name}(patch={patch!r}): expected Patches(...).")
        if patch is not None:
            options["kernel_size"] = 3 if kernel_size is None else kernel_size
        elif kernel_size is not None:
            raise ValueError(
                f"{name}(kernel_size={kernel_size}) without patches: a layer of vectors has no "
                "kernel. Give patch=Patches(channels=..., size=...) as well, or leave kernel_size "
                "out."
            )
        super().__init__(channels, mid, features=mid, **options)
        if patch is not None and mid % patch.channels:
            raise ValueError(
                f"{name}(mid={mid}): patches of {patch.channels} channels do not divide it, "
                f"{mid} % {patch.channels} = {mid % patch.channels}."
            )
        self.patch, self.hidden, self.gamma = patch, hidden, as_gamma(gamma)
        self.W_h: nn.Module | None = None
        if hidden is not None:
            check_sizes(name, {"hidden": hidden})
            self.W_h = self._metric_weight(mid if patch is None else patch.width, hidden)
        self.log_gamma = None
        if isinstance(self.gamma, LearnedGamma):
            self.log_gamma = nn.Parameter(self.gamma.initial_parameter())

    def _metric_weight(self, width: int, hidden: int) -> nn.Module:
        """W_h [width, hidden], orthogonal at the start: M is the identity or a projection, scaled.

        Under a bound of 1 it starts inside. At a norm of 1 rounding would decide on which side of
        the bound's kink it is, and with it the gradient.
        """
        module = nn.Linear(hidden, width, bias=False)
        bounded = self.constraint
        if isinstance(bounded, NormBounded):
            bounded = NormBounded(bound=1.0, steps=bounded.steps)
        nn.init.orthogonal_(module.weight, gain=0.99 if isinstance(bounded, NormBounded) else 1.0)
        return constrain(module, "weight", bounded)

    def hidden_weight(self) -> Tensor | None:
        """W_h [c_s·p², hidden] (or [mid, hidden]), its constraint evaluated; None: identity."""
        weight: Any = None if self.W_h is None else self.W_h.weight
        return weight  # type: ignore[no-any-return]

    def problem(self, x: Tensor) -> Problem:
        """G(·; x). In training mode this moves the power iteration of the constraints."""
        c = self.features(x)
        if self.patch is not None:
            self.patch.check(c.shape)
        return Problem(self.prior, self._coupling(c))

    def _coupling(self, c: Tensor) -> Gaussian:
        """The coupling at c; of a frozen layer that of an earlier call, while the weights last."""
        if self._kept is None or torch.compiler.is_compiling():
            return self._new_coupling(c)
        kept, held = self._kept, self._counted_weights()
        if held is None:
            self._kept = ()
        if held is None or not may_reuse() or type(c) is not Tensor:  # a FakeTensor, for one
            return self._new_coupling(c)
        state = c.dtype, autocasts(c), self.patch, self.gamma, [version(p) for p in held]
        if kept and kept[0] == state:
            _, found, before = kept
            # Weights that are held are not freed, so that no other has their address.
            if all(p.data_ptr() == q.data_ptr() for p, q in zip(held, before, strict=True)):
                return cast("Gaussian", found).at(c)
        with for_any_mode():
            made = self._new_coupling(c)
            if may_keep(c):
                self._kept = state, made.with_inputs(c.new_empty(0), made.gamma), held
        return made

    def _counted_weights(self) -> list[Tensor] | None:
        """W, W_h and log γ; None where they may change without a count: computed from others, of
        inference mode, or in training (fused optimizers do not count).
        """
        modules = [m for m in (self.W, self.W_h) if m is not None]
        weights = [m._parameters.get("weight") for m in modules]
        if self.log_gamma is not None:
            weights.append(self.log_gamma)
        held = [w.detach() for w in weights if w is not None and not w.requires_grad]
        return None if len(held) < len(weights) or any(w.is_inference() for w in held) else held

    def __getstate__(self) -> dict[str, Any]:
        """Without what is kept: copies and files make it anew."""
        return self.__dict__ | ({} if self._kept is None else {"_kept": ()})

    def _new_coupling(self, c: Tensor) -> Gaussian:
        policy = self.gamma
        if isinstance(policy, LearnedGamma) and self.log_gamma is not None:
            policy = policy.bind(self.log_gamma)
        hidden = self.hidden_weight()
        return Gaussian(self.operator(), c, policy, patches=self.patch, hidden=hidden)

    def marked(self, problem: HiddenProblem, bad: Tensor) -> HiddenProblem:
        c, gamma = problem.inputs()
        if gamma.ndim == 0:
            return super().marked(problem, bad)
        return problem.with_inputs(c, marked(gamma, bad))  # one number a sample, and c is a map

    def nominal_bounds(self, problem: HiddenProblem) -> tuple[Any, Any] | None:
        mu = self.nominal_norm()
        return None if mu is None else (1.0 - GAUSSIAN_CONCAVITY * mu**2, 1.0 + mu**2)

    @torch.no_grad()
    def input_rounding(self, x: Tensor) -> Tensor:
        """How far float64 moves c at most, ‖·‖ [B], and γ: an error of its energies moves z* no
        more than half as large a relative error of all of c (docs/facts.md, fact 5)."""
        off, q = super().input_rounding(x), self.problem(x).coupling
        if not self.gamma.input_dependent or not isinstance(q, Gaussian):
            return off
        rows = q._rows(q.c).abs()
        size = rows if q.metric is None else rows @ q.metric.abs()
        size = (rows * size).sum((1, 2))
        spread = torch.where(size > 0.0, size / q._start_energies().sum(1), 0.0)
        terms = 2 * rows.shape[2] + rows.shape[1] + 16
        return off + SAFETY * sum_error(terms) * spread * sample_norm([q.c])

    @torch.no_grad()
    def input_norm_upper(self, in_shape: Sequence[int] | None = None) -> float:
        """A proven upper bound on the norm of x ↦ (patch rows of Ux)W_h (docs/facts.md, fact 5)."""
        hidden, plain = self.hidden_weight(), super().input_norm_upper(in_shape)
        if hidden is None:
            return plain
        weight = exact(self.U.weight)  # type: ignore[arg-type]
        # The features are those of the M that the layer makes, in its own precision.
        metric = hidden @ hidden.mT
        w_h, top = metric_root(0.5 * (metric + metric.mT))
        width, product = w_h.shape[0], plain * top
        # Float64 rounding of the eigenvalues of M, and of the products, by the size of their terms.
        unit = torch.finfo(torch.float64).eps * width
        base, slack = 64 * unit * product**2, 4 * unit * float(w_h.norm() * weight.norm())
        if self.patch is None:
            through = dense_norm(w_h.mT @ weight).upper
            return min(product, math.sqrt(through**2 + base) + slack)
        if is_flat(w_h):
            return product
        channels, size = self.patch.channels, self.patch.size
        kernel, stride = patched_kernel(weight, w_h, stride=(1, 1), channels=channels, size=size)
        # One term of W_h may stand at p² places of the kernel, so the slack counts each.
        patches = None if in_shape is None else tuple(side // size for side in in_shape[1:])
        through = convolution_norm_upper(kernel, stride=stride, out_size=patches)
        return min(product, math.sqrt(through**2 + base) + size**2 * slack)


class KerDEQ(GEQ):
    """GEQ with a constant γ = 0.5 and patches of 4 channels × 4 × 4 pixels (KerDEQ)."""

    def __init__(
        self,
        channels: int,
        mid: int,
        *,
        patch: Patches | None = Patches(channels=4, size=4),  # noqa: B008
        hidden: int | None = 64,
        gamma: float | GammaPolicy = FixedGamma(0.5),  # noqa: B008
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__(channels, mid, patch=patch, hidden=hidden, gamma=gamma, **options)
