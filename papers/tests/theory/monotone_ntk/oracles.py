"""The thesis' model once more, by autograd through an unrolled iteration; nothing of ours in it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def state(p: dict[str, Tensor], X: Tensor, m: float, steps: int = 600) -> Tensor:
    """Z [n, N] by forward-backward steps with α = m/L², unrolled."""
    n = p["A"].shape[0]
    eye = torch.eye(n, dtype=torch.float64)
    W = (1 - m) * eye - p["A"].T @ p["A"] + p["B"] - p["B"].T
    c = p["U"] @ X
    L = float(torch.linalg.matrix_norm((eye - W).detach(), 2))
    alpha = m / L**2
    Z = torch.zeros_like(c)
    with torch.no_grad():
        for _ in range(steps):
            Z = torch.relu(Z - alpha * ((eye - W) @ Z - c))
    # One Newton step from the detached solution: it has the value and the first derivatives.
    columns = []
    for i in range(X.shape[1]):
        z = Z[:, i].detach()
        D = ((W @ z + c[:, i]) > 0).double().detach()
        columns.append(torch.linalg.inv(eye - D[:, None] * W) @ (D * c[:, i]))
    return torch.stack(columns, 1)


def parameters(model: Any) -> dict[str, Tensor]:
    return {name: getattr(model, name).clone() for name in model.names}


def outputs(p: dict[str, Tensor], X: Tensor, m: float) -> Tensor:
    return state(p, X, m).T @ p["u"]


def jacobian(model: Any, X: Tensor) -> dict[str, Tensor]:
    """∂ŷ/∂(each parameter), [N, *shape]."""
    p = {k: v.requires_grad_() for k, v in parameters(model).items()}
    y = outputs(p, X, model.m)
    rows: dict[str, list[Tensor]] = {k: [] for k in p}
    for each in y:
        found = torch.autograd.grad(each, list(p.values()), retain_graph=True)
        for k, g in zip(p, found, strict=True):
            rows[k].append(g)
    return {k: torch.stack(v) for k, v in rows.items()}
