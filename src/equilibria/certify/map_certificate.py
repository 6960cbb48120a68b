"""Certificates of maps, and of layers made of several parts, without a hidden problem.

A map with the Lipschitz factor ρ < 1 has one fixed point, and ‖z − z*‖ ≤ ‖z − T(z)‖/(1 − ρ). A
monotone layer (I − W ⪰ mI) has one whatever its norm. Parts compose: all must hold. Of a general
map (``certify_map``) nothing is known but perhaps a factor ρ.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from equilibria.engine.spectral import spectral_radius
from equilibria.engine.tree import flatten_state, sample_norm
from equilibria.problems.norms import UNIT
from equilibria.problems.parts import in_double

from .guarantee import Guarantee, Guaranteed, Proven, Rows, spread, where_known


@dataclass(frozen=True, eq=False, kw_only=True)
class MapCertificate(Proven):
    """What is proven for a batch of fixed points z* = T(z*); [B] tensors are float64."""

    contraction: float | Tensor | None
    """ρ, a Lipschitz constant of T for all z; None where none is known."""
    input_rounding: Tensor | None = None
    """z* moves by at most this if what the layer makes of x, in float64, is exact, [B]."""
    modulus: float | Tensor | None = None
    """m with I − W ⪰ mI, rounded down (monotone layers); None elsewhere."""
    numbers: Mapping[str, str] = field(default_factory=dict)
    """What the bounds were made of, name by name, in words."""

    def first_rows(self) -> Rows:
        factor = "not known" if self.contraction is None else spread(self.contraction)
        modulus = [] if self.modulus is None else [("modulus m", spread(self.modulus))]
        return [("contraction ρ", factor), *modulus]

    def last_rows(self, of: str = "x") -> Rows:
        return [*super().last_rows(of), *self.numbers.items()]


@dataclass(frozen=True, eq=False)
class CompositeCertificate(Guaranteed, Mapping[str, Guaranteed]):
    """The certificates of several parts (branches, layers of a model), by name, and their sum.

    A sample is as well off as its worst part; the error of the whole state (all parts beside each
    other) is the root of the sum of squares.
    """

    parts: Mapping[str, Guaranteed]
    note: str = ""

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("CompositeCertificate needs at least one part.")
        sizes = {name: len(part.kinds) for name, part in self.parts.items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"the parts certify batches of different sizes: {sizes}.")

    def __getitem__(self, name: str) -> Guaranteed:
        return self.parts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)

    @property
    def kinds(self) -> tuple[Guarantee, ...]:  # type: ignore[override]
        """The weakest guarantee of each sample over the parts."""
        order = list(Guarantee)
        columns = zip(*(part.kinds for part in self.parts.values()), strict=True)
        return tuple(max(column, key=order.index) for column in columns)

    @property
    def residual(self) -> Tensor:  # type: ignore[override]
        return _together([part.residual for part in self.parts.values()])

    @property
    def error_bound(self) -> Tensor:  # type: ignore[override]
        """A bound on the distance of all states together, [B]; inf where a part has none."""
        return _together([part.error_bound for part in self.parts.values()])

    @property
    def rigorous(self) -> bool:  # type: ignore[override]
        return all(part.rigorous for part in self.parts.values())

    def __str__(self) -> str:
        rows = [("residual", spread(self.residual)), ("‖z − z*‖ ≤", spread(self.error_bound))]
        rows += [("note", self.note)] if self.note else []
        text = [self.written(rows)]
        for name, part in self.parts.items():
            body = str(part).splitlines()
            text.append(f"  {name}: {body[0]}")
            text += [f"    {line}" for line in body[1:]]
        return "\n".join(text)


def _together(parts: list[Tensor]) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(torch.stack([p.double().cpu() for p in parts]), dim=0)
    return norm


_STEPS = 30


class GeneralMap(Protocol):
    """What is asked of the layer: an ``nn.Module`` that is a map and nothing more."""

    def contraction_bound(self) -> float | None: ...
    def bound_step(self) -> Callable[..., Any]: ...
    def inject(self, x: Any) -> tuple[Any, ...]: ...
    def double(self) -> Self: ...


def certify_map(model: GeneralMap, x: Any, z: Any, solver: str) -> MapCertificate:
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
    error = torch.where(holds, (residual + rounding) / (1.0 - rho) * (1 + 8 * UNIT), math.inf)
    return MapCertificate(
        kinds=where_known(holds, Guarantee.contraction),
        residual=residual,
        error_bound=error,
        rounding=rounding,
        contraction=bound,
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
    model: GeneralMap, x: Any, z: Any, notes: list[str]
) -> tuple[GeneralMap, Any, tuple[Any, ...], Any]:
    """The layer and its map on the same numbers in float64, or where it takes no other, its own."""
    wide, state = (pytree.tree_map(in_double, t) for t in (x, z))
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
