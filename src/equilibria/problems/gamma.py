"""γ policies: how the width of the Gaussian kernel is set from a sample's own patches.

γ is a constant of one solve: a policy sees the patch energies Eᵢ = ‖c̃ᵢ‖² = ‖(row i of c)W_h‖² at
z = 0 and returns one γ per sample. It sees no other sample. The gradient passes γ: that of a
layer is the derivative of the function it computes. ``detach=True`` takes γ as a constant in the
backward pass, as the GEQ papers do; values are the same, gradients are then not those of the layer.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor

from equilibria.engine.options import check_number
from equilibria.ops.gaussian_steps import mean_rate


class GammaPolicy(ABC):
    """γ = policy(energies): one positive number per sample. energies [B, P] → [B]."""

    @abstractmethod
    def __call__(self, energies: Tensor) -> Tensor:
        """γ [B], float32 or better, from a sample's patch energies [B, P], which carry a graph."""

    @property
    def per_sample(self) -> bool:
        """Whether it holds a γ for each sample, made nobody knows how."""
        return False

    @property
    @abstractmethod
    def input_dependent(self) -> bool:
        """Whether γ changes with the input, which changes the map x → z* even when detached."""

    @property
    @abstractmethod
    def lipschitz_factor(self) -> float | None:
        """F in Lip(x → z*) ≤ F·(μ/m)·‖x → c̃‖ (docs/facts.md, fact 5), or None: there is none."""


def _check_energies(energies: Tensor) -> Tensor:
    """Energies in float32 or better."""
    shape = tuple(energies.shape)
    if len(shape) != 2 or shape[1] == 0:
        raise ValueError(f"A γ policy takes patch energies [B, P] with P ≥ 1, got shape {shape}.")
    return energies.to(torch.promote_types(energies.dtype, torch.float32))


class _Constant(GammaPolicy):
    """A γ that does not depend on the input."""

    input_dependent = False
    lipschitz_factor = 1.0


@dataclass(frozen=True)
class FixedGamma(_Constant):
    """γ = value for every input (KerDEQ: 0.5)."""

    value: float = 0.5

    def __post_init__(self) -> None:
        check_number(self, "value", low=0.0, low_open=True)

    def __call__(self, energies: Tensor) -> Tensor:
        return torch.full_like(_check_energies(energies)[:, 0], float(self.value))


@dataclass(frozen=True)
class _PatchEnergy(GammaPolicy):
    """γ = scale / max(E, floor), E made of the energies of a sample's patches at z = 0."""

    scale: float = 0.2
    floor: float = 1e-12
    detach: bool = field(default=False, kw_only=True)
    input_dependent = True

    def __post_init__(self) -> None:
        check_number(self, "scale", low=0.0, low_open=True)
        check_number(self, "floor", low=0.0, low_open=True)
        if not isinstance(self.detach, bool):
            raise TypeError(
                f"{type(self).__name__}(detach={self.detach!r}): expected True or False, got "
                f"{type(self.detach).__name__}."
            )

    @abstractmethod
    def _reduced(self, energies: Tensor) -> Tensor:
        """E. [B, P] → [B]."""

    def __call__(self, energies: Tensor) -> Tensor:
        energies = _check_energies(energies.detach() if self.detach else energies)
        energy = self._reduced(energies)
        # No gradient where the floor acts. A NaN takes the floor too: c is NaN there as well, so
        # nothing is hidden, and a sample that failed gets a gradient of 0 and not of 0·NaN.
        over = (energies >= torch.finfo(energies.dtype).max).any(-1) | torch.isinf(energy)
        usual = (energy > self.floor) & ~over
        gamma = self.scale / torch.where(usual, energy, self.floor)
        # Energies that overflow say nothing of γ: the sample fails, and its result code says so.
        return torch.where(over, torch.nan, gamma)


@dataclass(frozen=True)
class MinPatchEnergy(_PatchEnergy):
    """γ = scale / minᵢ Eᵢ (GEQ §4.1), with Eᵢ at z = 0; options as ``MeanPatchEnergy``.

    No Lipschitz constant of x → z* exists that does not grow with the number of patches: one patch
    of small energy moves the γ of all the others.
    """

    lipschitz_factor = None

    def _reduced(self, energies: Tensor) -> Tensor:
        return energies.min(-1).values  # amin has the gradient NaN at a NaN, whatever comes in


@dataclass(frozen=True)
class MeanPatchEnergy(_PatchEnergy):
    """γ = scale / meanᵢ Eᵢ, with Eᵢ at z = 0: the default.

    Its Lipschitz factor is 1 + 2(3/2)^{3/2}e^{−3/2}/√scale: with E the mean energy and P patches,
    |dγ| ≤ 2γ‖dc̃‖/√(PE), each patch's message e^{−γ‖h‖²}h moves by at most
    (3/2)^{3/2}e^{−3/2}γ^{−3/2} per unit of γ, and γE = scale. Where the floor acts γ is constant.

    Args:
        scale: 0.2, as in the paper.
        floor: an energy below this counts as this, so that a zero input gives a finite γ.
        detach: take γ as a constant in the backward pass, as the papers do.
    """

    def __call__(self, energies: Tensor) -> Tensor:
        given = _check_energies(energies.detach() if self.detach else energies)
        found = mean_rate(given, self.scale, self.floor)
        return super().__call__(energies) if found is None else found

    def _reduced(self, energies: Tensor) -> Tensor:
        return energies.mean(-1)

    @property
    def lipschitz_factor(self) -> float | None:
        return 1.0 + 2.0 * math.pow(1.5 / math.e, 1.5) / math.sqrt(self.scale)


@dataclass(frozen=True)
class LearnedGamma(_Constant):
    """γ = exp(ρ) with a learned ρ, positive by construction.

    A layer owns a parameter made by ``initial_parameter()``, and hands ``policy.bind(parameter)``
    to the coupling.
    """

    init: float = 0.5

    def __post_init__(self) -> None:
        check_number(self, "init", low=0.0, low_open=True)

    def initial_parameter(self) -> Tensor:
        """ρ₀ = log(init), a scalar tensor for the layer to wrap."""
        return torch.tensor(math.log(self.init))

    def gamma_from(self, parameter: Tensor) -> Tensor:
        """γ = exp(ρ), in float32 or better, with its gradient."""
        return torch.exp(parameter.to(torch.promote_types(parameter.dtype, torch.float32)))

    def bind(self, parameter: Tensor) -> GammaPolicy:
        """A policy whose γ is exp(parameter), a scalar or one per sample, gradient included."""
        return _BoundGamma(self.gamma_from(parameter))

    def __call__(self, energies: Tensor) -> Tensor:
        raise ValueError(
            "LearnedGamma holds no parameter and cannot give a γ by itself: own a parameter "
            "ρ = policy.initial_parameter() and pass gamma=policy.bind(ρ)."
        )


@dataclass(frozen=True, eq=False)
class _BoundGamma(_Constant):
    """The γ of a layer's own parameter, the same for every input."""

    gamma: Tensor

    @property
    def per_sample(self) -> bool:
        return self.gamma.ndim > 0

    def __call__(self, energies: Tensor) -> Tensor:
        shape, batch = tuple(self.gamma.shape), energies.shape[0]
        if shape not in ((), (1,), (batch,)):
            raise ValueError(
                f"A learned γ is a scalar or [B]: got shape {shape} for a batch of {batch}."
            )
        return self.gamma.expand(batch)


def as_gamma(gamma: float | GammaPolicy) -> GammaPolicy:
    """A policy from a positive number or a policy."""
    if isinstance(gamma, GammaPolicy):
        return gamma
    if isinstance(gamma, bool) or not isinstance(gamma, (int, float)):
        raise TypeError(
            f"gamma takes a positive number or a GammaPolicy, got {type(gamma).__name__} {gamma!r}."
        )
    if not 0.0 < gamma < math.inf:
        raise ValueError(f"gamma={gamma!r} is out of range: γ must be a positive finite number.")
    return FixedGamma(float(gamma))
