"""The empirical neural tangent kernel K(x, x′) = (∂f(x)/∂θ)(∂f(x′)/∂θ)ᵀ of any model.

Rows of the Jacobian, ∂f_a(x_i)/∂θ, are computed in one of two ways:

    vmap       torch.func: vmap over samples of the pull-back, vmap over outputs
    autograd   a graph a sample and one backward pass an output: works wherever training does

Both give the gradient that the model itself gives: an equilibrium layer's adjoint decides.
"""

from __future__ import annotations

import fnmatch
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations_with_replacement
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import jacrev, vmap
from torch.nn.utils.stateless import _reparametrize_module

from equilibria.evaluation import evaluating

Filter: TypeAlias = str | Sequence[str] | None
"""A glob pattern of parameter names such as ``"head.*"``, or several; None takes all."""
Choice: TypeAlias = str | int | Sequence[int]
"""``"all"``, ``"trace"``, ``"sum"``, an index of the flattened output, or several."""
Method: TypeAlias = Literal["auto", "vmap", "autograd"]
Rows: TypeAlias = Callable[[Tensor, Sequence[str]], dict[str, Tensor]]
"""(x [c, …], names) ↦ name → [c, k, entries of that parameter]."""

# torch.nn.utils.parametrize keeps W of layer.W as layer.W.parametrizations.weight.original0.
_PARAMETRIZED = re.compile(r"\.parametrizations\..*$")
# Largest relative difference of a vmapped gradient from autograd's; solvers stop at tolerances.
_AGREE = 0.05


def select_parameters(model: nn.Module, parameters: Filter = None) -> dict[str, Tensor]:
    """The parameters that need a gradient and pass the filter, by name; shared ones once."""
    trained: dict[str, Tensor] = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if not trained:
        raise ValueError(
            f"{type(model).__name__} has no parameter that needs a gradient, so no tangent kernel; "
            "call model.requires_grad_(True) if it was frozen."
        )
    if parameters is None:
        return trained
    patterns = [parameters] if isinstance(parameters, str) else list(parameters)
    if not all(isinstance(p, str) for p in patterns):
        raise TypeError(
            f"parameters={parameters!r}: expected a pattern such as 'head.*', or a list of them."
        )
    chosen = {n: p for n, p in trained.items() if any(fnmatch.fnmatchcase(n, q) for q in patterns)}
    if not chosen:
        some = ", ".join(list(trained)[:6])
        raise ValueError(
            f"parameters={parameters!r} fits none of {len(trained)} parameters; names are {some}"
            f"{', …' if len(trained) > 6 else ''}."
        )
    return chosen


def by_module(names: Iterable[str]) -> dict[str, list[str]]:
    """Module → names of its parameters, in the order of the model."""
    groups: dict[str, list[str]] = {}
    for name in names:
        module = _PARAMETRIZED.sub("", name)
        if module == name:  # not parametrized: the last part is the parameter itself
            module = name.rpartition(".")[0]
        groups.setdefault(module or "(the module itself)", []).append(name)
    return groups


@dataclass(frozen=True)
class Outputs:
    """A choice, resolved for a model with K outputs a sample."""

    choice: str
    total: int  # K
    index: tuple[int, ...] | None = None  # Chosen outputs; None: all K

    @property
    def traced(self) -> bool:
        """Whether the kernel is the mean over the outputs, tr(·)/K, one number a pair."""
        return self.choice == "trace"

    @property
    def pulled(self) -> int:
        """Gradients a sample: rows of the Jacobian that are computed."""
        if self.choice == "sum":
            return 1
        return self.total if self.index is None else len(self.index)

    @property
    def width(self) -> int:
        """k, rows of the kernel a sample."""
        return 1 if self.traced else self.pulled

    def take(self, out: Tensor) -> Tensor:
        """[..., K] → [..., pulled]: what is differentiated."""
        if self.choice == "sum":
            # Divided by √K, so that its kernel estimates the trace's (Mohamadi et al. 2023).
            return out.sum(-1, keepdim=True) / math.sqrt(self.total)
        if self.index is None:
            return out / math.sqrt(self.total) if self.traced else out
        return torch.stack([out[..., i] for i in self.index], dim=-1)


def choose_outputs(choice: Choice, total: int) -> Outputs:
    """Check the choice against the K = ``total`` outputs of a sample."""
    wrong = f"outputs={choice!r}: expected 'all', 'trace', 'sum', an index or several indices."
    if isinstance(choice, str):
        if choice not in ("all", "trace", "sum"):
            raise ValueError(wrong)
        return Outputs(choice, total)
    indices = [choice] if isinstance(choice, int) else list(choice)
    if not indices or any(isinstance(i, bool) or not isinstance(i, int) for i in indices):
        raise TypeError(wrong)
    if not all(-total <= i < total for i in indices):
        raise ValueError(f"outputs={choice!r}: the model has {total} outputs, 0 to {total - 1}.")
    return Outputs("index", total, tuple(i % total for i in indices))


def flat_outputs(model: nn.Module, x: Tensor) -> Tensor:
    """f(x) as [N, K]."""
    out = model(x)
    if not isinstance(out, Tensor) or out.ndim < 1 or out.shape[0] != x.shape[0]:
        got = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise TypeError(
            f"a tangent kernel needs a model whose output is one tensor [N, …] for x [N, …]; x has "
            f"the shape {list(x.shape)} and the output is {got}."
        )
    return out.reshape(out.shape[0], -1)


def vmapped(model: nn.Module, outputs: Outputs) -> Rows:
    """Rows by torch.func."""

    def rows(x: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
        fixed = {n: p.detach() for n, p in model.named_parameters()}
        chosen = {n: fixed.pop(n) for n in names}
        fixed |= dict(model.named_buffers())

        def value(parameters: dict[str, Tensor], sample: Tensor) -> Tensor:
            held = {**fixed, **parameters}
            # As functional_call, which leaves its tensors in a module that is used in two places.
            with _reparametrize_module(model, held, tie_weights=True, stack_weights=True):
                return outputs.take(model(sample[None]).reshape(-1))

        def one(sample: Tensor) -> dict[str, Tensor]:
            pulled: dict[str, Tensor] = jacrev(value)(chosen, sample)
            return {n: g.flatten(1) for n, g in pulled.items()}

        rows: dict[str, Tensor] = vmap(one)(x)
        return rows

    return rows


def looped(model: nn.Module, outputs: Outputs) -> Rows:
    """Rows by plain autograd, one sample and one output after the other."""

    def rows(x: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
        held = dict(model.named_parameters())
        weights = [held[n] for n in names]
        found: dict[str, list[Tensor]] = {n: [] for n in names}
        with torch.enable_grad():
            for sample in x:
                value = outputs.take(flat_outputs(model, sample[None])[0])
                for a in range(len(value)):
                    gradients = tuple(map(torch.zeros_like, weights))
                    if value.requires_grad:
                        more = a < len(value) - 1
                        gradients = torch.autograd.grad(
                            value[a], weights, retain_graph=more, materialize_grads=True
                        )
                    for n, g in zip(names, gradients, strict=True):
                        found[n].append(g.flatten())
        return {n: torch.stack(parts).unflatten(0, (len(x), -1)) for n, parts in found.items()}

    return rows


def choose_rows(
    model: nn.Module, outputs: Outputs, x: Tensor, names: Sequence[str], method: Method
) -> tuple[Rows, str]:
    """How to compute the rows, and its name; ``auto`` tries vmap on one sample.

    It falls back on autograd where vmap raises, or where its gradient of the first sample is not
    autograd's.
    """
    if method not in ("auto", "vmap", "autograd"):
        raise ValueError(f"method={method!r}: expected 'auto', 'vmap' or 'autograd'.")
    if method == "vmap" or (method == "auto" and _vmap_agrees(model, outputs, x, names)):
        return vmapped(model, outputs), "vmap"
    return looped(model, outputs), "autograd"


def _vmap_agrees(model: nn.Module, outputs: Outputs, x: Tensor, names: Sequence[str]) -> bool:
    first = Outputs("index", outputs.total, (0,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run itself will say it again
        plain = looped(model, first)(x[:1], names)
        try:
            quick = vmapped(model, first)(x[:1], names)
        except (RuntimeError, NotImplementedError, TypeError, ValueError):
            return False
    apart = sum(float((quick[n] - plain[n]).square().sum()) for n in names) ** 0.5
    size = sum(float(plain[n].square().sum()) for n in names) ** 0.5
    return bool(apart <= _AGREE * size)


Tell = Callable[[int, int], None]  # (samples differentiated, of how many)
_Chunk = tuple[slice, dict[str, Tensor]]  # (rows of the kernel, group → their gradients)

_ROWS = 64  # gradients at a time: enough to fill the vector units
_SPAN = 4096  # entries a product adds up at once: float32 loses digits in longer sums
_HELD = 2**30  # bytes of gradients that are kept; the others are computed again


@dataclass(frozen=True, eq=False)
class TangentKernel:
    """K = J Jᵀ for N samples (and M others) with k outputs each."""

    matrix: Tensor  # [N·k, M·k]; row i·k + a is output a of sample i
    width: int  # k; 1 for the trace, the sum and a single output
    outputs: str  # "all", "trace", "sum" or "index"
    parameters: int  # How many numbers the gradients are with respect to
    method: str  # "vmap" or "autograd"
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    """Layer → its kernel; they sum to ``matrix``. Empty where not asked for."""
    sizes: Mapping[str, int] = field(default_factory=dict)  # Layer → its number of parameters

    @property
    def kernel(self) -> Tensor:
        """[N, M, k, k], or [N, M] where k = 1."""
        n, m = self.matrix.shape[0] // self.width, self.matrix.shape[1] // self.width
        if self.width == 1:
            return self.matrix
        return self.matrix.view(n, self.width, m, self.width).permute(0, 2, 1, 3)

    @property
    def traced(self) -> Tensor:
        """tr K(x_i, x_j)/k, [N, M]."""
        return self.matrix if self.width == 1 else self.kernel.diagonal(dim1=2, dim2=3).mean(-1)

    def shares(self) -> dict[str, float]:
        """Layer → tr K_layer / tr K: how much of the movement of f comes from each layer."""
        if not self.parts:
            raise ValueError("shares() needs the layers: empirical_ntk(..., layers=True).")
        rows, columns = self.matrix.shape
        if rows != columns:
            raise ValueError("shares() are of a kernel of samples with themselves (x2=None).")
        total = float(self.matrix.diagonal().double().sum())
        return {
            name: float(part.diagonal().double().sum()) / total if total else 0.0
            for name, part in self.parts.items()
        }


@torch.no_grad()
def empirical_ntk(
    model: nn.Module,
    x: Tensor,
    x2: Tensor | None = None,
    *,
    outputs: Choice = "all",
    parameters: Filter = None,
    layers: bool = False,
    method: Method = "auto",
    batch_size: int | None = None,
    progress: Tell | None = None,
) -> TangentKernel:
    """K(x_i, x_j) = Σ_p ∂f(x_i)/∂θ_p ∂f(x_j)/∂θ_pᵀ, in eval mode.

    It is the kernel of the gradient that the model gives: an equilibrium layer with ``Implicit``
    gives that of the equilibrium, one with ``Phantom`` its approximation. Up to 1 GiB of gradients
    is kept; where they are more, samples are differentiated several times.

    Args:
        model: x [N, …] → f [N, …], flattened to K outputs; samples must not see each other.
        x: samples, [N, …], on the model's device.
        x2: other samples, [M, …]; None: x itself, and the kernel is symmetric.
        outputs: "all": [N·K, M·K]. "trace": tr K(x_i, x_j)/K, [N, M]. "sum": of Σf_a/√K, one
            gradient a sample in place of K (the pseudo-NTK); an index or several: these outputs.
        parameters: glob patterns of names; None: all that are trained.
        layers: also keep the kernel of each module.
        method: "vmap" (torch.func), "autograd" (one sample after the other), or "auto", which
            tries the first and falls back on the second.
        batch_size: samples to differentiate at once; None: about 64 gradients' worth.
        progress: called with (samples done, of how many).
    """
    _check(model, x, x2, layers, batch_size)
    with evaluating(model, warn=True):
        chosen = choose_outputs(outputs, flat_outputs(model, x[:1]).shape[1])
        selected = select_parameters(model, parameters)
        groups = by_module(selected) if layers else {"": list(selected)}
        rows, name = choose_rows(model, chosen, x, list(selected), method)
        counts = {g: sum(selected[n].numel() for n in names) for g, names in groups.items()}
        chunk = batch_size or max(1, _ROWS // chosen.pulled)
        # Half precision is widened: small eigenvalues are differences of large numbers.
        dtype = torch.promote_types(next(iter(selected.values())).dtype, torch.float32)
        size = chunk * chosen.pulled * sum(counts.values()) * dtype.itemsize

        def gradients(batch: Tensor) -> dict[str, Tensor]:
            """Group → [c·k, entries]; with the trace [c, K·entries], to sum over the outputs."""
            found = rows(batch, list(selected))
            joined = {g: torch.cat([found.pop(n) for n in group], 2) for g, group in groups.items()}
            dims = (1, 2) if chosen.traced else (0, 1)
            return {g: part.flatten(*dims).detach().to(dtype) for g, part in joined.items()}

        work = _Work(gradients, chosen.width, chunk, max(1, _HELD // size), progress)
        like = torch.empty(0, dtype=dtype, device=x.device)
        kernels = work.products(x, x2, dict.fromkeys(groups, like))
    return TangentKernel(
        matrix=torch.stack(list(kernels.values())).sum(0) if layers else kernels[""],
        width=chosen.width,
        outputs=chosen.choice,
        parameters=sum(counts.values()),
        method=name,
        parts=kernels if layers else {},
        sizes=counts if layers else {},
    )


def _check(model: object, x: object, x2: object, layers: object, batch_size: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"empirical_ntk takes a torch.nn.Module, got {type(model).__name__}.")
    for name, value in {"x": x, **({} if x2 is None else {"x2": x2})}.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor [N, …], got {type(value).__name__}.")
        if value.ndim < 1 or len(value) == 0:
            raise ValueError(f"{name} has the shape {list(value.shape)}: expected [N, …], N ≥ 1.")
    if isinstance(x, Tensor) and isinstance(x2, Tensor) and x.shape[1:] != x2.shape[1:]:
        raise ValueError(f"x and x2 differ: samples of {list(x.shape[1:])}, {list(x2.shape[1:])}.")
    if not isinstance(layers, bool):
        raise TypeError(f"layers={layers!r}: expected True or False.")
    if batch_size is not None and (type(batch_size) is not int or batch_size < 1):
        raise ValueError(f"batch_size={batch_size!r}: expected a positive integer.")


@dataclass
class _Work:
    """J Jᵀ by chunks of samples; ``held`` of them are kept and meet each other and all later."""

    gradients: Callable[[Tensor], dict[str, Tensor]]
    width: int
    chunk: int
    held: int
    tell: Tell | None
    done: int = 0
    total: int = 0

    def products(
        self, x: Tensor, x2: Tensor | None, like: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Group → [N·k, M·k], entry (i·k + a, j·k + b) for outputs a of x_i and b of x2_j."""
        other, step = x if x2 is None else x2, self.chunk * self.held
        shape = (len(x) * self.width, len(other) * self.width)
        kernels = {g: empty.new_zeros(shape) for g, empty in like.items()}
        starts = range(0, len(x), step)
        self.total = sum(len(x) - first for first in starts)
        if x2 is not None:
            self.total = len(x) + len(other) * len(starts)
        for first in starts:
            kept = list(self._chunks(x, first, first + step))
            later = self._chunks(other, first + step if x2 is None else 0, len(other))
            among = combinations_with_replacement(kept, 2) if x2 is None else ()
            beyond = ((before, new) for new in later for before in kept)
            for (place, left), (where, right) in chain(among, beyond):
                for g, kernel in kernels.items():
                    parts = zip(left[g].split(_SPAN, 1), right[g].split(_SPAN, 1), strict=True)
                    block = torch.stack([a @ b.mT for a, b in parts]).sum(0)
                    if x2 is None and place == where:
                        # Symmetric to the last digit, which the product need not be.
                        block = (block + block.mT) / 2
                    elif x2 is None:
                        kernel[where, place] = block.mT
                    kernel[place, where] = block
        return kernels

    def _chunks(self, data: Tensor, first: int, end: int) -> Iterator[_Chunk]:
        for start in range(first, min(end, len(data)), self.chunk):
            batch = data[start : start + self.chunk]
            place = slice(start * self.width, (start + len(batch)) * self.width)
            yield place, self.gradients(batch)
            self.done += len(batch)
            if self.tell is not None:
                self.tell(self.done, self.total)
