"""PageRank of the pages of these docs as a fixed point, with gradients in damping and links.

python examples/pagerank.py            writes pagerank.svg
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import Tensor

import equilibria as eq

DOCS = Path(__file__).parents[1] / "docs"


def link_graph() -> tuple[list[str], Tensor]:
    """The pages, and 1 where the page of the row links to that of the column."""
    texts = {page.stem: page.read_text("utf-8") for page in sorted(DOCS.glob("*.md"))}
    names = list(texts)
    links = torch.zeros(len(names), len(names), dtype=torch.float64)
    for name, text in texts.items():
        for target in set(re.findall(r"\]\(([\w-]+)\.md", text)) & set(names) - {name}:
            links[names.index(name), names.index(target)] = 1.0
    return names, links


def step(rank: Tensor, damping: Tensor, links: Tensor) -> Tensor:
    """A surfer follows a link with probability damping, else goes to any page. rank is [B, n]."""
    total = links.sum(1, keepdim=True)
    move = torch.where(total > 0, links / total.clamp_min(1e-300), 1 / len(links))
    return damping * (rank @ move) + (1 - damping) / len(links)


def rank_numpy(damping: float, links: np.ndarray) -> np.ndarray:
    """The eigenvector of the Google matrix, by dense linear algebra."""
    n = len(links)
    rows = [row / row.sum() if row.any() else np.full(n, 1 / n) for row in links]
    values, vectors = np.linalg.eig(damping * np.array(rows).T + (1 - damping) / n)
    first = vectors[:, np.argmax(values.real)].real
    return first / first.sum()


def main(quick: bool, out: str) -> dict[str, float]:
    names, links = link_graph()
    n, page, matrix = len(names), names.index("certificates"), links.numpy().copy()
    dampings = np.linspace(0.1, 0.95, 4 if quick else 18)  # a sample for each, solved at once
    args = torch.from_numpy(dampings)[:, None].requires_grad_(), links.requires_grad_()
    start = torch.full((len(dampings), n), 1 / n, dtype=torch.float64)
    rank = eq.fixed_point(step, start, args, solver=eq.Picard(max_steps=1000)).value
    (by_damping,) = torch.autograd.grad(rank[:, page].sum(), args[0], retain_graph=True)
    (by_link,) = torch.autograd.grad(rank[-1, page], links)
    # Beside numpy: the ranks, and both derivatives by differences of its ranks.
    theirs = np.array([rank_numpy(d, matrix) for d in dampings])
    h, change = 1e-5, np.random.default_rng(0).random((n, n)) * matrix
    ends = [[rank_numpy(d + s, matrix)[page] for s in (-h, h)] for d in dampings]
    slope = np.diff(ends)[:, 0] / (2 * h)
    down, up = (rank_numpy(dampings[-1], matrix + s * change)[page] for s in (-h, h))
    along = float((by_link * torch.from_numpy(change)).sum())
    agreement = {
        "rank": float(np.abs(rank.detach().numpy() - theirs).max()),
        "in damping": float(np.abs(by_damping.flatten().numpy() - slope).max() / slope.max()),
        "in links": abs(along / ((up - down) / (2 * h)) - 1),
    }
    print(f"{n} pages, {int(matrix.sum())} links, {len(dampings)} values of damping")
    best = rank[-1].argsort(descending=True)[:5].tolist()
    print("highest:", ", ".join(f"{names[i]} {rank[-1, i]:.3f}" for i in best))
    row, column = divmod(int((by_link * links).argmax()), n)
    print(f"the link that raises {names[page]} most: {names[row]} → {names[column]}")
    print("apart from numpy:", ", ".join(f"{k} {v:.1e}" for k, v in agreement.items()))

    figure, axis = plt.subplots(figsize=(6, 3.4), layout="tight")
    for i in best:
        axis.plot(dampings, rank[:, i].detach().numpy(), label=names[i])
    axis.set(xlabel="damping", ylabel="rank")
    axis.legend()
    figure.savefig(out, metadata={"Date": None})
    return agreement


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer values of damping")
    parser.add_argument("--out", default="pagerank.svg", help="where to write the picture")
    main(**vars(parser.parse_args()))
