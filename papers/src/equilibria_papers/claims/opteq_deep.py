"""OptEq, deep OptEq: Lemma 3, Theorems 2 and 3, Corollary 1, and when it contracts.

f_l(z) = αW_lᵀσ(W_lz + c_l) + (1 − α)z, z = f_L ∘ … ∘ f_1(z); ‖W_l‖ ≤ 1 (Assumption 2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from equilibria_papers.theory.deep_opteq import Block, MultiBlock

from .claim import Trial, claim, printed, reading
from .drawing import ACTIVATIONS, choice, integer, norm, normal, uniform, weights
from .opteq_layer import Layer, off
from .solving import program, relu_prox, solve


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
        eye = torch.eye(len(z), dtype=z.dtype)
        whole = eye
        for number, layer in enumerate(self.layers):
            whole = (self.alpha * layer.slope(z) + (1.0 - self.alpha) * eye) @ whole
            z = self.part(number, z)
        return whole

    def blocks(self) -> Tensor:
        """z̃ = (z_1, …, z_{L−1}, z_0) [L, m] at the equilibrium z_0."""
        m = self.layers[0].w.shape[1]
        zero = solve(self, self.slope, torch.zeros(m, dtype=torch.float64))
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
    draw: torch.Generator,
    *,
    count: int | None = None,
    activation: str | None = None,
    alpha: float | None = None,
    top: float = 1.0,
) -> Deep:
    """‖W_1‖ ≤ 0.9, the others up to ``top``."""
    number = integer(draw, 2, 4) if count is None else count
    m = integer(draw, 1, 4)
    sigma = ACTIVATIONS[activation or choice(draw, list(ACTIVATIONS))]
    layers = []
    for index in range(number):
        n = integer(draw, 1, 5)
        size = uniform(draw, 0.2, 0.9 if index == 0 else top)
        layers.append(Layer(weights(draw, n, m, size), normal(draw, n) * 1.5, sigma))
    return Deep(tuple(layers), uniform(draw, 0.05, 0.95) if alpha is None else alpha)


# -------------------------------------------------------------- Lemma 3, Theorem 2, Corollary 1


def _multi(deep: Deep) -> MultiBlock:
    relu = [Block(layer.w, layer.c[None], alpha=deep.alpha) for layer in deep.layers]
    return MultiBlock(relu)


def _eq7(deep: Deep, z: Tensor, *, inside: bool) -> Tensor:
    """αW̃ᵀσ(W̃[P]z̃ + c̃) + (1 − α)Pz̃, with P inside or not; z̃ [L, m]."""
    before = torch.roll(z, 1, dims=0)
    read = before if inside else z
    rows = [
        deep.alpha * layer(read[number]) + (1.0 - deep.alpha) * before[number]
        for number, layer in enumerate(deep.layers)
    ]
    return torch.stack(rows)


def _lemma3(draw: torch.Generator, *, inside: bool) -> Trial:
    deep = _draw_deep(draw)
    z = deep.blocks()
    ratio = off(_eq7(deep, z, inside=inside), z)
    if deep.layers[0].sigma.name == "relu":
        own = float(_multi(deep).residual(z[None], as_printed=not inside)[0])
        ratio = max(ratio, own / (1e-7 * (1.0 + norm(z))))
    return Trial(ratio, deep.case())


def _equilibrium_of_eq7(deep: Deep, *, inside: bool) -> Tensor:
    """z̃ [L, m] of Eq 7 itself, by averaged iteration (both forms are nonexpansive) and Newton."""
    if inside:
        return deep.blocks()
    count, m = len(deep.layers), deep.layers[0].w.shape[1]
    eye = torch.eye(m, dtype=torch.float64)
    shift = torch.kron(torch.roll(torch.eye(count, dtype=torch.float64), 1, dims=0), eye)

    def step(flat: Tensor) -> Tensor:
        return _eq7(deep, flat.reshape(count, m), inside=False).flatten()

    def slope(flat: Tensor) -> Tensor:
        parts = zip(deep.layers, flat.reshape(count, m), strict=True)
        own: Tensor = torch.block_diag(*[layer.slope(part) for layer, part in parts])
        return deep.alpha * own + (1.0 - deep.alpha) * shift

    return solve(step, slope, torch.zeros(count * m, dtype=torch.float64)).reshape(count, m)


def _envelope_point(layer: Layer, z: Tensor, alpha: float) -> Tensor:
    """argmin_u φ(u) + ‖u − z‖²/(2(1 − α)): a program for ReLU, else (1 − α)v + αf(v) = z."""
    weight = 1.0 / (1.0 - alpha)
    if layer.sigma.name == "relu":
        eye = torch.eye(len(z), dtype=z.dtype)
        return relu_prox(layer.w, layer.c, weight * z, weight * eye)

    def step(v: Tensor) -> Tensor:
        return alpha * (v - layer(v)) + z

    def slope(v: Tensor) -> Tensor:
        return alpha * (torch.eye(len(v), dtype=v.dtype) - layer.slope(v))

    return layer(solve(step, slope, z))


def _theorem2(draw: torch.Generator, *, inside: bool) -> Trial:
    """∇Φ(z̃) + (I − P)z̃, with ∇(αM^{1−α})(z) = α(z − u)/(1 − α)."""
    deep = _draw_deep(draw, activation=choice(draw, ("relu", "relu", "tanh", "leaky relu")))
    z = _equilibrium_of_eq7(deep, inside=inside)
    before = torch.roll(z, 1, dims=0)
    share = deep.alpha / (1.0 - deep.alpha)
    rows = []
    for layer, own, left in zip(deep.layers, z, before, strict=True):
        u = _envelope_point(layer, own, deep.alpha)
        rows.append(share * (own - u) + own - left)
    found = norm(torch.stack(rows)) / (1e-7 * (1.0 + share) * (1.0 + norm(z)))
    return Trial(found, deep.case())


def _corollary1(draw: torch.Generator, *, inside: bool) -> Trial:
    """Two layers, ReLU: z̃ against the minimizer of one program in (ζ_1, ζ_2, z_1, z_0)."""
    deep = _draw_deep(draw, count=2, activation="relu", top=0.98)
    z = _equilibrium_of_eq7(deep, inside=inside)
    sizes = [len(layer.c) for layer in deep.layers]
    m = deep.layers[0].w.shape[1]
    total = sum(sizes) + 2 * m
    h = torch.zeros(total, total, dtype=torch.float64)
    g = torch.zeros(total, dtype=torch.float64)
    eye, share = torch.eye(m, dtype=torch.float64), deep.alpha / (1.0 - deep.alpha)
    at = 0
    for number, layer in enumerate(deep.layers):
        rows = slice(at, at + sizes[number])
        own = slice(sum(sizes) + number * m, sum(sizes) + (number + 1) * m)
        ones = torch.eye(sizes[number], dtype=torch.float64)
        h[rows, rows] = deep.alpha * ones + (share - deep.alpha) * layer.w @ layer.w.mT
        h[rows, own], h[own, rows] = -share * layer.w, -share * layer.w.mT
        h[own, own] = (share + 1.0) * eye
        g[rows] = deep.alpha * layer.c
        at += sizes[number]
    first, second = slice(at, at + m), slice(at + m, total)
    h[first, second], h[second, first] = -eye, -eye
    least = program(h, g, torch.arange(total) < sum(sizes))
    return Trial(off(z.flatten(), least[at:]), deep.case())


# -------------------------------------------------------------------------------------- Theorem 3


def _wide(layers: Sequence[Layer]) -> Tensor:
    """The y of min Σφ_i(x_i) + ½‖x_i − y‖² for ReLU, by one program in (ζ_1, …, ζ_L, y)."""
    sizes = [len(layer.c) for layer in layers]
    m = layers[0].w.shape[1]
    stacked = torch.cat([layer.w for layer in layers])
    total = sum(sizes)
    h = torch.eye(total + m, dtype=torch.float64)
    h[:total, total:], h[total:, :total] = -stacked, -stacked.mT
    h[total:, total:] *= len(layers)
    g = torch.cat([*[layer.c for layer in layers], torch.zeros(m, dtype=torch.float64)])
    return program(h, g, torch.arange(total + m) < total)[total:]


def _theorem3(deep: Deep) -> Trial | None:
    """max‖z_l(α) − y‖ against αkS/(1 − αkL), k = 1 + 1/(1 − q), S = Σ‖prox_l(y) − y‖.

    From z_l − z_{l−1} = α(prox_l − I)(z_{l−1}), I − prox_l nonexpansive, and q the mean of ‖W_l‖².
    """
    count = len(deep.layers)
    norms = torch.stack([torch.linalg.matrix_norm(layer.w, 2) for layer in deep.layers])
    mean = float(norms.square().mean())
    constant = 1.0 + 1.0 / (1.0 - mean)
    if deep.alpha * constant * count > 0.5:
        return None
    y = _wide(deep.layers)
    pull = sum(norm(layer(y) - y) for layer in deep.layers)
    allowed = deep.alpha * constant * pull / (1.0 - deep.alpha * constant * count)
    far = float(torch.linalg.vector_norm(deep.blocks() - y, dim=1).max())
    case = {**deep.case(), "distance": far, "bound": allowed}
    return Trial(far / (allowed + 1e-8 * (1.0 + norm(y))), case)


def _theorem3_random(draw: torch.Generator) -> Trial | None:
    alpha = 10.0 ** uniform(draw, -5.0, -1.5)
    return _theorem3(_draw_deep(draw, activation="relu", alpha=alpha, top=0.98))


def _theorem3_adversarial(draw: torch.Generator) -> Iterator[Trial | None]:
    """One-dimensional layers with far apart wishes, ‖W_l‖ to 0.99, α down to 1e-6."""
    for alpha in (1e-2, 1e-3, 1e-4, 1e-5, 1e-6):
        for size in (0.3, 0.9, 0.99):
            for count in (2, 3, 6):
                signs = [(-1.0) ** k for k in range(count)]
                layers = tuple(
                    Layer(
                        torch.tensor([[size * sign]], dtype=torch.float64),
                        torch.tensor([uniform(draw, 1.0, 10.0)], dtype=torch.float64),
                        ACTIVATIONS["relu"],
                    )
                    for sign in signs
                )
                yield _theorem3(Deep(layers, alpha))


# ------------------------------------------------------------------------------------ Section 6.1


def _contraction(draw: torch.Generator) -> Trial:
    """‖T(a) − T(b)‖ ≤ Π(1 − α(1 − ‖W_l‖²))‖a − b‖, which is < 1 when one ‖W_l‖ is."""
    deep = _draw_deep(draw)
    m = deep.layers[0].w.shape[1]
    a, b = normal(draw, m) * 2.0, normal(draw, m) * uniform(draw, 0.01, 3.0)
    allowed = 1.0
    for layer in deep.layers:
        size = float(torch.linalg.matrix_norm(layer.w, 2))
        allowed *= 1.0 - deep.alpha * (1.0 - size**2)
    return Trial(norm(deep(a) - deep(b)) / (allowed * norm(a - b)), deep.case())


CLAIMS = (
    claim(
        "opteq.lemma3",
        "Lemma 3, Eq 7",
        r"$\tilde z^* = (z_1^*, \dots, z_{L-1}^*, z_0^*)$ of a deep OptEq solves "
        r"$\tilde z = \alpha\tilde W^\top\sigma(\tilde W\tilde z + \tilde Ux + \tilde b) + "
        r"(1-\alpha)P\tilde z$.",
        printed(lambda draw: _lemma3(draw, inside=False), cost=2.0),
        reading(
            "with P inside",
            r"$\sigma(\tilde WP\tilde z + \dots)$, and "
            r"$\tilde W = \mathrm{diag}(W_1, \dots, W_L)$",
            lambda draw: _lemma3(draw, inside=True),
            cost=2.0,
        ),
        note="Block $l$ reads its predecessor; without $P$ inside it reads itself. The printed "
        r"$\tilde W$ has one block too many for $\mathbb R^{mL}$.",
    ),
    claim(
        "opteq.theorem2",
        "Theorem 2, Eq 8",
        r"If $\|W_l\|_2 \le 1$, every solution of Eq 7 satisfies $0 \in \partial\Phi("
        r"\tilde z) + (I - P)\tilde z$ with $\Phi = \sum_i\alpha M_{\varphi_i}^{1-\alpha}(z_i)$.",
        printed(lambda draw: _theorem2(draw, inside=False), cost=4.0),
        reading(
            "with P inside",
            r"Eq 7 with $P$ inside",
            lambda draw: _theorem2(draw, inside=True),
            cost=4.0,
        ),
    ),
    claim(
        "opteq.corollary1",
        "Corollary 1",
        r"For $L = 2$ the solution $(z_1, z_0)$ of Eq 7 minimizes $\alpha M_{\varphi_1}^"
        r"{1-\alpha}(z_1) + \alpha M_{\varphi_2}^{1-\alpha}(z_0) + \frac12\|z_1 - z_0\|^2$.",
        printed(lambda draw: _corollary1(draw, inside=False), cost=4.0),
        reading(
            "with P inside",
            r"Eq 7 with $P$ inside",
            lambda draw: _corollary1(draw, inside=True),
            cost=4.0,
        ),
    ),
    claim(
        "opteq.theorem3",
        "Theorem 3",
        r"If $\|W_i\|_2 \le 1$ with one strict, then as $\alpha \to 0$ all "
        r"$z_i^*(\alpha)$ tend to the $y$ of $\min \sum_i\varphi_i(x_i) + \frac12\|x_i - y\|^2$. "
        r"Tried with a rate: $\max_l\|z_l(\alpha) - y\| \le \alpha kS/(1 - \alpha kL)$, "
        r"$k = 1 + 1/(1-q)$, $q$ the mean of $\|W_l\|^2$, $S = \sum_l\|\mathrm{prox}_{\varphi_l}(y)"
        r" - y\|$ (ours).",
        reading("as printed, with our rate", "", _theorem3_random, _theorem3_adversarial, cost=4.0),
    ),
    claim(
        "opteq.section6.1",
        "Section 6.1, after Theorem 5",
        r"One $\|W_i\|_2 < 1$ (the others $\le 1$) makes $\mathcal T$ contractive; tried "
        r"with the factor $\prod_l(1 - \alpha(1 - \|W_l\|^2))$.",
        printed(_contraction),
    ),
)
