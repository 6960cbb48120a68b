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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .claim import Claim, Trial, Variant
from .climbing import climb_draws
from .records import (
    Outcome,
    Record,
    Settings,
    Source,
    Worst,
    badness,
    read_records,
    worst_of,
    write_records,
)

__all__ = ["Progress", "rerun", "run_audit", "run_claim"]

STARTS = 3
"""How many random trials hill climbing starts from."""

Progress = Callable[[Claim, str, int, int], None]
"""Called with a claim, a reading's name, and trials done of how many."""


def _silent(claim: Claim, reading: str, done: int, total: int) -> None:
    """No progress is shown."""


def generator_for(seed: int, *names: object) -> torch.Generator:
    """A generator whose stream depends on the seed and the names, and on nothing else."""
    text = "\x1f".join(map(str, (seed, *names)))
    digest = hashlib.sha256(text.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


@dataclass
class _Tally:
    """What is counted while the trials of one reading run."""

    tolerance: float
    counts: dict[Source, int] = field(
        default_factory=lambda: {"random": 0, "adversarial": 0, "climb": 0}
    )
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
        self.counts[source] += 1
        if source == "random":
            self.ranked.append((badness(trial.ratio), -index))
        self.violations += not badness(trial.ratio) <= 1.0 + self.tolerance
        new, old = badness(trial.ratio), -1.0 if self.worst is None else badness(self.worst.ratio)
        # Of equally bad trials (infinite ratios) the one that is told in fewer numbers.
        if new > old or (new == old and math.isinf(new)):
            found = worst_of(source, index, trial, start)
            if self.worst is None or new > old or _length(found) < _length(self.worst):
                self.worst = found

    def starts(self) -> list[int]:
        """The random trials with the largest ratios, the earlier of equals first."""
        return [-place for _, place in sorted(self.ranked, reverse=True)[:STARTS]]


def _length(worst: Worst) -> int:
    return len(str(worst.case))


def rerun(claim: Claim, reading: str, worst: Worst, settings: Settings) -> Trial | None:
    """The trial that ``worst`` names, made again."""
    variant = next((v for v in claim.variants if v.name == reading), None)
    if variant is None:
        names = [v.name for v in claim.variants]
        raise ValueError(f"{claim.id} has no reading {reading!r}; it has {names}.")
    for index, trial in _again(claim, variant, worst, settings.seed):
        if index == worst.index:
            return trial
    raise ValueError(f"{claim.id}, {reading}: there is no {worst.source} trial {worst.index}.")


def _again(
    claim: Claim, variant: Variant, worst: Worst, seed: int
) -> Iterator[tuple[int, Trial | None]]:
    if worst.source == "random":
        return _random(claim, variant, seed, start=worst.index)
    if worst.source == "adversarial":
        return _adversarial(claim, variant, seed)
    return _climb(claim, variant, seed, worst.start or 0, worst.index + 1)


def _random(
    claim: Claim, variant: Variant, seed: int, start: int = 0
) -> Iterator[tuple[int, Trial | None]]:
    index = start
    while True:
        draw = generator_for(seed, claim.id, variant.name, index)
        yield index, _guarded(claim, variant, index, lambda draw=draw: variant.random(draw))  # type: ignore[misc]
        index += 1


def _adversarial(claim: Claim, variant: Variant, seed: int) -> Iterator[tuple[int, Trial | None]]:
    """All adversarial trials in order: they share one stream, so none can be jumped over."""
    if variant.adversarial is None:
        return
    trials = iter(variant.adversarial(generator_for(seed, claim.id, variant.name, "adversarial")))
    yield from _numbered(claim, variant, trials)


def _climb(
    claim: Claim, variant: Variant, seed: int, start: int, count: int
) -> Iterator[tuple[int, Trial | None]]:
    """Moves from random trial ``start``: a stream of its own for every start."""
    trials = climb_draws(
        variant.random,
        generator_for(seed, claim.id, variant.name, start),
        generator_for(seed, claim.id, variant.name, "climb", start),
        count,
    )
    yield from _numbered(claim, variant, trials)


def _numbered(
    claim: Claim, variant: Variant, trials: Iterator[Trial | None]
) -> Iterator[tuple[int, Trial | None]]:
    index, end = 0, object()
    while True:
        trial = _guarded(claim, variant, index, lambda: next(trials, end))
        if trial is end:
            return
        yield index, trial
        index += 1


def _guarded(claim: Claim, variant: Variant, index: int, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except Exception as error:
        error.add_note(f"in the audit of {claim.id}, reading {variant.name!r}, trial {index}")
        raise


def run_claim(claim: Claim, settings: Settings, progress: Progress = _silent) -> Record:
    """All readings of one claim.

    A reading has ``settings.seconds`` for its ``trials / variant.cost`` random trials, as many for
    its adversarial ones, and a fifth of them for climbing, with ``trials / 5`` moves at most.
    """
    outcomes = tuple(_run_variant(claim, v, settings, progress) for v in claim.variants)
    return Record(
        id=claim.id,
        paper=claim.paper,
        where=claim.where,
        statement=claim.statement,
        note=claim.note,
        outcomes=outcomes,
        settings=settings,
    )


def _run_variant(claim: Claim, variant: Variant, settings: Settings, progress: Progress) -> Outcome:
    tally, begin = _Tally(variant.tolerance), time.process_time()
    wanted = max(1, round(settings.trials / variant.cost))
    progress(claim, variant.name, 0, wanted)
    for index, trial in _random(claim, variant, settings.seed):
        tally.add("random", index, trial)
        progress(claim, variant.name, index + 1, wanted)
        if index + 1 >= wanted or time.process_time() - begin > settings.seconds:
            break
    middle = time.process_time()
    for index, trial in _adversarial(claim, variant, settings.seed):
        tally.add("adversarial", index, trial)
        progress(claim, variant.name, wanted, wanted)
        if time.process_time() - middle > settings.seconds:
            break
    if variant.climbs and not tally.violations:
        _climb_all(claim, variant, settings, tally)
    return Outcome(
        name=variant.name,
        needs=variant.needs,
        tolerance=variant.tolerance,
        random=tally.counts["random"],
        adversarial=tally.counts["adversarial"] + tally.counts["climb"],
        vacuous=tally.vacuous,
        violations=tally.violations,
        worst=tally.worst,
        seconds=round(time.process_time() - begin, 3),
        climbs=tally.counts["climb"],
        proof=variant.proof,
    )


def _climb_all(claim: Claim, variant: Variant, settings: Settings, tally: _Tally) -> None:
    """From each start an equal part of the moves and of the clock."""
    starts = tally.starts()
    for start in starts:
        begin = time.process_time()
        count = math.ceil(settings.trials / (5 * len(starts)))
        for index, trial in _climb(claim, variant, settings.seed, start, count):
            tally.add("climb", index, trial, start)
            if time.process_time() - begin > settings.seconds / (5 * len(starts)):
                break


def run_audit(
    claims: Sequence[Claim],
    settings: Settings | None = None,
    *,
    out: Path | None = None,
    fresh: bool = False,
    progress: Progress = _silent,
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
