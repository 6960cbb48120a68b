"""GradCAM (Selvaraju et al. 2017): where in the image a decision comes from.

    map = ReLU(Σ_c a_c A_c),   a_c = mean over pixels of ∂logit/∂A_c

A the output of a layer. Between that layer and the logits the gradient passes the equilibrium
layers by the implicit function theorem: ∂z*/∂x = (I − ∂T/∂z)⁻¹ ∂T/∂x, whatever the network was
trained with. (captum asks for the gradient of every output of a layer; of several tiers a head may
read one.)
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from equilibria.adjoints import Implicit
from equilibria.engine.adjoint import Adjoint
from equilibria.engine.solver import SolverOptions
from equilibria.nn.observing import equilibrium_layers

from .layer_solvers import replaced
from .model_on_data import evaluating


def _single_run_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules outside equilibrium layers, and those layers: what a forward pass runs once."""
    layers = equilibrium_layers(model).values()
    inside = {id(child) for layer in layers for child in layer.modules() if child is not layer}
    return {name: m for name, m in model.named_modules() if id(m) not in inside}


def _outputs(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, tuple[Any, ...]]]:
    """Logits, and what every module gave that runs once, the last to run last."""
    found: dict[str, tuple[Any, ...]] = {}

    def keep(name: str, module: nn.Module, inputs: Any, output: Any) -> Any:
        found.pop(name, None)
        found[name] = output if isinstance(output, tuple) else (output,)
        for part in found[name]:
            if torch.is_grad_enabled() and isinstance(part, Tensor) and part.is_leaf:
                part.requires_grad_()  # what does not depend on x has a gradient, too
        return pytree.tree_map_only(Tensor, torch.clone, output)  # what is next may write into it

    with evaluating(model), ExitStack() as hooks:
        for name, module in _single_run_modules(model).items():
            hooks.enter_context(module.register_forward_hook(partial(keep, name)))
        logits: Tensor = model(x)
    return logits, found


def _are_maps(parts: tuple[Any, ...]) -> bool:
    return all(isinstance(part, Tensor) and part.ndim == 4 for part in parts)


@torch.no_grad()
def gradcam_layer(model: nn.Module, x: Tensor) -> str:
    """The layer that ``gradcam`` takes: the last equilibrium layer to run whose output is a map.

    In a network without one: the last convolution.
    """
    maps = [
        name
        for name, parts in _outputs(model, x[:1])[1].items()
        if _are_maps(parts) and any(part.shape[-1] > 1 for part in parts)
    ]
    convolutions = {name for name, m in model.named_modules() if isinstance(m, nn.Conv2d)}
    for kind in (set(equilibrium_layers(model)), convolutions):
        chosen = [name for name in maps if name in kind]
        if chosen:
            return chosen[-1]
    raise ValueError(
        f"{type(model).__name__} has neither an equilibrium layer nor a convolution with an output "
        "[B, C, H, W] of more than one pixel: name a layer."
    )


def _layer_name(model: nn.Module, layer: str | nn.Module | None, x: Tensor) -> str:
    if layer is None:
        return gradcam_layer(model, x)
    for name, module in _single_run_modules(model).items():
        if layer is module or layer == name:
            return name
    given = repr(layer) if isinstance(layer, str) else type(layer).__name__
    raise ValueError(
        f"layer={given} is no module of {type(model).__name__} (or lies inside an equilibrium "
        "layer, where it runs many times); there are: "
        f"{', '.join(n for n in _single_run_modules(model) if n)}."
    )


def _check_target(target: Any, logits: Tensor) -> Tensor:
    batch, classes = logits.shape
    if target is None:
        return logits.argmax(1)
    chosen = torch.as_tensor(target, device=logits.device)
    chosen = chosen.expand(batch) if chosen.ndim == 0 else chosen
    if chosen.shape != (batch,) or chosen.is_floating_point():
        raise ValueError(
            f"target={target!r}: expected one class for all, one for each of the {batch} images, "
            "or None for the predicted ones."
        )
    if bool(((chosen < 0) | (chosen >= classes)).any()):
        raise ValueError(f"target={target!r}: the model has the classes 0 to {classes - 1}.")
    return chosen.long()


def gradcam(
    model: nn.Module,
    x: Tensor,
    target: int | Tensor | None = None,
    layer: str | nn.Module | None = None,
    *,
    adjoint: Adjoint | None = None,
    solver: SolverOptions | None = None,
) -> Tensor:
    """Saliency maps [B, H, W], of 0 … 1, for normalized images x [B, C, H, W].

    Args:
        model: gives logits [B, K]; it is left as it is (a copy runs).
        x: where it is judged.
        target: the class (one, or one per image) whose logit is explained; None: the predicted one.
        layer: whose output is weighed, by name or itself; None: see ``gradcam_layer``. The maps of
            a layer with several outputs (tiers) are added.
        adjoint: how gradients pass the equilibria; None: ``Implicit()``, the exact gradient.
        solver: another solver for every layer, such as ``eq.Auto(rtol=1e-5)``; None: its own.
    """
    if x.ndim != 4:
        raise ValueError(
            f"gradcam takes normalized images [B, C, H, W], got shape {tuple(x.shape)}."
        )
    name = _layer_name(model, layer, x)
    copied = replaced(model, solver=solver, adjoint=adjoint or Implicit()).requires_grad_(False)
    with torch.enable_grad():
        logits, outputs = _outputs(copied, x.detach().clone().requires_grad_())
        if logits.ndim != 2:
            raise ValueError(
                f"gradcam explains logits [B, K]; {type(model).__name__} gives shape "
                f"{tuple(logits.shape)}."
            )
        own = logits.gather(1, _check_target(target, logits)[:, None]).sum()
        kept = outputs.get(name, ())
        if not kept or not _are_maps(kept):
            raise ValueError(f"layer '{name}' gives no maps [B, C, H, W]: choose another.")
        slopes = torch.autograd.grad(own, kept, allow_unused=True)
    maps = torch.zeros_like(x[:, 0])
    for a, slope in zip(kept, slopes, strict=True):
        if slope is not None:
            weighed = (slope.mean((2, 3), keepdim=True) * a.detach()).sum(1, keepdim=True).relu()
            maps = maps + nn.functional.interpolate(
                weighed, x.shape[-2:], mode="bilinear", align_corners=False
            ).squeeze(1)
    largest = maps.amax((1, 2), keepdim=True)
    return maps / torch.where(largest > 0, largest, 1.0)
