"""Six branches at several scales: GEQ, KerDEQ, MOptEq and kernels, explicit twins (docs/models.md).

    images → stem → branches at S, S/2, S/4, S/4, S/8, S/8 pixels → average → fusion → head

In the papers "output channels" are those of z and of the stem, "mid channels" those of U and W.
They do not say whether branches see each other. Where each also sees the sum of those before it, a
chain, ``geq_cifar_5m`` reaches the paper's accuracy; side by side it does not (docs/models.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.adjoints import Phantom
from equilibria.nn import GEQ, MultiBranch, NormBounded, OptEq, PolynomialEq, SigmoidEq
from equilibria.nn.multi_branch import Branches
from equilibria.problems import FixedGamma, MeanPatchEnergy, Patches
from equilibria.solvers import Anderson

from .network import (
    ModelConfig,
    ModelSpec,
    Network,
    check_pixels,
    conv_norm_relu,
    entry,
    features_to_logits,
    few_steps,
    patch_size,
)
from .stacks import ExplicitPair


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

    ``layer(channels, mid, **options)`` makes a branch. With ``downsample`` the stem is two stride-2
    convolutions, 7 × 7 and 3 × 3 (ImageNet), else one 3 × 3 (CIFAR). ``mids`` and ``scales`` have
    one number per branch: the channels of U and W, and by what the stem's pixels are divided. A
    branch reads the stem and, where ``reading`` is "chain", the sum of the branches before it.
    Branches with a ``radius`` are BalancedBranches; pairs of convolutions make an explicit twin.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        layer: Callable[..., nn.Module],
        downsample: bool,
        channels: int,
        mids: tuple[int, ...],
        scales: tuple[int, ...],
        fusion: int,
        reading: str,
        **options: Any,
    ) -> None:
        super().__init__(config.in_channels)
        if len(mids) != len(scales):
            raise ValueError(
                f"mids={mids} and scales={scales} give {len(mids)} and {len(scales)} branches; "
                "expected as many of one as of the other."
            )
        patch = patch_size(options)
        factor = 4 if downsample else 1
        seen = f"the branches see 1/{factor} of it divided by {scales}"
        needed = factor * patch * math.lcm(*scales)
        check_pixels(config.image_size, needed, f"{seen}, cut into patches of {patch} pixels")
        pixels = [config.image_size // factor // scale for scale in scales]
        if downsample:
            stem = conv_norm_relu(config.in_channels, channels, 7, 2, kaiming=True)
            stem += conv_norm_relu(channels, channels, 3, 2, kaiming=True)
        else:
            stem = conv_norm_relu(config.in_channels, channels, 3, kaiming=True)
        self.stem = nn.Sequential(*stem)
        middle = sorted(pixels)[len(pixels) // 2]
        layers = [layer(channels, mid, kernel_size=3, **options) for mid in mids]
        kind: type[Branches] = BalancedBranches if "radius" in options else MultiBranch
        kind = Branches if isinstance(layers[0], ExplicitPair) else kind
        self.branches = kind(layers, pixels, output=middle, chain=reading == "chain")
        mixed: list[nn.Module] = []
        for _ in range(fusion):
            mixed += [nn.BatchNorm2d(channels), nn.ReLU()]
            mixed.append(nn.Conv2d(channels, channels, 3, padding=1, bias=False))
        self.fusion = nn.Sequential(*mixed)
        self.head = features_to_logits(channels, config.num_classes)

    def logits(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.fusion(self.branches(self.stem(x))))
        return out


def _gaussian(channels: int, mid: int, **options: Any) -> nn.Module:
    """A branch of the Gaussian kernel: GEQ, or KerDEQ with its constant γ.

    For a constant γ, U is scaled so that E ≈ 1 at the start: γE is ½ for the paper's γ = 0.5. torch
    draws U so that an entry of Ux has a third of the mean square of x, which is ½ behind a batch
    norm and a ReLU. Unscaled, e^{−γE} would leave nothing of the message. The scale is the same for
    every γ: by 1/√γ it would undo γ, for a norm follows.
    """
    layer = GEQ(channels, mid, **options)
    if isinstance(options["gamma"], FixedGamma):
        weight: Tensor = layer.U.weight  # type: ignore[assignment]
        with torch.no_grad():
            weight.mul_(math.sqrt(6.0 / options["patch"].width))
    return layer


def _explicit(channels: int, mid: int, kernel_size: int) -> nn.Module:
    """Two convolutions with the kernels of U and W, 3 × 3 as in all branches."""
    assert kernel_size == 3
    return ExplicitPair(channels, channels, mid)


# Forward Anderson, backward the phantom gradient z ← 0.2z + 0.8T(z), as in the papers. The steps
# are fixed: nothing waits for the device, and the whole network compiles.
_PAPER = {
    "solver": Anderson(rtol=0.0, atol=0.0, max_steps=10, damping=0.8),
    "adjoint": Phantom(steps=5, damping=0.8),
}
# For the Gaussian kernel: few and long steps. Five of the certificate's size leave the residual of
# ten of Anderson's in bf16, in a training step that is 6.8 times as fast on an H200
# (docs/performance.md). ``solver`` and ``adjoint`` take the papers' way back.
_FUSED = few_steps(3, 2, 0.8)
# With ‖W‖ ≤ 0.7 these keep ‖W‖² + 2‖c‖² and ‖W‖² + 0.7698‖c‖² below 1, so G is strongly convex.
_RADII = {"polynomial": (PolynomialEq, 0.45), "sigmoid": (SigmoidEq, 0.75)}


def _family(
    size: str,
    parameters: int,
    channels: int,
    *,
    kernel_channels: int | None = None,
    printed: bool = False,
) -> Iterator[ModelSpec]:
    """The networks of one size.

    ``kernel_channels``: of the polynomial and sigmoid kernels (CIFAR in the paper), whose U goes to
    the space of z: as many as bring them to the same size. ``printed``: whether the GEQ paper has
    MOptEq in this size; elsewhere it is a twin of the GEQ's.
    """
    imagenet = kernel_channels is None
    narrower = (8, 4, 2, 2, 1, 1) if imagenet else (4, 2, 2, 2, 1, 1)
    shared = {
        "channels": channels,
        "mids": tuple(channels // times for times in narrower),
        "scales": (1, 2, 4, 4, 8, 8),
        "fusion": 2 if imagenet else 1,
        "reading": "chain",
    }
    card: dict[str, Any] = {
        "image_size": 256 if imagenet else 32,
        "paper_parameters": parameters,
        "paper_classes": 100 if imagenet else 10,
    }
    gaussian = {
        **shared,
        "constraint": NormBounded(bound=1.2),
        **_FUSED,
        "patch": Patches(channels=8, size=2),
        "hidden": 128 if imagenet else 64,
        "gamma": MeanPatchEnergy(0.2),
    }

    def made(kind: str, layer: Any, text: str, options: Any, paper: str, **more: Any) -> ModelSpec:
        build = partial(BranchNet, layer=layer, downsample=imagenet)
        about = {**card, "revision": 1, **more}
        return entry(f"{kind}_{size}", build, f"six {text}", options, paper=paper, **about)

    # Revision 0 had parallel branches; of GEQ 1 had, and 0 also MeanPatchEnergy(detach=True).
    text = "GEQ branches in a chain"
    yield made("geq", _gaussian, text, gaussian, "GEQ, Tables 1–2 and A.7", revision=3)
    # KerDEQ cuts ImageNet's larger maps into larger patches.
    larger = {"patch": Patches(channels=4, size=4)} if imagenet else {}
    fixed = {**gaussian, **larger, "gamma": FixedGamma(0.5)}
    text = "KerDEQ branches in a chain, γ = 0.5"
    yield made("kerdeq", _gaussian, text, fixed, "KerDEQ, Tables 1–2", revision=2)
    # z = Wᵀσ(Wz + Ux + b), σ in the space of Wz, which keeps the GEQ's size.
    linear = {**shared, "constraint": NormBounded(bound=0.95), **few_steps(4, 3, 1.2)}
    text, count = "OptEq branches in a chain: the linear kernel", parameters if printed else None
    state = partial(OptEq, form="state")
    # Revision 1 had the papers' solver.
    yield made("mopteq", state, text, linear, "GEQ, Tables 1–2", paper_parameters=count, revision=2)
    if not imagenet:
        text = "pairs of convolutions in a chain: explicit twin of the GEQ's"
        yield made("explicit", _explicit, text, shared, "ours", paper_parameters=None, revision=0)
        bounded = {**shared, "channels": kernel_channels, "constraint": NormBounded(bound=0.7)}
        bounded |= _PAPER
        for kernel, (layer, radius) in _RADII.items():
            text, options = (
                f"branches of the {kernel} kernel in a chain",
                bounded | {"radius": radius},
            )
            paper = "GEQ, Table 5 (no count printed)"
            yield made(f"mopteq_{kernel}", layer, text, options, paper, paper_parameters=None)


SPECS = (
    *_family("cifar_5m", 5_000_000, 256, kernel_channels=224),
    *_family("cifar_8m", 8_000_000, 320, kernel_channels=280, printed=True),
    *_family("imagenet_6m", 6_000_000, 256),
    *_family("imagenet_13m", 13_000_000, 384, printed=True),
)
"""geq_*, kerdeq_*, mopteq_*, explicit_*, mopteq_polynomial_*, mopteq_sigmoid_*."""
