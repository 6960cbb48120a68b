"""NaN in training: found without waiting for the device, reported with the batch it came from."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from equilibria.adjoints.graph import blown_up
from equilibria.engine.result import ConvergenceWarning, Result
from equilibria.nn import observe

_MOST = 20  # samples or tensors that a report lists


class NonFiniteLoss(RuntimeError):
    """The loss or its gradient became NaN or infinite; ``report`` tells of the batch.

    The weights are those before the bad step; ``path`` is where the report was written, if it was.
    """

    def __init__(self, message: str, report: dict[str, Any], path: Path | None = None) -> None:
        super().__init__(message)
        self.report = report
        self.path = path


class Guard:
    """Notices the first step whose loss or gradient is not finite, and keeps it from the weights.

    On the CPU it looks at once. On a GPU looking would wait for the device: there the number of the
    first bad step is kept on the device, the fused optimizers are told to skip from then on (as
    loss scaling tells them), and ``first_bad()`` is asked now and then.
    """

    def __init__(self, *, deferred: bool) -> None:
        self.deferred = deferred
        self._first: Tensor | None = None

    def sees(self, value: Tensor, step: int) -> bool:
        """Whether ``value`` is known to be bad now. Deferred: noted, False."""
        bad = ~torch.isfinite(value.detach()).all()
        if not self.deferred:
            return bool(bad)
        if self._first is None:
            self._first = torch.full((), -1, dtype=torch.long, device=value.device)
        self._first = torch.where((self._first < 0) & bad, step, self._first)
        return False

    def protect(self, optimizer: Optimizer, *, shared: bool = False) -> None:
        """Make the fused ``optimizer`` leave the weights alone once a bad step was seen, with
        ``shared`` by any process."""
        if self._first is not None:
            if shared:
                # The largest number of a bad step; −1 where there is none. Bad gradients are shared
                # anyway, so that the processes differ by the loss of one step at most.
                torch.distributed.all_reduce(self._first, op=torch.distributed.ReduceOp.MAX)
            optimizer.found_inf = (self._first >= 0).float()  # type: ignore[attr-defined]

    def first_bad(self) -> int | None:
        """The first bad step so far, if any. Waits for the device."""
        step = -1 if self._first is None else int(self._first)
        return step if step >= 0 else None


@torch.no_grad()
def examine(
    model: nn.Module, x: Tensor, y: Tensor, losses: Callable[[Tensor, Tensor], Tensor]
) -> dict[str, Any]:
    """Run the batch once more and look at every layer; the model's buffers stay as they were.

    ``losses(logits, y)`` gives one loss a sample.
    """
    buffers = [(b, b.clone()) for b in model.buffers()]
    first: list[dict[str, Any]] = []

    def look(module: nn.Module, inputs: Any, output: Any) -> None:
        if not first and isinstance(output, Tensor) and _bad(output):
            first.append({"module": names[module], "kind": type(module).__name__})

    names = {module: name for name, module in model.named_modules() if name}
    try:
        with observe(model) as seen, warnings.catch_warnings(), ExitStack() as hooks:
            warnings.simplefilter("ignore", ConvergenceWarning)  # it is what the report is about
            for module in names:
                hooks.enter_context(module.register_forward_hook(look))
            logits = model.forward(x)  # not through a compiled call, which shows no layers
    finally:
        for buffer, before in buffers:
            buffer.copy_(before)
    each = losses(logits, y)
    layers = {name: _solves(solutions) for name, solutions in seen.solutions.items() if solutions}
    parameters = dict(model.named_parameters())
    return {
        "samples": len(x),
        "input_bad_samples": _places(~torch.isfinite(x.flatten(1)).all(1))[:_MOST],
        "bad_samples": _places(~torch.isfinite(each)),
        "first_nonfinite_module": first[0] if first else None,
        "solvers": layers,
        "failed_layers": [name for name, found in layers.items() if found["failed"]],
        "nonfinite_parameters": [n for n, p in parameters.items() if _bad(p)][:_MOST],
        "nonfinite_gradients": [
            n for n, p in parameters.items() if p.grad is not None and _bad(p.grad)
        ][:_MOST],
    }


def _bad(x: Tensor) -> bool:
    return not bool(torch.isfinite(x.detach()).all())


def _places(mask: Tensor) -> list[int]:
    found: list[int] = mask.nonzero().flatten().tolist()
    return found


def _solves(solutions: list[Any]) -> dict[str, Any]:
    result = torch.cat([s.result.flatten().long() for s in solutions])
    failed = _places(blown_up(result))
    counts = {code.name: int((result == int(code)).sum()) for code in Result}
    results = {name: n for name, n in counts.items() if n}
    return {"results": results, "failed": len(failed), "failed_samples": failed[:_MOST]}


def describe(report: dict[str, Any]) -> str:
    bad, places = report["bad_samples"], report.get("indices") or []
    named = ", ".join(str(places[k]) for k in bad[:10] if k < len(places))
    where = f", at {named} of the training images" if named else ""
    layers = [
        f"The solver of layer {name!r} failed for {report['solvers'][name]['failed']} samples "
        f"({report['solvers'][name]['results']})."
        for name in report["failed_layers"]
    ]
    first = report["first_nonfinite_module"] or {}
    gradients = ", ".join(report["nonfinite_gradients"][:3])
    lines = [
        f"the {report['what']} became {report['value']} in epoch {report['epoch']}, batch "
        f"{report['batch']} (step {report['step']}); the weights are those before this step.",
        bad and f"{len(bad)} of {report['samples']} samples are bad{where}.",
        report["input_bad_samples"]
        and "The images themselves hold NaN or infinity after augmentation.",
        *layers,
        first and f"The first non-finite output is that of {first['module']!r} ({first['kind']}).",
        gradients and f"Gradients are not finite in {gradients}.",
        "What helps: a lower lr, a clip such as 1.0, a longer warmup, the precision 32-true, or a "
        "tighter norm bound on the layers.",
    ]
    return " ".join(line for line in lines if line)
