"""Gradient flow and gradient descent of the thesis' model, watched: Theorems 3.3.1 and 3.3.5.

θ̇ = −∇L(θ), or θ(k+1) = θ(k) − η∇L(θ(k)), with L = ½‖ŷ − y‖² (Eq 3.4) and the closed-form gradient.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy
import scipy.integrate  # type: ignore[import-untyped]
import torch
from torch import Tensor

from equilibria_papers.theory.pictures import (
    COLORS,
    GRAY,
    look,
    new_figure,
    on_log_axis,
    plain_ticks,
    save_picture,
)

from .conditions import (
    ConditionReport,
    Radii,
    check_condition,
    ingredients,
    search_radii,
    smallest_singular,
)
from .model import (
    Equilibrium,
    ThesisModel,
    check_data,
    closed_form_gradient,
    closed_form_kernel,
    find_equilibrium,
    square_loss,
)

Progress = Callable[[float], None]  # Called with the share of the run that is done


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run recorded, one entry a time t (flow) or a step k (descent).

    - ``loss``: L(θ);  ``guaranteed``: e^{−λ₀²t/2}L(θ₀), or (1 − ηλ₀²/4)^k L(θ₀).
    - ``kernel``: λ_min(K);  ``features``: σ_min(Z), 0 where N > n.
    - ``pl``: ‖∇L‖²/(2L), which is at least λ_min(K) (Theorem 2.6.4; ``Definition 2.6.1``'s μ is
      twice it).
    - ``moved``: ‖A − A(0)‖_F and so on, what is used up of each radius.
    """

    kind: Literal["flow", "descent"]
    times: tuple[float, ...]
    loss: tuple[float, ...]
    guaranteed: tuple[float, ...]
    kernel: tuple[float, ...]
    features: tuple[float, ...]
    pl: tuple[float, ...]
    moved: dict[str, tuple[float, ...]]
    lambda0: float
    step: float | None
    evaluations: int
    final: ThesisModel

    @property
    def worst(self) -> float:
        """The largest loss/guaranteed loss after the start; above 1 the guarantee was broken."""
        pairs = list(zip(self.loss, self.guaranteed, strict=True))[1:]
        return max(loss / bound if bound > 0 else math.inf for loss, bound in pairs)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, for JSON."""
        names = {"kernel": "lambda_min_kernel", "features": "sigma_min_features", "pl": "pl_ratio"}
        fields = [f.name for f in dataclasses.fields(self) if f.name != "final"]
        found = {names.get(name, name): getattr(self, name) for name in fields}
        return {**found, "worst_ratio": self.worst}


@dataclass
class _Recorder:
    """Collects the rows of a run."""

    first: ThesisModel
    X: Tensor
    y: Tensor
    rows: list[dict[str, float]] = field(default_factory=list)
    moved: list[dict[str, float]] = field(default_factory=list)

    def take(self, time: float, model: ThesisModel, found: Equilibrium, gradient: Tensor) -> None:
        loss, _ = square_loss(model, found, self.y)
        row = {
            "times": time,
            "loss": loss,
            "kernel": closed_form_kernel(model, self.X, found).smallest(),
            "features": smallest_singular(found.Z),
            "pl": float(gradient @ gradient) / (2.0 * loss) if loss > 0 else math.nan,
        }
        self.rows.append(row)
        pairs = {name: (getattr(model, name), getattr(self.first, name)) for name in model.names}
        self.moved.append({name: float((a - b).norm()) for name, (a, b) in pairs.items()})

    def finish(self, factor: Callable[[float], float], **others: Any) -> Run:
        columns: dict[str, Any] = {k: tuple(row[k] for row in self.rows) for k in self.rows[0]}
        start = self.rows[0]["loss"]
        return Run(
            guaranteed=tuple(factor(t) * start for t in columns["times"]),
            moved={k: tuple(row[k] for row in self.moved) for k in self.moved[0]},
            **columns,
            **others,
        )


def gradient_flow(
    model: ThesisModel,
    X: Tensor,
    y: Tensor,
    *,
    horizon: float | None = None,
    points: int = 101,
    method: str = "DOP853",
    rtol: float = 1e-9,
    steps: int | None = None,
    max_evaluations: int = 50_000,
    progress: Progress | None = None,
) -> Run:
    """θ̇ = −∇L(θ) from ``model``, recorded at ``points`` even times.

    L has kinks, where a unit's argument is zero, and the flow may run into one and slide along it
    (Filippov's solution). Adaptive solvers then shrink their steps without end; steps of fixed size
    go on, with an error of the order of the step.

    Args:
        horizon: the last t; None: 20/λ₀², where the guaranteed curve has fallen to e⁻¹⁰.
        method: of ``scipy.integrate.solve_ivp``; "LSODA" where K's eigenvalues lie far apart; or
            "fixed": classical Runge–Kutta steps of one size.
        rtol: scipy's relative tolerance; the absolute one is rtol times the move of that parameter
            which changes an output by ‖ŷ − y‖.
        steps: how many fixed steps at least; None: such that a step is at most 1/(2λ_max(K(0))).
        max_evaluations: of the gradient by scipy; past them there is an error that says at which t.
    """
    X = check_data(model, X, y)
    y = y.to(X)
    found = find_equilibrium(model, X)
    lambda0 = smallest_singular(found.Z)
    if horizon is None:
        if lambda0 <= 0:
            raise ValueError(
                "gradient_flow: λ₀ = σ_min(Z(0)) is 0, so there is no time scale; give horizon=…"
            )
        horizon = 20.0 / lambda0**2
    if not (math.isfinite(horizon) and horizon > 0) or points < 2:
        raise ValueError(
            f"gradient_flow(horizon={horizon!r}, points={points!r}): expected a time above 0 "
            "and at least 2 points."
        )
    flow = _Flow(model, X, y, horizon, found, progress)
    if method == "fixed":
        times, states = _fixed_steps(flow, points, steps)
    else:
        times, states = _adaptive_steps(flow, points, method, rtol, max_evaluations)
    record = _Recorder(model, X, y)
    for t, theta in zip(times, states, strict=True):
        here, last, rest = flow.at(theta)
        record.take(t, here, last, closed_form_gradient(here, X, last, rest))
    return record.finish(
        lambda t: math.exp(-0.5 * lambda0**2 * t),
        kind="flow",
        lambda0=lambda0,
        step=None,
        evaluations=flow.evaluations,
        final=here,
    )


@dataclass
class _Flow:
    """θ ↦ −∇L(θ), each equilibrium started at the last one's pattern of signs."""

    model: ThesisModel
    X: Tensor
    y: Tensor
    horizon: float
    last: Equilibrium
    progress: Progress | None
    evaluations: int = 0

    def at(self, theta: Tensor) -> tuple[ThesisModel, Equilibrium, Tensor]:
        here = self.model.at(theta)
        self.last = find_equilibrium(here, self.X, self.last)
        return here, self.last, square_loss(here, self.last, self.y)[1]

    def slope(self, t: float, theta: Tensor) -> Tensor:
        self.evaluations += 1
        if self.progress is not None:
            self.progress(min(1.0, t / self.horizon))
        here, found, rest = self.at(theta)
        return -closed_form_gradient(here, self.X, found, rest)


def _adaptive_steps(
    flow: _Flow, points: int, method: str, rtol: float, most: int
) -> tuple[list[float], list[Tensor]]:
    def slope(t: float, theta: Any) -> Any:
        if flow.evaluations >= most:
            raise ArithmeticError(
                f"gradient_flow: {most} evaluations of the gradient reached only t = {t:.4g} of "
                f"{flow.horizon:.4g}; the flow is stiff, or slides along a kink of the ReLU. Take "
                "method='fixed', a larger rtol or a larger max_evaluations."
            )
        return flow.slope(t, torch.from_numpy(theta.copy()).to(flow.X)).cpu().numpy()

    theta = flow.model.vector().cpu().numpy()
    times = numpy.linspace(0.0, flow.horizon, points)
    span = (0.0, flow.horizon)
    floor = rtol * _sizes(flow).cpu().numpy()
    solved = scipy.integrate.solve_ivp(slope, span, theta, method, times, rtol=rtol, atol=floor)
    if not solved.success:
        raise ArithmeticError(f"gradient_flow: scipy's {method} stopped: {solved.message}")
    states = [torch.from_numpy(column.copy()).to(flow.X) for column in solved.y.T]
    return [float(t) for t in solved.t], states


def _sizes(flow: _Flow) -> Tensor:
    """How far each entry of θ may go before an output moves by ‖ŷ − y‖, [p]: ‖ŷ − y‖/‖J_part‖.

    The parts of θ may differ by orders of magnitude (a large U beside a small u), so that one
    absolute tolerance for all would drown the small ones. A part that does not act yet (u = 0)
    takes its own size.
    """
    model = flow.model
    kernel = closed_form_kernel(model, flow.X, flow.last)
    loss, _ = square_loss(model, flow.last, flow.y)
    sizes = []
    for name in model.names:
        part = getattr(model, name)
        reach = math.sqrt(max(0.0, float(torch.linalg.eigvalsh(getattr(kernel, name))[-1])))
        size = math.sqrt(2.0 * loss) / reach if reach > 0 else float(part.abs().max())
        sizes.append(torch.full((part.numel(),), size or 1.0).to(flow.X))
    return torch.cat(sizes)


def _fixed_steps(flow: _Flow, points: int, steps: int | None) -> tuple[list[float], list[Tensor]]:
    """Classical Runge–Kutta, the same whole number of steps between any two points."""
    if steps is None:
        spectrum = torch.linalg.eigvalsh(closed_form_kernel(flow.model, flow.X, flow.last).total)
        steps = math.ceil(2.0 * flow.horizon * float(spectrum[-1]))
    between = max(1, math.ceil(steps / (points - 1)))
    h = flow.horizon / (between * (points - 1))
    theta, t = flow.model.vector(), 0.0
    times, states = [t], [theta]
    for point in range(1, points):
        for _ in range(between):
            k1 = flow.slope(t, theta)
            k2 = flow.slope(t + h / 2, theta + h / 2 * k1)
            k3 = flow.slope(t + h / 2, theta + h / 2 * k2)
            k4 = flow.slope(t + h, theta + h * k3)
            theta = theta + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
            t += h
        times.append(flow.horizon * point / (points - 1))
        states.append(theta)
    return times, states


def gradient_descent(
    model: ThesisModel,
    X: Tensor,
    y: Tensor,
    *,
    step: float,
    steps: int,
    every: int = 1,
    progress: Progress | None = None,
) -> Run:
    """θ(k+1) = θ(k) − η∇L(θ(k)), η = ``step``, recorded at every ``every``-th k and the last.

    Ends early where the loss is no longer finite or above 1e100.
    """
    X = check_data(model, X, y)
    y = y.to(X)
    if not (math.isfinite(step) and step > 0) or steps < 1 or every < 1:
        raise ValueError(
            f"gradient_descent(step={step!r}, steps={steps!r}, every={every!r}): expected a step "
            "size above 0 and counts of at least 1."
        )
    record = _Recorder(model, X, y)
    here, found = model, find_equilibrium(model, X)
    lambda0 = smallest_singular(found.Z)
    for k in range(steps + 1):
        loss, rest = square_loss(here, found, y)
        gradient = closed_form_gradient(here, X, found, rest)
        if k % every == 0 or k == steps:
            record.take(float(k), here, found, gradient)
        if k == steps or not loss < 1e100 or not bool(gradient.isfinite().all()):
            break
        here = here.at(here.vector() - step * gradient)
        found = find_equilibrium(here, X, found)
        if progress is not None:
            progress((k + 1) / steps)
    factor = 1.0 - step * lambda0**2 / 4.0
    return record.finish(
        lambda k: factor ** int(k),
        kind="descent",
        lambda0=lambda0,
        step=step,
        evaluations=k + 1,
        final=here,
    )


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """An initialization, data, the condition that is asked for, and how the run goes.

    ``radii`` None: searched for. ``step`` None: what the condition allows (descent), or the largest
    at which the linearized descent still falls, 1/λ_max(K(0)), where no condition holds.
    """

    name: str
    text: str
    build: Callable[[int], tuple[ThesisModel, Tensor, Tensor]]
    condition: str
    kind: str
    radii: Radii | None = None
    steps: int = 1000
    method: str = "DOP853"
    horizon: float = 20.0  # in units of 1/λ₀²


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A scenario that was run. ``kept``: the guaranteed curve was above the loss at every point."""

    scenario: Scenario
    report: ConditionReport
    run: Run
    seed: int

    @property
    def kept(self) -> bool:
        """Whether loss ≤ guaranteed loss at every recorded point, up to 1e-6."""
        return self.run.worst <= 1.0 + 1e-6

    @property
    def verdict(self) -> str:
        """What the run says about the theorem."""
        if self.report.holds:
            said = "keeps the rate" if self.kept else "BREAKS the rate: the theorem is false"
            return f"{self.report.condition} holds; the run {said}"
        said = "keeps the rate all the same" if self.kept else "does not keep the rate"
        return f"{self.report.condition} does not hold, nothing is guaranteed; the run {said}"

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, for JSON."""
        return {
            "scenario": self.scenario.name,
            "text": self.scenario.text,
            "seed": self.seed,
            "verdict": self.verdict,
            "condition_holds": self.report.holds,
            "rate_kept": self.kept,
            "report": self.report.to_dict(),
            "run": self.run.to_dict(),
        }


def _diagonal(scale: float, m: float, tilt: float = 0.0) -> tuple[ThesisModel, Tensor, Tensor]:
    """n = N = d = 2, A = B = 0, X = I, u = 0, ‖y‖ = 1, U = scale·I, less ``tilt`` off the diagonal.

    With a tilt the arguments of the inactive units are −tilt and no longer at ReLU's kink; Z is the
    same.
    """
    eye, zero = torch.eye(2, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.float64)
    U = scale * eye - tilt * (1.0 - eye)
    model = ThesisModel(A=zero, B=zero, U=U, u=zero[0], m=m)
    return model, eye, torch.tensor([0.6, 0.8], dtype=torch.float64)


def _lazy(seed: int) -> tuple[ThesisModel, Tensor, Tensor]:
    """A usual A and B, u = 0, and a U so large that Condition 1 holds with a slack of about 1.1.

    λ₀ grows with U while ŷ = 0 does not; the best slack is all but linear in the size of U.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = ThesisModel.usual(8, 8, m=0.5, generator=generator)
    X = torch.randn(8, 3, dtype=torch.float64, generator=generator)
    y = torch.randn(3, dtype=torch.float64, generator=generator)
    scale = 1e4
    for _ in range(3):
        U, u = scale * drawn.U, torch.zeros_like(drawn.u)
        model = ThesisModel(A=drawn.A, B=drawn.B, U=U, u=u, m=drawn.m)
        scale *= 1.1 / search_radii("1", ingredients(model, X, y)).slack
    return model, X, y


def _usual(seed: int) -> tuple[ThesisModel, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    model = ThesisModel.usual(16, 8, m=0.5, generator=generator)
    X = torch.randn(8, 4, dtype=torch.float64, generator=generator)
    return model, X, torch.randn(4, dtype=torch.float64, generator=generator)


_ALL = (
    Scenario(
        name="guaranteed-flow",
        text="gradient flow where Condition 1 holds: U = 20I less 1/2 off the diagonal",
        build=lambda seed: _diagonal(20.0, 1.0, tilt=0.5),
        condition="1",
        kind="flow",
    ),
    Scenario(
        name="guaranteed-descent",
        text="gradient descent where the repaired Condition 2′ holds: U = 160I less 1 off the "
        "diagonal",
        build=lambda seed: _diagonal(160.0, 1.0, tilt=1.0),
        condition="2'",
        kind="descent",
        steps=1200,
    ),
    Scenario(
        name="guaranteed-random",
        text="gradient flow where Condition 1 holds: random A, B, X, y, n = 8, N = 3, u = 0, and U "
        "scaled up until it does",
        build=_lazy,
        condition="1",
        kind="flow",
    ),
    Scenario(
        name="usual-flow",
        text="gradient flow from a usual initialization, n = 16, N = 4",
        build=_usual,
        condition="1",
        kind="flow",
        method="fixed",  # it slides along kinks of the ReLU
        horizon=3.0,
    ),
    Scenario(
        name="usual-descent",
        text="gradient descent from a usual initialization, n = 16, N = 4",
        build=_usual,
        condition="2'",
        kind="descent",
        steps=400,
    ),
    Scenario(
        name="counterexample",
        text="the printed Theorem 3.3.5 broken: Condition 2 as printed holds, η = 4/λ₀² is "
        "allowed, and the loss grows ninefold a step",
        build=lambda seed: _diagonal(10.0, 0.05),
        condition="2",
        kind="descent",
        radii=Radii(A=1.0, B=1.0, U=5.0, u=0.1),
        steps=6,
    ),
)
SCENARIOS: Mapping[str, Scenario] = MappingProxyType({each.name: each for each in _ALL})
"""Runs in which the theorems can be seen to hold, to say nothing, and to fail."""


def run_scenario(name: str, *, seed: int = 0, progress: Progress | None = None) -> Outcome:
    """Check the scenario's condition (radii searched for unless it gives them) and run it."""
    if name not in SCENARIOS:
        raise ValueError(f"no scenario {name!r}; there are {', '.join(SCENARIOS)}.")
    scenario = SCENARIOS[name]
    model, X, y = scenario.build(seed)
    given = ingredients(model, X, y)
    report = check_condition(scenario.condition, given, scenario.radii)
    if scenario.kind == "flow":
        horizon = scenario.horizon / given.lambda0**2
        run = gradient_flow(model, X, y, method=scenario.method, horizon=horizon, progress=progress)
    else:
        step = report.step if report.holds else None
        if step is None:
            step = 1.0 / float(torch.linalg.eigvalsh(closed_form_kernel(model, X).total)[-1])
        run = gradient_descent(model, X, y, step=step, steps=scenario.steps, progress=progress)
    return Outcome(scenario=scenario, report=report, run=run, seed=seed)


def draw_outcome(outcome: Outcome, stem: Path) -> list[Path]:
    """The loss with the guaranteed curve, λ_min(K) and PL*, the radii used up; png and svg."""
    run = outcome.run
    figure = new_figure(10.4, 3.4)
    axes = figure.subplots(1, 3)
    _loss(axes[0], outcome)
    lines = {r"$\|\nabla L\|^2/(2L)$": run.pl, r"$\lambda_{\min}(K)$": run.kernel}
    lines[r"$\sigma_{\min}(Z)^2$"] = tuple(s * s for s in run.features)
    for i, (label, values) in enumerate(lines.items()):
        axes[1].semilogy(run.times, on_log_axis(values), label=label, **look(i, marker=False))
    if run.lambda0 > 0:
        axes[1].axhline(run.lambda0**2 / 4, color=GRAY, linestyle=":", label=r"$\lambda_0^2/4$")
    for i, (name, values) in enumerate(run.moved.items()):
        shares = [value / getattr(outcome.report.radii, name) for value in values]
        if max(shares) > 0.0:  # a parameter that never moves has no place on a log axis
            label = rf"$\|{name}-{name}(0)\|_F/R_{{{name}}}$"
            axes[2].semilogy(run.times, on_log_axis(shares), label=label, **look(i, marker=False))
    axes[2].axhline(1.0, color=GRAY, linestyle=":", label="the ball's edge")
    for axis, label in zip(axes, ("loss", "conditioning", "share of the radius"), strict=True):
        axis.set(xlabel="time $t$" if run.kind == "flow" else "step $k$", ylabel=label)
        axis.grid(visible=True, alpha=0.25)
        plain_ticks(axis)
        axis.legend(fontsize=7)
    figure.suptitle(outcome.verdict, fontsize=9)
    return save_picture(figure, stem)


def _loss(axis: Any, outcome: Outcome) -> None:
    """The loss and the guaranteed curve, at the bottom of the axis where it is zero."""
    run = outcome.run
    axis.semilogy(run.times, on_log_axis(run.loss), color=COLORS[0], label=r"$L(\theta)$")
    rate = r"$e^{-\lambda_0^2t/2}L_0$" if run.kind == "flow" else r"$(1-\eta\lambda_0^2/4)^kL_0$"
    word = "guaranteed" if outcome.report.holds else "not guaranteed"
    color, marks = COLORS[4], {}
    zeros = [i for i, value in enumerate(run.guaranteed) if value <= 0.0]
    curve = run.guaranteed
    if zeros:
        shown = [value for value in (*run.loss, *run.guaranteed) if 0.0 < value < math.inf]
        floor = min(shown, default=1.0) / 10.0
        curve = tuple(value if value > 0.0 else floor for value in curve)
        marks = {"marker": "v", "markevery": list(range(zeros[0], len(curve))), "clip_on": False}
    axis.semilogy(run.times, curve, "--", color=color, label=f"{rate}, {word}", **marks)
    if zeros:
        axis.set_ylim(bottom=floor)
        first = run.times[zeros[0]]
        text = f"0 from {'time' if run.kind == 'flow' else 'step'} {first:g}"
        beside: dict[str, Any] = {"xytext": (6, 6), "textcoords": "offset points"}
        axis.annotate(text, (first, floor), color=color, fontsize=8, **beside)
