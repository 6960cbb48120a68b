"""Rows of the Jacobian, ∂f_a(x_i)/∂θ, one sample at a time or many at once.

    vmap       torch.func: vmap over samples of the pull-back, vmap over outputs
    autograd   a graph a sample and one backward pass an output: works wherever training does

Both give the gradient that the model itself gives: an equilibrium layer's adjoint decides.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from equilibria.nn import OperatorNorm

from .outputs import Outputs

__all__ = ["Method", "Rows", "choose_rows", "evaluating", "flat_outputs", "following", "functional"]

Method: TypeAlias = Literal["auto", "vmap", "autograd"]
Rows: TypeAlias = Callable[[Tensor, Sequence[str]], dict[str, Tensor]]
"""(x [c, …], names) ↦ name → [c, k, entries of that parameter]."""

_AGREE = 0.05
"""Largest relative difference of a vmapped gradient from autograd's; solvers stop at tolerances."""


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Every module in eval mode inside: no dropout, no statistics of the batch; then as before."""
    modes = [(m, m.training) for m in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextlib.contextmanager
def following(model: nn.Module) -> Iterator[None]:
    """Norm bounds follow the weights inside, also in eval mode, where their vectors stand still.

    For weights that move: with the vectors of the start a norm runs ahead of its bound.
    """
    bounds = [(m, m.training) for m in model.modules() if isinstance(m, OperatorNorm)]
    for module, _ in bounds:
        module.training = True
    try:
        yield
    finally:
        for module, mode in bounds:
            module.training = mode


def flat_outputs(model: nn.Module, x: Tensor) -> Tensor:
    """f(x) as [N, K]."""
    out = model(x)
    if not isinstance(out, Tensor) or out.ndim < 1 or out.shape[0] != x.shape[0]:
        got = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise TypeError(
            f"a tangent kernel needs a model whose output is one tensor [N, …] for x [N, …]; x has "
            f"the shape {list(x.shape)} and the output is {got}."
        )
    return out.reshape(out.shape[0], -1)


def functional(
    model: nn.Module, names: Sequence[str], outputs: Outputs
) -> tuple[Callable[[dict[str, Tensor], Tensor], Tensor], dict[str, Tensor]]:
    """(θ, x) ↦ the chosen outputs [N, pulled], and θ: the named parameters, detached."""
    fixed = {n: p.detach() for n, p in model.named_parameters()}
    chosen = {n: fixed.pop(n) for n in names}
    fixed |= dict(model.named_buffers())
    flat = _Flat(model)

    def value(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        state = {f"model.{n}": t for n, t in {**fixed, **parameters}.items()}
        return outputs.take(functional_call(flat, state, (x,)))

    return value, chosen


class _Flat(nn.Module):
    """A model whose output is [N, K]."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.training = model.training

    def forward(self, x: Tensor) -> Tensor:
        return flat_outputs(self.model, x)


def vmapped(model: nn.Module, outputs: Outputs) -> Rows:
    """Rows by torch.func."""

    def rows(x: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
        value, chosen = functional(model, names, outputs)

        def one(sample: Tensor) -> dict[str, Tensor]:
            found, pull = vjp(lambda parameters: value(parameters, sample[None])[0], chosen)[:2]
            basis = torch.eye(len(found), dtype=found.dtype, device=found.device)
            pulled: dict[str, Tensor] = vmap(lambda v: pull(v)[0])(basis)
            return {n: g.flatten(1) for n, g in pulled.items()}

        rows: dict[str, Tensor] = vmap(one)(x)
        return rows

    return rows


def looped(model: nn.Module, outputs: Outputs) -> Rows:
    """Rows by plain autograd, one sample and one output after the other."""

    def rows(x: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
        held = dict(model.named_parameters())
        chosen = [held[n] for n in names]
        found: list[list[Tensor]] = [[] for _ in names]
        with torch.enable_grad():
            for sample in x:
                value = outputs.take(flat_outputs(model, sample[None])[0])
                each = _gradients(value, chosen)
                for place, gradient in zip(found, each, strict=True):
                    place.append(gradient)
        return {n: torch.stack(parts) for n, parts in zip(names, found, strict=True)}

    return rows


def _gradients(value: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """[k] ↦ for each parameter [k, entries]; zero where it has no part in the value."""
    rows: list[list[Tensor]] = [[] for _ in parameters]
    for a in range(len(value)):
        given: Sequence[Tensor | None] = (None,) * len(parameters)
        if value.requires_grad:
            given = torch.autograd.grad(
                value[a],
                list(parameters),
                retain_graph=a < len(value) - 1,
                allow_unused=True,
            )
        for place, p, g in zip(rows, parameters, given, strict=True):
            place.append((torch.zeros_like(p) if g is None else g).flatten())
    return [torch.stack(place) for place in rows]


def choose_rows(
    model: nn.Module, outputs: Outputs, x: Tensor, names: Sequence[str], method: Method
) -> tuple[Rows, str]:
    """How to compute the rows, and its name; ``auto`` tries vmap on one sample.

    It falls back on autograd where vmap raises, or where its gradient of the first sample is not
    autograd's.
    """
    if method not in ("auto", "vmap", "autograd"):
        raise ValueError(f"method={method!r}: expected 'auto', 'vmap' or 'autograd'.")
    if method == "autograd":
        return looped(model, outputs), "autograd"
    if method == "vmap":
        return vmapped(model, outputs), "vmap"
    first = Outputs("index", outputs.total, (0,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run itself will say it again
        plain = looped(model, first)(x[:1], names)
        try:
            quick = vmapped(model, first)(x[:1], names)
        except (RuntimeError, NotImplementedError, TypeError, ValueError):
            return looped(model, outputs), "autograd"
    apart = sum(float((quick[n] - plain[n]).square().sum()) for n in names) ** 0.5
    size = sum(float(plain[n].square().sum()) for n in names) ** 0.5
    if apart <= _AGREE * size:
        return vmapped(model, outputs), "vmap"
    return looped(model, outputs), "autograd"
