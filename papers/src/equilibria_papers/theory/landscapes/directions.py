"""Directions in weight space that can be compared between networks: d_i ← d_i ‖w_i‖ / ‖d_i‖.

Filter normalization (Li et al. 2018): every filter of a random direction gets the norm of the
weights' filter at the same place, so that a step of 1 changes each filter by its own size, however
the network is scaled. A weight with a norm bound (``NormBounded``) is moved by its raw parameter
and then scaled back onto the bound, so there the step that acts is not the filter's norm.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from equilibria_papers.theory.checks import check_sizes

Direction = dict[str, Tensor]
"""name of a parameter → step of its shape; parameters that stay where they are do not appear."""

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def filter_dims(model: nn.Module) -> dict[str, int]:
    """name → the dimension that counts filters, of every parameter that a direction moves.

    A filter is what makes one output: a kernel of a convolution, a row of a matrix. Vectors
    (biases, gains of norms) are left out, as by Li et al., and so are parameters that do not train.
    """
    transposed = {id(m.weight) for m in model.modules() if isinstance(m, _TRANSPOSED)}
    found = {
        name: 1 if id(weight) in transposed else 0
        for name, weight in model.named_parameters()
        if weight.ndim >= 2 and weight.is_floating_point() and weight.requires_grad
    }
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no parameter of two or more dimensions to move."
        )
    return found


def random_directions(model: nn.Module, count: int = 2, *, seed: int = 0) -> tuple[Direction, ...]:
    """``count`` Gaussian directions, each filter with the norm of the weights' own.

    Args:
        model: whose weights are the center; its parameters are only read.
        count: 1 for a curve, 2 for a surface.
        seed: the same seed gives the same directions on every device.
    """
    check_sizes("random_directions", {"count": count})
    dims = filter_dims(model)
    weights = dict(model.named_parameters())
    generator = torch.Generator().manual_seed(seed)

    def draw(weight: Tensor, dim: int) -> Tensor:
        # On the CPU in float64: the same numbers on every device and in every precision.
        drawn = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        drawn = drawn.to(weight.device)
        scale = _filter_norms(weight, dim) / _filter_norms(drawn, dim).clamp_min(1e-300)
        return (drawn * scale).to(weight.dtype)

    return tuple({name: draw(weights[name], d) for name, d in dims.items()} for _ in range(count))


def _filter_norms(weight: Tensor, dim: int) -> Tensor:
    """‖w_i‖ of each filter i in float64, shaped to multiply the weight."""
    others = [d for d in range(weight.ndim) if d != dim]
    norms: Tensor = torch.linalg.vector_norm(weight.detach().double(), dim=others, keepdim=True)
    return norms
