"""DEQ: the fixed point of any block, and RepeatedBlock, the same block applied K times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from equilibria.engine.adjoint import Adjoint
from equilibria.engine.options import check_number
from equilibria.engine.solver import Solver

from .deq_base import MonitoredMapLayer
from .deq_block import BlockHolder, Start
from .residual_block import check_sizes

__all__ = ["DEQ", "RepeatedBlock"]


class DEQ(BlockHolder, MonitoredMapLayer):
    """z* = block(z*, x): an infinitely deep weight-tied network (Bai, Kolter and Koltun 2019).

    x [B, ...] is a tensor or a tree of them; so is the state z. The block is any module or function
    that maps samples one by one and returns what is shaped as z::

        layer = eq.nn.DEQ(eq.nn.ResidualBlock(48, 64))
        z = layer(features)  # [B, 48, H, W]

    Whether there is a fixed point, one or many, is not known of a general block. Training with a
    penalty on ‖J‖²_F (``jacobian_weight`` and ``collect_penalties``, or ``forward_with_penalty``)
    keeps it well behaved, ``spectral_radius(x)`` watches it, and ``certify(x)`` says what is
    proven: nothing, unless a contraction factor is given or the block has ``contraction_bound()``.

    Batch norm inside the block runs on its running statistics, which move once a training forward
    (see ``BlockHolder``); dropout inside the block is an error. Group norm is the safe choice.

    Args:
        block: block(z, x) → z.
        start: where the solver starts: None is zero, shaped as x; (n, ...) is zero, [B, n, ...]; or
            a function x → z0, which a state that is a tree needs.
        contraction: ρ, if you can prove ‖block(a, x) − block(b, x)‖ ≤ ρ‖a − b‖ for all a, b, x and
            all weights to come. A block with a method ``contraction_bound()`` is asked instead.
        jacobian_weight: of ‖J‖²_F/n in what ``collect_penalties`` sums.
        jacobian_samples: random vectors for an estimate of ‖J‖²_F.
        solver, adjoint: Anderson() and Implicit() if not given.
    """

    def __init__(
        self,
        block: Callable[[Any, Any], Any],
        *,
        start: Start = None,
        contraction: float | None = None,
        jacobian_weight: float = 0.0,
        jacobian_samples: int = 1,
        solver: Solver | None = None,
        adjoint: Adjoint | None = None,
    ) -> None:
        MonitoredMapLayer.__init__(self, solver, adjoint, jacobian_weight, jacobian_samples)
        self.contraction = contraction
        check_number(self, "contraction", low=0.0, optional=True)
        self._hold(block, start)

    def inject(self, x: Any) -> tuple[Any, ...]:
        name = type(self).__name__
        leaves = pytree.tree_leaves(x)
        if not leaves or not all(isinstance(t, Tensor) for t in leaves):
            raise TypeError(
                f"{name} takes a tensor [B, ...] or a tree of them, got {type(x).__name__}."
            )
        if not any(t.is_floating_point() for t in leaves):
            raise TypeError(f"{name} takes a floating-point x, got {leaves[0].dtype}.")
        return (x,)

    def step(self, z: Any, *injected: Any) -> Any:
        """block(z, x)."""
        return self.block(z, *injected)

    def start(self, x: Any, *injected: Any) -> Any:
        return self.begin(x)

    def after_solve(self, z: Any, failed: Tensor | None, *injected: Any) -> None:
        (x,) = injected
        self.move(z, x, failed)

    def contraction_bound(self) -> float | None:
        """The ρ that was given, or what the block says of itself; None: not known."""
        if self.contraction is not None:
            return float(self.contraction)
        asked = getattr(self.block, "contraction_bound", None)
        found = asked() if callable(asked) else None
        return None if found is None else float(found)

    def repeated(self, repeats: int) -> RepeatedBlock:
        """The weight-tied network of ``repeats`` applications, sharing this layer's block."""
        return RepeatedBlock(self.block, repeats=repeats, start=self.initial)

    def extra_repr(self) -> str:
        known = "" if self.contraction is None else f", contraction={self.contraction:g}"
        return super().extra_repr() + known


class RepeatedBlock(BlockHolder):
    """z_{k+1} = block(z_k, x), k < K: the weight-tied repeat-K twin of a DEQ (paper 004, §4.2.1).

    An explicit network, differentiated by autograd; exactly K steps of Picard. Its state_dict has
    the names of the DEQ's, so that either loads the other's; ``deq.repeated(K)`` and
    ``repeated.deq()`` share the block itself.

    Args:
        block: block(z, x) → z.
        repeats: K.
        start: z_0, as in DEQ.
    """

    def __init__(
        self, block: Callable[[Any, Any], Any], *, repeats: int, start: Start = None
    ) -> None:
        super().__init__()
        check_sizes("RepeatedBlock", {"repeats": repeats})
        self.repeats = repeats
        self._hold(block, start)

    def forward(self, x: Any, z0: Any = None) -> Any:
        """z_K, shaped as z_0."""
        z = self.begin(x) if z0 is None else z0
        for _ in range(self.repeats):
            z = self.block(z, x)
        self.move(z, x)
        return z

    def deq(self, **options: Any) -> DEQ:
        """The fixed point of the same block; options as DEQ."""
        return DEQ(self.block, **{"start": self.initial, **options})

    def extra_repr(self) -> str:
        return f"repeats={self.repeats}"
