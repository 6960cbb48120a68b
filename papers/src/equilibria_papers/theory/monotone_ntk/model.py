"""The thesis' model (paper 004, Definition 3.2.1): a monotone DEQ with a linear readout.

z = σ(Wz + Ux (+ b)),  W = (1 − m)I − AᵀA + B − Bᵀ,  σ = ReLU,  f(x) = uᵀz
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.nn import MonotoneDEQ
from equilibria.problems import NonNegative

__all__ = ["ThesisModel", "check_count", "check_data"]


@dataclass(frozen=True, kw_only=True)
class ThesisModel:
    """θ = (A, B [n, n], U [n, d], u [n], b [n] or None) and m > 0, Eq 3.1–3.3; all in float64.

    Samples are columns, as in the thesis: X [d, N], Z [n, N]. The thesis has no b. With b the model
    is the thesis' own on inputs with a further row of ones: see ``without_bias``.
    """

    A: Tensor
    B: Tensor
    U: Tensor
    u: Tensor
    m: float
    b: Tensor | None = None

    def __post_init__(self) -> None:
        for name in self.names:
            value = getattr(self, name)
            if not isinstance(value, Tensor):
                raise TypeError(f"ThesisModel({name}=…): expected a tensor, got {type(value)}.")
            object.__setattr__(self, name, value.detach().to(torch.float64))
        n = self.A.shape[0] if self.A.ndim else 0
        wanted: dict[str, tuple[int | str, ...]] = {"A": (n, n), "B": (n, n), "U": (n, "d")}
        wanted |= {"u": (n,), "b": (n,)}
        for name in self.names:
            given = tuple(getattr(self, name).shape)
            fits = len(given) == len(wanted[name]) and all(
                w in ("d", g) for g, w in zip(given, wanted[name], strict=True)
            )
            if not fits or 0 in given:
                shape = "[" + ", ".join(str(w) for w in wanted[name]) + "]"
                raise ValueError(
                    f"ThesisModel: A is {list(self.A.shape)}, so {name} must be {shape} with no "
                    f"empty side, got {list(given)}."
                )
        if isinstance(self.m, bool) or not isinstance(self.m, (int, float)):
            raise TypeError(f"ThesisModel(m={self.m!r}): expected a number above 0.")
        if not (math.isfinite(self.m) and self.m > 0):
            raise ValueError(f"ThesisModel(m={self.m!r}): expected a number above 0.")

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters' names, in the order of ``vector``."""
        return ("A", "B", "U", "u") if self.b is None else ("A", "B", "U", "u", "b")

    @property
    def width(self) -> int:
        """n, the neurons."""
        return self.A.shape[0]

    @property
    def inputs(self) -> int:
        """d, the entries of one x."""
        return self.U.shape[1]

    @property
    def W(self) -> Tensor:
        """(1 − m)I − AᵀA + B − Bᵀ, Eq 3.3, [n, n]."""
        eye = torch.eye(self.width, dtype=torch.float64, device=self.A.device)
        return (1.0 - self.m) * eye - self.A.T @ self.A + self.B - self.B.T

    def source(self, X: Tensor) -> Tensor:
        """UX (+ b), [n, N]."""
        found = self.U @ X
        return found if self.b is None else found + self.b[:, None]

    # ------------------------------------------------------------------ θ as one vector

    def vector(self) -> Tensor:
        """θ = (vec A, vec B, vec U, u (, b)), row by row, [p]."""
        return torch.cat([getattr(self, name).reshape(-1) for name in self.names])

    def at(self, vector: Tensor) -> ThesisModel:
        """The model with the parameters of ``vector``."""
        sizes = [getattr(self, name).numel() for name in self.names]
        parts = vector.split(sizes)
        shaped = {
            name: part.reshape(getattr(self, name).shape)
            for name, part in zip(self.names, parts, strict=True)
        }
        return dataclasses.replace(self, **shaped)

    def without_bias(self, X: Tensor) -> tuple[ThesisModel, Tensor]:
        """The same model as the thesis has it: [U b] on [X; 1], whose JJᵀ is J_UJ_Uᵀ + J_bJ_bᵀ."""
        X = check_data(self, X)
        if self.b is None:
            return self, X
        wide = torch.cat([self.U, self.b[:, None]], dim=1)
        ones = torch.ones(1, X.shape[1], dtype=torch.float64, device=X.device)
        return dataclasses.replace(self, U=wide, b=None), torch.cat([X, ones])

    # ------------------------------------------------------------------ from and to elsewhere

    @classmethod
    def usual(
        cls,
        width: int,
        inputs: int,
        *,
        m: float = 0.5,
        scale: float = 1.0,
        bias: bool = False,
        generator: torch.Generator | None = None,
    ) -> ThesisModel:
        """A usual initialization: entries N(0, scale²/fan-in), b zero."""
        check_count("ThesisModel.usual", width=width, inputs=inputs)

        def draw(*shape: int) -> Tensor:
            found = torch.randn(*shape, dtype=torch.float64, generator=generator)
            return scale * found / math.sqrt(shape[-1])

        return cls(
            A=draw(width, width),
            B=draw(width, width),
            U=draw(width, inputs),
            u=draw(width),
            m=m,
            b=torch.zeros(width, dtype=torch.float64) if bias else None,
        )

    @classmethod
    def from_layer(cls, layer: nn.Module, readout: Tensor) -> ThesisModel:
        """A dense ``MonotoneDEQ`` with the ReLU prior, and the readout u [n]."""
        if not isinstance(layer, MonotoneDEQ) or layer.convolutional:
            raise TypeError(
                "ThesisModel.from_layer: the thesis' model is a dense MonotoneDEQ (no "
                f"kernel_size), got {layer!r}."
            )
        if not isinstance(layer.prior, NonNegative):
            raise ValueError(
                f"ThesisModel.from_layer: σ is the ReLU, got the prior {layer.prior!r}; build the "
                "layer with prior=NonNegative()."
            )
        weights: Any = layer.W
        source: Any = layer.U
        return cls(
            A=weights.A.clone(),
            B=weights.B.clone(),
            U=source.weight.clone(),
            u=readout,
            m=float(layer.m),
            b=None if source.bias is None else source.bias.clone(),
        )

    @torch.no_grad()
    def to_layer(self) -> MonotoneDEQ:
        """The layer x ↦ z without the readout, in float64; x [N, d] by rows."""
        layer = MonotoneDEQ(
            self.width, in_channels=self.inputs, m=float(self.m), bias=self.b is not None
        ).to(self.A)
        weights: Any = layer.W
        source: Any = layer.U
        weights.A.copy_(self.A)
        weights.B.copy_(self.B)
        source.weight.copy_(self.U)
        if self.b is not None:
            source.bias.copy_(self.b)
        return layer


def check_count(owner: str, **counts: object) -> None:
    """Raise unless every count is an integer of at least 1."""
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{owner}({name}={value!r}): expected an integer of at least 1.")


def check_data(model: ThesisModel, X: Tensor, y: Tensor | None = None) -> Tensor:
    """X [d, N] in float64 on the model's device; raise where X or y [N] do not fit."""
    if X.ndim != 2 or X.shape[0] != model.inputs or X.shape[1] < 1:
        raise ValueError(
            f"X holds samples as columns: expected [{model.inputs}, N], got {list(X.shape)}"
            f"{' (transpose it?)' if X.ndim == 2 and X.shape[1] == model.inputs else ''}."
        )
    if y is not None and tuple(y.shape) != (X.shape[1],):
        raise ValueError(f"y must be [{X.shape[1]}], one a column of X, got {list(y.shape)}.")
    for name, value in (("X", X), ("y", y)):
        if value is not None and not bool(value.isfinite().all()):
            raise ValueError(f"{name} has entries that are not finite.")
    return X.detach().to(model.A)
