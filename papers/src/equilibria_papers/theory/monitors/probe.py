"""What is measured at a point of training: the PL* ratio, λ_min and λ_max of K, the drift of K.

PL* with μ:             ½‖∇L‖² ≥ μL
uniform conditioning:   λ_min(K(θ)) ≥ μ for all θ in a ball; then PL* holds there for L = ½‖f − y‖²

For any loss of the outputs ∇L = Jᵀg with g = ∂L/∂f, so ‖∇L‖² = gᵀKg ≥ λ_min(K)‖g‖²; for the
squared loss ‖g‖² = 2L and the bound on ‖∇L‖²/(2L) is λ_min itself (Liu, Zhu and Belkin 2022).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from equilibria_papers.theory.ntk.comparing import kernel_distance, kernel_drift, label_alignment
from equilibria_papers.theory.ntk.kernel import TangentKernel, empirical_ntk
from equilibria_papers.theory.ntk.outputs import Choice
from equilibria_papers.theory.ntk.parameters import Filter, select_parameters
from equilibria_papers.theory.ntk.projection import Projection
from equilibria_papers.theory.ntk.rows import Method, evaluating, flat_outputs
from equilibria_papers.theory.ntk.spectrum import spectrum

__all__ = ["KernelProbe", "Loss", "squared_loss"]

Loss = Callable[[Tensor, Tensor], Tensor]
"""(outputs [N, K], targets) ↦ a number."""


def squared_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """½‖f − y‖²; classes are taken as one-hot vectors."""
    if not targets.is_floating_point():
        targets = nn.functional.one_hot(targets, outputs.shape[1])
    return 0.5 * (outputs - targets.reshape(outputs.shape)).square().sum()


class KernelProbe:
    """A fixed batch on which a model is measured again and again; the first time is the start.

    Args:
        x: the batch, [N, …].
        targets: classes [N] or values; None: no loss, no alignment.
        loss: (outputs [N, K], targets) ↦ a number; the theory is about ½‖f − y‖², the default.
        outputs, parameters, projection, method, memory: as in ``empirical_ntk``. The bound on the
            PL* ratio needs outputs="all" and no projection.
    """

    def __init__(
        self,
        x: Tensor,
        targets: Tensor | None = None,
        *,
        loss: Loss = squared_loss,
        outputs: Choice = "all",
        parameters: Filter = None,
        projection: Projection | int | None = None,
        method: Method = "auto",
        memory: int = 2**30,
    ) -> None:
        if targets is not None and len(targets) != len(x):
            raise ValueError(f"{len(x)} samples and {len(targets)} targets: expected one each.")
        self.x, self.targets, self.loss = x, targets, loss
        self.parameters = parameters
        self.options: dict[str, Any] = {
            "outputs": outputs,
            "parameters": parameters,
            "projection": projection,
            "method": method,
            "memory": memory,
        }
        self.start_kernel: Tensor | None = None
        """K_0, on the CPU."""
        self.start: list[Tensor] = []
        """θ_0, on the CPU."""

    @property
    def bounds(self) -> bool:
        """Whether λ_min of the kernel that is computed bounds the PL* ratio."""
        return self.options["outputs"] == "all" and self.options["projection"] is None

    def measure(self, model: nn.Module) -> dict[str, float]:
        """λ_min, λ_max, drift, distance from the start and, with targets, loss and PL* ratio."""
        chosen = list(select_parameters(model, self.parameters).values())
        self.x = self.x.to(chosen[0].device)
        if self.x.is_floating_point():
            self.x = self.x.to(chosen[0].dtype)
        kernel = empirical_ntk(model, self.x, **self.options)
        now = [p.detach().cpu() for p in chosen]
        if self.start_kernel is None:
            self.start_kernel = kernel.matrix.cpu()
            self.start = [p.clone() for p in now]
        found = spectrum(kernel)
        row = {
            "lambda_min": found.smallest,
            "lambda_max": found.largest,
            "condition": found.condition,
            "effective_rank": found.effective_rank,
            "trace": found.trace,
            "drift": kernel_drift(kernel.matrix.cpu(), self.start_kernel),
            "kernel_distance": kernel_distance(kernel.matrix.cpu(), self.start_kernel),
            "moved": _apart(now, self.start),
        }
        if self.targets is not None:
            row |= self._losses(model, chosen, kernel, found.smallest)
        return row

    def _losses(
        self, model: nn.Module, parameters: list[Tensor], kernel: TangentKernel, low: float
    ) -> dict[str, float]:
        assert self.targets is not None
        targets = self.targets = self.targets.to(self.x.device)
        with evaluating(model), torch.enable_grad():
            outputs = flat_outputs(model, self.x)
            loss = self.loss(outputs, targets)
            at_outputs = torch.autograd.grad(loss, outputs, retain_graph=True)[0]
            given: Sequence[Tensor | None] = torch.autograd.grad(
                loss, parameters, allow_unused=True
            )
        slope = sum([float(g.square().sum()) for g in given if g is not None], 0.0)
        value = float(loss.detach())
        row = {
            "loss": value,
            "gradient_squared": slope,
            "pl_ratio": slope / (2 * value) if value > 0 else math.nan,
        }
        if self.bounds:
            steep = float(at_outputs.square().sum())
            row["pl_bound"] = low * steep / (2 * value) if value > 0 else math.nan
        if targets.ndim == 1 or (targets.ndim == 2 and targets.is_floating_point()):
            row["alignment"] = label_alignment(kernel, targets)
        return row

    def state_dict(self) -> dict[str, Any]:
        """The start, to go on measuring after a pause."""
        return {"kernel": self.start_kernel, "parameters": list(self.start)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start_kernel = state["kernel"]
        self.start = list(state["parameters"])


def _apart(now: list[Tensor], then: list[Tensor]) -> float:
    """‖θ − θ_0‖."""
    squares = [float((a - b).double().square().sum()) for a, b in zip(now, then, strict=True)]
    return math.sqrt(sum(squares))
