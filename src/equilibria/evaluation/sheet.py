"""A contact sheet of corruptions: one row a kind, one column a severity."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from .corruptions import SEVERITIES, Scale, check_kinds, check_severities, corrupt
from .extras import matplotlib_figure
from .pictures import save_figure
from .saliency_picture import _shown

__all__ = ["save_corruption_sheet"]


def save_corruption_sheet(
    image: Tensor,
    path: Path | str,
    kinds: Sequence[str] | None = None,
    severities: Sequence[int] = SEVERITIES,
    *,
    seed: int = 0,
    scale: Scale | None = None,
) -> Path:
    """Draw a uint8 image [C, H, W] under every kind (None: all 19) at every severity."""
    names, levels = check_kinds(kinds), check_severities(severities)
    if image.ndim != 3:
        raise ValueError(f"expected one image [C, H, W], got shape {tuple(image.shape)}.")
    figure = matplotlib_figure(1.1 * (len(levels) + 1) + 1.6, 1.06 * len(names) + 0.5)
    axes = figure.subplots(len(names), len(levels) + 1, squeeze=False)
    for row, kind in enumerate(names):
        made = [image] + [
            corrupt(image[None], kind, level, seed=seed, scale=scale)[0] for level in levels
        ]
        for column, shown in enumerate(made):
            one = axes[row, column]
            one.imshow(_shown(shown), cmap="gray", vmin=0, vmax=255, interpolation="nearest")
            one.set(xticks=[], yticks=[])
            if row == 0:
                one.set_title("clean" if column == 0 else f"{levels[column - 1]}", fontsize=9)
        label = kind.replace("_", " ")
        axes[row, 0].set_ylabel(label, rotation=0, ha="right", va="center", fontsize=8)
    out = Path(path)
    out.parent.mkdir(parents=True, exist_ok=True)
    return save_figure(figure, out)
