"""Loss, accuracy and solver statistics of an epoch: summed on the device, read now and then."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from equilibria.adjoints.graph import blown_up
from equilibria.engine.result import ConvergenceWarning
from equilibria.nn import Observed

SOLVER_FIELDS = ("solver_steps", "residual", "converged", "failed")
"""Means over samples and layers: evaluations of the map; ‖T(z) − z‖/‖T(z)‖; the share that passed
its tolerance (NaN where every layer runs a fixed number of steps and so tests none); the share that
diverged or met NaN."""

UNSETTLED = 0.1
"""A relative residual above which a state is not near its equilibrium."""


class EpochMetrics:
    """Sums over the steps of an epoch, in float64.

    Ours and not Lightning's ``log``: the sums are in the checkpoint, so that an epoch that was
    resumed in its middle has the same row, bit for bit.
    """

    def __init__(self) -> None:
        # Loss times samples, right answers, samples; then the solver's numbers and their counts.
        self._sums = torch.zeros(11, dtype=torch.float64)
        self._window = [0.0] * 11
        # Of this process since it began the epoch; of maps the labels count pixels, not images.
        self._images = self._window_images = 0
        self._began = self._window_began = time.perf_counter()
        self._earlier = 0.0  # seconds of the epoch before it was resumed
        self._stepped: float | None = None  # when its steps were done
        self._added = False
        self.gradient_norm: Tensor | None = None
        """Of the latest step."""

    def add(self, loss: Tensor, right: Tensor, count: Tensor, images: int) -> None:
        """A step: mean loss, number of right answers, of how many labels, in how many images. Does
        not wait for the device."""
        sums = self._on(loss.device)
        self._images += images
        row = (loss.to(sums.dtype) * count, right, count)
        sums[:3] += torch.stack([value.to(sums.dtype) for value in row])

    def add_solver(self, numbers: Tensor | None) -> None:
        """``SOLVER_FIELDS`` of a step, [4]; what is not finite does not count."""
        if numbers is not None:
            sums, found = self._on(numbers.device), torch.isfinite(numbers)
            sums[3:] += torch.cat([torch.where(found, numbers, 0.0), found]).to(sums.dtype)

    def _on(self, device: torch.device) -> Tensor:
        self._added = True
        wide = torch.float32 if device.type == "mps" else torch.float64
        self._sums = self._sums.to(device, wide, non_blocking=True)
        return self._sums

    def latest(self) -> dict[str, float]:
        """Loss, accuracy, speed since the last call, solver means of the epoch. Waits."""
        now, before = self._sums.tolist(), self._window
        clock, began = time.perf_counter(), self._window_began
        rate = (self._images - self._window_images) / max(clock - began, 1e-9)
        self._window, self._window_began, self._window_images = now, clock, self._images
        return {**_means(now, before), "samples_per_second": rate}

    def row(self) -> dict[str, float]:
        """Means over the epoch, as the history has them."""
        return _means(self._sums.tolist(), [0.0] * 11)

    def end_steps(self) -> None:
        """The steps of the epoch are done; what comes now is validation. Waits."""
        self._sums.tolist()
        self._stepped = time.perf_counter()

    def speed(self) -> dict[str, float]:
        """Seconds of the epoch; images per second of its steps since it began or was resumed, where
        there were any."""
        now = time.perf_counter()
        rate = self._images / ((self._stepped or now) - self._began)
        speed = {"seconds": round(self._earlier + now - self._began, 3)}
        return speed | ({"images_per_second": round(rate, 1)} if self._images else {})

    def reduce(self, device: torch.device) -> None:
        self._sums = self._sums.to(device)
        torch.distributed.all_reduce(self._sums)
        images = torch.tensor(self._images, device=device)
        torch.distributed.all_reduce(images)
        self._images = int(images)

    def state_dict(self) -> dict[str, Any]:
        """The sums, of all processes together: each takes part, also one whose labels so far do not
        count, and none before the first step."""
        sums = self._sums.clone()
        several = torch.distributed.is_available() and torch.distributed.is_initialized()
        if several and self._added:
            torch.distributed.all_reduce(sums)
        seconds = self._earlier + time.perf_counter() - self._began
        return {"sums": sums.tolist(), "seconds": seconds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._window = list(state["sums"])
        self._sums = torch.tensor(self._window, dtype=torch.float64)
        self._earlier = float(state.get("seconds", 0.0))


def _means(now: list[float], before: list[float]) -> dict[str, float]:
    count = now[2] - before[2]
    found = {
        "loss": (now[0] - before[0]) / count if count else math.nan,
        "accuracy": (now[1] - before[1]) / count if count else math.nan,
    }
    solver = zip(SOLVER_FIELDS, now[3:7], now[7:], strict=True)
    return found | {name: total / steps for name, total, steps in solver if steps}


@torch.no_grad()
def solver_numbers(seen: Observed) -> Tensor | None:
    """The four numbers of ``SOLVER_FIELDS``, [4], on the device; None where no solve was seen."""
    if not len(seen):
        return None
    steps, relative, failed, tested = [], [], [], []
    for solutions in seen.solutions.values():
        for solution in solutions:
            steps.append(solution.stats.steps.flatten().float())
            relative.append(solution.stats.relative.flatten().float())
            failed.append(blown_up(solution.result).flatten().float())
            # A MultiBranch has a solve for each branch. A fixed number of steps tests nothing.
            parts = getattr(solution, "parts", (solution,))
            tested += [part.converged.flatten().float() for part in parts if part.stats.syncs]
    residual = torch.cat(relative)
    residual = torch.where(torch.isfinite(residual), residual, math.nan)
    share = torch.cat(tested).mean() if tested else residual.new_full((), math.nan)
    return torch.stack(
        [torch.cat(steps).mean(), residual.nanmean(), share, torch.cat(failed).mean()]
    )


def warn_unsettled(row: Mapping[str, Any]) -> None:
    """Warn where fixed steps end far from the equilibrium; a missed tolerance warns itself."""
    residual = float(row.get("residual", math.nan))
    if residual > UNSETTLED and math.isnan(row.get("converged", math.nan)):
        count = f"{row['solver_steps']:.3g}"
        warnings.warn(
            "the layers are not at their equilibrium: the last of "
            f"{count} step{'' if count == '1' else 's'} still moved the state by {residual:.2g} of "
            "its size. What was trained are these steps. Raise max_steps of the solver, or try "
            "another: Picard(), Anderson().",
            ConvergenceWarning,
            stacklevel=2,
        )
