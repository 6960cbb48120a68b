"""Every iterate of a solve: z^[k] and its residual ‖T(z^[k]) − z^[k]‖ / ‖T(z^[k])‖ (Eq 4.2)."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

from equilibria.engine import (
    Bounds,
    Choice,
    ConvergenceWarning,
    Leaves,
    Point,
    Solver,
    SolverOptions,
    sample_norm,
    without_graph,
)
from equilibria.nn import equilibrium_layers
from equilibria.solvers import SplittingSolver
from equilibria_papers.theory.checks import check_sizes, layers_with_inputs

_CLIPPED = 0.9  # of the standard deviation that was asked for
# A tolerance small enough never to pass unless the residual is zero, and no zero, which would make
# it a solve of fixed steps: those do not restart samples that stall, so their iterates are others.
_NEVER = 1e-30


def layer_input(model: nn.Module, x: Any, name: str | None = None) -> tuple[nn.Module, Any]:
    """(layer, what it is given) when ``model`` in eval mode is applied to x [B, ...], no graph.

    ``name`` is as in ``eq.nn.equilibrium_layers(model)``, of a branch of a MultiBranch such as
    "body.branches.0"; the first layer, or its first branch, if not given.
    """
    if not equilibrium_layers(model):
        raise ValueError(
            f"{type(model).__name__} has no equilibrium layer, so there is no solver to follow: "
            "give a network with a layer of equilibria.nn (a DEQ, a GEQ, …)."
        )
    found = layers_with_inputs(model, x)
    wanted = next(iter(found), "") if name is None else name
    if wanted not in found:
        known = ", ".join(repr(n) for n in found) or "none that its forward reaches"
        raise ValueError(f"there is no equilibrium layer {wanted!r}; this network has: {known}.")
    return found[wanted]


def at_scale(model: nn.Module, std: float, *, seed: int = 0) -> nn.Module:
    """A copy whose equilibrium layers' kernels and matrices are drawn from N(0, std²) (§4.1.1).

    Vectors (biases, gains of norms) and all that lies outside of these layers stay as they are. The
    numbers drawn are those of the weight that acts. Where a layer holds its norm within a bound
    (``NormBounded``), a larger draw is scaled back onto the bound: a warning says to what, and
    ``clipped_stds`` gives the numbers.
    """
    if not 0 < std < float("inf"):
        raise ValueError(f"std={std!r}: expected a positive number, such as 1.0 or 0.01.")
    made = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    found = _matrices(made)
    if not found:
        raise ValueError(f"{type(model).__name__} has no equilibrium layer with weights to draw.")
    for owner, attribute in found.values():
        weight: Tensor = getattr(owner, attribute)
        # On the CPU in float32: the same numbers on every device and in every precision.
        fresh = (torch.randn(weight.shape, generator=generator) * std).to(weight)
        with torch.no_grad():
            if parametrize.is_parametrized(owner, attribute):
                # Assigned, not written into its raw parameter: what a constraint keeps about the
                # weight (the leading singular vector) is then that of the new one.
                setattr(owner, attribute, fresh)
            else:
                weight.copy_(fresh)
    clipped = clipped_stds(made, std)
    if clipped:
        told = ", ".join(f"{name} {value:.3g}" for name, value in clipped.items())
        warnings.warn(
            f"std={std:g} was asked for, and the norm bound of these weights holds them at a "
            f"smaller standard deviation: {told}. Build the layer with constraint=None to look at "
            "this scale.",
            stacklevel=2,
        )
    return made


@torch.no_grad()
def clipped_stds(model: nn.Module, std: float) -> dict[str, float]:
    """name → standard deviation √(Σw²/n) in effect, of weights that a constraint keeps below std.

    Of a model that ``at_scale`` made; empty if all have the scale asked for, within 10%.
    """
    found = {}
    for name, (owner, attribute) in _matrices(model).items():
        if parametrize.is_parametrized(owner, attribute):
            weight: Tensor = getattr(owner, attribute)
            effective = float(weight.double().square().mean().sqrt())
            if effective < _CLIPPED * std:
                found[name] = effective
    return found


def _matrices(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """name → (module, attribute) of the equilibrium layers' kernels and matrices, each once."""
    found: dict[str, tuple[nn.Module, str]] = {}
    for prefix, layer in equilibrium_layers(model).items():
        for path, weight in layer.named_parameters():
            # W.parametrizations.weight.original, or original0, original1, is the weight of W.
            place, _, rest = path.partition("parametrizations.")
            owner, _, attribute = path.rpartition(".")
            if rest:
                owner, attribute = place.rstrip("."), rest.split(".")[0]
            if weight.ndim >= 2:
                name = ".".join(part for part in (prefix, owner, attribute) if part)
                found[name] = (layer.get_submodule(owner), attribute)
    return found


@dataclass(frozen=True)
class SolverPath:
    """The way of a solver for a batch: K iterates of B samples, on the CPU.

    ``states`` [K, B, n] holds z^[0] … z^[K−1], leaves of a tree side by side. ``residual`` [K, B]
    is ‖T(z) − z‖ and ``relative`` [K, B] the same over ‖T(z)‖ (the NTK thesis, Eq 4.2). A sample
    that blew up has NaN or infinity from there on.
    """

    solver: str
    tolerance: float  # What the solver would have stopped at; 0 for a solver of fixed steps
    residual: Tensor
    relative: Tensor
    states: Tensor

    @property
    def steps(self) -> int:
        """K."""
        return int(self.residual.shape[0])

    def steps_to(self, tolerance: float | None = None) -> Tensor:
        """[B]: the first k (from 1) with a relative residual of at most this; 0 where none has."""
        limit = self.tolerance if tolerance is None else tolerance
        passed = self.relative <= limit
        first = passed.int().argmax(0) + 1
        return torch.where(passed.any(0), first, 0)

    def mean_curve(self) -> Tensor:
        """[K]: the relative residual averaged over the samples where it is finite, as the thesis
        draws it; NaN where it is finite for none."""
        return self.relative.double().where(self.relative.isfinite(), torch.nan).nanmean(1)

    def quantile_curve(self, q: float) -> Tensor:
        """[K]: the q-quantile over the samples; one that blew up counts as infinitely large."""
        known = torch.nan_to_num(self.relative.double(), nan=torch.inf, posinf=torch.inf)
        place = round(q * (known.shape[1] - 1))
        found: Tensor = known.sort(dim=1).values[:, place]
        return found


class _Recording:
    """Mixed into a solver's own class, so that it passes for what it is (a splitting, Auto)."""

    scales: list[Tensor]  # ‖T(z)‖ of every point the solver saw, on the device

    def step(self, point: Point, state: Any) -> tuple[Leaves, Any]:
        self.scales.append(sample_norm(without_graph(point.f)))
        return super().step(point, state)  # type: ignore[misc, no-any-return]

    def fallback(self, point: Point, state: Any) -> tuple[Leaves, Tensor, Tensor] | None:
        # Asked at the last evaluation, after which no step follows.
        self.scales.append(sample_norm(without_graph(point.f)))
        return super().fallback(point, state)  # type: ignore[misc, no-any-return]

    def for_map(self) -> Solver:
        made: Solver = _recording(super().for_map(), self.scales)  # type: ignore[misc]
        return made

    def for_problem(self, bounds: Bounds) -> Choice:
        choice = super().for_problem(bounds)  # type: ignore[misc]
        return Choice(_recording(choice.solver, self.scales), choice.tau, choice.reason)


def _recording(solver: Any, scales: list[Tensor]) -> Any:
    """``solver`` of the same class, writing into ``scales``."""
    if isinstance(solver, _Recording):
        return solver
    kind = type(solver)
    made: Any = object.__new__(type(f"Recording{kind.__name__}", (_Recording, kind), {}))
    made.__dict__.update(solver.__dict__, scales=scales)
    if isinstance(made, SplittingSolver):
        made.__dict__["iteration"] = _recording(made.iteration, scales)
    return made


def _unstoppable(solver: SolverOptions, steps: int) -> SolverOptions:
    """The same iteration, run for exactly ``steps`` evaluations whatever happens."""
    inner = getattr(solver, "inner", None)
    if isinstance(inner, SolverOptions):  # a wrapper such as BestIterate
        wrapper: Any = type(solver)
        return wrapper(_unstoppable(inner, steps))  # type: ignore[no-any-return]
    return dataclasses.replace(
        solver,
        rtol=0.0 if solver.fixed_steps else _NEVER,
        atol=0.0,
        max_steps=steps,
        compact=False,
        divergence=1e30,
        patience=1_000_000_000,
    )


def record_path(
    layer: nn.Module, x: Any, *, solver: SolverOptions | None = None, steps: int | None = None
) -> SolverPath:
    """z^[0], z^[1], … of a layer's solve for the input x [B, ...], and the residual of each.

    The solver does not stop at its tolerance: all samples are followed for ``steps`` evaluations
    of the map, and ``steps_to()`` says where each would have stopped. Up to there the iterates are
    those of ``layer.solve``. With a splitting (MonotoneDEQ) the states are z and the residuals
    those of the splitting's own map.

    Args:
        layer: an equilibrium layer of ``equilibria.nn``; of a network use ``layer_input`` first.
        x: its input.
        solver: the layer's own if not given.
        steps: evaluations; the solver's ``max_steps`` if not given.
    """
    if not getattr(layer, "is_equilibrium", False) or not hasattr(layer, "solve"):
        raise TypeError(
            f"record_path takes an equilibrium layer such as eq.nn.DEQ(...), got "
            f"{type(layer).__name__}. Of a network: layer, x = layer_input(network, images)."
        )
    if getattr(layer, "branches", None) is not None:
        raise TypeError(
            f"{type(layer).__name__} solves its branches one after the other: record the path of "
            "one of layer.branches at its part of layer.inputs(x)."
        )
    chosen: Any = getattr(layer, "solver", None) if solver is None else solver
    if not isinstance(chosen, SolverOptions):
        raise TypeError(f"solver must be a solver object such as Anderson(), got {chosen!r}.")
    count = chosen.max_steps if steps is None else steps
    check_sizes("record_path", {"steps": count})
    states: list[Tensor] = []
    shown: list[Tensor] = []
    scales: list[Tensor] = []
    like: list[Tensor] = []

    def callback(step: int, z: Any, residual: Tensor) -> None:
        shown.append(residual)
        leaves = pytree.tree_leaves(z)
        like[:] = leaves[:1]
        states.append(torch.cat([t.detach().flatten(1) for t in leaves], 1).cpu())

    solve: Any = layer.solve
    running = _recording(_unstoppable(chosen, count), scales)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        solve(x, solver=running, callback=callback)
    residual = torch.stack(shown).cpu()
    # A solve of fixed steps shows its last point twice, to ``step`` and to ``fallback``. Where all
    # samples ended early, exactly or by NaN, the last ‖T(z)‖ is taken for the one before.
    seen = (scales or [torch.ones_like(shown[0])])[: len(shown)]
    seen += seen[-1:] * (len(shown) - len(seen))
    scale = torch.stack(seen).cpu()
    tolerance = chosen.relative_tolerance(like[0].dtype, like[0].device.type)
    return SolverPath(
        solver=type(chosen).__name__,
        tolerance=0.0 if chosen.fixed_steps else tolerance,
        residual=residual,
        relative=residual / scale.clamp_min(torch.finfo(scale.dtype).tiny),
        states=torch.stack(states),
    )
