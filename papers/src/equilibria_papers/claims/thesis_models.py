"""Random models of the NTK thesis for its trials, and its matrices written out in full."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from equilibria_papers.theory.monotone_ntk import (
    Equilibrium,
    Ingredients,
    ThesisModel,
    find_equilibrium,
    ingredients,
    search_radii,
)

from .drawing import Random, norm, spectral, zeros


class Case(NamedTuple):
    """A model, X [d, N], y [N] and the equilibrium at X."""

    model: ThesisModel
    X: Tensor
    y: Tensor
    found: Equilibrium

    def sizes(self) -> dict[str, float]:
        """What to tell of it."""
        model = self.model
        sizes = {"n": model.width, "d": model.inputs, "N": self.X.shape[1], "m": float(model.m)}
        return sizes | {f"|{k}|": norm(getattr(model, k)) for k in ("A", "B", "U", "u")}


def draw_model(draw: Random, n: int, d: int, m: float) -> ThesisModel:
    """Entries N(0, s²/n) with s of its own for each parameter, from 0.05 to 5."""

    def part(*shape: int) -> Tensor:
        drawn: Tensor = draw.normal(*shape) * (draw.log_uniform(0.05, 5.0) / shape[-1] ** 0.5)
        return drawn

    return ThesisModel(A=part(n, n), B=part(n, n), U=part(n, d), u=part(n), m=m)


def draw_case(draw: Random, *, wide: bool = False, low: float = 0.05) -> Case:
    """n, d, N up to 5 (n ≥ N where ``wide``), m from ``low`` to 3."""
    N = draw.integer(1, 4)
    n, d = draw.integer(N if wide else 1, 5), draw.integer(1, 4)
    model = draw_model(draw, n, d, draw.log_uniform(low, 3.0))
    return case_of(model, draw.normal(d, N), draw.normal(N))


def case_of(model: ThesisModel, X: Tensor, y: Tensor | None = None) -> Case:
    """With the equilibrium found; labels that do not matter are the first row of X."""
    return Case(model, X, X[0] if y is None else y, find_equilibrium(model, X))


def away_from_kinks(case: Case) -> bool:
    """Whether no unit's argument is near 0, where finite differences mean nothing."""
    model = case.model
    argument = model.W @ case.found.Z + model.source(case.X)
    return bool((argument.abs() > 1e-3 * (1e-9 + argument.abs().max())).all())


def near_labels(draw: Random, condition: str, slack: float) -> tuple[Case, Ingredients] | None:
    """A random case whose y lies so near to ŷ that the condition holds with about this slack.

    Every right side grows with ‖ŷ(0) − y‖ but (3.18)'s, which grows with ‖u‖: where that is asked
    for, u is made small. Cases with λ₀ < ‖Z‖/10 are drawn again: their runs are stiff.
    """
    for _ in range(50):
        case = draw_case(draw, wide=True)
        least = float(torch.linalg.svdvals(case.found.Z)[-1])
        if least > 0.1 * norm(case.found.Z) and least > 1e-2:
            break
    else:
        return None
    model = case.model
    if condition != "1":
        U = spectral(model.U)
        inner = 1 / model.m**2 + 4 * U**2 * (spectral(model.A) ** 2 + 1) / model.m**4
        limit = least / (8 * slack * norm(case.X) * inner**0.5)
        model = dataclasses.replace(model, u=model.u * min(1.0, limit / norm(model.u)))
    away = draw.normal(case.X.shape[1])
    away = away / norm(away)
    outputs = case.found.Z.T @ model.u
    start = ingredients(model, case.X, outputs + away, case.found)
    size = 1.0
    for _ in range(8):
        best = search_radii(condition, dataclasses.replace(start, misfit=size)).slack
        if best >= slack:
            break
        size *= 0.95 * best / slack
    near = case._replace(model=model, y=outputs + size * away)
    return near, dataclasses.replace(start, misfit=size)


def kron(a: Tensor, b: Tensor) -> Tensor:
    """a ⊗ b of two matrices; ``torch.kron`` refuses some strides of matrices of one row."""
    found: Tensor = torch.einsum("ij,kl->ikjl", a, b)
    return found.reshape(a.shape[0] * b.shape[0], a.shape[1] * b.shape[1])


def commutation(n: int) -> Tensor:
    """K = Σ E_ij ⊗ E_ijᵀ, so that K vec(M) = vec(Mᵀ), vec by columns, [n², n²]."""
    K = zeros(n * n, n * n)
    for i in range(n):
        for j in range(n):
            unit = zeros(n, n)
            unit[i, j] = 1.0
            K += kron(unit, unit.T)
    return K
