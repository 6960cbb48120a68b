"""23 systems of nonlinear equations: who finds a root, in how many evaluations.

The systems are those of the collection of nonlinear test problems that SciML's
NonlinearProblemLibrary.jl uses, written from their sources: Moré, Garbow and Hillstrom (1981) for
the first 14, Hammarling's matrix square roots, Dennis and Schnabel (1983), Freudenstein and Roth
(1963), Boggs (1971), Kelley (1995). All in float64, from the standard starts.

A system counts as solved at 1e-3 or 1e-9 if ‖f(z)‖₂ is below that at the returned z. Evaluations
are calls of f and, for ours, products with its Jacobian; of a solver that failed none is given.
hybr stops by the change of x and runs to its end (1e-12) in both cases. The options of NewtonKrylov
were chosen on the standard starts; starts ten times as large, for which nothing was chosen, are
counted too.

    python benchmarks/nonlinear_suite.py
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import equilibria as eq
from equilibria.engine import write_text

System = Callable[[Tensor], Tensor]
TOLERANCES = (1e-3, 1e-9)


@dataclass(frozen=True)
class Case:
    """f: [B, n] → [B, n], a start [n] and, where published, a root [n]."""

    name: str
    f: System
    start: list[float]
    root: list[float] | None = None

    @property
    def z0(self) -> Tensor:
        return torch.tensor([self.start], dtype=torch.float64)


def rosenbrock(x: Tensor) -> Tensor:
    return torch.cat([1.0 - x[:, :1], 10.0 * (x[:, 1:] - x[:, :-1] ** 2)], 1)


def powell_singular(x: Tensor) -> Tensor:
    a, b, c, d = x.unbind(1)
    parts = [a + 10 * b, math.sqrt(5) * (c - d), (b - 2 * c) ** 2, math.sqrt(10) * (a - d) ** 2]
    return torch.stack(parts, 1)


def powell_badly_scaled(x: Tensor) -> Tensor:
    a, b = x.unbind(1)
    return torch.stack([1e4 * a * b - 1.0, torch.exp(-a) + torch.exp(-b) - 1.0001], 1)


def wood(x: Tensor) -> Tensor:
    a, b, c, d = x.unbind(1)
    s, t = b - a * a, d - c * c
    parts = [
        -200.0 * a * s - (1.0 - a),
        200.0 * s + 20.2 * (b - 1.0) + 19.8 * (d - 1.0),
        -180.0 * c * t - (1.0 - c),
        180.0 * t + 20.2 * (d - 1.0) + 19.8 * (b - 1.0),
    ]
    return torch.stack(parts, 1)


def helical_valley(x: Tensor) -> Tensor:
    a, b, c = x.unbind(1)
    # θ in [−1/4, 3/4): the angle of (a, b) in turns, with its cut on the negative b axis.
    theta = torch.atan(b / a) / (2 * math.pi) + torch.where(a < 0, 0.5, 0.0)
    radius = torch.sqrt(a * a + b * b)
    return torch.stack([10.0 * (c - 10.0 * theta), 10.0 * (radius - 1.0), c], 1)


def watson(x: Tensor) -> Tensor:
    """Half the gradient of Watson's sum of squares."""
    n = x.shape[1]
    t = torch.arange(1, 30, dtype=x.dtype)[:, None] / 29.0
    k = torch.arange(n, dtype=x.dtype)
    powers = t**k  # t^(j−1), [29, n]
    slopes = k * t ** (k - 1)
    value = x @ powers.T
    r = x @ slopes.T - value**2 - 1.0
    total = r @ slopes - 2.0 * (r * value) @ powers
    last = x[:, 1] - x[:, 0] ** 2 - 1.0
    first = x[:, 0] - 2.0 * x[:, 0] * last
    rest = torch.zeros_like(x[:, 2:])
    return total + torch.cat([first[:, None], last[:, None], rest], 1)


def chebyquad(x: Tensor) -> Tensor:
    """Means of Chebyshev polynomials over the nodes less their integrals, on [−1, 1]."""
    n = x.shape[1]
    before, now, parts = torch.ones_like(x), x, []
    for i in range(1, n + 1):
        integral = -1.0 / (i * i - 1) if i % 2 == 0 else 0.0
        parts.append(now.mean(1) - integral)
        before, now = now, 2.0 * x * now - before
    return torch.stack(parts, 1)


def brown_almost_linear(x: Tensor) -> Tensor:
    n = x.shape[1]
    first = x[:, :-1] + x.sum(1, keepdim=True) - (n + 1)
    return torch.cat([first, x.prod(1, keepdim=True) - 1.0], 1)


def _grid(x: Tensor) -> tuple[Tensor, float]:
    h = 1.0 / (x.shape[1] + 1)
    return torch.arange(1, x.shape[1] + 1, dtype=x.dtype) * h, h


def discrete_boundary_value(x: Tensor) -> Tensor:
    t, h = _grid(x)
    padded = torch.nn.functional.pad(x, (1, 1))
    return 2.0 * x - padded[:, :-2] - padded[:, 2:] + 0.5 * h * h * (x + t + 1.0) ** 3


def discrete_integral(x: Tensor) -> Tensor:
    t, h = _grid(x)
    cube = (x + t + 1.0) ** 3
    kernel = torch.minimum(t[:, None], t) * (1.0 - torch.maximum(t[:, None], t))
    return x + 0.5 * h * (cube @ kernel)


def trigonometric(x: Tensor) -> Tensor:
    k = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)
    cos = torch.cos(x)
    return x.shape[1] - cos.sum(1, keepdim=True) + k * (1.0 - cos) - torch.sin(x)


def variably_dimensioned(x: Tensor) -> Tensor:
    k = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)
    s = (k * (x - 1.0)).sum(1, keepdim=True)
    return x - 1.0 + k * s * (1.0 + 2.0 * s * s)


def broyden_tridiagonal(x: Tensor) -> Tensor:
    padded = torch.nn.functional.pad(x, (1, 1))
    return (3.0 - 2.0 * x) * x + 1.0 - padded[:, :-2] - 2.0 * padded[:, 2:]


def broyden_banded(x: Tensor) -> Tensor:
    i = torch.arange(x.shape[1])
    gap = i[:, None] - i  # row k, column j: k − j
    band = ((gap <= 5) & (gap >= -1) & (gap != 0)).to(x.dtype)
    return x * (2.0 + 5.0 * x * x) + 1.0 - (x * (1.0 + x)) @ band.T


def matrix_square_root(x: Tensor) -> Tensor:
    """X² − A, A = 1e-4·I with a one in the first row, second column."""
    n = math.isqrt(x.shape[1])
    matrix = x.view(-1, n, n)
    a = 1e-4 * torch.eye(n, dtype=x.dtype)
    a[0, 1] = 1.0
    return (matrix @ matrix - a).flatten(1)


def dennis_schnabel(x: Tensor) -> Tensor:
    a, b = x.unbind(1)
    return torch.stack([a + b - 3.0, a * a + b * b - 9.0], 1)


def sample_18(x: Tensor) -> Tensor:
    a, b = x.unbind(1)

    def ratio(t: Tensor) -> Tensor:  # (1 − exp(−t²))/t, 0 at 0
        safe = torch.where(t == 0, 1.0, t)
        return torch.where(t == 0, t, -torch.expm1(-safe * safe) / safe)

    return torch.stack([b * b * ratio(a), a * ratio(b)], 1)


def sample_19(x: Tensor) -> Tensor:
    return x * (x * x).sum(1, keepdim=True)


def scalar_20(x: Tensor) -> Tensor:
    return x * (x - 5.0) ** 2


def freudenstein_roth(x: Tensor) -> Tensor:
    a, b = x.unbind(1)
    first = a - 13.0 + ((5.0 - b) * b - 2.0) * b
    return torch.stack([first, a - 29.0 + ((b + 1.0) * b - 14.0) * b], 1)


def boggs(x: Tensor) -> Tensor:
    a, b = x.unbind(1)
    return torch.stack([a * a - b + 1.0, a - torch.cos(0.5 * math.pi * b)], 1)


def chandrasekhar(x: Tensor) -> Tensor:
    """The H equation with c = 0.9, by the midpoint rule (Kelley 1995)."""
    n = x.shape[1]
    mu = (torch.arange(1, n + 1, dtype=x.dtype) - 0.5) / n
    kernel = mu[:, None] / (mu[:, None] + mu)
    return x - 1.0 / (1.0 - 0.9 / (2 * n) * (x @ kernel.T))


_ONES = [1.0] * 10
_HUMP = [i * (i - 11.0) / 121.0 for i in range(1, 11)]
CASES = (
    Case("generalized Rosenbrock", rosenbrock, [-1.2] + [1.0] * 9, _ONES),
    Case("Powell singular", powell_singular, [3.0, -1.0, 0.0, 1.0], [0.0] * 4),
    Case("Powell badly scaled", powell_badly_scaled, [0.0, 1.0], [1.098159e-5, 9.106146]),
    Case("Wood", wood, [-3.0, -1.0, -3.0, -1.0], [1.0] * 4),
    Case("helical valley", helical_valley, [-1.0, 0.0, 0.0], [1.0, 0.0, 0.0]),
    Case("Watson", watson, [0.0, 0.0]),
    Case("Chebyquad", chebyquad, [0.0, 2 / 3], [-math.sqrt(1 / 3), math.sqrt(1 / 3)]),
    Case("Brown almost linear", brown_almost_linear, [0.5] * 10),
    Case("discrete boundary value", discrete_boundary_value, _HUMP),
    Case("discrete integral equation", discrete_integral, _HUMP),
    Case("trigonometric", trigonometric, [0.1] * 10),
    Case("variably dimensioned", variably_dimensioned, [1 - i / 10 for i in range(1, 11)], _ONES),
    Case("Broyden tridiagonal", broyden_tridiagonal, [-1.0] * 10),
    Case("Broyden banded", broyden_banded, [-1.0] * 10),
    Case("Hammarling 2 × 2", matrix_square_root, [1.0, 0.0, 0.0, 1.0], [0.01, 50.0, 0.0, 0.01]),
    Case(
        "Hammarling 3 × 3",
        matrix_square_root,
        [1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0],
        [0.01, 50.0, 0.0, 0.0, 0.01, 0.0, 0.0, 0.0, 0.01],
    ),
    Case("Dennis and Schnabel", dennis_schnabel, [1.0, 5.0], [0.0, 3.0]),
    Case("sample problem 18", sample_18, [2.0, 2.0]),
    Case("sample problem 19", sample_19, [3.0, 3.0], [0.0, 0.0]),
    Case("x(x − 5)²", scalar_20, [1.0]),
    Case("Freudenstein and Roth", freudenstein_roth, [0.5, -2.0], [5.0, 4.0]),
    Case("Boggs", boggs, [1.0, 0.0]),
    Case("Chandrasekhar H", chandrasekhar, [1.0] * 10),
)


Attempt = Callable[[Case, float], tuple[Tensor, int]]
"""(case, tolerance) ↦ the answer [1, n] and the number of evaluations."""


def by_root(**options: Any) -> Attempt:
    def attempt(case: Case, tolerance: float) -> tuple[Tensor, int]:
        solver = eq.NewtonKrylov(rtol=0.0, atol=tolerance, **options)
        found = eq.root(case.f, case.z0, solver=solver)
        return found.value, found.stats.evaluations

    return attempt


def by_fixed_point(kind: Callable[..., Any]) -> Attempt:
    """z = z − f(z)."""

    def attempt(case: Case, tolerance: float) -> tuple[Tensor, int]:
        solver = kind(rtol=0.0, atol=tolerance, max_steps=5000)
        found = eq.fixed_point(lambda z: z - case.f(z), case.z0, solver=solver)
        return found.value, found.stats.evaluations

    return attempt


def by_scipy(method: str) -> Attempt:
    def attempt(case: Case, tolerance: float) -> tuple[Tensor, int]:
        from scipy import optimize

        calls = 0

        def f(x: np.ndarray) -> np.ndarray:
            nonlocal calls
            calls += 1
            return case.f(torch.from_numpy(np.array(x, dtype=float))[None])[0].numpy()

        start = np.array(case.start)
        # hybr stops by the change of x, the others by max|f|.
        options = {} if method == "hybr" else {"fatol": tolerance / math.sqrt(len(start))}
        tol = 1e-12 if method == "hybr" else None
        found = optimize.root(f, start, method=method, tol=tol, options=options)
        return torch.from_numpy(np.asarray(found.x, dtype=float))[None], calls

    return attempt


ATTEMPTS: dict[str, Attempt] = {
    "NewtonKrylov()": by_root(),
    "NewtonKrylov(undamped=0)": by_root(undamped=0),
    "Broyden()": by_fixed_point(eq.Broyden),
    "Anderson()": by_fixed_point(eq.Anderson),
    "scipy hybr": by_scipy("hybr"),
    "scipy krylov": by_scipy("krylov"),
    "scipy broyden1": by_scipy("broyden1"),
}


def run(case: Case, attempt: Attempt, tolerance: float) -> dict[str, Any]:
    """Whether it is solved by the norm of f itself, and at which cost."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            z, evaluations = attempt(case, tolerance)
        except Exception as error:  # noqa: BLE001 - scipy raises where its own algebra fails
            return {"solved": False, "error": type(error).__name__}
    with torch.no_grad():
        norm = float(case.f(z).norm())
    return {"solved": norm <= tolerance, "evaluations": evaluations, "norm": norm}


def table(rows: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Solved counts at both tolerances, then evaluations at the tighter one."""
    names = list(ATTEMPTS)
    lines = ["| | " + " | ".join(names) + " |", "|---|" + "---:|" * len(names)]
    for tolerance in TOLERANCES:
        solved = [sum(r[n][f"{tolerance:g}"]["solved"] for r in rows.values()) for n in names]
        lines.append(f"| **solved at {tolerance:g}** | " + " | ".join(map(str, solved)) + " |")
    solved = [sum(r[n]["farther"]["solved"] for r in rows.values()) for n in names]
    counts = " | ".join(map(str, solved))
    lines.append(f"| **at {TOLERANCES[-1]:g}, from 10 times the start** | {counts} |")
    for case, row in rows.items():
        cells = [row[n][f"{TOLERANCES[-1]:g}"] for n in names]
        shown = [str(c["evaluations"]) if c["solved"] else "–" for c in cells]
        lines.append(f"| {case} | " + " | ".join(shown) + " |")
    return "\n".join(lines) + "\n"


def farther(case: Case) -> Case:
    return replace(case, start=[10.0 * x for x in case.start])


def main() -> None:
    from _record import parser, save

    options = parser(__doc__).parse_args()
    out: Path = options.out
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    for case in CASES:
        rows[case.name] = {
            name: {f"{t:g}": run(case, attempt, t) for t in TOLERANCES}
            for name, attempt in ATTEMPTS.items()
        }
        for name, attempt in ATTEMPTS.items():
            rows[case.name][name]["farther"] = run(farther(case), attempt, TOLERANCES[-1])
    save("nonlinear_suite", out, cases=rows)
    write_text(out / "nonlinear_suite.md", table(rows))


if __name__ == "__main__":
    main()
