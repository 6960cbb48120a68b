"""Equilibria by a solver of the audit's own: semismooth Newton with a line search, in float64.

F(z) = z − T(z) = 0 with a generalized Jacobian J of F. A step is halved until ‖F‖ falls; where
Newton stalls, averaged iterations move the start. Nothing of the library's solvers is used.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from scipy import optimize  # type: ignore[import-untyped]
from torch import Tensor

Map = Callable[[Tensor], Tensor]


class Unsolved(RuntimeError):
    """No equilibrium was found to the accuracy that a trial needs."""


def newton(step: Map, slope: Map, start: Tensor, *, steps: int = 60) -> tuple[Tensor, float]:
    """z [n] with z = step(z), and the residual ‖z − step(z)‖; slope(z) is the Jacobian of step."""
    z = start
    gap = z - step(z)
    size = float(torch.linalg.vector_norm(gap))
    eye = torch.eye(len(z), dtype=z.dtype)
    for _ in range(steps):
        scale = 1.0 + float(torch.linalg.vector_norm(z))
        if size <= 4e-16 * scale:
            break
        solved, info = torch.linalg.solve_ex(eye - slope(z), gap)
        if int(info) != 0 or not bool(solved.isfinite().all()):
            break
        part, moved = 1.0, False
        while part > 1e-4:
            tried = z - part * solved
            new = tried - step(tried)
            new_size = float(torch.linalg.vector_norm(new))
            if new_size < size * (1.0 - 1e-4 * part):
                z, gap, size, moved = tried, new, new_size, True
                break
            part *= 0.5
        if not moved:
            break
    return z, size


def solve(
    step: Map, slope: Map, start: Tensor, *, accuracy: float = 1e-11, averaging: float = 0.5
) -> Tensor:
    """The equilibrium to ‖z − step(z)‖ ≤ accuracy·(1 + ‖z‖), or ``Unsolved``."""
    z = start
    for tries in range(5):
        found, size = newton(step, slope, z)
        if size <= accuracy * (1.0 + float(torch.linalg.vector_norm(found))):
            return found
        for _ in range(100 * 4**tries):
            z = (1.0 - averaging) * z + averaging * step(z)
    raise Unsolved(f"‖z − T(z)‖ = {size:.2e} after Newton from five starts")


def bisect(rising: Map, low: Tensor, high: Tensor, steps: int = 90) -> Tensor:
    """Entrywise zeros of a function that rises, between low and high."""
    for _ in range(steps):
        middle = 0.5 * (low + high)
        above = rising(middle) > 0
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    return 0.5 * (low + high)


# Convex quadratic programs, solved by active sets: what the claims about minimizers rest on.
#
# For ReLU ψ(z) = (1/2ν)‖(Wz + c)₊‖², so ψ*(u) = min (1/ν)(½‖ζ‖² − ⟨c, ζ⟩) over ζ ≥ 0 with
# Wᵀζ = νu, and every minimum that has φ = ψ* − ½‖·‖² in it is a program in ζ. No conjugate, prox or
# fixed point is computed on the way.


def program(h: Tensor, g: Tensor, nonnegative: Tensor) -> Tensor:
    """min ½vᵀHv − gᵀv with v ≥ 0 where said; H positive definite. [k, k], [k], [k] → v [k]."""
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
