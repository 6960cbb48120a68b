"""Networks whose every label has a proven radius: 1-Lipschitz layers, norm-preserving pooling.

    x ↦ V·flatten(layers(pool(… layers(pad(x))))),   each layer 1-Lipschitz, ‖V‖ ≤ 1.

The layer is the envelope of a GEQ or an OptEq (``nn.Envelope``), the convex-potential layer, or a
plain bounded convolution with |·|, at equal width. There are no norms, which could stretch, and
images are not standardized by the network. ``eq.certify(model, x)`` gives the radii.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equilibria.adjoints import Phantom
from equilibria.nn import GEQ, Envelope, NormBounded, OptEq, constrain
from equilibria.problems import FixedGamma, Patches
from equilibria.solvers import Picard, ProximalGradient

from . import options as opt
from .network import Network, Shape
from .registry import ModelSpec

__all__ = ["SPECS", "CertifiedNet"]


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


class CertifiedNet(Network):
    """Stages of ``depth`` 1-Lipschitz layers; between them pixels are halved, channels padded.

    x [B, C, S, S] → logits. The first stage has widths[0] channels: those of the image, rearranged
    by a pixel unshuffle of ``unshuffle`` pixels, and zeros.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        widths: tuple[int, ...],
        depth: int,
        unshuffle: int,
        layer: Callable[[int], nn.Module],
    ) -> None:
        super().__init__(shape.in_channels)
        halvings = 2 ** (len(widths) - 1)
        if shape.image_size % (2 * unshuffle * halvings):
            raise ValueError(
                f"image_size={shape.image_size} is no multiple of {2 * unshuffle * halvings}: "
                f"unshuffle={unshuffle}, {len(widths)} stages and patches of 2 pixels need that."
            )
        first = shape.in_channels * unshuffle**2
        if sorted(widths) != list(widths) or widths[0] < first:
            raise ValueError(
                f"widths={widths}: expected widths that do not fall, the first at least {first}."
            )
        self.widths, self.unshuffle = widths, unshuffle
        self.stages = nn.ModuleList(
            nn.Sequential(*(layer(width) for _ in range(depth))) for width in widths
        )
        pixels = shape.image_size // unshuffle // halvings
        head = nn.Linear(widths[-1] * pixels**2, shape.num_classes)
        self.head = constrain(head, "weight", NormBounded(bound=1.0))

    def logits(self, x: Tensor) -> Tensor:
        x = F.pixel_unshuffle(x, self.unshuffle)
        for i, (width, stage) in enumerate(zip(self.widths, self.stages, strict=True)):
            if i:
                x = 2.0 * F.avg_pool2d(x, 2)  # of norm 1
            x = stage(F.pad(x, [0, 0, 0, 0, 0, width - x.shape[1]]))
        out: Tensor = self.head(torch.flatten(x, 1))
        return out


_SOLVER = ProximalGradient(rtol=0.0, atol=0.0, max_steps=4, accelerate=False)
_ADJOINT = Phantom(steps=3, damping=1.0, form="neumann")


def _net(make: Callable[..., nn.Module]) -> Callable[..., Network]:
    def build(
        shape: Shape, *, widths: tuple[int, ...], depth: int, unshuffle: int, **options: Any
    ) -> Network:
        return CertifiedNet(
            shape,
            widths=widths,
            depth=depth,
            unshuffle=unshuffle,
            layer=lambda width: make(width, **options),
        )

    return build


def _geq(width: int, **options: Any) -> nn.Module:
    return Envelope(GEQ(width, width, **options))


def _opteq(width: int, **options: Any) -> nn.Module:
    return Envelope(OptEq(width, width, kernel_size=3, form="hidden", **options))


def _potential(width: int) -> nn.Module:
    """The envelope of an OptEq with W ≈ 0: x − 2Uᵀσ(Ux + b)."""
    held = NormBounded(bound=1e-4)
    one = Picard(rtol=0.0, atol=0.0, max_steps=1)
    options: dict[str, Any] = {"form": "hidden", "constraint": held, "solver": one}
    return Envelope(OptEq(1, width, in_channels=width, kernel_size=3, **options))


def _specs() -> Iterator[ModelSpec]:
    solving = {"solver": opt.solver(_SOLVER), "adjoint": opt.adjoint(_ADJOINT)}
    gaussian = {
        "patch": opt.patch(Patches(channels=8, size=2)),
        "hidden": opt.integer(32, "columns of W_h"),
        "gamma": opt.gamma(FixedGamma(0.5)),
        "constraint": opt.constraint(NormBounded(bound=0.95)),
        **solving,
    }
    linear = {"constraint": opt.constraint(NormBounded(bound=0.7)), **solving}
    kinds: tuple[tuple[str, Callable[..., nn.Module], str, dict[str, opt.Option]], ...] = (
        ("geq", _geq, "envelopes of GEQ layers", gaussian),
        ("opteq", _opteq, "envelopes of OptEq layers", linear),
        ("potential", _potential, "convex-potential layers", {}),
        ("bounded", lambda width: BoundedConv(width), "bounded convolutions with |·|", {}),
    )
    sizes = (
        ("digits", (16, 32), 2, 1, 1, 8),
        ("mnist", (16, 32), 2, 1, 1, 28),
        ("cifar", (64, 128, 256), 5, 2, 3, 32),
    )
    for suffix, widths, depth, unshuffle, channels, size in sizes:
        for kind, make, about, own in kinds:
            yield ModelSpec(
                f"{kind}_certified_{suffix}",
                _net(make),
                f"1-Lipschitz network of {about}, for certified radii",
                options={
                    "widths": opt.integers(widths, "channels of each stage"),
                    "depth": opt.integer(depth, "layers in each stage", high=64),
                    "unshuffle": opt.integer(unshuffle, "pixels of the first unshuffle", high=16),
                    **own,
                },
                in_channels=channels,
                image_size=size,
            )


SPECS = tuple(_specs())
"""geq_certified_*, opteq_certified_*, potential_certified_*, bounded_certified_*."""
