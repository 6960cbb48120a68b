"""explanation_page(explanations, model): what a network did for each image, as one page."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from equilibria._version import __version__
from equilibria.certify import Guarantee

from .explanation import Explanation, SolvedLayer
from .model_on_data import model_name
from .page import (
    Line,
    bars,
    chart,
    figure,
    overlay,
    percent,
    photo,
    proof_words,
    section,
    shell,
    small,
    tiles,
)

_GATE, _CAM = "#0f9e8f", "#e0660a"  # overlays: seen on white paper and on black
_LEVEL = 1.0 / 255.0


def explanation_page(explanations: Sequence[Explanation], model: nn.Module) -> str:
    """One self-contained HTML page, with a section for each image."""
    if not explanations:
        raise ValueError("explanation_page got no explanation.")
    name, count = model_name(model), len(explanations)
    what = f"in {_file(explanations[0])}" if count == 1 else f"in {count} images"
    proven = any(layer.kind is not None for each in explanations for layer in each.layers)
    title = f"What {name} saw {what}{', and why to believe it' * proven}"
    body = f"<h1>{html.escape(title)}</h1>"
    if count > 1:
        items = [
            f'<a href="#image-{i + 1}">{photo(each.pixels, _file(each))}'
            f"{html.escape(each.prediction.label)}{'?' * bool(each.doubts)}</a><br>"
            + percent(each.prediction.confidence)
            for i, each in enumerate(explanations)
        ]
        body += f'<div class="card">{tiles(items)}</div>'
    for i, each in enumerate(explanations):
        body += _image(i, each, f"image {i + 1} of {count}" if count > 1 else "the answer")
    body += _proof(explanations)
    footer = (
        f"Made by <code>equilibria explain</code>, equilibria {__version__}, torch "
        f"{torch.__version__}. Confidence is what the network says of itself; a proof is about the "
        "answer that it computed, not about whether that answer is right."
    )
    return shell(f"equilibria: {name} explained", body, footer)


def _file(each: Explanation) -> str:
    return "an image" if each.prediction.file is None else each.prediction.file.name


def _image(i: int, each: Explanation, step: str) -> str:
    said, layers = each.prediction, each.layers
    shown = photo(each.pixels, f"{_file(each)}, {each.pixels.shape[-1]} pixels wide")
    words = story(layers, said.label, said.confidence, each.doubts)
    text = f'<div class="hero">{shown}<div class="short">{words}</div></div>'
    alt = f"The likeliest classes: {said.label} has {percent(said.confidence, 2)}"
    text += f'<div class="card">{bars(said.labels, alt)}'
    if others := [label for label, _ in said.labels[1:]]:
        text += f'<p class="note">Nearest after it: {html.escape(", ".join(others))}.</p>'
    text += f"</div>{_radius_words(said.radius, len(each.pixels))}{_looked(each, shown)}"
    drawn = [
        f'<p class="step">problem {k} of {len(layers)} · {html.escape(v.name)} ({v.layer})</p>'
        + layer_charts(v)
        for k, v in enumerate(layers, 1)
    ]
    text += "".join(drawn[:2])
    if len(drawn) > 2:
        rest = f"<summary>The other {len(drawn) - 2} problems, step by step</summary>"
        text += f"<details>{rest}{''.join(drawn[2:])}</details>"
    sure = f"{said.label}, {percent(said.confidence, 2)} sure"
    if each.doubts:
        sure = f"{said.label}? It is unlike the images of training"
    return section(f"image-{i + 1}", step, f"{_file(each)}: {sure}", text)


def story(
    layers: Sequence[SolvedLayer], label: str, confidence: float, doubts: Sequence[str] = ()
) -> str:
    """What it did, how sure it is and why to believe it: a paragraph each."""
    count, did = len(layers), "It has no equilibrium layer, so it solved nothing. It"
    if layers:
        what = "minimization problem" if all(v.objective for v in layers) else "equation"
        did = (
            f"It solved {count} {what}{'s' * (count > 1)} with "
            f"{_range(v.unknowns for v in layers)} unknowns, in {_range(v.steps for v in layers)} "
            f"steps{' each' * (count > 1)}, and"
        )
    text = [f"What it did.</strong> {did} read the image as <strong>{html.escape(label)}</strong>."]
    text.append(f"How sure it is.</strong> {percent(confidence, 2)}.")
    if doubts:
        said = html.escape(" ".join(doubts))
        text[-1] += f' <span class="bad">That is worth nothing here: {said}</span>'
    known = [v for v in layers if v.kind is not None]
    if known and all(v.kind is not None and v.kind.means_unique for v in known):
        off = max(v.bound[-1] / (v.length or 1.0) for v in known)
        text.append(
            f"Why to believe it.</strong> {'It' if count == 1 else 'Each'} provably has exactly "
            f"one answer, and what was computed is off by at most {small(100 * off)}% of its "
            "length. So the computation is right; whether the label is, only counting can tell."
        )
    elif known:
        text.append("Why to believe it.</strong> It is not proven that there is only one answer.")
    return "".join(f"<p><strong>{each}</p>" for each in text)


def _range(values: Iterable[int]) -> str:
    """ "5", or "5 to 6"."""
    found = sorted(values)
    return " to ".join(f"{v:,}" for v in dict.fromkeys((found[0], found[-1])))


def _radius_words(radius: float | None, channels: int) -> str:
    """Nothing for a radius below one gray level of one pixel. Numbers are rounded down."""
    if radius is None or radius < _LEVEL:
        return ""
    shown, share = (math.floor(1e3 * r) for r in (radius, min(radius / channels**0.5, 1.0)))
    return (
        f'<div class="short"><p>No picture within <strong>{shown / 1e3:.3f}</strong> of this one '
        f"gets another label. That is one pixel changed by {share / 10:g}% of the way "
        "from black to white, or many pixels by less: the root of the sum of the squared changes "
        "counts.</p></div>"
    )


def _looked(each: Explanation, shown: str) -> str:
    """GradCAM, and the gate of every Gaussian layer, over the picture."""
    items, words = [], ""
    if each.saliency is not None:
        alt = "Where the label comes from, by GradCAM"
        items.append(overlay(shown, each.saliency, _CAM, alt) + "what counts for the label")
        words = "Orange: where the label comes from (GradCAM). "
    for k, layer in enumerate(each.layers, 1):
        if layer.gate is not None:
            low, high = percent(float(layer.gate.min()), 0), percent(float(layer.gate.max()), 0)
            drawn = overlay(shown, layer.gate, _GATE, f"Its gate is {low} to {high} open")
            items.append(f"{drawn}problem {k}:<br>{low} to {high} open")
    if len(items) > (each.saliency is not None):
        words += (
            "Green: where the Gaussian gate of a layer opened most. It is open where the state "
            "explains the patch, and lets the rest of the patch through in that measure."
        )
    return f'<div class="card">{tiles(items)}<p class="note">{words}</p></div>' if items else ""


def layer_charts(layer: SolvedLayer) -> str:
    """The objective and the residual of each step, with what is proven."""
    parts = []
    if layer.objective:
        band = [(k, low, layer.objective[k]) for k, low in enumerate(layer.least)]
        band = [row for row in band if math.isfinite(row[1])]
        at = layer.objective[-1]
        ends = f"It ends at {f'{at:,.2f}' if abs(at) >= 10 else f'{at:.4g}'}".replace("-", "−")
        if band and band[-1][0] == len(layer.objective) - 1:
            ends += f"; the minimum is at most {small(at - band[-1][1])} lower"
        lines = [
            Line("objective", "a", list(enumerate(layer.objective))),
            Line("proven: not below", "b", [(k, v) for k, v, _ in band], dash=True),
        ]
        alt = f"{layer.name}: the objective of each step, {at:.4g} at the end"
        drawn = chart(lines, alt=alt, xlabel="step", ylabel="objective", band=band)
        parts.append(figure(drawn, f"{ends}."))
    band = [(k, 0.0, v) for k, v in enumerate(layer.bound) if math.isfinite(v)]
    lines = [
        Line("still moving: ‖T(z) − z‖", "a", list(enumerate(layer.residual))),
        Line("proven: at most so far off", "b", [(k, v) for k, _, v in band], dash=True),
    ]
    alt = f"{layer.name}: residual of each step, {layer.residual[-1]:.2e} at the end"
    drawn = chart(lines, alt=alt, xlabel="step", ylabel="distance", log=True, band=band)
    ends = f"By {layer.solver}, {layer.steps} steps"
    if layer.kind is not None:
        factor = "" if layer.contraction is None else f" (ρ = {layer.contraction:.4g})"
        ends += f". Guarantee: {layer.kind}{factor}"
    if band:
        ends += f". The exact answer is within {small(band[-1][2])} of the last"
    parts.append(figure(drawn, f"{ends}."))
    return f'<div class="two">{"".join(parts)}</div>' if len(parts) > 1 else parts[0]


def _proof(explanations: Sequence[Explanation]) -> str:
    """The argument, once for the page, by the weakest guarantee on it."""
    known = [v for each in explanations for v in each.layers if v.kind is not None]
    if not known:
        return ""
    order = list(Guarantee)
    kind = max((v.kind for v in known if v.kind is not None), key=order.index)
    share = max((v.contraction or 0.0 for v in known), default=0.0)
    note = (
        "A computer stops after finitely many steps and rounds every number; the distances above "
        "count both (those of the objective do not count rounding, about 16 digits). They hold for "
        "each layer at the input that it got."
    )
    title = "Why there is no other answer" if kind.means_unique else "What is not proven"
    text = f'{proof_words(str(kind), share)}<p class="note">{note}</p>'
    return section("proof", "the certificate in words", title, text)
