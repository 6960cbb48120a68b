"""One job: trained or taken up where it was left, measured once, and remembered in its folder."""

from __future__ import annotations

import csv
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import safetensors.torch
import torch
from torch import nn

from equilibria import training
from equilibria.engine import write_json
from equilibria.training import Run, TrainConfig

from .images import Supplied, supply
from .measures import MEASURES, Scene
from .plan import Choices, Planned
from .provenance import Log, made_by
from .results import in_json
from .thesis import NETWORKS, create

_FILE = "measured.json"


@dataclass(frozen=True)
class Stop:
    """When trainings end before their end, in this process or in a worker."""

    until: float | None = None
    """A time of ``time.time()``: other clocks need not agree between processes."""
    file: Path | None = None  # Where it exists, a stop is asked for
    parent: int | None = None  # The process that waits for this one: where it is gone, nobody does

    def late(self) -> bool:
        return self.until is not None and time.time() >= self.until

    def orphaned(self) -> bool:
        return self.parent not in (None, os.getpid(), os.getppid())

    def asked(self) -> bool:
        return self.late() or self.orphaned() or (self.file is not None and self.file.exists())


class StopWhenAsked(pl.Callback):
    """Stops a training as Ctrl-C does, after a step: everything is saved, and can go on.

    It asks the run. A signal would go to the main thread, whichever thread trains.
    """

    def __init__(self, stop: Stop) -> None:
        super().__init__()
        self.stop = stop

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        if self.stop.asked():
            callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
            run = next((one for one in callbacks if isinstance(one, Run)), None)
            if run is None:
                raise RuntimeError("StopWhenAsked belongs to runs of equilibria.training.fit.")
            run.request.asked = True


@dataclass(frozen=True)
class Outcome:
    """What a job gave."""

    values: dict[str, float]
    seconds: float  # Of training and measuring, over all calls that it took
    made_by: dict[str, Any]


def chosen_device(name: str | None) -> torch.device:
    """The device asked for; a GPU where there is one."""
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def remembered(planned: Planned, *, part: bool = False) -> Outcome | None:
    """What was measured of this job before, if all that is asked for was; or ``part`` of it."""
    kept = _read(planned.folder)
    there = [name for name in planned.job.measures if name in kept["measures"]]
    if not there if part else len(there) < len(planned.job.measures):
        return None
    values: dict[str, float] = {}
    for name in there:
        # What is not finite is kept as text: JSON has no word for it.
        values |= {metric: float(value) for metric, value in kept["measures"][name].items()}
    return Outcome(values, float(kept["seconds"]), kept["made_by"])


def complete(planned: Planned) -> bool:
    """Whether nothing is left to do: all is measured, or nothing is asked for but to train."""
    if planned.job.measures:
        return remembered(planned) is not None
    return not planned.job.trained or is_trained(planned.folder)


def is_trained(folder: Path) -> bool:
    """Whether the folder holds the weights of a complete training."""
    return all((folder / name).exists() for name in ("model.safetensors", "result.json"))


def run_job(planned: Planned, choices: Choices, log: Log, *, stop: Stop | None = None) -> Outcome:
    """Train (or go on, or load), measure what was not measured yet, and say what came out.

    The test images are looked at when the training is over, and once: a measure that is in the
    folder is not made again. Failures are logged and raised.
    """
    found = remembered(planned)
    if found is not None and complete(planned):
        return found
    began = time.perf_counter()
    try:
        images = supply(planned, progress=choices.progress)
        model = _network(planned, images, choices, stop)
        _measure_all(planned, choices, model, images)
    except KeyboardInterrupt:
        log.add(planned, "interrupted", time.perf_counter() - began)
        raise
    except Exception as error:
        spent = time.perf_counter() - began
        log.add(planned, "failed", spent, error=f"{type(error).__name__}: {error}"[:500])
        raise
    found = remembered(planned)
    assert found is not None
    made = found.made_by or made_by(chosen_device(choices.device))
    where = {name: made[name] for name in ("commit", "device", "command")}
    log.add(planned, "done", time.perf_counter() - began, found.values, **where)
    return found


def _read(folder: Path) -> dict[str, Any]:
    """What was measured; nothing where the file is damaged: it is then measured anew."""
    empty = {"measures": {}, "seconds": 0.0, "made_by": {}}
    try:
        found = json.loads((folder / _FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return empty
    return {**empty, **found} if isinstance(found, dict) else empty


def _measure_all(planned: Planned, choices: Choices, model: nn.Module, images: Supplied) -> None:
    """Each measure is written as soon as it is made: a later one that fails takes none along."""
    device = chosen_device(choices.device)
    config = planned.config
    scene = Scene(
        model=model.to(device).eval(),
        folder=planned.folder,
        device=device,
        batch_size=min(512, max(16, 2 * config.batch_size)),
        train_batch=config.batch_size,
        precision=config.precision,
        seed=planned.seed,
        progress=choices.progress,
        smoke=planned.smoke,
        epochs=config.epochs,
        **vars(images),
    )
    planned.folder.mkdir(parents=True, exist_ok=True)
    for name in planned.job.measures:
        kept = _read(planned.folder)
        if name in kept["measures"]:
            continue
        began, at = time.perf_counter(), time.time()
        values = MEASURES[name](scene)
        kept["measures"][name] = {metric: in_json(value) for metric, value in values.items()}
        spent = time.perf_counter() - began
        # When it was made, in seconds of Unix time: shows what ran beside it.
        kept.setdefault("intervals", {})[name] = [round(at, 3), round(at + spent, 3)]
        kept["seconds"] = round((kept["seconds"] or _training_seconds(planned)) + spent, 1)
        kept["made_by"] = made_by(device)
        kept["settings"] = config.with_overrides(out=None, data_root=None).to_dict()
        write_json(planned.folder / _FILE, kept)


def _training_seconds(planned: Planned) -> float:
    """Of all epochs, also those before an interruption."""
    history = planned.folder / "history.csv"
    if not history.exists():
        return 0.0
    with history.open(encoding="utf-8") as file:
        return sum(float(row["seconds"]) for row in csv.DictReader(file) if row.get("seconds"))


def _network(planned: Planned, images: Supplied, choices: Choices, stop: Stop | None) -> nn.Module:
    config = planned.config
    if not planned.job.trained:
        torch.manual_seed(planned.seed)
        return create(config.model, images.train, **config.model_options)
    if is_trained(planned.folder):
        model = create(config.model, images.train, **config.model_options)
        model.load_state_dict(safetensors.torch.load_file(planned.folder / "model.safetensors"))
        return model
    return _train(planned, images, choices, stop)


def _made_fast(planned: Planned, choices: Choices) -> TrainConfig:
    """Graphs where the job can have them: the numbers stay, launches from Python go."""
    config = planned.config
    free = not config.compile and not config.jacobian_weight and config.strategy == "auto"
    asked = choices.overrides.get("cuda_graphs", planned.job.graphs)
    if not (asked and free) or chosen_device(choices.device).type != "cuda":
        return config
    return config.with_overrides(cuda_graphs=True)


def _train(planned: Planned, images: Supplied, choices: Choices, stop: Stop | None) -> nn.Module:
    own: list[Any] = [] if stop is None else [StopWhenAsked(stop)]
    config = _made_fast(planned, choices)
    if "paths of training images" in planned.job.measures:
        config = config.with_overrides(keep_every=1)
    given: dict[str, Any] = {}
    if config.model in NETWORKS:
        torch.manual_seed(planned.seed)
        given["model"] = create(config.model, images.train, **config.model_options)
    left = planned.folder / "last.ckpt"
    # A folder without a checkpoint holds a run that did not come to the end of its first epoch.
    result = training.fit(
        config,
        data=(images.train, images.held_out),
        resume=planned.folder if left.exists() else None,
        overwrite=not left.exists(),
        progress=choices.progress,
        callbacks=own,
        **given,
    )
    return result.model
