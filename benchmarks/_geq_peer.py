"""The GEQ networks through torchdeq, on the same weights: what geq_cpu.py races against.

The layer is written in plain PyTorch as its authors write it (GEQ, Algorithm 1): r = Ux + b − Wz,
patches by reshape, h = rW_h, exp(−γ‖h‖²)·h, W_hᵀ, the transposed convolution, ReLU. U, W (with its
norm bound), W_h, γ and everything around the layers are those of the equilibria network it copies.
"""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import equilibria as eq

STEPS = 60
"""Evaluations at most; a solve that needs them all has missed its tolerance."""


@dataclass(frozen=True)
class Peer:
    """torchdeq's options. ``tol`` is on ‖T(z) − z‖/‖T(z)‖ of every sample (stop_mode='rel')."""

    solver: str
    tol: float
    gradient: str = "phantom"  # five steps of damping 0.8, as in the papers; or "implicit"
    backward_tol: float = 1e-2

    def make(self) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its docstrings hold invalid escapes
            torchdeq = importlib.import_module("torchdeq")
        how: dict[str, Any] = {"grad": 5, "tau": 0.8}
        if self.gradient == "implicit":
            how = {"ift": True, "b_tol": self.backward_tol, "b_max_iter": STEPS}
        return torchdeq.get_deq(
            f_solver=self.solver,
            b_solver=self.solver,
            f_max_iter=STEPS,
            f_tol=self.tol,
            f_stop_mode="rel",
            b_stop_mode="rel",
            **how,
        )


def patch_rows(r: Tensor, channels: int, size: int) -> Tensor:
    """[B, C, H, W] → [B, C/c, H/p, W/p, c·p²]."""
    b, c, h, w = r.shape
    cut = r.view(b, c // channels, channels, h // size, size, w // size, size)
    cut = cut.permute(0, 1, 3, 5, 2, 4, 6)
    return cut.reshape(*cut.shape[:4], channels * size * size)


def merged(rows: Tensor, channels: int, size: int) -> Tensor:
    """The inverse of ``patch_rows``."""
    b, groups, h, w, _ = rows.shape
    cut = rows.view(b, groups, h, w, channels, size, size).permute(0, 1, 4, 2, 5, 3, 6)
    return cut.reshape(b, groups * channels, h * size, w * size)


class PeerGEQ(nn.Module):
    """A GEQ layer with the weights of ``layer``, solved by torchdeq."""

    def __init__(self, layer: eq.nn.GEQ, peer: Peer) -> None:
        super().__init__()
        self.layer = layer  # for its weights alone
        self.deq = peer.make()
        self.evaluations = 0

    def bind(self, x: Tensor) -> Callable[[Tensor], Tensor]:
        """T(·; x)."""
        layer = self.layer
        patch: Any = layer.patch
        cut = patch.channels, patch.size
        weight: Any = layer.W.weight
        w_h: Any = layer.hidden_weight()
        c = layer.U(x)
        energies = (patch_rows(c, *cut) @ w_h).square().sum(-1)
        gamma = layer.gamma(energies.flatten(1)).view(-1, 1, 1, 1, 1)

        def step(z: Tensor) -> Tensor:
            self.evaluations += 1
            r = c - F.conv2d(z, weight, padding=1)
            h = patch_rows(r, *cut) @ w_h
            h = torch.exp(-gamma * h.square().sum(-1, keepdim=True)) * h
            return F.relu(F.conv_transpose2d(merged(h @ w_h.mT, *cut), weight, padding=1))

        return step

    def forward(self, x: Tensor) -> Tensor:
        z0 = x.new_zeros(x.shape[0], self.layer.channels, *x.shape[2:])
        found: Tensor = self.deq(self.bind(x), z0)[0][-1]
        return found


class PeerBranches(nn.Module):
    """The branches one after the other, connected, pooled and averaged as in ``branches``."""

    def __init__(self, branches: eq.nn.MultiBranch, peer: Peer) -> None:
        super().__init__()
        self.plan = branches
        self.layers = nn.ModuleList(PeerGEQ(layer, peer) for layer in branches.branches)

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.plan._walk(self.plan.split(x), lambda i, seen: self.layers[i](seen))
        return self.plan._average(outputs)


def through_torchdeq(model: nn.Module, peer: Peer) -> nn.Module:
    """A copy of the network whose GEQ layers torchdeq solves."""
    other = copy.deepcopy(model)
    for module in list(other.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, eq.nn.MultiBranch):
                setattr(module, name, PeerBranches(child, peer))
            elif isinstance(child, eq.nn.GEQ) and not isinstance(module, (PeerGEQ, nn.ModuleList)):
                setattr(module, name, PeerGEQ(child, peer))
    return other.train(model.training)


# ------------------------------------------------------------------------------ what was reached


@dataclass
class Seen:
    """One layer's solve: its input and its answer."""

    layer: eq.nn.GEQ
    x: Tensor
    z: Tensor
    evaluations: int


@dataclass
class Watch:
    """Notes inputs and answers of every GEQ layer of a network while it runs."""

    model: nn.Module
    seen: list[Seen] = field(default_factory=list)

    def __enter__(self) -> Watch:
        self._undo: list[Callable[[], object]] = []
        for module in self.model.modules():
            if isinstance(module, PeerGEQ):
                self._watch_peer(module)
        peers = {id(m.layer) for m in self.model.modules() if isinstance(m, PeerGEQ)}
        for module in self.model.modules():
            if isinstance(module, eq.nn.GEQ) and id(module) not in peers:
                self._watch_ours(module)
        return self

    def __exit__(self, *_: object) -> None:
        for undo in self._undo:
            undo()

    def _watch_peer(self, module: PeerGEQ) -> None:
        def before(_: nn.Module, given: Any) -> None:
            module.evaluations = 0

        def after(_: nn.Module, given: Any, z: Tensor) -> None:
            self.seen.append(Seen(module.layer, given[0].detach(), z.detach(), module.evaluations))

        self._undo.append(module.register_forward_pre_hook(before).remove)
        self._undo.append(module.register_forward_hook(after).remove)

    def _watch_ours(self, module: eq.nn.GEQ) -> None:
        solve = module.solve

        def noted(x: Tensor, z0: Tensor | None = None, **options: Any) -> Any:
            found = solve(x, z0, **options)
            count = found.stats.evaluations
            self.seen.append(Seen(module, x.detach(), found.value.detach(), count))
            return found

        module.solve = noted  # type: ignore[method-assign]
        self._undo.append(lambda: module.__dict__.pop("solve"))

    def layers(self) -> Iterator[tuple[Seen, Tensor]]:
        """Each solve with ‖z − T(z)‖/‖z‖ of its samples, all in float64."""
        for seen in self.seen:
            layer = copy.deepcopy(seen.layer).double().eval()
            wide = PeerGEQ.__new__(PeerGEQ)
            nn.Module.__init__(wide)
            wide.layer, wide.evaluations = layer, 0
            with torch.no_grad():
                z = seen.z.double().contiguous()
                gap = wide.bind(seen.x.double())(z) - z
            yield seen, gap.flatten(1).norm(dim=1) / z.flatten(1).norm(dim=1)
