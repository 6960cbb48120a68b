"""The adversary that every reading has: hill climbing on the numbers that a random trial draws.

A trial is a function of what it draws: ratio(ω), ω = (normals, uniforms, integers). ``Tape`` keeps
ω and plays it back changed, so a trial need not know that it is being pushed. From the random
trials with the largest ratios

    ω′ = ω + sξ,  kept iff ratio(ω′) ≥ ratio(ω),  s ← 1.6s where it is kept, 0.85s where not:

normals move in [−6, 6], uniforms in [0, 1] (reflected), and now and then an integer is drawn anew,
with whatever hangs on it. Draws of more than ``SAMPLES`` numbers are samples of an average, not
parameters: they are new in every trial, so that the search cannot fit their noise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .claim import Draw, Trial
from .records import badness
from .solving import Unsolved

__all__ = ["SAMPLES", "Drawn", "Tape", "climb_draws"]

SAMPLES = 256
REACH = 6.0  # of a normal: beyond, trials would be at scales that no claim's draw is meant for
_KINDS: dict[Any, str] = {torch.rand: "uniform", torch.randn: "normal", torch.randint: "integer"}


class Drawn(NamedTuple):
    """What one call for random numbers gave: its kind, its positional arguments, the numbers."""

    kind: str
    given: tuple[Any, ...]
    value: Tensor


class Tape(TorchFunctionMode):
    """While it is on, draws from ``draw`` are kept in ``made``; those in ``known`` are played back.

    A draw is played back where it is the same call as the one known at its place; else it is new,
    as it is where None is known.
    """

    def __init__(self, draw: torch.Generator, known: Sequence[Drawn | None] = ()) -> None:
        super().__init__()
        self.draw, self.known = draw, known
        self.made: list[Drawn] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if kwargs.get("generator") is not self.draw or func not in _KINDS:
            return found
        made = Drawn(_KINDS[func], args, found)
        place = len(self.made)
        old = self.known[place] if place < len(self.known) else None
        if old is not None and old[:2] == made[:2] and found.numel() <= SAMPLES:
            made = old
        self.made.append(made)
        return made.value.clone()


def climb_draws(
    random: Draw, start: torch.Generator, moves: torch.Generator, count: int
) -> Iterator[Trial | None]:
    """``count`` trials, each a move from the worst before it, from the trial that ``start`` draws.

    None where a move leaves the premise, or where no equilibrium is found. Nothing where the trial
    draws no continuous parameter.
    """
    with Tape(start) as tape:
        best = random(start)
    kept, size = tape.made, 0.3
    if best is None or not any(map(_continuous, kept)):
        return
    for _ in range(count):
        with Tape(moves, _moved(kept, size, moves)) as tape:
            trial = _tried(random, moves)
        yield trial
        if trial is not None and badness(trial.ratio) >= badness(best.ratio):
            best, kept, size = trial, tape.made, min(1.0, 1.6 * size)
        else:
            size = max(1e-4, 0.85 * size)


def _tried(random: Draw, moves: torch.Generator) -> Trial | None:
    try:
        return random(moves)
    except (Unsolved, torch.linalg.LinAlgError):  # type: ignore[attr-defined]
        return None  # a draw that no random trial makes may be beyond the trial's own solvers


def _continuous(drawn: Drawn) -> bool:
    return drawn.kind != "integer" and 0 < drawn.value.numel() <= SAMPLES


def _moved(kept: Sequence[Drawn], size: float, moves: torch.Generator) -> list[Drawn | None]:
    """All continuous draws moved, or one of them, or one integer left to be drawn anew."""
    moved: list[Drawn | None] = list(kept)
    which = float(torch.rand((), generator=moves))
    integers = [i for i, drawn in enumerate(kept) if drawn.kind == "integer"]
    if which > 0.92 and integers:
        moved[_one_of(integers, moves)] = None
        return moved
    places = [i for i, drawn in enumerate(kept) if _continuous(drawn)]
    for place in places if which < 0.5 else [_one_of(places, moves)]:
        moved[place] = _pushed(kept[place], size, moves)
    return moved


def _one_of(places: Sequence[int], moves: torch.Generator) -> int:
    return places[int(torch.randint(len(places), (), generator=moves))]


def _pushed(drawn: Drawn, size: float, moves: torch.Generator) -> Drawn:
    old = drawn.value
    step = size * torch.randn(old.shape, generator=moves, dtype=old.dtype)
    if drawn.kind == "normal":
        return drawn._replace(value=(old + step).clamp(-REACH, REACH))
    inside = 1.0 - (1.0 - (old + 0.5 * step).abs()).abs()
    return drawn._replace(value=inside.clamp(0.0, 1.0 - torch.finfo(old.dtype).eps))
