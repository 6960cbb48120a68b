"""The NTK thesis, Lemmas 3.3.2–3.3.4 and 3.3.6: bounds at any parameters."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from equilibria_papers.theory.monotone_ntk import ThesisModel, find_equilibrium

from .claim import Trial
from .drawing import Random, identity, norm, ones, spectral, tensor, zeros
from .numerics import climb
from .thesis_models import Case, case_of, draw_case, draw_model


def _row_norm(W: Tensor, D: Tensor, u: Tensor, *, gated: bool) -> float:
    """‖uᵀ(I − DW)⁻¹‖, or with a further D behind; D [n] the diagonal."""
    row = torch.linalg.solve((identity(len(W)) - D[:, None] * W).T, u)
    return norm(D * row if gated else row)


def _rows(draw: Random, gated: bool) -> Trial | None:
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
    for m in (0.05, 1.0):
        for a in (1.0, 0.1, 0.01):
            pair = []
            for value in (0.0, a * math.sqrt(m)):
                model = ThesisModel(A=value * one, B=0 * one, U=one, u=one[0], m=m)
                pair.append(case_of(model, one))
            yield measure(*pair)


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
