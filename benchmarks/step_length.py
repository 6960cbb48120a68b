"""How far a few steps of length τ end from the equilibrium, and their gradient from the exact one.

    python benchmarks/step_length.py results/weights/geq_stack_cifar_8m.safetensors \\
        --data FOLDER --out results

For every GEQ layer of the network, on ``--images`` test images, in float64: the state after k steps
of length τ from zero, and the gradient of a random linear function of it in c by t terms of the
series at the last step, both relative to those of 80 steps of the certificate's length. γ is taken
as a constant. ``--untrained`` draws new weights. Writes step_length_NAME.json; the table shows the
median and the largest of all layers.

With ``--fit 64`` also starts other than zero, fitted to the equilibria of so many training images:
the first step with a scale for each channel, and a 1 × 1 convolution of c; and Anderson with one
history. Writes starts_NAME.json.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from _record import commit, parser, write
from torch import Tensor

import equilibria as eq
from equilibria import data, models

TAUS = (None, 0.8, 0.9, 1.0)
WAYS = ((1, 1), (2, 2), (3, 2), (4, 3), (5, 5))
EXACT = 80


def path(problem: Any, tau: float, steps: int) -> list[Tensor]:
    """Zero and the states after it."""
    states = [problem.default_start()]
    with torch.no_grad():
        for _ in range(steps):
            states.append(problem.step(states[-1], tau))
    return states


def gradient(problem: Any, c: Tensor, z: Tensor, g: Tensor, tau: float, terms: int) -> Tensor:
    """Of ⟨g, T(z)⟩ in c, with ``terms`` of the series in ∂T/∂z at z."""
    z = z.clone().requires_grad_()
    out = problem.step(z, tau)
    term = total = g
    for _ in range(terms - 1):
        (term,) = torch.autograd.grad(out, z, term, retain_graph=True)
        total = total + term
    return torch.autograd.grad(out, c, total)[0]


def off(found: Tensor, right: Tensor) -> float:
    return float((found - right).norm() / right.norm())


def measure(layer: eq.nn.GEQ, x: Tensor) -> list[dict[str, Any]]:
    with torch.no_grad():
        made: Any = layer.problem(x)
    c, gamma = made.inputs()
    c = c.clone().requires_grad_()
    problem = made.with_inputs(c, gamma)
    low, high = layer.nominal_bounds(made)  # type: ignore[misc]
    safe = float(2 / (low + high))
    states = path(problem, safe, EXACT)
    g = torch.randn_like(states[-1])
    right = gradient(problem, c, states[-1], g, safe, EXACT)
    rows = []
    for tau in TAUS:
        near = path(problem, tau or safe, max(k for k, _ in WAYS))
        for steps, terms in WAYS:
            found = gradient(problem, c, near[steps - 1], g, tau or safe, terms)
            row = {"tau": tau, "steps": steps, "terms": terms}
            rows.append({**row, "state": off(near[steps], states[-1]), "c": off(found, right)})
    return rows


def fitted(layer: eq.nn.GEQ, x: Tensor) -> tuple[Tensor, Tensor]:
    """By least squares: a scale for each channel of the first step; a 1 × 1 convolution of c."""
    with torch.no_grad():
        problem: Any = layer.problem(x)
        c, first = problem.inputs()[0], path(problem, 1.0, 1)[1]
        z = path(problem, 0.8, 16)[-1]
        pairs = (first * z).sum((0, 2, 3)), (first * first).sum((0, 2, 3)).clamp_min(1e-12)
        rows, goal = (v.movedim(1, -1).flatten(0, -2).double() for v in (c, z))
        ridge = 1e-6 * rows.square().sum(0).mean() * torch.eye(rows.shape[1], dtype=rows.dtype)
        return (pairs[0] / pairs[1]).double(), torch.linalg.solve(
            rows.T @ rows + ridge, rows.T @ goal
        )


def from_starts(layer: eq.nn.GEQ, x: Tensor, scale: Tensor, matrix: Tensor) -> list[dict[str, Any]]:
    """Convolutions (3 × 3, with that of U) and distances of states from fitted starts."""
    with torch.no_grad():
        problem: Any = layer.problem(x)
        low, high = layer.nominal_bounds(problem)  # type: ignore[misc]
        goal = path(problem, float(2 / (low + high)), EXACT)[-1]
        scaled = scale[:, None, None] * path(problem, 1.0, 1)[1]
        c = problem.inputs()[0]
        linear = (c.movedim(1, -1) @ matrix).movedim(-1, 1).clamp_min(0)
        zero = {k: min(off(path(problem, tau, k)[-1], goal) for tau in TAUS[1:]) for k in (1, 2, 3)}
        found = {f"zero, {k} steps": (2 * k, error) for k, error in zero.items()}
        found["first step scaled, no step"] = 2, off(scaled, goal)
        found["1 × 1 of c, no step"] = 1, off(linear, goal)
        for name, start, cost in (("first step scaled", scaled, 2), ("1 × 1 of c", linear, 1)):
            errors = [off(problem.step(start, tau), goal) for tau in TAUS[1:]]
            found[f"{name}, 1 step"] = cost + 2, min(errors)
        for k in (2, 3):
            solver = eq.Anderson(memory=1, rtol=0.0, atol=0.0, max_steps=k)
            found[f"Anderson(memory=1), {k} steps"] = (
                2 * k,
                off(eq.minimize(problem, solver=solver).value, goal),
            )
    return [{"start": k, "convolutions": n, "state": e} for k, (n, e) in found.items()]


def main() -> None:
    made = parser(__doc__)
    made.add_argument("weights", help="a file of weights")
    made.add_argument("--data", type=Path, help="folder with the images")
    made.add_argument("--images", type=int, default=4)
    made.add_argument("--untrained", action="store_true")
    made.add_argument("--fit", type=int, default=0, help="training images; 0: starts at zero only")
    options = made.parse_args()
    torch.manual_seed(0)
    network = models.load(options.weights, dtype=torch.float32).eval()
    images = data.load("cifar10", "test", root=options.data, progress=False)
    images = images.with_normalization_of(network.extra)
    if options.untrained:
        config = network.config
        network = models.create(config.name, config.num_classes, **config.options).eval()
    layers = {n: m for n, m in network.named_modules() if isinstance(m, eq.nn.GEQ)}
    inputs: dict[str, Tensor] = {}
    for name, layer in layers.items():
        layer.U.register_forward_pre_hook(lambda _, a, n=name: inputs.__setitem__(n, a[0].detach()))
    starts = {}
    if options.fit:
        fit = data.load("cifar10", "train", root=options.data, progress=False)
        with torch.no_grad():
            network(images.normalize(fit.images[: options.fit]))
        starts = {n: fitted(layer, inputs[n]) for n, layer in layers.items()}
    with torch.no_grad():
        network(images.normalize(images.images[: options.images]))
    if options.fit:
        rows = {
            n: from_starts(m.double(), inputs[n].double(), *starts[n]) for n, m in layers.items()
        }
    else:
        rows = {n: measure(layer.double(), inputs[n].double()) for n, layer in layers.items()}
    name = network.config.name + ("_untrained" if options.untrained else "")
    record = {
        "command": "python benchmarks/step_length.py " + " ".join(sys.argv[1:]),
        "commit": commit(),
        "torch": torch.__version__,
        "layers": rows,
    }
    write(options.out / f"{'starts' if options.fit else 'step_length'}_{name}.json", record)
    for i, row in enumerate(next(iter(rows.values()))):
        each = [layer[i]["state"] for layer in rows.values()]
        if options.fit:
            text = f"{row['start']}, {row['convolutions']} convolutions:"
            print(f"{text} {statistics.median(each):.4f} ({max(each):.4f})")
            continue
        text = f"τ {row['tau'] or 'certificate'}, {row['steps']} steps, {row['terms']} terms:"
        for what in ("state", "c"):
            each = [layer[i][what] for layer in rows.values()]
            text += f" {what} {statistics.median(each):.4f} ({max(each):.4f})"
        print(text)


if __name__ == "__main__":
    main()
