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
from torch import Tensor, nn

import equilibria as eq

NOISE, MOST = 1e-3, 6.5  # of the temperatures; of s: above 6.8 there may be no steady state


def solve_scipy(s: np.ndarray) -> np.ndarray:
    """u on a grid [n, n] by Newton's method with sparse matrices."""
    n, u = len(s), np.zeros(s.size)
    line = sparse.diags([-1.0, 2.0, -1.0], [-1, 0, 1], (n, n)) * (n + 1) ** 2
    laplace = sparse.kronsum(line, line, format="csc")
    for _ in range(10):
        heat = s.ravel() * np.exp(u)
        u -= sparse.linalg.spsolve(laplace - sparse.diags(heat, format="csc"), laplace @ u - heat)
    return u.reshape(n, n)


def main(quick: bool, out: str) -> dict[str, float]:
    n, side = (8, 3) if quick else (20, 4)
    t = np.arange(1, n + 1) / (n + 1)
    true = 1.5 + 3.5 * np.exp(-20 * ((t[:, None] - 0.3) ** 2 + (t - 0.6) ** 2))
    seen = solve_scipy(true) + NOISE * np.random.default_rng(0).standard_normal((n, n))
    k = torch.arange(1, n + 1, dtype=torch.float64)
    modes = (2 / (n + 1)) ** 0.5 * torch.sin(torch.pi / (n + 1) * torch.outer(k, k))
    values = (2 * (n + 1) * torch.sin(torch.pi / (2 * n + 2) * k)) ** 2  # eigenvalues of −d²/dx²

    def residual(u: Tensor, s: Tensor) -> Tensor:
        """u − (−Δ)⁻¹(s·exp(u)): with the inverse, Krylov methods need few steps."""
        heat = modes @ (s * u.exp()) @ modes
        return u - modes @ (heat / (values[:, None] + values)) @ modes

    # s is recovered as side×side numbers, with linear interpolation between them.
    shapes = torch.eye(side**2, dtype=torch.float64).reshape(-1, 1, side, side)
    basis = nn.functional.interpolate(shapes, (n, n), mode="bilinear", align_corners=True)[:, 0]
    p = nn.Parameter(torch.zeros(side**2, dtype=torch.float64))
    optimizer = torch.optim.LBFGS([p], max_iter=300, line_search_fn="strong_wolfe")

    def strength(p: Tensor) -> Tensor:
        return MOST * torch.tensordot(p.sigmoid(), basis, 1)

    def loss() -> Tensor:
        optimizer.zero_grad()
        u = eq.root(residual, torch.zeros_like(modes)[None], strength(p)[None]).value[0]
        value = 0.5 * ((u - torch.from_numpy(seen)) / NOISE).square().sum()
        value.backward()
        return value

    def misfit(q: np.ndarray) -> np.ndarray:
        return (solve_scipy(strength(torch.from_numpy(q)).numpy()) - seen).ravel() / NOISE

    before, first = loss().item(), p.grad.numpy().copy()
    optimizer.step(loss)
    found, after, q = strength(p.detach()).numpy(), loss().item(), p.detach().numpy()
    slope = [(misfit(e) ** 2 - misfit(-e) ** 2).sum() / 4e-4 for e in 1e-4 * np.eye(side**2)]
    agreement = {
        "misfit": abs(after / (0.5 * np.square(misfit(q)).sum()) - 1),
        "gradient": float(np.abs(first - slope).max() / np.abs(slope).max()),
        "recovered p": float(np.abs(q - optimize.least_squares(misfit, 0 * q).x).max()),
    }
    print(f"misfit {before:.3g} at first, {after:.3g} with the recovered s")
    print("apart from scipy:", ", ".join(f"{k} {v:.1e}" for k, v in agreement.items()))
    figure, axes = plt.subplots(1, 3, figsize=(9, 2.8), layout="tight")
    fields = {"measured u": seen, "true s": true, "recovered s": found}
    for axis, (title, field) in zip(axes, fields.items(), strict=True):
        figure.colorbar(axis.imshow(field, cmap="cividis", vmin=0), ax=axis)
        axis.set_title(title)
    figure.savefig(out, metadata={"Date": None})
    return agreement | {"from the truth": float(np.abs(found - true).mean())}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a coarser grid")
    parser.add_argument("--out", default="bratu.svg", help="where to write the picture")
    main(**vars(parser.parse_args()))
