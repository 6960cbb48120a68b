"""Train a stack of six GEQ layers on CIFAR-10 and certify it: do the layers learn, and how fast?

    python benchmarks/geq_cifar.py --data FOLDER --epochs 9 --out results

FOLDER contains CIFAR-10 as Parquet (columns img, label; two training shards and a test shard).
Writes geq_cifar.json: accuracy by epoch, training images per second, residual and certificate at
the end.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

try:
    import equilibria as eq
except ImportError:
    sys.path.insert(0, str(Path(__file__).parent.parent / "src"))
    import equilibria as eq


def load(folder: Path, split: str) -> tuple[Tensor, Tensor]:
    """Images [N, 3, 32, 32] uint8 and labels [N] of a split."""
    import numpy as np
    import pyarrow.parquet as pq
    from PIL import Image

    def decode(row: dict[str, bytes]) -> Any:
        return np.asarray(Image.open(io.BytesIO(row["bytes"])).convert("RGB"))

    images, labels = [], []
    for file in sorted(folder.glob(f"{split}-*.parquet")):
        table = pq.read_table(file)
        with ThreadPoolExecutor(16) as pool:
            images.append(np.stack(list(pool.map(decode, table["img"].to_pylist()))))
        labels.append(table["label"].to_numpy())
    if not images:
        raise SystemExit(f"no {split}-*.parquet in {folder}")
    stacked = torch.from_numpy(np.concatenate(images)).permute(0, 3, 1, 2).contiguous()
    return stacked, torch.from_numpy(np.concatenate(labels)).long()


class Block(nn.Module):
    """x ↦ skip(x) + GEQ(norm(x))."""

    def __init__(self, before: int, after: int, bound: float, steps: int, phantom: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(before)
        self.skip = nn.Identity() if before == after else nn.Conv2d(before, after, 1, bias=False)
        self.geq = eq.nn.GEQ(
            after,
            after,
            in_channels=before,
            patch=eq.Patches(channels=8, size=2),
            constraint=eq.nn.NormBounded(bound=bound),
            solver=eq.Picard(rtol=0.0, atol=0.0, max_steps=steps, damping=0.8),
            adjoint=eq.Phantom(steps=phantom, damping=0.8),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.skip(x) + self.geq(self.norm(x))


def network(bound: float, steps: int, phantom: int) -> nn.Sequential:
    def block(before: int, after: int) -> Block:
        return Block(before, after, bound, steps, phantom)

    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1, bias=False),
        block(64, 64),
        block(64, 64),
        nn.AvgPool2d(2),
        block(64, 128),
        block(128, 128),
        nn.AvgPool2d(2),
        block(128, 256),
        block(256, 256),
        nn.BatchNorm2d(256),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


def augment(x: Tensor) -> Tensor:
    """Crop, flip and cutout of a batch, each sample separately, on its device."""
    n, _, h, w = x.shape
    padded = nn.functional.pad(x, (4, 4, 4, 4), mode="reflect")
    shift = torch.randint(0, 9, (2, n), device=x.device)
    rows = shift[0].view(-1, 1) + torch.arange(h, device=x.device)
    columns = shift[1].view(-1, 1) + torch.arange(w, device=x.device)
    flip = torch.rand(n, 1, device=x.device) < 0.5
    columns = torch.where(flip, columns.flip(1), columns)
    sample = torch.arange(n, device=x.device).view(-1, 1, 1)
    out = padded[sample, :, rows.unsqueeze(2), columns.unsqueeze(1)].permute(0, 3, 1, 2)
    corner = torch.randint(-4, 29, (2, n, 1), device=x.device)
    along = torch.arange(h, device=x.device)
    cut = [(along >= c) & (along < c + 8) for c in corner]
    return out.masked_fill((cut[0].unsqueeze(2) & cut[1].unsqueeze(1)).unsqueeze(1), 0.0)


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    right = 0
    for x, y in zip(images.split(1000), labels.split(1000), strict=True):
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            right += int((model(x).argmax(1) == y).sum())
    model.train()
    return right / len(labels)


def run(options: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(options.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    folder = Path(options.data)
    (train, train_y), (test, test_y) = load(folder, "train"), load(folder, "test")
    mean = torch.tensor([125.307, 122.950, 113.865], device=device).view(1, 3, 1, 1)

    def prepare(x: Tensor) -> Tensor:
        return ((x.to(device).float() - mean) / 63.0).to(memory_format=torch.channels_last)

    train, test, train_y, test_y = (
        prepare(train),
        prepare(test),
        train_y.to(device),
        test_y.to(device),
    )
    model = network(options.bound, options.steps, options.phantom).to(device)
    model = model.to(memory_format=torch.channels_last)
    size = sum(p.numel() for p in model.parameters())
    called: Any = torch.compile(model) if options.compile else model
    steps = options.epochs * (len(train) // options.batch)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=options.lr, momentum=0.9, nesterov=True, weight_decay=5e-4
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=options.lr, total_steps=steps, pct_start=0.25
    )
    record: dict[str, Any] = {"parameters": size, "epochs": []}
    for epoch in range(options.epochs):
        if device.type == "cuda":
            torch.cuda.synchronize()
        began, seen, total = time.perf_counter(), 0, torch.zeros((), device=device)
        order = torch.randperm(len(train), device=device)
        for index in order[: len(train) // options.batch * options.batch].split(options.batch):
            with torch.autocast(device.type, dtype=torch.bfloat16):
                logits = called(augment(train[index]))
                loss = nn.functional.cross_entropy(logits, train_y[index], label_smoothing=0.1)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
            seen += len(index)
            total += loss.detach()
        if device.type == "cuda":
            torch.cuda.synchronize()
        speed = seen / (time.perf_counter() - began)
        row = {
            "epoch": epoch + 1,
            "loss": float(total) * options.batch / seen,
            "images_per_second": round(speed),
            "test_accuracy": accuracy(model, test, test_y),
        }
        record["epochs"].append(row)
        print(row, flush=True)
        write(options, record)
    record["certificates"] = certificates(model, test[:64])
    write(options, record)
    return record


def certificates(model: nn.Sequential, x: Tensor) -> list[dict[str, Any]]:
    """Each layer's certificate on its own input, at the z it returns and at a converged one."""
    model.eval()
    found = []
    for stage in model:
        if isinstance(stage, Block):
            given = stage.norm(x).detach()
            short = eq.certify(stage.geq, given)
            stage.geq.solver = eq.Auto(rtol=1e-6)
            full = eq.certify(stage.geq, given)
            found.append(
                {
                    "kind": str(full.kind),
                    "unique": full.unique,
                    "contraction": float(full.contraction),
                    "modulus": float(full.modulus),
                    "error_bound_median_fixed_steps": float(short.error_bound.median()),
                    "error_bound_median_converged": float(full.error_bound.median()),
                    "norm_of_z_median": float(stage.geq(given).flatten(1).norm(dim=1).median()),
                    "solver": full.solver,
                }
            )
        with torch.no_grad():
            x = stage(x)
    return found


def write(options: argparse.Namespace, record: dict[str, Any]) -> None:
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    about = {
        "command": "python benchmarks/geq_cifar.py " + " ".join(sys.argv[1:]),
        "commit": options.commit or git.stdout.strip(),
        "torch": torch.__version__,
        "machine": machine,
        "options": {k: v for k, v in vars(options).items() if k not in ("data", "out")},
    }
    Path(options.out).mkdir(parents=True, exist_ok=True)
    path = Path(options.out) / f"geq_cifar{options.tag}.json"
    path.write_text(json.dumps({**about, **record}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", required=True, help="folder with the Parquet files")
    parser.add_argument("--out", default="results")
    parser.add_argument("--tag", default="", help="added to the name of the result")
    parser.add_argument("--epochs", type=int, default=9)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--lr", type=float, default=0.3)
    parser.add_argument("--bound", type=float, default=1.2, help="on the norm of W; below 1.4969")
    parser.add_argument("--steps", type=int, default=4, help="evaluations of the forward solve")
    parser.add_argument("--phantom", type=int, default=3, help="evaluations with a graph")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", default="", help="recorded where git is not at hand")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
