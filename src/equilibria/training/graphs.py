"""A training step's forward and backward pass as CUDA graphs: no launch from Python in between.

Fixed-step solves never wait for the host, so a network of them can be captured whole and replayed.
Small kernels then cost what the device needs for them, and no more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["GraphedModel"]


class _Shell(nn.Module):
    """The model behind a forward of its own: capture replaces that one, not the user's."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.model(x)
        return out


class GraphedModel:
    """Calls ``model`` in training mode by CUDA graphs, captured at the first batch of each shape.

    The gradients are those of the eager model (of first order: a graph has no second). What runs
    in Python inside the model (hooks, observers) runs at capture alone. Batches of more than
    ``shapes`` different shapes, and models in eval mode, run eagerly.
    """

    def __init__(self, model: nn.Module, *, shapes: int = 1) -> None:
        self.model = model
        self.shapes = shapes
        self._graphed: dict[Any, nn.Module] = {}

    def __call__(self, x: Tensor) -> Tensor:
        if not x.is_cuda or not self.model.training or not torch.is_grad_enabled():
            return self.model(x)  # type: ignore[no-any-return]
        key = (tuple(x.shape), x.stride(), x.dtype)
        if key not in self._graphed:
            if len(self._graphed) >= self.shapes:
                return self.model(x)  # type: ignore[no-any-return]
            self._graphed[key] = self._capture(x)
        out: Tensor = self._graphed[key](x)
        return out

    def _capture(self, x: Tensor) -> nn.Module:
        device = x.device.type
        autocasts = torch.is_autocast_enabled(device)
        # The cache of cast weights would be filled outside the graph and read inside.
        cast = torch.autocast(
            device, torch.get_autocast_dtype(device), enabled=autocasts, cache_enabled=False
        )
        shell = _Shell(self.model)
        with _kept(self.model), cast:
            try:
                torch.cuda.make_graphed_callables(shell, (x.detach().clone(),))
            except RuntimeError as error:
                raise RuntimeError(
                    "the model cannot be captured as a CUDA graph: something in its forward or "
                    "backward pass waits for the host (a solver with a tolerance, a value read in "
                    "Python). Use solvers with fixed steps (rtol=0, atol=0, max_steps=...), or "
                    f"cuda_graphs=False. Torch says: {str(error).splitlines()[0]}"
                ) from error
        return shell


@contextmanager
def _kept(model: nn.Module) -> Iterator[None]:
    """Warm-up runs move batch statistics and power iterations: put them back."""
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
