"""How many steps the layers of a network take, of which length; and copies for inference."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from equilibria.engine.solver import SolverOptions
from equilibria.engine.transforms import for_any_mode
from equilibria.engine.tree import sample_norm
from equilibria.solvers import Picard, ProximalGradient

from .constraints import without_autocast
from .envelope import Envelope
from .geq import GEQ
from .inputs import check_sizes
from .layer import EquilibriumLayer

Model = TypeVar("Model", bound=nn.Module)
TAUS = tuple(round(0.5 + 0.04 * i, 2) for i in range(26))
"""0.5 to 1.5; τ = 1 is the layer's own map."""


def set_steps(model: Model, steps: int) -> Model:
    """Let every equilibrium layer with a fixed number of steps take ``steps``; the model itself.

    Weights, step sizes and gradients stay what they are. Layers whose solver stops by a tolerance
    (``rtol`` or ``atol`` above 0) have no number of steps to set: an error names them.
    """
    check_sizes("set_steps", {"steps": steps})
    layers = solver_layers(model)
    if not layers:
        raise ValueError(f"{type(model).__name__} has no equilibrium layers.")
    for name, layer in layers.items():
        own = layer.solver
        if not own.fixed_steps:
            raise ValueError(
                f"steps={steps}: layer {name} stops by a tolerance ({own!r}); give its solver "
                "rtol=0, atol=0 first."
            )
    for layer in layers.values():
        layer.solver = replace(layer.solver, max_steps=steps)
    return model


@torch.no_grad()
def calibrate_steps(
    model: Model, x: Tensor, steps: int, *, taus: Sequence[float] = TAUS
) -> tuple[Model, float]:
    """Let every layer take ``steps`` steps of the length τ that changes the network's answer least.

    The step τ = 2/(m + L) of a certificate is the best against the worst direction, and too short
    for most: with few steps a longer one ends nearer. The network runs over x [B, ...], a sample
    of inputs without labels, once as it is and once with each τ, in evaluation mode; the τ with the
    least mean relative distance of the outputs is set in all layers. A certificate judges any
    state, so those of this step too. Returns the model itself, changed, and τ.

    Args:
        model: its layers have ``ProximalGradient(rtol=0, atol=0, accelerate=False)`` or
            ``Picard(rtol=0, atol=0)``, which becomes ``ProximalGradient``.
        x: as the model takes it; its output is one tensor [B, ...].
        steps: how many each layer takes.
        taus: what to try.
    """
    trial = set_steps(copy.deepcopy(model), steps).eval()
    for layer in solver_layers(model).values():
        own = layer.solver
        plain = isinstance(own, (Picard, ProximalGradient)) and not getattr(own, "accelerate", 0)
        if not isinstance(layer, EquilibriumLayer) or not plain:
            raise ValueError(
                f"calibrate_steps: {type(layer).__name__} with {own!r} has no step τ; expected a "
                "layer of a hidden problem with ProximalGradient(accelerate=False) or Picard."
            )
    goal = copy.deepcopy(model).eval()(x)
    healthy = (size := sample_norm([goal])).isfinite()
    if len(taus) == 0 or not bool(healthy.any()):
        raise ValueError(
            f"calibrate_steps(taus={taus!r}): expected at least one τ, and inputs x that the model "
            f"answers with finite numbers, here {int(healthy.sum())} of {len(goal)}."
        )
    size = size.clamp_min(torch.finfo(goal.dtype).tiny)

    def off(t: float) -> float:
        gap = sample_norm([_stepping(trial, steps, t)(x) - goal]) / size
        return float(gap[healthy].nan_to_num(math.inf, math.inf).mean())

    tau = float(min((off(t), t) for t in taus)[1])
    return _stepping(model, steps, tau), tau


def _stepping(model: Model, steps: int, tau: float) -> Model:
    for layer in solver_layers(model).values():
        layer.solver = ProximalGradient(
            rtol=0.0, atol=0.0, max_steps=steps, accelerate=False, tau=tau
        )
    return model


def solver_layers(model: nn.Module) -> dict[str, Any]:
    """The layers of ``model`` that have a solver, by name, those inside of other layers too."""
    return {
        name or "(the model)": module
        for name, module in model.named_modules()
        if isinstance(getattr(module, "solver", None), SolverOptions)
    }


@for_any_mode()
def frozen_copy(model: Model) -> Model:
    """A copy in evaluation mode whose weights stay: answers are the same, and sooner there.

    Constraints are evaluated once, here, and their results are ordinary parameters. GEQ layers keep
    what their first solve without gradients makes of the weights (casts, W_hW_hᵀ, flipped kernels):
    let it end before other streams, threads or a CUDA graph use the copy. For one image on a GPU,
    where time is the number of kernels, this is most of the time.

    The copy moves, certifies, pickles and trains as other networks do, and its answers follow
    weights that are changed by ``load_state_dict``, ``to``, an optimizer or in place; those changed
    in place through ``.data``, NumPy or a replayed CUDA graph are not seen, and an ``Envelope``
    keeps its estimate of ‖W‖. Later changes of ``model`` are not seen at all. ``models.save`` takes
    the network itself: its file has the constraints.
    """
    network = copy.deepcopy(model).eval().requires_grad_(False)
    for module in list(network.modules()):  # an Envelope before the layer in it
        if isinstance(module, GEQ):
            own = type(module)  # one that makes its weights in its own way keeps nothing
            usual = own.operator is GEQ.operator and own.hidden_weight is GEQ.hidden_weight
            module._kept = () if usual else None
        if isinstance(module, Envelope):
            module.freeze()
        if parametrize.is_parametrized(module):
            # Not remove_parametrizations: it changes the class, which the original shares.
            held: Any = module.parametrizations
            with without_autocast(next(iter(held.state_dict().values()))):
                made = {name: getattr(module, name).detach() for name in held}
            module.__class__ = parametrize.type_before_parametrizations(module)
            del module.parametrizations
            for name, value in made.items():
                setattr(module, name, nn.Parameter(value, requires_grad=False))
            lost: Any = module
            lost.lost_constraints = True  # for ``models.save``
    return network
