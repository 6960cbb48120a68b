"""What is solved, and both libraries behind one interface.

Fairness: both get one and the same map object, one dtype, one start; forward solves run under
no_grad; torchdeq keeps its statistics as it does by default and its solver functions are called
directly (its module adds a little). Both stop by ‖T(z) − z‖/‖T(z)‖ of every sample: torchdeq with
stop_mode='rel' (it adds 1e-9 to the denominator), equilibria with rtol.

Evaluations: torchdeq's anderson(max_iter=n) evaluates n times, broyden(max_iter=n) n + 1 times,
its fixed-point iterations n times; equilibria's max_steps=n evaluates n times, whatever the solver.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ANDERSON_MEMORY = 6  # torchdeq's default, which its backward solver cannot change
BROYDEN_MEMORY = 10
NEVER = 1e-30
"""A relative tolerance that no residual but zero passes: the test runs, the solve goes on."""


def find_equilibria() -> Any:
    """The package: installed, or from ../src."""
    try:
        return importlib.import_module("equilibria")
    except ModuleNotFoundError as error:
        if error.name != "equilibria":
            raise
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))
    return importlib.import_module("equilibria")


def find_torchdeq(folder: str | None) -> tuple[Any, str]:
    """torchdeq and its version, or None and why it is missing."""
    if folder is not None:
        path = Path(folder).resolve()
        if (path / "__init__.py").is_file():
            path = path.parent
        if not (path / "torchdeq" / "__init__.py").is_file():
            return None, f"--torchdeq {Path(folder).name}: no torchdeq package in it"
        sys.path.insert(0, str(path))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its docstrings hold invalid escapes
            module = importlib.import_module("torchdeq")
    except ImportError as error:
        return None, f"torchdeq cannot be imported ({error})"
    try:
        return module, importlib.metadata.version("torchdeq")
    except importlib.metadata.PackageNotFoundError:
        return module, "of the folder given, version not recorded"


# ---------------------------------------------------------------------------------------- maps


class Elementwise:
    """z ↦ x + s·tanh(z), s in [N] between −radius and radius: two kernels, no matrix."""

    name = "elementwise"

    def __init__(self, x: Tensor, s: Tensor) -> None:
        self.x, self.s = x, s

    def __call__(self, z: Tensor, tau: float = 1.0) -> Tensor:
        return torch.addcmul(self.x, self.s, torch.tanh(z))

    def wide(self, samples: int) -> Elementwise:
        """The first samples in float64."""
        x = self.x.detach()[:samples].double()
        return Elementwise(x.requires_grad_(), self.s.double())


class MatMul:
    """z ↦ tanh(zW + x), W symmetric with eigenvalues between −radius and radius."""

    name = "matmul"

    def __init__(self, x: Tensor, w: Tensor) -> None:
        self.x, self.w = x, w

    def __call__(self, z: Tensor, tau: float = 1.0) -> Tensor:
        return torch.tanh(torch.addmm(self.x, z, self.w))

    def wide(self, samples: int) -> MatMul:
        """The first samples in float64."""
        return MatMul(self.x.detach()[:samples].double().requires_grad_(), self.w.double())


Mapping = Elementwise | MatMul


@dataclass(frozen=True)
class Problem:
    """A map, a start, and the gradient of the loss at the answer."""

    fn: Any
    z0: Tensor
    cotangent: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.z0.shape[0], self.z0.shape[1]


def make_problem(
    kind: str, batch: int, state: int, radius: float, seed: int, device: torch.device
) -> Problem:
    """Float32; drawn on the CPU, so that a seed means the same problem on every device."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    x = (0.3 * normal(batch, state)).to(device).requires_grad_()
    spectrum = radius * (2.0 * torch.rand(state, generator=random) - 1.0)
    spectrum[0] = radius
    cotangent = normal(batch, state).to(device)
    fn: Mapping
    if kind == Elementwise.name:
        fn = Elementwise(x, spectrum.to(device))
    else:
        q = torch.linalg.qr(normal(state, state)).Q
        fn = MatMul(x, ((q * spectrum) @ q.T).to(device))
    return Problem(fn, torch.zeros(batch, state, device=device), cotangent)


def checked_samples(problem: Problem) -> int:
    """How many samples are checked in float64: all are alike, and large ones take long."""
    return 8 if problem.z0.shape[1] <= 1024 else 2


def true_residual(problem: Problem, z: Tensor) -> float:
    """The largest ‖T(z) − z‖/‖T(z)‖ of the first samples, in float64."""
    samples = checked_samples(problem)
    fn = problem.fn.wide(samples)
    with torch.no_grad():
        point = z.detach()[:samples].double()
        f = fn(point)
        return float(((f - point).norm(dim=1) / f.norm(dim=1)).max())


def true_gradient(problem: Problem, steps: int = 100) -> Tensor:
    """dL/dx of the first samples in float64: both fixed points by plain iteration, far enough."""
    samples = checked_samples(problem)
    fn = problem.fn.wide(samples)
    z = problem.z0[:samples].double()
    with torch.no_grad():
        for _ in range(steps):
            z = fn(z)
    z.requires_grad_()
    f = fn(z)
    g = problem.cotangent[:samples].double()
    u = g
    for _ in range(steps):
        u = g + torch.autograd.grad(f, z, u, retain_graph=True)[0]
    return torch.autograd.grad(f, fn.x, u)[0]


class Counted:
    """The map with its evaluations and its vector-Jacobian products counted."""

    def __init__(self, fn: Mapping) -> None:
        self.fn = fn
        self.evaluations = self.products = 0

    def __call__(self, z: Tensor, tau: float = 1.0) -> Tensor:
        self.evaluations += 1
        return _CountProducts.apply(self.fn(z), self)


class _CountProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, f: Tensor, counted: Counted) -> Tensor:
        ctx.counted = counted
        return f.view_as(f)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.counted.products += 1
        return grads[0], None


# ----------------------------------------------------------------------------------- libraries


@dataclass(frozen=True)
class Stop:
    """When a solve ends. ``rtol`` None: no test; NEVER: tested at each step, never passed."""

    evaluations: int
    rtol: float | None = None


Forward = Callable[[Any, Tensor], Tensor]
"""(map, z0) → answer."""


@dataclass(frozen=True)
class Contestant:
    """One solver of one library: how to make its forward solve, and its solve with gradients."""

    library: str
    solver: str
    forward: Callable[[Stop], Forward]
    differentiable: Callable[[Stop, Stop], Forward]

    @property
    def name(self) -> str:
        return f"{self.library}:{self.solver}"


def our_contestants(eq: Any) -> dict[str, Contestant]:
    """Picard, Anderson, Broyden, and Anderson with the default backward (GMRES)."""
    kinds: dict[str, Callable[..., Any]] = {
        "Picard": eq.Picard,
        "Anderson": lambda **kw: eq.Anderson(memory=ANDERSON_MEMORY, **kw),
        "Broyden": lambda **kw: eq.Broyden(memory=BROYDEN_MEMORY, **kw),
    }

    def solver(kind: str, stop: Stop) -> Any:
        rtol = 0.0 if stop.rtol is None else stop.rtol
        return kinds[kind](rtol=rtol, max_steps=stop.evaluations)

    def contestant(name: str, kind: str, krylov: bool = False) -> Contestant:
        def forward(stop: Stop) -> Forward:
            made = solver(kind, stop)

            def run(fn: Any, z0: Tensor) -> Tensor:
                with torch.no_grad():
                    value: Tensor = eq.fixed_point(fn, z0, solver=made).value
                    return value

            return run

        def differentiable(stop: Stop, back: Stop) -> Forward:
            made = solver(kind, stop)
            if krylov:
                adjoint = eq.Implicit(solver=eq.GMRES(rtol=back.rtol, max_steps=back.evaluations))
            else:
                adjoint = eq.Implicit(solver=solver(kind, back))

            def run(fn: Any, z0: Tensor) -> Tensor:
                value: Tensor = eq.fixed_point(fn, z0, solver=made, adjoint=adjoint).value
                return value

            return run

        return Contestant("equilibria", name, forward, differentiable)

    found = {kind: contestant(kind, kind) for kind in kinds}
    found["Anderson, GMRES back"] = contestant("Anderson, GMRES back", "Anderson", krylov=True)
    return found


def torchdeq_contestants(torchdeq: Any) -> dict[str, Contestant]:
    """Its four solvers; the simple iteration has no backward form, so fixed_point_iter serves."""
    get_solver = importlib.import_module("torchdeq.solver").get_solver
    extra = {"anderson": {"m": ANDERSON_MEMORY}, "broyden": {"LBFGS_thres": BROYDEN_MEMORY}}

    def steps(name: str, evaluations: int) -> int:
        return evaluations - 1 if name.startswith("broyden") else evaluations

    def contestant(name: str, options: dict[str, Any]) -> Contestant:
        key = name.split()[0]
        solve = get_solver(key)
        back_key = "fixed_point_iter" if key.startswith("simple") else key

        def forward(stop: Stop) -> Forward:
            how = dict(options, max_iter=steps(key, stop.evaluations), stop_mode="rel")
            how |= {"return_final": True} if stop.rtol is None else {"tol": _tolerance(stop)}

            def run(fn: Any, z0: Tensor) -> Tensor:
                with torch.no_grad():
                    value: Tensor = solve(fn, z0, **how)[0]
                    return value

            return run

        def differentiable(stop: Stop, back: Stop) -> Forward:
            deq = torchdeq.get_deq(
                ift=True,
                f_solver=key,
                b_solver=back_key,
                f_max_iter=steps(key, stop.evaluations),
                b_max_iter=steps(back_key, back.evaluations),
                f_tol=_tolerance(stop),
                b_tol=_tolerance(back),
                f_stop_mode="rel",
                b_stop_mode="rel",
            )

            def run(fn: Any, z0: Tensor) -> Tensor:
                value: Tensor = deq(fn, z0, solver_kwargs=options)[0][0]
                return value

            return run

        return Contestant("torchdeq", name, forward, differentiable)

    names = ["fixed_point_iter", "simple_fixed_point_iter", "anderson", "broyden"]
    found = {name: contestant(name, extra.get(name, {})) for name in names}
    found["broyden (its default)"] = contestant("broyden (its default)", {})
    return found


def _tolerance(stop: Stop) -> float:
    # torchdeq's test is residual < tol: zero is tested at each step and never passed.
    return 0.0 if stop.rtol in (None, NEVER) else float(stop.rtol or 0.0)


def bare_forward(evaluations: int) -> Forward:
    """The map alone, as often as the solvers call it."""

    def run(fn: Any, z0: Tensor) -> Tensor:
        with torch.no_grad():
            z = z0
            for _ in range(evaluations):
                z = fn(z)
            return z

    return run


def bare_gradient(problem: Problem, evaluations: int, products: int) -> Tensor:
    """The work no implicit gradient can avoid: evaluations, one graph, its products, one to x."""
    z = bare_forward(evaluations)(problem.fn, problem.z0)
    z = z.detach().requires_grad_()
    f = problem.fn(z)
    u = problem.cotangent
    for _ in range(products):
        u = torch.autograd.grad(f, z, u, retain_graph=True)[0]
    return torch.autograd.grad(f, problem.fn.x, u)[0]


def gradient(run: Forward, problem: Problem) -> Tensor:
    """Solve and differentiate: dL/dx."""
    z = run(problem.fn, problem.z0)
    return torch.autograd.grad(z, problem.fn.x, problem.cotangent)[0]
