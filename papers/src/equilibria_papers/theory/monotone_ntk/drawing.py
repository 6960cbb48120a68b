"""One picture a run: the loss with the guaranteed curve, λ_min(K) and PL*, the radii used up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from equilibria_papers.theory.pictures import COLORS, GRAY, STYLES, new_figure, save_picture
from equilibria_papers.theory.scales import plain_ticks

from .scenarios import Outcome

__all__ = ["draw_outcome"]

_SYMBOLS = {"A": "A", "B": "B", "U": "U", "u": "u", "b": "b"}


def draw_outcome(outcome: Outcome, stem: Path) -> list[Path]:
    """Write ``stem.png`` and ``stem.svg``; the paths."""
    figure = new_figure(10.4, 3.4)
    axes = figure.subplots(1, 3)
    label = "time $t$" if outcome.run.kind == "flow" else "step $k$"
    for axis in axes:
        axis.set_xlabel(label)
        axis.grid(visible=True, alpha=0.25)
    _loss(axes[0], outcome)
    _conditioning(axes[1], outcome)
    _radii(axes[2], outcome)
    figure.suptitle(outcome.verdict, fontsize=9)
    return save_picture(figure, stem)


def _loss(axis: Any, outcome: Outcome) -> None:
    run = outcome.run
    axis.semilogy(run.times, _positive(run.loss), color=COLORS[0], label=r"$L(\theta)$")
    rate = r"$e^{-\lambda_0^2t/2}L_0$" if run.kind == "flow" else r"$(1-\eta\lambda_0^2/4)^kL_0$"
    word = "guaranteed" if outcome.report.holds else "not guaranteed"
    look: dict[str, Any] = {"color": COLORS[4], "label": f"{rate}, {word}"}
    zero = next((i for i, value in enumerate(run.guaranteed) if value <= 0.0), None)
    if zero is None:
        axis.semilogy(run.times, run.guaranteed, STYLES[1], **look)
    else:
        _falling_to_zero(axis, outcome, zero, look)
    axis.set_ylabel("loss")
    plain_ticks(axis)
    axis.legend(fontsize=7)


def _falling_to_zero(axis: Any, outcome: Outcome, zero: int, look: dict[str, Any]) -> None:
    """The guaranteed curve, at the bottom of the axis where it is zero, which it says."""
    run = outcome.run
    shown = [value for value in (*run.loss, *run.guaranteed) if 0.0 < value < float("inf")]
    floor = min(shown, default=1.0) / 10.0
    curve = [value if value > 0.0 else floor for value in run.guaranteed]
    places = range(zero, len(curve))
    axis.semilogy(
        *(run.times, curve, STYLES[1]), marker="v", markevery=list(places), clip_on=False, **look
    )
    axis.set_ylim(bottom=floor)
    word = f"0 from {'time' if run.kind == 'flow' else 'step'} {run.times[zero]:g}"
    axis.annotate(
        word,
        (run.times[zero], floor),
        xytext=(6, 6),
        textcoords="offset points",
        color=look["color"],
        fontsize=8,
    )


def _conditioning(axis: Any, outcome: Outcome) -> None:
    run = outcome.run
    rows = (
        (run.pl, r"$\|\nabla L\|^2/(2L)$"),
        (run.kernel, r"$\lambda_{\min}(K)$"),
        (tuple(s * s for s in run.features), r"$\sigma_{\min}(Z)^2$"),
    )
    for (values, label), color, style in zip(rows, COLORS, STYLES, strict=False):
        axis.semilogy(run.times, _positive(values), style, color=color, label=label)
    if run.lambda0 > 0:
        axis.axhline(run.lambda0**2 / 4, color=GRAY, linestyle=":", label=r"$\lambda_0^2/4$")
    axis.set_ylabel("conditioning")
    plain_ticks(axis)
    axis.legend(fontsize=7)


def _radii(axis: Any, outcome: Outcome) -> None:
    run, radii = outcome.run, outcome.report.radii
    for index, (name, values) in enumerate(run.moved.items()):
        radius = getattr(radii, "U" if name == "b" else name)
        shares = [value / radius for value in values]
        if max(shares) == 0.0:
            continue  # a parameter that never moves has no place on a log axis
        style = STYLES[index % len(STYLES)]
        label = rf"$\|{_SYMBOLS[name]}-{_SYMBOLS[name]}(0)\|_F/R_{{{name}}}$"
        axis.semilogy(run.times, _positive(shares), style, color=COLORS[index], label=label)
    axis.axhline(1.0, color=GRAY, linestyle=":", label="the ball's edge")
    axis.set_ylabel("share of the radius")
    plain_ticks(axis)
    axis.legend(fontsize=7)


def _positive(values: Any) -> list[float]:
    """NaN, which is not drawn, for what a log axis cannot show."""
    return [value if value > 0 else float("nan") for value in values]
