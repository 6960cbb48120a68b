"""Principal components: the plane that keeps most of the variance of a cloud of points."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from equilibria_papers.theory.checks import check_sizes

__all__ = ["PCA", "principal_components"]

_CHUNK = 1 << 14  # columns at a time in float64, so that a wide float32 cloud is not doubled


@dataclass(frozen=True)
class PCA:
    """y = C (p − μ): the mean μ [n], orthonormal rows C [k, n], all in float64."""

    mean: Tensor
    components: Tensor
    explained: Tensor
    """[k]: the share of the variance along each component; zero for points that are all equal."""

    def project(self, points: Tensor) -> Tensor:
        """[..., n] → [..., k] in float64."""
        flat = points.reshape(-1, points.shape[-1])
        total = flat.new_zeros(len(flat), len(self.components), dtype=torch.float64)
        for begin in range(0, flat.shape[1], _CHUNK):
            columns = slice(begin, begin + _CHUNK)
            part = flat[:, columns].double() - self.mean[columns]
            total += part @ self.components[:, columns].T
        return total.reshape(*points.shape[:-1], -1)


def principal_components(points: Tensor, count: int = 2) -> PCA:
    """The first ``count`` principal components of points [..., n], samples in all but the last dim.

    Points with NaN or infinity are left out. The sign of each component is the one that makes its
    entry of largest magnitude positive, so that the same cloud gives the same picture. Components
    beyond the cloud's rank are zero.
    """
    if points.ndim < 2 or not points.is_floating_point():
        raise ValueError(
            f"principal_components takes floating points [..., n], got {points.dtype} "
            f"{tuple(points.shape)}."
        )
    check_sizes("principal_components", {"count": count})
    flat = points.detach().reshape(-1, points.shape[-1])
    flat = flat[torch.isfinite(flat).all(1)]
    if len(flat) < 2:
        raise ValueError(
            f"principal_components needs two finite points at least, got {len(flat)} of "
            f"{points.numel() // max(points.shape[-1], 1)}."
        )
    mean = _mean(flat)
    if len(flat) <= flat.shape[1]:
        values, components = _by_gram(flat, mean, count)
    else:
        centered = flat.double() - mean
        values, vectors = torch.linalg.eigh(centered.T @ centered)
        values, components = values.flip(0)[:count], vectors.flip(1).T[:count]
    total = _variance(flat, mean)
    components, values = _filled(components, values, count, total)
    signs = components.gather(1, components.abs().argmax(1, keepdim=True)).sign()
    components = components * torch.where(signs == 0, 1.0, signs)
    share = values / total if total > 0 else torch.zeros_like(values)
    return PCA(mean, components, share)


def _mean(flat: Tensor) -> Tensor:
    return torch.cat([part.double().mean(0) for part in flat.split(_CHUNK, 1)])


def _variance(flat: Tensor, mean: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=flat.device)
    for begin in range(0, flat.shape[1], _CHUNK):
        columns = slice(begin, begin + _CHUNK)
        total += (flat[:, columns].double() - mean[columns]).square().sum()
    return total


def _by_gram(flat: Tensor, mean: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Fewer points than dimensions: C = Vᵀ X / σ from the N × N matrix X Xᵀ = V σ² Vᵀ."""
    gram = flat.new_zeros(len(flat), len(flat), dtype=torch.float64)
    for begin in range(0, flat.shape[1], _CHUNK):
        columns = slice(begin, begin + _CHUNK)
        part = flat[:, columns].double() - mean[columns]
        gram += part @ part.T
    values, vectors = torch.linalg.eigh(gram)
    values, vectors = values.flip(0)[:count].clamp_min(0), vectors.flip(1)[:, :count]
    rows = []
    for begin in range(0, flat.shape[1], _CHUNK):
        columns = slice(begin, begin + _CHUNK)
        rows.append(vectors.T @ (flat[:, columns].double() - mean[columns]))
    components = torch.cat(rows, 1)
    norm = torch.linalg.vector_norm(components, dim=1, keepdim=True)
    return values, components / torch.where(norm == 0, 1.0, norm)


def _filled(components: Tensor, values: Tensor, count: int, total: Tensor) -> tuple[Tensor, Tensor]:
    """Exactly ``count`` rows; those that carry rounding alone are zero."""
    kept = (values > 1e-13 * total) & (values > 0)
    components = torch.where(kept.unsqueeze(1), components, 0.0)
    values = torch.where(kept, values, 0.0)
    missing = count - len(values)
    if missing > 0:
        components = torch.cat([components, components.new_zeros(missing, components.shape[1])])
        values = torch.cat([values, values.new_zeros(missing)])
    return components, values
