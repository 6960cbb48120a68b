"""Products with the transposed Jacobian of one evaluation, f = T(z), whose graph is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from .tree import Leaves


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
