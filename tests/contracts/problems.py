"""Fixed points whose answer is known without us: dense float64 solves, or scipy.

Every map takes what belongs to a sample in ``args`` (batch in dim 0), so that a problem can be
cut, permuted and compacted. ``gain`` bounds ‖z − z*‖ by ‖T(z) − z‖ for each sample: ‖(I − A)⁻¹‖₂
for affine maps, 1/(1 − ‖W‖₂) for contractions. It turns a residual tolerance into an error bound,
so that no test needs a tolerance that was found by trying.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import scipy.optimize
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from equilibria.adjoints import graph, unrolled
from equilibria.engine import judge
from equilibria.engine.result import ConvergenceWarning
from equilibria.nn import inputs
from equilibria.solvers import broyden


@dataclass(frozen=True)
class Problem:
    """z = fn(z, *args) from z0, its answer (float64), and gain [B]: ‖z − z*‖ ≤ gain·‖T(z) − z‖."""

    fn: Callable[..., Any]
    z0: Any
    args: tuple[Any, ...]
    answer: Any
    gain: Tensor

    @property
    def batch(self) -> int:
        return len(self.gain)

    def take(self, index: Sequence[int]) -> Problem:
        """The problem of some samples, in this order."""
        rows = torch.as_tensor(index, dtype=torch.long)
        z0, args, answer, gain = pytree.tree_map(
            lambda t: t[rows], (self.z0, self.args, self.answer, self.gain)
        )
        return replace(self, z0=z0, args=args, answer=answer, gain=gain)

    def to(self, dtype: torch.dtype) -> Problem:
        z0, args = pytree.tree_map(lambda t: t.to(dtype), (self.z0, self.args))
        return replace(self, z0=z0, args=args)

    def residual(self, value: Any) -> tuple[Tensor, Tensor]:
        """‖T(z) − z‖ and ‖T(z)‖ of each sample, evaluated afresh, summed up in float64."""
        out = self.fn(value, *self.args)
        f, z = (pytree.tree_leaves(t) for t in (out, value))
        return norm([a.double() - b.double() for a, b in zip(f, z, strict=True)]), norm(f)

    def error(self, value: Any) -> Tensor:
        """‖z − z*‖ of each sample."""
        leaves, answers = pytree.tree_leaves(value), pytree.tree_leaves(self.answer)
        return norm([a.double() - b for a, b in zip(leaves, answers, strict=True)])


def norm(tree: Any) -> Tensor:
    """‖·‖₂ of each sample over all leaves, [B], in float64."""
    squares = [t.detach().double().flatten(1) if t.dim() > 1 else t.detach().double()[:, None]
               for t in pytree.tree_leaves(tree)]  # fmt: skip
    return torch.cat(squares, 1).square().sum(1).sqrt()


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def orthogonal(batch: int, size: int, seed: int) -> Tensor:
    return torch.linalg.qr(randn(batch, size, size, seed=seed)).Q


def apply_affine(z: Tensor, matrix: Tensor, offset: Tensor) -> Tensor:
    """A z + b, a matrix a sample; written as a sum, so that samples share no kernel's blocking."""
    return (matrix * z.unsqueeze(1)).sum(-1) + offset


def apply_tanh(z: Tensor, matrix: Tensor, offset: Tensor) -> Tensor:
    return torch.tanh(apply_affine(z, matrix, offset))


def affine(matrix: Tensor, seed: int = 1) -> Problem:
    """z = A z + b with the dense answer (I − A)⁻¹b; matrix [B, n, n]."""
    batch, size, _ = matrix.shape
    offset = randn(batch, size, seed=seed)
    system = torch.eye(size, dtype=torch.float64) - matrix
    answer = torch.from_numpy(np.linalg.solve(system.numpy(), offset.numpy()[..., None])[..., 0])
    gain = torch.from_numpy(1.0 / np.linalg.svd(system.numpy(), compute_uv=False)[:, -1])
    return Problem(apply_affine, torch.zeros_like(offset), (matrix, offset), answer, gain)


def linear(
    batch: int = 4, size: int = 8, radius: float | Sequence[float] = 0.7, seed: int = 0
) -> Problem:
    """Nonsymmetric A with ‖A‖₂ = radius (one for all, or one a sample)."""
    matrix = randn(batch, size, size, seed=seed)
    wanted = torch.as_tensor(radius, dtype=torch.float64).expand(batch)
    scale = wanted / torch.linalg.matrix_norm(matrix, 2)
    return affine(matrix * scale[:, None, None], seed + 1)


def mixed(batch: int = 6, size: int = 8, seed: int = 0) -> Problem:
    """From trivial to hard: each sample has its own matrix, of norm 0 to 0.97."""
    radius = torch.linspace(0.0, 0.97, batch, dtype=torch.float64)
    return linear(batch, size, radius.tolist(), seed)


def symmetric(eigenvalues: Tensor, seed: int = 0) -> Problem:
    """A = QΛQᵀ, eigenvalues [B, n]."""
    q = orthogonal(*eigenvalues.shape, seed)
    return affine(q * eigenvalues.double().unsqueeze(1) @ q.mT, seed + 1)


def stiff(batch: int = 3, size: int = 8, seed: int = 0) -> Problem:
    """Eigenvalues of A from 0 to 0.99: I − A has condition number 100."""
    return symmetric((1 - torch.logspace(0, -2, size).double()).expand(batch, size), seed)


def nearly_singular(batch: int = 3, size: int = 8, gap: float = 1e-5, seed: int = 0) -> Problem:
    """One eigenvalue of A is 1 − gap, the others are at most 0.5."""
    eigenvalues = torch.linspace(0.0, 0.5, size, dtype=torch.float64)
    eigenvalues[-1] = 1 - gap
    return symmetric(eigenvalues.expand(batch, size), seed)


def rotation(radius: float = 0.9, angles: Sequence[float] = (0.3, 1.6, 2.8)) -> Problem:
    """Complex spectrum: plane rotations by each angle and its double, shrunk by radius."""
    blocks = []
    for angle in angles:
        pair = [torch.tensor([[np.cos(a), -np.sin(a)], [np.sin(a), np.cos(a)]], dtype=torch.float64)
                for a in (angle, 2 * angle)]  # fmt: skip
        blocks.append(radius * torch.block_diag(*pair))
    return affine(torch.stack(blocks))


def tanh(batch: int = 4, size: int = 6, radius: float = 0.9, seed: int = 0) -> Problem:
    """z = tanh(W z + x), ‖W‖₂ = radius; the answer by scipy.optimize.root."""
    base = linear(batch, size, radius, seed)
    matrix, offset = base.args
    answers = []
    for w, x in zip(matrix.numpy(), offset.numpy(), strict=True):
        found = scipy.optimize.root(
            lambda z, w=w, x=x: np.tanh(w @ z + x) - z, np.zeros(size), tol=1e-14
        )
        assert np.abs(np.tanh(w @ found.x + x) - found.x).max() < 1e-13
        answers.append(found.x)
    gain = torch.full((batch,), 1 / (1 - radius), dtype=torch.float64)
    answer = torch.from_numpy(np.stack(answers))
    return Problem(apply_tanh, base.z0, base.args, answer, gain)


OK, EXPLODES, GROWS, NAN, NAN_LATER = range(5)
"""What a sample of ``with_bad_sample`` does; see ``apply_with_fault``."""

FAULTS = {"explodes": EXPLODES, "nan": NAN, "nan_later": NAN_LATER}
"""Faults that no solver can solve. (GROWS is linear: accelerated solvers do solve it.)"""


def apply_with_fault(z: Tensor, matrix: Tensor, offset: Tensor, fault: Tensor) -> Tensor:
    """An affine map, save where ``fault`` [B, 1] says otherwise.

    EXPLODES: z² + z + 1, which has no fixed point and whose residual z² + 1 is at least 2/3 of
    ‖T(z)‖ everywhere: no tolerance below that may call it converged. GROWS: 3z + 1. NAN: at once.
    NAN_LATER: NaN as soon as a component passes 3, and z + 1 before.
    """
    nan = torch.full_like(z, float("nan"))
    out = apply_affine(z, matrix, offset)
    out = torch.where(fault == EXPLODES, z * z + z + 1, out)
    out = torch.where(fault == GROWS, 3 * z + 1, out)
    out = torch.where(fault == NAN, nan, out)
    later = torch.where((z > 3).any(1, keepdim=True), nan, z + 1)
    return torch.where(fault == NAN_LATER, later, out)


def with_bad_sample(fault: int, place: int, batch: int = 5) -> Problem:
    """Mixed-difficulty samples, one of which has a fault."""
    base = mixed(batch)
    faults = torch.zeros(batch, 1, dtype=torch.float64)
    faults[place] = fault
    return replace(base, fn=apply_with_fault, args=(*base.args, faults))


def trees(base: Problem) -> dict[str, Problem]:
    """The same affine problem of size n ≥ 6 with its state cut into leaves, in several shapes."""

    def problem(split: Callable[[Tensor], Any], join: Callable[[Any], Tensor]) -> Problem:
        def fn(z: Any, *args: Tensor) -> Any:
            return split(base.fn(join(z), *args))

        return replace(base, fn=fn, z0=split(base.z0), answer=split(base.answer))

    return {
        "tuple": problem(lambda v: (v[:, :2], v[:, 2:]), lambda z: torch.cat(z, 1)),
        "list": problem(lambda v: [v[:, :1], v[:, 1:]], lambda z: torch.cat(z, 1)),
        "dict": problem(
            lambda v: {"low": v[:, :3], "high": v[:, 3:]},
            lambda z: torch.cat([z["low"], z["high"]], 1),
        ),
        "nested": problem(
            lambda v: {"a": (v[:, :2].reshape(-1, 1, 2), v[:, 2]), "b": v[:, 3:]},
            lambda z: torch.cat([z["a"][0].flatten(1), z["a"][1][:, None], z["b"]], 1),
        ),
    }


def convolution(
    batch: int = 3,
    channels: int = 4,
    size: int = 5,
    radius: float = 0.8,
    memory_format: torch.memory_format = torch.channels_last,
) -> Problem:
    """z = K * z + x with zero padding, the answer by the dense matrix of the convolution."""
    shape = (channels, size, size)
    count = channels * size * size
    weight = randn(channels, channels, 3, 3, seed=3)
    basis = torch.eye(count, dtype=torch.float64).view(count, *shape)
    matrix = torch.nn.functional.conv2d(basis, weight, padding=1).flatten(1).mT
    scale = radius / torch.linalg.matrix_norm(matrix, 2)
    weight, matrix = weight * scale, matrix * scale
    x = randn(batch, *shape, seed=4)
    system = np.eye(count) - matrix.numpy()
    answer = torch.from_numpy(np.linalg.solve(system, x.flatten(1).numpy().T).T.copy())
    least = float(np.linalg.svd(system, compute_uv=False)[-1])

    def fn(z: Tensor, x: Tensor) -> Tensor:
        return torch.nn.functional.conv2d(z, weight.to(z.dtype), padding=1) + x

    x = x.contiguous(memory_format=memory_format)
    gain = torch.full((batch,), 1 / least, dtype=torch.float64)
    return Problem(fn, torch.zeros_like(x), (x,), answer.view(batch, *shape), gain)


def scaled(base: Problem, factor: float) -> Problem:
    """The same problem in units 1/factor: T'(z) = factor·T(z/factor), answer factor·z*."""

    def fn(z: Tensor, *args: Any) -> Tensor:
        return base.fn(z / factor, *args) * factor

    return replace(base, fn=fn, z0=base.z0 * factor, answer=base.answer * factor)


def recording(base: Problem) -> tuple[Problem, list[Any]]:
    """The problem, and a list to which each evaluation adds the state it was given."""
    seen: list[Any] = []

    def fn(z: Any, *args: Any) -> Any:
        seen.append(z)
        return base.fn(z, *args)

    return replace(base, fn=fn), seen


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adjoints and layers read no value that only a device knows, here on the CPU too."""
    for module in (graph, unrolled, inputs):
        monkeypatch.setattr(module, "host_may_read", lambda t: False)


@contextmanager
def quietly() -> Iterator[None]:
    """Where a sample is meant to fail: the warning is another test's business."""
    with warnings.catch_warnings(action="ignore", category=ConvergenceWarning):
        yield


class HostReads(TorchFunctionMode):
    """Counts calls that make a host wait for its device: reads of values, sizes that depend on
    values, and factorizations that check their outcome. The reads that cost a CPU nothing, and that
    a GPU never sees, are left out."""

    READS = frozenset({"item", "tolist", "numpy", "cpu", "equal", "allclose", "is_nonzero"})
    CASTS = frozenset({"__bool__", "__int__", "__float__", "__index__", "__contains__"})
    SIZES = frozenset({"nonzero", "unique", "masked_select"})
    CHECKS = frozenset({"linalg_solve", "linalg_inv", "linalg_cholesky", "linalg_eigvals"})
    NAMES = READS | CASTS | SIZES | CHECKS

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        never = {"read_freely": lambda x: False}
        self.patches = [mock.patch.multiple(m, **never) for m in (judge, broyden)]

    def __enter__(self) -> HostReads:
        for patch in self.patches:
            patch.start()
        found: HostReads = super().__enter__()
        return found

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        for patch in self.patches:
            patch.stop()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func.__name__
        picked = args[1] if name in ("__getitem__", "__setitem__") else ()
        by_mask = any(
            isinstance(t, Tensor) and t.dtype == torch.bool for t in pytree.tree_leaves(picked)
        )
        self.count += name in self.NAMES or by_mask
        return func(*args, **(kwargs or {}))
