"""A trained stack with fewer steps, more steps, and without its equilibrium layers.

    python benchmarks/ablation.py results/weights/geq_stack_cifar_8m.safetensors --data-root FOLDER

The weights stay as they were trained (four steps); only what a layer does at prediction changes.
"without": a layer adds nothing, so that skips, norms, stem and head are left.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from _record import parser, write
from torch import Tensor, nn

from equilibria import data, models
from equilibria.evaluation import evaluating, model_input, with_solver
from equilibria.nn.observing import equilibrium_layers
from equilibria.solvers import Auto, ProximalGradient
from equilibria_papers.tables.provenance import made_by


def main() -> None:
    options = parser(__doc__)
    options.add_argument("weights", type=Path)
    options.add_argument("--data-root", type=Path, required=True)
    options.add_argument("--limit", type=int, default=500, help="test images")
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = options.parse_args()
    test = data.load("cifar10", "test", root=given.data_root, progress=False)
    test = test.subset(range(min(given.limit, len(test))))
    model = models.load(given.weights, dtype=torch.float32).to(given.device).eval()
    rows: dict[str, Any] = {}
    usual = logits_of(model, test, given.device).argmax(1)
    for name, changed in variants(model):
        found = logits_of(changed, test, given.device).argmax(1)
        rows[name] = {
            "accuracy": percent(found == torch.as_tensor(test.targets)),
            "same_label_as_trained": percent(found == usual),
        }
        print(f"{name:>12}  {rows[name]}", flush=True)
    made = {
        "weights": given.weights.name,
        "images": len(test),
        "made_by": made_by(torch.device(given.device)),
        "rows": rows,
    }
    write(given.out / "ablation.json", made)


def percent(right: Tensor) -> float:
    return round(100 * float(right.double().mean()), 2)


def variants(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The network with other solvers in its layers, and with layers that add nothing."""
    silent = copy.deepcopy(model)
    for layer in equilibrium_layers(silent).values():
        layer.register_forward_hook(lambda layer, inputs, out: torch.zeros_like(out))
    yield "without", silent
    for count in (1, 2, 4, 8):
        fixed = ProximalGradient(rtol=0.0, atol=0.0, max_steps=count, accelerate=False)
        yield f"{count} steps", with_solver(model, fixed)
    yield "solved, 1e-4", with_solver(model, Auto(rtol=1e-4, max_steps=500))


@torch.no_grad()
def logits_of(model: nn.Module, test: Any, device: str) -> Tensor:
    parts = []
    for begin in range(0, len(test), 100):
        index = range(begin, min(begin + 100, len(test)))
        images = test.images[index.start : index.stop].to(device)
        with evaluating(model):
            parts.append(model(model_input(model, test, images)).float().cpu())
    return torch.cat(parts)


if __name__ == "__main__":
    main()
