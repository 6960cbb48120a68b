"""Batches of dense systems, against numpy; large ones with two threads in their own process."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from equilibria.engine.dense import inverse_each, solve_each


@pytest.mark.parametrize("n", [3, 128, 160])
@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
def test_solutions_and_inverses(n: int, batch: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    a = torch.randn(*batch, n, n, dtype=torch.float64) + 2 * n**0.5 * torch.eye(n)
    for b in (torch.randn(*batch, n, 2, dtype=torch.float64), torch.randn(*batch, n).double()):
        right = b.numpy() if b.ndim == a.ndim else b.numpy()[..., None]
        true = np.linalg.solve(a.numpy(), right)
        found = solve_each(a, b).numpy()
        np.testing.assert_allclose(found if b.ndim == a.ndim else found[..., None], true, rtol=1e-9)
    np.testing.assert_allclose(inverse_each(a).numpy(), np.linalg.inv(a.numpy()), atol=1e-12)


def test_gradients_pass() -> None:
    torch.manual_seed(0)
    a = (torch.randn(2, 130, 130, dtype=torch.float64) + 30 * torch.eye(130)).requires_grad_()
    b = torch.randn(2, 130, 1, dtype=torch.float64)
    found = torch.autograd.grad(solve_each(a, b).sum(), a)[0]
    x = torch.linalg.solve(a[0], b[0])
    u = torch.linalg.solve(a[0].mT, torch.ones_like(b[0]))
    torch.testing.assert_close(found[0], (-u @ x.mT).detach())


_SCRIPT = """
import torch
from equilibria.engine.dense import inverse_each, solve_each
torch.set_num_threads(2)
torch.manual_seed(0)
a = torch.randn(8, 256, 256, dtype=torch.float64) + 32 * torch.eye(256, dtype=torch.float64)
b = torch.randn(8, 256, 1, dtype=torch.float64)
off = float((a @ solve_each(a, b) - b).norm() / b.norm())
print(max(off, float((a @ inverse_each(a) - torch.eye(256, dtype=torch.float64)).norm())))
"""


def test_two_threads_do_not_spoil_a_batch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True, timeout=120
    )
    assert float(done.stdout.strip().splitlines()[-1]) < 1e-10
