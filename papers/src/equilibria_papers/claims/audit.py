"""Running an audit: random trials, adversarial ones, then hill climbing, each under a clock.

Hill climbing starts from the random trials with the largest ratios; a reading that is already
violated is left as it is. The clock counts processor time, so that other work on the machine does
not make it a smaller audit.

Random trial i of a reading is drawn from a generator seeded by (seed, claim, reading, i) alone, so
``rerun`` repeats a counterexample without the trials before it, and a slower machine makes fewer of
the same trials.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .claim import (
    Claim,
    Draw,
    Outcome,
    Record,
    Settings,
    Source,
    Trial,
    Variant,
    Worst,
    plain,
    read_records,
    write_records,
)
from .numerics import Unsolved

# The adversary that every reading has: hill climbing on the numbers that a random trial draws.
#
# A trial is a function of what it draws: ratio(ω), ω = (normals, uniforms, integers). ``Tape``
# keeps ω and plays it back changed, so a trial need not know that it is being pushed. From the
# random trials with the largest ratios
#
#     ω′ = ω + sξ,  kept iff ratio(ω′) ≥ ratio(ω),  s ← 1.6s where it is kept, 0.85s where not:
#
# normals move in [−6, 6], uniforms in [0, 1] (reflected), and now and then an integer is drawn
# anew, with whatever hangs on it. Draws of more than ``SAMPLES`` numbers are samples of an average,
# not parameters: they are new in every trial, so that the search cannot fit their noise.


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


def badness(ratio: float) -> float:
    """The ratio, where not a number is as bad as can be."""
    return math.inf if math.isnan(ratio) else ratio


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
            try:
                trial = random(moves)
            except (Unsolved, torch.linalg.LinAlgError):  # type: ignore[attr-defined]
                trial = None  # a draw that no random trial makes may be beyond its own solvers
        yield trial
        if trial is not None and badness(trial.ratio) >= badness(best.ratio):
            best, kept, size = trial, tape.made, min(1.0, 1.6 * size)
        else:
            size = max(1e-4, 0.85 * size)


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


STARTS = 3
"""How many random trials hill climbing starts from."""

Progress = Callable[[Claim, str, int, int], None]
"""Called with a claim, a reading's name, and trials done of how many."""


def generator_for(seed: int, *names: object) -> torch.Generator:
    """A generator whose stream depends on the seed and the names, and on nothing else."""
    text = "\x1f".join(map(str, (seed, *names)))
    digest = hashlib.sha256(text.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


@dataclass
class _Count:
    """What is counted while the trials of one reading run."""

    tolerance: float
    counts: Counter[Source] = field(default_factory=Counter)
    vacuous: int = 0
    violations: int = 0
    worst: Worst | None = None
    ranked: list[tuple[float, int]] = field(default_factory=list)

    def add(
        self, source: Source, index: int, trial: Trial | None, start: int | None = None
    ) -> None:
        if trial is None:
            self.vacuous += 1
            return
        new, old = badness(trial.ratio), -1.0 if self.worst is None else badness(self.worst.ratio)
        self.counts[source] += 1
        if source == "random":
            self.ranked.append((new, -index))
        self.violations += not new <= 1.0 + self.tolerance
        # Of equally bad trials (infinite ratios) the one with fewer numbers.
        if new > old or (new == old and math.isinf(new)):
            ratio, case = float(trial.ratio), plain(trial.case)
            found = Worst(source=source, index=index, ratio=ratio, case=case, start=start)
            if self.worst is None or new > old or len(str(case)) < len(str(self.worst.case)):
                self.worst = found

    def starts(self) -> list[int]:
        """The random trials with the largest ratios, the earlier of equals first."""
        return [-place for _, place in sorted(self.ranked, reverse=True)[:STARTS]]


def _trials(
    claim: Claim, variant: Variant, seed: int, source: Source, first: int = 0, count: int = 0
) -> Iterator[tuple[int, Trial | None]]:
    """(index, trial) of one source: random ones from ``first`` on, or a climb that starts there.

    Adversarial trials share one stream, so none can be jumped over. An error names its trial.
    """
    stream = partial(generator_for, seed, claim.id, variant.name)
    made: Iterator[Trial | None] = iter(())
    if source == "random":
        made = (variant.random(stream(index)) for index in range(first, first + count))
    elif source == "climb":
        made = climb_draws(variant.random, stream(first), stream("climb", first), count)
    elif variant.adversarial is not None:
        made = iter(variant.adversarial(stream("adversarial")))
    index = first if source == "random" else 0
    while True:
        try:
            trial = next(made)
        except StopIteration:
            return
        except Exception as error:
            error.add_note(f"in the audit of {claim.id}, reading {variant.name!r}, trial {index}")
            raise
        yield index, trial
        index += 1


def rerun(claim: Claim, reading: str, worst: Worst, settings: Settings) -> Trial | None:
    """The trial that ``worst`` names, made again."""
    variant = next((v for v in claim.variants if v.name == reading), None)
    if variant is None:
        names = [v.name for v in claim.variants]
        raise ValueError(f"{claim.id} has no reading {reading!r}; it has {names}.")
    first = worst.index if worst.source == "random" else worst.start or 0
    made = _trials(claim, variant, settings.seed, worst.source, first, worst.index + 1)
    for index, trial in made:
        if index == worst.index:
            return trial
    raise ValueError(f"{claim.id}, {reading}: there is no {worst.source} trial {worst.index}.")


def run_claim(claim: Claim, settings: Settings, progress: Progress = lambda *_: None) -> Record:
    """All readings of one claim.

    A reading has ``settings.seconds`` for its ``trials / variant.cost`` random trials, as many for
    its adversarial ones, and a fifth of them for climbing, with ``trials / 5`` moves at most.
    """
    return Record(
        id=claim.id,
        paper=claim.paper,
        where=claim.where,
        statement=claim.statement,
        note=claim.note,
        outcomes=tuple(_run_variant(claim, v, settings, progress) for v in claim.variants),
        settings=settings,
    )


def _run_variant(claim: Claim, variant: Variant, settings: Settings, progress: Progress) -> Outcome:
    seen, begin = _Count(variant.tolerance), time.process_time()
    wanted = max(1, round(settings.trials / variant.cost))
    progress(claim, variant.name, 0, wanted)

    def run(source: Source, share: float, first: int = 0, count: int = 0) -> None:
        """Trials of one source, for this share of the seconds."""
        since = time.process_time()
        for index, trial in _trials(claim, variant, settings.seed, source, first, count):
            seen.add(source, index, trial, first if source == "climb" else None)
            progress(claim, variant.name, index + 1 if source == "random" else wanted, wanted)
            if time.process_time() - since > share * settings.seconds:
                break

    run("random", 1.0, count=wanted)
    run("adversarial", 1.0)
    if variant.climbs and not seen.violations:
        starts = seen.starts()
        for start in starts:  # each has an equal part of the moves and of the clock
            parts = 5 * len(starts)
            run("climb", 1.0 / parts, start, math.ceil(settings.trials / parts))
    return Outcome(
        name=variant.name,
        needs=variant.needs,
        tolerance=variant.tolerance,
        random=seen.counts["random"],
        adversarial=seen.counts["adversarial"] + seen.counts["climb"],
        vacuous=seen.vacuous,
        violations=seen.violations,
        worst=seen.worst,
        seconds=round(time.process_time() - begin, 3),
        climbs=seen.counts["climb"],
        proof=variant.proof,
    )


def run_audit(
    claims: Sequence[Claim],
    settings: Settings | None = None,
    *,
    out: Path | None = None,
    fresh: bool = False,
    progress: Progress = lambda *_: None,
) -> list[Record]:
    """Every claim in order; one record each.

    Args:
        claims: from ``load_claims``.
        settings: trials and seconds per reading, seed.
        out: a JSON file, rewritten after every claim. Claims that it holds under the same settings
            are not run again; other claims in it are kept.
        fresh: run them again all the same.
        progress: see ``Progress``.
    """
    settings = Settings() if settings is None else settings
    kept = {r.id: r for r in read_records(out)} if out is not None and out.exists() else {}
    about = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    found = []
    for claim in claims:
        known = kept.get(claim.id)
        if fresh or known is None or not known.answers(claim, settings):
            known = run_claim(claim, settings, progress)
            kept[claim.id] = known
            if out is not None:
                write_records(out, kept.values(), about=about)
        found.append(known)
    return found
