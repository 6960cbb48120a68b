"""Eigenvalues of a tangent kernel, and the training that they predict.

λ_min, λ_max, κ = λ_max/λ_min           the slowest and the fastest direction of training
exp(−Σ p_i ln p_i),  p_i = λ_i/Σλ       the effective rank (Roy and Vetterli 2007)
(Σλ)²/Σλ²                               the participation ratio
Σλ/λ_max                                the stable rank of J
f_t = y + (I − ηsK)ᵗ(f(0) − y)          gradient descent on L = (s/2)‖f − y‖², K as it is

A network follows the last as far as it is linear in its parameters over the way that training takes
it; ``compare_training`` measures how far.
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


@dataclass(frozen=True, eq=False)
class Spectrum:
    """Eigenvalues, largest first, and numbers made of them."""

    eigenvalues: Tensor
    """[n], float64, on the CPU; rounding may make the smallest a little negative."""
    smallest: float
    largest: float
    condition: float  # λ_max/λ_min; infinite where λ_min is not above what rounding leaves of zero
    trace: float
    rank: int  # How many eigenvalues are above n·ε·λ_max, ε of the kernel's dtype
    effective_rank: float
    participation: float
    stable_rank: float

    def to_dict(self) -> dict[str, float]:
        """All numbers but the list of eigenvalues."""
        return {name: value for name, value in vars(self).items() if name != "eigenvalues"}


def as_matrix(kernel: TangentKernel | Tensor, what: str = "kernel") -> Tensor:
    """The square matrix of a kernel, checked to be finite and symmetric."""
    matrix: object = kernel.matrix if isinstance(kernel, TangentKernel) else kernel
    if not isinstance(matrix, Tensor) or matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        got = list(matrix.shape) if isinstance(matrix, Tensor) else type(matrix).__name__
        raise ValueError(
            f"{what}: expected a TangentKernel of samples with themselves or a square matrix, "
            f"got {got}."
        )
    if not bool(torch.isfinite(matrix).all()):
        raise ValueError(f"{what} holds NaN or infinity: a gradient of the model is not finite.")
    apart = float((matrix - matrix.mT).abs().max())
    scale = float(matrix.abs().max())
    if apart > 1e-3 * scale:
        raise ValueError(f"{what} is not symmetric: entries differ by {apart:.3g} of {scale:.3g}.")
    return matrix


@torch.no_grad()
def spectrum(kernel: TangentKernel | Tensor) -> Spectrum:
    """The eigenvalues of a kernel [n, n], in float64."""
    matrix = as_matrix(kernel)
    wide = matrix.double()
    values = torch.linalg.eigvalsh((wide + wide.mT) / 2).flip(0).cpu()
    n, top, low = len(values), float(values[0]), float(values[-1])
    noise = n * torch.finfo(matrix.dtype).eps * max(top, 0.0)
    positive = values.clamp_min(0.0)
    total = float(positive.sum())
    shares = positive / total if total > 0 else positive
    entropy = -float(torch.xlogy(shares, shares).sum())
    squares = float(positive.square().sum())
    return Spectrum(
        eigenvalues=values,
        smallest=low,
        largest=top,
        condition=top / low if low > noise else math.inf,
        trace=float(values.sum()),
        rank=int((values > noise).sum()),
        effective_rank=math.exp(entropy) if total > 0 else 0.0,
        participation=total**2 / squares if squares > 0 else 0.0,
        stable_rank=total / top if top > 0 else 0.0,
    )


Kernel = TangentKernel | Tensor


def _pair(first: Kernel, second: Kernel) -> tuple[Tensor, Tensor]:
    a, b = (k.matrix if isinstance(k, TangentKernel) else k for k in (first, second))
    if a.shape != b.shape:
        raise ValueError(
            f"the kernels have the shapes {list(a.shape)} and {list(b.shape)}: compare kernels of "
            "the same samples and outputs."
        )
    return a.double(), b.double().to(a.device)


@torch.no_grad()
def kernel_drift(kernel: Kernel, start: Kernel) -> float:
    """‖K − K_0‖/‖K_0‖."""
    now, before = _pair(kernel, start)
    return float((now - before).norm() / before.norm())


@torch.no_grad()
def kernel_distance(kernel: Kernel, start: Kernel) -> float:
    """1 − cos∠(K, K_0): 0 where one is a multiple of the other."""
    now, before = _pair(kernel, start)
    return 1.0 - float((now * before).sum() / (now.norm() * before.norm()))


@torch.no_grad()
def kernel_alignment(first: Kernel, second: Kernel) -> float:
    """⟨HKH, HLH⟩/(‖HKH‖‖HLH‖) of two square kernels, H = I − 11ᵀ/n (Cortes et al. 2012).

    0 where one is constant.
    """
    a, b = _pair(first, second)
    if a.shape[0] != a.shape[1]:
        raise ValueError(f"alignment is of square kernels, got {list(a.shape)}.")
    a, b = _centered(a), _centered(b)
    size = float(a.norm() * b.norm())
    return float((a * b).sum()) / size if size > 0 else 0.0


def _centered(kernel: Tensor) -> Tensor:
    rows = kernel - kernel.mean(0, keepdim=True)
    return rows - rows.mean(1, keepdim=True)


@torch.no_grad()
def label_alignment(kernel: Kernel, targets: Tensor) -> float:
    """The alignment of a kernel of N samples with YYᵀ.

    Args:
        kernel: [N, N]; of a kernel with several outputs the mean over them, tr K(x_i, x_j)/k.
        targets: classes, whole numbers [N], or values [N] or [N, K].
    """
    matrix = kernel.traced if isinstance(kernel, TangentKernel) else kernel
    if targets.ndim not in (1, 2) or len(targets) != len(matrix):
        raise ValueError(
            f"targets have the shape {list(targets.shape)} for a kernel of {len(matrix)} samples; "
            "expected classes [N] or values [N] or [N, K]."
        )
    if targets.is_floating_point():
        values = targets.double().reshape(len(targets), -1)
    else:
        if targets.ndim == 2:
            raise ValueError("targets [N, K] of whole numbers: give classes [N], or floats.")
        found = targets.unique(return_inverse=True)[1]
        values = torch.nn.functional.one_hot(found).double()
    values = values.to(matrix.device)
    return kernel_alignment(matrix, values @ values.mT)


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
