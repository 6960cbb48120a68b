"""One training step and one inference of a model on one batch: what is timed."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.engine.result import ConvergenceWarning

from .timeline import BACKWARD, FORWARD, LOSS, OPTIMIZER, Timeline

__all__ = ["PRECISIONS", "Workload", "check_precision", "plain_model"]

Loss = Callable[[Any, Any], Tensor]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

PRECISIONS: dict[str, torch.dtype | None] = {
    "32-true": None,
    "bf16-mixed": torch.bfloat16,
    "16-mixed": torch.float16,
}
"""As in training: the dtype of autocast, or None for the model's own."""


def check_precision(given: str) -> str:
    """The precision under its full name; ``32``, ``bf16`` and ``16`` are short for it."""
    known = {name.split("-")[0]: name for name in PRECISIONS} | {n: n for n in PRECISIONS}
    if given not in known:
        raise ValueError(f"precision={given!r}: expected one of {', '.join(PRECISIONS)}.")
    return known[given]


def plain_model(model: nn.Module) -> nn.Module:
    """The module inside of what torch.compile made, or the model itself."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model


def still(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD with momentum at a rate of 0: all of its work, and the weights stay where they are."""
    return torch.optim.SGD(parameters, lr=0.0, momentum=0.9, weight_decay=5e-4)


@dataclass(eq=False)
class Workload:
    """A model of one's own (it is a copy), a batch, a loss and an optimizer."""

    model: nn.Module
    x: Tensor
    y: Any
    loss: Loss
    optimizer: torch.optim.Optimizer | None
    precision: str
    called: Callable[[Tensor], Any]
    """What is called: the model, or its compiled form."""

    @staticmethod
    def of(
        model: nn.Module,
        x: Tensor,
        y: Any = None,
        *,
        loss: Loss | None = None,
        optimizer: MakeOptimizer | None = None,
        precision: str = "32-true",
        channels_last: bool = False,
        compiled: bool = False,
    ) -> Workload:
        """Copies the model, so that neither weights nor statistics of the user's move."""
        own = copy.deepcopy(plain_model(model))
        if channels_last:
            own = own.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            x = x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x
        trained = [p for p in own.parameters() if p.requires_grad]
        made = (optimizer or still)(trained) if trained else None
        called: Any = torch.compile(own) if compiled else own
        work = Workload(own, x, y, loss or nn.functional.cross_entropy, made, precision, called)
        if y is None and loss is None:
            work.y = work.labels()
        return work

    @property
    def batch(self) -> int:
        return int(self.x.shape[0])

    @property
    def device(self) -> torch.device:
        return self.x.device

    def cast(self) -> AbstractContextManager[Any]:
        dtype = PRECISIONS[self.precision]
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype=dtype)

    def labels(self) -> Tensor:
        """Labels at random for logits [B, K, ...]."""
        out = self.answer()
        if not isinstance(out, Tensor) or out.ndim < 2 or not out.is_floating_point():
            got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise ValueError(
                f"the model returned {got}, for which no labels can be made up: logits [B, K, ...] "
                "are expected. Give y and loss (a function of output and y)."
            )
        draw = torch.Generator().manual_seed(0)
        shape = (out.shape[0], *out.shape[2:])
        return torch.randint(0, out.shape[1], shape, generator=draw).to(out.device)

    def answer(self) -> Any:
        """The output in eval mode, by the model that is not compiled."""
        with self.mode(train=False), torch.no_grad(), self.cast():
            return self.model(self.x)

    @contextmanager
    def mode(self, *, train: bool) -> Iterator[None]:
        """Train or eval mode; solves that miss their tolerance are counted, not warned of."""
        self.model.train(train)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            yield

    def step(self, line: Timeline | None = None, *, eager: bool = True) -> Any:
        """Forward, loss, backward, optimizer, once."""
        model = self.model if eager else self.called
        _to(line, FORWARD)
        with self.cast():
            out = model(self.x)
            _to(line, LOSS)
            loss = self.loss(out, self.y)
        del out
        _to(line, BACKWARD)
        if line is not None:
            line.in_backward = True
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        _to(line, OPTIMIZER)
        if self.optimizer is not None:
            self.optimizer.step()
        _to(line, "end")

    def infer(self, line: Timeline | None = None, *, eager: bool = True) -> Any:
        """A forward pass without a graph."""
        model = self.model if eager else self.called
        _to(line, FORWARD)
        with torch.no_grad(), self.cast():
            model(self.x)
        _to(line, "end")


def _to(line: Timeline | None, part: str) -> None:
    if line is not None:
        line.to(("", part))
