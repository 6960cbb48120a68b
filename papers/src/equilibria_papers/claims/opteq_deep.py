"""Deep OptEq: Lemmas 1 to 3, Theorems 2 and 3, Corollary 1, and when it contracts.

f_l(z) = αW_lᵀσ(W_lz + c_l) + (1 − α)z, z = f_L ∘ … ∘ f_1(z); ‖W_l‖ ≤ 1 (Assumption 2).
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor, nn

from equilibria_papers.theory.converters import to_deep_opteq, to_hidden_units
from equilibria_papers.theory.opteq_theorems import Block, MultiBlock

from .claim import Trial
from .numerics import ACTIVATIONS, Random, identity, norm, program, solve, spectral, tensor, zeros
from .opteq_layer import Layer, off


@dataclass(frozen=True)
class Deep:
    """The layers at one input and their α."""

    layers: tuple[Layer, ...]
    alpha: float

    def states(self, z: Tensor) -> list[Tensor]:
        """z and what each layer makes of the one before it: z_0, …, z_L."""
        found = [z]
        for layer in self.layers:
            found.append(self.alpha * layer(found[-1]) + (1.0 - self.alpha) * found[-1])
        return found

    def __call__(self, z: Tensor) -> Tensor:
        return self.states(z)[-1]

    def slope(self, z: Tensor) -> Tensor:
        eye = identity(len(z))
        whole = eye
        for layer, before in zip(self.layers, self.states(z)[:-1], strict=True):
            whole = (self.alpha * layer.slope(before) + (1.0 - self.alpha) * eye) @ whole
        return whole

    def blocks(self) -> Tensor:
        """z̃ = (z_1, …, z_{L−1}, z_0) [L, m] at the equilibrium z_0."""
        zero = solve(self, self.slope, zeros(self.layers[0].m))
        return torch.stack([*self.states(zero)[1:-1], zero])

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
    alphas = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
    for alpha, size, count in product(alphas, (0.3, 0.9, 0.99), (2, 3, 6)):
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


# Lemma 2 of OptEq for every α in (0, 1): a deep OptEq that equals a feed-forward network.
#
# **Ours**; the paper's proof covers α = 1. Let h = σ(Nh + v(x)) hold all hidden units of the
# network, N strictly block lower triangular. Let every layer of the deep OptEq have the units ζ_l =
# h, the same v, and W_lW_kᵀ = G_{l−k}, a cyclic sequence. With a = 1 − α the state before layer l
# is z_{l−1} = α/(1 − a^L) Σ_j a^j W_{l−1−j}ᵀh, so ζ_l = h is an equilibrium if
#
#     Σ_{j<L} a^j G_{1+j} = N(1 − a^L)/α   ⇔   Σ_ω Ĝ(ω)/(ω̄ − a) = NL/α,   ω^L = 1.
#
# G is a Gram matrix iff every Ĝ(ω) is Hermitian positive semidefinite. For L ≥ 3 one complex pair
# ω, ω̄ with Re ω ≤ 0 < a takes the antisymmetric part of N in the imaginary part of Ĝ(ω); a
# multiple of I in its real part keeps it semidefinite and, entering with a negative sign, does the
# same for Ĝ(1), which takes the rest. For L = 2 there is one hidden layer and N = 0: Ĝ(1) = αI,
# Ĝ(−1) = (1 + a)I, that is G_0 = I and G_1 = −aI.


class CyclicDeep(NamedTuple):
    """W_1, …, W_L [n, m] and the map h → z_0 [m, n]; every layer has the same Ux + b."""

    weights: list[Tensor]
    state: Tensor


def cyclic_deep(n: Tensor, layers: int, alpha: float) -> CyclicDeep:
    """The weights for N [n, n], L layers and α in (0, 1), such that z_0 = state @ h, of full rank.

    For L = 2 N must be zero.
    """
    if not 0.0 < alpha < 1.0:
        raise ValueError(f"alpha={alpha!r}: expected a number in (0, 1).")
    if layers < 2 or (layers == 2 and bool(n.any())):
        raise ValueError(
            f"layers={layers}: a network of H hidden layers needs L = H + 1 layers, so at least 2, "
            "and at least 3 where the hidden units feed one another."
        )
    gram = _gram(n, layers, alpha)
    values, vectors = torch.linalg.eigh(gram)
    kept = values > 1e-12 * values[-1]
    rows = (vectors[:, kept] * values[kept].sqrt()).reshape(layers, len(n), -1)
    decay = 1.0 - alpha
    # The shares of W_L, W_{L−1}, …, W_1 in the state.
    shares = tensor([decay**j for j in range(layers)])
    state = (shares[:, None, None] * rows.flip(0)).sum(0).mT * (alpha / (1.0 - decay**layers))
    return CyclicDeep(list(rows), state)


def _gram(n: Tensor, layers: int, alpha: float) -> Tensor:
    """The block matrix (G_{l−k}) [Ln, Ln]."""
    eye = identity(len(n))
    decay = 1.0 - alpha
    if layers == 2:
        return torch.kron(tensor([[1.0, -decay], [-decay, 1.0]]), eye)
    turn = cmath.exp(2j * math.pi * (math.ceil(layers / 2) - 1) / layers)
    gain = 1.0 / (turn.conjugate() - decay)
    target = n * (layers / alpha)
    symmetric, skew = 0.5 * (target + target.mT), 0.5 * (target - target.mT)
    imaginary = skew / (-2.0 * gain.imag)
    norms = [spectral(t) for t in (imaginary, symmetric)]
    real = max(norms[0], norms[1] / (2.0 * abs(gain.real))) * 1.1 + 0.1
    at_one = alpha * (symmetric - 2.0 * gain.real * real * eye)

    def block(d: int) -> Tensor:
        wave = turn**d
        return (at_one + 2.0 * (wave.real * real * eye - wave.imag * imaginary)) / layers

    numbers = range(layers)
    return torch.cat([torch.cat([block(row - k) for k in numbers], 1) for row in numbers])


_MODULES = {"relu": nn.ReLU, "tanh": nn.Tanh, "identity": nn.Identity, "sigmoid": nn.Sigmoid}


def _network(draw: Random, stages: int, sigma: str) -> nn.Sequential:
    sizes = [draw.integer(1, 4) for _ in range(stages + 2)]
    parts: list[nn.Module] = []
    for k in range(stages + 1):
        # skip_init: torch's own draw would use, and move, the global generator.
        linear: nn.Linear = nn.utils.skip_init(
            nn.Linear, sizes[k], sizes[k + 1], dtype=torch.float64
        )
        with torch.no_grad():
            linear.weight.copy_(draw.normal(sizes[k + 1], sizes[k]))
            linear.bias.copy_(draw.normal(sizes[k + 1]))
        parts += [linear] if k == stages else [linear, _MODULES[sigma]()]
    return nn.Sequential(*parts)


@torch.no_grad()
def _lemma1(draw: Random) -> Trial:
    """The library's construction against the network itself, with random input skips."""
    sigma, stages = draw.choice(list(_MODULES)), draw.integer(1, 4)
    network = _network(draw, stages, sigma)
    linears = [part for part in network if isinstance(part, nn.Linear)]
    inputs = linears[0].in_features
    skips = [draw.normal(part.out_features, inputs) for part in linears[1:-1]]
    x = draw.normal(3, inputs)
    z = ACTIVATIONS[sigma].value(linears[0](x))
    for linear, skip in zip(linears[1:-1], skips, strict=True):
        z = ACTIVATIONS[sigma].value(linear(z) + x @ skip.mT)
    made = to_hidden_units(network, skips)
    case = {"activation": sigma, "sizes": [part.out_features for part in linears]}
    return Trial(off(made(x), linears[-1](z)), {**case, "mu needed": made.nu_needed()})


@torch.no_grad()
def _lemma2(draw: Random) -> Trial:
    """α in (0, 1) by cyclic_deep: the equilibrium and its output."""
    sigma, hidden = draw.choice(list(_MODULES)), draw.integer(1, 4)
    network = _network(draw, hidden, sigma)
    linears = [part for part in network if isinstance(part, nn.Linear)]
    sizes = [part.out_features for part in linears[:-1]]
    total = sum(sizes)
    n = zeros(total, total)
    starts = [sum(sizes[:k]) for k in range(hidden)]
    for k in range(1, hidden):
        rows = slice(starts[k], starts[k] + sizes[k])
        n[rows, starts[k - 1] : starts[k - 1] + sizes[k - 1]] = linears[k].weight
    alpha = draw.uniform(0.05, 0.95)
    made = cyclic_deep(n, hidden + 1, alpha)
    x = draw.normal(linears[0].in_features)
    c = torch.cat([linears[0](x), *[part.bias for part in linears[1:-1]]])
    deep = Deep(tuple(Layer(w, c, ACTIVATIONS[sigma]) for w in made.weights), alpha)
    last = identity(total)[starts[-1] :]
    head = linears[-1].weight @ last @ torch.linalg.pinv(made.state)
    # The equilibrium is built from what each unit should say, and then only checked.
    h = x
    outputs = []
    for linear in linears[:-1]:
        h = ACTIVATIONS[sigma].value(linear(h))
        outputs.append(h)
    z = made.state @ torch.cat(outputs)
    wanted = network(x)
    ratio = max(off(deep(z), z), off(head @ z + linears[-1].bias, wanted))
    return Trial(ratio, {"activation": sigma, "hidden sizes": sizes, "alpha": alpha})


@torch.no_grad()
def _lemma2_one(draw: Random) -> Trial:
    """The library's construction for α = 1."""
    sigma = draw.choice(list(_MODULES))
    network = _network(draw, draw.integer(1, 4), sigma)
    x = draw.normal(3, network[0].in_features)  # type: ignore[arg-type]
    made = to_deep_opteq(network)
    return Trial(off(made(x), network(x)), {"activation": sigma, "network": str(network)})
