"""How close to the equilibrium are a few steps of a linear layer, by step size?

    python benchmarks/linear_steps.py --out results

Untrained OptEq layers of 64 channels under NormBounded(bound=0.95), 16 × 16 pixels, five draws: the
relative distance to the equilibrium, median of eight samples, after K steps of size 2/(m + L), from
the certificate, and of size 1, as in Picard. Writes linear_steps.json. The default of
opteq_stack_cifar_* is based on it.
"""

from __future__ import annotations

import dataclasses

import torch
from _record import parser, save

import equilibria as eq

SOLVERS = {
    "2/(m + L)": eq.ProximalGradient(rtol=0.0, atol=0.0, accelerate=False),
    "1": eq.Picard(rtol=0.0, atol=0.0),
}
EXACT = eq.Anderson(rtol=1e-7, max_steps=500)


@torch.no_grad()
def distance(size: str, steps: int, seed: int) -> float:
    """‖z_K − z*‖/‖z*‖, z* by Anderson; the median over eight samples."""
    torch.manual_seed(seed)
    layer = eq.nn.OptEq(
        64,
        64,
        in_channels=64,
        kernel_size=3,
        form="hidden",
        constraint=eq.nn.NormBounded(bound=0.95),
        solver=dataclasses.replace(SOLVERS[size], max_steps=steps),
    )
    x = torch.randn(8, 64, 16, 16)
    for _ in range(6):  # the norm's power iteration settles
        layer(x)
    z = layer.eval()(x).flatten(1)
    layer.solver = EXACT
    exact = layer(x).flatten(1)
    return float(((z - exact).norm(dim=1) / exact.norm(dim=1)).median())


def main() -> None:
    options = parser(__doc__).parse_args()
    rows = [
        {
            "step": size,
            "steps": steps,
            "distances": [round(distance(size, steps, seed), 8) for seed in range(5)],
        }
        for size in SOLVERS
        for steps in (1, 2, 4, 8, 16, 32)
    ]
    save("linear_steps", options.out, rows=rows)


if __name__ == "__main__":
    main()
