"""The equilibrium of the thesis' model to machine precision: Newton on the pattern of signs.

Where the pattern D = 1[Wz + c > 0] is known, z = (I − DW)⁻¹Dc. All systems are n × n, one a sample:
Q = I − D(I_N ⊗ W) (Lemma 3.2.1) is block diagonal and is never formed.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from equilibria.engine import ConvergenceWarning, solve_each
from equilibria.solvers import PeacemanRachford

from .model import ThesisModel, check_data

__all__ = ["Equilibrium", "find_equilibrium", "sensitivities"]

_NEWTON = 40
_ENTRIES = 1 << 23  # of the stacked n × n systems held at once: 64 MiB
_UNIT = 2.0**-53


class Equilibrium(NamedTuple):
    """Z [n, N]; D [n, N], 1 where the unit is active, else 0; ‖Z − σ(WZ + UX)‖_F.

    σ′(0) = 0 as everywhere in torch: an argument that is zero up to rounding counts as zero.
    """

    Z: Tensor
    D: Tensor
    residual: float


def find_equilibrium(
    model: ThesisModel, X: Tensor, start: Equilibrium | None = None
) -> Equilibrium:
    """Z* with Z* = σ(WZ* + UX), X [d, N]; ``start`` gives the first pattern of signs.

    Samples for which Newton's patterns go round are taken by Peaceman–Rachford splitting, which
    converges for every W of the model, and polished again.
    """
    c = model.source(check_data(model, X))
    W = model.W
    active = c > 0 if start is None else start.D > 0
    Z, settled = _newton(W, c, active)
    if not bool(settled.all()):
        stuck = ~settled
        z = _splitting(model, X[:, stuck].to(c))
        again, fine = _newton(W, c[:, stuck], W @ z + c[:, stuck] > 0)
        Z[:, stuck] = torch.where(fine, again, z)
    argument = W @ Z + c
    noise = 8 * _UNIT * (W.abs() @ Z.abs() + c.abs())
    D = (argument > noise).to(c.dtype)
    residual = float((Z - argument.relu()).norm())
    return Equilibrium(Z, D, residual)


def _newton(W: Tensor, c: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
    """Z [n, N] and whether each column solves its equation, [N]."""
    Z = torch.zeros_like(c)
    settled = torch.zeros(c.shape[1], dtype=torch.bool, device=c.device)
    for _ in range(_NEWTON):
        todo = (~settled).nonzero()[:, 0]
        if not len(todo):
            break
        part, on = c[:, todo], active[:, todo].to(c.dtype)
        z = _solve(W, on, on * part, transposed=False)
        argument = W @ z + part
        gap = (z - argument.relu()).abs()
        allowed = 64 * _UNIT * (W.abs() @ z.abs() + part.abs()).amax(0).clamp_min(1e-300)
        Z[:, todo] = z
        settled[todo] = gap.amax(0) <= allowed
        active[:, todo] = argument > 0
    return Z, settled


def _splitting(model: ThesisModel, X: Tensor) -> Tensor:
    solver = PeacemanRachford(rtol=1e-14, atol=0.0, max_steps=20000, patience=20000)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        found: Tensor = model.to_layer().solve(X.T.contiguous(), solver=solver).value
    return found.T


def sensitivities(model: ThesisModel, found: Equilibrium) -> Tensor:
    """V [n, N] with vᵢᵀ = uᵀQᵢ⁻¹Dᵢ = ∂f(xᵢ)/∂(Uxᵢ): vᵢ = Dᵢ(I − WᵀDᵢ)⁻¹u."""
    u = model.u[:, None].expand_as(found.D)
    return found.D * _solve(model.W, found.D, u, transposed=True)


def _solve(W: Tensor, D: Tensor, right: Tensor, *, transposed: bool) -> Tensor:
    """(I − DᵢW)⁻¹rᵢ, or (I − WᵀDᵢ)⁻¹rᵢ, for every column i, [n, N]."""
    n, count = D.shape
    eye = torch.eye(n, dtype=W.dtype, device=W.device)
    chunk = max(1, _ENTRIES // (n * n))
    parts = []
    for first in range(0, count, chunk):
        on = D[:, first : first + chunk].T
        systems = eye - (W.T * on[:, None, :] if transposed else on[:, :, None] * W)
        columns = right[:, first : first + chunk].T
        parts.append(solve_each(systems, columns))
    return torch.cat(parts).T.contiguous()
