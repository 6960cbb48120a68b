"""The ideas of geq_cpu.py one by one: the same network with each of them switched off."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from equilibria.ops import winograd
from equilibria.problems import gaussian, operators

Run = Callable[[], object]


def _never(*_: object) -> bool:
    return False


def _always_both(ctx: Any) -> list[bool]:
    return list(ctx.needs_input_grad[:2])


_SWITCHES: dict[str, list[tuple[Any, str, Any]]] = {
    "without Winograd": [(operators, "can_use_winograd", _never)],
    "without unshuffled patches": [(gaussian, "can_unshuffle", _never)],
    "without the zero start": [(operators, "_is_zero", _never)],
    "weight gradients whether asked or not": [(winograd, "_asked", _always_both)],
}


@contextlib.contextmanager
def _off(name: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for module, attribute, value in _SWITCHES[name]:
            stack.enter_context(mock.patch.object(module, attribute, value))
        yield


def switched_off(run: Run, *, training: bool) -> dict[str, Run]:
    """``run`` with each idea off; that of the weight gradients exists in training alone."""

    def without(name: str) -> Run:
        def other() -> None:
            with _off(name):
                run()

        return other

    names = [n for n in _SWITCHES if training or "gradient" not in n]
    return {"all": run, **{name: without(name) for name in names}}
