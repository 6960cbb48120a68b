"""Gradient descent on L = (s/2)‖f − y‖² where the kernel stays as it is: f_t in closed form.

    f_t = y + (I − ηsK)ᵗ(f(0) − y)

A network follows it as far as it is linear in its parameters over the way that training takes it;
``compare_training`` measures how far.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .kernel import (
    Filter,
    Method,
    TangentKernel,
    Tell,
    empirical_ntk,
    evaluating,
    flat_outputs,
    following,
    select_parameters,
)
from .spectrum import as_matrix, kernel_distance, kernel_drift

_RATE = 0.2


@dataclass(frozen=True, eq=False)
class LinearCurve:
    """What the linear model does after each of T numbers of steps."""

    times: Tensor  # [T]
    outputs: Tensor  # [T, *shape of f(0)], float64
    losses: Tensor  # (s/2)‖f − y‖², [T]


@torch.no_grad()
def linear_gradient_descent(
    kernel: TangentKernel | Tensor,
    start: Tensor,
    targets: Tensor,
    lr: float,
    steps: int | Sequence[int],
    *,
    scale: float = 1.0,
) -> LinearCurve:
    """f_t = y + (I − ηsK)ᵗ(f(0) − y) after 0, 1, … ``steps`` steps, or after each of a list.

    It falls where η < 2/(s·λ_max).

    Args:
        kernel: [n, n].
        start, targets: f(0) and y, n entries in the kernel's order ([N, k] for k outputs).
        lr: η.
        scale: s of L = (s/2)‖f − y‖²; 1/N for a mean over samples.
    """
    if not (math.isfinite(lr) and lr > 0):
        raise ValueError(f"lr={lr!r}: expected a positive number.")
    counts = list(range(steps + 1)) if isinstance(steps, int) else list(steps)
    if any(s < 0 for s in counts) or not counts:
        raise ValueError(f"steps={steps!r}: expected numbers of steps, 0 or more.")
    matrix = as_matrix(kernel).double()
    if start.shape != targets.shape or start.numel() != len(matrix):
        raise ValueError(
            f"outputs {list(start.shape)}, targets {list(targets.shape)} and a kernel of "
            f"{len(matrix)} rows do not fit: the first two must have one entry per row."
        )
    values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    away = vectors.mT @ (start - targets).detach().double().flatten().to(matrix.device)
    when = torch.as_tensor(counts, dtype=torch.float64).to(values.device)
    base = 1.0 - lr * scale * values
    # Signs apart: a negative base to a float power is NaN.
    odd = torch.where(when[:, None] % 2 == 1, base.sign(), torch.ones_like(base))
    apart = odd * base.abs().pow(when[:, None]) * away
    outputs = targets.detach().double().flatten().to(apart.device) + apart @ vectors.mT
    losses = 0.5 * scale * apart.square().sum(1)
    return LinearCurve(when, outputs.view(len(when), *targets.shape), losses)


@dataclass(frozen=True, eq=False)
class TrainingComparison:
    """A run of gradient descent beside what the kernel at its start predicts."""

    steps: Tensor  # Recorded steps, [T]
    predicted: Tensor  # (s/2)‖f − y‖² of the linear model, [T]
    actual: Tensor  # That of the network, [T]
    outputs_gap: Tensor  # ‖f_network − f_linear‖/‖f(0) − y‖, [T]
    lr: float
    largest_lr: float  # 2/(s·λ_max), above which the linear model diverges
    drift: float  # ‖K_T − K_0‖/‖K_0‖ over the run; NaN where it diverged
    distance: float  # 1 − cos∠(K_T, K_0)
    moved: float  # ‖θ_T − θ_0‖/‖θ_0‖
    diverged: bool
    """Whether the network's outputs became infinite or NaN; the curves end before that."""

    @property
    def gap(self) -> Tensor:
        """|L_actual − L_predicted|/L(0), [T]."""
        return (self.actual - self.predicted).abs() / self.actual[0]

    def to_dict(self) -> dict[str, Any]:
        found = {"gap": self.gap, **vars(self)}
        return {k: v.tolist() if isinstance(v, Tensor) else v for k, v in found.items()}


def compare_training(
    model: nn.Module,
    x: Tensor,
    targets: Tensor,
    *,
    steps: int = 100,
    lr: float | None = None,
    scale: float = 1.0,
    record: int = 1,
    parameters: Filter = None,
    method: Method = "auto",
    progress: Tell | None = None,
) -> TrainingComparison:
    """Train a copy by full-batch gradient descent on (s/2)‖f(x) − y‖² and predict its curve.

    In eval mode throughout, so that the kernel is that of the function that is trained; only norm
    bounds follow their weights, as they do in training.

    Args:
        model: x [N, …] → f [N, K]; it is left as it is.
        targets: y, of the shape of f(x).
        lr: η; None: 0.2/(s·λ_max), which stays stable while λ_max grows tenfold.
        record: every so many steps a point of the curves.
        parameters, method: as in ``empirical_ntk``; the parameters are what is trained.
        progress: called with (steps done, of how many).
    """
    if steps < 1 or record < 1:
        raise ValueError(f"steps={steps}, record={record}: expected 1 or more.")
    trained = copy.deepcopy(model)
    with evaluating(trained):
        chosen = list(select_parameters(trained, parameters).values())
        with torch.no_grad():
            begin = flat_outputs(trained, x)
        y = targets.to(begin).reshape(len(x), -1)
        if y.shape != begin.shape:
            raise ValueError(
                f"targets have the shape {list(targets.shape)}, the outputs {list(begin.shape)}."
            )
        kernel = empirical_ntk(trained, x, parameters=parameters, method=method)
        top = float(torch.linalg.eigvalsh(kernel.matrix.double())[-1])
        rate = _RATE / (scale * top) if lr is None else lr
        when = sorted({*range(0, steps + 1, record), steps})
        linear = linear_gradient_descent(kernel, begin, y, rate, when, scale=scale)
        first = [p.detach().clone() for p in chosen]
        with following(trained):
            outputs = _descend(trained, chosen, x, y, rate, when, scale, progress)
        diverged = len(outputs) < len(when)
        when, end = when[: len(outputs)], kernel
        if not diverged:
            end = empirical_ntk(trained, x, parameters=parameters, method=method)
    away = outputs.double() - y.double()
    expected = linear.outputs[: len(when)]
    moved = [(p.detach() - q).norm() for p, q in zip(chosen, first, strict=True)]
    return TrainingComparison(
        steps=torch.tensor(when),
        predicted=linear.losses[: len(when)].cpu(),
        actual=(0.5 * scale * away.square().flatten(1).sum(1)).cpu(),
        outputs_gap=((outputs.double() - expected).flatten(1).norm(dim=1) / away[0].norm()).cpu(),
        lr=rate,
        largest_lr=2.0 / (scale * top),
        drift=math.nan if diverged else kernel_drift(end, kernel),
        distance=math.nan if diverged else kernel_distance(end, kernel),
        diverged=diverged,
        moved=float(torch.stack(moved).norm() / torch.stack([q.norm() for q in first]).norm()),
    )


def _descend(
    model: nn.Module,
    parameters: Sequence[Tensor],
    x: Tensor,
    y: Tensor,
    lr: float,
    when: Sequence[int],
    scale: float,
    progress: Tell | None,
) -> Tensor:
    """f(x) at each of the recorded steps, [T, N, K]; fewer where it stopped being finite."""
    wanted, found = set(when), []
    for step in range(when[-1] + 1):
        with torch.enable_grad():
            outputs = flat_outputs(model, x)
            loss = 0.5 * scale * (outputs - y).square().sum()
        if step in wanted:
            if not bool(torch.isfinite((outputs.double() - y).square().sum())):
                break
            found.append(outputs.detach())
        if step == when[-1]:
            break
        gradients: Sequence[Tensor | None]
        gradients = torch.autograd.grad(loss, list(parameters), allow_unused=True)
        with torch.no_grad():
            for p, g in zip(parameters, gradients, strict=True):
                if g is not None:
                    p.sub_(lr * g)
        if progress is not None:
            progress(step, when[-1])
    return torch.stack(found)
