"""Six branches at several scales: GEQ, KerDEQ, MOptEq and its kernels (docs/models.md).

    images → stem → branches at S, S/2, S/4, S/4, S/8, S/8 pixels → average → fusion → head

The papers do not say whether a branch sees the others: ``reading`` is "parallel", where every
branch reads the stem alone, or "chain", where it also reads the sum of the branches before it.

"Output channels" of the papers are those of z and of the stem, "mid channels" those of U and W, all
3 × 3. That leaves the papers' counts short by one more 3 × 3 convolution for CIFAR and by two for
ImageNet, which we put after the fusion.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.adjoints import Phantom
from equilibria.nn import GEQ, NormBounded, OptEq, PolynomialEq, SigmoidEq
from equilibria.nn.multi_branch import MultiBranch
from equilibria.problems import FixedGamma, GammaPolicy, MeanPatchEnergy, Patches
from equilibria.solvers import Anderson, ProximalGradient

from . import options as opt
from .network import Network, Shape, features_to_logits
from .registry import ModelSpec

__all__ = ["SPECS", "BalancedBranches", "BranchNet"]

Layer = Callable[[int, int], nn.Module]
"""(channels, mid) → an equilibrium layer whose state has ``channels`` channels."""

_SOLVER = Anderson(rtol=0.0, atol=0.0, max_steps=10, damping=0.8)
_ADJOINT = Phantom(steps=5, damping=0.8)
"""Forward Anderson, backward the phantom gradient z ← 0.2z + 0.8T(z), as in the papers. The steps
are fixed: nothing waits for the device, and the whole network compiles."""

_FUSED = ProximalGradient(rtol=0.0, atol=0.0, max_steps=5, accelerate=False)
_FUSED_ADJOINT = Phantom(steps=5, damping=1.0, form="neumann")
"""For the Gaussian kernel: five steps of the certificate's size leave less residual than ten of
Anderson's in bf16, and as many terms of the backward series; a training step is 6.8 times as fast
on an H200 (docs/performance.md). ``solver`` and ``adjoint`` take the papers' way back."""


class BalancedBranches(MultiBranch):
    """y = (1/n) Σᵢ Rᵢ √(Nᵢ) z*ᵢ, Nᵢ the entries of z*ᵢ: branches whose states have a bounded norm.

    The polynomial and the sigmoid kernel are certified for ‖c‖ ≤ radius, so ‖z*ᵢ‖ does not grow
    with the map and its entries shrink like 1/√Nᵢ. Unscaled, the finest branch would vanish beside
    the coarsest, and all of them under the ε of a batch norm.
    """

    def gain(self, i: int) -> float:
        height, width = self.scales[i]
        return math.sqrt(self.branches[i].state_channels * height * width)  # type: ignore[operator]


class BranchNet(Network):
    """Stem, branches, average at the third scale, ``fusion`` convolutions, head.

    Args:
        shape: classes, channels, pixels.
        channels: of the stem, of every z and of the fusion.
        mids: channels of U and W, one a branch.
        scales: the stem's pixels are divided by these, one a branch.
        fusion: 3 × 3 convolutions after the average.
        downsample: whether the stem is two stride-2 convolutions, 7 × 7 and 3 × 3 (ImageNet), or
            one 3 × 3 (CIFAR).
        layer: makes a branch.
        divisor: pixels of a patch, which must divide every branch's map.
        balanced: see BalancedBranches.
        reading: "parallel" or "chain", see above.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        channels: int,
        mids: tuple[int, ...],
        scales: tuple[int, ...],
        fusion: int,
        downsample: bool,
        layer: Layer,
        divisor: int = 1,
        balanced: bool = False,
        reading: str = "parallel",
    ) -> None:
        super().__init__(shape.in_channels)
        if len(mids) != len(scales):
            raise ValueError(
                f"mids={mids} and scales={scales} give {len(mids)} and {len(scales)} branches; "
                "expected as many of one as of the other."
            )
        pixels = self._branch_pixels(shape.image_size, scales, downsample, divisor)
        stem: list[nn.Module] = []
        if downsample:
            stem += _normalized(shape.in_channels, channels, 7, stride=2)
            stem += _normalized(channels, channels, 3, stride=2)
        else:
            stem += _normalized(shape.in_channels, channels, 3)
        self.stem = nn.Sequential(*stem)
        kind = BalancedBranches if balanced else MultiBranch
        middle = sorted(pixels)[len(pixels) // 2]
        layers = [layer(channels, mid) for mid in mids]
        self.branches = kind(layers, pixels, output=middle, chain=reading == "chain")
        mixed: list[nn.Module] = []
        for _ in range(fusion):
            mixed += [nn.BatchNorm2d(channels), nn.ReLU()]
            mixed.append(nn.Conv2d(channels, channels, 3, padding=1, bias=False))
        self.fusion = nn.Sequential(*mixed)
        self.head = features_to_logits(channels, shape.num_classes)

    @staticmethod
    def _branch_pixels(
        size: int, scales: tuple[int, ...], downsample: bool, divisor: int
    ) -> list[int]:
        factor = 4 if downsample else 1
        needed = factor * divisor * math.lcm(*scales)
        if size % needed:
            raise ValueError(
                f"image_size={size} is no multiple of {needed}: the branches see 1/{factor} of it "
                f"divided by {scales}, cut into patches of {divisor} pixels."
            )
        return [size // factor // scale for scale in scales]

    def logits(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.fusion(self.branches(self.stem(x))))
        return out


def _normalized(before: int, after: int, size: int, stride: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(before, after, size, stride=stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return [conv, nn.BatchNorm2d(after), nn.ReLU()]


def _geq(
    shape: Shape, *, patch: Patches, gamma: GammaPolicy, options: dict[str, Any], **sizes: Any
) -> BranchNet:
    """Branches of the Gaussian kernel: GEQ, and KerDEQ with its constant γ."""

    def layer(channels: int, mid: int) -> nn.Module:
        made = GEQ(channels, mid, patch=patch, gamma=gamma, **options)
        if isinstance(gamma, FixedGamma):
            _fit_energy(made, gamma.value * patch.width)
        return made

    return BranchNet(shape, layer=layer, divisor=patch.size, **sizes)


@torch.no_grad()
def _fit_energy(layer: GEQ, scale: float) -> None:
    """Scale U so that γE ≈ ½ at the start, for a constant γ; ``scale`` is γ times a patch's width.

    torch draws U so that an entry of Ux has a third of the mean square of x, which is ½ behind a
    batch norm and a ReLU. Where γE is large, e^{−γE} leaves nothing of the message and little of
    its gradient.
    """
    weight: Tensor = layer.U.weight  # type: ignore[assignment]
    weight.mul_(math.sqrt(0.5 / (scale / 6.0)))


def _linear(shape: Shape, *, options: dict[str, Any], **sizes: Any) -> BranchNet:
    """The linear kernel: z = Wᵀσ(Wz + Ux + b), σ in the space of Wz, which keeps the GEQ's size."""
    layer = partial(OptEq, kernel_size=3, form="state", **options)
    return BranchNet(shape, layer=layer, **sizes)


def _bounded(
    shape: Shape,
    *,
    kernel: type[PolynomialEq] | type[SigmoidEq],
    options: dict[str, Any],
    **sizes: Any,
) -> BranchNet:
    """The polynomial or the sigmoid kernel, c = Ux + b scaled into a ball where G is convex."""
    layer = partial(kernel, kernel_size=3, **options)
    return BranchNet(shape, layer=layer, balanced=True, **sizes)


_LAYER = ("constraint", "solver", "adjoint", "hidden", "radius")


def _split(build: Callable[..., BranchNet], **fixed: Any) -> Callable[..., BranchNet]:
    """``build`` with the options of the layers apart from those of the network."""

    def built(shape: Shape, **given: Any) -> BranchNet:
        own = {name: given.pop(name) for name in _LAYER if name in given}
        return build(shape, options=own, **fixed, **given)

    return built


# ---------------------------------------------------------------------- the papers' sizes


@dataclass(frozen=True)
class _Size:
    name: str
    parameters: int
    classes: int
    channels: int
    kernel_channels: int | None
    """For the polynomial and sigmoid kernels (CIFAR in the paper), whose U goes to the space of z:
    as many channels as bring them to the same size."""
    mids: tuple[int, ...]
    fusion: int
    hidden: int
    image_size: int
    downsample: bool


_SCALES = (1, 2, 4, 4, 8, 8)
_SIZES = (
    _Size("cifar_5m", 5_000_000, 10, 256, 224, (64, 128, 128, 128, 256, 256), 1, 64, 32, False),
    _Size("cifar_8m", 8_000_000, 10, 320, 280, (80, 160, 160, 160, 320, 320), 1, 64, 32, False),
    _Size(
        "imagenet_6m", 6_000_000, 100, 256, None, (32, 64, 128, 128, 256, 256), 2, 128, 256, True
    ),
    _Size(
        "imagenet_13m", 13_000_000, 100, 384, None, (48, 96, 192, 192, 384, 384), 2, 128, 256, True
    ),
)


def _shared(size: _Size, channels: int, constraint: NormBounded) -> dict[str, opt.Option]:
    return {
        "channels": opt.integer(channels, "channels of z and of the stem"),
        "mids": opt.integers(size.mids, "channels of U and W, one a branch"),
        "scales": opt.integers(_SCALES, "how much coarser each branch is than the stem"),
        "fusion": opt.integer(size.fusion, "3 × 3 convolutions after the average", low=0, high=64),
        "reading": opt.choice(
            "parallel", "whether a branch also sees those before it", ("parallel", "chain")
        ),
        "constraint": opt.constraint(constraint),
        "solver": opt.solver(_SOLVER),
        "adjoint": opt.adjoint(_ADJOINT),
    }


def _gaussian_spec(size: _Size, patch: Patches, *, kerdeq: bool) -> ModelSpec:
    gamma = FixedGamma(0.5) if kerdeq else MeanPatchEnergy(0.2)
    return ModelSpec(
        f"{'kerdeq' if kerdeq else 'geq'}_{size.name}",
        _split(_geq, downsample=size.downsample),
        f"six parallel {'KerDEQ branches, γ = 0.5' if kerdeq else 'GEQ branches'}",
        in_channels=3,
        image_size=size.image_size,
        options={
            **_shared(size, size.channels, NormBounded(bound=1.2)),
            "solver": opt.solver(_FUSED),
            "adjoint": opt.adjoint(_FUSED_ADJOINT),
            "patch": opt.patch(patch),
            "hidden": opt.integer(size.hidden, "columns of W_h"),
            "gamma": opt.gamma(gamma),
        },
        paper="KerDEQ, Tables 1–2" if kerdeq else "GEQ, Tables 1–2 and A.7",
        paper_parameters=size.parameters,
        paper_classes=size.classes,
        revision=0 if kerdeq else 1,  # 0 had MeanPatchEnergy(detach=True)
    )


# The sizes in which the GEQ paper has MOptEq; the others are twins of the GEQ's.
_PRINTED = ("cifar_8m", "imagenet_13m")


def _linear_spec(size: _Size) -> ModelSpec:
    return ModelSpec(
        f"mopteq_{size.name}",
        _split(_linear, downsample=size.downsample),
        "six parallel OptEq branches: the linear kernel",
        in_channels=3,
        image_size=size.image_size,
        options=_shared(size, size.channels, opt.linear_bound(0.95)),
        paper="GEQ, Tables 1–2",
        paper_parameters=size.parameters if size.name in _PRINTED else None,
        paper_classes=size.classes,
    )


def _bounded_spec(
    size: _Size,
    channels: int,
    name: str,
    kernel: type[PolynomialEq] | type[SigmoidEq],
    radius: float,
) -> ModelSpec:
    return ModelSpec(
        f"mopteq_{name}_{size.name}",
        _split(_bounded, kernel=kernel, downsample=size.downsample),
        f"six parallel branches of the {name} kernel",
        in_channels=3,
        image_size=size.image_size,
        options={
            **_shared(size, channels, opt.linear_bound(0.7)),
            "radius": opt.number(radius, "‖Ux + b‖ is scaled to at most this", low=0.0, high=1e6),
        },
        paper="GEQ, Table 5 (no count printed)",
    )


# With ‖W‖ ≤ 0.7: ‖W‖² + 2‖c‖² and ‖W‖² + 0.7698‖c‖² stay below 1, so G is strongly convex.
_POLYNOMIAL_RADIUS = 0.45
_SIGMOID_RADIUS = 0.75


def _specs(size: _Size) -> tuple[ModelSpec, ...]:
    # KerDEQ cuts ImageNet's larger maps into larger patches.
    kerdeq = Patches(channels=4, size=4) if size.downsample else Patches(channels=8, size=2)
    made = (
        _gaussian_spec(size, Patches(channels=8, size=2), kerdeq=False),
        _gaussian_spec(size, kerdeq, kerdeq=True),
        _linear_spec(size),
    )
    channels = size.kernel_channels
    if channels is None:
        return made
    return (
        *made,
        _bounded_spec(size, channels, "polynomial", PolynomialEq, _POLYNOMIAL_RADIUS),
        _bounded_spec(size, channels, "sigmoid", SigmoidEq, _SIGMOID_RADIUS),
    )


SPECS = tuple(spec for size in _SIZES for spec in _specs(size))
"""geq_*, kerdeq_*, mopteq_*, mopteq_polynomial_*, mopteq_sigmoid_*."""
