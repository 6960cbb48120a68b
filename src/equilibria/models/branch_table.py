"""The sizes of the papers' six-branch networks (GEQ A.7, KerDEQ; docs/models.md)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from equilibria.nn import NormBounded, PolynomialEq, SigmoidEq
from equilibria.problems import FixedGamma, MeanPatchEnergy, Patches

from . import options as opt
from .branches import (
    ADJOINT,
    EXPRESS,
    EXPRESS_ADJOINT,
    SOLVER,
    geq_branches,
    kernel_branches,
    mopteq_branches,
)
from .registry import ModelSpec

__all__ = ["SPECS"]


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
        "constraint": opt.constraint(constraint),
        "solver": opt.solver(SOLVER),
        "adjoint": opt.adjoint(ADJOINT),
    }


def _gaussian(size: _Size, patch: Patches, *, kerdeq: bool) -> ModelSpec:
    gamma = FixedGamma(0.5) if kerdeq else MeanPatchEnergy(0.2)
    return ModelSpec(
        f"{'kerdeq' if kerdeq else 'geq'}_{size.name}",
        partial(geq_branches, downsample=size.downsample),
        f"six parallel {'KerDEQ branches, γ = 0.5' if kerdeq else 'GEQ branches'}",
        in_channels=3,
        image_size=size.image_size,
        options={
            **_shared(size, size.channels, NormBounded(bound=1.2)),
            "solver": opt.solver(EXPRESS),
            "adjoint": opt.adjoint(EXPRESS_ADJOINT),
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


def _linear(size: _Size) -> ModelSpec:
    return ModelSpec(
        f"mopteq_{size.name}",
        partial(mopteq_branches, downsample=size.downsample),
        "six parallel OptEq branches: the linear kernel",
        in_channels=3,
        image_size=size.image_size,
        options=_shared(size, size.channels, opt.linear_bound(0.95)),
        paper="GEQ, Tables 1–2",
        paper_parameters=size.parameters if size.name in _PRINTED else None,
        paper_classes=size.classes,
    )


def _kernel(
    size: _Size,
    channels: int,
    name: str,
    kernel: type[PolynomialEq] | type[SigmoidEq],
    radius: float,
) -> ModelSpec:
    return ModelSpec(
        f"mopteq_{name}_{size.name}",
        partial(kernel_branches, kernel=kernel, downsample=size.downsample),
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
        _gaussian(size, Patches(channels=8, size=2), kerdeq=False),
        _gaussian(size, kerdeq, kerdeq=True),
        _linear(size),
    )
    channels = size.kernel_channels
    if channels is None:
        return made
    return (
        *made,
        _kernel(size, channels, "polynomial", PolynomialEq, _POLYNOMIAL_RADIUS),
        _kernel(size, channels, "sigmoid", SigmoidEq, _SIGMOID_RADIUS),
    )


SPECS = tuple(spec for size in _SIZES for spec in _specs(size))
"""geq_*, kerdeq_*, mopteq_*, mopteq_polynomial_*, mopteq_sigmoid_*."""
