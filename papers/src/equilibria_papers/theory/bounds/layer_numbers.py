"""The numbers that the propositions are made of, measured on a layer and a batch in float64.

The propositions are about z* = σ(e^{−γ‖r‖²}Wᵀr), r = Ux + b − Wz* (GEQ Eq 6) and
z* = σ(WᵀWz* + Ux + b) (OptEq, Eq 4). Where a layer has patches and W_h, A: z → (rows of Wz)W_h
stands for W, x → (rows of Ux)W_h for U, and the largest weight e^{−sᵢ} of a patch for β.
"""

from __future__ import annotations

import copy
import math
import warnings
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from equilibria.adjoints import Implicit
from equilibria.engine import GMRES, ConvergenceWarning
from equilibria.nn import GEQ, OptEq
from equilibria.problems import Gaussian, NonNegative, Problem, minimize
from equilibria.solvers import ProximalGradient

from .report import Assumption

Provable: TypeAlias = GEQ | OptEq
PAPERS_LAYERS = (GEQ, OptEq)
SOLVER = ProximalGradient(rtol=1e-12, atol=1e-14, max_steps=20_000)
_STEP = 1e-5  # float64: z* is solved to 1e-12, so a difference has some 7 digits
_ADJOINT = Implicit(solver=GMRES(rtol=1e-8, max_steps=200))


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerNumbers:
    """What was measured. Norms of operators are proven upper bounds; the rest is at this batch."""

    kind: Literal["GEQ", "OptEq"]
    z: Tensor  # The equilibria, [B, *state], float64; for OptEq in the form of Eq 4
    x_norm: float  # max ‖x‖
    z_norm: float  # max ‖z*‖
    w_norm: float  # ‖W‖₂ (GEQ with W_h or patches: ‖A‖₂; OptEq: ‖W‖₂/√ν)
    u_norm: float  # ‖U‖₂ (GEQ with W_h or patches: ‖x → (rows of Ux)W_h‖₂)
    bias_norm: float  # ‖b‖₂ as it is added to Ux
    plain: bool  # Whether the layer is literally Eq 6 or Eq 4: dense, one patch, no W_h, ν = 1
    relu: bool
    gamma: tuple[float, float] | None = None  # The least and the largest γ of the batch (GEQ)
    gamma_fixed: bool = True  # Whether γ is the same for every input
    beta_max: float | None = None  # max e^{−sᵢ} over the batch and its patches (GEQ)
    reach: float | None = None  # max ‖hᵢ‖, hᵢ the rows of (Ux + b − Wz*)W_h (GEQ)
    patches: int = 1  # Rows hᵢ a sample has; 1 is Eq 6 as written

    @property
    def mu(self) -> float:
        """The papers' μ = max{‖W‖, ‖U‖}."""
        return max(self.w_norm, self.u_norm)

    @property
    def bound(self) -> float:
        """The papers' B: the norms of inputs and outputs are at most this."""
        return max(self.x_norm, self.z_norm)

    def common(self) -> list[Assumption]:
        """The premises that all propositions share."""
        stand_in = "patches, W_h, ν or a convolution: operator norms and the largest patch weight"
        how = "as written" if self.plain else f"{stand_in} stand in"
        layer = f"the layer of {'Eq 6' if self.kind == 'GEQ' else 'Eq 4'}"
        return [
            Assumption("ReLU", self.relu, "the layer's prior"),
            Assumption(layer, self.plain, how),
        ]


def double(layer: Provable) -> Provable:
    """A copy in float64 and eval mode, OptEq in the form of Eq 4; the layer is left as it is."""
    if not isinstance(layer, PAPERS_LAYERS):
        raise TypeError(
            f"the propositions are about GEQ and OptEq layers, got {type(layer).__name__}; "
            "eq.certify says what is proven of others."
        )
    made = copy.deepcopy(layer).double().eval()
    if isinstance(made, OptEq):
        made.form = "hidden"
    return made


def solved(problem: Problem, start: Tensor) -> Tensor:
    """argmin G in float64, converged, or an error that says what to do."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # an error below says it better
        found = minimize(problem, start, solver=SOLVER)
    residual = float(found.stats.residual.max())
    if bool((found.result != 0).any()):
        raise ValueError(
            f"the layer did not reach its equilibrium in float64 (largest residual {residual:.2e} "
            f"after {SOLVER.max_steps} steps): is ‖W‖ within the range where it is unique?"
        )
    return found.value


@torch.no_grad()
def measure_layer(layer: Provable, x: Tensor) -> LayerNumbers:
    """Solve ``layer`` for x [B, ...] in float64 and measure what the propositions need."""
    exact = double(layer)
    x = x.detach().double()
    if x.shape[0] == 0:
        raise ValueError("x has no samples: expected at least one.")
    problem = exact.problem(x)
    z = solved(problem, exact.start(problem, x))
    q = problem.coupling
    bias: Any = exact.U.bias
    pixels = math.prod(x.shape[2:])
    shared: dict[str, Any] = {
        "z": z,
        "x_norm": float(x.flatten(1).norm(dim=1).max()),
        "z_norm": float(z.flatten(1).norm(dim=1).max()),
        "u_norm": exact.input_norm_upper(),
        "bias_norm": 0.0 if bias is None else math.sqrt(pixels) * float(bias.norm()),
        "relu": isinstance(exact.prior, NonNegative),
    }
    if not isinstance(q, Gaussian):
        assert isinstance(exact, OptEq)
        w_norm = exact.operator().norm_upper() / math.sqrt(exact.nu)
        plain = exact.nu == 1.0 and not exact.convolutional
        return LayerNumbers(kind="OptEq", w_norm=w_norm, plain=plain, **shared)
    energies = q.energies(z)
    return LayerNumbers(
        kind="GEQ",
        w_norm=q.mu_upper(tight=True),
        plain=q.metric is None and q.patches is None and not exact.convolutional,
        gamma=(float(q.gamma.min()), float(q.gamma.max())),
        gamma_fixed=q.policy is None or not q.policy.input_dependent,
        beta_max=float(torch.exp(-q.gamma.unsqueeze(-1) * energies).max()),
        reach=float(energies.max().sqrt()),
        patches=int(energies.shape[1]),
        **shared,
    )


@torch.no_grad()
def measured_pairs(x: Tensor, z: Tensor) -> float:
    """The largest ‖zᵢ − zⱼ‖/‖xᵢ − xⱼ‖ over all pairs of the batch; 0 with fewer than two.

    Measured on solved equilibria, as ``measured_around``: a lower bound of any Lipschitz constant.
    """
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
