"""Paper 003, Lemmas 1 and 2: feed-forward networks as OptEq layers."""

from __future__ import annotations

import torch
from torch import nn

from equilibria_papers.theory.converters import to_deep_opteq, to_hidden_units

from .claim import Claim, Trial, Variant
from .cyclic import cyclic_deep
from .drawing import ACTIVATIONS, choice, integer, normal, uniform
from .opteq_deep import Deep
from .opteq_layer import Layer, off

__all__ = ["CLAIMS"]

_MODULES = {"relu": nn.ReLU, "tanh": nn.Tanh, "identity": nn.Identity, "sigmoid": nn.Sigmoid}


def _network(draw: torch.Generator, stages: int, sigma: str) -> nn.Sequential:
    sizes = [integer(draw, 1, 4) for _ in range(stages + 2)]
    parts: list[nn.Module] = []
    for k in range(stages + 1):
        # skip_init: torch's own draw would use, and move, the global generator.
        linear: nn.Linear = nn.utils.skip_init(
            nn.Linear, sizes[k], sizes[k + 1], dtype=torch.float64
        )
        with torch.no_grad():
            linear.weight.copy_(normal(draw, sizes[k + 1], sizes[k]))
            linear.bias.copy_(normal(draw, sizes[k + 1]))
        parts += [linear] if k == stages else [linear, _MODULES[sigma]()]
    return nn.Sequential(*parts)


@torch.no_grad()
def _lemma1(draw: torch.Generator) -> Trial:
    """The library's construction against the network itself, with random input skips."""
    sigma, stages = choice(draw, list(_MODULES)), integer(draw, 1, 4)
    network = _network(draw, stages, sigma)
    linears = [part for part in network if isinstance(part, nn.Linear)]
    inputs = linears[0].in_features
    skips = [normal(draw, part.out_features, inputs) for part in linears[1:-1]]
    x = normal(draw, 3, inputs)
    z = ACTIVATIONS[sigma].value(linears[0](x))
    for linear, skip in zip(linears[1:-1], skips, strict=True):
        z = ACTIVATIONS[sigma].value(linear(z) + x @ skip.mT)
    made = to_hidden_units(network, skips)
    case = {"activation": sigma, "sizes": [part.out_features for part in linears]}
    return Trial(off(made(x), linears[-1](z)), {**case, "mu needed": made.nu_needed()})


@torch.no_grad()
def _lemma2(draw: torch.Generator) -> Trial:
    """α in (0, 1) by cyclic_deep: the equilibrium and its output."""
    sigma, hidden = choice(draw, list(_MODULES)), integer(draw, 1, 4)
    network = _network(draw, hidden, sigma)
    linears = [part for part in network if isinstance(part, nn.Linear)]
    sizes = [part.out_features for part in linears[:-1]]
    total = sum(sizes)
    n = torch.zeros(total, total, dtype=torch.float64)
    starts = [sum(sizes[:k]) for k in range(hidden)]
    for k in range(1, hidden):
        rows = slice(starts[k], starts[k] + sizes[k])
        n[rows, starts[k - 1] : starts[k - 1] + sizes[k - 1]] = linears[k].weight
    alpha = uniform(draw, 0.05, 0.95)
    made = cyclic_deep(n, hidden + 1, alpha)
    x = normal(draw, linears[0].in_features)
    c = torch.cat([linears[0](x), *[part.bias for part in linears[1:-1]]])
    deep = Deep(tuple(Layer(w, c, ACTIVATIONS[sigma]) for w in made.weights), alpha)
    last = torch.eye(total, dtype=torch.float64)[starts[-1] :]
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
def _lemma2_one(draw: torch.Generator) -> Trial:
    """The library's construction for α = 1."""
    sigma = choice(draw, list(_MODULES))
    network = _network(draw, integer(draw, 1, 4), sigma)
    x = normal(draw, 3, network[0].in_features)  # type: ignore[arg-type]
    made = to_deep_opteq(network)
    return Trial(off(made(x), network(x)), {"activation": sigma, "network": str(network)})


CLAIMS = (
    Claim(
        id="opteq.lemma1",
        paper="OptEq",
        where="Lemma 1",
        statement=r"Every network $z_{k+1} = \sigma(W_kz_k + U_kx + b_k)$, $y = W_{L+1}z_L$ equals "
        r"$\bar z_{k+1} = \bar W_k^\top\sigma(\bar W_k\bar z_k + U_kx + b_k)$, "
        r"$y = \bar W_{L+1}\bar z_L$ for some $\bar W_k$ with $m \ge \max(n_k + n_{k+1})$.",
        variants=(Variant(name="as printed", random=_lemma1, cost=2.0),),
        note=r"Tried with the library's `to_hidden_units` at the least $m$. The $\bar W_k$ are not "
        r"bounded by 1, so Theorem 1 needs its $\mu$ for them.",
    ),
    Claim(
        id="opteq.lemma2",
        paper="OptEq",
        where="Lemma 2",
        statement=r"For every feed-forward network with $L - 1$ hidden layers there is a deep OptEq"
        r" of $L$ layers (Eq 5, $\alpha \in (0, 1)$) with the same output.",
        variants=(
            Variant(
                name="as printed, by our cyclic weights",
                random=_lemma2,
                climbs=False,  # large weights, small α: it would find their conditioning
            ),
            Variant(
                name="alpha = 1, by the paper's products",
                needs=r"$\alpha = 1$, and one layer more for fewer than three hidden layers",
                random=_lemma2_one,
                cost=8.0,
            ),
        ),
        note=r"The skip carries every $W_l^\top\sigma_l$ around the loop, so the paper's products "
        r"$W_{l+1}W_l^\top = A_{l+1}$ do not do it for $\alpha < 1$. Weights with "
        r"$W_lW_k^\top = G_{l-k}$, a cyclic sequence chosen in its Fourier domain, do, for every "
        r"$\alpha$ and every $\sigma$ (`theory/audit/cyclic.py` has the proof). Neither bounds "
        r"$\|W_l\|$ by 1: for $\alpha < 1$ other equilibria may exist beside this one.",
    ),
)
