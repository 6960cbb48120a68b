"""Batches of dense systems, matrix by matrix where a batched LU cannot be trusted.

Intel's MKL, in torch's builds for the CPU (seen with 2.13), answers a *batch* of matrices of about
200 rows or more with wrong numbers or an error ("Pivots given to lu_solve") on two threads.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _one_by_one(a: Tensor) -> bool:
    # Up to 128 rows batches were right in every trial.
    return a.device.type == "cpu" and a.ndim > 2 and a.shape[-1] > 128


def solve_each(a: Tensor, b: Tensor) -> Tensor:
    """x with Ax = b. a [..., n, n]; b [..., n, k], or [..., n] (a vector each)."""
    vectors = b.ndim == a.ndim - 1
    right = b.unsqueeze(-1) if vectors else b
    if _one_by_one(a):
        flat, columns = a.flatten(0, -3), right.expand(*a.shape[:-1], -1).flatten(0, -3)
        parts = [torch.linalg.solve(m, c) for m, c in zip(flat, columns, strict=True)]
        found = torch.stack(parts).view(*a.shape[:-1], -1)
    else:
        found = torch.linalg.solve(a, right)
    return found.squeeze(-1) if vectors else found


def inverse_each(a: Tensor) -> Tensor:
    """A⁻¹, a [..., n, n]; a singular matrix gives what ``inv_ex`` gives, without an error."""
    if _one_by_one(a):
        parts = [torch.linalg.inv_ex(m).inverse for m in a.flatten(0, -3)]
        return torch.stack(parts).view(a.shape)
    inverse: Tensor = torch.linalg.inv_ex(a).inverse
    return inverse


def eliminate(a: Tensor, b: Tensor) -> Tensor:
    """x with Ax = b by Gauss-Jordan without pivots; a [B, n, n] positive definite, b [B, n, 1].

    For a few rows, and where there is no LU: ONNX has none.
    """
    both, eye = torch.cat([a, b], dim=2), torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    for k in range(a.shape[-1]):
        row = both.narrow(1, k, 1)
        # Row k is divided by its pivot, and of the others as much is taken as makes their k-th 0.
        both = both - (both.narrow(2, k, 1) - eye.narrow(1, k, 1)) * (row / row.narrow(2, k, 1))
    return both[:, :, -1:]
