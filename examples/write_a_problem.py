"""Write down a problem and make a layer of it in five lines; plot the objective during the solve.

python examples/write_a_problem.py            writes objective.png
"""

from __future__ import annotations

import argparse

import matplotlib as mpl
import matplotlib.pyplot as plt
import torch
from torch import nn

import equilibria as eq


def main(out: str) -> None:
    torch.manual_seed(0)
    layer = eq.nn.EquilibriumLayer(
        lambda x, W, U: eq.Problem(eq.NonNegative(), eq.Gaussian(W, U(x), gamma=0.1), eq.L1(0.01)),
        W=nn.Linear(8, 16, bias=False),
        U=nn.Linear(4, 16),
    ).double()
    x = 2.0 * torch.randn(6, 4, dtype=torch.float64)
    problem = layer.problem(x)
    curve: list[torch.Tensor] = []
    solution = layer.solve(x, callback=lambda k, z, r: curve.append(problem.objective(z).detach()))
    print(solution.choice)
    print(solution.summary())
    solution.value.square().sum().backward()
    print("‖dL/dW‖ =", float(layer.W.weight.grad.norm()))
    gap = torch.stack(curve) - problem.objective(solution.value).detach()
    mpl.use("Agg")
    plt.semilogy(gap.clamp_min(1e-17))
    plt.xlabel("step")
    plt.ylabel("G(z) − G(z*)")
    plt.title("The objective of six samples")
    plt.savefig(out, dpi=120)
    print("wrote", out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", default="objective.png", help="where to write the plot")
    main(parser.parse_args().out)
