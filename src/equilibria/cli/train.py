"""``equilibria train``: everything by flags, or from one YAML file, or both."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from equilibria.training.config import TrainConfig
from equilibria.training.yaml_values import parse_yaml

from .console import complain, fail, print_json, print_table, say, stop
from .flags import from_flags, pairs, with_flags
from .loading import Json, ModelOption, device_of

_SMALL = 16  # pixels a side: digits have 8, CIFAR's images 32
_PANELS = ("What", "Training", "Machine", "Other")


@with_flags(TrainConfig, _PANELS)
def train(
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", exists=True, help="A YAML file of options; flags go first."),
    ] = None,
    option: ModelOption = None,
    resume: Annotated[
        Path | None,
        typer.Option(exists=True, help="Go on with this run: its folder, or its last.ckpt."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a run that is in the folder.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved configuration and stop.")
    ] = False,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="CPU threads; not given: OMP_NUM_THREADS, else one for images of up to "
            f"{_SMALL} pixels a side and torch's own number for larger ones.",
        ),
    ] = None,
    report: Annotated[
        bool, typer.Option(help="Write report.html: curves, mistakes, solver, configuration.")
    ] = True,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
    as_json: Json = False,
    **given: Any,
) -> None:
    """Train a network. Without options: a small GEQ on the digits, in half a minute.

    The run's folder holds the weights (model.safetensors), the last checkpoint, the history and
    the resolved configuration, and report.html shows them. Ctrl-C saves and says how to go on.
    """
    from equilibria import training

    settings = _settings(config, resume, option or [], from_flags(TrainConfig, given))
    if dry_run:
        typer.echo(settings.resolved().to_yaml(), nl=False)
        return
    try:
        with on_threads(threads, settings.data):
            result = training.fit(
                settings, resume=resume, overwrite=overwrite, progress=not (quiet or as_json)
            )
    except training.RunExistsError as error:
        raise fail(
            f"{error.folder} already holds a run.",
            f"Resume it (--resume {shlex.quote(str(error.folder))}), replace it (--overwrite), or "
            "give another folder (--out).",
        ) from None
    except training.Interrupted as stopped:
        # Here, not in main: typer turns it into an exit without its message.
        again = shlex.join(["equilibria", "train", "--resume", str(stopped.folder)])
        # On a line of its own, without a full stop: it is there to be copied.
        go_on = "" if stopped.folder is None else f" Go on with\n  {again}"
        raise stop(f"{stopped.message}{go_on}") from None
    if training.processes.rank():  # of several processes the first one says it
        return
    if report and not as_json:
        say("writing report.html, which may take some seconds")
    page = _write_report(result, settings) if report else None
    if as_json:
        print_json({"folder": str(result.folder), "metrics": result.metrics})
        return
    rows = [(name, f"{value:.4g}") for name, value in result.metrics.items()]
    print_table("result", "value", rows=rows)
    if page is not None:
        say(f"report in {page}")
    next_ = shlex.join(["equilibria", "evaluate", str(result.folder)])  # to be copied
    say(f"weights in {result.weights}\nnext: {next_}")


def _write_report(result: Any, settings: TrainConfig) -> Path | None:
    """report.html of the run; where that fails, a warning and None."""
    from equilibria import data, evaluation
    from equilibria.evaluation.model_on_data import on_device
    from equilibria.training.run_data import load_data

    try:
        found = load_data(settings, None, progress=False)
        found = found.one_scale() if getattr(result.model, "one_scale", False) else found
        held = found.valid
        if held is None:
            how: Any = {"root": settings.data_root, "on_corrupt": settings.on_corrupt}
            how |= {"image_size": settings.image_size, "progress": False}
            held = data.load(settings.data, "test", **how)
            held = held.with_normalization(found.train.mean, found.train.std)
        kind = settings.accelerator  # where it was trained: it came back on the CPU
        model = on_device(result.model, device_of(kind if kind in ("cpu", "mps") else None))
        return evaluation.write_training_report(result.folder, model, held)
    except Exception as error:  # noqa: BLE001 — the training is done, and all its files are written
        complain("warning:", f"report.html was not written: {error}", "yellow")
        return None


@contextmanager
def on_threads(asked: int | None, data: str) -> Iterator[None]:
    """Run on so many CPU threads, or on one for small images where nothing says how many.

    docs/training.md says why.
    """
    import torch

    from equilibria import data as datasets

    given = asked or os.environ.get("OMP_NUM_THREADS") or os.environ.get("MKL_NUM_THREADS")
    before, size = torch.get_num_threads(), None
    if not given and data in datasets.names():
        size = datasets.describe(data).image_size
    torch.set_num_threads(asked or (1 if size is not None and size <= _SMALL else before))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _settings(
    config: Path | None, resume: Path | None, option: list[str], given: dict[str, Any]
) -> TrainConfig:
    """Defaults, then the file (or the resumed run's own), then the flags."""
    if config is None and resume is not None:
        own = (resume if resume.is_dir() else resume.parent) / "config.yaml"
        config = own if own.exists() else None
    base = TrainConfig() if config is None else TrainConfig.from_yaml(config)
    _check_default_data(str(given.get("model", base.model)), config, given)
    chosen = pairs("option", option)
    if chosen:
        given["model_options"] = {**base.model_options, **given.get("model_options", {}), **chosen}
    return base.with_overrides(given)


def _check_default_data(model: str, config: Path | None, given: dict[str, Any]) -> None:
    """Ask for --data where nothing names it and the model was made for other images."""
    from equilibria import data, models

    if "data" in given or model not in models.names():
        return
    if config is not None and "data" in (parse_yaml(config.read_text("utf-8")) or {}):
        return
    card, usual = models.describe(model), data.describe(TrainConfig().data)
    made_for = (card.task, card.in_channels, card.image_size)
    if made_for == (usual.task, usual.channels, usual.image_size):
        return
    known = [data.describe(name) for name in data.names()]
    fits = [d for d in known if (d.task, d.channels) == (card.task, card.in_channels)]
    near = [d.name for d in fits if d.image_size == card.image_size] or [d.name for d in fits]
    size = f"{card.in_channels} × {card.image_size} × {card.image_size}"
    raise fail(
        f"--model {model} was made for {card.task} of images of {size}; no --data was given.",
        f"Give --data: {', '.join(near)}, or a folder of images.",
    )
