"""Certificates of a whole model: every equilibrium layer on the input that it gets in the model."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.certify import (
    CompositeCertificate,
    Guarantee,
    Guaranteed,
    MapCertificate,
    certify,
)
from equilibria.data.image_data import ImageData
from equilibria.engine.result import ConvergenceWarning, Solution
from equilibria.nn.observing import equilibrium_layers, observe

from .layer_solvers import layer_label
from .model_on_data import check_pair, check_whole, device_of, evaluating, model_input

__all__ = ["certificate_dict", "certify_dataset", "certify_model"]

_NOTE = "each layer on its own input; the errors of earlier layers belong to that input"


@torch.no_grad()
def certify_model(model: nn.Module, x: Tensor) -> CompositeCertificate | dict[str, Guaranteed]:
    """What is proven of each equilibrium layer of ``model`` for the batch x [B, ...].

    The model runs once, in eval mode and with its own solvers; hooks catch what each layer gets,
    and the z that it found there is certified (``eq.certify(layer, input, z)``). A layer that is
    used twice has a second part "name#2". A layer without a certificate of its own counts as
    "nothing is proven". Where layers see batches of different sizes (patches folded into the
    batch), the parts do not compose and come as a dict. The model is left as it is.
    """
    layers = equilibrium_layers(model)
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no equilibrium layers (modules with is_equilibrium = "
            "True): there is nothing to certify."
        )
    calls: list[tuple[str, nn.Module, tuple[Any, ...]]] = []

    def caught(name: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            calls.append((name, module, inputs))

        return hook

    hooks = [layer.register_forward_pre_hook(caught(name)) for name, layer in layers.items()]
    try:
        with evaluating(model), observe(model) as seen, warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            model(x)
            solutions = {name: list(found) for name, found in seen.solutions.items()}
            parts: dict[str, Guaranteed] = {}
            counts: dict[str, int] = {}
            for name, layer, inputs in calls:
                counts[name] = counts.get(name, 0) + 1
                solved = solutions.get(name, [])
                found = solved[counts[name] - 1] if counts[name] <= len(solved) else None
                number = "" if counts[name] == 1 else f"#{counts[name]}"
                made = _part(name, layer, inputs, found)
                parts.update(_leaves(layer_label(name) + number, made))
    finally:
        for hook in hooks:
            hook.remove()
    if not parts:
        raise ValueError(
            f"no equilibrium layer of {type(model).__name__} ran in its forward pass "
            f"({', '.join(map(layer_label, layers))}): is it compiled? Give the plain model."
        )
    if len({len(part.kinds) for part in parts.values()}) > 1:
        return parts
    return CompositeCertificate(parts, note=_NOTE if len(parts) > 1 else "")


def _leaves(name: str, part: Guaranteed) -> dict[str, Guaranteed]:
    """The branches of a layer as parts of their own; anything else as it is."""
    if not isinstance(part, CompositeCertificate):
        return {name: part}
    found: dict[str, Guaranteed] = {}
    for inner, piece in part.items():
        found.update(_leaves(f"{name}, {inner}", piece))
    return found


def certify_dataset(
    model: nn.Module, dataset: ImageData, count: int = 64
) -> CompositeCertificate | dict[str, Guaranteed]:
    """``certify_model`` on the first ``count`` images of a data set, normalized."""
    check_whole("count", count, 1)
    check_pair(model, dataset)
    images = dataset.images[slice(0, min(count, len(dataset)))].to(device_of(model))
    return certify_model(model, model_input(model, dataset, images))


def _part(
    name: str, layer: nn.Module, inputs: tuple[Any, ...], found: Solution[Any] | None
) -> Guaranteed:
    if not inputs:
        raise TypeError(
            f"layer '{layer_label(name)}' is called with keyword arguments only; certify_model "
            "needs its input as the first positional argument."
        )
    if not (hasattr(layer, "certify") or hasattr(layer, "problem")):
        return _nothing(layer, found)
    provable: Any = layer
    made: Guaranteed = certify(provable, inputs[0], None if found is None else found.value)
    return made


def _nothing(layer: nn.Module, found: Solution[Any] | None) -> MapCertificate:
    """For a layer that offers no proof: what was seen, and that nothing is known."""
    if found is None:
        raise TypeError(
            f"{type(layer).__name__} has neither certify(x, z) nor problem(x), and no solve of it "
            "was seen: nothing can be said of it."
        )
    residual = found.stats.residual.double().cpu()
    unknown = torch.full_like(residual, float("inf"))
    return MapCertificate(
        kinds=(Guarantee.none,) * len(residual),
        residual=residual,
        error_bound=unknown,
        rounding=unknown,
        contraction=None,
        modulus=None,
        lipschitz=None,
        lipschitz_note="not known",
        solver=found.summary(),
        rigorous=False,
        notes=(f"{type(layer).__name__} has neither certify(x, z) nor problem(x)",),
    )


def _spread(values: Any) -> Any:
    """min, median and max of a tensor; a number as it is."""
    if not isinstance(values, Tensor):
        return values
    flat = values.detach().double().flatten().cpu()
    if flat.numel() == 0:
        return None
    return {"min": float(flat.min()), "median": float(flat.median()), "max": float(flat.max())}


def certificate_dict(certificate: Mapping[str, Guaranteed]) -> dict[str, Any]:
    """The certificate in numbers, by layer; numbers that are not finite become null in JSON."""

    def one(part: Guaranteed) -> dict[str, Any]:
        kinds = [str(kind) for kind in part.kinds]
        return {
            "kind": str(part.kind),
            "kinds": {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
            "samples": len(kinds),
            "unique": float(part.certified.double().mean()) if kinds else None,
            "contraction": _spread(getattr(part, "contraction", None)),
            "modulus": _spread(getattr(part, "modulus", None)),
            "residual": _spread(part.residual),
            "error_bound": _spread(getattr(part, "error_bound", None)),
            "lipschitz": getattr(part, "lipschitz", None),
            "rigorous": bool(getattr(part, "rigorous", False)),
            "notes": list(getattr(part, "notes", ())),
        }

    return {name: one(part) for name, part in certificate.items()}
