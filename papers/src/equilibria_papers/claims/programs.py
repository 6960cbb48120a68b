"""Convex quadratic programs, solved by active sets: what the claims about minimizers rest on.

For ReLU ψ(z) = (1/2ν)‖(Wz + c)₊‖², so ψ*(u) = min (1/ν)(½‖ζ‖² − ⟨c, ζ⟩) over ζ ≥ 0 with
Wᵀζ = νu, and every minimum that has φ = ψ* − ½‖·‖² in it is a program in ζ. No conjugate, prox or
fixed point is computed on the way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from equilibria_papers.theory.extras import numpy_module, scipy_module

__all__ = ["program", "relu_prox"]


def program(h: Tensor, g: Tensor, nonnegative: Tensor) -> Tensor:
    """min ½vᵀHv − gᵀv with v ≥ 0 where said; H positive definite. [k, k], [k], [k] → v [k]."""
    np, optimize = numpy_module(), scipy_module().optimize
    root = torch.linalg.cholesky(h, upper=True)  # H = RᵀR
    target = torch.linalg.solve_triangular(root.mT, g[:, None], upper=False)[:, 0]
    if bool(nonnegative.all()):
        found, _ = optimize.nnls(root.numpy(), target.numpy(), maxiter=100 * len(g))
    else:
        lower = np.where(nonnegative.numpy(), 0.0, -np.inf)
        found = optimize.lsq_linear(
            root.numpy(), target.numpy(), (lower, np.inf), method="bvls", tol=1e-15
        ).x
    return torch.from_numpy(np.ascontiguousarray(found))


def relu_prox(w: Tensor, c: Tensor, pull: Tensor, weight: Tensor, nu: float = 1.0) -> Tensor:
    """argmin_u φ(u) + ½uᵀQu − ⟨p, u⟩ for ReLU; W [n, m], c [n], p [m], Q [m, m] → u [m].

    u = Wᵀζ/ν with ζ ≥ 0: H = I/ν + W(Q − I)Wᵀ/ν², g = c/ν + Wp/ν. Q = I is the prox of φ at p,
    Q = 0, p = 0 the minimizer of φ.
    """
    n, m = w.shape
    eye = torch.eye(m, dtype=w.dtype)
    h = torch.eye(n, dtype=w.dtype) / nu + w @ (weight - eye) @ w.mT / nu**2
    zeta = program(h, (c + w @ pull) / nu, torch.ones(n, dtype=torch.bool))
    return w.mT @ zeta / nu
