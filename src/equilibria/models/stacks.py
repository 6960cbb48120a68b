"""Equilibrium layers in sequence with skips, and their twins of equal size (ours; docs/models.md).

    x ↦ skip(x) + layer(norm(x)),    layer one of GEQ, OptEq, two explicit convolutions.

The norm may stand behind the layer, x ↦ skip(x) + norm(layer(x)), or on both sides, so that what a
layer of rectified outputs adds has both signs.

Depth by stacking was worth more than width by branches in every measurement of ours: nine GEQ
layers of 7.6 M parameters, normalized after, reach 95.85% on CIFAR-10 (results/experiments.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from equilibria.adjoints import Implicit, Phantom
from equilibria.engine.adjoint import Adjoint
from equilibria.engine.krylov import GMRES
from equilibria.engine.solver import SolverOptions
from equilibria.nn import GEQ, NormBounded, OptEq
from equilibria.problems import MeanPatchEnergy, Patches
from equilibria.solvers import Anderson, Picard, ProximalGradient

from . import options as opt
from .network import AveragePool, Network, Shape, features_to_logits
from .registry import ModelSpec

__all__ = ["SPECS", "Block", "ExplicitPair", "StackNet"]

Layer = Callable[[int, int], nn.Module]
"""(channels in, channels out) → a module that keeps the pixels."""


NORMS = ("before", "after", "both")


class Block(nn.Module):
    """x ↦ skip(x) + layer(norm(x)); the skip is a 1 × 1 convolution where the width changes.

    Args:
        before, after: channels of x and of the result.
        layer: makes the layer.
        norm: where the layer is normalized: "before", "after" or "both".
        shift: zeros put around the layer's input and cut off its output, in pixels: patches of
            2·shift pixels then begin in the middle of those of an unshifted block.
    """

    def __init__(
        self, before: int, after: int, layer: Layer, *, norm: str = "before", shift: int = 0
    ) -> None:
        super().__init__()
        if norm not in NORMS:
            raise ValueError(
                f"Block(norm={norm!r}): expected one of {', '.join(map(repr, NORMS))}."
            )
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
    control that we know, not a handicapped one.
    """

    def __init__(self, before: int, after: int, mid: int, kernel_size: int = 3) -> None:
        super().__init__()
        pad = kernel_size // 2
        self.first = nn.Conv2d(before, mid, kernel_size, padding=pad, bias=False)
        self.norm = nn.BatchNorm2d(mid)
        self.second = nn.Conv2d(mid, after, kernel_size, padding=pad, bias=False)
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        inner = self.activation(self.norm(self.first(self.activation(x))))
        out: Tensor = self.second(inner)
        return out


class StackNet(Network):
    """A convolution, stages of ``depth`` blocks with a 2 × 2 average pool between, and a head.

    x [B, C, S, S]; stage i works on widths[i] channels of S/2ⁱ × S/2ⁱ pixels. Every second block of
    a stage is shifted by ``shift`` pixels.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        widths: tuple[int, ...],
        depth: int,
        layer: Layer,
        norm: str = "before",
        divisor: int = 1,
        shift: int = 0,
    ) -> None:
        super().__init__(shape.in_channels)
        self._check_pixels(shape.image_size, len(widths), divisor)
        self.stem = nn.Conv2d(shape.in_channels, widths[0], 3, padding=1, bias=False)
        stages: list[nn.Module] = []
        before = widths[0]
        for index, width in enumerate(widths):
            if index:
                stages.append(AveragePool(2))
            for place in range(depth):
                pixels = shift if place % 2 else 0
                stages.append(Block(before, width, layer, norm=norm, shift=pixels))
                before = width
        self.stages = nn.Sequential(*stages)
        self.head = features_to_logits(before, shape.num_classes)

    @staticmethod
    def _check_pixels(size: int, stages: int, divisor: int) -> None:
        """Each pool halves; each stage's pixels must hold whole patches."""
        needed = divisor * 2 ** (stages - 1)
        if size % needed:
            raise ValueError(
                f"image_size={size} is no multiple of {needed}: {stages} stages halve it "
                f"{stages - 1} time(s), and patches of {divisor} pixels must divide the last map."
            )

    def logits(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.stages(self.stem(x)))
        return out


def _geq(
    shape: Shape,
    *,
    widths: tuple[int, ...],
    depth: int,
    norm: str,
    shift: bool,
    patch: Patches,
    **options: Any,
) -> Network:
    """GEQs with as many channels in the middle as in their output; options go to the layers."""
    if shift and patch.size % 2:
        raise ValueError(
            f"shift=True moves patches by half their size, but patches of {patch.size} pixel(s) "
            "have no whole half: use Patches of an even size, or shift=False."
        )
    if shift and depth < 2:
        raise ValueError(
            f"shift=True moves the patches of every second layer of a stage, and depth={depth} has "
            "none: use depth=2 or more, or shift=False."
        )

    def layer(before: int, after: int) -> nn.Module:
        return GEQ(after, after, in_channels=before, patch=patch, **options)

    return StackNet(
        shape,
        widths=widths,
        depth=depth,
        layer=layer,
        norm=norm,
        divisor=patch.size,
        shift=patch.size // 2 if shift else 0,
    )


def _opteq(
    shape: Shape, *, widths: tuple[int, ...], depth: int, norm: str, **options: Any
) -> Network:
    """The linear kernel in the form whose state lies in the space of Wz, as the GEQ's c does."""

    def layer(before: int, after: int) -> nn.Module:
        return OptEq(after, after, in_channels=before, kernel_size=3, form="hidden", **options)

    return StackNet(shape, widths=widths, depth=depth, layer=layer, norm=norm)


def _explicit(shape: Shape, *, widths: tuple[int, ...], depth: int, norm: str) -> Network:
    """Two convolutions of the shapes of U and W in the place of each layer."""

    def layer(before: int, after: int) -> nn.Module:
        return ExplicitPair(before, after, after)

    return StackNet(shape, widths=widths, depth=depth, layer=layer, norm=norm)


# A few steps of the certificate's size and as many terms of the backward series: nothing waits for
# the device, and Gaussian layers take the fused path (problems/fused.py). Four such steps leave
# the residual of six of damped iteration (docs/performance.md).
_FUSED = ProximalGradient(rtol=0.0, atol=0.0, max_steps=4, accelerate=False)
_FUSED_ADJOINT = Phantom(steps=3, damping=1.0, form="neumann")
# The linear twin's bounds are 1 − ‖W‖² ⪯ ∇²g ⪯ 1, so that the certificate's step is 1.8 at a norm
# of 0.95: best against the worst direction, but it turns the many in which W is small over and
# over, by −0.8 a step. Four steps of size 1 end four times as near the equilibrium, in untrained
# layers (results/linear_steps.json).
_LINEAR = Picard(rtol=0.0, atol=0.0, max_steps=4)
# The same with plain iteration, for the small networks.
_FAST = Picard(rtol=0.0, atol=0.0, max_steps=4, damping=0.8)
_FAST_ADJOINT = Phantom(steps=3, damping=0.8)
# Small networks on a CPU: solved to a tolerance, with the exact gradient (a loose backward solve is
# enough for training), so that steps, residuals and certificates mean what they say.
_EXACT = Anderson()
_EXACT_ADJOINT = Implicit(solver=GMRES(rtol=1e-2))


def _family(
    suffix: str,
    *,
    widths: tuple[int, ...],
    depth: int,
    in_channels: int,
    image_size: int,
    patch: Patches,
    hidden: int,
    bound: float,
    solver: SolverOptions,
    adjoint: Adjoint,
    linear_solver: SolverOptions | None = None,
    revision: int = 0,
    bias: bool = True,
    stack: str = "_stack",
) -> tuple[ModelSpec, ...]:
    """A GEQ stack, its linear twin and its explicit twin, of equal size.

    ``linear_solver`` is the linear twin's; None: the same. ``revision`` counts the changes of its
    defaults.
    """
    layers = f"{len(widths) * depth} layers of {' → '.join(map(str, widths))} channels"
    shared = {
        "widths": opt.integers(widths, "channels of each stage"),
        "depth": opt.integer(depth, "layers in each stage", high=64),
        "norm": opt.choice("before", "where a layer is normalized", NORMS),
    }
    solving = {"solver": opt.solver(solver), "adjoint": opt.adjoint(adjoint)}
    gaussian = {
        "patch": opt.patch(patch),
        "hidden": opt.integer(hidden, "columns of W_h"),
        "gamma": opt.gamma(MeanPatchEnergy(0.2)),
        "constraint": opt.constraint(NormBounded(bound=bound)),
        "bias": opt.flag(bias, "whether Ux has a bias"),
        "shift": opt.flag(False, "whether every second layer's patches are shifted by half"),
    }
    # The linear kernel is strongly convex below 1 only, where the Gaussian one goes to 1.4969.
    linear = {
        "constraint": opt.constraint(opt.linear_bound(min(bound, 0.95))),
        **solving,
        "solver": opt.solver(linear_solver or solver),
    }
    # Revision 0 of the GEQ stacks had MeanPatchEnergy(detach=True).
    made: tuple[tuple[str, Any, str, dict[str, opt.Option], int], ...] = (
        ("geq", _geq, f"{layers} in sequence, GEQ with skips", {**gaussian, **solving}, 1),
        ("opteq", _opteq, f"linear twin of geq{stack}_{suffix}: OptEq layers", linear, revision),
        (
            "explicit",
            _explicit,
            f"explicit twin of geq{stack}_{suffix}: two convolutions for each layer",
            {},
            0,
        ),
    )
    return tuple(
        ModelSpec(
            f"{name}{stack}_{suffix}",
            build,
            text,
            options={**shared, **own},
            in_channels=in_channels,
            image_size=image_size,
            revision=count,
        )
        for name, build, text, own, count in made
    )


def _specs() -> Iterator[ModelSpec]:
    for suffix, widths, depth in (
        ("cifar_3m", (64, 128, 256), 2),
        ("cifar_5m", (64, 128, 256), 3),
        ("cifar_8m", (96, 192, 320), 3),
    ):
        yield from _family(
            suffix,
            widths=widths,
            depth=depth,
            in_channels=3,
            image_size=32,
            patch=Patches(channels=8, size=2),
            hidden=64,
            bound=1.2,
            # The norm before U has a shift of its own (with norm="after" U has neither).
            bias=False,
            solver=_FUSED,
            adjoint=_FUSED_ADJOINT,
            linear_solver=_LINEAR,
            revision=1,  # 0 had the GEQ stack's solver
        )
    for suffix, image_size in (("digits", 8), ("mnist", 28)):
        small = partial(
            _family,
            suffix,
            widths=(32, 64),
            in_channels=1,
            image_size=image_size,
            patch=Patches(channels=4, size=2),
            hidden=16,
        )
        yield from small(depth=2, bound=1.2, solver=_FAST, adjoint=_FAST_ADJOINT)
        yield from small(depth=1, bound=0.95, solver=_EXACT, adjoint=_EXACT_ADJOINT, stack="")


SPECS = tuple(_specs())
"""geq_stack_*, opteq_stack_*, explicit_stack_*; and the small ones without "stack"."""
