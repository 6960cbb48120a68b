"""Certificates of a whole model: every equilibrium layer on the input that it gets in the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.certify import CompositeCertificate, Guarantee, Guaranteed, MapCertificate, certify
from equilibria.data.image_data import ImageData
from equilibria.engine.result import Solution
from equilibria.nn.observing import equilibrium_layers, observe

from .layer_solvers import layer_label
from .model_on_data import check_pair, check_whole, device_of, evaluating, model_input
from .rich_output import progress_bar

_NOTE = "each layer on its own input; the errors of earlier layers belong to that input"


@torch.no_grad()
def certify_model(
    model: nn.Module, x: Tensor, *, progress: bool = False
) -> CompositeCertificate | dict[str, Guaranteed]:
    """What is proven of each equilibrium layer of ``model`` for the batch x [B, ...].

    The model runs once, in eval mode and with its own solvers; hooks catch what each layer gets,
    and the z that it found there is certified (``eq.certify(layer, input, z)``). A layer that is
    used twice has a second part "name#2". A layer without a certificate of its own counts as
    "nothing is proven". Where layers see batches of different sizes (patches folded into the
    batch), the parts do not compose and come as a dict. The model is left as it is.

    ``progress`` shows a bar over the layers, with the time left, where stderr is a terminal.
    """
    layers = equilibrium_layers(model)
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no equilibrium layers (modules with is_equilibrium = "
            "True): there is nothing to certify."
        )
    calls: list[tuple[str, tuple[Any, ...], Solution[Any] | None]] = []

    def catch(name: str, layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        calls.append((name, inputs, seen.solutions.get(name, [None])[-1]))

    with evaluating(model), observe(model) as seen, ExitStack() as hooks:
        for name, layer in layers.items():
            hooks.enter_context(layer.register_forward_hook(partial(catch, name)))
        model(x)
    parts: dict[str, Guaranteed] = {}
    counts: Counter[str] = Counter()
    with (
        evaluating(model),
        progress_bar(len(calls), "certifying layers", progress) as advance,
    ):
        for name, inputs, found in calls:
            counts[name] += 1
            number = "" if counts[name] == 1 else f"#{counts[name]}"
            made = _part(name, layers[name], inputs, found)
            parts.update(_leaves(layer_label(name) + number, made))
            advance()
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
    found = (_leaves(f"{name}, {inner}", piece) for inner, piece in part.items())
    return {key: leaf for leaves in found for key, leaf in leaves.items()}


def certify_dataset(
    model: nn.Module, dataset: ImageData, count: int = 64, *, progress: bool = False
) -> CompositeCertificate | dict[str, Guaranteed]:
    """``certify_model`` on the first ``count`` images of a data set, normalized."""
    check_whole("count", count, 1)
    check_pair(model, dataset)
    images = dataset.images[slice(0, min(count, len(dataset)))].to(device_of(model))
    return certify_model(model, model_input(model, dataset, images), progress=progress)


def _part(
    name: str, layer: Any, inputs: tuple[Any, ...], found: Solution[Any] | None
) -> Guaranteed:
    """Its certificate; for a layer that offers no proof, what was seen, and that nothing is."""
    if not inputs:
        raise TypeError(
            f"layer '{layer_label(name)}' is called with keyword arguments only; certify_model "
            "needs its input as the first positional argument."
        )
    if hasattr(layer, "certify") or hasattr(layer, "problem"):
        made: Guaranteed = certify(layer, inputs[0], None if found is None else found.value)
        return made
    missing = f"{type(layer).__name__} has neither certify(x, z) nor problem(x)"
    if found is None:
        raise TypeError(f"{missing}, and no solve of it was seen: nothing can be said of it.")
    residual = found.stats.residual.double().cpu()
    unknown = torch.full_like(residual, float("inf"))
    return MapCertificate(
        kinds=(Guarantee.none,) * len(residual),
        residual=residual,
        error_bound=unknown,
        rounding=unknown,
        contraction=None,
        lipschitz=None,
        lipschitz_note="not known",
        solver=found.summary(),
        rigorous=False,
        notes=(missing,),
    )


def _spread(values: Any) -> Any:
    """min, median and max of a tensor; a number as it is."""
    if not isinstance(values, Tensor):
        return values
    flat = values.detach().double().flatten().cpu()
    return {"min": float(flat.min()), "median": float(flat.median()), "max": float(flat.max())}


def certificate_dict(certificate: Mapping[str, Guaranteed]) -> dict[str, Any]:
    """The certificate in numbers, by layer; numbers that are not finite become null in JSON."""
    found = {}
    for name, part in certificate.items():
        kinds = [str(kind) for kind in part.kinds]
        spreads = ("contraction", "modulus", "residual", "error_bound")
        found[name] = {
            "kind": str(part.kind),
            "kinds": dict(Counter(kinds)),
            "samples": len(kinds),
            "unique": float(part.certified.double().mean()),
            **{key: _spread(getattr(part, key, None)) for key in spreads},
            "lipschitz": getattr(part, "lipschitz", None),
            "rigorous": bool(getattr(part, "rigorous", False)),
            "notes": list(getattr(part, "notes", ())),
        }
    return found
