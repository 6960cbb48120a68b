r"""Is a network better with few steps if it was trained with a random number of them?

    python benchmarks/random_steps.py --data-root FOLDER

Trains small stacks of GEQ layers on a part of CIFAR-10: with three steps a layer, with one, and
with one to three, drawn anew for each batch. Each is then judged on held-out images with one, two
and three steps: of the length it was trained with, and of the length that ``nn.calibrate_steps``
finds on 256 training images. Writes the JSON file anew after each training.
"""

from __future__ import annotations

import copy
import random
import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from _record import commit, parser, write

from equilibria import data, nn
from equilibria.evaluation import evaluate, model_input
from equilibria.training import TrainConfig, fit

STEPS = (1, 2, 3)
TAUS = (0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2)
VARIANTS = {"three": (3,), "one": (1,), "one to three, random": STEPS}
OPTIONS = {"widths": (24, 48, 96), "depth": 1, "norm": "after"}


class DrawSteps(pl.Callback):
    """Another number of steps for each training batch; three for everything else."""

    def __init__(self, choices: tuple[int, ...], seed: int) -> None:
        self.choices, self.random = choices, random.Random(seed)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        nn.set_steps(pl_module.model, self.random.choice(self.choices))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        nn.set_steps(pl_module.model, max(STEPS))


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--data-root", type=Path, required=True)
    options.add_argument("--samples", type=int, default=6_000)
    options.add_argument("--epochs", type=int, default=8)
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    given = options.parse_args()
    settings = {"samples": given.samples, "epochs": given.epochs, "batch_size": 128, "lr": 0.1}
    whole = data.load("cifar10", "train", root=given.data_root, progress=False)
    rest, held_out = whole.split(0.05, 0)
    train = rest.subset(rest.few(given.samples))
    record: dict[str, Any] = {
        "command": "python benchmarks/random_steps.py --data-root FOLDER",
        "commit": commit(),
        "torch": torch.__version__,
        "network": {"model": "geq_stack_cifar_3m", "model_options": OPTIONS},
        "recipe": settings,
        "held_out": len(held_out),
        "runs": [],
    }
    for seed in given.seeds:
        for name, choices in VARIANTS.items():
            with tempfile.TemporaryDirectory() as folder:
                config = TrainConfig(
                    model="geq_stack_cifar_3m",
                    model_options=OPTIONS,
                    augment=("crop", "flip"),
                    validation=0.0,
                    label_smoothing=0.1,
                    channels_last=True,
                    accelerator="cpu",
                    seed=seed,
                    out=folder,
                    **{k: v for k, v in settings.items() if k != "samples"},
                )
                made = fit(
                    config,
                    data=(train, None),
                    callbacks=[DrawSteps(choices, seed)],
                    progress=False,
                ).model
            record["runs"].append(
                {"trained with": name, "seed": seed, **judged(made, train, held_out)}
            )
            print(record["runs"][-1], flush=True)
            write(given.out / "random_steps.json", record)


def judged(model: torch.nn.Module, train: Any, held_out: Any) -> dict[str, Any]:
    """Accuracies with each number of steps, of the length as trained and of a calibrated one."""
    inputs = model_input(model, train, train.images[:256])
    found: dict[str, Any] = {}
    for steps in STEPS:
        own = nn.set_steps(copy.deepcopy(model), steps)
        found[f"{steps} as trained"] = accuracy(own, held_out)
        fitted, tau = nn.calibrate_steps(copy.deepcopy(model), inputs, steps, taus=TAUS)
        found[f"{steps} calibrated"] = {"tau": tau, "accuracy": accuracy(fitted, held_out)}
    return found


def accuracy(model: torch.nn.Module, images: Any) -> float:
    report = evaluate(model, images, certify=0, progress=False)
    return round(100 * float(report.metrics.accuracy), 2)


if __name__ == "__main__":
    main()
