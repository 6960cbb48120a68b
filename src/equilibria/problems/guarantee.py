"""Kinds of guarantee, and what every certificate can say."""

from __future__ import annotations

import enum

import torch
from torch import Tensor

__all__ = ["Guarantee", "Guaranteed"]


class Guarantee(enum.StrEnum):
    """What is proven about a sample's equilibrium, strongest first."""

    contraction = "contraction"
    """One equilibrium; plain iteration z ← T(z) converges to it at the rate ρ < 1."""
    strong_convexity = "strong convexity"
    """One equilibrium; T_τ with τ = 2/(m + L) converges to it."""
    strong_monotonicity = "strong monotonicity"
    """One equilibrium; operator splitting with a step from m and L converges to it."""
    local = "local"
    """Exactly one equilibrium within the error bound of z, a strict local minimizer; there may be
    others elsewhere."""
    none = "none"
    """Nothing is proven."""

    @property
    def means_unique(self) -> bool:
        """Whether exactly one equilibrium is proven to exist."""
        return self not in (Guarantee.local, Guarantee.none)


class Guaranteed:
    """A certificate: the guarantee of each sample in ``kinds``, and what follows from them."""

    kinds: tuple[Guarantee, ...]
    residual: Tensor

    @property
    def certified(self) -> Tensor:
        """Which samples have exactly one equilibrium, [B] bool."""
        return torch.tensor([k.means_unique for k in self.kinds], device=self.residual.device)

    @property
    def unique(self) -> bool:
        """Whether every sample is certified to have exactly one equilibrium."""
        return bool(self.certified.all())

    @property
    def kind(self) -> Guarantee:
        """The weakest guarantee in the batch."""
        order = list(Guarantee)
        return max(self.kinds, key=order.index) if self.kinds else Guarantee.none
