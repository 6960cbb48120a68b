"""Equilibrium layers in sequence with skips, and their twins of equal size (ours; docs/models.md).

    x ↦ skip(x) + layer(norm(x)),    layer one of GEQ, OptEq, two explicit convolutions.

The norm may stand behind the layer, x ↦ skip(x) + norm(layer(x)), or on both sides, so that what a
layer of rectified outputs adds has both signs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from equilibria.adjoints import Implicit, Phantom
from equilibria.engine import GMRES
from equilibria.nn import GEQ, NormBounded, OptEq
from equilibria.problems import MeanPatchEnergy, Patches
from equilibria.solvers import Anderson, Picard

from .network import (
    AveragePool,
    ModelConfig,
    ModelSpec,
    Network,
    check_pixels,
    entry,
    features_to_logits,
    few_steps,
    patch_size,
)

Layer = Callable[..., nn.Module]
"""(channels in, channels out, **options) → a module that keeps the pixels."""


class Block(nn.Module):
    """x ↦ skip(x) + layer(norm(x)); the skip is a 1 × 1 convolution where the width changes.

    ``norm`` is "before", "after" or "both". ``shift`` is how many zeros are put around the layer's
    input and cut off its output: patches of 2·shift pixels then begin in the middle of those of an
    unshifted block.
    """

    def __init__(
        self, before: int, after: int, layer: Layer, *, norm: str = "before", shift: int = 0
    ) -> None:
        super().__init__()
        self.norm = nn.Identity() if norm == "after" else nn.BatchNorm2d(before)
        self.skip = nn.Identity() if before == after else nn.Conv2d(before, after, 1, bias=False)
        self.layer = layer(before, after)
        self.after = nn.Identity() if norm == "before" else nn.BatchNorm2d(after)
        self.shift = shift

    def forward(self, x: Tensor) -> Tensor:
        inside = self.norm(x)
        if self.shift:
            inside = self.layer(F.pad(inside, [self.shift] * 4))
            inside = inside[..., self.shift : -self.shift, self.shift : -self.shift]
        else:
            inside = self.layer(inside)
        added: Tensor = self.skip(x) + self.after(inside)
        return added


class ExplicitPair(nn.Module):
    """x ↦ C₂ ReLU(BN(C₁ ReLU(x))): two convolutions in the place of an equilibrium layer.

    C₁ has the shape of U and C₂ that of W, so that the size is that of the layer up to W_h. Inside
    a Block it is the residual block with activation first (He et al. 2016): the strongest explicit
    control that we know, not a handicapped one. ``mid`` is ``after`` if not given.
    """

    def __init__(self, before: int, after: int, mid: int | None = None) -> None:
        super().__init__()
        inner = after if mid is None else mid
        self.state_channels = after
        self.first = nn.Conv2d(before, inner, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(inner)
        self.second = nn.Conv2d(inner, after, 3, padding=1, bias=False)
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        inner = self.activation(self.norm(self.first(self.activation(x))))
        out: Tensor = self.second(inner)
        return out


def _geq(before: int, after: int, **options: Any) -> nn.Module:
    return GEQ(after, after, in_channels=before, **options)


def _opteq(before: int, after: int, **options: Any) -> nn.Module:
    """The linear kernel; ``form`` "hidden" has its state in the space of Wz, as the GEQ's c."""
    return OptEq(after, after, in_channels=before, kernel_size=3, **options)


class StackNet(Network):
    """A convolution, stages of ``depth`` blocks with a 2 × 2 average pool between, and a head.

    x [B, C, S, S]; stage i works on widths[i] channels of S/2ⁱ × S/2ⁱ pixels. With ``shift`` every
    second block of a stage is shifted by half a patch. ``options`` are those of the layers.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        layer: Layer,
        widths: tuple[int, ...],
        depth: int,
        norm: str,
        shift: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(config.in_channels)
        patch = patch_size(options)
        _check_shift(shift, patch, depth)
        halved = len(widths) - 1
        why = f"{len(widths)} stages halve it {halved} time(s), and patches of {patch} pixels must"
        check_pixels(config.image_size, patch * 2**halved, f"{why} divide the last map")
        self.stem = nn.Conv2d(config.in_channels, widths[0], 3, padding=1, bias=False)
        stages: list[nn.Module] = []
        made = partial(layer, **options)
        before = widths[0]
        for index, width in enumerate(widths):
            if index:
                stages.append(AveragePool(2))
            for place in range(depth):
                pixels = patch // 2 if shift and place % 2 else 0
                stages.append(Block(before, width, made, norm=norm, shift=pixels))
                before = width
        self.stages = nn.Sequential(*stages)
        self.head = features_to_logits(before, config.num_classes)

    def logits(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.stages(self.stem(x)))
        return out


def _check_shift(shift: bool, patch: int, depth: int) -> None:
    if shift and patch % 2:
        raise ValueError(
            f"shift=True moves patches by half their size, but patches of {patch} pixel(s) have no "
            "whole half: use Patches of an even size, or shift=False."
        )
    if shift and depth < 2:
        raise ValueError(
            f"shift=True moves the patches of every second layer of a stage, and depth={depth} has "
            "none: use depth=2 or more, or shift=False."
        )


def _family(
    suffix: str,
    widths: tuple[int, ...],
    depth: int,
    gaussian: dict[str, Any],
    linear: dict[str, Any],
    *,
    revision: int = 0,
    **card: Any,
) -> tuple[ModelSpec, ...]:
    """A GEQ stack, its linear twin and its explicit twin, of equal size.

    ``gaussian`` and ``linear`` are the options of their layers; ``revision`` is the linear twin's.
    """
    shared = {"widths": widths, "depth": depth, "norm": "before"}
    layers = f"{len(widths) * depth} layers of {' → '.join(map(str, widths))} channels"
    twin = f"twin of geq{suffix}"

    def made(kind: str, layer: Layer, text: str, options: Any, revision: int = 0) -> ModelSpec:
        build = partial(StackNet, layer=layer)
        return entry(f"{kind}{suffix}", build, text, options, revision=revision, **card)

    # Strongly convex below 1 only, where the Gaussian kernel goes to 1.4969.
    bounded = {**shared, "constraint": NormBounded(bound=0.95), "form": "hidden", **linear}
    return (
        # Revision 0 had MeanPatchEnergy(detach=True).
        made("geq", _geq, f"{layers} in sequence, GEQ with skips", {**shared, **gaussian}, 2),
        made("opteq", _opteq, f"linear {twin}: OptEq layers", bounded, revision),
        made("explicit", ExplicitPair, f"explicit {twin}: two convolutions for each layer", shared),
    )


# For CIFAR: few and long steps (docs/performance.md).
_CIFAR = {
    "patch": Patches(channels=8, size=2),
    "hidden": 64,
    "gamma": MeanPatchEnergy(0.2),
    "constraint": NormBounded(bound=1.2),
    "bias": False,  # the norm before U has a shift of its own (with norm="after" U has neither)
    "shift": False,
    **few_steps(3, 2, 0.8),
}
# The linear twin's bounds are 1 − ‖W‖² ⪯ ∇²g ⪯ 1, so that the certificate's step is 1.8 at a norm
# of 0.95: best against the worst direction, but it turns the many in which W is small over and
# over, by −0.8 a step. Four steps of size 1 end four times as near the equilibrium, in untrained
# layers (results/linear_steps.json).
_CIFAR_LINEAR = {
    "solver": Picard(rtol=0.0, atol=0.0, max_steps=4),
    "adjoint": _CIFAR["adjoint"],
}
# The same with plain iteration, for the small networks.
_FAST = {
    "solver": Picard(rtol=0.0, atol=0.0, max_steps=4, damping=0.8),
    "adjoint": Phantom(steps=3, damping=0.8),
}
_SMALL = {**_CIFAR, "patch": Patches(channels=4, size=2), "hidden": 16, "bias": True, **_FAST}
# Small networks on a CPU: solved to a tolerance, with the exact gradient (a loose backward solve is
# enough for training), so that steps, residuals and certificates mean what they say.
_EXACT = {"solver": Anderson(), "adjoint": Implicit(solver=GMRES(rtol=1e-2))}
_SOLVED = {**_SMALL, "constraint": NormBounded(bound=0.95), **_EXACT}
_DIGITS = {"in_channels": 1, "image_size": 8}
_MNIST = {"in_channels": 1, "image_size": 28}

# Revision 0 of the linear twins for CIFAR had the GEQ stack's solver.
SPECS = (
    *_family("_stack_cifar_3m", (64, 128, 256), 2, _CIFAR, _CIFAR_LINEAR, revision=1),
    *_family("_stack_cifar_5m", (64, 128, 256), 3, _CIFAR, _CIFAR_LINEAR, revision=1),
    *_family("_stack_cifar_8m", (96, 192, 320), 3, _CIFAR, _CIFAR_LINEAR, revision=1),
    *_family("_stack_digits", (32, 64), 2, _SMALL, _FAST, **_DIGITS),
    *_family("_stack_mnist", (32, 64), 2, _SMALL, _FAST, **_MNIST),
    *_family("_digits", (32, 64), 1, _SOLVED, _EXACT, **_DIGITS),
    *_family("_mnist", (32, 64), 1, _SOLVED, _EXACT, **_MNIST),
)
"""geq_stack_*, opteq_stack_*, explicit_stack_*; and the small ones without "stack"."""
