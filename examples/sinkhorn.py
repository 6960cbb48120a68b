"""A Sinkhorn layer: the plan of entropic optimal transport, and a cost learned from matches.

python examples/sinkhorn.py            writes sinkhorn.svg
"""

from __future__ import annotations

import argparse

import matplotlib.pyplot as plt
import numpy as np
import torch
from scipy import optimize
from torch import Tensor, nn

import equilibria as eq

EPS, MATCHES, TRUE, I = 0.5, 20_000, np.array([2.0, 0.3, 1.0]), np.eye(3)


def sinkhorn(cost: Tensor, like: Tensor) -> Tensor:
    """argmin ⟨cost, P⟩ + EPS·ΣP(log P − 1) with the sums of ``like`` [n, m]; cost is [B, n, m]."""
    a, b = like.sum(1, keepdim=True), like.sum(0)

    def other(f: Tensor, c: Tensor) -> Tensor:
        return EPS * (b.log() - torch.logsumexp((f - c) / EPS, 1, keepdim=True))

    def step(f: Tensor, c: Tensor) -> Tensor:
        f = EPS * (a.log() - torch.logsumexp((other(f, c) - c) / EPS, 2, keepdim=True))
        return f - f.mean(1, keepdim=True)  # f + t with g − t gives the same plan for every t

    f = eq.fixed_point(step, 0 * cost[:, :, :1], cost, solver=eq.Anderson(rtol=1e-10)).value
    return torch.exp((f + other(f, cost) - cost) / EPS)


def plan_scipy(cost: np.ndarray, like: np.ndarray) -> np.ndarray:
    """The same plan: the equations for its sums, solved by Levenberg and Marquardt's method."""
    n, m = like.shape

    def plan(t: np.ndarray) -> np.ndarray:
        return np.exp((t[:n, None] + t[n:] - cost) / EPS)

    def off(t: np.ndarray) -> np.ndarray:
        return np.concatenate([np.log(plan(t).sum(k) / like.sum(k)) for k in (1, 0)])

    return plan(optimize.root(off, np.zeros(n + m), method="lm", tol=1e-14).x)


def main(quick: bool, out: str) -> dict[str, float]:
    torch.manual_seed(0)
    n, m = (6, 5) if quick else (16, 12)
    gaps = 0.5 * (torch.randn(n, 1, 3) - torch.randn(m, 3)).double().square()  # the cost: gaps @ w
    true = plan_scipy(gaps.numpy() @ TRUE, np.full((n, m), 1 / (n * m))).ravel()
    draw = torch.multinomial(torch.from_numpy(true), MATCHES, replacement=True)
    seen = draw.bincount(minlength=n * m).reshape(n, m).double() / MATCHES
    w = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = torch.optim.LBFGS([w], max_iter=40, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = -MATCHES * (seen * sinkhorn((gaps @ w)[None], seen)[0].log()).sum()
        value.backward()
        return value  # of the likelihood; at its best, plan and matches have the same mean gaps

    loss()
    first = w.grad.numpy().copy()
    optimizer.step(loss)
    learned, plan = w.detach().numpy(), sinkhorn((gaps @ w.detach())[None], seen)[0].numpy()
    given, table = gaps.numpy(), seen.numpy()
    logs = [np.log(plan_scipy(given @ (1 + h), table)) for h in 1e-4 * np.vstack([I, -I])]
    slope = [-MATCHES * (table * (logs[k] - logs[k + 3])).sum() / 2e-4 for k in range(3)]
    theirs = plan_scipy(given @ learned, table)
    agreement = {
        "plan": float(np.abs(plan - theirs).max()),
        "gradient": float(np.abs(first - slope).max() / np.abs(slope).max()),
        "mean gaps": float(np.abs(np.tensordot(theirs - table, given, 2)).max()),
    }
    print(f"true w {TRUE}, learned from {MATCHES} matches {learned.round(3)}")
    print("apart from scipy:", ", ".join(f"{k} {v:.1e}" for k, v in agreement.items()))
    figure, axis = plt.subplots(figsize=(7, 4), layout="tight")
    axis.imshow(np.hstack([table, np.nan * table[:, :1], plan]))
    figure.savefig(out, metadata={"Date": None})
    return agreement | {"from the truth": float(np.abs(learned - TRUE).max())}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer points")
    parser.add_argument("--out", default="sinkhorn.svg", help="where to write the picture")
    main(**vars(parser.parse_args()))
