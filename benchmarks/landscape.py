"""How long does a loss landscape of a small MNIST DEQ take, and how does that grow?

    python benchmarks/landscape.py --root DATA --out results

Trains a DEQ of Nguyen 2022 (Eq 4.1) on MNIST, small enough for a CPU: a strided convolution to 7 ×
7 pixels, the fixed point, a linear head. Then measures its 51 × 51 landscape on 1,024 training
images with a solver tolerance of 1e-2, and the seconds per grid point over images, channels,
tolerance, batch size, and for a point evaluated by torch.func.vmap over weights. Reports wall time
and CPU time (all threads together); on a busy machine the CPU time divided by the number of threads
is close to the wall time on an idle one. With --seconds the script stops after this time, and the
same command continues. With --rows only this number of rows, spread evenly, is timed and the total
is estimated from them. Writes landscape.json and, if the grid is complete, its figures.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria_papers.theory import landscapes
from equilibria_papers.theory.landscapes.measuring import Scorer
from equilibria_papers.theory.pictures import save_picture

SOLVER = eq.Anderson(rtol=1e-2, max_steps=20)
# The same answers; samples that are done leave the batch.
FAST = eq.Anderson(rtol=1e-2, max_steps=20, compact=True)


def network(channels: int = 16) -> nn.Sequential:
    """28 × 28 → 7 × 7 × channels, z = f(z, x) of Eq 4.1, logits."""
    return nn.Sequential(
        nn.Conv2d(1, channels, 5, stride=4, padding=2),
        nn.BatchNorm2d(channels),
        eq.nn.DEQ(
            eq.nn.ResidualBlock(channels, channels, groups=4),
            solver=SOLVER,
            adjoint=eq.Implicit(solver=eq.GMRES(rtol=1e-2)),
        ),
        nn.BatchNorm2d(channels),
        nn.Flatten(),
        nn.Linear(channels * 49, 10),
    )


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int) -> None:
    """Adam, 1e-3 on a cosine to zero, batches of 100, as in the thesis."""
    model.train()
    per_epoch = -(-len(x) // 100)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * per_epoch)
    for _ in range(epochs):
        for index in torch.randperm(len(x)).split(100):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[index]), y[index]).backward()
            optimizer.step()
            schedule.step()
    model.eval()


def images(dataset: Any, count: int | None = None) -> tuple[Tensor, Tensor]:
    part = dataset if count is None else dataset.subset(range(count))
    return part.normalize(part.images), part.targets


class Clock:
    def __enter__(self) -> Clock:
        self.wall, self.cpu = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall, self.cpu = time.perf_counter() - self.wall, time.process_time() - self.cpu


class Enough(Exception):
    """The time limit is reached."""


def point_cost(scorer: Scorer, points: int = 4) -> dict[str, float]:
    """Seconds per grid point, of four points at three distances from the center."""
    places = [(0.1, 0.0), (0.5, -0.5), (-0.5, 0.5), (1.0, 1.0)][:points]
    scorer.at(0.0, 0.0)
    with Clock() as clock:
        steps = [float(scorer.at(*place)[-1]) for place in places]
    return {
        "wall_s": clock.wall / points,
        "cpu_s": clock.cpu / points,
        "steps": sum(steps) / points,
    }


def vmap_cost(model: nn.Module, x: Tensor, y: Tensor, chunk: int) -> dict[str, float]:
    """The same four points at once: torch.func.vmap over the weights of the network."""
    first, second = landscapes.random_directions(model, 2)
    places = torch.tensor([(0.1, 0.0), (0.5, -0.5), (-0.5, 0.5), (1.0, 1.0)])
    center = {n: p.detach() for n, p in model.named_parameters()}
    moved = {
        n: w
        + sum(
            places[:, i].view(-1, *[1] * w.ndim) * d[n]
            for i, d in enumerate((first, second))
            if n in d
        )
        if n in first
        else w.expand(len(places), *w.shape)
        for n, w in center.items()
    }
    buffers = dict(model.named_buffers())

    def loss(weights: dict[str, Tensor], images: Tensor, labels: Tensor) -> Tensor:
        logits = torch.func.functional_call(model, (weights, buffers), (images,))
        return nn.functional.cross_entropy(logits, labels)

    with torch.no_grad(), Clock() as clock:
        for a, b in zip(x.split(chunk), y.split(chunk), strict=True):
            torch.func.vmap(loss, in_dims=(0, None, None))(moved, a, b)
    return {"wall_s": clock.wall / len(places), "cpu_s": clock.cpu / len(places)}


def growth(model: nn.Module, x: Tensor, y: Tensor, out: dict[str, Any]) -> None:
    directions = landscapes.random_directions(model, 2)

    def cost(count: int, **options: Any) -> dict[str, float]:
        return point_cost(Scorer(model, (x[:count], y[:count]), directions, **options))

    out["by_images"] = {n: cost(n) for n in (256, 512, 1024, 2048)}
    out["by_batch"] = {n: cost(1024, batch_size=n) for n in (64, 128, 256, 512, 1024)}
    out["by_rtol"] = {
        f"{r:g}": cost(1024, solver=eq.Anderson(rtol=r, max_steps=100)) for r in (1e-1, 1e-2, 1e-3)
    }
    out["compacted"] = cost(1024, solver=FAST)
    out["by_channels"] = {}
    for channels in (8, 16, 32, 48):
        torch.manual_seed(0)
        other = network(channels).eval()
        pair = landscapes.random_directions(other, 2)
        # Twenty steps whatever happens: untrained networks would stop earlier.
        fixed = eq.Anderson(rtol=0.0, atol=0.0, max_steps=20)
        found = point_cost(Scorer(other, (x[:1024], y[:1024]), pair, solver=fixed))
        out["by_channels"][channels] = found
    try:
        out["vmap"] = vmap_cost(model, x[:1024], y[:1024], 256)
    except Exception as error:  # noqa: BLE001 - what a version of torch cannot do is a finding
        out["vmap"] = {"error": f"{type(error).__name__}: {error}"[:300]}


def whole(
    model: nn.Module, pair: tuple[Tensor, Tensor], points: int, folder: Path, seconds: float
) -> tuple[landscapes.Surface, list[dict[str, float]]]:
    """The landscape, and the seconds of each row over all calls of the script."""
    ledger = folder / "landscape_rows.json"
    rows = json.loads(ledger.read_text()) if ledger.exists() else []
    begun = time.perf_counter()
    clock = [time.perf_counter(), time.process_time()]

    def on_row(surface: landscapes.Surface) -> None:
        now = [time.perf_counter(), time.process_time()]
        rows.append({"wall_s": now[0] - clock[0], "cpu_s": now[1] - clock[1]})
        ledger.write_text(json.dumps(rows))
        print(f"{int(surface.done.sum())} of {len(surface.a)} rows", flush=True)
        if now[0] - begun > seconds and not surface.complete:
            raise Enough
        clock[:] = [time.perf_counter(), time.process_time()]

    surface = landscapes.measure_landscape(
        model,
        pair,
        grid=landscapes.Grid(points=points),
        name="DEQ on MNIST",
        solver=FAST,
        file=folder / "mnist_deq.landscape.safetensors",
        on_row=on_row,
    )
    return surface, rows


def some_rows(
    model: nn.Module, pair: tuple[Tensor, Tensor], points: int, count: int
) -> dict[str, Any]:
    """``count`` rows of the grid, spread evenly, and what all of them would take."""
    axis = landscapes.Grid(points=points).axis().tolist()
    chosen = [axis[(2 * i + 1) * points // (2 * count)] for i in range(count)]
    scorer = Scorer(model, pair, landscapes.random_directions(model, 2), solver=FAST)
    rows, found = [], []
    for a in chosen:
        with Clock() as clock:
            found += [scorer.at(a, b) for b in axis]
        rows.append({"a": a, "wall_s": clock.wall, "cpu_s": clock.cpu})
        print(rows[-1], flush=True)
    means = torch.stack(found).mean(0).tolist()
    return {
        "rows": rows,
        "of_rows": points,
        "estimated_cpu_s": sum(row["cpu_s"] for row in rows) * points / count,
        "estimated_wall_s": sum(row["wall_s"] for row in rows) * points / count,
        **{name: means[i] for i, name in enumerate(scorer.channels)},
    }


def prepared(options: argparse.Namespace, folder: Path, x: Tensor, y: Tensor) -> nn.Module:
    """The trained network; trained at the first call and kept beside the grid."""
    torch.manual_seed(0)
    model = network()
    kept = folder / "mnist_deq.pt"
    if kept.exists():
        model.load_state_dict(torch.load(kept, weights_only=True))
        return model.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(model, x, y, options.epochs)
    torch.save(model.state_dict(), kept)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", default="results")
    parser.add_argument("--root", default=None, help="folder that holds MNIST")
    parser.add_argument("--work", default="runs/landscape_bench", help="grid and weights so far")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--points", type=int, default=51)
    parser.add_argument("--rows", type=int, default=0, help="time so many rows only")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after, to go on later")
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    folder = Path(options.work)
    folder.mkdir(parents=True, exist_ok=True)
    x, y = images(eq.data.load("mnist", "train", root=options.root))
    model = prepared(options, folder, x, y)
    pair = (x[:1024], y[:1024])
    surface = None
    if options.rows:
        timed = some_rows(model, pair, options.points, options.rows)
    else:
        try:
            surface, rows = whole(model, pair, options.points, folder, options.seconds)
        except Enough:
            print("the time is over: the same command goes on")
            return
        totals = {key: sum(row[key] for row in rows) for key in ("wall_s", "cpu_s")}
        timed = {**surface.summary(), **totals}
    test = images(eq.data.load("mnist", "test", root=options.root))
    with torch.no_grad():
        right = torch.cat([model(a).argmax(1) for a in test[0].split(500)]) == test[1]
    record: dict[str, Any] = {
        # Folders are the reader's own.
        "command": "python benchmarks/landscape.py --root DATA "
        f"--threads {options.threads} --epochs {options.epochs} --points {options.points}"
        + (f" --rows {options.rows}" if options.rows else ""),
        "commit": options.commit,
        "torch": torch.__version__,
        "machine": platform.machine(),
        "threads": options.threads,
        "parameters": sum(p.numel() for p in model.parameters()),
        "test_accuracy": float(right.double().mean()),
        "solver": repr(FAST),
        "images": 1024,
        "landscape": timed,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        growth(model, x, y, record)
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "landscape.json").write_text(json.dumps(record, indent=1) + "\n")
    if surface is not None:
        save_picture(landscapes.contour_figure([surface]), out / "landscape_mnist_deq")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
