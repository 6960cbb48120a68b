"""Whether PyTorch's function transforms (torch.func, forward-mode AD, compile) are at work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
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


def transforms_active() -> bool:
    """True where gradients are not plain reverse-mode autograd."""
    if torch.compiler.is_compiling():
        return False
    return functorch_active() or forward_mode_active()
