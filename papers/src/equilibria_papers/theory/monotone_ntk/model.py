"""The model of the NTK thesis (Definition 3.2.1), its equilibrium, tangent kernel and gradient.

z = σ(Wz + Ux),  W = (1 − m)I − AᵀA + B − Bᵀ,  σ = ReLU,  f(x) = uᵀz

With vᵢᵀ = uᵀQᵢ⁻¹Dᵢ the Jacobian of f(xᵢ) = uᵀzᵢ is (Lemmas 3.2.2 and 3.2.3, matrix by matrix)

    ∂/∂W = vᵢzᵢᵀ,  ∂/∂A = −A(vᵢzᵢᵀ + zᵢvᵢᵀ),  ∂/∂B = vᵢzᵢᵀ − zᵢvᵢᵀ,
    ∂/∂U = vᵢxᵢᵀ,  ∂/∂u = zᵢ

so that each JJᵀ is a sum of entrywise products of N × N Gram matrices: O(N n³ + N² n) operations,
and no J_A of N × n² entries.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from equilibria.engine import ConvergenceWarning, check_number, solve_each
from equilibria.nn import MonotoneDEQ
from equilibria.problems import NonNegative
from equilibria.solvers import PeacemanRachford
from equilibria_papers.theory.checks import check_sizes

_NEWTON = 40
_ENTRIES = 1 << 23  # of the stacked n × n systems held at once: 64 MiB
_UNIT = 2.0**-53


@dataclass(frozen=True, kw_only=True)
class ThesisModel:
    """θ = (A, B [n, n], U [n, d], u [n]) and m > 0, Eq 3.1–3.3; all in float64.

    Samples are columns, as in the thesis: X [d, N], Z [n, N]. A bias is a further column of U, on
    inputs with a further row of ones.
    """

    A: Tensor
    B: Tensor
    U: Tensor
    u: Tensor
    m: float

    def __post_init__(self) -> None:
        for name in self.names:
            value = getattr(self, name)
            if not isinstance(value, Tensor):
                raise TypeError(f"ThesisModel({name}=…): expected a tensor, got {type(value)}.")
            object.__setattr__(self, name, value.detach().to(torch.float64))
        n = self.A.shape[0] if self.A.ndim else 0
        d = self.U.shape[-1] if self.U.ndim else 0
        wanted = {"A": [n, n], "B": [n, n], "U": [n, d], "u": [n]}
        for name, shape in wanted.items():
            given = list(getattr(self, name).shape)
            if given != shape or 0 in given:
                raise ValueError(
                    f"ThesisModel: A is {list(self.A.shape)}, so {name} must be {shape} with no "
                    f"empty side, got {given}."
                )
        check_number(self, "m", low=0.0, low_open=True)

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters' names, in the order of ``vector``."""
        return ("A", "B", "U", "u")

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
        """UX, [n, N]."""
        return self.U @ X

    def vector(self) -> Tensor:
        """θ = (vec A, vec B, vec U, u), row by row, [p]."""
        return torch.cat([getattr(self, name).reshape(-1) for name in self.names])

    def at(self, vector: Tensor) -> ThesisModel:
        """The model with the parameters of ``vector``."""
        parts = vector.split([getattr(self, name).numel() for name in self.names])
        shaped = {
            name: part.reshape(getattr(self, name).shape)
            for name, part in zip(self.names, parts, strict=True)
        }
        return dataclasses.replace(self, **shaped)

    @classmethod
    def usual(
        cls,
        width: int,
        inputs: int,
        *,
        m: float = 0.5,
        scale: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> ThesisModel:
        """A usual initialization: entries N(0, scale²/fan-in)."""
        check_sizes("ThesisModel.usual", {"width": width, "inputs": inputs})

        def draw(*shape: int) -> Tensor:
            found = torch.randn(*shape, dtype=torch.float64, generator=generator)
            return scale * found / math.sqrt(shape[-1])

        parts = {"A": draw(width, width), "B": draw(width, width), "U": draw(width, inputs)}
        return cls(**parts, u=draw(width), m=m)

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
        if source.bias is not None:
            raise ValueError(
                "ThesisModel.from_layer: the thesis has no bias; build with bias=False."
            )
        A, B, U = (t.clone() for t in (weights.A, weights.B, source.weight))
        return cls(A=A, B=B, U=U, u=readout, m=float(layer.m))

    @torch.no_grad()
    def to_layer(self) -> MonotoneDEQ:
        """The layer x ↦ z without the readout, in float64; x [N, d] by rows."""
        layer = MonotoneDEQ(self.width, in_channels=self.inputs, m=float(self.m), bias=False)
        layer = layer.to(self.A)
        weights: Any = layer.W
        source: Any = layer.U
        weights.A.copy_(self.A)
        weights.B.copy_(self.B)
        source.weight.copy_(self.U)
        return layer


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


class Equilibrium(NamedTuple):
    """Z [n, N]; D [n, N], 1 where the unit is active, else 0; ‖Z − σ(WZ + UX)‖_F.

    σ′(0) = 0 as everywhere in torch: an argument that is zero up to rounding counts as zero.
    """

    Z: Tensor
    D: Tensor
    residual: float


def find_equilibrium(
    model: ThesisModel, X: Tensor, start: Equilibrium | None = None
) -> Equilibrium:
    """Z* with Z* = σ(WZ* + UX), X [d, N]; ``start`` gives the first pattern of signs.

    Newton: where the pattern D = 1[Wz + c > 0] is known, z = (I − DW)⁻¹Dc. All systems are n × n,
    one per sample: Q = I − D(I_N ⊗ W) (Lemma 3.2.1) is block diagonal and is never formed. Samples
    for which the patterns go round are taken by Peaceman–Rachford splitting, which converges for
    every W of the model, and polished again.
    """
    c = model.source(check_data(model, X))
    W = model.W
    active = c > 0 if start is None else start.D > 0
    Z, settled = _newton(W, c, active)
    if not bool(settled.all()):
        stuck = ~settled
        z = _splitting(model, X[:, stuck].to(c))
        again, fine = _newton(W, c[:, stuck], W @ z + c[:, stuck] > 0)
        Z[:, stuck] = torch.where(fine, again, z)
    argument = W @ Z + c
    noise = 8 * _UNIT * (W.abs() @ Z.abs() + c.abs())
    D = (argument > noise).to(c.dtype)
    residual = float((Z - argument.relu()).norm())
    return Equilibrium(Z, D, residual)


def _newton(W: Tensor, c: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
    """Z [n, N] and whether each column solves its equation, [N]."""
    Z = torch.zeros_like(c)
    settled = torch.zeros(c.shape[1], dtype=torch.bool, device=c.device)
    for _ in range(_NEWTON):
        todo = (~settled).nonzero()[:, 0]
        if not len(todo):
            break
        part, on = c[:, todo], active[:, todo].to(c.dtype)
        z = _solve(W, on, on * part, transposed=False)
        argument = W @ z + part
        gap = (z - argument.relu()).abs()
        allowed = 64 * _UNIT * (W.abs() @ z.abs() + part.abs()).amax(0).clamp_min(1e-300)
        Z[:, todo] = z
        settled[todo] = gap.amax(0) <= allowed
        active[:, todo] = argument > 0
    return Z, settled


def _splitting(model: ThesisModel, X: Tensor) -> Tensor:
    solver = PeacemanRachford(rtol=1e-14, atol=0.0, max_steps=20000, patience=20000)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        found: Tensor = model.to_layer().solve(X.T.contiguous(), solver=solver).value
    return found.T


def sensitivities(model: ThesisModel, found: Equilibrium) -> Tensor:
    """V [n, N] with vᵢᵀ = uᵀQᵢ⁻¹Dᵢ = ∂f(xᵢ)/∂(Uxᵢ): vᵢ = Dᵢ(I − WᵀDᵢ)⁻¹u."""
    u = model.u[:, None].expand_as(found.D)
    return found.D * _solve(model.W, found.D, u, transposed=True)


def _solve(W: Tensor, D: Tensor, right: Tensor, *, transposed: bool) -> Tensor:
    """(I − DᵢW)⁻¹rᵢ, or (I − WᵀDᵢ)⁻¹rᵢ, for every column i, [n, N]."""
    n, count = D.shape
    eye = torch.eye(n, dtype=W.dtype, device=W.device)
    chunk = max(1, _ENTRIES // (n * n))
    parts = []
    for first in range(0, count, chunk):
        on = D[:, first : first + chunk].T
        systems = eye - (W.T * on[:, None, :] if transposed else on[:, :, None] * W)
        columns = right[:, first : first + chunk].T
        parts.append(solve_each(systems, columns))
    return torch.cat(parts).T.contiguous()


@dataclass(frozen=True)
class ClosedFormKernel:
    """K = J_AJ_Aᵀ + J_BJ_Bᵀ + J_UJ_Uᵀ + ZᵀZ, each [N, N], Eq 3.7."""

    A: Tensor
    B: Tensor
    U: Tensor
    u: Tensor

    @property
    def total(self) -> Tensor:
        """K, [N, N]."""
        return self.A + self.B + self.U + self.u

    def smallest(self) -> float:
        """λ_min(K); K is positive semidefinite, so what rounding puts below zero is zero."""
        return max(0.0, float(torch.linalg.eigvalsh(self.total)[0]))


def closed_form_kernel(
    model: ThesisModel, X: Tensor, found: Equilibrium | None = None
) -> ClosedFormKernel:
    """K at X [d, N]; ``found`` is the equilibrium at X where it is known."""
    X = check_data(model, X)
    found = find_equilibrium(model, X) if found is None else found
    Z, V = found.Z, sensitivities(model, found)
    AZ, AV = model.A @ Z, model.A @ V
    ZZ, VV, VZ = Z.T @ Z, V.T @ V, V.T @ Z
    cross = (AV.T @ AZ) * VZ.T
    return ClosedFormKernel(
        A=(AV.T @ AV) * ZZ + (AZ.T @ AZ) * VV + cross + cross.T,
        B=2.0 * (VV * ZZ - VZ * VZ.T),
        U=VV * (X.T @ X),
        u=ZZ,
    )


def square_loss(model: ThesisModel, found: Equilibrium, y: Tensor) -> tuple[float, Tensor]:
    """L = ½‖ŷ − y‖² (Eq 3.4) and ŷ − y, [N]."""
    rest = found.Z.T @ model.u - y.to(model.u)
    return 0.5 * float(rest @ rest), rest


def closed_form_gradient(model: ThesisModel, X: Tensor, found: Equilibrium, rest: Tensor) -> Tensor:
    """∇L (Lemma 3.2.3) for ŷ − y = ``rest`` [N], in the order of ``ThesisModel.vector``, [p]."""
    V = sensitivities(model, found) * rest
    G = V @ found.Z.T  # ∂L/∂W
    parts = [-model.A @ (G + G.T), G - G.T, V @ X.T, found.Z @ rest]
    return torch.cat([part.reshape(-1) for part in parts])
