"""Draw the figures of the docs: python docs/make_figures.py (writes docs/assets/figures/*.svg).

With names, only these: python docs/make_figures.py problem tutorials
"""

from __future__ import annotations

import sys
import warnings
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import torch
from concept_figures import COLORS, DRAWINGS

import equilibria as eq

OUT = Path(__file__).parent / "assets" / "figures"


def save(figure: plt.Figure, name: str) -> None:
    figure.tight_layout()
    figure.savefig(OUT / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)


def problem() -> None:
    """The objective along three solvers, and G over a plane of two unknowns."""
    torch.manual_seed(0)
    weight = torch.randn(24, 12, dtype=torch.float64)
    weight = 1.4 * weight / torch.linalg.matrix_norm(weight, 2)
    c = 1.5 * torch.randn(1, 24, dtype=torch.float64)
    made = eq.Problem(eq.NonNegative(), eq.Gaussian(weight, c, gamma=0.002))
    best = eq.minimize(made, solver=eq.ProximalGradient(rtol=1e-13)).value
    floor = float(made.objective(best)[0])
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6))
    solvers = {
        "ProximalGradient (accelerated)": eq.ProximalGradient(rtol=1e-10),
        "ProximalGradient (plain)": eq.ProximalGradient(accelerate=False, rtol=1e-10),
        "Anderson on T": eq.Anderson(rtol=1e-10),
        "Picard on T (oscillates)": eq.Picard(rtol=1e-10, max_steps=40),
    }
    for (name, solver), color in zip(solvers.items(), COLORS, strict=False):
        seen: list[float] = []

        def note(step: int, z: torch.Tensor, _: torch.Tensor, seen: list[float] = seen) -> None:
            seen.append(float(made.objective(z)[0]) - floor)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", eq.ConvergenceWarning)
            eq.minimize(made, solver=solver, callback=note)
        left.semilogy([max(s, 1e-16) for s in seen], label=name, color=color)
    left.set(xlabel="step", ylabel="G(z) − min G", title="The objective falls", xlim=(0, 40))
    left.legend(fontsize=7)
    w = torch.tensor([[1.2, 0.3], [-0.2, 1.0]], dtype=torch.float64)
    flat = eq.Problem(
        eq.NonNegative(), eq.Gaussian(w, torch.tensor([[1.2, 0.9]]).double(), gamma=0.8)
    )
    grid = torch.linspace(0, 1.6, 121, dtype=torch.float64)
    a, b = torch.meshgrid(grid, grid, indexing="xy")
    points = torch.stack([a.flatten(), b.flatten()], 1)
    many = flat.with_inputs(*(t.expand(len(points), *t.shape[1:]) for t in flat.inputs()))
    right.contourf(a, b, many.objective(points).view_as(a), levels=24, cmap="cividis")
    path: list[torch.Tensor] = []
    start = torch.tensor([[1.5, 0.2]]).double()
    eq.minimize(flat, start, solver=eq.Picard(), callback=lambda k, z, r: path.append(z[0].clone()))
    line = torch.stack(path)
    right.plot(line[:, 0], line[:, 1], "o-", color="white", ms=3, lw=1, label="z ← T(z)")
    right.set(xlabel="z₁", ylabel="z₂", title="G over the plane, and a solve")
    right.legend(fontsize=7, facecolor="0.3", labelcolor="white")
    save(figure, "problem")


def kernels() -> None:
    """q and −∇q of each kernel in one dimension."""
    z = torch.linspace(-2.5, 4.0, 400, dtype=torch.float64).view(-1, 1)
    c = torch.full_like(z, 1.0)
    w = torch.tensor([[0.8]], dtype=torch.float64)
    made = {
        "linear": eq.Linear(w, c),
        "polynomial, (1 + cz)²": eq.Polynomial(w, 0.3 * c, degree=2),
        "sigmoid": eq.Sigmoidal(w, c),
        "Gaussian, γ = 1": eq.Gaussian(w, c, gamma=1.0),
        "Gaussian, γ = 0.2": eq.Gaussian(w, c, gamma=0.2),
    }
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
    for (name, coupling), color in zip(made.items(), COLORS, strict=False):
        left.plot(z[:, 0], coupling.value(z), label=name, color=color)
        right.plot(z[:, 0], -coupling.grad(z)[:, 0], label=name, color=color)
    left.set(xlabel="z", ylabel="q(z)", title="coupling q", ylim=(-6, 1))
    right.set(xlabel="z", ylabel="−q′(z)", title="its message −∇q", ylim=(-2, 4))
    left.legend(fontsize=7)
    save(figure, "kernels")


def priors() -> None:
    """f and its activation σ = prox_f."""
    made = {
        "NonNegative (ReLU)": eq.NonNegative(),
        "Box (clipped ReLU)": eq.Box(lower=0.0, upper=1.0),
        "SoftThreshold": eq.SoftThreshold(0.5),
        "LeakyNonNegative": eq.LeakyNonNegative(0.1),
        "Tanh": eq.Tanh(),
        "Logistic (sigmoid)": eq.Logistic(),
        "Softplus": eq.Softplus(),
    }
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
    z = torch.linspace(-1.5, 2.0, 701, dtype=torch.float64)
    v = torch.linspace(-3.0, 3.0, 601, dtype=torch.float64)
    for (name, prior), color in zip(made.items(), COLORS, strict=True):
        value = prior.value(z)
        left.plot(z[value.isfinite()], value[value.isfinite()], label=name, color=color)
        right.plot(v, prior.activation(v), label=name, color=color)
    left.set(xlabel="z", ylabel="f(z)", title="prior f (drawn where it is finite)", ylim=(-1.2, 2))
    right.set(xlabel="v", ylabel="σ(v)", title="activation σ = prox f")
    right.legend(fontsize=7)
    save(figure, "priors")


def certificate() -> None:
    """The bound beside the true error, and what is certified for which μ."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
    torch.manual_seed(0)
    for mu, color in zip((0.6, 0.95, 1.3), COLORS, strict=False):
        weight = torch.randn(32, 16, dtype=torch.float64)
        weight = mu * weight / torch.linalg.matrix_norm(weight, 2)
        made = eq.Problem(
            eq.NonNegative(),
            eq.Gaussian(weight, torch.randn(1, 32, dtype=torch.float64), gamma=0.02),
        )
        exact = eq.minimize(made, solver=eq.ProximalGradient(rtol=1e-15, max_steps=2000)).value
        states: list[torch.Tensor] = []
        solver = eq.ProximalGradient(accelerate=False, rtol=1e-11)
        eq.minimize(made, solver=solver, callback=lambda k, z, r, s=states: s.append(z.clone()))
        errors = [float((z - exact).norm()) for z in states]
        bounds = [float(eq.certify(made, z=z).error_bound[0]) for z in states]
        left.semilogy(errors, color=color, label=f"true error, μ = {mu}")
        left.semilogy(bounds, "--", color=color, label=f"certified bound, μ = {mu}")
    left.set(xlabel="step", ylabel="‖z − z*‖", title="The bound holds at every step")
    left.legend(fontsize=6)
    mus = torch.linspace(0.01, 1.8, 300, dtype=torch.float64)
    modulus = 1 - 2 * torch.exp(torch.tensor(-1.5)).double() * mus**2
    right.axvspan(0, 1, color=COLORS[2], alpha=0.25, label="contraction: unique, T converges")
    right.axvspan(1, 1.4969, color=COLORS[4], alpha=0.25, label="convex: unique, T_τ converges")
    right.axvspan(1.4969, 1.8, color=COLORS[1], alpha=0.25, label="several equilibria exist")
    right.plot(mus, modulus, color="black", label="modulus m = 1 − 2e^{−3/2}μ²")
    right.plot(mus, mus**2, ":", color="black", label="factor of T: μ²")
    right.set(xlabel="μ = ‖A‖", ylim=(-0.5, 2), xlim=(0, 1.8), title="Gaussian layer, every γ")
    right.legend(fontsize=6)
    save(figure, "certificate")


def feature_map() -> None:
    """The truncated feature map of GEQ's Prop 1 against the Gaussian coupling."""
    from equilibria.problems import truncated_gaussian_coupling, truncation_error_bound

    torch.manual_seed(0)
    c, y = torch.randn(2, 64, 6, dtype=torch.float64)
    figure, axis = plt.subplots(figsize=(5, 3.2))
    for gamma, color in zip((0.1, 0.5, 2.0), COLORS, strict=False):
        exact = -torch.exp(-gamma * (c - y).square().sum(1)) / (2 * gamma)
        terms = range(1, 41)
        errors = [(truncated_gaussian_coupling(c, y, gamma, k) - exact).abs().max() for k in terms]
        bounds = [truncation_error_bound(c, y, gamma, k).max() for k in terms]
        axis.semilogy(terms, errors, color=color, label=f"error, γ = {gamma}")
        axis.semilogy(terms, bounds, "--", color=color, label=f"bound, γ = {gamma}")
    axis.set(xlabel="terms K", ylabel="worst |q_K − q| of 64 pairs", ylim=(1e-17, 1e2))
    axis.legend(fontsize=6)
    save(figure, "feature_map")


def certified() -> None:
    """A digit with its certified radius, and certified accuracy beside that under an attack."""
    from equilibria import evaluation

    torch.manual_seed(0)
    train, test = (eq.data.load("digits", split) for split in ("train", "test"))
    layer = eq.nn.MonotoneDEQ(40, in_channels=64, m=20.0)
    model = torch.nn.Sequential(torch.nn.Flatten(), layer, torch.nn.Linear(40, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    x, y = train.normalize(train.images[:]), train.targets
    for _ in range(60):
        for rows in torch.randperm(len(x)).split(128):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    model.eval()
    found = evaluation.certified_accuracy(model, test, batch_size=1000)
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2), width_ratios=[1, 1.7])
    one = eq.certify(model, test.normalize(test.images[:1]))
    left.imshow(test.images[0, 0], cmap="gray_r")
    left.set_axis_off()
    radius = float(found.radius[0])
    text = f"label {int(one.label[0])}: proven within {radius:.3f}\nnearest other class: "
    left.set_title(text + str(int(one.nearest[0])), fontsize=9)
    right.set_title(f"all {len(test)} test digits\n", fontsize=9)  # as many lines as beside it
    radii = torch.linspace(0.0, 0.8, 81)
    right.plot(radii, [100 * found.at(float(r)) for r in radii], color=COLORS[0], label="proven")
    tried = [0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8]
    left_over = [100 * evaluation.attacked_accuracy(model, test, r, batch_size=1000) for r in tried]
    right.plot(tried, left_over, "o--", color=COLORS[1], label="under attack", markersize=4)
    right.set(xlabel="radius (ℓ2, pixels from 0 to 1)", ylabel="accuracy in %", ylim=(0, 100))
    right.legend(fontsize=8)
    save(figure, "certified")


def one_solve() -> dict[str, torch.Tensor]:
    """A layer of a network trained on the digits solves one of them from five random starts."""
    torch.manual_seed(0)
    train, test = (eq.data.load("digits", split) for split in ("train", "test"))
    model = eq.models.create("geq_digits")
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    x, y = train.normalize(train.images[:]), train.targets
    for _ in range(4):
        for rows in torch.randperm(len(x)).split(128):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    model.double().eval()
    layer = model.stages[0].layer
    inputs: list[torch.Tensor] = []
    layer.register_forward_pre_hook(lambda module, given: inputs.append(given[0]))
    with torch.no_grad():
        confidence, label = model(test.normalize(test.images[:1]).double()).softmax(1).max(1)
        problem = layer.problem(inputs[0].expand(5, -1, -1, -1))
        exact = eq.minimize(problem, solver=eq.Picard(rtol=1e-14, max_steps=500)).value
        scales = exact.std() * torch.tensor([8.0, 0.1, 0.5, 2.0, 30.0]).view(5, 1, 1, 1)
        states: list[torch.Tensor] = []
        eq.minimize(
            problem,
            scales * torch.rand(exact.shape, dtype=torch.float64),
            solver=eq.Picard(rtol=0.0, atol=0.0, max_steps=13),
            callback=lambda step, z, residual: states.append(z.clone()),
        )
        proofs = [eq.certify(problem, z=z) for z in states]
        found = {
            "image": test.images[0, 0],
            "label": label,
            "confidence": confidence,
            "states": torch.stack([z[3].norm(dim=0) for z in states]),
            "gaps": torch.stack([problem.objective(z) - problem.objective(exact) for z in states]),
            "errors": torch.stack([(z - exact).flatten(1).norm(dim=1) for z in states]),
            "bounds": torch.stack([proof.error_bound for proof in proofs]),
            "contraction": torch.as_tensor(proofs[-1].contraction).max(),
        }
    assert proofs[-1].unique
    assert (found["errors"] <= found["bounds"]).all()
    return found


# Where the parts of the overview are, in shares of the figure: beside each other, and one below the
# other for phones. Axes have left, bottom, width, height; words left, top, indent, line height.
LAYOUTS = {
    "": {
        "size": (11, 4.3),
        "heads": ((0.02, 0.93), (0.25, 0.93), (0.68, 0.93)),
        "image": (0.02, 0.38, 0.18, 0.46),
        "answer": (0.11, 0.34),
        "states": (0.25, 0.62, 0.07, 0.22),
        "gaps": (0.31, 0.14, 0.32, 0.42),
        "words": (0.68, 0.83, 0.02, 0.075),
        "bounds": (0.75, 0.14, 0.23, 0.42),
    },
    "narrow-": {
        "size": (4.6, 9.2),
        "heads": ((0.03, 0.965), (0.03, 0.745), (0.03, 0.375)),
        "image": (0.03, 0.795, 0.30, 0.155),
        "answer": (0.64, 0.89),
        "states": (0.03, 0.63, 0.18, 0.09),
        "gaps": (0.19, 0.45, 0.77, 0.155),
        "words": (0.03, 0.34, 0.05, 0.03),
        "bounds": (0.19, 0.06, 0.77, 0.165),
    },
}


def overview(found: dict[str, torch.Tensor] | None = None) -> None:
    """The picture of the README, light and dark, wide and narrow: input, equilibrium, proof."""
    found = one_solve() if found is None else found
    for name, ink, faint in (("light", "#1f2328", "#8b949e"), ("dark", "#e6edf3", "#6e7681")):
        inks = ("text.color", "axes.labelcolor", "xtick.color", "ytick.color")
        look = {"axes.edgecolor": faint, "axes.spines.top": False, "axes.spines.right": False}
        for kind, place in LAYOUTS.items():
            with mpl.rc_context({**dict.fromkeys(inks, ink), **look, "font.size": 10}):
                figure = _overview(found, place, "gray_r" if name == "light" else "gray")
                path = OUT / f"overview-{kind}{name}.svg"
                figure.savefig(path, metadata={"Date": None}, transparent=True)
                plt.close(figure)


def _overview(found: dict[str, torch.Tensor], place: dict[str, Any], gray: str) -> plt.Figure:
    figure = plt.figure(figsize=place["size"])
    heads = ("1  The input", "2  The equilibrium forms", "3  The proof")
    for (left, top), head in zip(place["heads"], heads, strict=True):
        figure.text(left, top, head, fontsize=14, weight="bold")
    axis = figure.add_axes(place["image"])
    axis.imshow(found["image"], cmap=gray)
    axis.set_axis_off()
    text = f"an image of the test set\nanswer: {int(found['label'])}"
    figure.text(*place["answer"], text, ha="center", va="top")
    largest = float(found["states"][-1].max())
    left, bottom, width, height = place["states"]
    for column, step in enumerate((0, 1, 2, 4, 8)):
        axis = figure.add_axes((left + 1.07 * width * column, bottom, width, height))
        axis.imshow(found["states"][step], cmap="viridis", vmin=0, vmax=largest)
        axis.set_axis_off()
        axis.set_title(f"step {step}", fontsize=8, pad=3)
    axis = figure.add_axes(place["gaps"])
    for gaps, color in zip(found["gaps"].T, COLORS, strict=False):
        axis.semilogy(gaps.clamp_min(1e-16), color=color, lw=1.8)
    axis.set(ylim=(1e-10, None), xlabel="step", ylabel="objective − minimum", xlim=(0, 12))
    top = axis.get_ylim()[1] / 9
    axis.text(12, top, "five random starts,\none answer", ha="right", va="top")
    bounds, errors = found["bounds"].amax(1), found["errors"].amax(1)
    words = (
        "There is one equilibrium, and no other.",
        f"Each step shrinks the error to {float(found['contraction']):.0%} or less.",
        f"After {len(bounds) - 1} steps it is at most {float(bounds[-1]):.0e}.",
    )
    left, top, indent, line = place["words"]
    for number, word in enumerate(words):
        figure.text(left, top - line * number, "✓", color=COLORS[2], weight="bold")
        figure.text(left + indent, top - line * number, word)
    axis = figure.add_axes(place["bounds"])
    axis.semilogy(bounds, "--", color=COLORS[1], lw=1.8, label="proven bound")
    axis.semilogy(errors, color=COLORS[5], lw=1.8, label="true error")
    axis.set(xlabel="step", ylabel="distance to z*", xlim=(0, 12))
    axis.legend(frameon=False)
    return figure


def equilibria() -> None:
    """z and T(z) of a layer of one unit: one equilibrium or three, by the size of the weight."""
    z = torch.linspace(0, 1.3, 401, dtype=torch.float64).view(-1, 1)
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.4), sharey=True)
    for axis, mu in zip(axes, (0.95, 2.0), strict=True):
        weight = torch.tensor([[mu]], dtype=torch.float64)
        made = eq.Problem(eq.Free(), eq.Gaussian(weight, torch.full_like(z, 2.25), gamma=1.0))
        image = made.step(z)
        axis.plot(z, z, color="0.6", label="z")
        axis.plot(z, image, color=COLORS[0], label="T(z)")
        gap = (image - z)[:, 0]
        crossed = (gap[:-1] * gap[1:] < 0).nonzero()[:, 0]
        axis.plot(z[crossed], z[crossed], "o", color=COLORS[1], label="equilibria")
        count = len(crossed)
        words = "one equilibrium" if count == 1 else f"{count} equilibria"
        axis.set(xlabel="z", title=f"weight {mu}: {words}")
    axes[0].legend(fontsize=8)
    save(figure, "equilibria")


def adjoints() -> None:
    """The error of the gradient by the steps of the forward solve, for each adjoint."""
    torch.manual_seed(0)
    weight = torch.randn(12, 12, dtype=torch.float64)
    weight = 0.8 * weight / torch.linalg.matrix_norm(weight, 2)
    x = torch.randn(1, 12, dtype=torch.float64, requires_grad=True)

    def gradient(steps: int, adjoint: Any) -> torch.Tensor:
        solver = eq.Picard(rtol=0.0, atol=0.0, max_steps=steps)
        start = torch.zeros(1, 12, dtype=torch.float64)
        solved = eq.fixed_point(
            lambda z, x: torch.tanh(z @ weight + x), start, (x,), solver=solver, adjoint=adjoint
        )
        return torch.autograd.grad(solved.value.sum(), x)[0]

    exact = gradient(400, eq.Implicit(solver=eq.GMRES(rtol=1e-13)))
    made = {
        "Implicit": eq.Implicit(solver=eq.GMRES(rtol=1e-12)),
        "Unrolled": eq.Unrolled(),
        "Phantom(steps=5)": eq.Phantom(steps=5),
        "OneStep": eq.OneStep(),
    }
    figure, axis = plt.subplots(figsize=(6, 3.4))
    steps = range(1, 41, 3)
    for (name, adjoint), color in zip(made.items(), COLORS, strict=False):
        errors = [(gradient(k, adjoint) - exact).norm() / exact.norm() for k in steps]
        axis.semilogy(
            steps, torch.stack(errors).clamp_min(1e-16), "o-", ms=3, color=color, label=name
        )
    axis.set(xlabel="steps of the solve", ylabel="relative error of the gradient")
    axis.legend(fontsize=8)
    save(figure, "adjoints")


def tutorials() -> None:
    """The picture of each tutorial, and beside it what it prints."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    for name in ("tv_denoising", "sparse_coding", "nmf", "sinkhorn", "pagerank", "bratu"):
        look = mpl.rc_context(
            {"axes.prop_cycle": mpl.cycler(color=COLORS), "image.cmap": "cividis"}
        )
        with look, (OUT / f"{name}.txt").open("w", encoding="utf-8") as file, redirect_stdout(file):
            import_module(name).main(quick=False, out=str(OUT / f"{name}.svg"))


if __name__ == "__main__":
    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "equilibria"
    OUT.mkdir(parents=True, exist_ok=True)
    drawings = (overview, problem, kernels, priors, certificate, feature_map, certified)
    for draw in (*drawings, equilibria, adjoints, tutorials):
        if draw.__name__ in sys.argv[1:] or not sys.argv[1:]:
            draw()
    for drawn in DRAWINGS:
        if drawn.__name__ in sys.argv[1:] or not sys.argv[1:]:
            save(drawn(), drawn.__name__)
