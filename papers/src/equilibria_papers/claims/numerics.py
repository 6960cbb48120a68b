"""What the trials are made of: random ingredients, solvers and searches of their own, in float64.

Numbers, weights of a given norm, activations and slopes. Equilibria z = T(z) by semismooth Newton
with a line search; where it stalls, averaged iterations move the start. Convex quadratic programs
by active sets. Optimizers that push a ratio up. Nothing here is shared with the code under test:
activations, their integrals and the solvers are written anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from scipy import optimize  # type: ignore[import-untyped]
from torch import Tensor

from .claim import Trial

T = TypeVar("T")


class Random:
    """What a trial draws, from one generator; tensors are float64."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def uniform(self, low: float, high: float) -> float:
        return low + (high - low) * float(self.share())

    def log_uniform(self, low: float, high: float) -> float:
        return math.exp(self.uniform(math.log(low), math.log(high)))

    def integer(self, low: int, high: int) -> int:
        """Low to high, both ends included."""
        return int(torch.randint(low, high + 1, (), generator=self.generator))

    def choice(self, items: Sequence[T]) -> T:
        return items[self.integer(0, len(items) - 1)]

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def share(self, *shape: int) -> Tensor:
        """Uniform in [0, 1)."""
        return torch.rand(shape, generator=self.generator, dtype=torch.float64)

    def weights(self, rows: int, columns: int, size: float) -> Tensor:
        """[rows, columns] with spectral norm ``size``: dense, of rank one, orthogonal, sparse."""
        kind = self.integer(0, 5)
        found = self.normal(rows, columns)
        if kind == 0:
            found = self.normal(rows, 1) @ self.normal(1, columns)
        elif kind == 1:
            u, _, v = torch.linalg.svd(found, full_matrices=False)
            found = u @ v
        elif kind == 2:
            found = found * (torch.rand(rows, columns, generator=self.generator) < 0.5)
        elif kind == 3:
            found = found.abs()
        largest = spectral(found)
        return self.weights(rows, columns, size) if largest < 1e-9 else found * (size / largest)


identity = partial(torch.eye, dtype=torch.float64)
zeros = partial(torch.zeros, dtype=torch.float64)
ones = partial(torch.ones, dtype=torch.float64)
tensor = partial(torch.tensor, dtype=torch.float64)


def logistic(t: Tensor, top: float) -> float:
    """A free number as one between 0 and ``top``, for searches."""
    return top / (1.0 + math.exp(-float(t.clamp(-30, 30))))


def exponential(t: Tensor, low: float, high: float) -> float:
    """A free number as a positive one between e^low and e^high, for searches."""
    return math.exp(float(t.clamp(low, high)))


def norm(t: Tensor) -> float:
    return float(torch.linalg.vector_norm(t))


def spectral(matrix: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix, 2))


@dataclass(frozen=True)
class Activation:
    """σ, its slope (one element of Clarke's where it jumps), ∫₀σ, and L_σ = sup σ′."""

    name: str
    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]
    integral: Callable[[Tensor], Tensor]
    expansion: float = 1.0


def _relu(t: Tensor) -> Tensor:
    return t.clamp_min(0.0)


def _step(t: Tensor) -> Tensor:
    return (t > 0).double()


def _leak(t: Tensor) -> Tensor:
    return 0.1 + 0.9 * _step(t)


def _log_cosh(t: Tensor) -> Tensor:
    size = t.abs()
    return size + torch.log1p(torch.exp(-2.0 * size)) - math.log(2.0)


def _soft(t: Tensor) -> Tensor:
    return t.sign() * (t.abs() - 0.3).clamp_min(0.0)


_ALL = (
    Activation("identity", lambda t: t, torch.ones_like, lambda t: 0.5 * t * t),
    Activation("relu", _relu, _step, lambda t: 0.5 * _relu(t) ** 2),
    Activation(
        "clipped relu",
        lambda t: t.clamp(0.0, 1.0),
        lambda t: ((t > 0) & (t < 1)).double(),
        lambda t: 0.5 * t.clamp(0.0, 1.0) ** 2 + (t - 1.0).clamp_min(0.0),
    ),
    Activation(
        "soft threshold", _soft, lambda t: (t.abs() > 0.3).double(), lambda t: 0.5 * _soft(t) ** 2
    ),
    Activation("leaky relu", lambda t: t * _leak(t), _leak, lambda t: 0.5 * t * t * _leak(t)),
    Activation("tanh", torch.tanh, lambda t: 1.0 - torch.tanh(t) ** 2, _log_cosh),
    Activation(
        "sigmoid",
        torch.sigmoid,
        lambda t: torch.sigmoid(t) * torch.sigmoid(-t),
        lambda t: torch.logaddexp(t, torch.zeros_like(t)) - math.log(2.0),
        expansion=0.25,
    ),
)
ACTIVATIONS = {each.name: each for each in _ALL}


Map = Callable[[Tensor], Tensor]


class Unsolved(RuntimeError):
    """No equilibrium was found to the accuracy that a trial needs."""


def newton(step: Map, slope: Map, start: Tensor, *, steps: int = 60) -> tuple[Tensor, float]:
    """z [n] with z = step(z), and the residual ‖z − step(z)‖; slope(z) is the Jacobian of step."""
    z = start
    gap = z - step(z)
    size = norm(gap)
    eye = identity(len(z))
    for _ in range(steps):
        if size <= 4e-16 * (1.0 + norm(z)):
            break
        solved, info = torch.linalg.solve_ex(eye - slope(z), gap)
        if int(info) != 0 or not bool(solved.isfinite().all()):
            break
        part, moved = 1.0, False
        while part > 1e-4 and not moved:  # halved until ‖z − T(z)‖ falls
            tried = z - part * solved
            new = tried - step(tried)
            moved = norm(new) < size * (1.0 - 1e-4 * part)
            part *= 0.5
        if not moved:
            break
        z, gap, size = tried, new, norm(new)
    return z, size


def solve(
    step: Map, slope: Map, start: Tensor, *, accuracy: float = 1e-11, averaging: float = 0.5
) -> Tensor:
    """The equilibrium to ‖z − step(z)‖ ≤ accuracy·(1 + ‖z‖), or ``Unsolved``."""
    z = start
    for tries in range(5):
        found, size = newton(step, slope, z)
        if size <= accuracy * (1.0 + norm(found)):
            return found
        for _ in range(100 * 4**tries):
            z = (1.0 - averaging) * z + averaging * step(z)
    raise Unsolved(f"‖z − T(z)‖ = {size:.2e} after Newton from five starts")


def bisect(rising: Map, low: Tensor, high: Tensor, steps: int = 90) -> Tensor:
    """Entrywise zeros of a function that rises, between low and high."""
    for _ in range(steps):
        middle = 0.5 * (low + high)
        above = rising(middle) > 0
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    return 0.5 * (low + high)


def crossings(force: Map, line: Tensor) -> list[Tensor]:
    """The zeros of a function between neighbors of ``line`` [n] where its sign changes."""
    values, roots = force(line), []
    change = values[:-1] * values[1:] < 0
    for low, high in zip(line[:-1][change], line[1:][change], strict=True):
        sign = 1.0 if float(force(high)) > 0 else -1.0
        roots.append(bisect(lambda t, sign=sign: sign * force(t), low, high))  # type: ignore[misc]
    return roots


# For ReLU ψ(z) = (1/2ν)‖(Wz + c)₊‖², so ψ*(u) = min (1/ν)(½‖ζ‖² − ⟨c, ζ⟩) over ζ ≥ 0 with
# Wᵀζ = νu, and every minimum that has φ = ψ* − ½‖·‖² in it is a program in ζ. No conjugate, prox or
# fixed point is computed on the way.


def program(h: Tensor, g: Tensor, nonnegative: Tensor) -> Tensor:
    """min ½vᵀHv − gᵀv with v ≥ 0 where said; H positive definite. [k, k], [k], [k] → v [k]."""
    root = torch.linalg.cholesky(h, upper=True)  # H = RᵀR
    target = torch.linalg.solve_triangular(root.mT, g[:, None], upper=False)[:, 0]
    if bool(nonnegative.all()):
        found, _ = optimize.nnls(root.numpy(), target.numpy(), maxiter=100 * len(g))
    else:
        lower = np.where(nonnegative.numpy(), 0.0, -np.inf)
        found = optimize.lsq_linear(
            root.numpy(), target.numpy(), (lower, np.inf), method="bvls", tol=1e-15
        ).x
    return torch.from_numpy(np.ascontiguousarray(found))


def relu_prox(w: Tensor, c: Tensor, pull: Tensor, weight: Tensor, nu: float = 1.0) -> Tensor:
    """argmin_u φ(u) + ½uᵀQu − ⟨p, u⟩ for ReLU; W [n, m], c [n], p [m], Q [m, m] → u [m].

    u = Wᵀζ/ν with ζ ≥ 0: H = I/ν + W(Q − I)Wᵀ/ν², g = c/ν + Wp/ν. Q = I is the prox of φ at p,
    Q = 0, p = 0 the minimizer of φ.
    """
    n, m = w.shape
    h = identity(n) / nu + w @ (weight - identity(m)) @ w.mT / nu**2
    return w.mT @ program(h, (c + w @ pull) / nu, ones(n) > 0) / nu


Try = Callable[[Tensor], Trial | None]
METHODS = ("Nelder-Mead", "Powell")


class _Watched:
    """−ratio for a minimizer, remembering the worst trial."""

    def __init__(self, attempt: Try) -> None:
        self.attempt = attempt
        self.worst: Trial | None = None
        self.evaluations = 0

    def __call__(self, at: Sequence[float]) -> float:
        trial = self.attempt(tensor([float(a) for a in at]))
        self.evaluations += 1
        if trial is None:
            return 1e6
        ratio = math.inf if math.isnan(trial.ratio) else trial.ratio
        if self.worst is None or ratio > self.worst.ratio:
            self.worst = Trial(ratio, trial.case)
        return -min(ratio, 1e300)

    def report(self, method: str) -> Trial | None:
        """The worst trial, with the number of evaluations behind it."""
        if self.worst is None:
            return None
        found = {"found by": f"{method}, {self.evaluations} evaluations"}
        return Trial(self.worst.ratio, {**self.worst.case, **found})


def climb(
    attempt: Try,
    starts: Iterable[Tensor],
    *,
    methods: Sequence[str] = METHODS,
    evaluations: int = 300,
) -> Iterator[Trial | None]:
    """From every start, every method one after the other; one trial each."""
    for start in starts:
        for method in methods:
            watched = _Watched(attempt)
            x, f = ("xatol", "fatol") if method == "Nelder-Mead" else ("xtol", "ftol")
            options = {"maxfev": evaluations, x: 1e-10, f: 1e-12}
            optimize.minimize(watched, start.tolist(), method=method, options=options)
            yield watched.report(method)


def evolve(
    attempt: Try,
    bounds: Sequence[tuple[float, float]],
    draw: Random,
    *,
    generations: int = 20,
    population: int = 8,
) -> Iterator[Trial | None]:
    """Differential evolution in the box; one trial."""
    watched = _Watched(attempt)
    seed = int(torch.randint(2**31 - 1, (), generator=draw.generator))
    size = {"maxiter": generations, "popsize": population}
    optimize.differential_evolution(watched, list(bounds), **size, seed=seed, polish=False, tol=0.0)
    yield watched.report("differential evolution")
