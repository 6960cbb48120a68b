"""Rows of the Jacobian, ∂f_a(x_i)/∂θ: of which parameters and outputs, and how they are computed.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from equilibria.nn import OperatorNorm

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


@contextlib.contextmanager
def _restored(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Each module is in its own mode again afterwards."""
    modes = [(m, m.training) for m in modules]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Every module in eval mode inside: no dropout, no statistics of the batch; then as before."""
    with _restored(model.modules()):
        model.eval()
        yield


@contextlib.contextmanager
def following(model: nn.Module) -> Iterator[None]:
    """Norm bounds follow the weights inside, also in eval mode, where their vectors stand still.

    For weights that move: with the vectors of the start a norm runs ahead of its bound.
    """
    bounds = [m for m in model.modules() if isinstance(m, OperatorNorm)]
    with _restored(bounds):
        for module in bounds:
            module.training = True
        yield


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
            out = functional_call(model, {**fixed, **parameters}, (sample[None],))
            return outputs.take(out.reshape(-1))

        def one(sample: Tensor) -> dict[str, Tensor]:
            found, pull = vjp(lambda parameters: value(parameters, sample), chosen)[:2]
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
        chosen = {n: held[n] for n in names}
        found: dict[str, list[Tensor]] = {n: [] for n in names}
        with torch.enable_grad():
            for sample in x:
                value = outputs.take(flat_outputs(model, sample[None])[0])
                for a in range(len(value)):
                    gradients: Sequence[Tensor | None] = [None] * len(chosen)
                    if value.requires_grad:
                        gradients = torch.autograd.grad(
                            value[a],
                            list(chosen.values()),
                            retain_graph=a < len(value) - 1,
                            allow_unused=True,
                        )
                    for (n, p), g in zip(chosen.items(), gradients, strict=True):
                        found[n].append((torch.zeros_like(p) if g is None else g).flatten())
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
