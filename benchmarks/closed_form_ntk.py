"""The cost of the closed-form tangent kernel of a monotone DEQ, and its growth in n and N.

    python benchmarks/closed_form_ntk.py --out results

Times the equilibrium to machine precision and K = J_AJ_Aᵀ + J_BJ_Bᵀ + J_UJ_Uᵀ + ZᵀZ (Nguyen 2022,
Proposition 4) in float64 on the CPU, each size in its own process, whose peak memory is read at the
end, and the same kernel from the dense Jacobians where these fit into memory. Reports wall time and
CPU time, which depends less on other programs. Writes closed_form_ntk.json. Target: n = 64, N = 128
under 2 s and 2 GB on two cores.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from _record import commit, parser, write
from torch import Tensor

from equilibria_papers.theory.monotone_ntk import (
    Equilibrium,
    ThesisModel,
    closed_form_kernel,
    find_equilibrium,
    sensitivities,
)

SIZES = [(64, n) for n in (32, 64, 128, 256, 512)] + [(n, 128) for n in (16, 32, 128, 256)]
TARGET = (64, 128)
DENSE = 1 << 22  # entries of J_A and P_A below which the dense way is timed too


def measure(width: int, samples: int, repeats: int) -> dict[str, Any]:
    """One size, in this process."""
    generator = torch.Generator().manual_seed(0)
    model = ThesisModel.usual(width, width, generator=generator)
    X = torch.randn(width, samples, dtype=torch.float64, generator=generator)
    before = peak()
    solves, kernels, work = [], [], []
    for _ in range(repeats):
        start, used = time.perf_counter(), time.process_time()
        found = find_equilibrium(model, X)
        middle = time.perf_counter()
        kernel = closed_form_kernel(model, X, found)
        solves.append(middle - start)
        kernels.append(time.perf_counter() - middle)
        work.append(time.process_time() - used)
    row = {
        "n": width,
        "N": samples,
        "equilibrium_s": statistics.median(solves),
        "kernel_s": statistics.median(kernels),
        "first_s": solves[0] + kernels[0],
        "cpu_s": statistics.median(work),
        "residual": found.residual,
        "peak_mb": peak(),
        "added_mb": peak() - before,
        "smallest_eigenvalue": kernel.smallest(),
    }
    if max(samples * width**2, width**4) <= DENSE:
        start = time.perf_counter()
        dense = sum((part @ part.T for part in dense_jacobians(model, X, found)), torch.zeros(()))
        row["dense_s"] = time.perf_counter() - start
        row["dense_peak_mb"] = peak()
        row["difference"] = float((dense - kernel.total).abs().max() / kernel.total.abs().max())
    return row


def dense_jacobians(model: ThesisModel, X: Tensor, found: Equilibrium) -> tuple[Tensor, ...]:
    """∂ŷ/∂ vec A, B [N, n²], U [N, n d] and u [N, n] (Lemma 3.2.3), vec by columns.

    ∂ vec W/∂ vec A = −(I + K)(I_n ⊗ Aᵀ), ∂ vec W/∂ vec B = I − K, K the commutation matrix.
    """
    n, V = model.width, sensitivities(model, found)
    one = torch.eye(n * n, dtype=torch.float64)
    swap = one[torch.arange(n * n).reshape(n, n).T.reshape(-1)]
    by_weight = torch.einsum("ji,ki->ijk", found.Z, V).reshape(X.shape[1], -1)
    by_a = by_weight @ (-(one + swap) @ torch.block_diag(*[model.A.T] * n))
    by_u = torch.einsum("ji,ki->ijk", X, V).reshape(X.shape[1], -1)
    return by_a, by_weight @ (one - swap), by_u, found.Z.T


def peak() -> float:
    """The peak resident memory of this process in MB."""
    scale = 1e6 if sys.platform == "darwin" else 1e3
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / scale


def exponent(rows: list[dict[str, Any]], key: str, by: str) -> float:
    """The slope of log(key) over log(by), least squares."""
    xs, ys = [math.log(r[by]) for r in rows], [math.log(r[key]) for r in rows]
    x, y = statistics.mean(xs), statistics.mean(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum(
        (a - x) ** 2 for a in xs
    )


def main() -> None:
    asked = parser(__doc__)
    asked.add_argument("--threads", type=int, default=2)
    asked.add_argument("--repeats", type=int, default=5)
    asked.add_argument("--one", nargs=2, type=int, help=argparse.SUPPRESS)
    options = asked.parse_args()
    torch.set_num_threads(options.threads)
    if options.one:
        print(json.dumps(measure(*options.one, options.repeats)))
        return
    rows = []
    for width, samples in sorted(set(SIZES) | {TARGET}):
        command = [sys.executable, __file__, "--one", str(width), str(samples)]
        command += ["--threads", str(options.threads), "--repeats", str(options.repeats)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rows.append(json.loads(done.stdout))
        print(rows[-1], flush=True)
    in_n = [r for r in rows if r["N"] == 128 and r["n"] >= 64]
    in_samples = [r for r in rows if r["n"] == 64 and r["N"] >= 64]
    found = {
        "commit": commit(),
        "torch": torch.__version__,
        "threads": options.threads,
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "rows": rows,
        "growth": {
            "cpu_s in n (N = 128, n ≥ 64)": exponent(in_n, "cpu_s", "n"),
            "cpu_s in N (n = 64, N ≥ 64)": exponent(in_samples, "cpu_s", "N"),
            "peak_mb in n (N = 128, n ≥ 64)": exponent(in_n, "peak_mb", "n"),
            "peak_mb in N (n = 64, N ≥ 64)": exponent(in_samples, "peak_mb", "N"),
        },
    }
    write(options.out / "closed_form_ntk.json", found)
    print(json.dumps(found["growth"], indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
