"""The six-branch GEQ as a peer would write it: plain PyTorch, each branch solved by torchdeq."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class PeerMap:
    """z ↦ ReLU(Wᵀ·unpatch(eᵢrᵢW_hW_hᵀ)) of a GEQ layer at one input (Algorithm 1)."""

    def __init__(self, layer: Any, x: Tensor) -> None:
        self.cs, self.p = layer.patch.channels, layer.patch.size
        self.weight, self.hidden = layer.W.weight, layer.hidden_weight()
        self.c = layer.U(x)
        h = self._rows(self.c) @ self.hidden.to(self.c.dtype)
        self.gamma = layer.gamma(h.float().square().sum(-1))
        self.pixels = x.shape[2:]
        self.channels = layer.channels

    def _rows(self, r: Tensor) -> Tensor:
        b, c, h, w = r.shape
        r = r.reshape(b, c // self.cs, self.cs, h // self.p, self.p, w // self.p, self.p)
        return r.permute(0, 1, 3, 5, 2, 4, 6).reshape(b, -1, self.cs * self.p**2)

    def _merge(self, rows: Tensor, shape: torch.Size) -> Tensor:
        b, c, h, w = shape
        blocks = rows.reshape(b, c // self.cs, h // self.p, w // self.p, self.cs, self.p, self.p)
        return blocks.permute(0, 1, 4, 2, 5, 3, 6).reshape(b, c, h, w)

    def __call__(self, z: Tensor) -> Tensor:
        r = self.c - F.conv2d(z, self.weight, padding=self.weight.shape[2] // 2)
        rows = self._rows(r)
        h = rows @ self.hidden
        e = torch.exp(-self.gamma[:, None] * h.float().square().sum(-1))
        message = e[..., None] * (h @ self.hidden.mT)
        merged = self._merge(message, r.shape)
        out = F.conv_transpose2d(
            merged, self.weight.to(merged.dtype), padding=self.weight.shape[2] // 2
        )
        return torch.relu(out).to(z.dtype)

    def start(self, x: Tensor) -> Tensor:
        return torch.zeros(
            x.shape[0], self.channels, *self.pixels, device=x.device, dtype=torch.float32
        )


class PeerBranches(nn.Module):
    """The network of ``model`` (geq_cifar_*), with its connections, its branches by torchdeq."""

    def __init__(self, model: Any, deq: Any) -> None:
        super().__init__()
        self.model, self.deq = model, deq
        self.states: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        whole = self.model.branches
        self.states = []

        def answer(i: int, seen: Tensor) -> Tensor:
            step = PeerMap(whole.branches[i], seen)
            z: Tensor = self.deq(step, step.start(seen))[0][-1]
            self.states.append(z.detach())
            return z

        outputs = whole._walk(whole.split(self.model.stem(x)), answer)
        out: Tensor = self.model.head(self.model.fusion(whole._average(outputs)))
        return out


@torch.no_grad()
def residuals(layer: Any, x: Tensor, z: Tensor, samples: int = 16) -> Tensor:
    """‖T(z) − z‖/‖T(z)‖ of the first samples, in float64, [samples]."""
    exact = copy.deepcopy(layer).double().eval()
    with torch.autocast(x.device.type, enabled=False):
        problem = exact.problem(x[:samples].double())
        here = z[:samples].double()
        there = problem.step(here)
    moved = (there - here).flatten(1).norm(dim=1)
    return moved / there.flatten(1).norm(dim=1)
