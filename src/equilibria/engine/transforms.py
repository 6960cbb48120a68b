"""What PyTorch does around a solve: function transforms, compilation, autocast, TF32."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

F = TypeVar("F", bound=Callable[..., Any])


def outside_compile(reason: str) -> Callable[[F], F]:
    """Decorate what torch.compile must not trace: it breaks the graph there, saying why."""
    return cast(Callable[[F], F], torch.compiler.disable(reason=reason))


def functorch_active() -> bool:
    """True inside torch.func.grad, vjp, jvp, vmap, jacrev, jacfwd, hessian, …"""
    return bool(torch._C._are_functorch_transforms_active())


def forward_mode_active() -> bool:
    """True inside a ``torch.autograd.forward_ad.dual_level`` (not under compile)."""
    return not torch.compiler.is_compiling() and forward_ad._current_level >= 0


def forward_levels() -> int:
    """How many torch.func.jvp (or jacfwd) are at work around here."""
    if not functorch_active():
        return 0
    stack = torch._C._functorch.get_interpreter_stack() or []
    return sum(level.key() == torch._C._functorch.TransformType.Jvp for level in stack)


def is_differentiated() -> bool:
    """Whether a derivative may be taken of what is computed now; forward mode asks for no graph."""
    return torch.is_grad_enabled() or forward_mode_active() or forward_levels() > 0


def transforms_active() -> bool:
    """True where gradients are not plain reverse-mode autograd."""
    if torch.compiler.is_compiling():
        return False
    return functorch_active() or forward_mode_active()


def may_reuse() -> bool:
    """Whether what an earlier call made of the same weights serves: no graph, nothing is traced."""
    return not (torch.is_grad_enabled() or torch.compiler.is_compiling() or transforms_active())


def may_keep(t: Tensor) -> bool:
    """Whether what is made now may serve later calls; not of a CUDA graph: its replay writes it."""
    return may_reuse() and not is_captured(t)


def is_captured(t: Tensor) -> bool:
    """Whether work on t is recorded for a CUDA graph; the host must not wait for it then."""
    return t.is_cuda and torch.cuda.is_current_stream_capturing()


@contextlib.contextmanager
def for_any_mode() -> Iterator[None]:
    """No graph, and ordinary tensors in inference mode too: of its own, autograd takes none."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def version(t: Tensor) -> int:
    """How often t was changed in place; tensors of inference mode do not count."""
    return 0 if t.is_inference() else t._version


def autocasts(t: Tensor) -> bool:
    """Whether autocast is on for the device of t."""
    return not t.is_meta and torch.is_autocast_enabled(t.device.type)


def uncached(like: Tensor) -> contextlib.AbstractContextManager[object]:
    """Autocast as it is, without its cache of cast weights.

    The cache would hand the evaluation that is differentiated (and whatever the caller computes
    after the solve) a cast made during the solve, without a graph to the weight.
    """
    if torch.compiler.is_compiling() or not (autocasts(like) and torch.is_autocast_cache_enabled()):
        return contextlib.nullcontext()
    device = like.device.type
    return torch.autocast(device, dtype=torch.get_autocast_dtype(device), cache_enabled=False)


def convolutions_take_tf32() -> bool:
    """Whether cuDNN may round float32 to TF32."""
    cudnn: Any = torch.backends.cudnn
    return _takes_tf32(cudnn, lambda: cudnn.conv)


def products_take_tf32() -> bool:
    """Whether float32 products of matrices on a GPU may round to TF32."""
    matmul: Any = torch.backends.cuda.matmul
    return _takes_tf32(matmul, lambda: matmul)


def _takes_tf32(older: Any, newer: Callable[[], Any]) -> bool:
    """torch has two ways to set this; the older name raises where the newer one was used."""
    try:
        return bool(older.allow_tf32)
    except RuntimeError:
        return bool(newer().fp32_precision == "tf32")
