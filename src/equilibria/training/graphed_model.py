"""A training step's forward and backward pass as CUDA graphs: no launch from Python in between."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.engine import ConvergenceWarning
from equilibria.nn.steps import solver_layers


class GraphedModel:
    """Calls ``model`` in training mode by CUDA graphs, captured at the first batch of each shape.

    Gradients are of first order. What runs in Python inside the model (hooks, observers) runs at
    capture alone. A forward must be followed by its backward before the next forward of the same
    shape.

    Run eagerly: models in eval mode, an x that wants a gradient, and what comes after ``shapes``
    captures (a new shape, memory format, autocast dtype, solver, adjoint or set of trained
    parameters asks for one).
    """

    def __init__(self, model: nn.Module, *, shapes: int = 1) -> None:
        self.model = model
        self.shapes = shapes
        self._layers = list(solver_layers(model).values())
        self._graphed: dict[Any, nn.Module] = {}

    def __call__(self, x: Tensor) -> Tensor:
        run = self.model
        if x.is_cuda and run.training and torch.is_grad_enabled() and not x.requires_grad:
            key = self._key(x)
            if key not in self._graphed and len(self._graphed) < self.shapes:
                self._graphed[key] = self._capture(x)
            run = self._graphed.get(key, run)
        out: Tensor = run(x)
        return out

    def _key(self, x: Tensor) -> Any:
        """What a captured pass depends on beside the values."""
        device = x.device.type
        cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        trained = tuple(p.requires_grad for p in self.model.parameters())
        ways = tuple((m.solver, getattr(m, "adjoint", None)) for m in self._layers)
        return (tuple(x.shape), x.stride(), x.dtype, cast, trained, ways)

    def _capture(self, x: Tensor) -> nn.Module:
        device = x.device.type
        autocasts = torch.is_autocast_enabled(device)
        # The cache of cast weights would be filled outside the graph and read inside.
        cast = torch.autocast(
            device, torch.get_autocast_dtype(device), enabled=autocasts, cache_enabled=False
        )
        shell = nn.Sequential(self.model)  # capture replaces its forward, not that of the model
        # torch captures on a stream of its own on purpose, and newer versions warn of that.
        allow = getattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", None)
        if allow is not None:
            allow(False)
        # Warm-up runs move batch statistics and power iterations: they are put back.
        buffers = [(b, b.detach().clone()) for b in self.model.buffers()]
        try:
            with cast, warnings.catch_warnings():
                # torch warms up with gradients of uninitialized memory.
                warnings.simplefilter("ignore", ConvergenceWarning)
                torch.cuda.make_graphed_callables(shell, (x.detach().clone(),))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise RuntimeError(
                f"the model cannot be captured as a CUDA graph: {str(error).splitlines()[0]} If it "
                "waits for the host, for a tolerance or a value read in Python, use solvers with "
                "fixed steps (rtol=0, atol=0), or leave cuda_graphs out."
            ) from error
        finally:
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
        return shell
