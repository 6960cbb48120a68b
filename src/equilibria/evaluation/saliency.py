"""GradCAM (Selvaraju et al. 2017), by captum: where in the image a decision comes from.

    map = ReLU(Σ_c a_c A_c),   a_c = mean over pixels of ∂logit/∂A_c

A the output of a layer. Between that layer and the logits the gradient passes the equilibrium
layers by the implicit function theorem: ∂z*/∂x = (I − ∂T/∂z)⁻¹ ∂T/∂x, whatever the network was
trained with.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from equilibria.adjoints import Implicit
from equilibria.engine.adjoint import Adjoint
from equilibria.engine.optional import needs
from equilibria.engine.solver import Solver
from equilibria.nn.observing import equilibrium_layers

from .layer_solvers import replaced
from .model_on_data import evaluating

__all__ = ["gradcam", "gradcam_layer"]


def _single_run_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules outside equilibrium layers, and those layers: what a forward pass runs once."""
    layers = equilibrium_layers(model)
    inside = {
        id(child) for layer in layers.values() for child in layer.modules() if child is not layer
    }
    return {name: m for name, m in model.named_modules() if id(m) not in inside}


@torch.no_grad()
def gradcam_layer(model: nn.Module, x: Tensor) -> str:
    """The layer that ``gradcam`` takes: the last equilibrium layer to run whose output is a map.

    In a network without one: the last convolution.
    """
    layers = set(equilibrium_layers(model))
    found: dict[str, str] = {}

    def watch(name: str, kind: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            parts = output if isinstance(output, tuple) else (output,)
            if all(isinstance(p, Tensor) and p.ndim == 4 for p in parts) and any(
                p.shape[-1] > 1 for p in parts
            ):
                found[kind] = name

        return hook

    hooks = []
    for name, module in _single_run_modules(model).items():
        if name in layers:
            hooks.append(module.register_forward_hook(watch(name, "equilibrium")))
        elif isinstance(module, nn.Conv2d):
            hooks.append(module.register_forward_hook(watch(name, "convolution")))
    try:
        with evaluating(model):
            model(x[:1])
    finally:
        for hook in hooks:
            hook.remove()
    for kind in ("equilibrium", "convolution"):
        if kind in found:
            return found[kind]
    raise ValueError(
        f"{type(model).__name__} has neither an equilibrium layer nor a convolution with an output "
        "[B, C, H, W] of more than one pixel: name a layer."
    )


def _layer_name(model: nn.Module, layer: str | nn.Module | None, x: Tensor) -> str:
    if layer is None:
        return gradcam_layer(model, x)
    named = _single_run_modules(model)
    if isinstance(layer, str):
        if layer not in named:
            raise ValueError(
                f"{type(model).__name__} has no layer {layer!r} outside its equilibrium layers; "
                f"there are: {', '.join(n for n in named if n)}."
            )
        return layer
    for name, module in named.items():
        if module is layer:
            return name
    raise ValueError(
        f"layer={type(layer).__name__} is no module of this model (or lies inside an equilibrium "
        "layer, where it runs many times): give one of its own, or a name."
    )


def _using_all(model: nn.Module, layer: nn.Module) -> Any:
    """The model's forward, in which every output of ``layer`` has a part, if with weight zero.

    Of several outputs (tiers) a head may read one; captum asks for the gradient of all.
    """
    outputs: list[Tensor] = []

    def keep(module: nn.Module, inputs: Any, output: Any) -> None:
        outputs[:] = output if isinstance(output, tuple) else ()

    def forward(x: Tensor) -> Tensor:
        hook = layer.register_forward_hook(keep, prepend=True)
        try:
            logits: Tensor = model(x)
        finally:
            hook.remove()
        for part in outputs:
            logits = logits + 0.0 * part.flatten(1).sum(1, keepdim=True)
        return logits

    return forward


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
    normalize: bool = True,
    adjoint: Adjoint | None = None,
    solver: Solver | None = None,
) -> Tensor:
    """Saliency maps [B, H, W], of 0 … 1, for normalized images x [B, C, H, W].

    Args:
        model: gives logits [B, K]; it is left as it is (a copy runs).
        x: where it is judged.
        target: the class (one, or one an image) whose logit is explained; None: the predicted one.
        layer: whose output is weighed, by name or itself; None: see ``gradcam_layer``. The maps of
            a layer with several outputs (tiers) are added.
        normalize: whether each map is divided by its largest value; a map of zeros stays.
        adjoint: how gradients pass the equilibria; None: ``Implicit()``, the exact gradient.
        solver: another solver for every layer, such as ``eq.Auto(rtol=1e-5)``; None: its own.
    """
    with needs("captum", "GradCAM", extra="analysis"):
        from captum.attr import LayerGradCam  # type: ignore[import-untyped]
    if x.ndim != 4:
        raise ValueError(
            f"gradcam takes normalized images [B, C, H, W], got shape {tuple(x.shape)}."
        )
    name = _layer_name(model, layer, x)
    chosen = Implicit() if adjoint is None else adjoint
    copied = replaced(model, solver=solver, adjoint=chosen).requires_grad_(False)
    with evaluating(copied), torch.enable_grad():
        logits = copied(x.detach()).detach()
        if logits.ndim != 2:
            raise ValueError(
                f"gradcam explains logits [B, K]; {type(model).__name__} gives shape "
                f"{tuple(logits.shape)}."
            )
        classes = _check_target(target, logits)
        chosen_layer = copied.get_submodule(name)
        found = LayerGradCam(_using_all(copied, chosen_layer), chosen_layer).attribute(
            x.detach().clone().requires_grad_(), target=classes, relu_attributions=True
        )
    maps = torch.zeros_like(x[:, 0])
    for part in found if isinstance(found, tuple) else (found,):
        if part.ndim != 4:
            raise ValueError(f"layer '{name}' gives no maps [B, C, H, W]: choose another.")
        maps = maps + torch.nn.functional.interpolate(
            part.detach(), x.shape[-2:], mode="bilinear", align_corners=False
        ).squeeze(1)
    if not normalize:
        return maps
    largest = maps.amax((1, 2), keepdim=True)
    return maps / torch.where(largest > 0, largest, 1.0)
