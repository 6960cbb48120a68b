"""What the block of a DEQ may be: a map block(z, x) that stays one map while a solver runs.

A fixed point z* = block(z*, x) exists only where every evaluation is of the same map. Modules that
change in training mode are therefore held still inside a solve and moved once after it (batch norm,
power iterations of norm constraints), and those that draw random numbers are refused (dropout).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.utils import _pytree as pytree

from equilibria.adjoints.quarantine import lend
from equilibria.engine.tree import map_tensors

from .constraints import OperatorNorm
from .precision import solving_dtype
from .residual_block import check_sizes

__all__ = ["BlockHolder", "Start"]

Start = Callable[[Any], Any] | tuple[int, ...] | None
"""Where to begin: None is zero, shaped as x; (n, ...) is zero, [B, n, ...]; or a function of x."""

_MOVING = (_BatchNorm, OperatorNorm, _SpectralNorm)


class BlockHolder(nn.Module):
    """Holds ``block`` and ``initial``; the base of DEQ and of its weight-tied twin.

    In training mode ``nn.BatchNorm*`` of the block runs on its running statistics: batch statistics
    would make the answer of a sample depend on its batch mates, and updates at every evaluation
    would move the map under the solver. The statistics are moved once a forward, by one evaluation
    at the answer. The same holds for the power iteration of ``NormBounded`` and of torch's
    ``spectral_norm``. Group norm needs none of this.
    """

    block: Callable[..., Any]

    def _hold(self, block: Callable[..., Any], start: Start) -> None:
        name = type(self).__name__
        if not callable(block):
            raise TypeError(
                f"{name}(block={block!r}): expected an nn.Module or a function, block(z, x) → z."
            )
        _check_start(name, start)
        if isinstance(block, nn.Module):
            _refuse_dropout(name, block)
        else:
            _refuse_captured(name, block)
        self.block = block
        self.initial = start
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

    def begin(self, x: Any) -> Any:
        """z0 for the input x."""
        if callable(self.initial):
            return self.initial(x)
        leaves = [t for t in pytree.tree_leaves(x) if isinstance(t, Tensor)]
        if not leaves:
            raise TypeError(
                f"{type(self).__name__} takes a tensor [B, ...] or a tree of them, got "
                f"{type(x).__name__}."
            )
        if self.initial is not None:
            like = next((t for t in leaves if t.is_floating_point()), leaves[0])
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


def _check_start(owner: str, start: object) -> None:
    if not (start is None or callable(start) or isinstance(start, tuple)):
        raise TypeError(
            f"{owner}(start={start!r}): expected None (zero, shaped as x), the shape of one "
            "sample's state such as (8, 4, 4), or a function x → z0."
        )
    if isinstance(start, tuple):
        check_sizes(owner, {f"start[{i}]": n for i, n in enumerate(start)})


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
    names = getattr(getattr(block, "__code__", None), "co_freevars", ())
    cells = getattr(block, "__closure__", None) or ()
    for name, cell in zip(names, cells, strict=True):
        try:
            held = cell.cell_contents
        except ValueError:
            continue
        if isinstance(held, (nn.Module, nn.Parameter)):
            raise ValueError(
                f"{owner}: the function given as block captures '{name}', which would not be "
                "registered, copied or saved with the layer. Write the block as an nn.Module with "
                "forward(z, x)."
            )
