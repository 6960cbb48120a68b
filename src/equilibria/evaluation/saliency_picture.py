"""A picture of GradCAM maps over the images that they explain."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.data.image_data import ImageData

from .extras import matplotlib_figure
from .pictures import save_figure
from .running import check_pair, device_of, evaluating, model_input
from .saliency import gradcam, gradcam_layer

__all__ = ["save_gradcam"]


def _shown(image: Tensor) -> Any:
    """uint8 [C, H, W] as imshow takes it: [H, W] or [H, W, 3]."""
    pixels = image.cpu().permute(1, 2, 0)
    return (pixels[..., 0] if pixels.shape[-1] == 1 else pixels[..., :3]).numpy()


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
    images = part.images[torch.arange(len(part))]
    x = model_input(model, part, images.to(device_of(model)))
    maps = gradcam(model, x, target, layer, **options).float().cpu()
    with torch.no_grad(), evaluating(model):
        confidence, predicted = model(x).float().softmax(1).max(1)
    if layer is None:
        name = gradcam_layer(model, x)
    else:
        name = layer if isinstance(layer, str) else type(layer).__name__
    targets = part.targets[torch.arange(len(part))]

    figure = matplotlib_figure(1.6 * len(part) + 1.0, 4.2)
    axes = figure.subplots(2, len(part), squeeze=False)
    for column in range(len(part)):
        image, top, low = _shown(images[column]), axes[0, column], axes[1, column]
        top.imshow(image, cmap="gray")
        top.set_title(dataset.classes[int(targets[column])], fontsize=8)
        low.imshow(image, cmap="gray")
        drawn = low.imshow(maps[column].numpy(), cmap="viridis", alpha=0.6, vmin=0, vmax=1)
        guess = dataset.classes[int(predicted[column])]
        mark = "" if int(predicted[column]) == int(targets[column]) else "✗ "
        low.set_title(f"{mark}{guess} {100 * float(confidence[column]):.0f}%", fontsize=8)
    for one in axes.flat:
        one.set_axis_off()
    figure.colorbar(drawn, ax=axes[1, :].tolist(), shrink=0.8, label="importance")
    explained = "the predicted class" if target is None else "the class asked for"
    figure.suptitle(
        f"GradCAM at {name or 'the model'}: above image and class, below prediction and where "
        f"{explained} comes from",
        fontsize=9,
    )
    out = Path(path)
    out.parent.mkdir(parents=True, exist_ok=True)
    return save_figure(figure, out)
