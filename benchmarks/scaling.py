"""Scaling curves of a GEQ network, its explicit twin and TorchDEQ: images per second, memory.

    python benchmarks/scaling.py --out results            # on a GPU if there is one
    python benchmarks/scaling.py --device cpu --quick

One of batch, width, resolution and solver steps varies, the others stay at the base point. The
network is a convolution, ``--depth`` blocks x ↦ skip(x) + layer(norm(x)) and a linear head; the
layer is one of

- GEQ: fixed steps with the step size of the certificate, gradients by 3 terms of the series (the
  fused path); on a GPU replayed as a CUDA graph;
- GEQ, general path: Picard with the same number of fixed steps, gradients by 3 phantom steps,
  eager;
- explicit twin: two convolutions instead of the layer (so it has no solver steps); on a GPU
  replayed as a CUDA graph;
- TorchDEQ: its Anderson on the same map with the same weights, steps (2 at least) and phantom
  steps.

Images are random; on a GPU bf16 autocast and channels last, on a CPU float32. All are timed in
alternation. Points are written to scaling_<device>.json as they are measured, and a run that was
stopped can be continued. Each axis is drawn as scaling_<axis>_<device>.png and .svg.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

try:
    import equilibria as eq
except ImportError:
    sys.path.insert(0, str(Path(__file__).parent.parent / "src"))
    import equilibria as eq

from _measure import Spread, peak_memory, race
from _scaling import PHANTOM, Contestant, Point, layers

BASE = {
    "cpu": {"batch": 16, "width": 16, "resolution": 16, "steps": 4},
    "cuda": {"batch": 256, "width": 64, "resolution": 32, "steps": 4},
}
AXES = {
    "cpu": {
        "batch": (1, 2, 4, 8, 16, 32, 64),
        "width": (8, 16, 32, 64),
        "resolution": (8, 16, 32, 64),
        "steps": (1, 2, 4, 8, 16, 32),
    },
    "cuda": {
        "batch": (1, 4, 16, 64, 256, 1024),
        "width": (16, 32, 64, 128, 256),
        "resolution": (16, 32, 64, 128),
        "steps": (1, 2, 4, 8, 16, 32),
    },
}
LABELS = {
    "batch": "batch",
    "width": "channels of the layers",
    "resolution": "pixels of a side",
    "steps": "solver steps",
}

# ---------------------------------------------------------------------------------- measurement


def measure(names: list[str], point: Point, options: argparse.Namespace) -> dict[str, Any]:
    """Images per second with quartiles and peak memory of all contestants, timed in turn."""
    device = torch.device(options.device)
    rows: dict[str, dict[str, Any]] = {}
    ready: dict[str, Contestant] = {}
    for name in names:
        try:
            ready[name] = Contestant(name, point, options)
            for _ in range(2):
                ready[name].train()
                ready[name].inference()
            count = sum(p.numel() for p in ready[name].model.parameters())
            rows[name] = {"parameters": count}
        except torch.OutOfMemoryError:
            rows[name] = {"failed": "out of memory"}
            ready.pop(name, None)
            torch.cuda.empty_cache()
        except Exception as error:
            # A peer that cannot do a point must not end the others' run; what it said is kept.
            if name != "TorchDEQ":
                raise
            rows[name] = {"failed": f"{type(error).__name__}: {error}"[:200]}
            ready.pop(name, None)
    for kind in ("train", "inference"):
        runs = {name: getattr(one, kind) for name, one in ready.items()}
        budget = options.point_budget * len(runs)
        found = race(runs, device, budget=budget, clock=options.clock) if runs else {}
        for name, times in found.items():
            seconds = Spread.of(times)
            rows[name][kind] = {
                "images_per_second": point["batch"] / seconds.median,
                "quartiles": [point["batch"] / seconds.high, point["batch"] / seconds.low],
                "seconds": seconds.median,
                "rounds": seconds.count,
                "peak_bytes": peak_memory(getattr(ready[name], f"{kind}_eagerly"), device),
            }
    return rows


def points(options: argparse.Namespace) -> Iterator[tuple[str, Point]]:
    """(axis, point), the base point of each axis too; smallest first."""
    kind = torch.device(options.device).type
    for axis in options.axes:
        values = AXES[kind][axis]
        if options.quick:
            values = values[:-1] if len(values) < 5 else values[::2]
        for value in values:
            yield axis, {**BASE[kind], axis: value}


def run_all(options: argparse.Namespace, file: Path) -> dict[str, Any]:
    record = begin(options, file)
    slow: dict[str, bool] = {}
    for axis, point in points(options):
        names = [n for n in layers(1) if not (axis == "steps" and n == "explicit twin")]
        keys = {name: f"{axis} | {name} | {point[axis]}" for name in names}
        names = [name for name in names if keys[name] not in record["points"]]
        if not names or slow.get(axis):
            continue
        began = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", eq.ConvergenceWarning)
            rows = measure(names, point, options)
        gc.collect()
        took = time.perf_counter() - began
        # What follows on this axis is larger still.
        slow[axis] = took > options.limit
        for name, row in rows.items():
            entry = {"axis": axis, "contestant": name, "point": point, **row}
            record["points"][keys[name]] = entry
            speed = row.get("train", {}).get("images_per_second", 0.0)
            print(
                f"{keys[name]}: {row.get('failed') or f'{speed:,.0f} training images per second'}"
            )
        print(f"({took:.1f} s)", flush=True)
        write(record, file)
    return record


def begin(options: argparse.Namespace, file: Path) -> dict[str, Any]:
    """What an earlier run of the same settings left, or an empty record."""
    device = torch.device(options.device)
    cuda = device.type == "cuda"
    settings = {
        "device": device.type,
        "machine": torch.cuda.get_device_name(device) if cuda else platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "version": eq.__version__,
        "depth": options.depth,
        "clock": options.clock,
        "compiled": options.compile,
        "precision": "bf16 autocast, channels last" if cuda else "float32",
        "base": BASE[device.type],
        "phantom_steps": PHANTOM,
    }
    if file.exists() and not options.fresh:
        found: dict[str, Any] = json.loads(file.read_text())
        if found.get("settings") == settings:
            return found
        print(f"{file.name} is of other settings: it is measured anew.", flush=True)
    command = "python benchmarks/scaling.py " + " ".join(sys.argv[1:])
    return {"command": command.strip(), "settings": settings, "points": {}}


def write(record: dict[str, Any], file: Path) -> None:
    partial = file.with_name(file.name + ".part")
    partial.write_text(json.dumps(record, indent=1) + "\n")
    partial.replace(file)


# --------------------------------------------------------------------------------------- curves


def draw(record: dict[str, Any], axis: str, stem: Path) -> list[Path]:
    """Training, inference and memory against one axis, all logarithmic; one line per contestant."""
    from equilibria_papers.theory.pictures import COLORS, MARKERS, STYLES, new_figure, save_picture

    rows = [r for r in record["points"].values() if r["axis"] == axis and "failed" not in r]
    if not rows:
        return []
    figure = new_figure(10.0, 3.4)
    panels = figure.subplots(1, 3)
    names = list(dict.fromkeys(r["contestant"] for r in rows))
    for i, name in enumerate(names):
        mine = [r for r in rows if r["contestant"] == name]
        at = [r["point"][axis] for r in mine]
        look = {
            "color": COLORS[i],
            "marker": MARKERS[i],
            "linestyle": STYLES[i % len(STYLES)],
            "markersize": 4,
            "label": name,
        }
        for panel, kind in zip(panels, ("train", "inference"), strict=False):
            panel.plot(at, [r[kind]["images_per_second"] for r in mine], **look)
            low, high = zip(*(r[kind]["quartiles"] for r in mine), strict=True)
            panel.fill_between(at, low, high, color=COLORS[i], alpha=0.15, linewidth=0)
        panels[2].plot(at, [r["train"]["peak_bytes"] / 2**20 for r in mine], **look)
    titles = ("training", "inference", "peak memory of a training step")
    units = ("images per second", "images per second", "MiB")
    for panel, title, unit in zip(panels, titles, units, strict=True):
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_title(title, fontsize=9)
        panel.set(xlabel=LABELS[axis], ylabel=unit)
        panel.grid(alpha=0.3, which="both", linewidth=0.4)
        values = sorted({r["point"][axis] for r in rows})
        panel.set_xticks(values, [str(v) for v in values], fontsize=8)
        panel.minorticks_off()
    panels[0].legend(fontsize=7)
    others = ", ".join(f"{k} {v}" for k, v in record["settings"]["base"].items() if k != axis)
    figure.suptitle(f"{record['settings']['machine']}; {others}", fontsize=9)
    return save_picture(figure, stem)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", default="results")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--axes", default=",".join(LABELS), help="batch,width,resolution,steps")
    parser.add_argument("--depth", type=int, default=2, help="equilibrium layers in sequence")
    parser.add_argument("--compile", action="store_true", help="torch.compile every network")
    parser.add_argument("--quick", action="store_true", help="half of the points")
    parser.add_argument("--fresh", action="store_true", help="measure anew what is there")
    parser.add_argument("--plots-only", action="store_true", help="draw what was measured")
    parser.add_argument("--point-budget", type=float, help="seconds a pass of a network at a point")
    parser.add_argument("--limit", type=float, help="seconds a point; larger ones are left out")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    options = parser.parse_args()
    if options.clock == "cpu":
        if options.device != "cpu":
            raise SystemExit("--clock cpu is this thread's own time: it needs --device cpu.")
        torch.set_num_threads(1)
    cuda = torch.device(options.device).type == "cuda"
    if cuda and not torch.cuda.is_available():
        raise SystemExit(f"--device {options.device}: torch sees no CUDA device here.")
    options.axes = [a.strip() for a in options.axes.split(",") if a.strip()]
    unknown = [a for a in options.axes if a not in LABELS]
    if unknown:
        raise SystemExit(f"--axes {unknown[0]}: expected some of {', '.join(LABELS)}.")
    options.point_budget = options.point_budget or (0.25 if cuda else 0.8)
    options.limit = options.limit or (300.0 if options.compile else 20.0)
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    device = torch.device(options.device).type
    file = out / f"scaling_{device}{'_compiled' if options.compile else ''}.json"
    if options.plots_only:
        record = json.loads(file.read_text())
    else:
        record = run_all(options, file)
    for axis in options.axes:
        for path in draw(record, axis, out / f"scaling_{axis}_{file.stem.split('_', 1)[1]}"):
            print(f"wrote {path}")


if __name__ == "__main__":
    main()
