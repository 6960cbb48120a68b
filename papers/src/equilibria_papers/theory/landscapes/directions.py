"""Directions in weight space that can be compared between networks: d_i ← d_i ‖w_i‖ / ‖d_i‖.

Filter normalization (Li et al. 2018): every filter of a random direction gets the norm of the
weights' filter at the same place, so that a step of 1 changes each filter by its own size, however
the network is scaled. A weight with a norm bound (``NormBounded``) is moved by its raw parameter
and then scaled back onto the bound, so there the step that acts is not the filter's norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from equilibria_papers.theory.checks import check_sizes
from equilibria_papers.theory.trajectories.training_path import principal_components

Direction = dict[str, Tensor]
"""name of a parameter → step of its shape; parameters that stay where they are do not appear."""

Chosen = Callable[[str, Tensor], bool]

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def filter_dims(model: nn.Module, chosen: Chosen | None = None) -> dict[str, int]:
    """name → the dimension that counts filters, of every parameter that a direction moves.

    A filter is what makes one output: a kernel of a convolution, a row of a matrix. Vectors
    (biases, gains of norms) are left out, as by Li et al., and so are parameters that do not train.
    ``chosen(name, parameter)`` narrows it further.
    """
    transposed = {
        id(module.weight) for module in model.modules() if isinstance(module, _TRANSPOSED)
    }
    found = {}
    for name, weight in model.named_parameters():
        moves = weight.ndim >= 2 and weight.is_floating_point() and weight.requires_grad
        if moves and (chosen is None or chosen(name, weight)):
            found[name] = 1 if id(weight) in transposed else 0
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no parameter of two or more dimensions to move"
            + ("." if chosen is None else " among those that were chosen.")
        )
    return found


def filter_norms(weight: Tensor, dim: int | None) -> Tensor:
    """‖w_i‖ of each filter i (for None: of the whole) in float64, shaped to multiply the weight."""
    others = [d for d in range(weight.ndim) if d != dim]
    norms: Tensor = torch.linalg.vector_norm(weight.detach().double(), dim=others, keepdim=True)
    return norms


def random_directions(
    model: nn.Module,
    count: int = 2,
    *,
    seed: int = 0,
    normalize: str = "filter",
    chosen: Chosen | None = None,
) -> tuple[Direction, ...]:
    """``count`` Gaussian directions for the weights of ``model``.

    Args:
        model: whose weights are the center; its parameters are only read.
        count: 1 for a curve, 2 for a surface.
        seed: the same seed gives the same directions on every device.
        normalize: "filter": each filter has the norm of the weights' own; "layer": each parameter;
            "none": as drawn.
        chosen: which parameters move; all matrices and kernels if not given.
    """
    if normalize not in ("filter", "layer", "none"):
        raise ValueError(f"normalize={normalize!r}: expected 'filter', 'layer' or 'none'.")
    check_sizes("random_directions", {"count": count})
    dims = filter_dims(model, chosen)
    weights = dict(model.named_parameters())
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        direction = {}
        for name, dim in dims.items():
            weight = weights[name]
            # On the CPU in float64: the same numbers on every device and in every precision.
            drawn = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            fitted = _fitted(drawn.to(weight.device), weight, dim, normalize)
            direction[name] = fitted.to(weight.dtype)
        made.append(direction)
    return tuple(made)


def _fitted(drawn: Tensor, weight: Tensor, dim: int, normalize: str) -> Tensor:
    if normalize == "none":
        return drawn
    dims = dim if normalize == "filter" else None
    return drawn * (filter_norms(weight, dims) / filter_norms(drawn, dims).clamp_min(1e-300))


@dataclass(frozen=True)
class TrainingPlane:
    """The plane of a training's largest movements, through its last weights."""

    directions: tuple[Direction, ...]
    """Unit vectors of the whole weight space."""
    path: Tensor
    """[E, k]: where each checkpoint lies in the plane; the last is the origin."""
    explained: Tensor
    """[k]: the share of the movement that each direction keeps."""


def training_plane(
    checkpoints: Iterable[nn.Module | Mapping[str, Tensor]],
    count: int = 2,
    *,
    chosen: Chosen | None = None,
) -> TrainingPlane:
    """The principal components of θ_e − θ_E over the checkpoints e of a training (Li et al., §7).

    Args:
        checkpoints: models, or mappings of names to weights, in the order of training; three at
            least. The last is the center.
        count: 1 or 2 directions.
        chosen: which parameters move; all that train and that the checkpoints share if not given.
    """
    states = [_weights(each) for each in checkpoints]
    if len(states) < 3:
        raise ValueError(f"training_plane needs three checkpoints at least, got {len(states)}.")
    last = states[-1]
    shapes = {name: tuple(value.shape) for name, value in last.items()}
    for index, state in enumerate(states):
        if {name: tuple(value.shape) for name, value in state.items()} != shapes:
            raise ValueError(f"checkpoint {index} has other weights than the last one.")
    names = [n for n, value in last.items() if chosen is None or chosen(n, value)]
    if not names:
        raise ValueError("training_plane: no parameter was chosen.")
    moved = torch.stack(
        [
            torch.cat([(s[n].double() - last[n].double()).flatten() for n in names])
            for s in states[:-1]
        ]
    )
    # Around the last weights, not around the mean: the origin of the picture is the minimum found.
    plane = principal_components(torch.cat([moved, -moved]), count)
    directions = tuple(_unflatten(row, last, names) for row in plane.components)
    center = moved.new_zeros(1, moved.shape[1])
    path = torch.cat([moved, center]) @ plane.components.T
    return TrainingPlane(directions, path, plane.explained)


def _weights(given: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    found: dict[str, Tensor]
    if isinstance(given, nn.Module):
        found = {n: p for n, p in given.named_parameters() if p.requires_grad}
    else:
        found = {n: t for n, t in given.items() if t.is_floating_point()}
    return {name: value.detach().cpu() for name, value in found.items()}


def _unflatten(row: Tensor, like: Mapping[str, Tensor], names: Sequence[str]) -> Direction:
    parts = row.split([like[n].numel() for n in names])
    return {
        n: part.view(like[n].shape).to(like[n].dtype) for n, part in zip(names, parts, strict=True)
    }
