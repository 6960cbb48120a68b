"""One layer with torchdeq and with equilibria: the same answer, and where the gradients differ.

python examples/coming_from_torchdeq.py            needs torchdeq 0.1
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchdeq import get_deq

import equilibria as eq


def layer(z: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(z @ weight + x)


def exact_gradient(z: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Of Σz, by dense algebra: (I − J)ᵀu = 1, then D·u with D = 1 − z², row by row."""
    slope = 1 - layer(z, x, weight).square()
    eye = torch.eye(z.shape[1], dtype=z.dtype)
    rows = [torch.linalg.solve(eye - weight * d, torch.ones_like(d)) * d for d in slope]
    return torch.stack(rows)


def main() -> None:
    torch.manual_seed(0)
    weight = 0.9 * torch.linalg.qr(torch.randn(32, 32, dtype=torch.float64))[0]
    x = torch.randn(4, 32, dtype=torch.float64, requires_grad=True)
    start = torch.zeros(4, 32, dtype=torch.float64)

    # torchdeq: the map captures its input; the answer is the last of a list.
    deq = get_deq(f_solver="anderson", f_max_iter=80, f_tol=1e-9, f_stop_mode="rel", ift=True)
    theirs = deq(lambda z: layer(z, x, weight), start)[0][-1]

    # equilibria: the input is an argument; the answer comes with statistics of each sample.
    solver = eq.Anderson(rtol=1e-9, max_steps=80)
    solution = eq.fixed_point(layer, start, (x, weight), solver=solver)
    ours = solution.value
    print(solution.summary())
    print(f"the answers differ by {float((ours - theirs).detach().abs().max()):.1e}")

    # The gradient of a small loss, as it is after a mean over many pixels.
    exact = exact_gradient(ours.detach(), x.detach(), weight)
    for name, z in (("torchdeq", theirs), ("equilibria", ours)):
        for scale in (1.0, 1e-5):
            (gradient,) = torch.autograd.grad(scale * z.sum(), x, retain_graph=True)
            error = (gradient / scale - exact).norm() / exact.norm()
            print(f"{name}: relative error of the gradient {error:.1e} with the loss × {scale:g}")


if __name__ == "__main__":
    main()
