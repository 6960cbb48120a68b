"""Sparse coding with a dictionary learned to denoise, beside scikit-learn's dictionary.

python examples/sparse_coding.py            writes sparse_coding.svg
"""

from __future__ import annotations

import argparse

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.decomposition import MiniBatchDictionaryLearning
from sklearn.linear_model import Lasso
from torch import Tensor, nn

import equilibria as eq

LAMBDA, SIGMA, ATOMS = 0.3, 0.3, 64  # SIGMA of the noise; pixels are from 0 to 1


def unit(atoms: Tensor) -> Tensor:
    return atoms / atoms.norm(dim=0)


def encode_sklearn(x: Tensor, atoms: np.ndarray) -> np.ndarray:
    """argmin_z LAMBDA·‖z‖₁ + ½‖x − z @ atoms‖² by coordinate descent."""
    model = Lasso(alpha=LAMBDA / x.shape[1], fit_intercept=False, tol=1e-12, max_iter=100_000)
    return np.array([model.fit(atoms.T, row).coef_.copy() for row in x.numpy()])


def main(quick: bool, out: str) -> dict[str, float]:
    torch.manual_seed(0)
    pixels = torch.from_numpy(load_digits().data / 16)
    count = 100 if quick else 1000
    clean, test = pixels[:count], pixels[1000:][: min(count, 200)]
    noisy, shown = (t + SIGMA * torch.randn_like(t) for t in (clean, test))
    layer = eq.nn.EquilibriumLayer(
        lambda x, d: eq.Problem(eq.SoftThreshold(LAMBDA), smooth=eq.LeastSquares(unit(d), x)),
        d=nn.Parameter(clean[:ATOMS].T.clone()),  # an atom in each column: first, images
        solver=eq.ProximalGradient(rtol=1e-5, max_steps=5000, patience=500),
    )

    optimizer = torch.optim.Adam(layer.parameters(), lr=0.01)
    for _ in range(3):
        for rows in torch.randperm(count).split(100):
            optimizer.zero_grad()
            z = layer(noisy[rows])
            (z @ unit(layer.d).T - clean[rows]).square().mean().backward()
            optimizer.step()

    # Beside scikit-learn: the codes, and a derivative of the error by differences of its codes.
    x, y, learned = shown[:4], test[:4], layer.d.detach()
    z = layer.solve(x, solver=eq.ProximalGradient(rtol=1e-11, max_steps=50_000)).value
    (slope,) = torch.autograd.grad((z @ unit(layer.d).T - y).square().sum(), layer.d)
    steps = (h / slope.norm() * slope for h in (1e-5, 0.0, -1e-5))
    atoms = [unit(learned + step).T.numpy() for step in steps]
    codes = [encode_sklearn(x, d) for d in atoms]
    up, _, down = (np.square(c @ d - y.numpy()).sum() for c, d in zip(codes, atoms, strict=True))
    agreement = {
        "codes": float(np.abs(z.detach().numpy() - codes[1]).max()),
        "derivative": abs(float(slope.norm()) / ((up - down) / 2e-5) - 1),
    }
    # A dictionary for the noisy images themselves, as it is usually learned.
    model = MiniBatchDictionaryLearning(
        ATOMS, alpha=LAMBDA, fit_algorithm="cd", max_iter=20, random_state=0
    )
    usual = model.fit(noisy.numpy()).components_
    ours = (layer(shown) @ unit(layer.d).T).detach().numpy()
    answers = {"noisy": shown.numpy(), "usual": encode_sklearn(shown, usual) @ usual, "ours": ours}
    errors = {k: float(np.square(v - test.numpy()).mean()) for k, v in answers.items()}
    print("mean square error:", ", ".join(f"{k} {v:.4f}" for k, v in errors.items()))
    print("apart from scikit-learn:", ", ".join(f"{k} {v:.1e}" for k, v in agreement.items()))
    figure, axes = plt.subplots(1, 10, figsize=(9, 1.4), layout="tight")
    shots = [test[0].numpy(), shown[0].numpy(), ours[0], *atoms[1][:7]]
    titles = ["clean", "noisy", "ours", *(f"atom {k + 1}" for k in range(7))]
    for axis, picture, title in zip(axes, shots, titles, strict=True):
        axis.imshow(picture.reshape(8, 8), cmap="gray_r")
        axis.set_title(title, fontsize=8)
        axis.set_axis_off()
    figure.savefig(out, metadata={"Date": None})
    return agreement | errors


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer images")
    parser.add_argument("--out", default="sparse_coding.svg", help="where to write the picture")
    main(**vars(parser.parse_args()))
