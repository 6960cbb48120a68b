"""The cost of the empirical tangent kernel, and its growth with samples and parameters.

    python benchmarks/empirical_ntk.py --out results --root FOLDER

The full kernel (ten outputs) of a network of 200,000 parameters on 256 MNIST images comes first:
its target is 2 minutes on two cores. Without --root random images of that size are used, which
cost the same. --quick: fewer images, a minute. Writes empirical_ntk.json after each case.

CPU time is the sum over all threads of the process and depends little on other programs.
"""

from __future__ import annotations

import json
import resource
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from _record import commit, parser, write
from torch import Tensor

import equilibria as eq
from equilibria_papers.theory import empirical_ntk

HEADLINE = "deep_opteq_199k"
SMALL = "geq_mnist"


def images(count: int, root: str | None) -> Tensor:
    """MNIST's first images, or noise of their size."""
    if root is None:
        return torch.randn(count, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    data = eq.data.load("mnist", "train", root=Path(root), progress=False)
    return data.normalize(data.images[torch.arange(count)])


def measure(name: str, x: Tensor, case: str, **options: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model = eq.models.create(name, in_channels=1, image_size=28)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, x = model.to(device), x.to(device)
    empirical_ntk(model, x[:1], outputs=0)  # what is done once: imports, kernels, caches
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    wall, cpu = time.perf_counter(), time.process_time()
    found = empirical_ntk(model, x, **options)
    total = float(found.matrix.diagonal().sum())  # waits for the device
    row = {
        "case": case,
        "network": name,
        "parameters": found.parameters,
        "samples": len(x),
        "options": {key: str(value) for key, value in options.items()},
        "method": found.method,
        "rows": len(found.matrix),
        "wall_seconds": round(time.perf_counter() - wall, 2),
        "cpu_seconds": round(time.process_time() - cpu, 2),
        # Of the whole process so far: it never falls.
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "relative_error": found.relative_error,
        "trace": total,
    }
    if device == "cuda":
        row["peak_device_mib"] = torch.cuda.max_memory_allocated() // 2**20
    print(json.dumps(row), flush=True)
    return row


def cases(quick: bool) -> list[tuple[str, str, int, dict[str, Any]]]:
    """(case, network, samples, options)."""
    most = 16 if quick else 256
    some = 8 if quick else 64
    found: list[tuple[str, str, int, dict[str, Any]]] = [
        ("target", HEADLINE, most, {"outputs": "all"}),
        ("target", HEADLINE, most, {"outputs": "sum"}),
        ("target", "geq_stack_mnist", most, {"outputs": "all"}),
    ]
    sizes = (4, 8, 16) if quick else (32, 64, 128, 256)
    found += [("samples", SMALL, n, {"outputs": "all"}) for n in sizes]
    for name in ("explicit_mnist", "explicit_stack_mnist", "opteq_mnist", "opteq_stack_mnist"):
        found.append(("parameters", name, some, {"outputs": "all"}))
    return found


def main() -> None:
    asked = parser(__doc__)
    asked.add_argument("--root", default=None, help="the folder that holds MNIST")
    asked.add_argument("--threads", type=int, default=None, help="CPU threads; torch's if none")
    asked.add_argument("--quick", action="store_true")
    asked.add_argument("--only", default=None, help="one case: target, samples, parameters, …")
    options = asked.parse_args()
    warnings.simplefilter("ignore")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    report: dict[str, Any] = {
        "commit": commit() or None,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "threads": torch.get_num_threads(),
        "images": "noise" if options.root is None else "mnist",
        "rows": [],
    }
    name = "empirical_ntk_quick.json" if options.quick else "empirical_ntk.json"
    for case, network, count, given in cases(options.quick):
        if options.only in (None, case):
            report["rows"].append(measure(network, images(count, options.root), case, **given))
            write(options.out / name, report)


if __name__ == "__main__":
    main()
