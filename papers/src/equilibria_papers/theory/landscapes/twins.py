"""repeat-K: the weight-tied network that applies a layer's map K times (paper 004, §4.2.1)."""

from __future__ import annotations

from torch import nn

from equilibria.nn import equilibrium_layers
from equilibria.solvers import Picard
from equilibria_papers.theory.checks import check_sizes

from .scoring import with_solver

__all__ = ["repeated"]


def repeated(model: nn.Module, repeats: int) -> nn.Module:
    """A copy in eval mode whose equilibrium layers take exactly ``repeats`` plain steps.

    K steps of Picard from the layer's start are the explicit network that repeats the layer's map
    K times; of a DEQ this is ``deq.repeated(K)``, with the same weights.
    """
    if not equilibrium_layers(model):
        raise ValueError(
            f"{type(model).__name__} has no equilibrium layer to repeat: give a network with a "
            "layer of equilibria.nn (a DEQ, a GEQ, …)."
        )
    check_sizes("repeated", {"repeats": repeats})
    plain = Picard(rtol=0.0, atol=0.0, max_steps=repeats)
    return with_solver(model, plain, keep_splittings=False)
