"""MultiBranch: equilibrium layers at several scales, side by side or in a chain (GEQ §4)."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from equilibria.adjoints import Implicit
from equilibria.adjoints.graph import failed_codes
from equilibria.certify import CompositeCertificate, Guaranteed, certify
from equilibria.engine.adjoint import Adjoint
from equilibria.engine.result import BackwardStats, ConvergenceWarning, Result, Solution, Stats
from equilibria.engine.solver import SolverOptions
from equilibria.engine.transforms import uncached
from equilibria.engine.tree import sample_norm
from equilibria.entry import check_ways, fixed_point
from equilibria.ops.pooling import average_pool
from equilibria.problems.solving import choice_for, step_of
from equilibria.solvers import Anderson
from equilibria.solvers.forward_backward import SplittingSolver

from .deq import MonitoredMapLayer
from .layer import EquilibriumLayer, MapLayer
from .monotone import MonotoneDEQ
from .observing import report

__all__ = ["BranchSolution", "MultiBranch"]

Pixels = int | tuple[int, int]
Fuse = Literal["average", "sum", "concatenate"]


# From best to worst; a sample of the whole ends as its worst branch did.
_SEVERITY = (
    Result.converged,
    Result.max_steps,
    Result.stagnated,
    Result.diverged,
    Result.nonfinite,
)


@dataclass(frozen=True)
class BranchSolution(Solution[tuple[Tensor, ...]]):
    """``value`` is the tuple of states; ``parts`` are the Solutions of the branches.

    ``result`` is each sample's worst code; ``stats.steps`` and ``stats.relative`` are the largest,
    ``stats.residual`` is that of all states together, and evaluations and syncs are sums.
    """

    parts: tuple[Solution[Tensor], ...] = ()

    def detach(self) -> BranchSolution:
        parts = tuple(part.detach() for part in self.parts)
        return replace(self, value=tuple(part.value for part in parts), parts=parts)


class _BranchBackward(BackwardStats):
    """What the branches' backward solves did, read when asked: they are filled in later."""

    def __init__(self, parts: Sequence[BackwardStats]) -> None:
        object.__setattr__(self, "parts", tuple(parts))

    def __getattribute__(self, name: str) -> Any:
        if name not in _READ:
            return object.__getattribute__(self, name)
        found = [getattr(part, name) for part in object.__getattribute__(self, "parts")]
        return _READ[name](found)


def _masked(found: list[int]) -> int:
    """−1 where a branch does not know."""
    return -1 if min(found) < 0 else max(found)


def _largest(found: list[Tensor | None]) -> Tensor | None:
    known = [t for t in found if t is not None]
    return torch.stack(known).amax(0) if known else None


_READ: dict[str, Any] = {
    "solves": sum,
    "unconverged": sum,
    "masked": _masked,
    "steps": _largest,
    "residual": _largest,
}


def worst(codes: Sequence[Tensor]) -> Tensor:
    """The worst result code of each sample, [B], without waiting for the device."""
    stacked = torch.stack(list(codes))
    order = torch.zeros_like(stacked)
    for rank, code in enumerate(_SEVERITY):
        order = torch.where(stacked == int(code), rank, order)
    found: Tensor = stacked.gather(0, order.argmax(0, keepdim=True))[0]
    return found


def combine(parts: Sequence[Solution[Tensor]]) -> BranchSolution:
    """One Solution out of those of the branches, in their order."""
    stats = [part.stats for part in parts]
    backward: BackwardStats = BackwardStats()
    if not torch.compiler.is_compiling():
        backward = _BranchBackward([s.backward for s in stats])
    together = Stats(
        steps=torch.stack([s.steps for s in stats]).amax(0),
        residual=sample_norm([s.residual for s in stats]),
        relative=torch.stack([s.relative for s in stats]).amax(0),
        evaluations=sum(s.evaluations for s in stats),
        syncs=sum(s.syncs for s in stats),
        backward=backward,
    )
    choices = [f"{i}: {part.choice}" for i, part in enumerate(parts) if part.choice]
    return BranchSolution(
        value=tuple(part.value for part in parts),
        result=worst([part.result for part in parts]),
        stats=together,
        choice="; ".join(choices),
        parts=tuple(parts),
    )


@dataclass(frozen=True)
class BranchMap:
    """z ↦ step(z, *args), started at ``start``; ``finish`` brings the answer into the domain."""

    step: Callable[..., Any]
    start: Any
    args: tuple[Any, ...]
    finish: Callable[[Any], Any]
    tell: Callable[[Solution[Any]], None]
    """Hands the branch's solution to who observes it."""


def branch_map(layer: nn.Module, x: Tensor, z0: Any) -> BranchMap:
    """T_τ of the layer's problem with the τ that its own solver would take, or T of its map.

    Of a monotone layer with a splitting solver it is the map of that splitting.
    """
    if isinstance(layer, EquilibriumLayer):
        return _of_problem(layer, x, z0)
    if isinstance(layer, MapLayer):
        return _of_map(layer, x, z0)
    raise TypeError(
        f"joint=True needs branches that are an EquilibriumLayer or a MapLayer, got "
        f"{type(layer).__name__}; use joint=False, which asks each branch to solve by itself."
    )


def solve_branch(layer: Any, x: Tensor, z0: Any, options: dict[str, Any]) -> Solution[Any]:
    """The branch's own solve, told to who observes it."""
    if isinstance(layer, MonitoredMapLayer):
        return layer.observed_solve(x, z0, **options)
    found: Solution[Any] = layer.solve(x, z0, **options)
    report(layer, found)
    return found


def _of_map(layer: MapLayer, x: Tensor, z0: Any) -> BranchMap:
    if isinstance(layer, MonotoneDEQ) and isinstance(layer.solver, SplittingSolver):
        return _of_inclusion(layer, layer.solver, x, z0)
    injected = layer.injected(x)
    start = layer.start(x, *injected) if z0 is None else z0
    layer.check_state(start, x)
    step = layer.bound_step()

    def tell(solution: Solution[Any]) -> None:
        if isinstance(layer, MonitoredMapLayer):
            layer.after_solve(solution.value, failed_codes(solution.result), *injected)
            layer.tell(solution, step, injected)
        else:
            report(layer, solution)

    return BranchMap(step, start, injected, lambda z: z, tell)


def _of_inclusion(layer: MonotoneDEQ, solver: SplittingSolver, x: Tensor, z0: Any) -> BranchMap:
    """The step of the layer's own splitting: σ(Wz + c) may expand, and this contracts always."""
    splitting = layer.split(solver, x, z0)
    return BranchMap(
        splitting.step,
        splitting.start,
        splitting.inputs,
        splitting.read,
        partial(report, layer),
    )


def _of_problem(layer: EquilibriumLayer, x: Tensor, z0: Tensor | None) -> BranchMap:
    problem, start = layer.posed(x, z0)
    choice = choice_for(problem, layer.solver, partial(layer.nominal_bounds, problem))
    step, args = step_of(problem, choice.tau)
    return BranchMap(step, start, args, problem.into_domain, partial(report, layer))


class MultiBranch(nn.Module):
    """y = (1/n) Σᵢ Rᵢ z*ᵢ, z*ᵢ = layerᵢ(Pᵢ x): n branches, each at its own scale.

    Pᵢ is average pooling of x [B, C, H, W] to ``scales[i]`` pixels, Rᵢ average pooling or nearest
    upsampling from there to the output's. The papers' networks for CIFAR have six branches with
    ``scales=(32, 16, 8, 8, 4, 4)`` (GEQ A.6). Any layer with ``is_equilibrium`` will do, GEQ,
    OptEq, KerDEQ, DEQ, …, whose state is one feature map; OptEq in ``form="state"`` has as many
    channels as its neighbors.

    ``solve(x)`` gives the tuple of states and a sample's worst result code (``BranchSolution``,
    with the branches' own Solutions in ``parts``), ``certify(x)`` the certificates of all branches
    at their own inputs, which together certify the whole.

    With ``chain=True`` a branch also sees the branches before it: branch i solves at
    Pᵢx + Σ_{j<i} Rⱼyⱼ, where yⱼ = normⱼ(z*ⱼ) is its answer after a batch norm, and y is fused from
    the yᵢ. Each branch still has its own certificate, at the input that it saw; ``output_error``
    carries the error of a branch through those behind it.

    The branches are solved one after the other, each by its own solver and adjoint. With
    ``joint=True`` they are one fixed point on the tuple of states, by ``solver`` and ``adjoint``:
    one test of convergence for all, at which a GPU makes the host wait. But all run until the whole
    has converged, and coarse branches, which weigh little in its norm, come out less precise (1e-4
    where they had 1e-6 by themselves, at equal time on a CPU); so it is not the default.

    Args:
        layers: the branches.
        scales: the pixels of each branch, a number (square) or (height, width).
        output: the pixels of y; None: the first branch's. Global mean pooling of y gives the same
            for every output, so a network that ends in it may take the smallest.
        fuse: "average", "sum", or "concatenate" (channels side by side).
        chain: whether a branch also sees those before it; all have the channels of x then.
        joint: see above.
        solver, adjoint: with ``joint=True`` alone; Anderson() and Implicit() if not given.
    """

    is_equilibrium: ClassVar[bool] = True

    def __init__(
        self,
        layers: Sequence[nn.Module],
        scales: Sequence[Pixels],
        *,
        output: Pixels | None = None,
        fuse: Fuse = "average",
        chain: bool = False,
        joint: bool = False,
        solver: SolverOptions | None = None,
        adjoint: Adjoint | None = None,
    ) -> None:
        super().__init__()
        layers, scales = list(layers), list(scales)
        if not layers or len(layers) != len(scales):
            raise ValueError(
                f"MultiBranch takes as many scales as layers, at least one; got {len(layers)} "
                f"layers and {len(scales)} scales."
            )
        for i, layer in enumerate(layers):
            if not getattr(layer, "is_equilibrium", False):
                raise TypeError(
                    f"MultiBranch: layer {i} is a {type(layer).__name__}; a branch is an "
                    "equilibrium layer such as eq.nn.GEQ(...) (one with is_equilibrium = True)."
                )
        if fuse not in ("average", "sum", "concatenate"):
            raise ValueError(
                f"MultiBranch(fuse={fuse!r}): expected 'average', 'sum' or 'concatenate'."
            )
        if not joint and (solver is not None or adjoint is not None):
            raise ValueError(
                "MultiBranch takes solver and adjoint with joint=True; else each branch has its "
                "own: give them to the layers."
            )
        if chain and joint:
            raise ValueError(
                "MultiBranch(chain=True, joint=True): the branches of a chain are solved one after "
                "the other; take one of the two."
            )
        self.branches = nn.ModuleList(layers)
        self.chain = chain
        if chain:
            self.norms = nn.ModuleList(nn.BatchNorm2d(_state_channels(b)) for b in layers)
        self.scales = tuple(_pixels(f"scales[{i}]", s) for i, s in enumerate(scales))
        self.output = self.scales[0] if output is None else _pixels("output", output)
        self.fuse: Fuse = fuse
        self.joint = joint
        self.solver: SolverOptions = Anderson() if solver is None else solver
        self.adjoint: Adjoint = Implicit() if adjoint is None else adjoint
        check_ways(self.solver, self.adjoint)
        for scale in self.scales:
            _ratio(scale, self.output)

    # ------------------------------------------------------------------ in, solve, out

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """Pᵢx: what each branch sees, [B, C, *scales[i]]."""
        if not isinstance(x, Tensor):
            raise TypeError(f"MultiBranch takes a tensor [B, C, H, W], got {type(x).__name__}.")
        if x.ndim != 4:
            raise ValueError(f"MultiBranch takes x [B, C, H, W], got shape {tuple(x.shape)}.")
        size = (x.shape[2], x.shape[3])
        for scale in self.scales:
            if size[0] % scale[0] or size[1] % scale[1]:
                raise ValueError(
                    f"MultiBranch cannot pool a map of {size[0]} × {size[1]} pixels to the scale "
                    f"{scale[0]} × {scale[1]}: the scale must divide it. Scales are pixels, not "
                    "factors."
                )
        pooled = {size: x}
        for scale in sorted(set(self.scales), reverse=True):
            if scale not in pooled:
                finer = min(s for s in pooled if s[0] % scale[0] == 0 and s[1] % scale[1] == 0)
                factors = finer[0] // scale[0], finer[1] // scale[1]
                pooled[scale] = average_pool(pooled[finer], *factors)
        return tuple(pooled[scale] for scale in self.scales)

    def solve(self, x: Tensor, z0: Sequence[Any] | None = None, **options: Any) -> BranchSolution:
        """All states and how each sample ended. Options go to every branch's (or the one) solve."""
        return self._run(x, z0, options)[0]

    def _run(
        self, x: Tensor, z0: Sequence[Any] | None, options: dict[str, Any]
    ) -> tuple[BranchSolution, list[Tensor]]:
        """The solution, and the output of each branch: its state, normalized in a chain."""
        inputs, starts = self.split(x), self._one_each("z0", z0)
        if self.joint:
            branches = zip(self.branches, inputs, starts, strict=True)
            found = self._solve_jointly([branch_map(b, u, z) for b, u, z in branches], options)
            return found, [self._output(i, z) for i, z in enumerate(found.value)]
        parts: list[Solution[Any]] = []

        def answer(i: int, seen: Tensor) -> Tensor:
            parts.append(solve_branch(self.branches[i], seen, starts[i], options))
            state: Tensor = parts[-1].value
            return state

        outputs = self._walk(inputs, answer)
        return combine(parts), outputs

    def _walk(
        self, inputs: Sequence[Tensor], answer: Callable[[int, Tensor], Tensor]
    ) -> list[Tensor]:
        """The outputs of the branches; answer(i, what branch i sees) gives its state."""
        outputs: list[Tensor] = []
        total: Tensor | None = None
        for i, (own, scale) in enumerate(zip(inputs, self.scales, strict=True)):
            if total is not None:
                total = _resize(total, scale)
            state = answer(i, own if total is None else own + total)
            _check_map(i, state, scale)
            outputs.append(self._output(i, state))
            if self.chain:
                total = outputs[i] if total is None else total + outputs[i]
        return outputs

    def gain(self, i: int) -> float:
        """What the state of branch i is multiplied with before it leaves the branch: 1."""
        return 1.0

    def _output(self, i: int, z: Tensor) -> Tensor:
        scaled = z if self.gain(i) == 1.0 else self.gain(i) * z
        if not self.chain:
            return scaled
        out: Tensor = self.norms[i](scaled)
        return out

    def _one_each(self, name: str, states: Sequence[Any] | None) -> list[Any]:
        count = len(self.branches)
        found = [None] * count if states is None else list(states)
        if len(found) != count:
            raise ValueError(
                f"MultiBranch: {name} must hold a state for each of the {count} branches, got "
                f"{len(found)}."
            )
        return found

    def _solve_jointly(self, maps: list[BranchMap], options: dict[str, Any]) -> BranchSolution:
        steps = [m.step for m in maps]

        def step(states: tuple[Any, ...], *args: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(f(z, *a) for f, z, a in zip(steps, states, args, strict=True))

        chosen = {"solver": self.solver, "adjoint": self.adjoint, **options}
        start = tuple(m.start for m in maps)
        with uncached(pytree.tree_leaves(start)[0]):
            found = fixed_point(step, start, tuple(m.args for m in maps), **chosen)
        value = tuple(m.finish(z) for m, z in zip(maps, found.value, strict=True))
        parts = tuple(Solution(z, found.result, found.stats) for z in value)
        for branch, part in zip(maps, parts, strict=True):
            branch.tell(part)
        choice = "all branches as one fixed point"
        return BranchSolution(value, found.result, found.stats, choice, parts)

    def merge(self, states: Sequence[Tensor]) -> Tensor:
        """Σᵢ Rᵢyᵢ, averaged, summed or side by side, [B, C, *output]; in a chain yᵢ = normᵢ(zᵢ)."""
        for i, (z, scale) in enumerate(zip(states, self.scales, strict=True)):
            _check_map(i, z, scale)
        return self._fuse([self._output(i, z) for i, z in enumerate(states)])

    def _fuse(self, outputs: Sequence[Tensor]) -> Tensor:
        moved = [_resize(y, self.output) for y in outputs]
        if self.fuse == "concatenate":
            return torch.cat(moved, 1)
        channels = [z.shape[1] for z in moved]
        if len(set(channels)) > 1:
            raise ValueError(
                f"MultiBranch(fuse={self.fuse!r}) needs equal channels in all branches, got "
                f"{channels}: give the layers one number of channels, or fuse='concatenate'."
            )
        total = moved[0]
        for z in moved[1:]:
            total = total + z
        return total / len(moved) if self.fuse == "average" else total

    def forward(self, x: Tensor, z0: Sequence[Any] | None = None) -> Tensor:
        """y, [B, C, *output]; ``z0`` is a warm start, a state for each branch."""
        solution, outputs = self._run(x, z0, {})
        report(self, solution)
        return self._fuse(outputs)

    # ------------------------------------------------------------------ certificates

    def certify(self, x: Tensor, z: Sequence[Any] | None = None) -> CompositeCertificate:
        """The certificates of the branches at their own inputs, by "branch 0", "branch 1", …

        ``output_error`` turns them into a bound for y. In a chain the input of a branch is made
        from the states of those before it: the given ones, or those of a solve.
        """
        quiet = copy.deepcopy(self).eval() if self.chain or (z is None and self.joint) else self
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            if z is None and (self.chain or self.joint):
                z = quiet.solve(x).value
            states = self._one_each("z", z)
            seen = list(self.split(x))
            if self.chain:
                inputs, seen = tuple(seen), []

                def given(i: int, own: Tensor) -> Tensor:
                    seen.append(own)
                    state: Tensor = states[i]
                    return state

                quiet._walk(inputs, given)
        found: dict[str, Guaranteed] = {}
        for i, branch in enumerate(self.branches):
            asked: Any = branch
            found[f"branch {i}"] = certify(asked, seen[i], states[i])
        note = "the whole is certified where each branch is, at the input that it sees"
        return CompositeCertificate(found, note)

    def output_error(self, certificate: CompositeCertificate) -> Tensor:
        """‖y − y*‖ ≤ (1/n) Σᵢ ‖Rᵢ‖·gᵢδᵢ, [B] in float64; inf where a branch has no bound.

        δᵢ bounds ‖zᵢ − z*ᵢ‖; in a chain gᵢ is the largest factor of the branch's norm (evaluation
        mode), else 1. In a chain the input of branch i is itself off by Σ_{j<i} ‖Rⱼ‖gⱼδⱼ, which
        its Lipschitz constant turns into an error of z*ᵢ; without one the bound is inf. Average
        pooling of k pixels has the norm 1/√k, nearest upsampling to k pixels √k. Rounding of the
        norms and of the fusion is not counted.
        """
        bounds: list[Tensor] = []
        for i, (part, scale) in enumerate(
            zip(certificate.parts.values(), self.scales, strict=True)
        ):
            error = getattr(part, "error_bound", None)
            error = torch.full_like(part.residual, math.inf) if error is None else error
            error = error.double().cpu()
            if self.chain and i:
                slope = getattr(part, "lipschitz", None)
                seen = sum(
                    (_resize_norm(self.scales[j], scale) * bounds[j] for j in range(i)),
                    torch.zeros_like(error),
                )
                error = error + torch.where(
                    seen > 0.0, seen * (math.inf if slope is None else slope), 0.0
                )
            bounds.append(self.gain(i) * self._norm_factor(i) * error)
        stacked = torch.stack(
            [_resize_norm(s, self.output) * e for s, e in zip(self.scales, bounds, strict=True)]
        )
        if self.fuse == "concatenate":
            norm: Tensor = torch.linalg.vector_norm(stacked, dim=0)
            return norm
        return stacked.mean(0) if self.fuse == "average" else stacked.sum(0)

    def _norm_factor(self, i: int) -> float:
        """The Lipschitz constant of norm i in evaluation mode; 1 without a chain."""
        if not self.chain:
            return 1.0
        norm: Any = self.norms[i]
        spread = (norm.running_var.double() + norm.eps).sqrt()
        return float((norm.weight.detach().double().abs() / spread).max()) * (1.0 + 1e-14)

    def extra_repr(self) -> str:
        joint = f", joint, solver={self.solver!r}, adjoint={self.adjoint!r}" if self.joint else ""
        chain = ", chain" if self.chain else ""
        return f"scales={self.scales}, output={self.output}, fuse={self.fuse!r}{chain}{joint}"


def _state_channels(layer: nn.Module) -> int:
    channels = getattr(layer, "state_channels", None)
    if not isinstance(channels, int):
        raise TypeError(
            f"MultiBranch(chain=True): a {type(layer).__name__} does not say the channels of its "
            "state (state_channels); branches of a chain are GEQ, KerDEQ, OptEq or the like."
        )
    return channels


def _check_map(i: int, z: object, scale: tuple[int, int]) -> None:
    if not isinstance(z, Tensor) or z.ndim != 4 or tuple(z.shape[2:]) != scale:
        given = f"shape {tuple(z.shape)}" if isinstance(z, Tensor) else f"a {type(z).__name__}"
        raise ValueError(
            f"MultiBranch: the state of branch {i} must be a feature map "
            f"[B, C, {scale[0]}, {scale[1]}], got {given}."
        )


def _pixels(name: str, value: object) -> tuple[int, int]:
    pair = (value, value) if isinstance(value, int) else value
    if (
        not isinstance(pair, tuple)
        or len(pair) != 2
        or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in pair)
    ):
        raise ValueError(
            f"MultiBranch({name}={value!r}): expected a number of pixels or (height, width)."
        )
    return pair


def _ratio(scale: tuple[int, int], output: tuple[int, int]) -> None:
    """Raise unless one divides the other along each axis, in the same direction."""
    down = scale[0] % output[0] == 0 and scale[1] % output[1] == 0
    up = output[0] % scale[0] == 0 and output[1] % scale[1] == 0
    if not (down or up):
        raise ValueError(
            f"MultiBranch: a branch of {scale[0]} × {scale[1]} pixels cannot be pooled or "
            f"upsampled to the output of {output[0]} × {output[1]}: one must divide the other."
        )


def _resize_norm(scale: tuple[int, int], output: tuple[int, int]) -> float:
    """‖R‖ from one size to another."""
    return math.sqrt((output[0] * output[1]) / (scale[0] * scale[1]))


def _resize(z: Tensor, size: tuple[int, int]) -> Tensor:
    height, width = z.shape[2:]
    if (height, width) == size:
        return z
    if height >= size[0] and width >= size[1]:
        return average_pool(z, height // size[0], width // size[1])
    return F.interpolate(z, size=size, mode="nearest")
