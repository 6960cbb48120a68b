"""max ‖z*(x₁) − z*(x₂)‖/‖x₁ − x₂‖, measured: over pairs of a batch, and around each input.

Both are differences of solved equilibria, so they are lower bounds of any Lipschitz constant.
"""

from __future__ import annotations

import torch
from torch import Tensor

from equilibria.adjoints import Implicit
from equilibria.engine import GMRES

from .measuring import SOLVER, Provable, double, solved

__all__ = ["measured_around", "measured_pairs"]

_STEP = 1e-5  # float64: z* is solved to 1e-12, so a difference has some 7 digits
_ADJOINT = Implicit(solver=GMRES(rtol=1e-8, max_steps=200))


@torch.no_grad()
def measured_pairs(x: Tensor, z: Tensor) -> float:
    """The largest ‖zᵢ − zⱼ‖/‖xᵢ − xⱼ‖ over all pairs of the batch; 0 with fewer than two."""
    xs, zs = x.flatten(1).double(), z.flatten(1).double()
    if len(xs) < 2:
        return 0.0
    # The direct formula: expanding ‖a − b‖² loses the small distances that matter most here.
    near = torch.cdist(xs, xs, compute_mode="donot_use_mm_for_euclid_dist")
    far = torch.cdist(zs, zs, compute_mode="donot_use_mm_for_euclid_dist")
    ratio = torch.where(near > 0, far / near.clamp_min(1e-300), 0.0)
    return float(ratio.max())


def measured_around(
    layer: Provable, x: Tensor, *, steps: int = 8, generator: torch.Generator | None = None
) -> Tensor:
    """‖z*(x + εv) − z*(x − εv)‖/2ε for the worst v that power iteration finds, [B].

    v ← Jᵀu by the implicit gradient, u ← Jv by the difference itself; the largest difference seen
    is returned, so that it was really measured. γ follows the input where its policy does.
    """
    if steps < 1:
        raise ValueError(f"steps={steps!r}: expected an integer of at least 1.")
    exact = double(layer)
    for parameter in exact.parameters():
        parameter.requires_grad_(False)
    x = x.detach().double()
    shape = (len(x), *[1] * (x.ndim - 1))

    def unit(v: Tensor) -> Tensor:
        size = v.flatten(1).norm(dim=1)
        return v / torch.where(size > 0, size, 1.0).view(shape)

    v = unit(torch.randn(x.shape, dtype=x.dtype, generator=generator).to(x.device))
    best = torch.zeros(len(x), dtype=x.dtype, device=x.device)
    for _ in range(steps):
        with torch.no_grad():
            ends = torch.cat([x + _STEP * v, x - _STEP * v])
            problem = exact.problem(ends)
            z = solved(problem, exact.start(problem, ends))
            u = (z[: len(x)] - z[len(x) :]) / (2 * _STEP)
        best = torch.maximum(best, u.flatten(1).norm(dim=1))
        with torch.enable_grad():
            point = x.clone().requires_grad_(True)
            out = exact.solve(point, solver=SOLVER, adjoint=_ADJOINT).value
            (pulled,) = torch.autograd.grad(out, point, u)
        v = unit(torch.where((pulled.flatten(1).norm(dim=1) > 0).view(shape), pulled, v))
    return best
