"""OptEq, Lemmas 1 and 2: feed-forward networks as OptEq layers."""

from __future__ import annotations

import cmath
import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from equilibria_papers.theory.converters import to_deep_opteq, to_hidden_units

from .claim import Trial
from .drawing import ACTIVATIONS, Random, identity, spectral, tensor, zeros
from .opteq_deep import Deep
from .opteq_layer import Layer, off

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
