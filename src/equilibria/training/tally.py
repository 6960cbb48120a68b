"""Sums over the steps of an epoch, kept on the device and read now and then."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .watching import SOLVER_FIELDS

__all__ = ["Tally"]

_SUMS = ("loss", "right", "count", "penalty", "steps")


class Tally:
    """Running sums of loss, right answers and samples; means of solver statistics.

    ``add`` only notes tensors; ``sums`` puts them together in one transfer. Sums are taken in
    float64 on the host, sample by sample weight, so that their value does not depend on how often
    they were read.
    """

    def __init__(self) -> None:
        self.total = dict.fromkeys(_SUMS, 0.0)
        self.solver = dict.fromkeys(SOLVER_FIELDS, 0.0)
        self.solver_counts = dict.fromkeys(SOLVER_FIELDS, 0)
        self.grad_norm = math.nan
        self._pending: list[tuple[Tensor, Tensor, Tensor | int, Tensor | None]] = []
        self._pending_solver: list[Tensor] = []
        self._norm: Tensor | None = None

    def add(
        self, loss: Tensor, right: Tensor, count: Tensor | int, penalty: Tensor | None = None
    ) -> None:
        """A step: mean loss, number of right answers, of how many, penalty on the Jacobian."""
        self._pending.append((loss, right, count, penalty))

    def add_solver(self, numbers: Tensor | None) -> None:
        """``SOLVER_FIELDS`` of a step, [4]."""
        if numbers is not None:
            self._pending_solver.append(numbers)

    def add_norm(self, norm: Tensor | None) -> None:
        """The norm of the gradient of a step; the latest is kept."""
        self._norm = norm

    def read(self) -> None:
        """Bring what is pending to the host: one wait for the device."""
        rows = self._pending
        if not rows:
            return
        device = rows[0][0].device
        wide = torch.float32 if device.type == "mps" else torch.float64
        zero = torch.zeros((), dtype=wide, device=device)

        def column(items: list[Any]) -> Tensor:
            if isinstance(items[0], Tensor):
                return torch.stack([item.to(wide) for item in items])
            return torch.tensor(items, dtype=wide, device=device)

        more = [column([row[k] for row in rows]) for k in range(3)]
        more.append(column([zero if row[3] is None else row[3] for row in rows]))
        more += [numbers.to(wide) for numbers in self._pending_solver]
        more.append((zero if self._norm is None else self._norm.to(wide)).view(1))
        values: list[float] = torch.cat(more).tolist()
        count = len(rows)
        for k in range(count):
            loss, right, seen, penalty = (values[k + at * count] for at in range(4))
            self.total["loss"] += loss * seen
            self.total["penalty"] += penalty * seen
            self.total["right"] += right
            self.total["count"] += seen
            self.total["steps"] += 1
        rest = values[4 * count :]
        for k in range(len(self._pending_solver)):
            for name, value in zip(SOLVER_FIELDS, rest[4 * k : 4 * k + 4], strict=True):
                if math.isfinite(value):
                    self.solver[name] += value
                    self.solver_counts[name] += 1
        self.grad_norm = math.nan if self._norm is None else values[-1]
        self._pending.clear()
        self._pending_solver.clear()

    def means(self, since: dict[str, float] | None = None) -> dict[str, float]:
        """Loss and accuracy since ``since`` (an earlier ``total``, copied) or since the start."""
        before = since or dict.fromkeys(_SUMS, 0.0)
        count = self.total["count"] - before["count"]
        if count == 0.0:
            return {"loss": math.nan, "accuracy": math.nan}
        return {
            "loss": (self.total["loss"] - before["loss"]) / count,
            "accuracy": (self.total["right"] - before["right"]) / count,
        }

    def solver_means(self) -> dict[str, float]:
        """``SOLVER_FIELDS`` over the steps that were watched; those that none had are left out."""
        return {
            name: self.solver[name] / self.solver_counts[name]
            for name in SOLVER_FIELDS
            if self.solver_counts[name]
        }

    def reduce(self, device: torch.device) -> None:
        """Add the sums of all processes."""
        groups: tuple[dict[str, Any], ...] = (self.total, self.solver, self.solver_counts)
        values = [value for group in groups for value in group.values()]
        wide = torch.float32 if device.type == "mps" else torch.float64
        summed = torch.tensor(values, dtype=wide, device=device)
        torch.distributed.all_reduce(summed)
        found = iter(summed.tolist())
        for group in groups:
            for name in group:
                group[name] = next(found)

    def state_dict(self) -> dict[str, Any]:
        self.read()
        return {
            "total": dict(self.total),
            "solver": dict(self.solver),
            "solver_counts": dict(self.solver_counts),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total = dict(state["total"])
        self.solver = dict(state["solver"])
        self.solver_counts = dict(state["solver_counts"])
