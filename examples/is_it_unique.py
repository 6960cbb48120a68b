"""Is my equilibrium unique? Certificates of one layer at three norms, and solves from many starts.

python examples/is_it_unique.py
"""

from __future__ import annotations

import warnings
from itertools import pairwise

import torch

import equilibria as eq


def main() -> None:
    torch.manual_seed(0)
    starts = torch.linspace(-1.0, 3.0, 41, dtype=torch.float64).view(-1, 1)
    print("z = exp(−(c − wz)²)·w·(c − wz), c = 1.880956005, from 41 starts\n")
    for w in (0.9, 1.4, 1.55):
        weight = torch.tensor([[w]], dtype=torch.float64)
        c = torch.full_like(starts, 1.880956005)
        problem = eq.Problem(eq.Free(), eq.Gaussian(weight, c, gamma=1.0))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", eq.ConvergenceWarning)
            solution = eq.minimize(problem, starts, solver=eq.Broyden(rtol=1e-12))
        found = solution.value[solution.converged].flatten().sort().values
        distinct = [found[0], *(b for a, b in pairwise(found) if b - a > 1e-6)]
        certificate = eq.certify(problem, z=solution.value)
        print(f"w = {w}: certified unique: {certificate.unique}; found {len(distinct)}:")
        print("   ", ", ".join(f"{float(z):.7f}" for z in distinct))


if __name__ == "__main__":
    main()
