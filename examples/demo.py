"""Solve a small equilibrium with every solver, differentiate it with every adjoint, print a table.

python examples/demo.py
"""

from __future__ import annotations

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import equilibria as eq

BATCH, WIDTH = 32, 64


def main() -> None:
    torch.manual_seed(0)
    console = Console()
    weight = torch.randn(WIDTH, WIDTH, dtype=torch.float64)
    weight = 0.95 * weight / torch.linalg.matrix_norm(weight, 2)
    weight.requires_grad_()
    x = torch.randn(BATCH, WIDTH, dtype=torch.float64)
    z0 = torch.zeros_like(x)

    def layer(z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(z @ weight.T + x)

    console.print(
        f"\nz = tanh(Wz + x), {BATCH} samples of {WIDTH} numbers, ‖W‖ = 0.95, float64, rtol 1e-8\n"
    )
    solvers = {
        "Picard()": eq.Picard(max_steps=400),
        "Anderson(memory=5)": eq.Anderson(),
        "Broyden(memory=10)": eq.Broyden(),
    }
    table = Table("solver", "result", "steps", "‖T(z) − z‖, worst", title="Solve")
    for name, solver in solvers.items():
        sol = eq.fixed_point(layer, z0, (x,), solver=solver)
        results = ", ".join(f"{n} {code.name}" for code, n in sol.counts().items())
        steps = f"{int(sol.stats.steps.min())} to {int(sol.stats.steps.max())}"
        table.add_row(name, results, steps, f"{float(sol.stats.residual.max()):.1e}")
    console.print(table)

    exact = _dense_gradient(layer, weight, x, z0)
    adjoints = {
        "Implicit()": eq.Implicit(),
        "Unrolled()": eq.Unrolled(),
        "Phantom(steps=5)": eq.Phantom(),
        "OneStep()": eq.OneStep(),
    }
    table = Table("adjoint", "error of dL/dW against dense algebra", title="Differentiate")
    for name, adjoint in adjoints.items():
        sol = eq.fixed_point(layer, z0, (x,), solver=eq.Picard(max_steps=400), adjoint=adjoint)
        (grad,) = torch.autograd.grad(sol.value.square().sum(), weight)
        table.add_row(name, f"{float((grad - exact).norm() / exact.norm()):.1e}")
    console.print(table)
    radius = eq.spectral_radius(layer, sol.value, (x,))
    console.print(f"spectral radius of the Jacobian: {float(radius.max()):.3f} at most\n")


def _dense_gradient(layer: object, weight: Tensor, x: Tensor, z0: Tensor) -> Tensor:
    """dL/dW for L = ‖z*‖² from (I − J)ᵀu = dL/dz with each J written out as a matrix."""
    sol = eq.fixed_point(layer, z0, (x,), solver=eq.Anderson(rtol=1e-14, max_steps=200))
    z = sol.value.detach()
    slope = 1 - torch.tanh(z @ weight.detach().T + x) ** 2
    jacobian = slope.unsqueeze(2) * weight.detach()
    eye = torch.eye(WIDTH, dtype=z.dtype)
    u = torch.linalg.solve((eye - jacobian).mT, 2 * z)
    return torch.einsum("bi,bj->ij", u * slope, z)


if __name__ == "__main__":
    main()
