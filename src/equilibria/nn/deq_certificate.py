"""The certificate of a map about which nothing is known but perhaps a Lipschitz factor ρ."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from equilibria.engine.spectral import spectral_radius
from equilibria.engine.tree import flatten_state, sample_norm
from equilibria.problems.certificate_text import spread
from equilibria.problems.guarantee import Guarantee
from equilibria.problems.map_certificate import MapCertificate

if TYPE_CHECKING:
    from .deq import MonitoredMapLayer

__all__ = ["certify_map"]

_STEPS = 30
_UNIT = 2.0**-53


def certify_map(model: MonitoredMapLayer, x: Any, z: Any, solver: str) -> MapCertificate:
    """Judge z as a fixed point of ``model`` (a copy in eval mode) at x, in float64.

    With ρ = ``contraction_bound()`` < 1: one fixed point, ‖z − z*‖ ≤ ‖z − T(z)‖/(1 − ρ). The Ritz
    values of J at z lie in its numerical range, so |θ| ≤ ‖J‖₂ ≤ ρ must hold for each: a larger one
    refutes ρ.
    """
    notes: list[str] = []
    model, fn, injected, state = _in_double(model, x, z, notes)
    bound = model.contraction_bound()
    leaves, _ = flatten_state(state, "z")
    image = pytree.tree_leaves(fn(state, *injected))
    residual = sample_norm([a.double() - b.double() for a, b in zip(leaves, image, strict=True)])
    size = sum(t[0].numel() for t in leaves)
    eps = max(torch.finfo(t.dtype).eps for t in image) / 2
    scale = sample_norm(leaves).double() + sample_norm(image).double()
    rounding = 2.0 * (size + 64) * eps * scale
    notes.append("rounding is an estimate: none is derived for a general map")

    source = torch.Generator(leaves[0].device).manual_seed(0)
    finite = (residual + rounding).isfinite()
    radius = torch.full_like(residual, math.nan)
    if bool(finite.any()):
        radius = spectral_radius(fn, state, injected, steps=_STEPS, generator=source).double()
    notes.append(
        "the spectral radius is an estimate at this z: below 1 plain iteration is attracted to a "
        "fixed point here; it says nothing about others"
    )
    holds = finite & _believed(bound, radius, notes)
    rho = math.inf if bound is None else bound
    error = torch.where(holds, (residual + rounding) / (1.0 - rho) * (1 + 8 * _UNIT), math.inf)
    kinds = [Guarantee.contraction if ok else Guarantee.none for ok in holds.tolist()]
    return MapCertificate(
        kinds=tuple(kinds),
        residual=residual,
        error_bound=error,
        rounding=rounding,
        contraction=bound,
        modulus=None,
        lipschitz=None,
        lipschitz_note="how a general map depends on x is not known",
        solver=solver,
        rigorous=False,
        numbers={"radius at z": f"{spread(radius)} (estimate, {_STEPS} products)"},
        notes=tuple(notes),
    )


def _believed(bound: float | None, radius: Tensor, notes: list[str]) -> Tensor:
    """Whether the factor means uniqueness, [B]; the notes say why not."""
    no = torch.zeros_like(radius, dtype=torch.bool)
    if bound is None:
        notes.append("no contraction factor is known for this map: nothing is proven")
        return no
    worst = float(torch.where(radius.isnan(), 0.0, radius).max())
    if worst > bound * (1 + 1e-6) + 1e-9:
        notes.append(
            f"REFUTED: the contraction factor {bound:.4g} that was given is wrong, the Jacobian at "
            f"z has norm at least {worst:.4g}"
        )
        return no
    notes.append(
        f"ρ = {bound:.4g} is taken from contraction_bound(): the certificate is as good as it"
    )
    if bound >= 1:
        notes.append("ρ is not below 1: nothing follows from it")
        return no
    return ~no


def _in_double(
    model: MonitoredMapLayer, x: Any, z: Any, notes: list[str]
) -> tuple[MonitoredMapLayer, Any, tuple[Any, ...], Any]:
    """The layer and its map on the same numbers in float64, or where it takes no other, its own."""
    wide, state = (pytree.tree_map(_double, t) for t in (x, z))
    twin = copy.deepcopy(model).double()
    try:
        fn, injected = twin.bound_step(), twin.inject(wide)
        fn(state, *injected)
    except RuntimeError as error:
        if "dtype" not in str(error) and "type" not in str(error):
            raise
        notes.append("the block does not take float64: the residual is that of its own dtype")
        own = pytree.tree_map(lambda t: t.detach(), z)
        return model, model.bound_step(), model.inject(x), own
    return twin, fn, injected, state


def _double(t: Any) -> Any:
    return t.detach().double() if isinstance(t, Tensor) and t.is_floating_point() else t
