"""The networks of scaling.py: one layer or another in the same place, at a point of the curves."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria.models.stacks import Block, ExplicitPair
from equilibria.training import GraphedModel

PHANTOM = 3
DAMPING = 0.8
GRAPHED = ("GEQ", "explicit twin")
"""Replayed as CUDA graphs on a GPU. torchdeq reads its residual at each step: it cannot be."""
Point = dict[str, int]
"""batch, width, resolution, steps."""


class TorchDEQLayer(nn.Module):
    """The equilibrium of a GEQ layer by torchdeq's Anderson; weights and map are the layer's."""

    def __init__(self, geq: nn.Module, steps: int) -> None:
        super().__init__()
        self.geq = geq
        # A tolerance of 0 is tested at each step and never passed: exactly so many steps.
        self.deq = importlib.import_module("torchdeq").get_deq(
            f_solver="anderson",
            f_max_iter=steps,
            f_tol=0.0,
            f_stop_mode="rel",
            grad=PHANTOM,
            tau=DAMPING,
        )

    def forward(self, x: Tensor) -> Tensor:
        problem: Any = self.geq.problem(x)
        device = x.device.type
        # As in our engine: the map keeps autocast, the solver's algebra does not. No cache: what
        # was cast in the solve, without a graph, must not replace weights in the backward.
        dtype, on = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)

        def step(z: Tensor) -> Tensor:
            with torch.autocast(device, dtype=dtype, enabled=on, cache_enabled=False):
                out: Tensor = problem.step(z, 1.0)
            return out.to(z.dtype)

        with torch.autocast(device, enabled=False):
            found, _ = self.deq(step, self.geq.start(problem, x))
        answer: Tensor = found[-1]
        return answer


def geq(before: int, after: int, solver: Any, adjoint: Any) -> nn.Module:
    patch = eq.Patches(channels=8, size=2)
    return eq.nn.GEQ(after, after, in_channels=before, patch=patch, solver=solver, adjoint=adjoint)


def layers(steps: int) -> dict[str, Callable[[int, int], nn.Module]]:
    """Every contestant's layer, from channels in and out."""
    fixed = {"rtol": 0.0, "atol": 0.0, "max_steps": steps}
    picard = eq.Picard(damping=DAMPING, **fixed)
    phantom = eq.Phantom(steps=PHANTOM, damping=DAMPING)
    proximal = eq.ProximalGradient(accelerate=False, **fixed)
    series = eq.Phantom(steps=PHANTOM, damping=1.0, form="neumann")
    found: dict[str, Callable[[int, int], nn.Module]] = {
        "GEQ": lambda a, b: geq(a, b, proximal, series),
        "GEQ, general path": lambda a, b: geq(a, b, picard, phantom),
        "explicit twin": lambda a, b: ExplicitPair(a, b, b),
    }
    if importlib.util.find_spec("torchdeq") is not None:
        found["TorchDEQ"] = lambda a, b: TorchDEQLayer(geq(a, b, picard, phantom), steps)
    return found


def network(kind: str, width: int, steps: int, depth: int) -> nn.Module:
    make = layers(steps)[kind]
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1, bias=False),
        *(Block(width, width, make) for _ in range(depth)),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, 10),
    )


class Contestant:
    """A network at a point: its training step, its inference."""

    def __init__(self, kind: str, point: Point, options: argparse.Namespace) -> None:
        device = torch.device(options.device)
        torch.manual_seed(0)
        self.model = network(kind, point["width"], point["steps"], options.depth).to(device)
        side, self.batch = point["resolution"], point["batch"]
        self.x = torch.randn(self.batch, 3, side, side, device=device)
        self.cuda = device.type == "cuda"
        if self.cuda:
            self.model = self.model.to(memory_format=torch.channels_last)
            self.x = self.x.contiguous(memory_format=torch.channels_last)
        self.called: Any = torch.compile(self.model) if options.compile else self.model
        self.graphs = self.cuda and not options.compile and kind in GRAPHED
        self.replayed: Any = GraphedModel(self.model) if self.graphs else self.called
        self._inference: torch.cuda.CUDAGraph | None = None
        self.y = torch.randint(0, 10, (self.batch,), device=device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0, momentum=0.9)

    def cast(self) -> Any:
        if self.cuda:
            return torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False)
        return contextlib.nullcontext()

    def train(self) -> None:
        self._step(self.replayed)

    def train_eagerly(self) -> None:
        """For the memory: what a replay uses was allocated before."""
        self._step(self.called)

    def _step(self, called: Any) -> None:
        self.model.train()
        with self.cast():
            loss = nn.functional.cross_entropy(called(self.x), self.y)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()

    def inference(self) -> None:
        if not self.graphs:
            self.inference_eagerly()
            return
        if self._inference is None:
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                for _ in range(3):
                    self.inference_eagerly()
            torch.cuda.synchronize()
            self._inference = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._inference):
                self.inference_eagerly()
        self._inference.replay()

    @torch.no_grad()
    def inference_eagerly(self) -> None:
        self.model.eval()
        with self.cast():
            self.called(self.x)
