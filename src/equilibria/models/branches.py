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
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.adjoints import Phantom
from equilibria.engine.adjoint import Adjoint
from equilibria.engine.solver import Solver
from equilibria.nn import GEQ, NormBounded, OptEq, PolynomialEq, SigmoidEq, WeightNormalized
from equilibria.nn.multi_branch import MultiBranch
from equilibria.problems import FixedGamma, GammaPolicy, Patches
from equilibria.solvers import Anderson, ProximalGradient

from .network import Network, Shape, features_to_logits

__all__ = ["BalancedBranches", "BranchNet", "geq_branches", "kernel_branches", "mopteq_branches"]

Constraint = NormBounded | WeightNormalized | None
Layer = Callable[[int, int], nn.Module]
"""(channels, mid) → an equilibrium layer whose state has ``channels`` channels."""

SOLVER = Anderson(rtol=0.0, atol=0.0, max_steps=10, damping=0.8)
ADJOINT = Phantom(steps=5, damping=0.8)
"""Forward Anderson, backward the phantom gradient z ← 0.2z + 0.8T(z), as in the papers. The steps
are fixed: nothing waits for the device, and the whole network compiles."""

EXPRESS = ProximalGradient(rtol=0.0, atol=0.0, max_steps=5, accelerate=False)
EXPRESS_ADJOINT = Phantom(steps=5, damping=1.0, form="neumann")
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


def geq_branches(
    shape: Shape,
    *,
    patch: Patches,
    hidden: int,
    gamma: GammaPolicy,
    constraint: Constraint,
    solver: Solver,
    adjoint: Adjoint,
    **sizes: Any,
) -> BranchNet:
    """Branches of the Gaussian kernel: GEQ, and KerDEQ with its constant γ."""

    def layer(channels: int, mid: int) -> nn.Module:
        made = GEQ(
            channels,
            mid,
            patch=patch,
            hidden=hidden,
            gamma=gamma,
            constraint=constraint,
            solver=solver,
            adjoint=adjoint,
        )
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


def mopteq_branches(
    shape: Shape,
    *,
    constraint: Constraint,
    solver: Solver,
    adjoint: Adjoint,
    **sizes: Any,
) -> BranchNet:
    """The linear kernel: z = Wᵀσ(Wz + Ux + b), σ in the space of Wz, which keeps the GEQ's size."""

    def layer(channels: int, mid: int) -> nn.Module:
        return OptEq(
            channels,
            mid,
            kernel_size=3,
            form="state",
            constraint=constraint,
            solver=solver,
            adjoint=adjoint,
        )

    return BranchNet(shape, layer=layer, **sizes)


def kernel_branches(
    shape: Shape,
    *,
    kernel: type[PolynomialEq] | type[SigmoidEq],
    radius: float,
    constraint: Constraint,
    solver: Solver,
    adjoint: Adjoint,
    **sizes: Any,
) -> BranchNet:
    """The polynomial or the sigmoid kernel, c = Ux + b scaled into a ball where G is convex."""
    layer = partial(
        kernel,
        kernel_size=3,
        radius=radius,
        constraint=constraint,
        solver=solver,
        adjoint=adjoint,
    )
    return BranchNet(shape, layer=layer, balanced=True, **sizes)
