"""A copy of a network for inference, with all that depends on its weights alone made ready."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from torch import nn
from torch.nn.utils import parametrize

from .envelope import Envelope
from .geq import GEQ

__all__ = ["frozen_copy"]

Model = TypeVar("Model", bound=nn.Module)


def frozen_copy(model: Model) -> Model:
    """A copy in evaluation mode whose weights stay: answers are the same, and sooner there.

    Constraints are evaluated once, here, and their results are ordinary parameters. GEQ layers keep
    what their first solve without gradients makes of the weights (casts, W_hW_hᵀ, flipped kernels):
    let it end before other streams, threads or a CUDA graph use the copy. For one image on a GPU,
    where time is the number of kernels, this is most of the time:

        network = eq.nn.frozen_copy(model)
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            logits = network(x)

    The copy moves, saves and certifies as other networks do, and its answers follow weights that
    are changed by ``load_state_dict``, ``to`` or in place; those changed through ``.data`` or by a
    replayed CUDA graph are not seen. Later changes of ``model`` are not seen at all.
    """
    network = copy.deepcopy(model).eval().requires_grad_(False)
    for module in network.modules():
        if isinstance(module, (GEQ, Envelope)):
            module.freeze()
    for module in network.modules():
        if parametrize.is_parametrized(module):
            # Not remove_parametrizations: it changes the class, which the original shares.
            held: Any = module.parametrizations
            made = {name: getattr(module, name).detach() for name in held}
            module.__class__ = parametrize.type_before_parametrizations(module)
            del module.parametrizations
            for name, value in made.items():
                setattr(module, name, nn.Parameter(value, requires_grad=False))
    return network
