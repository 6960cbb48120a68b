"""Check what the documentation says about torchdeq 0.1.0, one line each.

    python benchmarks/compare_libraries.py          (needs torchdeq, in the extras dev and bench)

The map is z ↦ tanh(Wz + x) with ‖W‖₂ = 0.5 in float64. The oracle of derivatives unrolls 200 plain
steps and differentiates them by autograd. Forward tolerances are 1e-12 for both; backward each
library keeps its default tolerance.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torchdeq
from torch import Tensor

import equilibria as eq

torch.manual_seed(0)
W = torch.randn(6, 6, dtype=torch.float64)
W = 0.5 * W / torch.linalg.matrix_norm(W, 2)
X = torch.randn(3, 6, dtype=torch.float64)


def step(z: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(z @ W.T + x)


def unrolled(x: Tensor) -> Tensor:
    z = torch.zeros_like(x)
    for _ in range(200):
        z = step(z, x)
    return z


def ours(x: Tensor) -> Tensor:
    return eq.fixed_point(step, torch.zeros_like(x), (x,), solver=eq.Anderson(rtol=1e-12)).value


def theirs(x: Tensor, **options: object) -> Tensor:
    found = {"f_solver": "anderson", "f_max_iter": 100, "f_tol": 1e-12, "b_max_iter": 100}
    deq = torchdeq.get_deq(ift=True, **{**found, **options})
    return deq(lambda z: step(z, x), torch.zeros_like(x))[0][-1]


def gradient(solve: Callable[[Tensor], Tensor], scale: float = 1.0) -> Tensor:
    x = X.clone().requires_grad_()
    (scale * solve(x).pow(3).sum()).backward()
    assert x.grad is not None
    return x.grad / scale


def second(solve: Callable[[Tensor], Tensor]) -> Tensor:
    """The gradient of ‖∂L/∂x‖²."""
    x = X.clone().requires_grad_()
    (first,) = torch.autograd.grad(solve(x).pow(3).sum(), x, create_graph=True)
    return torch.autograd.grad(first.square().sum(), x)[0]


def attempt(what: Callable[[], str]) -> str:
    try:
        return what()
    except (RuntimeError, TypeError) as reason:
        return f"raises {type(reason).__name__}"


def error(found: Tensor, exact: Tensor) -> str:
    return f"relative error {float((found - exact).norm() / exact.norm()):.0e}"


def vmapped(solve: Callable[[Tensor], Tensor]) -> str:
    each = torch.func.vmap(lambda x: solve(x[None])[0])(X)
    return error(each, unrolled(X))


def alone_and_together(solve: Callable[[Tensor, Tensor], Tensor]) -> str:
    """How far a sample's answer moves when samples that need more steps join its batch."""
    slow = torch.tensor([[0.2], [1.9], [1.9]], dtype=torch.float64)
    together, alone = solve(X, slow), solve(X[:1], slow[:1])
    return f"moves by {float((together[:1] - alone).norm() / alone.norm()):.0e}"


def our_batch(x: Tensor, slow: Tensor) -> Tensor:
    solver = eq.Picard(rtol=1e-3)
    return eq.fixed_point(
        lambda z, x, slow: step(slow * z, x), torch.zeros_like(x), (x, slow), solver=solver
    ).value


def their_batch(x: Tensor, slow: Tensor) -> Tensor:
    deq = torchdeq.get_deq(f_solver="fixed_point_iter", f_tol=1e-3, f_stop_mode="rel")
    return deq(lambda z: step(slow * z, x), torch.zeros_like(x))[0][-1]


def main() -> None:
    exact, curved = gradient(unrolled), second(unrolled)
    rows: list[tuple[str, Callable[[], str], Callable[[], str]]] = [
        (
            "first derivative",
            lambda: error(gradient(ours), exact),
            lambda: error(gradient(theirs), exact),
        ),
        (
            "the same, loss scaled by 1e-5",
            lambda: error(gradient(ours, 1e-5), exact),
            lambda: error(gradient(theirs, 1e-5), exact),
        ),
        (
            "second derivative",
            lambda: error(second(ours), curved),
            lambda: error(second(theirs), curved),
        ),
        (
            "a sample's answer, alone and beside slower ones",
            lambda: alone_and_together(our_batch),
            lambda: alone_and_together(their_batch),
        ),
        ("torch.func.vmap", lambda: vmapped(ours), lambda: vmapped(theirs)),
        (
            "an option that does not exist",
            lambda: str(eq.Anderson(memori=5)),  # type: ignore[call-arg]
            lambda: (theirs(X, f_memori=5), "ignored")[1],
        ),
    ]
    print("| check | equilibria | torchdeq |\n|---|---|---|")
    for name, mine, other in rows:
        print(f"| {name} | {attempt(mine)} | {attempt(other)} |")


if __name__ == "__main__":
    main()
