"""The figures of pages that explain one idea; make_figures.py draws them with the others."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from torch import Tensor

import equilibria as eq

# Okabe and Ito: distinct for every kind of color vision.
COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
AUDIT = Path(__file__).parents[1] / "results" / "audit.md"


def residuals(solve: Callable[..., Any]) -> list[Tensor]:
    """‖T(z) − z‖ of each sample, [B], at every step."""
    seen: list[Tensor] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", eq.ConvergenceWarning)
        solve(callback=lambda _, z, norm: seen.append(norm.detach().clone()))
    return seen


def samples() -> plt.Figure:
    """Getting started: four samples of a batch, each solved to its own tolerance."""
    torch.manual_seed(0)
    weight = torch.randn(8, 8, dtype=torch.float64)
    weight = 0.95 * weight / torch.linalg.matrix_norm(weight, 2)
    x = torch.tensor([0.05, 0.5, 1.0, 3.0], dtype=torch.float64)[:, None] * torch.randn(4, 8)
    start, solver = torch.zeros_like(x), eq.Picard(rtol=1e-4, block=1, max_steps=200)

    def solve(**options: Any) -> Any:
        return eq.fixed_point(lambda z: torch.tanh(z @ weight + x), start, solver=solver, **options)

    steps = solve().stats.steps.tolist()
    seen = torch.stack(residuals(solve))
    figure, axis = plt.subplots(figsize=(6, 3.2))
    for k, (count, color) in enumerate(zip(steps, COLORS, strict=False)):
        axis.semilogy(seen[:count, k], color=color, label=f"sample {k + 1}: {count} steps")
        axis.plot(count - 1, seen[count - 1, k], "o", color=color)
    axis.set(xlabel="step", ylabel="‖T(z) − z‖", title="Each sample stops by itself")
    axis.legend(fontsize=8)
    return figure


def responses() -> plt.Figure:
    """All layers: the equilibrium of one unit over its input."""
    x = torch.linspace(-1, 6, 281, dtype=torch.float64)[:, None]
    w = torch.tensor([[0.9]], dtype=torch.float64)
    found = {
        "explicit: ReLU(x)": x.relu(),
        "OptEq, w = 0.9": eq.minimize(eq.Problem(eq.NonNegative(), eq.Linear(w, x))).value,
        "MonotoneDEQ, w = −2": x.relu() / 3,
        "GEQ, w = 0.9, γ = 0.2": eq.minimize(
            eq.Problem(eq.NonNegative(), eq.Gaussian(w, x, gamma=0.2))
        ).value,
        "DEQ: z = tanh(0.9z + x)": eq.fixed_point(
            lambda z, x: torch.tanh(0.9 * z + x), torch.zeros_like(x), (x,)
        ).value,
    }
    figure, axis = plt.subplots(figsize=(6, 3.4))
    for (name, z), color in zip(found.items(), [COLORS[6], *COLORS], strict=False):
        axis.plot(x, z, color=color, label=name, linestyle="--" if "explicit" in name else "-")
    axis.set(xlabel="input x", ylabel="equilibrium z", ylim=(-1.2, 6.2))
    axis.set_title("What one unit answers")
    axis.legend(fontsize=8, loc="upper right")
    return figure


def monotone() -> plt.Figure:
    """The eigenvalues of W, and four solvers on a W that plain iteration cannot follow."""
    torch.manual_seed(0)
    layer = eq.nn.MonotoneDEQ(40, in_channels=8, m=0.3).double()
    with torch.no_grad():
        layer.W.A.mul_(1.5)
        layer.W.B.mul_(2.0)
    x = torch.randn(1, 8, dtype=torch.float64)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
    m, a, b = layer.W.m, layer.W.A.detach(), layer.W.B.detach()
    values = torch.linalg.eigvals((1 - m) * torch.eye(40) - a.T @ a + b - b.T)
    left.axvspan(0.7, 1.2, color=COLORS[1], alpha=0.15)
    left.axvline(0.7, color=COLORS[1])
    left.plot(values.real, values.imag, "o", ms=4, color=COLORS[0])
    left.set(xlabel="real part", ylabel="imaginary part", xlim=(values.real.min() - 0.3, 1.2))
    left.set_title("Eigenvalues of W stay left of 1 − m")
    from equilibria.solvers import ForwardBackward, PeacemanRachford

    options = {"rtol": 1e-10, "max_steps": 150, "block": 1}
    for kind, color in zip(
        (PeacemanRachford, ForwardBackward, eq.Anderson, eq.Picard), COLORS, strict=False
    ):
        solver = kind(**options, patience=10_000)
        seen = residuals(lambda solver=solver, **more: layer.solve(x, solver=solver, **more))
        right.semilogy([float(v) for v in seen], color=color, label=kind.__name__)
    right.set(xlabel="step", ylabel="residual", ylim=(1e-11, 1e3), title="Splittings converge")
    right.legend(fontsize=8)
    return figure


def repeated() -> plt.Figure:
    """DEQ: a block applied K times comes near the equilibrium, if it contracts."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
    z = torch.linspace(-1.6, 1.9, 200)
    for axis, slope, start in ((left, 0.8, -1.3), (right, -1.6, 0.2)):
        here, path = start, []
        for _ in range(12):
            there = float(torch.tanh(torch.tensor(slope * here))) + 0.4
            path += [(here, here), (here, there)]
            here = there
        axis.plot(z, z, color="0.6", label="z")
        axis.plot(z, torch.tanh(slope * z) + 0.4, color=COLORS[0], label="block(z, x)")
        axis.plot(*zip(*path, strict=True), color=COLORS[1], lw=1, label="repeated")
        axis.set(xlabel="z", xlim=(-1.6, 1.9), ylim=(-1.0, 1.9))
    left.set_title("Slope below 1: the equilibrium")
    right.set_title("Slope below −1: a cycle around it")
    left.legend(fontsize=8)
    return figure


def tangent() -> plt.Figure:
    """The tangent kernel of 80 digits, sorted by class, and its eigenvalues."""
    from equilibria_papers import theory

    torch.manual_seed(0)
    digits = eq.data.load("digits", "train", progress=False)
    order = torch.cat([(digits.targets == k).nonzero()[:8, 0] for k in range(10)])
    x = digits.normalize(digits.images[:][order])
    kernel = theory.empirical_ntk(eq.models.create("opteq_digits"), x, outputs="trace").kernel
    scale = kernel.diagonal().sqrt()
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6))
    drawn = left.imshow(kernel / scale[:, None] / scale, cmap="cividis")
    left.set_xticks(range(4, 80, 8), list("0123456789"))
    left.set_yticks(range(4, 80, 8), list("0123456789"))
    left.set_title("Kernel, scaled to 1 on the diagonal")
    figure.colorbar(drawn, ax=left)
    values = torch.linalg.eigvalsh(kernel.double()).flip(0)
    right.semilogy(range(1, 81), values / values[0], "o-", ms=3, color=COLORS[0])
    right.set(xlabel="number", ylabel="relative to the largest", title="Eigenvalues")
    return figure


def own_solver() -> plt.Figure:
    """The heavy ball of the page beside two solvers of the library."""
    torch.manual_seed(0)
    weight = torch.randn(30, 30, dtype=torch.float64)
    weight = weight @ weight.T
    weight = 0.9 * weight / torch.linalg.matrix_norm(weight, 2)
    x, seen = 0.1 * torch.randn(30, dtype=torch.float64), {}
    for momentum in (0.0, 0.3):
        z = last = torch.zeros(30, dtype=torch.float64)
        norms = []
        for _ in range(100):
            moved = torch.tanh(weight @ z + x)
            norms.append(float((moved - z).norm()))
            z, last = moved + momentum * (z - last), z
        seen["heavy ball, μ = 0.3" if momentum else "Picard"] = norms
    seen["Anderson"] = [
        float(v)
        for v in residuals(
            lambda **more: eq.fixed_point(
                lambda z: torch.tanh(z @ weight + x),
                torch.zeros(1, 30, dtype=torch.float64),
                solver=eq.Anderson(rtol=1e-13, block=1),
                **more,
            )
        )
    ]
    figure, axis = plt.subplots(figsize=(6, 3.2))
    for (name, norms), color in zip(seen.items(), COLORS, strict=False):
        axis.semilogy([max(v, 1e-15) for v in norms], color=color, label=name)
    axis.set(xlabel="step", ylabel="‖T(z) − z‖", title="A step with memory is faster")
    axis.legend(fontsize=8)
    return figure


def verdicts() -> plt.Figure:
    """What holds: the verdicts of all claims, by paper, as results/audit.md counts them."""
    counted = re.findall(
        r"^- \*\*(.+?)\*\*, of \d+: (.*)\.$", AUDIT.read_text("utf-8"), re.MULTILINE
    )
    kinds = {
        "hold as stated": ("hold as", COLORS[0]),
        "hold with a change": ("hold with a change", COLORS[5]),
        "fail in every reading": ("fail in every reading", COLORS[1]),
        "premise met by no draw": ("premise met by no draw", "0.6"),
    }
    figure, axis = plt.subplots(figsize=(7.5, 2.8))
    for at, (_, words) in enumerate(counted):
        left = 0
        for name, (start, color) in kinds.items():
            number = sum(int(w.split()[-1]) for w in words.split("; ") if w.startswith(start))
            axis.barh(at, number, left=left, color=color, label=None if at else name)
            if number:
                axis.text(left + number / 2, at, number, ha="center", va="center")
            left += number
    axis.set_yticks(range(len(counted)), [paper for paper, _ in counted])
    axis.invert_yaxis()
    axis.set(xlabel="claims", xlim=(0, 60))
    axis.legend(fontsize=8, loc="center right")
    return figure


def moons() -> plt.Figure:
    """scikit-learn: where the classifier is sure."""
    from sklearn.datasets import make_moons

    points, labels = make_moons(200, noise=0.2, random_state=0)
    model = eq.sklearn.EquilibriumClassifier(random_state=0).fit(points, labels)
    sides = torch.linspace(-1.8, 2.8, 120), torch.linspace(-1.4, 1.8, 90)
    a, b = torch.meshgrid(*sides, indexing="ij")
    grid = torch.stack([a.flatten(), b.flatten()], 1).numpy()
    chance = model.predict_proba(grid)[:, 1].reshape(a.shape)
    figure, axis = plt.subplots(figsize=(6, 3.6))
    drawn = axis.contourf(a, b, chance, levels=11, cmap="cividis")
    figure.colorbar(drawn, label="probability of the second class")
    for k, color in ((0, "white"), (1, COLORS[1])):
        axis.plot(*points[labels == k].T, "o", ms=4, color=color, mec="black", mew=0.5)
    axis.set(xlabel="first feature", ylabel="second feature")
    axis.set_title(f"Two moons, {100 * model.score(points, labels):.0f}% right")
    return figure


DRAWINGS = (samples, responses, monotone, repeated, tangent, own_solver, verdicts, moons)
