"""The Jacobian of a map at a point: products with its transpose, its size, its spectral radius."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from .krylov import orthogonalized
from .maps import Map
from .tree import (
    History,
    Leaves,
    accumulation_dtype,
    flatten_state,
    sample_dot,
    sample_norm,
    scale_samples,
)


def pull(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    v: Sequence[Tensor],
    *,
    create_graph: bool = False,
) -> Leaves:
    """(∂outputs/∂inputs)ᵀv; zero where an output does not depend on an input."""
    live = [(f, c) for f, c in zip(outputs, v, strict=True) if f.requires_grad]
    if not live:
        return [torch.zeros_like(x) for x in inputs]
    found = torch.autograd.grad(
        [f for f, _ in live],
        list(inputs),
        [c for _, c in live],
        retain_graph=True,
        create_graph=create_graph,
        allow_unused=True,
    )
    known = cast(tuple[Tensor | None, ...], found)
    return [torch.zeros_like(x) if d is None else d for d, x in zip(known, inputs, strict=True)]


def pull_with_graph(
    plain: Callable[..., Tensor], given: Sequence[Tensor | None], needs: Sequence[bool], g: Tensor
) -> list[Tensor | None]:
    """(∂plain/∂given)ᵀg where asked for, with a graph: the second derivative of a fused operation
    is that of its plain form."""
    # A view of each: one tensor may have been given twice.
    inputs = [t.view_as(t) if t is not None and t.requires_grad else t for t in given]
    wanted = [t for t, asked in zip(inputs, needs, strict=True) if asked and t is not None]
    found = iter(torch.autograd.grad(plain(*inputs), wanted, g, create_graph=True))
    return [next(found) if asked else None for asked in needs]


def _prepare(fn: Callable[..., Any], z: Any, args: Any) -> tuple[Map, Leaves]:
    leaves, spec = flatten_state(z, "z")
    return Map(fn, args, spec, leaves), leaves


def _drawn(like: Leaves, generator: torch.Generator | None) -> Leaves:
    """Normal numbers."""
    return [torch.randn(x.shape, dtype=x.dtype, device=x.device, generator=generator) for x in like]


def jacobian_penalty(
    fn: Callable[..., Any],
    z: Any,
    args: Any = (),
    *,
    samples: int = 1,
    generator: torch.Generator | None = None,
) -> Tensor:
    """‖J‖²_F / n of each sample at z, by Hutchinson: E‖Jᵀv‖² with v ~ N(0, I); [B].

    Differentiable in what the map uses: add ``weight * jacobian_penalty(...).mean()`` to a loss.
    z is taken as a constant, as is usual. ``samples`` averages that many draws.
    """
    if samples < 1:
        raise ValueError(f"jacobian_penalty(samples={samples}): expected an integer of at least 1.")
    map_, leaves = _prepare(fn, z, args)
    keep = torch.is_grad_enabled()
    with torch.enable_grad():
        inside = [x.detach().requires_grad_() for x in leaves]
        outputs = map_(inside)
        parts = []
        for _ in range(samples):
            pulled = pull(outputs, inside, _drawn(outputs, generator), create_graph=keep)
            parts.append(sample_dot(pulled, pulled))
        total = functools.reduce(torch.add, parts)
    size = sum(x[0].numel() for x in leaves)
    return total / (samples * size)


def spectral_radius(
    fn: Callable[..., Any],
    z: Any,
    args: Any = (),
    *,
    steps: int = 30,
    generator: torch.Generator | None = None,
) -> Tensor:
    """max |λ(J)| of each sample at z, [B], by Arnoldi on Jᵀ (same eigenvalues as J).

    Unlike power iteration this is right when the dominant eigenvalues are a complex pair. It is
    exact (to rounding) once ``steps`` reaches the size of the state.
    """
    if steps < 1:
        raise ValueError(f"spectral_radius(steps={steps}): expected an integer of at least 1.")
    map_, leaves = _prepare(fn, z, args)
    with torch.enable_grad():
        inside = [x.detach().requires_grad_() for x in leaves]
        outputs = map_(inside)
    steps = min(steps, sum(x[0].numel() for x in leaves))
    with torch.no_grad():
        v = _drawn([x.to(accumulation_dtype(x.dtype)) for x in leaves], generator)
        tiny = torch.finfo(v[0].dtype).tiny
        v = scale_samples(1.0 / sample_norm(v).clamp_min(tiny), v)
        basis = History(v, steps)
        columns = []
        for j in range(steps):
            basis.write(j, v)
            w = pull(outputs, inside, [a.to(b.dtype) for a, b in zip(v, leaves, strict=True)])
            w = [a.to(b.dtype) for a, b in zip(w, v, strict=True)]
            w, column = orthogonalized(w, basis)
            length = sample_norm(w)
            # Rounding noise is no direction: the Krylov space is invariant, H is complete.
            noise = 8 * torch.finfo(length.dtype).eps * sample_norm([column])
            length = torch.where(length > noise, length, 0.0)
            v = scale_samples(torch.where(length > 0, 1.0 / length.clamp_min(tiny), 0.0), w)
            columns.append(torch.cat([column, length.unsqueeze(1)], 1))
        rows = [pad(c[:, :steps], (0, max(0, steps - c.shape[1]))) for c in columns]
        hessenberg = torch.stack(rows, 2)
        radius: Tensor = torch.linalg.eigvals(hessenberg).abs().amax(1)
        return radius
