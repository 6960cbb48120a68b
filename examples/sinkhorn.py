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

EPS = 0.5  # the weight of the entropy
TRUE = np.array([2.0, 0.3, 1.0])
MATCHES, I = 20_000, np.eye(3)


def sinkhorn(cost: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """argmin ⟨cost, P⟩ + EPS·ΣP(log P − 1) with row sums a and column sums b; cost is [B, n, m]."""

    def other(f: Tensor, c: Tensor) -> Tensor:
        return EPS * (b.log() - torch.logsumexp((f[:, :, None] - c) / EPS, 1))

    def step(f: Tensor, c: Tensor) -> Tensor:
        f = EPS * (a.log() - torch.logsumexp((other(f, c)[:, None, :] - c) / EPS, 2))
        return f - f.mean(1, keepdim=True)  # f + t with g − t gives the same plan for every t

    f = eq.fixed_point(step, cost.new_zeros(cost.shape[:2]), cost, solver=eq.Anderson(rtol=1e-10))
    return torch.exp((f.value[:, :, None] + other(f.value, cost)[:, None, :] - cost) / EPS)


def plan_scipy(cost: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The same plan: the equations for its sums, solved by Levenberg and Marquardt's method."""

    def plan(t: np.ndarray) -> np.ndarray:
        return np.exp((t[: len(a), None] + t[len(a) :] - cost) / EPS)

    def off(t: np.ndarray) -> np.ndarray:
        return np.log(np.concatenate([plan(t).sum(1) / a, plan(t).sum(0) / b]))

    return plan(optimize.root(off, np.zeros(len(a) + len(b)), method="lm", tol=1e-14).x)


def main(quick: bool, out: str) -> dict[str, float]:
    torch.manual_seed(0)
    n, m = (6, 5) if quick else (16, 12)
    x, y = 0.7 * torch.randn(2, 16, 3, dtype=torch.float64)
    gaps = (x[:n, None] - y[None, :m]).square()  # the cost is gaps @ w
    true = plan_scipy(gaps.numpy() @ TRUE, np.full(n, 1 / n), np.full(m, 1 / m))
    draw = np.random.default_rng(0).multinomial(MATCHES, true.ravel() / true.sum())
    counts, seen = draw.reshape(n, m), torch.from_numpy(draw.reshape(n, m) / MATCHES)
    w = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = torch.optim.LBFGS([w], max_iter=40, line_search_fn="strong_wolfe")

    def plan_of(w: Tensor) -> Tensor:
        return sinkhorn((gaps @ w)[None], seen.sum(1), seen.sum(0))[0]

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = -MATCHES * (seen * plan_of(w).log()).sum()  # the likelihood of the matches
        value.backward()
        return value

    loss()
    first = w.grad.numpy().copy()
    optimizer.step(loss)
    learned, plan = w.detach().numpy(), plan_of(w).detach().numpy()
    # Beside scipy; at the most likely w, plan and matches have the same mean gaps.
    given, sums = gaps.numpy(), (seen.sum(1).numpy(), seen.sum(0).numpy())
    logs = [np.log(plan_scipy(given @ (1 + h), *sums)) for h in 1e-4 * np.vstack([I, -I])]
    slope = [-(counts * (logs[k] - logs[k + 3])).sum() / 2e-4 for k in range(3)]
    theirs = plan_scipy(given @ learned, *sums)
    agreement = {
        "plan": float(np.abs(plan - theirs).max()),
        "gradient": float(np.abs(first - slope).max() / np.abs(slope).max()),
        "mean gaps": float(np.abs(np.tensordot(theirs - seen.numpy(), given, 2)).max()),
    }
    print(f"true w {TRUE}, learned from {MATCHES} matches {learned.round(3)}")
    print("apart from scipy:", ", ".join(f"{k} {v:.1e}" for k, v in agreement.items()))
    figure, axes = plt.subplots(1, 2, figsize=(7, 3), layout="tight")
    axes[0].imshow(counts, cmap="cividis")
    axes[1].imshow(plan, cmap="cividis")
    axes[0].set_title("matches")
    axes[1].set_title("plan of the learned cost")
    figure.savefig(out, metadata={"Date": None})
    return agreement | {"from the truth": float(np.abs(learned - TRUE).max())}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer points")
    parser.add_argument("--out", default="sinkhorn.svg", help="where to write the picture")
    main(**vars(parser.parse_args()))
