"""Try suggestions: the changed model beside the one as it is, in turn, in one run."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.evaluation.running import progress_bar

from .ideas import Idea
from .measuring import Run, Spread, race
from .probes import edited, relative_change
from .workload import Workload, plain_model

__all__ = ["try_all"]


def try_all(
    model: nn.Module,
    x: Tensor,
    y: Any,
    settings: dict[str, Any],
    ideas: list[Idea],
    kind: str,
    repeats: int,
    progress: bool,
) -> list[Idea]:
    """The ideas with measured gains, the largest first; what cannot be tried stays as it is."""
    with progress_bar(len(ideas), "trying", progress) as advance:
        found = []
        for idea in ideas:
            tried = _try(model, x, y, settings, idea, kind, repeats) if idea.can_be_tried else idea
            found.append(tried)
            advance()
    return sorted(found, key=lambda i: -(i.said.measured or i.said.predicted or 1.0))


def _try(
    model: nn.Module,
    x: Tensor,
    y: Any,
    settings: dict[str, Any],
    idea: Idea,
    kind: str,
    repeats: int,
) -> Idea:
    """Both train (or infer) in turn; a change that fails says why and costs nothing else."""
    base = Workload.of(model, x, y, **settings)
    try:
        changed = edited(plain_model(model), idea.edit)
        other = Workload.of(changed, x, y, **{**settings, **idea.settings})
        change = relative_change(other.answer(), base.answer())
        runs: dict[str, Run] = {"base": _run(base, kind), "other": _run(other, kind)}
        train = kind == "train"
        with base.mode(train=train), other.mode(train=train):
            for _ in range(2):
                for run in runs.values():
                    run()
            seconds = race(runs, x.device, max(repeats, 3))
    except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            torch.cuda.empty_cache()
        note = f"could not be tried: {str(error).splitlines()[0][:200]}"
        return dataclasses.replace(idea, said=dataclasses.replace(idea.said, note=note))
    gain = Spread.of(seconds["base"]).median / Spread.of(seconds["other"]).median
    said = dataclasses.replace(idea.said, measured=gain, change=change)
    return dataclasses.replace(idea, said=said)


def _run(work: Workload, kind: str) -> Run:
    """A pass as the settings have it: compiled where that was asked for."""
    whole = work.step if kind == "train" else work.infer
    return functools.partial(whole, eager=work.called is work.model)
