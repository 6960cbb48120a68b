"""Networks whose every label has a proven radius: 1-Lipschitz layers, norm-preserving pooling.

    x ↦ V·flatten(layers(pool(… layers(pad(x))))),   each layer 1-Lipschitz, ‖V‖ ≤ 1.

The layer is the envelope of a GEQ or an OptEq (``nn.Envelope``), the convex-potential layer, or a
plain bounded convolution with |·|, at equal width. There are no norms, which could stretch, and
images are not standardized by the network. ``eq.certify(model, x)`` gives the radii.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equilibria.certify import Enclosed
from equilibria.engine.tree import sample_norm
from equilibria.nn import GEQ, Envelope, NormBounded, OptEq, constrain
from equilibria.problems import FixedGamma, Patches
from equilibria.problems.norms import SAFETY, UNIT, sum_error
from equilibria.problems.operators import ConvOperator

from .network import ModelConfig, ModelSpec, Network, check_pixels, entry, few_steps, patch_size


class BoundedConv(nn.Module):
    """x ↦ |Cx + b| with ‖C‖ ≤ 1: the plain 1-Lipschitz convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        conv = nn.Conv2d(channels, channels, 3, padding=1)
        nn.init.dirac_(conv.weight)
        self.conv = constrain(conv, "weight", NormBounded(bound=0.97))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(x)
        return out.abs()


class ConvexPotential(nn.Module):
    """x ↦ x − 2Uᵀσ(Ux + b) with ‖U‖ ≤ 1 (Meunier et al. 2022): an ``Envelope`` with W = 0."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv = constrain(conv, "weight", NormBounded(bound=0.97, steps=1))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.conv(x))
        return x - 2.0 * F.conv_transpose2d(hidden, self._weight(), padding=1)

    def _weight(self) -> Tensor:
        weight = self.conv.weight
        assert isinstance(weight, Tensor)
        return weight

    @torch.no_grad()
    def enclose(self, x: Tensor) -> Enclosed:
        """The output at x with what is proven of it, for ``certify.certify_network``."""
        weight, inner, y = self._weight(), self.conv(x), ConvexPotential.forward(self, x)
        u, terms = ConvOperator(weight).norm_upper_on(x.shape[1:]), 8 * weight[0].numel() + 64
        size = sample_norm([x]) + sample_norm([y]) + sample_norm([inner])
        rounding = SAFETY * sum_error(terms) * math.sqrt(x[0].numel()) * size
        return Enclosed(y, max(1.0, 2.0 * u**2 - 1.0) * (1.0 + 1e-13), rounding)


class Haar(nn.Module):
    """Averages, then differences, of 2 × 2 pixels: orthonormal. [B, C, 2H, 2W] → [B, 4C, H, W]."""

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d = (x[..., i::2, j::2] for i in (0, 1) for j in (0, 1))
        s, t, u, v = a + b, a - b, c + d, c - d
        return 0.5 * torch.cat([s + u, s - u, t + v, t - v], 1)

    def enclose(self, x: Tensor) -> Enclosed:
        """The output at x, whose norm is that of x."""
        return Enclosed(Haar.forward(self, x), 1.0, 8 * UNIT * sample_norm([x]))


class CertifiedNet(Network):
    """Stages of ``depth`` 1-Lipschitz layers; between them 2 × 2 pixels become channels.

    x [B, C, S, S] → logits. The first stage has widths[0] channels: those of the image, rearranged
    by a pixel unshuffle of ``unshuffle`` pixels, and zeros.
    """

    one_scale = True  # dividing channels by different numbers would stretch one of them most

    def __init__(
        self,
        config: ModelConfig,
        *,
        widths: tuple[int, ...],
        depth: int,
        unshuffle: int,
        layer: Callable[..., nn.Module],
        **options: Any,
    ) -> None:
        super().__init__(config.in_channels, config.image_size)
        patch = patch_size(options)
        halvings = 2 ** (len(widths) - 1)
        why = f"unshuffle={unshuffle}, {len(widths)} stages and patches of {patch} pixels need that"
        check_pixels(config.image_size, patch * unshuffle * halvings, why)
        first = config.in_channels * unshuffle**2
        if sorted(widths) != list(widths) or widths[0] < first:
            raise ValueError(
                f"widths={widths}: expected widths that do not fall, the first at least {first}."
            )
        self.widths, self.unshuffle, self.pool = widths, unshuffle, Haar()
        self.stages = nn.ModuleList(
            nn.Sequential(*(layer(width, **options) for _ in range(depth))) for width in widths
        )
        pixels = config.image_size // unshuffle // halvings
        head = nn.Linear(widths[-1] * pixels**2, config.num_classes)
        self.head = constrain(head, "weight", NormBounded(bound=1.0))

    def logits(self, x: Tensor) -> Tensor:
        x = F.pixel_unshuffle(x, self.unshuffle)
        for i, (width, stage) in enumerate(zip(self.widths, self.stages, strict=True)):
            if i:
                x = self.pool(x)[:, :width]
            x = stage(F.pad(x, [0, 0, 0, 0, 0, width - x.shape[1]]))
        out: Tensor = self.head(torch.flatten(x, 1))
        return out


def _envelope(width: int, *, layer: Any, **options: Any) -> nn.Module:
    return Envelope(layer(width, width, **options))


_opteq = partial(OptEq, kernel_size=3, form="hidden")
_GAUSSIAN = {
    "patch": Patches(channels=8, size=2),
    "hidden": 32,
    "gamma": FixedGamma(0.5),
    "constraint": NormBounded(bound=0.95),
    **few_steps(4, 3),
}
_LINEAR = {"constraint": NormBounded(bound=0.7), **few_steps(4, 3)}


def _family(
    suffix: str, widths: tuple[int, ...], depth: int, unshuffle: int, **card: Any
) -> tuple[ModelSpec, ...]:
    """Networks of four kinds of 1-Lipschitz layers, of equal width."""
    shared = {"widths": widths, "depth": depth, "unshuffle": unshuffle}
    kinds: tuple[tuple[str, Callable[..., nn.Module], str, dict[str, Any]], ...] = (
        ("geq", partial(_envelope, layer=GEQ), "envelopes of GEQ layers", _GAUSSIAN),
        ("opteq", partial(_envelope, layer=_opteq), "envelopes of OptEq layers", _LINEAR),
        ("potential", ConvexPotential, "convex-potential layers", {}),
        ("bounded", BoundedConv, "bounded convolutions with |·|", {}),
    )
    return tuple(
        entry(
            f"{kind}_certified_{suffix}",
            partial(CertifiedNet, layer=layer),
            f"1-Lipschitz network of {about}, for certified radii",
            {**shared, **own},
            revision=2,  # 0 pooled by averages, 1 had a std for each channel
            **card,
        )
        for kind, layer, about, own in kinds
    )


SPECS = (
    *_family("digits", (16, 32), 2, 1, in_channels=1, image_size=8),
    *_family("mnist", (16, 32), 2, 1, in_channels=1, image_size=28),
    *_family("cifar", (64, 128, 256), 5, 2),
)
"""geq_certified_*, opteq_certified_*, potential_certified_*, bounded_certified_*."""
