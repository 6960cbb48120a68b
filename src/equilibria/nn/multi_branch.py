"""MultiBranch: equilibrium layers side by side, each at its own scale (MOptEq, GEQ §4)."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from equilibria.adjoints import Implicit
from equilibria.engine.adjoint import Adjoint
from equilibria.engine.result import ConvergenceWarning, Solution
from equilibria.engine.solver import Solver
from equilibria.entry import fixed_point
from equilibria.ops.pooling import average_pool
from equilibria.problems.certificate import certify
from equilibria.problems.guarantee import Guaranteed
from equilibria.problems.map_certificate import CompositeCertificate
from equilibria.solvers import Anderson

from .branch_maps import BranchMap, branch_map, solve_branch
from .branch_solution import BranchSolution, combine
from .observing import report
from .precision import uncached

__all__ = ["MultiBranch"]

Pixels = int | tuple[int, int]
Fuse = Literal["average", "sum", "concatenate"]


class MultiBranch(nn.Module):
    """y = (1/n) Σᵢ Rᵢ z*ᵢ, z*ᵢ = layerᵢ(Pᵢ x): n branches, each at its own scale.

    Pᵢ is average pooling of x [B, C, H, W] to ``scales[i]`` pixels, Rᵢ average pooling or nearest
    upsampling from there to the output's. The papers' networks for CIFAR have six branches with
    ``scales=(32, 16, 8, 8, 4, 4)`` (GEQ A.6). Any layer with ``is_equilibrium`` will do, GEQ,
    OptEq, KerDEQ, DEQ, …, whose state is one feature map; OptEq in ``form="state"`` has as many
    channels as its neighbors.

    ``solve(x)`` gives the tuple of states and a sample's worst result code (``BranchSolution``,
    with the branches' own Solutions in ``parts``), ``certify(x)`` the certificates of all branches
    at their own inputs, which together certify the whole: the branches do not see each other.

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
        joint: bool = False,
        solver: Solver | None = None,
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
        self.branches = nn.ModuleList(layers)
        self.scales = tuple(_pixels(f"scales[{i}]", s) for i, s in enumerate(scales))
        self.output = self.scales[0] if output is None else _pixels("output", output)
        self.fuse: Fuse = fuse
        self.joint = joint
        self.solver: Solver = Anderson() if solver is None else solver
        self.adjoint: Adjoint = Implicit() if adjoint is None else adjoint
        if not isinstance(self.solver, Solver):
            raise TypeError(f"solver must be a solver object such as Anderson(), got {solver!r}.")
        if not isinstance(self.adjoint, Adjoint):
            raise TypeError(f"adjoint must be an object such as Implicit(), got {adjoint!r}.")
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
        inputs = self.split(x)
        starts = self._one_each("z0", z0)
        branches = zip(self.branches, inputs, starts, strict=True)
        if self.joint:
            return self._solve_jointly([branch_map(b, u, z) for b, u, z in branches], options)
        return combine([solve_branch(b, u, z, options) for b, u, z in branches])

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
        """Σᵢ Rᵢzᵢ, averaged, summed or side by side: [B, C, *output]."""
        wanted = self.output
        moved = []
        for i, (z, scale) in enumerate(zip(states, self.scales, strict=True)):
            _check_map(i, z, scale)
            moved.append(_resize(z, wanted))
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
        solution = self.solve(x, z0)
        report(self, solution)
        return self.merge(solution.value)

    # ------------------------------------------------------------------ certificates

    def certify(self, x: Tensor, z: Sequence[Any] | None = None) -> CompositeCertificate:
        """The certificates of the branches at their own inputs, by "branch 0", "branch 1", …

        ``output_error`` turns them into a bound for y.
        """
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            inputs = self.split(x)
            if z is None and self.joint:
                z = copy.deepcopy(self).eval().solve(x).value
        states = self._one_each("z", z)
        found: dict[str, Guaranteed] = {}
        for i, branch in enumerate(self.branches):
            asked: Any = branch
            found[f"branch {i}"] = certify(asked, inputs[i], states[i])
        note = "branches do not see each other: the whole is certified where each of them is"
        return CompositeCertificate(found, note)

    def output_error(self, certificate: CompositeCertificate) -> Tensor:
        """‖y − y*‖ ≤ (1/n) Σᵢ ‖Rᵢ‖·‖zᵢ − z*ᵢ‖, [B] in float64; inf where a branch has no bound.

        Average pooling of k pixels has the norm 1/√k, nearest upsampling to k pixels √k. Rounding
        of the fusion itself is not counted.
        """
        bounds = []
        for part, scale in zip(certificate.parts.values(), self.scales, strict=True):
            error = getattr(part, "error_bound", None)
            error = torch.full_like(part.residual, math.inf) if error is None else error
            area = (self.output[0] * self.output[1]) / (scale[0] * scale[1])
            bounds.append(math.sqrt(area) * error.double().cpu())
        stacked = torch.stack(bounds)
        if self.fuse == "concatenate":
            norm: Tensor = torch.linalg.vector_norm(stacked, dim=0)
            return norm
        return stacked.mean(0) if self.fuse == "average" else stacked.sum(0)

    def extra_repr(self) -> str:
        joint = f", joint, solver={self.solver!r}, adjoint={self.adjoint!r}" if self.joint else ""
        return f"scales={self.scales}, output={self.output}, fuse={self.fuse!r}{joint}"


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


def _resize(z: Tensor, size: tuple[int, int]) -> Tensor:
    height, width = z.shape[2:]
    if (height, width) == size:
        return z
    if height >= size[0] and width >= size[1]:
        return average_pool(z, height // size[0], width // size[1])
    return F.interpolate(z, size=size, mode="nearest")
