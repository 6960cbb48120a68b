"""Every figure of evaluation. Colors of Okabe and Ito and viridis, safe for color-blind eyes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.data.image_data import ImageData
from equilibria.engine.files import write_bytes
from equilibria.engine.optional import needs

from .corruptions import SEVERITIES, check_kinds, check_severities, corrupt
from .layer_solvers import SolverStatistics, layer_label
from .metrics import Reliability
from .model_on_data import check_pair, device_of, evaluating, model_input
from .saliency import gradcam, gradcam_layer

BLUE, ORANGE, GRAY = "#0072B2", "#E69F00", "#666666"
_NAMED = 40
"""Up to how many classes are named along an axis."""
_WRITTEN = 12
"""Up to how many classes have their numbers in the confusion matrix."""


def _figure(width: float, height: float) -> Any:
    """A new figure, in inches, drawn by Agg: no window, no state shared with the user's plots."""
    with needs("matplotlib", "A picture", extra="analysis"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Any, path: Path | str) -> Path:
    stream = BytesIO()
    figure.savefig(stream, dpi=150, format="png")
    return write_bytes(path, stream.getvalue())


def _pixels(image: Tensor) -> Any:
    """uint8 [C, H, W], C 1 or 3, as imshow takes it: [H, W] or [H, W, 3]."""
    return image.cpu().permute(1, 2, 0).squeeze(2).numpy()


def _write_numbers(axes: Any, percents: Tensor) -> None:
    """The positive numbers of a matrix [rows, columns] in its cells, on viridis of 0 … 100."""
    for row, column in (percents > 0).nonzero().tolist():
        value = float(percents[row, column])
        color = "black" if value > 60 else "white"
        axes.text(column, row, f"{value:.0f}", color=color, ha="center", va="center", fontsize=7)


def save_reliability(reliability: Reliability, path: Path, title: str) -> Path:
    """Accuracy against confidence, bin by bin, over the histogram of confidences."""
    figure = _figure(5.0, 5.6)
    top, low = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    edges, used = reliability.edges, reliability.count > 0
    accuracy, confidence = (
        v[used].tolist() for v in (reliability.accuracy, reliability.confidence)
    )
    left, width = edges[:-1].numpy(), edges.diff().numpy()
    top.plot([0, 1], [0, 1], color=GRAY, linestyle="--", linewidth=1, label="perfect")
    bars = {"align": "edge", "color": BLUE, "edgecolor": "white", "linewidth": 0.5}
    top.bar(left[used.numpy()], accuracy, width[used.numpy()], label="accuracy", **bars)
    line = {"color": ORANGE, "marker": "o", "markersize": 4, "linewidth": 1.2}
    top.plot(confidence, accuracy, label="at the bin's mean confidence", **line)
    top.set(xlim=(0, 1), ylim=(0, 1.02), ylabel="accuracy in the bin")
    top.set_title(f"{title}\nexpected calibration error {reliability.ece:.4f}", fontsize=10)
    top.legend(loc="upper left", fontsize=8)
    share = reliability.count.double() / reliability.count.sum().clamp_min(1)
    low.bar(left, share.numpy(), width, align="edge", color=GRAY)
    low.set(xlabel="confidence of the prediction", ylabel="share of samples")
    return _save(figure, path)


def save_confusion(confusion: Tensor, classes: Sequence[str], path: Path, title: str) -> Path:
    """Share of each class (row) that was predicted as each class (column)."""
    count = len(classes)
    side = min(14.0, max(4.5, 2.2 + 0.42 * count))
    figure = _figure(side + 1.0, side)
    axes = figure.subplots()
    share = confusion.double() / confusion.sum(1, keepdim=True)
    image = axes.imshow(share.numpy(), vmin=0, vmax=1, cmap="viridis")
    figure.colorbar(image, ax=axes, shrink=0.8, label="share of the class")
    axes.set(xlabel="predicted", ylabel="true")
    axes.set_title(title, fontsize=10)
    if count <= _NAMED:
        axes.set_xticks(range(count), classes, rotation=90, fontsize=8)
        axes.set_yticks(range(count), classes, fontsize=8)
    if count <= _WRITTEN:
        _write_numbers(axes, 100 * share)
    return _save(figure, path)


def save_per_class(
    values: Tensor, classes: Sequence[str], what: str, path: Path, title: str
) -> Path:
    """Bars from the best class to the worst; classes without a value are left out."""
    order = values.nan_to_num(-1.0).argsort(descending=True)
    order = order[~values[order].isnan()]
    count, mean = len(order), float(values.nanmean())
    figure = _figure(6.0, min(20.0, max(2.4, 1.2 + 0.22 * count)))
    axes = figure.subplots()
    axes.barh(range(count), values[order].numpy(), color=BLUE)
    axes.axvline(mean, color=ORANGE, linewidth=2)
    names = [classes[k] for k in order.tolist()]
    axes.set_yticks(range(count), names, fontsize=8 if count <= _NAMED else 6)
    axes.set(xlim=(0, 1.01), xlabel=f"{what} of the class", ylim=(count - 0.4, -0.6))
    axes.set_title(f"{title}\nmean of the classes (line): {100 * mean:.1f}%", fontsize=10)
    return _save(figure, path)


def save_steps(sets: Mapping[str, Mapping[str, SolverStatistics]], path: Path, title: str) -> Path:
    """Per layer: how many steps solves took, and the residuals that they ended with."""
    names = list(next(iter(sets.values())))
    figure = _figure(9.0, max(2.6, 1.4 + 0.36 * len(names) * len(sets)))
    left, right = figure.subplots(1, 2, sharey=True)
    for number, (label, statistics) in enumerate(sets.items()):
        color, shift = (BLUE, ORANGE)[number], (number - (len(sets) - 1) / 2) * 0.8 / len(sets)
        for place, name in enumerate(names):
            part, y = statistics[name], place + shift
            steps = part.histogram.nonzero()[:, 0]
            # The area of a dot is the share of solves that took so many steps.
            area = 12 + 120 * part.histogram[steps].double() / part.solves
            left.scatter(steps.numpy(), [y] * len(steps), s=area.numpy(), color=color)
            ends = part.residual.clamp_min(1e-17).tolist()
            right.plot([ends[1], ends[5]], [y, y], color=color, linewidth=4, alpha=0.45)
            right.plot(ends[3], y, "o", color=color, label=label if place == 0 else None)
    left.set_yticks(range(len(names)), [layer_label(n) for n in names], fontsize=8)
    left.set(xlabel="steps (area: share of solves)", ylim=(len(names) - 0.4, -0.6))
    most = max(part.max_steps for each in sets.values() for part in each.values())
    left.set_xlim(0, 1.06 * most + 0.5)
    right.set(xscale="log", xlabel="relative residual: median, and 5% to 95%")
    if len(sets) > 1:
        right.legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    return _save(figure, path)


def save_accuracies(
    accuracy: Tensor,
    clean: float,
    kinds: Sequence[str],
    severities: Sequence[int],
    path: Path,
    title: str,
) -> Path:
    """Of [kinds, severities]: left the mean of each kind against the clean one, right every one."""
    rows, percents = range(len(kinds)), 100 * accuracy
    figure = _figure(9.5, max(2.6, 1.5 + 0.27 * len(kinds)))
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[1.3, 1.0])
    left.barh(rows, percents.mean(1).numpy(), color=BLUE)
    left.axvline(100 * clean, color=ORANGE, linewidth=2)
    left.set_yticks(rows, [kind.replace("_", " ") for kind in kinds], fontsize=8)
    left.set(xlim=(0, 101), xlabel="accuracy in %, mean over severities")
    left.set_ylim(len(kinds) - 0.4, -0.6)
    shown = right.imshow(percents.numpy(), vmin=0, vmax=100, cmap="viridis", aspect="auto")
    _write_numbers(right, percents)
    right.set_xticks(range(len(severities)), [str(s) for s in severities])
    right.set_xlabel("severity")
    figure.colorbar(shown, ax=right, label="accuracy in %")
    figure.suptitle(title, fontsize=10)
    return _save(figure, path)


def save_certified(right: Tensor, radius: Tensor, norm: str, path: Path | str, title: str) -> Path:
    """Accuracy that is proven, over the radius: a step down at each right sample's radius."""
    reached = radius[right & radius.isfinite()].sort().values.double()
    share = 100.0 * torch.arange(len(reached), -1, -1, dtype=torch.float64) / max(len(right), 1)
    where = torch.cat([torch.zeros(1, dtype=torch.float64), reached])
    figure = _figure(6.0, 3.6)
    axes = figure.subplots()
    axes.step(where.numpy(), share.numpy(), where="post", color=BLUE)
    axes.fill_between(where.numpy(), share.numpy(), step="post", color=BLUE, alpha=0.15)
    for k in (36, 72, 108):
        if len(reached) and k / 255 <= float(where[-1]):
            axes.axvline(k / 255, color=GRAY, linewidth=0.8, linestyle=":")
            axes.text(k / 255, 101, f"{k}/255", color=GRAY, fontsize=7, ha="center")
    kind = "ℓ∞" if norm == "inf" else "ℓ2"
    axes.set(xlabel=f"radius ({kind}, pixels from 0 to 1)", ylabel="certified accuracy in %")
    axes.set(xlim=(0, None), ylim=(0, 100))
    figure.suptitle(title, fontsize=10)
    return _save(figure, path)


def save_corruption_sheet(
    image: Tensor,
    path: Path | str,
    kinds: Sequence[str] | None = None,
    severities: Sequence[int] = SEVERITIES,
    *,
    seed: int = 0,
) -> Path:
    """Draw a uint8 image [C, H, W] under every kind (None: all 19) at every severity.

    One row a kind, one column a severity. The folder of ``path`` is made if missing.
    """
    names, levels = check_kinds(kinds), check_severities(severities)
    if image.ndim != 3:
        raise ValueError(f"expected one image [C, H, W], got shape {tuple(image.shape)}.")
    figure = _figure(1.1 * (len(levels) + 1) + 1.6, 1.06 * len(names) + 0.5)
    axes = figure.subplots(len(names), len(levels) + 1, squeeze=False)
    for row, kind in enumerate(names):
        for column, level in enumerate((0, *levels)):
            shown = image[None]
            if level:
                shown = corrupt(shown, kind, level, seed=seed)
            one = axes[row, column]
            one.imshow(_pixels(shown[0]), cmap="gray", vmin=0, vmax=255, interpolation="nearest")
            one.set(xticks=[], yticks=[])
            if row == 0:
                one.set_title(str(level) if level else "clean", fontsize=9)
        label = kind.replace("_", " ")
        axes[row, 0].set_ylabel(label, rotation=0, ha="right", va="center", fontsize=8)
    return _save(figure, path)


def save_gradcam(
    model: nn.Module,
    dataset: ImageData,
    path: Path | str,
    *,
    index: Sequence[int] = range(8),
    target: int | Tensor | None = None,
    layer: str | nn.Module | None = None,
    **options: Any,
) -> Path:
    """Draw the images ``index`` of ``dataset``, and under each its map with truth and prediction.

    ``options`` go to ``gradcam``. The folder of ``path`` is made if missing.
    """
    check_pair(model, dataset, task="classification")
    chosen = [i for i in index if i < len(dataset)]
    if not chosen:
        raise ValueError(
            f"index={list(index)!r} names no image: {dataset.name} has the numbers 0 to "
            f"{len(dataset) - 1}."
        )
    part = dataset.subset(chosen)
    rows = torch.arange(len(part))
    images, targets = part.images[rows], part.targets[rows]
    x = model_input(model, part, images.to(device_of(model)))
    maps = gradcam(model, x, target, layer, **options).float().cpu()
    with torch.no_grad(), evaluating(model):
        confidence, predicted = model(x).float().softmax(1).max(1)
    name = gradcam_layer(model, x) if layer is None else layer
    name = name if isinstance(name, str) else type(name).__name__

    figure = _figure(1.6 * len(part) + 1.0, 4.2)
    axes = figure.subplots(2, len(part), squeeze=False)
    for column in range(len(part)):
        top, low = axes[:, column]
        truth, guess = int(targets[column]), int(predicted[column])
        for one in (top, low):
            one.imshow(_pixels(images[column]), cmap="gray")
            one.set_axis_off()
        drawn = low.imshow(maps[column].numpy(), cmap="viridis", alpha=0.6, vmin=0, vmax=1)
        top.set_title(dataset.classes[truth], fontsize=8)
        said = f"{dataset.classes[guess]} {100 * float(confidence[column]):.0f}%"
        low.set_title(said if guess == truth else f"✗ {said}", fontsize=8)
    figure.colorbar(drawn, ax=axes[1, :].tolist(), shrink=0.8, label="importance")
    explained = "the predicted class" if target is None else "the class asked for"
    figure.suptitle(
        f"GradCAM at {name or 'the model'}: above image and class, below prediction and where "
        f"{explained} comes from",
        fontsize=9,
    )
    return _save(figure, path)
