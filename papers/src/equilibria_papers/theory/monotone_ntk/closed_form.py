"""The tangent kernel K(t) of Proposition 4 (the NTK thesis) and the gradient, in closed form.

With vᵢᵀ = uᵀQᵢ⁻¹Dᵢ the Jacobian of f(xᵢ) = uᵀzᵢ is (Lemmas 3.2.2 and 3.2.3, matrix by matrix)

    ∂/∂W = vᵢzᵢᵀ,  ∂/∂A = −A(vᵢzᵢᵀ + zᵢvᵢᵀ),  ∂/∂B = vᵢzᵢᵀ − zᵢvᵢᵀ,
    ∂/∂U = vᵢxᵢᵀ,  ∂/∂u = zᵢ,  ∂/∂b = vᵢ

so that each JJᵀ is a sum of entrywise products of N × N Gram matrices: O(N n³ + N² n) operations,
and no J_A of N × n² entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from equilibria.engine import solve_each

from .model import (
    Equilibrium,
    ThesisModel,
    check_count,
    check_data,
    find_equilibrium,
    sensitivities,
)

# Lemmas 3.2.1–3.2.3 (the NTK thesis) as matrices, vec by columns: to read, and to check others
# against.
#
# K is the commutation matrix, P_A = −(I + K)(I_n ⊗ Aᵀ), P_B = I − K and D, Q as in Lemma 3.2.1.
# Where the thesis prints uᵀ ⊗ I_N it must read I_N ⊗ uᵀ: vec stacks the samples' states. These are
# dense, N n × n² entries; for the kernel alone take ``closed_form_kernel``.


class StateJacobians(NamedTuple):
    """∂ vec Z / ∂ vec W, A, B [N n, n²], U [N n, n d] and b [N n, n] (or None)."""

    W: Tensor
    A: Tensor
    B: Tensor
    U: Tensor
    b: Tensor | None


class OutputJacobians(NamedTuple):
    """∂ŷ/∂ vec A, B [N, n²], U [N, n d], u [N, n] and b [N, n] (or None)."""

    A: Tensor
    B: Tensor
    U: Tensor
    u: Tensor
    b: Tensor | None


def commutation_matrix(
    rows: int, columns: int | None = None, *, device: torch.device | str | None = None
) -> Tensor:
    """K with K vec(M) = vec(Mᵀ) for M [rows, columns], vec by columns; a permutation, float64."""
    columns = rows if columns is None else columns
    check_count("commutation_matrix", rows=rows, columns=columns)
    size = rows * columns
    # Entry (i, j) of M stands at j·rows + i of vec(M) and at i·columns + j of vec(Mᵀ).
    place = torch.arange(size, device=device).reshape(columns, rows).T.reshape(-1)
    found = torch.zeros(size, size, dtype=torch.float64, device=device)
    found[torch.arange(size, device=device), place] = 1.0
    return found


def kronecker(a: Tensor, b: Tensor) -> Tensor:
    """a ⊗ b of two matrices; ``torch.kron`` refuses some strides of matrices of one row."""
    rows, columns = a.shape[0] * b.shape[0], a.shape[1] * b.shape[1]
    return (a[:, None, :, None] * b[None, :, None, :]).reshape(rows, columns)


def weight_jacobians(model: ThesisModel) -> tuple[Tensor, Tensor]:
    """P_A = ∂ vec W/∂ vec A = −(I + K)(I_n ⊗ Aᵀ) and P_B = ∂ vec W/∂ vec B = I − K, [n², n²]."""
    n = model.width
    swap = commutation_matrix(n, device=model.A.device)
    one = torch.eye(n * n, dtype=torch.float64, device=model.A.device)
    eye = torch.eye(n, dtype=torch.float64, device=model.A.device)
    return -(one + swap) @ kronecker(eye, model.A.T), one - swap


def residual_jacobians(model: ThesisModel, X: Tensor, found: Equilibrium) -> StateJacobians:
    """Lemma 3.2.1: of g(Z) = Z − σ(WZ + UX) by W, A, B, U, b at fixed Z; e.g. −D[Zᵀ ⊗ I_n]P_A."""
    X = check_data(model, X)
    eye = torch.eye(model.width, dtype=torch.float64, device=X.device)
    gate = found.D.T.reshape(-1, 1)  # diag(D), vec by columns: sample after sample
    by_weight = -gate * kronecker(found.Z.T, eye)
    by_a, by_b = weight_jacobians(model)
    return StateJacobians(
        W=by_weight,
        A=by_weight @ by_a,
        B=by_weight @ by_b,
        U=-gate * kronecker(X.T, eye),
        b=None if model.b is None else -gate * eye.repeat(X.shape[1], 1),
    )


def state_jacobians(
    model: ThesisModel, X: Tensor, found: Equilibrium | None = None
) -> StateJacobians:
    """Lemma 3.2.2: ∂ vec Z/∂ vec W = Q⁻¹D[Zᵀ ⊗ I_n], and by A, B, U, b; Q solved block by block."""
    X = check_data(model, X)
    found = find_equilibrium(model, X) if found is None else found
    parts = residual_jacobians(model, X, found)
    eye = torch.eye(model.width, dtype=torch.float64, device=X.device)
    Q = eye - found.D.T[:, :, None] * model.W  # the N diagonal blocks, [N, n, n]

    def through(part: Tensor) -> Tensor:
        blocks = part.reshape(X.shape[1], model.width, -1)
        solved = solve_each(Q, blocks)
        return -solved.reshape(part.shape)

    W, A, B, U = (through(part) for part in (parts.W, parts.A, parts.B, parts.U))
    return StateJacobians(W, A, B, U, None if parts.b is None else through(parts.b))


def output_jacobians(
    model: ThesisModel, X: Tensor, found: Equilibrium | None = None
) -> OutputJacobians:
    """Lemma 3.2.3 and Proposition 4: J_A = (I_N ⊗ uᵀ)Q⁻¹D[Zᵀ ⊗ I_n]P_A, and by B, U, u, b."""
    X = check_data(model, X)
    found = find_equilibrium(model, X) if found is None else found
    V = sensitivities(model, found)  # the rows of (I_N ⊗ uᵀ)Q⁻¹D
    by_weight = torch.einsum("ji,ki->ijk", found.Z, V).reshape(X.shape[1], -1)
    by_a, by_b = weight_jacobians(model)
    return OutputJacobians(
        A=by_weight @ by_a,
        B=by_weight @ by_b,
        U=torch.einsum("ji,ki->ijk", X, V).reshape(X.shape[1], -1),
        u=found.Z.T,
        b=None if model.b is None else V.T,
    )


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
