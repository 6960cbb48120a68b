"""Deep OptEq: Lemma 3, Theorems 2 and 3, Corollary 1, and when it contracts.

f_l(z) = αW_lᵀσ(W_lz + c_l) + (1 − α)z, z = f_L ∘ … ∘ f_1(z); ‖W_l‖ ≤ 1 (Assumption 2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from equilibria_papers.theory.deep_opteq import Block, MultiBlock

from .claim import Trial
from .drawing import ACTIVATIONS, Random, identity, norm, spectral, tensor, zeros
from .numerics import program, solve
from .opteq_layer import Layer, off


@dataclass(frozen=True)
class Deep:
    """The layers at one input and their α."""

    layers: tuple[Layer, ...]
    alpha: float

    def part(self, number: int, z: Tensor) -> Tensor:
        return self.alpha * self.layers[number](z) + (1.0 - self.alpha) * z

    def __call__(self, z: Tensor) -> Tensor:
        for number in range(len(self.layers)):
            z = self.part(number, z)
        return z

    def slope(self, z: Tensor) -> Tensor:
        eye = identity(len(z))
        whole = eye
        for number, layer in enumerate(self.layers):
            whole = (self.alpha * layer.slope(z) + (1.0 - self.alpha) * eye) @ whole
            z = self.part(number, z)
        return whole

    def blocks(self) -> Tensor:
        """z̃ = (z_1, …, z_{L−1}, z_0) [L, m] at the equilibrium z_0."""
        zero = solve(self, self.slope, zeros(self.layers[0].m))
        found, z = [], zero
        for number in range(len(self.layers) - 1):
            z = self.part(number, z)
            found.append(z)
        return torch.stack([*found, zero])

    def case(self) -> dict[str, object]:
        return {
            "alpha": self.alpha,
            "activation": self.layers[0].sigma.name,
            **{f"W_{i}": layer.w for i, layer in enumerate(self.layers, 1)},
            **{f"c_{i}": layer.c for i, layer in enumerate(self.layers, 1)},
        }


def _draw_deep(
    draw: Random,
    *,
    count: int | None = None,
    activation: str | None = None,
    alpha: float | None = None,
    top: float = 1.0,
) -> Deep:
    """‖W_1‖ ≤ 0.9, the others up to ``top``."""
    number = draw.integer(2, 4) if count is None else count
    m = draw.integer(1, 4)
    sigma = ACTIVATIONS[activation or draw.choice(list(ACTIVATIONS))]
    layers = []
    for index in range(number):
        n = draw.integer(1, 5)
        size = draw.uniform(0.2, 0.9 if index == 0 else top)
        layers.append(Layer(draw.weights(n, m, size), draw.normal(n) * 1.5, sigma))
    return Deep(tuple(layers), draw.uniform(0.05, 0.95) if alpha is None else alpha)


def _eq7(deep: Deep, z: Tensor, *, inside: bool) -> Tensor:
    """αW̃ᵀσ(W̃[P]z̃ + c̃) + (1 − α)Pz̃, with P inside or not; z̃ [L, m]."""
    before = torch.roll(z, 1, dims=0)
    read = before if inside else z
    rows = [
        deep.alpha * layer(read[number]) + (1.0 - deep.alpha) * before[number]
        for number, layer in enumerate(deep.layers)
    ]
    return torch.stack(rows)


def _lemma3(draw: Random, *, inside: bool) -> Trial:
    deep = _draw_deep(draw)
    z = deep.blocks()
    ratio = off(_eq7(deep, z, inside=inside), z)
    if deep.layers[0].sigma.name == "relu":
        blocks = [Block(layer.w, layer.c[None], alpha=deep.alpha) for layer in deep.layers]
        own = float(MultiBlock(blocks).residual(z[None], as_printed=not inside)[0])
        ratio = max(ratio, own / (1e-7 * (1.0 + norm(z))))
    return Trial(ratio, deep.case())


def _equilibrium_of_eq7(deep: Deep, *, inside: bool) -> Tensor:
    """z̃ [L, m] of Eq 7 itself, by averaged iteration (both forms are nonexpansive) and Newton."""
    if inside:
        return deep.blocks()
    count, m = len(deep.layers), deep.layers[0].m
    eye = identity(m)
    shift = torch.kron(torch.roll(identity(count), 1, dims=0), eye)

    def step(flat: Tensor) -> Tensor:
        return _eq7(deep, flat.reshape(count, m), inside=False).flatten()

    def slope(flat: Tensor) -> Tensor:
        parts = zip(deep.layers, flat.reshape(count, m), strict=True)
        own: Tensor = torch.block_diag(*[layer.slope(part) for layer, part in parts])
        return deep.alpha * own + (1.0 - deep.alpha) * shift

    return solve(step, slope, zeros(count * m)).reshape(count, m)


def _envelope_point(layer: Layer, z: Tensor, alpha: float) -> Tensor:
    """argmin_u φ(u) + ‖u − z‖²/(2(1 − α)): a program for ReLU, else (1 − α)v + αf(v) = z."""
    weight = 1.0 / (1.0 - alpha)
    if layer.sigma.name == "relu":
        return layer.minimizer(weight * z, weight * identity(len(z)))

    def step(v: Tensor) -> Tensor:
        return alpha * (v - layer(v)) + z

    def slope(v: Tensor) -> Tensor:
        return alpha * (identity(len(v)) - layer.slope(v))

    return layer(solve(step, slope, z))


def _theorem2(draw: Random, *, inside: bool) -> Trial:
    """∇Φ(z̃) + (I − P)z̃, with ∇(αM^{1−α})(z) = α(z − u)/(1 − α)."""
    deep = _draw_deep(draw, activation=draw.choice(("relu", "relu", "tanh", "leaky relu")))
    z = _equilibrium_of_eq7(deep, inside=inside)
    before = torch.roll(z, 1, dims=0)
    share = deep.alpha / (1.0 - deep.alpha)
    rows = []
    for layer, own, left in zip(deep.layers, z, before, strict=True):
        u = _envelope_point(layer, own, deep.alpha)
        rows.append(share * (own - u) + own - left)
    found = norm(torch.stack(rows)) / (1e-7 * (1.0 + share) * (1.0 + norm(z)))
    return Trial(found, deep.case())


def _corollary1(draw: Random, *, inside: bool) -> Trial:
    """Two layers, ReLU: z̃ against the minimizer of one program in (ζ_1, ζ_2, z_1, z_0)."""
    deep = _draw_deep(draw, count=2, activation="relu", top=0.98)
    z = _equilibrium_of_eq7(deep, inside=inside)
    sizes = [len(layer.c) for layer in deep.layers]
    m = deep.layers[0].m
    total = sum(sizes) + 2 * m
    h = zeros(total, total)
    g = zeros(total)
    eye, share = identity(m), deep.alpha / (1.0 - deep.alpha)
    at = 0
    for number, layer in enumerate(deep.layers):
        rows = slice(at, at + sizes[number])
        own = slice(sum(sizes) + number * m, sum(sizes) + (number + 1) * m)
        ones = identity(sizes[number])
        h[rows, rows] = deep.alpha * ones + (share - deep.alpha) * layer.w @ layer.w.mT
        h[rows, own], h[own, rows] = -share * layer.w, -share * layer.w.mT
        h[own, own] = (share + 1.0) * eye
        g[rows] = deep.alpha * layer.c
        at += sizes[number]
    first, second = slice(at, at + m), slice(at + m, total)
    h[first, second], h[second, first] = -eye, -eye
    least = program(h, g, torch.arange(total) < sum(sizes))
    return Trial(off(z.flatten(), least[at:]), deep.case())


def _wide(layers: Sequence[Layer]) -> Tensor:
    """The y of min Σφ_i(x_i) + ½‖x_i − y‖² for ReLU, by one program in (ζ_1, …, ζ_L, y)."""
    m = layers[0].m
    stacked = torch.cat([layer.w for layer in layers])
    total = len(stacked)
    h = identity(total + m)
    h[:total, total:], h[total:, :total] = -stacked, -stacked.mT
    h[total:, total:] *= len(layers)
    g = torch.cat([*[layer.c for layer in layers], zeros(m)])
    return program(h, g, torch.arange(total + m) < total)[total:]


def _theorem3(deep: Deep) -> Trial | None:
    """max‖z_l(α) − y‖ against αkS/(1 − αkL), k = 1 + 1/(1 − q), S = Σ‖prox_l(y) − y‖.

    From z_l − z_{l−1} = α(prox_l − I)(z_{l−1}), I − prox_l nonexpansive, and q the mean of ‖W_l‖².
    """
    count = len(deep.layers)
    norms = tensor([spectral(layer.w) for layer in deep.layers])
    constant = 1.0 + 1.0 / (1.0 - float(norms.square().mean()))
    if deep.alpha * constant * count > 0.5:
        return None
    y = _wide(deep.layers)
    pull = sum(norm(layer(y) - y) for layer in deep.layers)
    allowed = deep.alpha * constant * pull / (1.0 - deep.alpha * constant * count)
    far = float(torch.linalg.vector_norm(deep.blocks() - y, dim=1).max())
    case = {**deep.case(), "distance": far, "bound": allowed}
    return Trial(far / (allowed + 1e-8 * (1.0 + norm(y))), case)


def _theorem3_random(draw: Random) -> Trial | None:
    alpha = 10.0 ** draw.uniform(-5.0, -1.5)
    return _theorem3(_draw_deep(draw, activation="relu", alpha=alpha, top=0.98))


def _theorem3_adversarial(draw: Random) -> Iterator[Trial | None]:
    """One-dimensional layers with far apart wishes, ‖W_l‖ to 0.99, α down to 1e-6."""
    relu = ACTIVATIONS["relu"]
    for alpha in (1e-2, 1e-3, 1e-4, 1e-5, 1e-6):
        for size in (0.3, 0.9, 0.99):
            for count in (2, 3, 6):
                layers = [
                    Layer(tensor([[size * (-1.0) ** k]]), tensor([draw.uniform(1.0, 10.0)]), relu)
                    for k in range(count)
                ]
                yield _theorem3(Deep(tuple(layers), alpha))


def _contraction(draw: Random) -> Trial:
    """‖T(a) − T(b)‖ ≤ Π(1 − α(1 − ‖W_l‖²))‖a − b‖, which is < 1 when one ‖W_l‖ is."""
    deep = _draw_deep(draw)
    m = deep.layers[0].m
    a, b = draw.normal(m) * 2.0, draw.normal(m) * draw.uniform(0.01, 3.0)
    allowed = 1.0
    for layer in deep.layers:
        allowed *= 1.0 - deep.alpha * (1.0 - spectral(layer.w) ** 2)
    return Trial(norm(deep(a) - deep(b)) / (allowed * norm(a - b)), deep.case())
