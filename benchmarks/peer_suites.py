"""The fixed points and roots of the tests of jaxopt and optimistix: who solves what.

The problems are those of jaxopt's tests (fixed_point_iteration, anderson, broyden, implicit_diff)
and of optimistix' test_fixed_point and test_root_find, written anew.
Trees are flattened; random matrices are drawn here. All in float64, every solver to 1e-6 in at most
10,000 steps. Solved means |T(z) − z| ≤ 1e-6·(1 + |z|) in each entry. Evaluations are calls of T and
products with its Jacobian. The derivative is that of Σz* in a factor of a parameter, at 1e-10,
against dense algebra with complex steps.

    python -m venv JAX && JAX/bin/pip install jax jaxopt optimistix
    python benchmarks/peer_suites.py --peers JAX/bin/python
"""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np

STEPS = 10_000
OURS = ("NewtonKrylov", "Anderson", "Broyden", "Picard")
DIFFERENTIATED = (*OURS[:3], "jaxopt Anderson", "optimistix Newton")
Solve = Callable[["Case", float, bool], tuple[Any, int, float]]
"""(case, tolerance, whether to differentiate) ↦ z* [n], evaluations, the derivative (else NaN)."""


@dataclass(frozen=True)
class Case:
    """T(xp, z, s), written for xp = numpy, torch or jax.numpy; s = 1 is a factor of a parameter."""

    name: str
    map: Callable[[Any, Any, Any], Any]
    start: Any
    memory: int = 5  # of Anderson, as in their tests


def draw(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def linear(matrix: np.ndarray) -> Callable[[Any, Any, Any], Any]:
    transposed = matrix.T.copy()
    return lambda xp, z, s: s * (z @ xp.asarray(transposed))


def affine() -> Callable[[Any, Any, Any], Any]:
    """s·Mz + b with a symmetric M whose largest eigenvalue is 1/2."""
    m = np.random.default_rng(0).uniform(-1, 1, (200, 200))
    m = (m + m.T) / (2 * np.linalg.eigvalsh(m + m.T)[-1] + 1e-4)
    b, product = np.random.default_rng(1).uniform(0, 1, 200), linear(m)
    return lambda xp, z, s: product(xp, z, s) + xp.asarray(b)


def rotations(xp: Any, z: Any, s: Any) -> Any:
    """By seven angles about s·(1, …, 14): no contraction."""
    c = s * xp.asarray(np.arange(1.0, 15.0))
    angle = xp.asarray(np.pi / np.array([2, 3, 4, 5, 6, 1.27, 1.73]))
    a, b = (z - c)[..., 0::2], (z - c)[..., 1::2]
    pair = [xp.cos(angle) * a - xp.sin(angle) * b, xp.sin(angle) * a + xp.cos(angle) * b]
    return xp.stack(pair, -1).reshape(z.shape) + c


def powers(xp: Any, z: Any, s: Any) -> Any:
    """sin(z)z² of three entries, z³ of two, −z of the rest."""
    a, b, rest = z[..., :3], z[..., 3:5], z[..., 5:]
    return s * xp.concatenate([xp.sin(a) * a * a, b * b * b, -rest], -1)


def ridge(xp: Any, z: Any, s: Any) -> Any:
    """A gradient step of ½ mean (Xz − y)² + ½·5s|z|²."""
    x, y = draw(2, 10, 3), draw(3, 10)
    slope = z @ xp.asarray(x.T @ x / 10) - xp.asarray(x.T @ y / 10)
    return z - 0.1 * (slope + 5.0 * s * z)


def network(xp: Any, z: Any, s: Any) -> Any:
    h = linear(draw(4, 8, 28) / 28**0.5)(xp, z, s)
    return 0.1 * linear(draw(5, 28, 8) / 8**0.5)(xp, xp.log(1.0 + xp.exp(h)), 1.0)


def heat(xp: Any, z: Any, s: Any) -> Any:
    """A step of Crank and Nicolson, as in their helper, whose Laplacian is the identity."""
    y = xp.asarray(np.linspace(-1, 1, 100) ** 2)
    return s * (y + 0.5 * ((1.0 - z) * z + (1.0 - y) * y))


def robertson(xp: Any, z: Any, s: Any) -> Any:
    a, b, c = z[..., 0], z[..., 1], z[..., 2]
    first, last = -0.04 * a + 1e4 * b * c, 3e7 * b * b
    return s * xp.stack([first, -first - last, last], -1)


def bounded(xp: Any, z: Any, s: Any) -> Any:
    """z − f(z), f of the test with bounds (here without): its root is double."""
    a, b, c, d, e = (z[..., i] for i in range(5))
    product = (a + b + c + d + e) * (a - b + c - d + e)
    return z - xp.stack([product, a, c * c, xp.tanh(d), e + s], -1)


def midpoint(f: Any, name: str, start: Any, h: float) -> Iterator[Case]:
    """The implicit midpoint rule from 0, for y, for f and for k."""
    yield Case(f"{name}, y", lambda xp, z, s: h * f(xp, 0.5 * z, s), start)
    yield Case(f"{name}, f", lambda xp, z, s: f(xp, h * z, s), start)
    yield Case(f"{name}, k", lambda xp, z, s: h * f(xp, z, s), start)


_HALF = np.full(28, 0.5)
_DECAY, _THETA = np.array([0.9, 0.99, 0.999]), np.array([0.0, np.pi / 2])
_POWERS = np.array([0.6, 0.0, -0.1, 0.7, 0.5, -1 / 3, 0.0, 2 / 3, -0.4 / 3])
CASES = (
    Case("geometric decay", lambda xp, z, s: s * xp.asarray(_DECAY) * z, np.array([1, 0.4, -0.2])),
    Case("sin(z)z², z³", powers, _POWERS[:5]),
    Case("sin(z)z², z³, −z", powers, _POWERS),
    Case("cos(z) + θ", lambda xp, z, s: xp.cos(z) + s * xp.asarray(_THETA), np.array([0.3, 0.785])),
    Case("z/2 + 1/2", lambda xp, z, s: 0.5 * z + 0.5 * s, np.zeros(1)),
    Case("rotations", rotations, np.random.default_rng(6).uniform(0, 1, 14), 10),
    Case("affine, 200 entries", affine(), np.zeros(200)),
    Case("θz", lambda xp, z, s: s * xp.asarray(np.array([0.05, 0.2])) * z, np.array([1, -0.5])),
    Case("ridge regression", ridge, np.zeros(3)),
    Case("cos", lambda xp, z, s: xp.cos(s * z), _HALF),
    Case("exp(−z)", lambda xp, z, s: xp.exp(-s * z), _HALF),
    Case("network", network, _HALF),
    Case("heat equation", heat, np.ones(100)),
    *midpoint(linear(draw(7, 28, 28)), "linear midpoint", _HALF, 1 / 16),
    *midpoint(robertson, "Robertson's midpoint", np.ones(3), 1e-8),
    Case("z − 1 = 0", lambda xp, z, s: z - (z - s), np.ones(1)),
    Case("double root, above", bounded, np.array([0.1, 1.1, 0.1, 0.1, -1.1])),
    Case("double root, below", bounded, np.array([0.1, -1.1, 0.1, 0.1, -1.1])),
)


def derivative(case: Case, z: np.ndarray) -> float | None:
    """d Σz*/ds by dense algebra; None where I − ∂T/∂z is singular."""
    tiny = 1e-30j
    moved = z.astype(complex) + tiny * np.eye(len(z))
    columns = np.array([case.map(np, row, 1.0).imag / 1e-30 for row in moved]).T
    slope = np.asarray(case.map(np, z.astype(complex), 1.0 + tiny)).imag / 1e-30
    system = np.eye(len(z)) - columns
    return None if np.linalg.cond(system) > 1e8 else float(np.linalg.solve(system, slope).sum())


def by_us(kind: str) -> Solve:
    import torch

    import equilibria as eq

    def solve(case: Case, tolerance: float, differentiate: bool) -> tuple[Any, int, float]:
        def image(z: Any, s: Any) -> Any:
            return case.map(torch, z, s)

        start = torch.asarray(case.start, dtype=torch.float64)[None]
        s = torch.ones((), dtype=torch.float64, requires_grad=differentiate)
        ask: dict[str, Any] = {"rtol": 0.0, "atol": tolerance, "max_steps": STEPS}
        if kind == "NewtonKrylov":
            root = eq.NewtonKrylov(**ask)
            found = eq.root(lambda z, s: image(z, s) - z, start, (s,), solver=root)
        else:
            ask |= {"memory": case.memory} if kind == "Anderson" else {}
            found = eq.fixed_point(image, start, (s,), solver=getattr(eq, kind)(**ask))
        slope = torch.autograd.grad(found.value.sum(), s)[0].item() if differentiate else np.nan
        return found.value[0].detach().numpy(), found.stats.evaluations, slope

    return solve


def by_peers() -> dict[str, Solve]:
    import jax
    import jax.numpy as jnp
    import jaxopt
    import optimistix

    jax.config.update("jax_enable_x64", True)
    calls = [0]

    def count() -> None:
        calls[0] += 1

    def wrap(run: Callable[..., tuple[Any, Any]]) -> Solve:
        def solve(case: Case, tolerance: float, differentiate: bool) -> tuple[Any, int, float]:
            def image(z: Any, s: Any) -> Any:
                if not differentiate:
                    jax.debug.callback(count)
                return case.map(jnp, z, s)

            def total(s: Any) -> tuple[Any, tuple[Any, Any]]:
                z, cost = run(image, jnp.asarray(case.start, dtype=float), s, tolerance, case)
                return z.sum(), (z, cost)

            calls[0] = 0
            if differentiate:
                (_, (z, cost)), slope = jax.value_and_grad(total, has_aux=True)(1.0)
                return np.asarray(z), int(cost), float(slope)
            z, cost = total(1.0)[1]
            jax.effects_barrier()
            return np.asarray(z), int(cost) or calls[0], np.nan

        return solve

    def jaxopt_run(kind: str, root: bool, **options: Any) -> Solve:
        def run(image: Any, start: Any, s: Any, tolerance: float, case: Case) -> tuple[Any, Any]:
            # z − T(z): its Jacobian is near I, from which their Broyden starts.
            fn = (lambda z, s: z - image(z, s)) if root else image
            memory = {"history_size": case.memory} if "Anderson" in kind else {}
            made = getattr(jaxopt, kind)(fn, tol=tolerance, **options, **memory)
            return made.run(start, s).params, 0

        return wrap(run)

    def optimistix_run(kind: str, cost: Callable[[Any, int], Any]) -> Solve:
        def run(image: Any, start: Any, s: Any, tolerance: float, case: Case) -> tuple[Any, Any]:
            solver = getattr(optimistix, kind)(rtol=tolerance, atol=tolerance)
            ask = {"args": s, "max_steps": STEPS, "throw": False}
            if kind == "FixedPointIteration":
                found = optimistix.fixed_point(image, solver, start, **ask)
            else:
                found = optimistix.root_find(lambda z, s: image(z, s) - z, solver, start, **ask)
            return found.value, cost(found.stats["num_steps"], len(start))

        return wrap(run)

    return {
        "jaxopt Anderson": jaxopt_run("AndersonAcceleration", False, maxiter=STEPS, ridge=1e-6),
        "jaxopt Broyden": jaxopt_run("Broyden", True, maxiter=1000),
        "jaxopt iteration": jaxopt_run("FixedPointIteration", False, maxiter=STEPS),
        "optimistix Newton": optimistix_run("Newton", lambda k, n: k * (1 + n)),
        "optimistix Chord": optimistix_run("Chord", lambda k, n: k + n),
        "optimistix iteration": optimistix_run("FixedPointIteration", lambda k, n: k),
    }


def measure(solvers: dict[str, Solve]) -> dict[str, dict[str, Any]]:
    """Of each case and solver: whether solved, evaluations, the error of the derivative."""
    found: dict[str, dict[str, Any]] = {case.name: {} for case in CASES}
    for case in CASES:
        for name, solve in solvers.items():
            z, evaluations, _ = solve(case, 1e-6, False)
            cell = {"solved": standing(case, z, 1e-6), "evaluations": evaluations}
            found[case.name][name] = cell
            if name in DIFFERENTIATED:
                z, _, slope = solve(case, 1e-10, True)
                exact = derivative(case, z) if standing(case, z, 1e-10) else None
                if exact is not None:
                    cell["derivative"] = abs(slope - exact) / max(1.0, abs(exact))
    return found


def standing(case: Case, z: np.ndarray, tolerance: float) -> bool:
    return bool((np.abs(case.map(np, z, 1.0) - z) <= tolerance * (1.0 + np.abs(z))).all())


def table(rows: dict[str, dict[str, Any]]) -> str:
    """How many are solved, the largest error of a derivative, then evaluations."""
    names = list(next(iter(rows.values())))
    lines = [["", *names], ["---", *["---:"] * len(names)]]
    solved = [sum(row[n]["solved"] for row in rows.values()) for n in names]
    errors = [[row[n].get("derivative", -1.0) for row in rows.values()] for n in names]
    worst = [f"{max(error):.0e}" if max(error) >= 0 else "" for error in errors]
    lines.append([f"**solved of {len(rows)}**", *map(str, solved)])
    lines.append(["**largest error of a derivative**", *worst])
    for case, row in rows.items():
        lines.append([case, *(str(c["evaluations"]) if c["solved"] else "–" for c in row.values())])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    if sys.argv[1:] == ["--as-peer"]:
        versions = {name: version(name) for name in ("jax", "jaxopt", "optimistix")}
        print(json.dumps({"cases": measure(by_peers()), "versions": versions}))
        return
    from _record import parser, save

    from equilibria.engine import write_text

    options = parser(__doc__)
    options.add_argument("--peers", required=True, help="a Python that has jaxopt and optimistix")
    given = options.parse_args()
    asked = [given.peers, __file__, "--as-peer"]
    theirs = json.loads(subprocess.run(asked, stdout=subprocess.PIPE, check=True).stdout)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = measure({kind: by_us(kind) for kind in OURS})
    rows = {name: {**row, **theirs["cases"][name]} for name, row in ours.items()}
    command = "python benchmarks/peer_suites.py --peers PYTHON"
    save("peer_suites", given.out, command=command, versions=theirs["versions"], cases=rows)
    write_text(given.out / "peer_suites.md", table(rows))


if __name__ == "__main__":
    main()
