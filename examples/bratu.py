"""Bratu's equation and its inverse problem, solved through the implicit gradient.

python examples/bratu.py            writes bratu.svg

−Δu = s·exp(u) on the unit square, u = 0 on its border: u is the temperature of a reacting solid.
"""

from __future__ import annotations

import argparse

import matplotlib.pyplot as plt
import numpy as np
import torch
from scipy import optimize, sparse
from scipy.sparse.linalg import spsolve
from torch import Tensor, nn
from torch.nn.functional import interpolate

import equilibria as eq

NOISE = 1e-3  # of the measured temperatures
SIDE = 4  # s is found as SIDE×SIDE numbers, with linear interpolation between them


def solve_scipy(s: np.ndarray) -> np.ndarray:
    """u on a grid [n, n] by Newton's method with sparse matrices."""
    n = len(s)
    line = sparse.diags([-1.0, 2.0, -1.0], [-1, 0, 1], (n, n)) * (n + 1) ** 2
    laplace = sparse.kronsum(line, line, format="csc")
    u = np.zeros(n * n)
    for _ in range(10):
        heat = s.ravel() * np.exp(u)
        u -= spsolve(laplace - sparse.diags(heat, format="csc"), laplace @ u - heat)
    return u.reshape(n, n)


def main(quick: bool, out: str) -> dict[str, float]:
    n = 8 if quick else 20
    t = np.arange(1, n + 1) / (n + 1)
    true = 1.5 + 3.5 * np.exp(-20 * ((t[:, None] - 0.3) ** 2 + (t - 0.6) ** 2))
    seen = solve_scipy(true) + NOISE * np.random.default_rng(0).standard_normal((n, n))
    # Eigenvectors and eigenvalues of −d²/dx² on the grid.
    k = torch.arange(1, n + 1, dtype=torch.float64)
    modes = (2 / (n + 1)) ** 0.5 * torch.sin(torch.pi / (n + 1) * torch.outer(k, k))
    values = (2 * (n + 1) * torch.sin(torch.pi / (2 * n + 2) * k)) ** 2

    def residual(u: Tensor, s: Tensor) -> Tensor:
        """u − (−Δ)⁻¹(s·exp(u)): with the inverse, Krylov methods need few steps."""
        heat = modes @ (s * u.exp()) @ modes
        return u - modes @ (heat / (values[:, None] + values)) @ modes

    shapes = torch.eye(SIDE**2, dtype=torch.float64).reshape(-1, 1, SIDE, SIDE)
    basis = interpolate(shapes, (n, n), mode="bilinear", align_corners=True)[:, 0]
    p = nn.Parameter(torch.zeros(SIDE**2, dtype=torch.float64))
    optimizer = torch.optim.LBFGS([p], max_iter=200, line_search_fn="strong_wolfe")

    def temperature() -> Tensor:
        s = torch.tensordot(p.exp(), basis, 1)[None]
        return eq.root(residual, torch.zeros_like(s), s).value[0]

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = 0.5 * ((temperature() - torch.from_numpy(seen)) / NOISE).square().sum()
        value.backward()
        return value

    def misfit(q: np.ndarray) -> np.ndarray:
        return (solve_scipy(np.tensordot(np.exp(q), basis.numpy(), 1)) - seen).ravel() / NOISE

    before, first = loss().item(), p.grad.numpy().copy()
    optimizer.step(loss)
    found = np.tensordot(p.detach().exp().numpy(), basis.numpy(), 1)
    # Beside scipy: the temperature, the first gradient by differences, and the inverse problem.
    slope = [(misfit(e) ** 2 - misfit(-e) ** 2).sum() / 4e-4 for e in 1e-4 * np.eye(SIDE**2)]
    fit = optimize.least_squares(misfit, np.zeros(SIDE**2))
    agreement = {
        "temperature": float(np.abs(temperature().detach().numpy() - solve_scipy(found)).max()),
        "gradient": float(np.abs(first - slope).max() / np.abs(slope).max()),
        "recovered log s": float(np.abs(p.detach().numpy() - fit.x).max()),
    }
    print(f"misfit {before:.3g} at s = 1, {loss().item():.3g} recovered, {fit.cost:.3g} by scipy")
    print("apart from scipy:", ", ".join(f"{k} {v:.1e}" for k, v in agreement.items()))
    figure, axes = plt.subplots(1, 3, figsize=(9, 2.8), layout="tight")
    fields = {"measured u": seen, "true s": true, "recovered s": found}
    for axis, (title, field) in zip(axes, fields.items(), strict=True):
        figure.colorbar(axis.imshow(field, cmap="cividis", vmin=0), ax=axis)
        axis.set(title=title, xticks=[], yticks=[])
    figure.savefig(out, metadata={"Date": None})
    return agreement | {"from the truth": float(np.abs(found - true).mean())}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a coarser grid")
    parser.add_argument("--out", default="bratu.svg", help="where to write the picture")
    main(**vars(parser.parse_args()))
