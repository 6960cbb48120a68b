"""DEQ: the fixed point of any block; RepeatedBlock, the same block applied K times; ResidualBlock.

``MonitoredMapLayer`` is what DEQ and MDEQ share.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.utils import _pytree as pytree

from equilibria.adjoints.graph import captured, failed_codes, lend
from equilibria.certify.guarantee import solved
from equilibria.certify.map_certificate import MapCertificate, certify_map
from equilibria.engine.adjoint import Adjoint
from equilibria.engine.options import check_number
from equilibria.engine.result import Solution
from equilibria.engine.solver import SolverOptions
from equilibria.engine.spectral import jacobian_penalty, spectral_radius
from equilibria.engine.tree import map_tensors
from equilibria.entry import fixed_point

from .constraints import Constraint, OperatorNorm, constrain
from .inputs import check_groups, check_kernel, check_sizes, solving_dtype
from .layer import MapLayer
from .observing import Penalties, collectors, report


class MonitoredMapLayer(MapLayer):
    """z* = T(z*; x) with an eye on J = ∂T/∂z at z*. The base of DEQ and MDEQ.

    The penalty ‖J‖²_F keeps training from making T unstable (Bai, Koltun and Kolter 2021), the
    spectral radius tells whether it did.
    """

    def __init__(
        self,
        solver: SolverOptions | None = None,
        adjoint: Adjoint | None = None,
        jacobian_weight: float = 0.0,
    ) -> None:
        super().__init__(solver, adjoint)
        self.jacobian_weight = jacobian_weight
        check_number(self, "jacobian_weight", low=0.0)

    def injected(self, x: Any) -> tuple[Any, ...]:
        """``inject(x)`` as it is: x enters the map itself, whose answer shows bad samples."""
        return self.inject(x)

    def contraction_bound(self) -> float | None:
        """ρ with ‖T(a; x) − T(b; x)‖ ≤ ρ‖a − b‖ for all a, b, x, or None where none is known."""
        return None

    def observed_solve(self, x: Any, z0: Any = None, **options: Any) -> Solution[Any]:
        step, start, injected = self.prepared(x, z0)
        solution = self.solve_map(step, start, injected, **options)
        self.tell(solution, step, injected)
        return solution

    def tell(
        self, solution: Solution[Any], step: Callable[..., Any], injected: tuple[Any, ...]
    ) -> None:
        """Hand the solution to who observes this layer, and its penalty to who collects them."""
        report(self, solution)
        if self.jacobian_weight == 0 or torch.compiler.is_compiling():
            return
        wanted = collectors(self, Penalties)
        if wanted:
            penalty = self._penalty(solution, step, injected)
            for found in wanted:
                found.add(self, self.jacobian_weight * penalty)

    def spectral_radius(
        self,
        x: Any,
        z: Any = None,
        *,
        steps: int = 30,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """max |λ(J)| of each sample at z (z* if not given), an estimate by Arnoldi; [B].

        Below 1, plain iteration started close enough finds z*; above 1 it leaves it. It is taken on
        a copy in eval mode: looking changes nothing.
        """
        still = copy.deepcopy(self).eval()
        with torch.no_grad():
            step, start, injected = still.prepared(x, z)
            if z is None:
                z = fixed_point(step, start, injected, solver=self.solver).value
            return spectral_radius(step, z, injected, steps=steps, generator=generator)

    def _penalty(
        self, solution: Solution[Any], step: Callable[..., Any], injected: tuple[Any, ...]
    ) -> Tensor:
        """‖J‖²_F/n at z*, the mean over the samples that did not fail."""
        failed = failed_codes(solution.result)
        # Their inputs may hold NaN, and 0·NaN is NaN in the gradients of shared weights.
        z, given = map_tensors(lambda t: lend(t, failed), (solution.value, injected))
        values = jacobian_penalty(step, z, given)
        if failed is None:
            return values.mean()
        return torch.where(failed, 0.0, values).sum() / (~failed).sum().clamp_min(1)

    @torch.no_grad()
    def certify(self, x: Any, z: Any = None) -> MapCertificate:
        """What is proven about the fixed point at x, and about z (the solver's if not given).

        Where ``contraction_bound()`` gives a ρ < 1 the fixed point is unique and
        ‖z − z*‖ ≤ ‖z − T(z)‖/(1 − ρ), unless the Jacobian at z contradicts it; else nothing is.
        """
        model = copy.deepcopy(self).eval()
        return certify_map(model, x, *solved(lambda: model.solve(x), z))


Start = Callable[[Any], Any] | tuple[int, ...] | None
"""Where to begin: None is zero, shaped as x; (n, ...) is zero, [B, n, ...]; or a function of x."""

_MOVING = (_BatchNorm, OperatorNorm, _SpectralNorm)


class BlockHolder(nn.Module):
    """Holds ``block`` and ``initial``; the base of DEQ and of its weight-tied twin.

    A fixed point z* = block(z*, x) exists only where every evaluation is of the same map. So what
    changes in training mode (the running statistics of ``nn.BatchNorm*``, the power iterations of
    ``NormBounded`` and torch's ``spectral_norm``) is held still inside a solve and moved once after
    it, by one evaluation at the answer; what draws random numbers is refused (dropout).
    """

    block: Callable[..., Any]

    def _hold(self, block: Callable[..., Any], start: Start) -> None:
        name = type(self).__name__
        if not callable(block):
            raise TypeError(
                f"{name}(block={block!r}): expected an nn.Module or a function, block(z, x) → z."
            )
        if not (start is None or callable(start) or isinstance(start, tuple)):
            raise TypeError(
                f"{name}(start={start!r}): expected None (zero, shaped as x), the shape of one "
                "sample's state such as (8, 4, 4), or a function x → z0."
            )
        if isinstance(start, tuple):
            check_sizes(name, {f"start[{i}]": n for i, n in enumerate(start)})
        if isinstance(block, nn.Module):
            _refuse_dropout(name, block)
        else:
            _refuse_captured(name, block)
        self.block, self.initial = block, start
        self.train(self.training)

    def _moving(self) -> list[nn.Module]:
        if not isinstance(self.block, nn.Module):
            return []
        return [m for m in self.block.modules() if isinstance(m, _MOVING)]

    def train(self, mode: bool = True) -> Any:
        """As ever, but the parts of the block that move in training mode stand still."""
        super().train(mode)
        for module in self._moving():
            module.training = False
        return self

    def check_input(self, x: Any) -> list[Tensor]:
        """The leaves of x; raise unless they are tensors, one of them of floating point."""
        name, leaves = type(self).__name__, pytree.tree_leaves(x)
        if not leaves or not all(isinstance(t, Tensor) for t in leaves):
            raise TypeError(
                f"{name} takes a tensor [B, ...] or a tree of them, got {type(x).__name__}."
            )
        if not any(t.is_floating_point() for t in leaves):
            raise TypeError(f"{name} takes a floating-point x, got {leaves[0].dtype}.")
        return leaves

    def begin(self, x: Any) -> Any:
        if callable(self.initial):
            return self.initial(x)
        leaves = self.check_input(x)
        if self.initial is not None:
            like = next(t for t in leaves if t.is_floating_point())
            return like.new_zeros(like.shape[0], *self.initial, dtype=solving_dtype(like))
        if not isinstance(x, Tensor):
            raise TypeError(
                f"{type(self).__name__} got a tree of inputs and cannot guess the shape of the "
                "state from it: give start=(n, ...) or start=lambda x: z0."
            )
        return torch.zeros_like(x, dtype=solving_dtype(x))

    def move(self, z: Any, x: Any, failed: Tensor | None = None) -> None:
        """Let running statistics and power iterations see the answer, once; training mode only.

        In place of ``failed`` samples [B], which may hold NaN, they see a healthy one.
        """
        moving = self._moving() if self.training else []
        if not moving:
            return
        z, x = map_tensors(lambda t: lend(t.detach(), failed), (z, x))
        with torch.no_grad(), _moved(moving):
            self.block(z, x)


@contextmanager
def _moved(modules: list[nn.Module]) -> Iterator[None]:
    for module in modules:
        if isinstance(module, _BatchNorm):
            # The graph of the solve holds the old statistics: they must not change in place.
            for name in ("running_mean", "running_var"):
                value = getattr(module, name)
                if value is not None:
                    setattr(module, name, value.clone())
        module.training = True
    try:
        yield
    finally:
        for module in modules:
            module.training = False


def _refuse_dropout(owner: str, block: nn.Module) -> None:
    for path, module in block.named_modules():
        if isinstance(module, _DropoutNd) and module.p > 0:
            where = f" at '{path}'" if path else ""
            raise ValueError(
                f"{owner}: the block holds {module}{where}, which draws a new mask at every "
                "evaluation, so that there is no fixed point in training mode. Draw the mask once "
                "and give it to the block with the input, x = (features, mask), as MDEQ(dropout="
                "...) does; or drop features before or after the layer."
            )


def _refuse_captured(owner: str, block: Callable[..., Any]) -> None:
    """A captured module would neither train nor move with the layer."""
    for name, held in captured(block).items():
        if isinstance(held, (nn.Module, nn.Parameter)):
            raise ValueError(
                f"{owner}: the function given as block captures '{name}', which would not be "
                "registered, copied or saved with the layer. Write the block as an nn.Module with "
                "forward(z, x)."
            )


class DEQ(BlockHolder, MonitoredMapLayer):
    """z* = block(z*, x): an infinitely deep weight-tied network (Bai, Kolter and Koltun 2019).

    x [B, ...] is a tensor or a tree of them; so is the state z. The block is any module or function
    that maps samples one by one and returns what is shaped as z. Batch norm inside it runs on its
    running statistics, which move once a training forward; dropout inside it is an error.

    Whether there is a fixed point, one or many, is not known of a general block, and nothing is
    certified, unless it has a method ``contraction_bound()``: ρ with
    ‖block(a, x) − block(b, x)‖ ≤ ρ‖a − b‖ for all a, b, x and its present weights, or None.

    Args:
        block: block(z, x) → z.
        start: where the solver starts: None is zero, shaped as x; (n, ...) is zero, [B, n, ...]; or
            a function x → z0, which a state that is a tree needs.
        jacobian_weight: the weight of ‖J‖²_F/n in ``collect_penalties``.
        solver, adjoint: Anderson() and Implicit() if not given.
    """

    shown = ("jacobian_weight",)

    def __init__(
        self,
        block: Callable[[Any, Any], Any],
        *,
        start: Start = None,
        jacobian_weight: float = 0.0,
        solver: SolverOptions | None = None,
        adjoint: Adjoint | None = None,
    ) -> None:
        MonitoredMapLayer.__init__(self, solver, adjoint, jacobian_weight)
        self._hold(block, start)

    def inject(self, x: Any) -> tuple[Any, ...]:
        self.check_input(x)
        return (x,)

    def step(self, z: Any, *injected: Any) -> Any:
        return self.block(z, *injected)

    def start(self, x: Any, *injected: Any) -> Any:
        return self.begin(x)

    def state_like(self, x: Any) -> bool:
        return super().state_like(x) and not callable(self.initial)

    def after_solve(self, solution: Solution[Any], *injected: Any) -> None:
        self.move(solution.value, injected[0], failed_codes(solution.result))

    def contraction_bound(self) -> float | None:
        """What the block says of itself; None: not known."""
        asked = getattr(self.block, "contraction_bound", None)
        found = asked() if callable(asked) else None
        return None if found is None else float(found)

    def repeated(self, repeats: int) -> RepeatedBlock:
        """The weight-tied network of ``repeats`` applications, sharing this layer's block."""
        return RepeatedBlock(self.block, repeats=repeats, start=self.initial)


class RepeatedBlock(BlockHolder):
    """z_{k+1} = block(z_k, x), k < K: the weight-tied repeat-K twin of a DEQ (Nguyen 2022, §4.2.1).

    An explicit network, differentiated by autograd; exactly K steps of Picard. Its state_dict has
    the names of the DEQ's, so that either loads the other's; ``deq.repeated(K)`` and
    ``repeated.deq()`` share the block itself. ``start`` is z_0, as in DEQ.
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


class ResidualBlock(nn.Module):
    """f(z, x) = norm(ReLU(z + norm(x + W₂ * norm(ReLU(W₁ * z))))) (Nguyen 2022, Eq 4.1).

    * is a convolution without bias, norm is group norm; z and x are [B, channels, H, W], the inner
    map is [B, inner, H, W]. Small weights (standard deviation 0.01) make f nearly constant in z at
    the start, so that a solver needs few steps; with 1.0 the iteration is chaotic (§4.1.1).

    Args:
        channels, inner: of z and x; of W₁ * z, which None makes the same.
        groups: of the group norms; must divide ``channels`` and ``inner``.
        kernel_size: odd.
        std: of the normal distribution that both kernels start from.
        affine: whether the group norms have weights of their own.
        constraint: on W₁ and W₂: ``WeightNormalized()``, ``NormBounded(...)`` or None.
    """

    def __init__(
        self,
        channels: int,
        inner: int | None = None,
        *,
        groups: int = 8,
        kernel_size: int = 3,
        std: float = 0.01,
        affine: bool = True,
        constraint: Constraint = None,
    ) -> None:
        super().__init__()
        inner = channels if inner is None else inner
        sizes = {"channels": channels, "inner": inner, "groups": groups}
        check_sizes("ResidualBlock", sizes)
        check_kernel("ResidualBlock", kernel_size)
        for name in ("channels", "inner"):
            check_groups("ResidualBlock", name, sizes[name], groups)
        self.std = std
        check_number(self, "std", low=0.0, low_open=True)
        self.channels, self.inner = channels, inner
        first, second = (
            nn.Conv2d(a, b, kernel_size, padding=kernel_size // 2, bias=False)
            for a, b in ((channels, inner), (inner, channels))
        )
        for conv in (first, second):
            nn.init.normal_(conv.weight, std=std)
        self.conv1 = constrain(first, "weight", constraint)
        self.conv2 = constrain(second, "weight", constraint)
        self.norm1 = nn.GroupNorm(groups, inner, affine=affine)
        self.norm2 = nn.GroupNorm(groups, channels, affine=affine)
        self.norm3 = nn.GroupNorm(groups, channels, affine=affine)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        """f(z, x), [B, channels, H, W]."""
        for name, t in (("z", z), ("x", x)):
            if t.ndim != 4 or t.shape[1] != self.channels:
                raise ValueError(
                    f"ResidualBlock takes {name} [B, {self.channels}, H, W], got shape "
                    f"{tuple(t.shape)}."
                )
        inside = self.conv2(self.norm1(F.relu(self.conv1(z))))
        out: Tensor = self.norm3(F.relu(z + self.norm2(x + inside)))
        return out
