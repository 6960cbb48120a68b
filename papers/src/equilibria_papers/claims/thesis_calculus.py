"""The NTK thesis, section 3.2 and Proposition 4: derivatives, against finite differences."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from equilibria_papers.theory.monotone_ntk import ThesisModel, find_equilibrium

from .claim import Trial
from .drawing import Random, identity, norm, spectral, tensor
from .thesis_models import Case, away_from_kinks, case_of, commutation, draw_case, draw_model, kron

CLOSE = 1e-5
"""How far a formula may lie from finite differences, relative to its size."""


def _vec(M: Tensor) -> Tensor:
    return M.T.reshape(-1)


def _differences(case: Case, name: str, of: Callable[[ThesisModel], Tensor]) -> Tensor:
    """∂ of(model)/∂ vec(name) by central differences, vec by columns, a column an entry."""
    base, h = getattr(case.model, name), 1e-6
    columns = []
    for j in range(base.shape[1]):
        for i in range(base.shape[0]):
            unit = torch.zeros_like(base)
            unit[i, j] = h
            up = of(dataclasses.replace(case.model, **{name: base + unit}))
            down = of(dataclasses.replace(case.model, **{name: base - unit}))
            columns.append((up - down) / (2 * h))
    return torch.stack(columns, 1)


def _matrices(case: Case) -> dict[str, Tensor]:
    """D, Q, Zᵀ ⊗ I, Xᵀ ⊗ I, P_A, P_B as in Lemma 3.2.1, with I_n read as I_{n²} beside K."""
    n, N = case.found.Z.shape
    eye, one = identity(n), identity(n * n)
    K = commutation(n)
    D = torch.diag(_vec(case.found.D))
    lifted = kron(identity(N), case.model.W)
    return {
        "D": D,
        "Q": identity(N * n) - D @ lifted,
        "Z": kron(case.found.Z.T, eye),
        "X": kron(case.X.T, eye),
        "A": -(one + K) @ kron(eye, case.model.A.T),
        "B": one - K,
    }


def _worst(pairs: list[tuple[Tensor, Tensor]], case: Case) -> Trial:
    error = max(norm(found - wanted) / (1e-2 + norm(wanted)) for found, wanted in pairs)
    return Trial(error / CLOSE, case.sizes())


def _compared(case: Case, of: Callable[[ThesisModel], Tensor], *rows: Tensor) -> Trial:
    """The formulas for A, B and U against differences of ``of``."""
    names = zip(rows, "ABU", strict=True)
    return _worst([(row, _differences(case, name, of)) for row, name in names], case)


def _of_residual(draw: Random, one_sample: bool) -> Trial | None:
    case = draw_case(draw, low=0.2)
    if one_sample:
        X = case.X[:, :1].clone()
        case = case._replace(X=X, found=find_equilibrium(case.model, X), y=case.y[:1])
    if not away_from_kinks(case):
        return None
    Z, parts = case.found.Z, _matrices(case)

    def g(model: ThesisModel) -> Tensor:
        return _vec(Z - torch.relu(model.W @ Z + model.U @ case.X))

    D = -parts["D"]
    by_w = D @ parts["Z"]
    return _compared(case, g, by_w @ parts["A"], by_w @ parts["B"], D @ parts["X"])


def _of_state(draw: Random, appendix: bool) -> Trial | None:
    case = draw_case(draw, low=0.2)
    if appendix:  # [I ⊗ Z] fits nothing unless N = n = d
        n = draw.integer(2, 3)
        model = draw_model(draw, n, n, draw.log_uniform(0.2, 3.0))
        X = draw.normal(n, n)
        case = case_of(model, X)
    if not away_from_kinks(case):
        return None
    parts = _matrices(case)
    solve = torch.linalg.solve(parts["Q"], parts["D"])

    def state(model: ThesisModel) -> Tensor:
        return _vec(find_equilibrium(model, case.X, case.found).Z)

    by_w, by_u = parts["Z"], parts["X"]
    if appendix:
        eye = identity(case.model.width)
        by_w, by_u = -kron(eye, case.found.Z), -kron(eye, case.X)
    rows = (by_w @ parts["A"], by_w @ parts["B"], by_u)
    return _compared(case, state, *(solve @ row for row in rows))


def _rows(case: Case, printed: bool) -> dict[str, Tensor]:
    """J_A, J_B, J_U, with uᵀ ⊗ I_N as printed or I_N ⊗ uᵀ."""
    parts, eye = _matrices(case), identity(case.X.shape[1])
    u = case.model.u[None, :]
    front = kron(u, eye) if printed else kron(eye, u)
    front = front @ torch.linalg.solve(parts["Q"], parts["D"])
    return {
        "A": front @ parts["Z"] @ parts["A"],
        "B": front @ parts["Z"] @ parts["B"],
        "U": front @ parts["X"],
    }


def _of_loss(draw: Random, printed: bool) -> Trial | None:
    case = draw_case(draw, low=0.2)
    if not away_from_kinks(case):
        return None
    rest = case.found.Z.T @ case.model.u - case.y

    def loss(model: ThesisModel) -> Tensor:
        gap = find_equilibrium(model, case.X, case.found).Z.T @ model.u - case.y
        return 0.5 * (gap @ gap).reshape(1)

    return _compared(case, loss, *(rest[None] @ row for row in _rows(case, printed).values()))


def _of_outputs(draw: Random, printed: bool) -> Trial | None:
    case = draw_case(draw, low=0.2)
    if not away_from_kinks(case):
        return None

    def outputs(model: ThesisModel) -> Tensor:
        return find_equilibrium(model, case.X, case.found).Z.T @ model.u

    rows = _rows(case, printed)
    K = case.found.Z.T @ case.found.Z
    wanted = K.clone()
    for name, row in rows.items():
        K = K + row @ row.T
        own = _differences(case, name, outputs)
        wanted = wanted + own @ own.T
    return _worst([(K, wanted)], case)


def _contraction(draw: Random) -> Trial:
    model = draw_case(draw).model
    W, eye = model.W, identity(model.width)
    L = spectral(eye - W)
    alpha = draw.uniform(0.0, 3.0) * 2 * model.m / L**2
    bound = math.sqrt(max(0.0, 1 - 2 * alpha * model.m + (alpha * L) ** 2))
    size = spectral(eye - alpha * (eye - W))
    return Trial(size / bound, {"m": model.m, "alpha": alpha})


def _contractive(draw: Random, closed: bool) -> Iterator[Trial]:
    """At α = 2m/L², or just below it: ‖T_α‖ must lie below 1 itself, not only at most at 1."""
    for t in (0.5, 1.0, 3.0):
        # W = I − mI + skew of size t: I − W has all singular values √(m² + t²).
        for m in (0.3, 1.0):
            skew = tensor([[0.0, t], [-t, 0.0]])
            eye = identity(2)
            W = (1 - m) * eye + skew
            alpha = 2 * m / (m * m + t * t) * (1.0 if closed else 1 - 1e-4)
            size = spectral(eye - alpha * (eye - W))
            ratio = size if size < 1 - 1e-9 else 1.0 + 1e-3
            yield Trial(ratio, {"W": W.tolist(), "m": m, "alpha": alpha, "norm": size})


def _contractive_random(draw: Random, closed: bool) -> Trial:
    model = draw_case(draw).model
    eye = identity(model.width)
    end = 2 * model.m / spectral(eye - model.W) ** 2
    alpha = end * (1.0 if closed and draw.integer(0, 1) else draw.uniform(0.01, 0.99))
    size = spectral(eye - alpha * (eye - model.W))
    return Trial(size if size < 1 - 1e-12 else 1.0 + 1e-3, {"m": model.m, "alpha": alpha})
