"""Total variation denoising with a learned weight, beside fixed weights and cvxpy.

python examples/tv_denoising.py [--data-root FOLDER]     digits, or CIFAR-10 in gray from FOLDER
"""

from __future__ import annotations

import argparse

import cvxpy as cp
import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import equilibria as eq

SIGMA = 0.2  # of the noise; pixels are from 0 to 1


def images(count: int, data_root: str | None) -> Tensor:
    if data_root is None:
        return torch.from_numpy(load_digits().images[:count] / 16)
    data = eq.data.load("cifar10", "test", root=data_root, channels=1, lazy=True)
    return data.images[:count][:, 0].double() / 255


def denoise_cvxpy(noisy: Tensor, weight: float) -> Tensor:
    """argmin weight·TV(z) + ½‖z − x‖² for each image, by an interior point method."""
    z, x = cp.Variable(noisy.shape[1:]), cp.Parameter(noisy.shape[1:])
    down = cp.vstack([cp.diff(z, axis=0), np.zeros((1, z.shape[1]))])
    across = cp.hstack([cp.diff(z, axis=1), np.zeros((z.shape[0], 1))])
    jumps = cp.norm(cp.vstack([cp.vec(down, "C"), cp.vec(across, "C")]), axis=0)
    problem = cp.Problem(cp.Minimize(weight * cp.sum(jumps) + 0.5 * cp.sum_squares(z - x)))
    found = np.empty(noisy.shape)
    for row, x.value in enumerate(noisy.numpy()):
        problem.solve(solver=cp.CLARABEL, tol_gap_abs=1e-11, tol_gap_rel=1e-11, tol_feas=1e-11)
        found[row] = z.value
    return torch.from_numpy(found)


def main(quick: bool, out: str, data_root: str | None = None) -> dict[str, float]:
    torch.manual_seed(0)
    count, few = (4, 1) if quick else (32, 4)
    clean, test = images(2 * count, data_root).split(count)
    noisy, shown = (t + SIGMA * torch.randn_like(t) for t in (clean, test))
    layer = eq.nn.EquilibriumLayer(
        lambda x, p: eq.Problem(eq.TotalVariation2d(p.exp()), smooth=eq.LeastSquares(None, x)),
        p=nn.Parameter(torch.tensor(-3.0, dtype=torch.float64)),  # the weight is exp(p)
    )
    optimizer = torch.optim.LBFGS(layer.parameters(), max_iter=2 if quick else 5)

    def loss() -> Tensor:
        optimizer.zero_grad()
        (value := (layer(noisy) - clean).square().mean() / SIGMA**2).backward()
        return value

    optimizer.step(loss)
    weight = layer.p.exp().item()
    # Beside cvxpy: the images, and the derivative of their error by differences of its answers.
    z = layer(shown[:few])
    (slope,) = torch.autograd.grad((z - test[:few]).square().sum(), layer.p)
    theirs = [denoise_cvxpy(shown[:few], weight * np.exp(h)) for h in (-1e-3, 0.0, 1e-3)]
    below, _, above = (((t - test[:few]) ** 2).sum().item() for t in theirs)
    derivative = abs(slope.item() / ((above - below) / 2e-3) - 1)
    agreement = {"image": (z - theirs[1]).abs().max().item(), "derivative": derivative}
    weights = [weight * f for f in (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)]
    answers = [eq.TotalVariation2d(w).prox(shown) for w in weights]
    errors = [(t - test).square().mean().item() for t in answers]
    print(f"learned weight {weight:.4f}; mean square error with the weights")
    print(", ".join(f"{w:.3f}: {e:.5f}" for w, e in zip(weights, errors, strict=True)))
    print("apart from cvxpy:", ", ".join(f"{k} {v:.1e}" for k, v in agreement.items()))
    figure, axes = plt.subplots(1, 4, figsize=(9, 2.5), width_ratios=[1, 1, 1, 2], layout="tight")
    shots = {"clean": test, "noisy": shown, "learned weight": z.detach()}
    for axis, (title, t) in zip(axes, shots.items(), strict=False):
        axis.imshow(t[0].numpy(), cmap="gray", vmin=0, vmax=1)
        axis.set(title=title, xticks=[], yticks=[])
    axes[3].plot(weights, errors, "o-")
    axes[3].set(xlabel="weight (fourth: learned)", ylabel="mean square error")
    figure.savefig(out, metadata={"Date": None})
    return agreement | {"gain": min(errors) / errors[3]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer images")
    parser.add_argument("--out", default="tv_denoising.svg", help="where to write the picture")
    parser.add_argument("--data-root", help="a folder that holds CIFAR-10")
    main(**vars(parser.parse_args()))
