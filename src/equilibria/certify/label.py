"""Stop a sample when further steps are proven not to change its label.

Each layer takes k steps, in the network's own dtype; one evaluation in float64 bounds ‖z − z*‖ for
its equilibrium z* at the input that it saw, and the bounds pass through the network as in
``certify_network``. With logits l = Vh + d and a proven distance ε of h from the h* of exact
equilibria in all layers, the label y is the one at convergence if

    l_y − l_j > ‖V_y − V_j‖·ε   for every other class j.

Samples for which this holds stop; the others go on from where they are, with twice as many steps.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from equilibria.engine.result import Solution

from .network import Solve, TrackedNetwork, plain_copy

_MOST = 64
"""Steps to try where the network's own solver stops by a tolerance."""


@dataclass(frozen=True, eq=False)
class LabelCertificate:
    """Which samples have the label of the converged network, and after how many steps."""

    logits: Tensor
    """[B, classes], float64, of the last steps that the sample took."""
    proven: Tensor
    """Whether the network at its exact equilibria has the label of ``logits``, [B] bool."""
    steps: Tensor
    """Steps that each layer took for the sample, [B]; of those not proven: taken in vain."""
    error: Tensor
    """The logits of the converged network lie within this of ``logits``, ℓ2, [B]."""
    notes: tuple[str, ...] = ()

    @property
    def label(self) -> Tensor:
        """The class of the largest logit, [B]."""
        return self.logits.argmax(1)


class LabelStopping:
    """``stopping.certify(x)``: the labels of x that few steps prove, for a network with logits.

    What is proven is the label of the *converged* network: in evaluation mode, with the weights
    of ``model``, in exact arithmetic, every layer at its equilibrium, which is proven to be the
    only one. It need not be the label after the fixed steps that the model would take.

    Make it once for a model and use it for many batches; later changes of the model are not seen.

    Args:
        model: as for ``certify_network``. It is left as it is.
        steps: numbers of steps to try, rising; None: 1, 2, 4, … below the number of steps that
            the model takes itself (at most 64 where its solvers have a tolerance).
    """

    def __init__(self, model: nn.Module, *, steps: Sequence[int] | None = None) -> None:
        self._own = plain_copy(model)
        self._layers: dict[str, Any] = dict(self._own.named_modules())
        self.steps = _doubling(self._layers.values()) if steps is None else tuple(steps)
        if sorted(set(self.steps)) != list(self.steps) or min(self.steps, default=0) < 1:
            raise ValueError(f"steps={steps!r}: expected rising integers of at least 1.")
        self._tracked = TrackedNetwork(model, self._advance)
        self._states: dict[tuple[str, int], Any] = {}
        self._calls: dict[str, int] = {}
        self._more = 0

    def __deepcopy__(self, memo: Any) -> Self:
        return self  # layers that copy themselves to be certified hold it

    def _advance(self, name: str, layer: Any, solve: Solve, x: Tensor, z0: Any) -> Solution[Any]:
        """More steps of the layer from its last state, in its own dtype."""
        own = self._layers[name]
        dtype = next((p.dtype for p in own.parameters()), x.dtype)
        call = self._calls.get(name, 0)
        self._calls[name] = call + 1
        start = self._states.get((name, call), z0)
        start = pytree.tree_map_only(Tensor, lambda t: t.to(dtype), start)
        solver = getattr(own.solver, "inner", own.solver)  # of BestIterate
        solver = dataclasses.replace(solver, rtol=0.0, atol=0.0, max_steps=self._more)
        fast = torch.backends.cudnn.flags(enabled=True) if x.is_cuda else nullcontext()
        with fast:  # a certificate holds for any z; its own convolutions are direct
            found: Solution[Any] = own.solve(x.to(dtype), start, solver=solver)
        self._states[name, call] = found.value
        wide = pytree.tree_map_only(Tensor, Tensor.double, found.value)
        return dataclasses.replace(found, value=wide)

    @torch.no_grad()
    def certify(self, x: Tensor) -> LabelCertificate:
        """What is proven of x [B, ...], sample by sample."""
        rest = torch.arange(len(x), device=x.device)
        proven = torch.zeros(len(x), dtype=torch.bool, device=x.device)
        taken = torch.zeros(len(x), dtype=torch.long, device=x.device)
        error = torch.full((len(x),), math.inf, dtype=torch.float64, device=x.device)
        logits: Tensor | None = None
        notes: dict[str, None] = {}
        self._states.clear()
        for before, steps in zip((0, *self.steps), self.steps, strict=False):
            self._calls.clear()
            self._more = steps - before
            found = self._tracked.certify(x[rest])
            notes |= dict.fromkeys(found.notes)
            if logits is None:
                shape = (len(x), found.logits.shape[1])
                logits = torch.full(shape, math.nan, dtype=torch.float64, device=x.device)
            logits[rest], error[rest], taken[rest] = found.logits, found.error, steps
            done = found.radius > 0.0
            proven[rest] = done
            # Where no bound is finite, more steps do not make one.
            keep = (~done & found.logits.isfinite().all(1) & found.error.isfinite()).nonzero()[:, 0]
            rest = rest[keep]
            if not len(rest):
                break
            for key, state in self._states.items():
                keeping = partial(torch.index_select, dim=0, index=keep)
                self._states[key] = pytree.tree_map_only(Tensor, keeping, state)
        self._states.clear()
        assert logits is not None
        return LabelCertificate(logits, proven, taken, error, tuple(notes))


def _doubling(modules: Any) -> tuple[int, ...]:
    """1, 2, 4, … below the steps that the layers take, or up to 64."""
    layers = [m for m in modules if getattr(m, "is_equilibrium", False) and hasattr(m, "solver")]
    fixed = all(layer.solver.fixed_steps for layer in layers)
    most = max((layer.solver.max_steps for layer in layers), default=1) if fixed else _MOST + 1
    return tuple(2**k for k in range(most.bit_length()) if 2**k < most) or (1,)
