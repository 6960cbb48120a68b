"""The tangent kernel K(t) of Proposition 4 (paper 004) and the gradient, in closed form.

With vᵢᵀ = uᵀQᵢ⁻¹Dᵢ the Jacobian of f(xᵢ) = uᵀzᵢ is (Lemmas 3.2.2 and 3.2.3, matrix by matrix)

    ∂/∂W = vᵢzᵢᵀ,  ∂/∂A = −A(vᵢzᵢᵀ + zᵢvᵢᵀ),  ∂/∂B = vᵢzᵢᵀ − zᵢvᵢᵀ,
    ∂/∂U = vᵢxᵢᵀ,  ∂/∂u = zᵢ,  ∂/∂b = vᵢ

so that each JJᵀ is a sum of entrywise products of N × N Gram matrices: O(N n³ + N² n) operations,
and no J_A of N × n² entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .equilibrium import Equilibrium, find_equilibrium, sensitivities
from .model import ThesisModel, check_data

__all__ = ["ClosedFormKernel", "closed_form_gradient", "closed_form_kernel", "square_loss"]


@dataclass(frozen=True)
class ClosedFormKernel:
    """K = J_AJ_Aᵀ + J_BJ_Bᵀ + J_UJ_Uᵀ + ZᵀZ (+ J_bJ_bᵀ), each [N, N], Eq 3.7."""

    A: Tensor
    B: Tensor
    U: Tensor
    u: Tensor
    b: Tensor | None

    @property
    def total(self) -> Tensor:
        """K, [N, N]."""
        found = self.A + self.B + self.U + self.u
        return found if self.b is None else found + self.b

    def smallest(self) -> float:
        """λ_min(K); K is positive semidefinite, so what rounding puts below zero is zero."""
        return max(0.0, float(torch.linalg.eigvalsh(self.total)[0]))


def closed_form_kernel(
    model: ThesisModel, X: Tensor, found: Equilibrium | None = None
) -> ClosedFormKernel:
    """K at X [d, N]; ``found`` is the equilibrium at X where it is known."""
    X = check_data(model, X)
    found = find_equilibrium(model, X) if found is None else found
    Z, V = found.Z, sensitivities(model, found)
    AZ, AV = model.A @ Z, model.A @ V
    ZZ, VV, VZ = Z.T @ Z, V.T @ V, V.T @ Z
    cross = (AV.T @ AZ) * VZ.T
    return ClosedFormKernel(
        A=(AV.T @ AV) * ZZ + (AZ.T @ AZ) * VV + cross + cross.T,
        B=2.0 * (VV * ZZ - VZ * VZ.T),
        U=VV * (X.T @ X),
        u=ZZ,
        b=None if model.b is None else VV,
    )


def square_loss(model: ThesisModel, found: Equilibrium, y: Tensor) -> tuple[float, Tensor]:
    """L = ½‖ŷ − y‖² (Eq 3.4) and ŷ − y, [N]."""
    rest = found.Z.T @ model.u - y.to(model.u)
    return 0.5 * float(rest @ rest), rest


def closed_form_gradient(model: ThesisModel, X: Tensor, found: Equilibrium, rest: Tensor) -> Tensor:
    """∇L (Lemma 3.2.3) for ŷ − y = ``rest`` [N], in the order of ``ThesisModel.vector``, [p]."""
    V = sensitivities(model, found) * rest
    G = V @ found.Z.T  # ∂L/∂W
    parts = [-model.A @ (G + G.T), G - G.T, V @ X.T, found.Z @ rest]
    if model.b is not None:
        parts.append(V.sum(1))
    return torch.cat([part.reshape(-1) for part in parts])
