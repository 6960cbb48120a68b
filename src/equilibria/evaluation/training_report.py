"""write_training_report(folder, model, dataset): what a run did, as one page in its folder.

Curves come from history.csv, the configuration from config.yaml, versions and times from
result.json; the confusion matrix, the reliability and the mistakes from one pass over ``dataset``.
"""

from __future__ import annotations

import csv
import html
import json
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.data.image_data import ImageData
from equilibria.engine.files import write_text

from .metrics import ClassificationMetrics, classification_metrics
from .model_on_data import batches, device_of, evaluating, model_input, model_name
from .page import Line, chart, figure, percent, photo, section, shell, small, tiles

_SECONDS = 10.0  # that the pass over the images may take
_SHOWN = 16  # mistakes
_NAMED = 12  # classes whose names and counts fit beside a confusion matrix


def write_training_report(
    folder: Path | str, model: nn.Module, dataset: ImageData | None = None
) -> Path:
    """Write report.html into the folder of a run; its path.

    ``dataset``: images that were not trained on; None, or data for segmentation: without the parts
    that need them. The network runs on the device that it is on, and only on the first images where
    all would take longer than ten seconds; the page says on how many.
    """
    place = Path(folder)
    history = _history(place / "history.csv")
    result = json.loads((place / "result.json").read_text(encoding="utf-8"))
    judged = ""
    metrics: ClassificationMetrics | None = None
    if dataset is not None and dataset.task == "classification" and len(dataset):
        logits = _logits(model, dataset)
        targets = dataset.targets[slice(0, len(logits))].long()
        metrics = classification_metrics(logits, targets)
        judged = _confusion(metrics, dataset) + _reliability(metrics, dataset)
        judged += _mistakes(logits, targets, dataset)
    name = model_name(model)
    body = _opening(name, history, result, metrics, 0 if dataset is None else len(dataset))
    body += _curves(history) + _solver(history) + judged + _repeat(place, result)
    footer = (
        f"Made by <code>equilibria train</code>: equilibria {result['version']}, torch "
        f"{result['torch']}, Python {result['python']}, {html.escape(str(result['device']))}. The "
        "numbers are in history.csv and result.json beside this page."
    )
    title = f"equilibria: {name} on {result['data']['name']}"
    return write_text(place / "report.html", shell(title, body, footer))


def _history(file: Path) -> list[dict[str, float]]:
    """One row an epoch; what is empty is left out."""
    with file.open(encoding="utf-8", newline="") as text:
        rows = [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(text)]
    if not rows:
        raise ValueError(f"{file} has no epoch yet: there is nothing to report.")
    return rows


@torch.no_grad()
def _logits(model: nn.Module, dataset: ImageData) -> Tensor:
    """Of the first images, up to the batch in which the time is over."""
    found, end = list[Tensor](), time.monotonic() + _SECONDS
    with evaluating(model):
        for images, _ in batches(dataset, 64, device_of(model)):
            found.append(model(model_input(model, dataset, images)).float().cpu())
            if time.monotonic() > end:
                break
    return torch.cat(found)


def _opening(
    name: str,
    history: Sequence[Mapping[str, float]],
    result: Mapping[str, Any],
    metrics: ClassificationMetrics | None,
    held: int,
) -> str:
    data, last = result["data"], history[-1]
    text = (
        f"<h1>{html.escape(name)} on {html.escape(data['name'])}</h1><div class='short'><p>"
        f"<strong>What was trained.</strong> A network with {result['parameters']:,} parameters, "
        f"{result['epochs']} passes over {data['train']:,} images of {data['classes']} classes, in "
        f"{_time(sum(row.get('seconds', 0.0) for row in history))}. Kept: the weights of pass "
        f"{result['epoch']}.</p>"
    )
    if metrics is not None:
        which, rest = f"{held:,}", ""
        if metrics.samples < held:
            which = f"the first {metrics.samples:,} of {held:,}"
            rest = " For all of them see <code>equilibria evaluate</code>: here that would have "
            rest += f"taken longer than {_SECONDS:.0f} s."
        text += (
            f"<p><strong>How good it is.</strong> {percent(metrics.accuracy, 2)} of "
            f"{which} images that it was not trained on are right. Its confidence is off by "
            f"{percent(metrics.ece)} on average.{rest}</p>"
        )
    if "solver_steps" in last:
        tested = "converged" in last  # solves of fixed steps are not
        reached = (
            f", and {percent(last['converged'])} of them reached their tolerance" if tested else ""
        )
        text += (
            "<p><strong>How well it was solved.</strong> In the last pass solves took "
            f"{last['solver_steps']:.1f} steps on average{reached}. A further step would move the "
            f"state by {small(last['residual'])} of its size.</p>"
        )
    return text + "</div>"


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _drawn(
    history: Sequence[Mapping[str, float]],
    columns: Mapping[str, str],
    caption: str,
    ylabel: str,
    **options: Any,
) -> str:
    """Columns of the history, each with its name, over the passes; empty without any."""
    lines = []
    for (key, name), color in zip(columns.items(), "abc", strict=False):
        if found := [(row["epoch"], row[key]) for row in history if key in row]:
            lines.append(Line(name, color, found))
    if not lines:
        return ""
    if options.get("top") == 0.0:  # from zero on
        options["top"] = 1.15 * max(y for line in lines for _, y in line.points) or 1.0
    alt = f"{ylabel} over the passes: {', '.join(line.name for line in lines)}"
    drawn = chart(lines, alt=alt, xlabel="pass over the images", ylabel=ylabel, **options)
    return figure(drawn, caption) if drawn else ""


def _curves(history: Sequence[Mapping[str, float]]) -> str:
    loss = {"train_loss": "training", "val_loss": "validation"}
    right = {"train_accuracy": "training", "val_accuracy": "validation", "val_miou": "mIoU"}
    parts = _drawn(history, loss, "What training makes small.", "loss")
    parts += _drawn(history, right, "Share of right answers.", "right", share=True, top=1.0)
    if len({row.get("lr") for row in history}) > 1:
        parts += _drawn(history, {"lr": "learning rate"}, "Size of a training step.", "rate")
    speed = {"images_per_second": "images per second"}
    parts += _drawn(history, speed, "How fast it went.", "images/s", top=0.0)
    return section("curves", "1 · training", "Pass by pass", f'<div class="two">{parts}</div>')


def _solver(history: Sequence[Mapping[str, float]]) -> str:
    """Steps, residual and shares over time; empty without equilibrium layers."""
    caption = "Evaluations of the map, mean over images and layers."
    parts = _drawn(history, {"solver_steps": "mean of all solves"}, caption, "steps", top=0.0)
    caption = "How far a solve was from its equilibrium when it stopped: ‖T(z) − z‖/‖T(z)‖."
    parts += _drawn(history, {"residual": "mean of all solves"}, caption, "residual", log=True)
    if any(row.get("converged", 1.0) < 1.0 or row.get("failed", 0.0) > 0.0 for row in history):
        ends = {"converged": "reached the tolerance", "failed": "diverged or NaN"}
        parts += _drawn(history, ends, "How solves ended.", "share", share=True, top=1.0)
    text = f'<div class="two">{parts}</div>'
    return section("solver", "2 · solves", "What the solver did", text) if parts else ""


def _confusion(metrics: ClassificationMetrics, dataset: ImageData) -> str:
    """A grid of shares, with names and counts where they fit; the pairs mixed up most."""
    counts, names = metrics.confusion, dataset.classes
    k, named = len(names), len(names) <= _NAMED
    shares = (counts / counts.sum(1, keepdim=True).clamp_min(1)).tolist()
    cells = ""
    for i, row in enumerate(shares):
        cells += f"<b>{html.escape(names[i])}</b>" if named else ""
        for j, share in enumerate(row):
            kind = ("a" if i == j else "b") if share else ""
            cells += f'<i class="{kind}" style="--s:{100 * share:.0f}%">'
            cells += f"{int(counts[i, j])}</i>" if named and share else "</i>"
    alt = f"Confusion matrix of {k} classes; {percent(metrics.accuracy)} on the diagonal"
    first = "max-content " if named else ""
    style = f"grid-template-columns:{first}repeat({k},minmax(0,1fr))"
    drawn = f'<div class="grid" role="img" aria-label="{alt}" style="{style}">{cells}</div>'
    wrong = counts.clone().fill_diagonal_(0).flatten()
    pairs = [
        f"{html.escape(names[at // k])} read as {html.escape(names[at % k])} ({int(wrong[at])})"
        for at in wrong.argsort(descending=True)[:5].tolist()
        if wrong[at]
    ]
    most = f"Mixed up most: {', '.join(pairs)}." if pairs else "Nothing was mixed up."
    caption = f"A row is a class, a column what it was read as, in the same order. {most}"
    return section("confusion", "3 · answers", "Which classes it mixes up", figure(drawn, caption))


def _reliability(metrics: ClassificationMetrics, dataset: ImageData) -> str:
    bins = metrics.reliability
    found = [
        (float(c), float(a))
        for c, a, n in zip(bins.confidence, bins.accuracy, bins.count, strict=True)
        if n
    ]
    low = min([c for c, _ in found] + [1.0 / len(dataset.classes)])
    drawn = chart(
        [
            Line("measured", "a", found, dots=True),
            Line("as sure as right", "s", [(low, low), (1.0, 1.0)], dash=True),
        ],
        alt=f"Reliability: share of right answers over confidence, ECE {metrics.ece:.3f}",
        xlabel="confidence",
        ylabel="right",
        share=True,
        top=1.0,
    )
    words = (
        "Above the line it is more often right than it says, below it is too sure. The mean gap "
        f"(ECE) is {percent(metrics.ece)}, over {metrics.samples:,} images."
    )
    title = "Is it right as often as it says?"
    return section("reliability", "4 · confidence", title, figure(drawn, words))


def _mistakes(logits: Tensor, truth: Tensor, dataset: ImageData) -> str:
    """The wrong answers that it was surest of; without any, the right ones it was least sure of."""
    sure, said = logits.softmax(1).max(1)
    wrong = (said != truth).nonzero().flatten()
    chosen = wrong[sure[wrong].argsort(descending=True)][:_SHOWN]
    words = f"{len(wrong)} of {len(truth)} answers are wrong; the surest come first."
    if not len(wrong):
        chosen = sure.argsort()[:8]
        words = "No answer is wrong. These are the images that it was least sure of."
    items = []
    for i in chosen.tolist():
        was, seen = (dataset.classes[int(t[i])] for t in (truth, said))
        shown = photo(dataset.images[i : i + 1][0], f"A {was}, read as {seen}")
        note = "" if was == seen else f'<br><span class="bad">is {html.escape(was)}</span>'
        items.append(f"{shown}{html.escape(seen)}, {percent(float(sure[i]))}{note}")
    title = "The worst mistakes" if len(wrong) else "The least sure answers"
    text = f'<p>{words}</p><div class="card">{tiles(items)}</div>'
    return section("mistakes", "5 · mistakes", title, text)


def _repeat(place: Path, result: Mapping[str, Any]) -> str:
    file = place / "config.yaml"
    again = shlex.join(["equilibria", "train", "--config", str(file), "--out", f"{place}-again"])
    rows = [
        ("command", f"<code>{html.escape(str(result['command']))}</code>"),
        ("seed", str(result["seed"])),
        ("device", f"{html.escape(str(result['device']))}, threads: {result['threads']}"),
        ("started", html.escape(str(result["started"]))),
    ]
    listed = "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in rows)
    config = html.escape(file.read_text(encoding="utf-8"))
    return section(
        "repeat",
        "6 · again",
        "How to repeat it",
        f"<pre>{html.escape(again)}</pre><p class='note'>On a CPU, with the same versions and as "
        "many threads, this gives the same numbers bit for bit.</p>"
        f"<dl>{listed}</dl><details><summary>The whole configuration</summary><pre>{config}</pre>"
        "</details>",
    )
