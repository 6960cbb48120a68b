"""Time the small operations that an Anderson step is made of, to choose between their forms.

    python benchmarks/small_ops.py            writes results/small_ops.json

One thread; the minimum of five repeats, in microseconds. Batch × memory × state in the names.
"""

from __future__ import annotations

import timeit
from collections.abc import Callable

import torch
from _record import parser, save


def least(call: Callable[[], object], number: int) -> float:
    call()
    return round(min(timeit.repeat(call, number=number, repeat=5)) / number * 1e6, 1)


def measure() -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for batch, memory, state in ((8, 6, 32), (8, 6, 1024), (64, 6, 1024)):
        history = torch.randn(memory, batch, state)
        slots, vector = history.transpose(0, 1), torch.randn(batch, state)
        factors = torch.randn(batch, memory, 20)
        gram = factors @ factors.mT + 1e-3 * torch.eye(memory)
        ones = torch.ones(batch, memory, 1)
        mask = torch.zeros(batch, dtype=torch.bool)
        number = 300 if batch * state <= 8192 else 50
        calls: dict[str, Callable[[], object]] = {
            "dot: matrix × column": lambda h=slots, v=vector: torch.bmm(h, v.unsqueeze(2)),
            "dot: row × matrix": lambda h=slots, v=vector: torch.bmm(v.unsqueeze(1), h.mT),
            "small system: LU": lambda g=gram, o=ones: torch.linalg.solve_ex(g, o),
            "small system: Cholesky": lambda g=gram, o=ones: torch.cholesky_solve(
                o, torch.linalg.cholesky_ex(g).L
            ),
            "read: sum": lambda m=mask: int(m.sum()),
            "read: count_nonzero": lambda m=mask: int(torch.count_nonzero(m)),
            "read: list": lambda m=mask: sum(m.tolist()),
        }
        found[f"{batch} × {memory} × {state}"] = {k: least(c, number) for k, c in calls.items()}
    return found


if __name__ == "__main__":
    options = parser(__doc__).parse_args()
    torch.set_num_threads(1)
    save("small_ops", options.out, microseconds=measure())
