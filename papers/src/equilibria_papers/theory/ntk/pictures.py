"""Pictures of tangent kernels: spectra, shares of layers, drift, predicted and actual training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from equilibria_papers.theory.pictures import (
    COLORS,
    GRAY,
    MARKERS,
    STYLES,
    new_figure,
    save_picture,
)
from equilibria_papers.theory.scales import plain_ticks

from .dynamics import TrainingComparison
from .spectrum import Spectrum

__all__ = ["save_drift", "save_shares", "save_spectra", "save_training"]

_MOST = 24
"""Bars that can be read in a picture of one page; the rest is summed up."""


def _axes(width: float = 5.2, height: float = 3.6) -> tuple[Any, Any]:
    figure = new_figure(width, height)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save_spectra(spectra: Mapping[str, Spectrum], stem: Path) -> list[Path]:
    """Eigenvalues, largest first, of one kernel or several, on logarithmic axes."""
    columns = 1 if len(spectra) < 3 else 2
    figure, axes = _axes(5.2, 3.6 + 0.2 * -(-len(spectra) // columns))
    for i, (name, found) in enumerate(spectra.items()):
        values = found.eigenvalues[: found.rank].tolist()
        axes.loglog(
            range(1, len(values) + 1),
            values,
            color=COLORS[i % len(COLORS)],
            linestyle=STYLES[i % len(STYLES)],
            label=f"{name} (effective rank {found.effective_rank:.3g})",
        )
    axes.set(xlabel="index", ylabel="eigenvalue of the tangent kernel")
    plain_ticks(axes)
    # Below: inside it would lie on a curve that falls from corner to corner.
    figure.legend(loc="outside lower center", ncols=columns, fontsize=8, frameon=False)
    return save_picture(figure, stem)


def save_shares(
    shares: Mapping[str, float], sizes: Mapping[str, int], stem: Path, *, name: str = ""
) -> list[Path]:
    """tr K_layer/tr K beside the layer's share of the parameters, the largest on top.

    ``name`` is of the network, for the title.
    """
    ranked = sorted(shares, key=lambda name: -shares[name])
    kept, rest = ranked[:_MOST], ranked[_MOST:]
    total = sum(sizes.values())
    of_trace = [shares[n] for n in kept]
    of_size = [sizes[n] / total for n in kept]
    if rest:
        kept = [*kept, f"{len(rest)} others"]
        of_trace.append(sum(shares[n] for n in rest))
        of_size.append(sum(sizes[n] for n in rest) / total)
    figure, axes = _axes(5.2, 1.2 + 0.24 * len(kept))
    rows = range(len(kept))
    axes.barh(
        [r - 0.2 for r in rows], of_trace, 0.4, color=COLORS[0], label="of the kernel's trace"
    )
    axes.barh(
        [r + 0.2 for r in rows],
        of_size,
        0.4,
        color=COLORS[1],
        hatch="//",
        edgecolor="white",
        label="of the parameters",
    )
    axes.set_yticks(list(rows), kept)
    axes.invert_yaxis()
    axes.set_xlabel("share")
    axes.set_title(name, fontsize="medium")
    axes.legend(frameon=False, loc="lower right")
    return save_picture(figure, stem)


def save_drift(
    names: Sequence[str], drift: Sequence[float], distance: Sequence[float], stem: Path
) -> list[Path]:
    """‖K − K_0‖/‖K_0‖ and 1 − cos∠(K, K_0) of the kernels of several networks."""
    figure, axes = _axes()
    places = range(len(names))
    for i, (values, label) in enumerate(
        ((drift, "drift ‖K − K₀‖/‖K₀‖"), (distance, "distance 1 − cos∠(K, K₀)"))
    ):
        axes.plot(
            places, values, color=COLORS[i], linestyle=STYLES[i], marker=MARKERS[i], label=label
        )
    axes.set_xticks(list(places), names, rotation=20 if max(map(len, names)) > 8 else 0)
    axes.set_ylabel("from the first network's kernel")
    axes.legend(frameon=False)
    return save_picture(figure, stem)


def save_training(found: TrainingComparison, stem: Path) -> list[Path]:
    """The loss of gradient descent, beside that of the linear model."""
    figure, axes = _axes()
    steps = found.steps.tolist()
    axes.semilogy(steps, found.actual.tolist(), color=COLORS[0], label="network")
    axes.semilogy(
        steps,
        found.predicted.tolist(),
        color=COLORS[4],
        linestyle="--",
        label="predicted by the kernel at step 0",
    )
    axes.set(xlabel="step of gradient descent", ylabel="loss")
    plain_ticks(axes)
    axes.legend(frameon=False)
    said = "it diverged" if found.diverged else f"drift of the kernel {found.drift:.2g}"
    axes.set_title(said, loc="right", color=GRAY, fontsize="medium")
    return save_picture(figure, stem)
