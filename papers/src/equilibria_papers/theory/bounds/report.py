"""What every calculator of a proposition measures and returns.

A report is a frozen dataclass. Its numbers are its fields; ``assumptions`` says of each premise
whether it holds on the layer and data given; ``warnings`` says where the paper's inequality is
known not to hold; ``refused`` says which numbers of the paper have no meaning here, and why.

The numbers that the propositions are made of are measured on a layer and a batch in float64. The
propositions are about z* = σ(e^{−γ‖r‖²}Wᵀr), r = Ux + b − Wz* (GEQ Eq 6) and
z* = σ(WᵀWz* + Ux + b) (OptEq, Eq 4). Where a layer has patches and W_h, A: z → (rows of Wz)W_h
stands for W, x → (rows of Ux)W_h for U, and the largest weight e^{−sᵢ} of a patch for β.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from equilibria.adjoints import Implicit
from equilibria.engine import GMRES, ConvergenceWarning
from equilibria.nn import GEQ, OptEq
from equilibria.problems import Gaussian, NonNegative, Problem, minimize
from equilibria.solvers import ProximalGradient

Row = tuple[str, Any, str]  # (name, value, note) of a line to show


class AssumptionError(ValueError):
    """A premise of the proposition fails, and without it the number has no meaning."""


@dataclass(frozen=True)
class Assumption:
    """One premise: whether it holds here (None: not checked), and how that is known."""

    name: str
    holds: bool | None
    how: str

    def __str__(self) -> str:
        word = {True: "yes", False: "NO", None: "not checked"}[self.holds]
        return f"{self.name}: {word} ({self.how})"


def number(value: Any) -> str:
    """Four digits; a dash for None and for no finite number."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def refusing(refused: dict[str, str], name: str, formula: Any, *args: float) -> float | None:
    """``formula(*args)``, or None with the reason kept under ``name`` where it refuses."""
    try:
        return float(formula(*args))
    except AssumptionError as error:
        refused[name] = str(error)
        return None


@dataclass(frozen=True, eq=False, kw_only=True)
class Report:
    """The base of all reports; ``print`` it to read it, ``to_dict()`` for JSON."""

    TITLE: ClassVar[str] = ""

    layer: str  # What it is about: "GEQ", "OptEq", or the name of a layer in a network
    assumptions: tuple[Assumption, ...] = ()
    warnings: tuple[str, ...] = ()
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Numbers of the paper that have no meaning here, by name, with the reason."""

    def rows(self) -> list[Row]:
        """The lines to show; overridden by each report."""
        return []

    def summary(self) -> list[tuple[str, str]]:
        """(name, text) of the few numbers to compare layers by; overridden by each report."""
        return []

    @property
    def checked(self) -> bool:
        """Whether every premise was checked and holds."""
        return all(a.holds is True for a in self.assumptions)

    def to_dict(self) -> dict[str, Any]:
        """Every field in types that JSON has."""
        return {"title": self.TITLE, **dataclasses.asdict(self)}

    def __str__(self) -> str:
        shown = [(name, number(value), note) for name, value, note in self.rows()]
        wide = max((len(name) for name, _, _ in shown), default=0)
        figures = max((len(value) for _, value, _ in shown), default=0)
        lines = [f"{self.TITLE}: {self.layer}"]
        lines += [f"  {n:<{wide}}  {v:<{figures}}  {note}".rstrip() for n, v, note in shown]
        lines += [f"  assumption  {a}" for a in self.assumptions]
        lines += [f"  refused     {name}: {why}" for name, why in self.refused.items()]
        lines += [f"  warning     {text}" for text in self.warnings]
        return "\n".join(lines)


def check_positive(**values: float) -> None:
    """Raise unless each is a positive finite number."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{name}={value!r}: expected a positive number.")
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name}={value!r}: expected a positive finite number.")


# Remarks 1 and 3 of GEQ and Remark 1 of KerDEQ: when GEQ's bounds are below OptEq's.


def remark1_ratios(beta: float, mu: float, m: float) -> tuple[float, float]:
    """βμ(1 − m)/(1 − βm) and (2μβ + 1)(1 − m)/(1 − βm): where both are below 1, GEQ is tighter."""
    if not 0.0 <= m < 1.0:
        raise AssumptionError(f"Remark 1 needs 0 ≤ m < 1, got m = {m:.4g}.")
    scale = (1.0 - m) / (1.0 - beta * m)
    return beta * mu * scale, (2.0 * mu * beta + 1.0) * scale


def remark1(beta: float, mu: float, m: float) -> tuple[bool, str]:
    """GEQ Remark 1: β_max < 0.8 and μ, m > 0.9 make both terms of GEQ's bound the smaller ones."""
    premise = beta < 0.8 and mu > 0.9 and 0.9 < m < 1.0
    if not m < 1.0:
        return False, f"says nothing for m = {m:.4g} ≥ 1"
    first, second = remark1_ratios(beta, mu, m)
    word = "met" if premise else "not met"
    return premise, (
        f"premise β_max < 0.8, μ, m > 0.9 is {word}; the two ratios are {first:.3g}, {second:.3g}"
    )


def kerdeq_remark1(m: float = 0.9, mu: float | None = None) -> float:
    """The β below which both terms of KerDEQ's bound are below OptEq's; KerDEQ prints 0.83 at 0.9.

    βμ(1 − m) < 1 − βm and (2μβ + 1)(1 − m) ≤ 1 − βm give β < 1/(m + μ(1 − m)) and
    β ≤ m/(2μ(1 − m) + m). The paper takes m = μ = 0.9, which no W has: μ ≥ ‖W‖ = √m = 0.9487, the
    value taken if ``mu`` is None.
    """
    check_positive(m=m)
    if m >= 1.0:
        raise AssumptionError(f"KerDEQ's Remark 1 needs m < 1, got {m:.4g}.")
    size = math.sqrt(m) if mu is None else mu
    return min(1.0 / (m + size * (1.0 - m)), m / (2.0 * size * (1.0 - m) + m))


def remark3(log_d: float, gamma: float, smallest: float, *, printed: bool = False) -> float:
    """The distance ‖x₁ − x₂‖ from which κ̄_geq ≤ κ̄_opteq: 2√(log D/γ)/σ_min(U).

    The paper prints 2√(−log(1/D))/σ_min(U), which lacks 1/γ (and κ̄_geq on both sides); with γ < 1
    that is too short. inf where σ_min(U) = 0.
    """
    check_positive(gamma=gamma)
    if log_d < 0.0:
        raise ValueError(f"log_d={log_d!r}: D = e^… is at least 1, so its logarithm is 0 or more.")
    if smallest <= 0.0:
        return math.inf
    return 2.0 * math.sqrt(log_d if printed else log_d / gamma) / smallest


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

    def taken(self, *names: str) -> dict[str, Any]:
        """These numbers by their names, for a report."""
        return {name: getattr(self, name) for name in names}

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
