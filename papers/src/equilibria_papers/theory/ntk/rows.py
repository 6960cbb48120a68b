"""Rows of the Jacobian, ∂f_a(x_i)/∂θ, one sample at a time or many at once.

    vmap       torch.func: vmap over samples of the pull-back, vmap over outputs
    autograd   a graph a sample and one backward pass an output: works wherever training does

Both give the gradient that the model itself gives: an equilibrium layer's adjoint decides.
"""

from __future__ import annotations

import contextlib
import fnmatch
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from equilibria.nn import OperatorNorm

# Which parameters a tangent kernel is about, and how they are grouped into layers.


Filter: TypeAlias = str | Sequence[str] | Callable[[str], bool] | None
"""A glob pattern such as ``"head.*"``, several, or a test of the name; None takes all."""
Layers: TypeAlias = bool | int | Callable[[str], str]
"""False: one group. True: by module. A number: by so many parts of the module's name."""

# torch.nn.utils.parametrize keeps W of layer.W as layer.W.parametrizations.weight.original0.
_PARAMETRIZED = re.compile(r"\.parametrizations\..*$")


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
    if callable(parameters):
        chosen = {n: p for n, p in trained.items() if parameters(n)}
    else:
        patterns = [parameters] if isinstance(parameters, str) else list(parameters)
        if not all(isinstance(p, str) for p in patterns):
            raise TypeError(
                f"parameters={parameters!r}: expected a pattern such as 'head.*', a list of them, "
                "or a function of the name."
            )
        chosen = {
            n: p for n, p in trained.items() if any(fnmatch.fnmatchcase(n, q) for q in patterns)
        }
    if not chosen:
        some = ", ".join(list(trained)[:6])
        raise ValueError(
            f"parameters={parameters!r} fits none of {len(trained)} parameters; names are {some}"
            f"{', …' if len(trained) > 6 else ''}."
        )
    return chosen


def group_names(names: Iterable[str], layers: Layers) -> dict[str, list[str]]:
    """Group → names of its parameters, in the order of the model; ``{"": all}`` for False."""
    if not isinstance(layers, (bool, int)) and not callable(layers):
        raise TypeError(f"layers={layers!r}: expected True, False, a depth or a function.")
    if not isinstance(layers, bool) and isinstance(layers, int) and layers < 1:
        raise ValueError(f"layers={layers}: expected a depth of 1 or more, True or False.")
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_group(name, layers), []).append(name)
    return groups


def _group(name: str, layers: Layers) -> str:
    if layers is False:
        return ""
    if callable(layers):
        return str(layers(name))
    module = _PARAMETRIZED.sub("", name)
    if module == name:  # not parametrized: the last part is the parameter itself
        module = name.rpartition(".")[0]
    if layers is True:
        return module or "(the module itself)"
    return ".".join(module.split(".")[:layers]) or "(the module itself)"


# Which outputs of a model a tangent kernel is about.


Choice: TypeAlias = str | int | Sequence[int]
"""``"all"``, ``"trace"``, ``"sum"``, an index of the flattened output, or several."""


@dataclass(frozen=True)
class Outputs:
    """A choice, resolved for a model with K outputs a sample."""

    choice: str
    total: int
    """K."""
    index: tuple[int, ...] | None = None
    """Chosen outputs; None: all K."""

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
    if isinstance(choice, str):
        if choice not in ("all", "trace", "sum"):
            raise ValueError(
                f"outputs={choice!r}: expected 'all', 'trace', 'sum', an index or several indices."
            )
        return Outputs(choice, total)
    indices = [choice] if isinstance(choice, int) else list(choice)
    wrong = [i for i in indices if isinstance(i, bool) or not isinstance(i, int)]
    if wrong or not indices:
        raise TypeError(
            f"outputs={choice!r}: expected 'all', 'trace', 'sum', an index or several indices."
        )
    for i in indices:
        if not -total <= i < total:
            raise ValueError(
                f"outputs={choice!r}: the model has {total} outputs, 0 to {total - 1}."
            )
    return Outputs("index", total, tuple(i % total for i in indices))


Method: TypeAlias = Literal["auto", "vmap", "autograd"]
Rows: TypeAlias = Callable[[Tensor, Sequence[str]], dict[str, Tensor]]
"""(x [c, …], names) ↦ name → [c, k, entries of that parameter]."""

_AGREE = 0.05
"""Largest relative difference of a vmapped gradient from autograd's; solvers stop at tolerances."""


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Every module in eval mode inside: no dropout, no statistics of the batch; then as before."""
    modes = [(m, m.training) for m in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextlib.contextmanager
def following(model: nn.Module) -> Iterator[None]:
    """Norm bounds follow the weights inside, also in eval mode, where their vectors stand still.

    For weights that move: with the vectors of the start a norm runs ahead of its bound.
    """
    bounds = [(m, m.training) for m in model.modules() if isinstance(m, OperatorNorm)]
    for module, _ in bounds:
        module.training = True
    try:
        yield
    finally:
        for module, mode in bounds:
            module.training = mode


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


def functional(
    model: nn.Module, names: Sequence[str], outputs: Outputs
) -> tuple[Callable[[dict[str, Tensor], Tensor], Tensor], dict[str, Tensor]]:
    """(θ, x) ↦ the chosen outputs [N, pulled], and θ: the named parameters, detached."""
    fixed = {n: p.detach() for n, p in model.named_parameters()}
    chosen = {n: fixed.pop(n) for n in names}
    fixed |= dict(model.named_buffers())
    flat = _Flat(model)

    def value(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        state = {f"model.{n}": t for n, t in {**fixed, **parameters}.items()}
        return outputs.take(functional_call(flat, state, (x,)))

    return value, chosen


class _Flat(nn.Module):
    """A model whose output is [N, K]."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.training = model.training

    def forward(self, x: Tensor) -> Tensor:
        return flat_outputs(self.model, x)


def vmapped(model: nn.Module, outputs: Outputs) -> Rows:
    """Rows by torch.func."""

    def rows(x: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
        value, chosen = functional(model, names, outputs)

        def one(sample: Tensor) -> dict[str, Tensor]:
            found, pull = vjp(lambda parameters: value(parameters, sample[None])[0], chosen)[:2]
            basis = torch.eye(len(found), dtype=found.dtype, device=found.device)
            pulled: dict[str, Tensor] = vmap(lambda v: pull(v)[0])(basis)
            return {n: g.flatten(1) for n, g in pulled.items()}

        rows: dict[str, Tensor] = vmap(one)(x)
        return rows

    return rows


def looped(model: nn.Module, outputs: Outputs) -> Rows:
    """Rows by plain autograd, one sample and one output after the other."""

    def rows(x: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
        held = dict(model.named_parameters())
        chosen = [held[n] for n in names]
        found: list[list[Tensor]] = [[] for _ in names]
        with torch.enable_grad():
            for sample in x:
                value = outputs.take(flat_outputs(model, sample[None])[0])
                each = _gradients(value, chosen)
                for place, gradient in zip(found, each, strict=True):
                    place.append(gradient)
        return {n: torch.stack(parts) for n, parts in zip(names, found, strict=True)}

    return rows


def _gradients(value: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """[k] ↦ for each parameter [k, entries]; zero where it has no part in the value."""
    rows: list[list[Tensor]] = [[] for _ in parameters]
    for a in range(len(value)):
        given: Sequence[Tensor | None] = (None,) * len(parameters)
        if value.requires_grad:
            given = torch.autograd.grad(
                value[a],
                list(parameters),
                retain_graph=a < len(value) - 1,
                allow_unused=True,
            )
        for place, p, g in zip(rows, parameters, given, strict=True):
            place.append((torch.zeros_like(p) if g is None else g).flatten())
    return [torch.stack(place) for place in rows]


def choose_rows(
    model: nn.Module, outputs: Outputs, x: Tensor, names: Sequence[str], method: Method
) -> tuple[Rows, str]:
    """How to compute the rows, and its name; ``auto`` tries vmap on one sample.

    It falls back on autograd where vmap raises, or where its gradient of the first sample is not
    autograd's.
    """
    if method not in ("auto", "vmap", "autograd"):
        raise ValueError(f"method={method!r}: expected 'auto', 'vmap' or 'autograd'.")
    if method == "autograd":
        return looped(model, outputs), "autograd"
    if method == "vmap":
        return vmapped(model, outputs), "vmap"
    first = Outputs("index", outputs.total, (0,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run itself will say it again
        plain = looped(model, first)(x[:1], names)
        try:
            quick = vmapped(model, first)(x[:1], names)
        except (RuntimeError, NotImplementedError, TypeError, ValueError):
            return looped(model, outputs), "autograd"
    apart = sum(float((quick[n] - plain[n]).square().sum()) for n in names) ** 0.5
    size = sum(float(plain[n].square().sum()) for n in names) ** 0.5
    if apart <= _AGREE * size:
        return vmapped(model, outputs), "vmap"
    return looped(model, outputs), "autograd"


# K = J Jᵀ group by group, from rows that are computed chunk by chunk and never all kept.


Tell = Callable[[int, int], None]
"""(samples differentiated, of how many)."""
_Chunk = tuple[slice, dict[str, Tensor]]


def work_type(dtype: torch.dtype) -> torch.dtype:
    """Half precision is widened: small eigenvalues are differences of large numbers."""
    return torch.promote_types(dtype, torch.float32)


def contract(
    rows: Rows,
    x: Tensor,
    x2: Tensor | None,
    groups: Mapping[str, Sequence[str]],
    outputs: Outputs,
    plan: Plan,
    dtype: torch.dtype,
    tell: Tell | None,
) -> dict[str, Tensor]:
    """Group → its kernel [N·k, M·k], entry (i·k + a, j·k + b) for outputs a of x_i, b of x2_j."""
    n, m, k = len(x), len(x if x2 is None else x2), outputs.width
    kernels = {
        g: torch.zeros(n * k, m * k, dtype=work_type(dtype), device=x.device) for g in groups
    }
    bar = _Bar(tell, _count(n, None if x2 is None else m, plan))
    for names in plan.passes:
        parts = {g: [q for q in group if q in set(names)] for g, group in groups.items()}
        parts = {g: group for g, group in parts.items() if group}

        def chunks(
            data: Tensor, first: int, parts: dict[str, list[str]] = parts
        ) -> Iterator[_Chunk]:
            for start in range(first, len(data), plan.chunk):
                batch = data[start : start + plan.chunk]
                yield (
                    slice(start * k, (start + len(batch)) * k),
                    _matrices(rows, batch, parts, outputs),
                )
                bar.add(len(batch))

        step = plan.chunk * plan.resident
        for first in range(0, n, step):
            if x2 is None:
                _own(kernels, chunks(x, first), plan.resident)
            else:
                _cross(kernels, chunks(x[: first + step], first), chunks(x2, 0))
    return kernels


def _own(kernels: Mapping[str, Tensor], chunks: Iterator[_Chunk], resident: int) -> None:
    """Keep the first chunks and meet each with all later ones; both halves of the kernel."""
    kept: list[_Chunk] = []
    for where, found in chunks:
        if len(kept) < resident:
            kept.append((where, found))
        for place, other in kept:
            for g, matrix in found.items():
                block = matrix @ other[g].mT
                if place == where:  # symmetric to the last digit, which the product need not be
                    block = (block + block.mT) / 2
                else:
                    kernels[g][place, where] += block.mT
                kernels[g][where, place] += block


def _cross(kernels: Mapping[str, Tensor], left: Iterator[_Chunk], right: Iterator[_Chunk]) -> None:
    kept = list(left)
    for where, found in right:
        for place, other in kept:
            for g, matrix in found.items():
                kernels[g][place, where] += other[g] @ matrix.mT


def _matrices(
    rows: Rows, x: Tensor, groups: Mapping[str, Sequence[str]], outputs: Outputs
) -> dict[str, Tensor]:
    """Group → [c·k, entries]; with the trace [c, K·entries], whose products sum over outputs."""
    found = rows(x, [name for group in groups.values() for name in group])
    made = {}
    for g, names in groups.items():
        joined = torch.cat([found.pop(name) for name in names], dim=2)
        flat = joined.flatten(1) if outputs.traced else joined.flatten(0, 1)
        made[g] = flat.to(work_type(flat.dtype)).detach()
    return made


def _count(n: int, m: int | None, plan: Plan) -> int:
    """How many samples are differentiated in all."""
    step = plan.chunk * plan.resident
    starts = range(0, n, step)
    if m is None:
        each = sum(n - first for first in starts)
    else:
        each = n + m * len(starts)
    return each * len(plan.passes)


class _Bar:
    def __init__(self, tell: Tell | None, total: int) -> None:
        self.tell, self.total, self.done = tell, total, 0

    def add(self, count: int) -> None:
        self.done += count
        if self.tell is not None:
            self.tell(self.done, self.total)


# How a kernel is computed within a budget of bytes: which samples and parameters at a time.
#
# Rows of the Jacobian are computed ``chunk`` samples at a time. The rows of as many chunks as fit
# stay in memory, and those of all later samples pass by them; then the next chunks stay. So samples
# are differentiated once where all rows fit, and about N/(2·resident) times where they do not.
# Parameters are split into passes only where the rows of a single sample are too many.


_COPIES = 3
"""A fresh chunk exists as gradients, inside autograd, and as the matrix made of them."""
_ROWS = 64
"""Gradients at a time where nothing else limits them: enough to fill the vector units."""


@dataclass(frozen=True)
class Plan:
    """What is held at a time."""

    chunk: int
    """Samples that are differentiated at once."""
    resident: int
    """Chunks whose rows are kept."""
    passes: tuple[tuple[str, ...], ...]
    """Names of the parameters of each pass."""


def readable(count: int) -> str:
    """A number of bytes in words."""
    size = float(count)
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"


def make_plan(
    sizes: Mapping[str, int],
    *,
    samples: int,
    outputs: int,
    itemsize: int,
    memory: int,
    held: int,
    batch_size: int | None,
) -> Plan:
    """Split the work so that rows and kernels take at most ``memory`` bytes.

    Args:
        sizes: entries of each parameter.
        samples: N of the side whose rows are kept.
        outputs: gradients a sample.
        itemsize: bytes of a number.
        memory: the budget.
        held: bytes that are needed all the time (the kernels, or the projected rows).
        batch_size: samples to differentiate at once; None decides.
    """
    left = memory - held
    least = outputs * itemsize * max(sizes.values())
    if left < (_COPIES + 1) * least:
        largest = max(sizes, key=lambda n: sizes[n])
        raise MemoryError(
            f"memory={readable(memory)} is too little: {readable(held)} for the kernel and "
            f"{readable((_COPIES + 1) * least)} for gradients of {outputs} output(s) in "
            f"{largest!r}. Give more memory, fewer samples or outputs ('trace', 'sum', an index), "
            "or a projection."
        )
    passes = _split(sizes, left // ((_COPIES + 1) * outputs * itemsize))
    row = outputs * itemsize * max(sum(sizes[n] for n in names) for names in passes)
    wanted = max(1, _ROWS // outputs) if batch_size is None else batch_size
    chunk = max(1, min(wanted, samples, left // ((_COPIES + 1) * row)))
    resident = max(1, left // (chunk * row) - _COPIES)
    return Plan(chunk, resident, passes)


def _split(sizes: Mapping[str, int], limit: int) -> tuple[tuple[str, ...], ...]:
    """Names in their order, cut so that no part has more than ``limit`` entries."""
    passes: list[list[str]] = []
    count = 0
    for name, size in sizes.items():
        if not passes or count + size > limit:
            passes.append([])
            count = 0
        passes[-1].append(name)
        count += size
    return tuple(tuple(names) for names in passes)
