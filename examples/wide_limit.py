"""As α → 0 the blocks of a deep OptEq converge to a wide OptEq (Xie et al. 2021, Theorem 3).

python examples/wide_limit.py [--out wide_limit.svg]

Draws, for a layer of three blocks, each block's distance from the output of the wide OptEq and the
distance between adjacent blocks over α, and the path of the blocks to the limit in two coordinates.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import torch

import equilibria as eq
from equilibria_papers import theory

mpl.rcParams["svg.hashsalt"] = "equilibria"  # the same figure gives the same file
# Okabe and Ito: distinct for every kind of color vision.
COLORS = ["#0072B2", "#D55E00", "#009E73"]


def draw(study: theory.WideLimitStudy, out: Path) -> None:
    alphas = torch.tensor(study.alphas)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 4.0))
    names = ["$z_1$", "$z_2$", "$z_3 = z_0$"]
    for number, (name, color) in enumerate(zip(names, COLORS, strict=True)):
        far = (study.blocks[:, 0, number] - study.limit[0]).norm(dim=1)
        left.loglog(alphas, far, "o-", color=color, markersize=3.5, label=f"{name} to the limit")
    left.loglog(
        alphas, study.gap[:, 0], "ks-", markersize=3.5, lw=1, label="largest gap of neighbors"
    )
    slope = float(study.slope[0])
    left.loglog(alphas, slope * alphas, "k:", label=f"{slope:.2f}·α, its proven limit")
    left.set(xlabel="α", ylabel="distance", title="The blocks agree at the rate α")
    left.legend(fontsize=8)
    # The plane through the limit in which the blocks lie farthest apart.
    centered = study.blocks[:, 0] - study.limit[0]
    _, _, axes = torch.linalg.svd(centered.flatten(0, 1), full_matrices=False)
    plane = centered @ axes[:2].mT
    for number, (name, color) in enumerate(zip(names, COLORS, strict=True)):
        path = plane[:, number]
        right.plot(path[:, 0], path[:, 1], "o-", color=color, markersize=3.5, label=name)
    right.plot(0, 0, "*", color="black", markersize=13, label="wide OptEq", zorder=5)
    for alpha in (1.0, 0.5):
        place = plane[study.alphas.index(alpha), 0]
        right.annotate(
            f"α = {alpha:g}", place.tolist(), fontsize=8, xytext=(4, 5), textcoords="offset points"
        )
    right.set(title="… and meet at the wide OptEq", xlabel="first axis", ylabel="second axis")
    right.set_aspect("equal", "datalim")
    right.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out, dpi=150, metadata={"Date": None} if out.suffix == ".svg" else None)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("wide_limit.svg"), help="PNG or SVG")
    out = parser.parse_args().out
    torch.manual_seed(0)
    layer = eq.nn.DeepOptEq(6, (8, 8, 8), in_channels=4, alpha=0.5).double()
    x = 2.0 * torch.randn(1, 4).double()
    alphas = (1.0, 0.7, 0.5, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01, 0.003, 0.001)
    study = theory.approach_wide_limit(layer, x, alphas)
    print(study)
    print(f"\nproven limit of the gap over α: {float(study.slope[0]):.4f}")
    with torch.no_grad():
        wide = theory.to_wide_opteq(layer)(x)
    print(f"the wide OptEq, solved as a layer, is {float((wide - study.limit).norm()):.1e} away")
    draw(study, out)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
