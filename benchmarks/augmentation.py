"""Time our augmentations and kornia's, to decide which of them the data package uses.

    python benchmarks/augmentation.py            writes results/augmentation.json

A batch of 256 images 3×32×32 on the CPU, one thread; the minimum CPU time of the repeats, in
milliseconds. Our RandAugment draws the operations for each sample, kornia's for the whole batch.
kornia is in the extra ``bench``.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import kornia.augmentation as kornia
import torch
from _record import parser, save
from kornia.augmentation.auto import RandAugment
from kornia.augmentation.container import AugmentationSequential

from equilibria import data


def least(call: Callable[[], object], repeats: int = 15) -> float:
    call()
    found = []
    for _ in range(repeats):
        start = time.process_time()
        call()
        found.append(time.process_time() - start)
    return round(min(found) * 1e3, 2)


def measure() -> dict[str, dict[str, float]]:
    x, y = torch.rand(256, 3, 32, 32), torch.arange(256) % 10
    generator = torch.Generator().manual_seed(0)
    crop = kornia.RandomCrop((32, 32), padding=4, padding_mode="reflect")
    flip = kornia.RandomHorizontalFlip()
    # A square of 8 × 8: the same share of the area as our Cutout.
    cutout = kornia.RandomErasing(scale=(1 / 16, 1 / 16), ratio=(1.0, 1.0), p=1.0)
    mixup = kornia.RandomMixUpV2(data_keys=["input", "class"])
    cutmix = kornia.RandomCutMixV2(data_keys=["input", "class"], use_correct_lambda=True)
    zoom = kornia.RandomResizedCrop((32, 32), scale=(0.35, 1.0))
    jitter = kornia.ColorJiggle(0.4, 0.4, 0.4)
    rand = AugmentationSequential(RandAugment(n=2, m=9), data_keys=["input"])
    pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "crop": (lambda: data.Crop()(x, generator), lambda: crop(x)),
        "flip": (lambda: data.Flip()(x, generator), lambda: flip(x)),
        "cutout": (lambda: data.Cutout()(x, generator), lambda: cutout(x)),
        "resized_crop": (lambda: data.ResizedCrop()(x, generator), lambda: zoom(x)),
        "color_jitter": (lambda: data.ColorJitter()(x, generator), lambda: jitter(x)),
        "rand_augment": (lambda: data.RandAugment()(x, generator), lambda: rand(x)),
        "mixup": (lambda: data.Mixup(num_classes=10)(x, y, generator), lambda: mixup(x, y)),
        "cutmix": (lambda: data.CutMix(num_classes=10)(x, y, generator), lambda: cutmix(x, y)),
    }
    return {
        name: {"ours": least(ours), "kornia": least(theirs)}
        for name, (ours, theirs) in pairs.items()
    }


if __name__ == "__main__":
    options = parser(__doc__).parse_args()
    torch.set_num_threads(1)
    save("augmentation", options.out, milliseconds=measure())
