"""The NTK thesis, its model at fixed parameters: section 3.2, Proposition 4, Lemmas 3.3.2 to 3.3.6.

Random models for the trials; derivatives against finite differences, with the thesis' matrices
written out in full; bounds at any parameters.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from itertools import product
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

from .claim import Trial
from .numerics import Random, climb, identity, norm, ones, spectral, tensor, zeros


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
    return identity(n * n).reshape(n, n, n * n).transpose(0, 1).reshape(n * n, n * n)


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
    eye = identity(2)
    # W = I − mI + skew of size t: I − W has all singular values √(m² + t²).
    for t, m in product((0.5, 1.0, 3.0), (0.3, 1.0)):
        W = (1 - m) * eye + tensor([[0.0, t], [-t, 0.0]])
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


def _row_norm(W: Tensor, D: Tensor, u: Tensor, *, gated: bool) -> float:
    """‖uᵀ(I − DW)⁻¹‖, or with a further D behind; D [n] the diagonal."""
    row = torch.linalg.solve((identity(len(W)) - D[:, None] * W).T, u)
    return norm(D * row if gated else row)


def _row_bound(draw: Random, gated: bool) -> Trial | None:
    return _rows_of(draw_case(draw), gated)


def _rows_of(case: Case, gated: bool) -> Trial:
    model, D = case.model, case.found.D
    worst = max(_row_norm(model.W, D[:, i], model.u, gated=gated) for i in range(D.shape[1]))
    return Trial(worst * model.m / norm(model.u), case.sizes())


def _rows_family(draw: Random, gated: bool) -> Iterator[Trial | None]:
    # m = 1, A = 0, B = [[0, t], [0, 0]], Ux = (1, −1): the second unit is off, u = e₁.
    for t in (1.0, 10.0, 1000.0):
        B = tensor([[0.0, t], [0.0, 0.0]])
        U = tensor([[1.0], [-1.0 - 2 * t]])
        model = ThesisModel(A=torch.zeros(2, 2), B=B, U=U, u=tensor([1.0, 0.0]), m=1.0)
        yield _rows_of(case_of(model, ones(1, 1)), gated)

    def attempt(at: Tensor) -> Trial:
        at = at.clamp(-30.0, 30.0)  # the printed ratio has no upper bound
        A, B, D, u = at[:9].reshape(3, 3), at[9:18].reshape(3, 3), (at[18:21] > 0).double(), at[21:]
        size = _row_norm(-(A.T @ A) + B - B.T, D, u, gated=gated)
        return Trial(size / (1e-12 + norm(u)), {"at": at.tolist()})

    starts = [draw.normal(24) for _ in range(2)]
    yield from climb(attempt, starts, methods=("Powell",), evaluations=500)


def _any_gate(draw: Random, gated: bool) -> Trial:
    """Lemma C.0.4 for any diagonal J with entries in [0, 1]."""
    n = draw.integer(1, 5)
    model = draw_model(draw, n, 1, draw.log_uniform(0.05, 3.0))
    J = draw.share(n)
    if draw.integer(0, 1):
        J = J.round()
    size = _row_norm(model.W, J, model.u, gated=gated)
    return Trial(size * model.m / norm(model.u), {"n": n, "m": model.m, "J": J.tolist()})


def _state(draw: Random) -> Trial:
    return _state_norm(draw_case(draw))


def _state_norm(case: Case) -> Trial:
    bound = norm(case.X) * spectral(case.model.U) / case.model.m
    return Trial(norm(case.found.Z) / bound, case.sizes())


def _state_family(draw: Random) -> Iterator[Trial]:
    """A = B = 0, U = I, positive x along one line: Z = X/m, equality."""
    for m in (0.05, 0.5, 2.0):
        eye, zero = identity(3), zeros(3, 3)
        model = ThesisModel(A=zero, B=zero, U=eye, u=eye[0], m=m)
        X = tensor([[1.0, 2.0], [2.0, 4.0], [0.5, 1.0]])
        yield _state_norm(case_of(model, X))


def _moved(draw: Random) -> tuple[Case, Case]:
    case = draw_case(draw)
    size = draw.log_uniform(1e-4, 3.0)
    far = draw_model(draw, case.model.width, case.model.inputs, case.model.m)
    mixed = {
        k: getattr(case.model, k) + size * getattr(far, k) * float(draw.integer(0, 1))
        for k in ("A", "B", "U", "u")
    }
    other = dataclasses.replace(case.model, **mixed)
    return case, case._replace(model=other, found=find_equilibrium(other, case.X))


def _state_change(s: Case, k: Case) -> Trial | None:
    m, X = s.model.m, norm(s.X)
    dU, dW = spectral(k.model.U - s.model.U), spectral(k.model.W - s.model.W)
    bound = X * (dU / m + dW * spectral(s.model.U) / m**2)
    if bound < 1e-6 * norm(s.found.Z) + 1e-12:
        return None
    return Trial(norm(k.found.Z - s.found.Z) / bound, s.sizes() | {"dU": dU, "dW": dW})


def _output_change(s: Case, k: Case) -> Trial | None:
    m, X, U = s.model.m, norm(s.X), spectral(s.model.U)
    dU, dW = spectral(k.model.U - s.model.U), spectral(k.model.W - s.model.W)
    du, u = norm(k.model.u - s.model.u), norm(k.model.u)
    bound = X * (u * dU / m + u * dW * U / m**2 + U * du / m)
    moved = norm(k.found.Z.T @ k.model.u - s.found.Z.T @ s.model.u)
    return None if bound < 1e-9 else Trial(moved / bound, s.sizes() | {"dU": dU, "dW": dW})


Measure = Callable[[Case, Case], Trial | None]


def _change(draw: Random, *, measure: Measure) -> Trial | None:
    return measure(*_moved(draw))


def _change_family(draw: Random, *, measure: Measure) -> Iterator[Trial | None]:
    """n = d = N = 1: z = Ux/(m + a²), so small a comes near to the bound."""
    one = ones(1, 1)
    for m, a in product((0.05, 1.0), (1.0, 0.1, 0.01)):
        ends = (0.0, a * math.sqrt(m))
        models = [ThesisModel(A=end * one, B=0 * one, U=one, u=one[0], m=m) for end in ends]
        yield measure(*(case_of(model, one) for model in models))


def _weight_change(draw: Random) -> Trial | None:
    s, k = _moved(draw)
    A, dA, dB = s.model.A, k.model.A - s.model.A, k.model.B - s.model.B
    size = spectral(k.model.W - s.model.W)
    if size < 1e-6 * spectral(s.model.W):
        return None  # rounding
    printed = spectral(A.T @ dA + dA.T @ A + dA.T @ dA + dB - dB.T)
    a = spectral(dA)
    bound = 2 * spectral(A) * a + a * a + 2 * spectral(dB)
    return Trial(max(size / bound, 1.0 + 1e3 * abs(printed - size) / size), s.sizes())
