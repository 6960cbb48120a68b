"""MultiBranch: equilibrium layers at several scales, side by side or in a chain (GEQ §4)."""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equilibria.certify import CompositeCertificate, Guaranteed, certify
from equilibria.engine.result import BackwardStats, ConvergenceWarning, Result, Solution, Stats
from equilibria.engine.tree import sample_norm
from equilibria.ops.pooling import average_pool

from .deq import MonitoredMapLayer
from .observing import report

Pixels = int | tuple[int, int]


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


def _largest(found: list[Tensor | None]) -> Tensor | None:
    known = [t for t in found if t is not None]
    return torch.stack(known).amax(0) if known else None


class _BranchBackward(BackwardStats):
    """What the branches' backward solves did, read when asked: they are filled in later."""

    def __init__(self, parts: Sequence[BackwardStats]) -> None:
        self.parts = tuple(parts)

    @property
    def masked(self) -> int:  # type: ignore[override]
        """−1 where a branch does not know."""
        found = [part.masked for part in self.parts]
        return -1 if min(found) < 0 else max(found)

    solves = property(lambda self: sum(p.solves for p in self.parts))
    unconverged = property(lambda self: sum(p.unconverged for p in self.parts))
    steps = property(lambda self: _largest([p.steps for p in self.parts]))
    residual = property(lambda self: _largest([p.residual for p in self.parts]))


def worst(codes: Sequence[Tensor]) -> Tensor:
    """The worst result code of each sample, [B], without waiting for the device."""
    stacked = torch.stack(list(codes))
    order = torch.zeros_like(stacked)
    # From bad to worse, above Result.converged.
    names = ("fixed_steps", "max_steps", "stagnated", "diverged", "nonfinite")
    for rank, code in enumerate((Result[name] for name in names), start=1):
        order = torch.where(stacked == int(code), rank, order)
    found: Tensor = stacked.gather(0, order.argmax(0, keepdim=True))[0]
    return found


def combine(parts: Sequence[Solution[Tensor]]) -> BranchSolution:
    """One Solution out of those of the branches, in their order."""
    stats = [part.stats for part in parts]
    traced = torch.compiler.is_compiling()
    backward = BackwardStats() if traced else _BranchBackward([s.backward for s in stats])
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


class Branches(nn.Module):
    """y = (1/n) Σᵢ Rᵢ layerᵢ(Pᵢ x): n modules at scales of their own; see ``MultiBranch``."""

    def __init__(
        self,
        layers: Sequence[nn.Module],
        scales: Sequence[Pixels],
        *,
        output: Pixels | None = None,
        chain: bool = False,
    ) -> None:
        super().__init__()
        layers, scales = list(layers), list(scales)
        if not layers or len(layers) != len(scales):
            raise ValueError(
                f"MultiBranch takes as many scales as layers, at least one; got {len(layers)} "
                f"layers and {len(scales)} scales."
            )
        self.branches = nn.ModuleList(layers)
        self.chain = chain
        if chain:
            self.norms = nn.ModuleList(nn.BatchNorm2d(_state_channels(b)) for b in layers)
        self.scales = tuple(_pixels(f"scales[{i}]", s) for i, s in enumerate(scales))
        self.output = self.scales[0] if output is None else _pixels("output", output)
        pairs = [(scale, self.output, "the output") for scale in self.scales]
        if chain:
            pairs += [(a, b, "the next branch") for a, b in itertools.pairwise(self.scales)]
        for scale, other, what in pairs:
            if not (_divides(scale, other) or _divides(other, scale)):
                raise ValueError(
                    f"MultiBranch: a branch of {scale[0]} × {scale[1]} pixels cannot be pooled or "
                    f"upsampled to {what} of {other[0]} × {other[1]}: one must divide the other."
                )

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """Pᵢx: what each branch sees, [B, C, *scales[i]]."""
        if not isinstance(x, Tensor):
            raise TypeError(f"MultiBranch takes a tensor [B, C, H, W], got {type(x).__name__}.")
        if x.ndim != 4:
            raise ValueError(f"MultiBranch takes x [B, C, H, W], got shape {tuple(x.shape)}.")
        size = (x.shape[2], x.shape[3])
        for scale in self.scales:
            if not _divides(scale, size):
                raise ValueError(
                    f"MultiBranch cannot pool a map of {size[0]} × {size[1]} pixels to the scale "
                    f"{scale[0]} × {scale[1]}: the scale must divide it. Scales are pixels, not "
                    "factors."
                )
        pooled = {size: x}
        for scale in sorted(set(self.scales), reverse=True):
            if scale not in pooled:
                finer = min(s for s in pooled if _divides(scale, s))
                factors = finer[0] // scale[0], finer[1] // scale[1]
                pooled[scale] = average_pool(pooled[finer], *factors)
        return tuple(pooled[scale] for scale in self.scales)

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

    def _average(self, outputs: Sequence[Tensor]) -> Tensor:
        channels = [y.shape[1] for y in outputs]
        if len(set(channels)) > 1:
            raise ValueError(
                f"MultiBranch needs equal channels in all branches, got {channels}: give the "
                "layers one number of channels."
            )
        first, *others = [_resize(y, self.output) for y in outputs]
        return sum(others, first) / len(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """y, [B, C, *output]."""
        return self._average(self._walk(self.split(x), lambda i, seen: self.branches[i](seen)))

    def extra_repr(self) -> str:
        return f"scales={self.scales}, output={self.output}, chain={self.chain}"


class MultiBranch(Branches):
    """y = (1/n) Σᵢ Rᵢ z*ᵢ, z*ᵢ = layerᵢ(Pᵢ x): n branches, each at its own scale.

    Pᵢ is average pooling of x [B, C, H, W] to ``scales[i]`` pixels, Rᵢ average pooling or nearest
    upsampling from there to the output's. The papers' networks for CIFAR have six branches with
    ``scales=(32, 16, 8, 8, 4, 4)`` (GEQ A.6). Any layer with ``is_equilibrium`` whose state is one
    feature map will do, each solved by its own solver and adjoint; all have equal channels.

    With ``chain=True`` a branch also sees the branches before it: branch i solves at Pᵢx + sᵢ,
    sᵢ the sum sᵢ₋₁ + yᵢ₋₁ resized to its scale, where yⱼ = normⱼ(z*ⱼ) is an answer after a batch
    norm, and y is the mean of the Rᵢyᵢ. Each branch still has its own certificate, at the input
    that it saw; ``output_error`` carries the error of a branch through those behind it.

    Args:
        layers: the branches.
        scales: the pixels of each branch, a number (square) or (height, width).
        output: the pixels of y; None: the first branch's. Global mean pooling of y gives the same
            for every output, so a network that ends in it may take the smallest.
        chain: whether a branch also sees those before it; all have the channels of x then.
    """

    is_equilibrium: ClassVar[bool] = True

    def __init__(
        self,
        layers: Sequence[nn.Module],
        scales: Sequence[Pixels],
        *,
        output: Pixels | None = None,
        chain: bool = False,
    ) -> None:
        layers = list(layers)
        for i, layer in enumerate(layers):
            if not getattr(layer, "is_equilibrium", False):
                raise TypeError(
                    f"MultiBranch: layer {i} is a {type(layer).__name__}; a branch is an "
                    "equilibrium layer such as eq.nn.GEQ(...) (one with is_equilibrium = True)."
                )
        super().__init__(layers, scales, output=output, chain=chain)

    @torch.no_grad()
    def inputs(self, x: Tensor) -> tuple[Tensor, ...]:
        """What each branch solves at in eval mode: Pᵢx, in a chain with the answers before it."""
        return self._seen(x, [None] * len(self.branches))

    def _seen(self, x: Tensor, states: list[Any]) -> tuple[Tensor, ...]:
        """``inputs`` where the states are known; in a chain a solve fills in those that are not."""
        own = self.split(x)
        if not self.chain:
            return own
        quiet, seen = copy.deepcopy(self).eval(), list[Tensor]()

        def answer(i: int, given: Tensor) -> Any:
            seen.append(given)
            layer: Any = quiet.branches[i]
            if states[i] is None:
                states[i] = layer.solve(given).value
            return states[i]

        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            quiet._walk(own, answer)
        return tuple(seen)

    def solve(self, x: Tensor, z0: Sequence[Any] | None = None, **options: Any) -> BranchSolution:
        """All states and how each sample ended. Options go to every branch's solve."""
        return self._run(x, z0, options)[0]

    def _run(
        self, x: Tensor, z0: Sequence[Any] | None, options: dict[str, Any]
    ) -> tuple[BranchSolution, list[Tensor]]:
        """The solution, and the output of each branch: its state, normalized in a chain."""
        inputs, starts = self.split(x), self._one_each("z0", z0)
        parts: list[Solution[Any]] = []

        def answer(i: int, seen: Tensor) -> Tensor:
            layer: Any = self.branches[i]
            if isinstance(layer, MonitoredMapLayer):
                parts.append(layer.observed_solve(seen, starts[i], **options))
            else:
                parts.append(layer.solve(seen, starts[i], **options))
                report(layer, parts[i])
            state: Tensor = parts[i].value
            return state

        outputs = self._walk(inputs, answer)
        return combine(parts), outputs

    def _one_each(self, name: str, states: Sequence[Any] | None) -> list[Any]:
        count = len(self.branches)
        found = [None] * count if states is None else list(states)
        if len(found) != count:
            raise ValueError(
                f"MultiBranch: {name} must hold a state for each of the {count} branches, got "
                f"{len(found)}."
            )
        return found

    def merge(self, states: Sequence[Tensor]) -> Tensor:
        """(1/n) Σᵢ Rᵢyᵢ, [B, C, *output]; in a chain yᵢ = normᵢ(zᵢ), else zᵢ."""
        for i, (z, scale) in enumerate(zip(states, self.scales, strict=True)):
            _check_map(i, z, scale)
        return self._average([self._output(i, z) for i, z in enumerate(states)])

    def forward(self, x: Tensor, z0: Sequence[Any] | None = None) -> Tensor:
        """y, [B, C, *output]; ``z0`` is a warm start, a state for each branch."""
        solution, outputs = self._run(x, z0, {})
        report(self, solution)
        return self._average(outputs)

    # ------------------------------------------------------------------ certificates

    def certify(self, x: Tensor, z: Sequence[Any] | None = None) -> CompositeCertificate:
        """The certificates of the branches at their own inputs, by "branch 0", "branch 1", …

        ``output_error`` turns them into a bound for y. In a chain the input of a branch is made
        from the states of those before it: the given ones, or those of a solve.
        """
        states = self._one_each("z", z)
        seen = self._seen(x, states)
        asked: Any = self.branches
        rows = enumerate(zip(asked, seen, states, strict=True))
        found: dict[str, Guaranteed] = {f"branch {i}": certify(*row) for i, row in rows}
        note = "the whole is certified where each branch is, at the input that it sees"
        return CompositeCertificate(found, note)

    def output_error(self, certificate: CompositeCertificate) -> Tensor:
        """‖y − y*‖ ≤ (1/n) Σᵢ ‖Rᵢ‖·gᵢδᵢ, [B] in float64; inf where a branch has no bound.

        δᵢ bounds ‖zᵢ − z*ᵢ‖; in a chain gᵢ is the largest factor of the branch's norm (evaluation
        mode), else 1. In a chain the input of branch i is itself off by Σ_{j<i} ‖Rⱼ‖gⱼδⱼ, which
        its Lipschitz constant turns into an error of z*ᵢ; without one the bound is inf. Average
        pooling of k pixels has the norm 1/√k, nearest upsampling to k pixels √k. Rounding of the
        norms and of the average is not counted.
        """
        bounds: list[Tensor] = []
        for i, (part, scale) in enumerate(
            zip(certificate.parts.values(), self.scales, strict=True)
        ):
            error = part.error_bound.double().cpu()
            if self.chain and i:
                slope = getattr(part, "lipschitz", None)
                slope = math.inf if slope is None else slope
                before = zip(self.scales, bounds, strict=False)
                seen = torch.stack([_resize_norm(s, scale) * e for s, e in before]).sum(0)
                error = error + torch.where(seen > 0.0, seen * slope, 0.0)
            bounds.append(self.gain(i) * self._norm_factor(i) * error)
        pairs = zip(self.scales, bounds, strict=True)
        return torch.stack([_resize_norm(s, self.output) * e for s, e in pairs]).mean(0)

    def _norm_factor(self, i: int) -> float:
        """The Lipschitz constant of norm i in evaluation mode; 1 without a chain."""
        if not self.chain:
            return 1.0
        norm: Any = self.norms[i]
        spread = (norm.running_var.double() + norm.eps).sqrt()
        return float((norm.weight.detach().double().abs() / spread).max()) * (1.0 + 1e-14)


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
    whole = isinstance(pair, tuple) and all(type(n) is int and n >= 1 for n in pair)
    if not isinstance(pair, tuple) or not whole or len(pair) != 2:
        raise ValueError(
            f"MultiBranch({name}={value!r}): expected a number of pixels or (height, width)."
        )
    return pair


def _divides(small: tuple[int, int], large: tuple[int, int]) -> bool:
    return large[0] % small[0] == 0 and large[1] % small[1] == 0


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
