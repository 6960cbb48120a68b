"""Non-negative matrix factorization of images, and how its parts depend on the images.

python examples/nmf.py            writes nmf.svg

½‖X − WH‖² + (MU/2)(‖W‖² + ‖H‖²) over W, H ≥ 0. It is not convex: the answer is a stationary point.
"""

from __future__ import annotations

import argparse

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.decomposition import NMF
from torch import Tensor

import equilibria as eq

RANK, MU = 6, 0.5  # MU > 0 also fixes the scale between W and H


def step(state: dict[str, Tensor], x: Tensor) -> dict[str, Tensor]:
    """A projected gradient step in W, then one in H. x is [B, n, m]."""
    w, h = state["w"], state["h"]
    ridge = MU * torch.eye(RANK, dtype=x.dtype)
    k = h @ h.mT + ridge
    w = torch.relu(w - (w @ k - x @ h.mT) / torch.linalg.matrix_norm(k, 2)[:, None, None])
    k = w.mT @ w + ridge
    h = torch.relu(h - (k @ h - w.mT @ x) / torch.linalg.matrix_norm(k, 2)[:, None, None])
    return {"w": w, "h": h}


def factor_sklearn(x: Tensor, w: Tensor, h: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """W and H of the same objective by coordinate descent, from a start near w and h."""
    scaled = MU / np.array(x.shape)
    model = NMF(RANK, init="custom", tol=0, max_iter=2000, alpha_W=scaled[1], alpha_H=scaled[0])
    near = (np.ascontiguousarray(1.01 * t[0].detach().numpy()) for t in (w, h))
    return model.fit_transform(x.numpy(), **dict(zip("WH", near, strict=True))), model.components_


def main(quick: bool, out: str) -> dict[str, float]:
    torch.manual_seed(0)
    digits = torch.from_numpy(load_digits().data[: 50 if quick else 100] / 16)
    x = digits[None].clone().requires_grad_()
    start = {
        "w": 0.5 * torch.rand(1, len(digits), RANK, dtype=torch.float64),
        "h": 0.5 * torch.rand(1, RANK, 64, dtype=torch.float64),
    }
    slow = eq.Picard(rtol=1e-10, max_steps=20_000)
    adjoint = eq.Implicit(solver=eq.GMRES(restart=100, max_steps=1000))
    solution = eq.fixed_point(step, start, x, solver=slow, adjoint=adjoint)
    found = solution.value
    # How the first part depends on each image: the derivative of its size.
    (influence,) = torch.autograd.grad(found["h"][0, 0].sum(), x)

    # Beside scikit-learn: the factors, and the derivative along its own direction by differences.
    size = float(influence.norm())
    w, h = factor_sklearn(digits, **found)
    ends = [factor_sklearn(digits + t / size * influence[0], **found)[1] for t in (1e-4, -1e-4)]
    agreement = {
        "W": float(np.abs(found["w"][0].detach().numpy() - w).max()),
        "H": float(np.abs(found["h"][0].detach().numpy() - h).max()),
        "derivative": abs(size / ((ends[0] - ends[1])[0].sum() / 2e-4) - 1),
    }
    error = (digits - (found["w"] @ found["h"])[0]).norm() / digits.norm()
    most = influence[0].norm(dim=1).argmax()
    print(f"{len(digits)} images, {RANK} parts, relative error {error:.3f}; {solution.summary()}")
    print(f"image {int(most)} changes the first part most")
    print("apart from scikit-learn:", ", ".join(f"{k} {v:.1e}" for k, v in agreement.items()))
    figure, axes = plt.subplots(1, RANK + 1, figsize=(9, 1.8), layout="tight")
    shown = [*found["h"][0].detach().numpy(), digits[most].numpy()]
    titles = [*(f"part {k + 1}" for k in range(RANK)), "changes 1 most"]
    for axis, picture, title in zip(axes, shown, titles, strict=True):
        axis.imshow(picture.reshape(8, 8), cmap="gray_r")
        axis.set_title(title, fontsize=8)
        axis.set_axis_off()
    figure.savefig(out, metadata={"Date": None})
    return agreement


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer images")
    parser.add_argument("--out", default="nmf.svg", help="where to write the picture")
    main(**vars(parser.parse_args()))
