r"""Does a gradient through γ change accuracy? Short trainings with γ detached and not.

    python benchmarks/gamma_gradient.py --data-root FOLDER --epochs 10 --seeds 0 1 2

The recipe is that of results/cifar10_geq_stack_5m_after (one-cycle SGD, crop, flip, cutout, label
smoothing, bf16, a tenth held out), for the epochs given. Accuracy is measured on held-out images.
Writes a JSON file after each training; a second call with the same file continues where the first
stopped. Without a GPU, as a smoke test:

    python benchmarks/gamma_gradient.py --data digits --models geq_stack_digits \
        --samples 64 --epochs 1 --seeds 0 --batch-size 32 --out gamma_gradient_smoke.json
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from _record import commit, write

import equilibria as eq
from equilibria.training import TrainConfig, fit

VARIANTS = {
    "passes": eq.MeanPatchEnergy(0.2),
    "detached": eq.MeanPatchEnergy(0.2, detach=True),
}


def config(options: argparse.Namespace, model: str, variant: str, seed: int, out: str) -> Any:
    """The published recipe; on a CPU in float32, without CUDA graphs."""
    cuda = torch.cuda.is_available()
    chosen: dict[str, Any] = {"gamma": VARIANTS[variant]}
    if "stack" in model:
        chosen["norm"] = "after"
    elif "cifar" in model:
        chosen["reading"] = "chain"
    # Digits and the like are too small, and not made, to be flipped and cut.
    augment = ("crop", "flip", {"cutout": {"size": 16}}) if "cifar" in options.data else ()
    return TrainConfig(
        model=model,
        model_options=chosen,
        data=options.data,
        data_root=options.data_root,
        validation=0.1,
        samples=options.samples,
        augment=augment,
        epochs=options.epochs,
        batch_size=options.batch_size,
        lr=options.lr,
        label_smoothing=0.1,
        precision="bf16-mixed" if cuda else "32-true",
        channels_last=True,
        cuda_graphs=cuda and options.cuda_graphs,
        accelerator="cuda" if cuda else "cpu",
        seed=seed,
        out=out,
    )


def train(options: argparse.Namespace, model: str, variant: str, seed: int) -> dict[str, Any]:
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        result = fit(config(options, model, variant, seed, folder), progress=False)
    speeds = [row["images_per_second"] for row in result.history]
    return {
        "model": model,
        "gamma": variant,
        "seed": seed,
        "held_out_accuracy": result.metrics["val_accuracy"],
        "held_out_loss": result.metrics["val_loss"],
        "train_loss": result.metrics["train_loss"],
        "accuracy_by_epoch": [row["val_accuracy"] for row in result.history],
        # The first epoch holds what is done once: kernels, graphs.
        "images_per_second": statistics.median(speeds[1:] or speeds),
        "seconds": round(time.perf_counter() - began, 1),
    }


def header(options: argparse.Namespace) -> dict[str, Any]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {
        "command": shlex.join(["python", "benchmarks/gamma_gradient.py", *sys.argv[1:]]),
        "commit": options.commit or commit(),
        "machine": f"{platform.system()} {platform.machine()}, {device}",
        "torch": str(torch.__version__),
        "recipe": {
            name: getattr(options, name)
            for name in ("data", "samples", "epochs", "batch_size", "lr", "cuda_graphs")
        },
    }


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean and standard deviation over the seeds."""
    found = []
    for model, variant in dict.fromkeys((run["model"], run["gamma"]) for run in runs):
        mine = [run for run in runs if (run["model"], run["gamma"]) == (model, variant)]
        accuracy = [run["held_out_accuracy"] for run in mine]
        found.append(
            {
                "model": model,
                "gamma": variant,
                "seeds": len(mine),
                "held_out_accuracy": statistics.mean(accuracy),
                "deviation": statistics.stdev(accuracy) if len(accuracy) > 1 else None,
                "images_per_second": statistics.median(run["images_per_second"] for run in mine),
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["geq_stack_cifar_3m", "geq_cifar_5m"])
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--data-root", help="the folder of the data sets")
    parser.add_argument("--samples", type=int, help="train on only so many images")
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--lr", type=float, default=0.2)
    parser.add_argument("--cuda-graphs", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--commit", help="where the checkout has no .git")
    parser.add_argument("--out", type=Path, default=Path("results/gamma_gradient.json"))
    options = parser.parse_args()
    record = header(options)
    runs: list[dict[str, Any]] = []
    if options.out.exists():
        kept = json.loads(options.out.read_text("utf-8"))
        if any(kept[name] != record[name] for name in ("recipe", "commit", "machine")):
            parser.error(f"{options.out} is of another recipe, commit or machine; name another.")
        runs = kept["runs"]
    done = {(run["model"], run["gamma"], run["seed"]) for run in runs}
    for seed in options.seeds:
        for model in options.models:
            for variant in options.variants:
                if (model, variant, seed) in done:
                    continue
                runs.append(train(options, model, variant, seed))
                print(runs[-1], flush=True)
                made = {**record, "summary": summary(runs), "runs": runs}
                write(options.out, made)
    for row in summary(runs):
        print(row)


if __name__ == "__main__":
    main()
