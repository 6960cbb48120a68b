"""explain(model, predictions): what the network did for each image, and one page that tells it.

For every equilibrium layer, the iterates z₀, z₁, … of its own solver are kept and judged together:

    G* ≥ G(zₖ) − dist(0, ∂G(zₖ))²/2m,    ‖zₖ − z*‖ ≤ the error bound of the certificate at zₖ.

The gate of a Gaussian layer is eᵢ = exp(−γsᵢ), the share of the message of patch i that passes
(GEQ Eq 16), at the answer and averaged over groups of channels.
"""

from __future__ import annotations

import copy
import html
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from equilibria._version import __version__
from equilibria.certify import Guarantee, certify
from equilibria.data import read_image
from equilibria.engine.result import Solution
from equilibria.engine.solver import SolverOptions
from equilibria.models import Network, Prediction
from equilibria.models.preprocessing import InputWarning
from equilibria.ops.gaussian import gaussian_weights
from equilibria.problems import Gaussian, HiddenProblem
from equilibria.solvers import Auto

from .layer_solvers import layer_label, with_solver
from .model_on_data import evaluating, model_name
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
from .rich_output import progress_bar
from .saliency import gradcam

__all__ = ["Explanation", "SolvedLayer", "explain", "explanation_page"]

_GATE, _CAM = "#0f9e8f", "#e0660a"  # overlays: seen on white paper and on black
_TOGETHER = 8  # images at a time
_LEVEL = 1.0 / 255.0


@dataclass(frozen=True, eq=False)
class SolvedLayer:
    """One layer's solve for one image. Lists have an entry for each iterate, the answer last."""

    name: str
    layer: str
    solver: str
    unknowns: int
    steps: int
    residual: list[float]
    """‖T(z) − z‖."""
    objective: list[float]
    """G(z); empty for a layer without a hidden problem."""
    least: list[float]
    """The minimum of G is proven to be at least this; −inf where nothing is proven."""
    bound: list[float]
    """‖z − z*‖ is proven to be at most this; empty where the layer was not certified."""
    length: float
    """‖z*‖, to compare the bound with."""
    kind: Guarantee | None
    """What is proven of the equilibrium; None where the layer was not certified."""
    contraction: float | None
    gate: Tensor | None
    """How far the Gaussian gate is open over patches, 0 to 1, [h, w]; None for other layers."""
    frames: Tensor | None
    """The mean of |z| over channels, [iterates, h, w]; None where the state is no map."""


@dataclass(frozen=True, eq=False)
class Explanation:
    """What a network did for one image."""

    prediction: Prediction
    pixels: Tensor
    """What the network sees of the image, before normalization: uint8 [C, S, S]."""
    layers: tuple[SolvedLayer, ...]
    """In the order in which they ran; a layer with branches gives one for each."""
    saliency: Tensor | None
    """GradCAM of the label, 0 to 1, [S, S]; None where no layer gives a map."""
    doubts: tuple[str, ...] = ()
    """Why the image is unlike those of training."""


@dataclass(eq=False)
class _Solve:
    """What was seen of one solve of a batch: every iterate with its residual."""

    name: str
    layer: Any
    given: Any
    """The hidden problem; for a layer without one its input x."""
    path: list[tuple[Any, Tensor]]
    solution: Solution[Any]


def explain(
    model: nn.Module,
    predictions: Iterable[Prediction],
    *,
    certify: bool = True,
    solver: SolverOptions | None = None,
    progress: bool = False,
) -> list[Explanation]:
    """How ``model`` came to these predictions of image files (``predict_files`` made them).

    Args:
        model: as given to ``predict_files``; it is left as it is (a copy runs).
        predictions: each with its ``file``.
        certify: whether every layer is certified at every iterate, which takes minutes for a
            network of millions of parameters on two cores.
        solver: replaces that of every layer, as in ``predict_files``.
        progress: whether to show a bar over the layers.
    """
    network = copy.deepcopy(with_solver(getattr(model, "_orig_mod", model), solver)).eval()
    if not isinstance(network, Network):
        raise TypeError(f"explain takes a network of models.load, got {type(network).__name__}.")
    given = list(predictions)
    found: list[Explanation] = []
    for start in range(0, len(given), _TOGETHER):
        found += _explained(network, given[start : start + _TOGETHER], certify, progress)
    return found


def _explained(
    network: Network, given: Sequence[Prediction], certified: bool, progress: bool
) -> list[Explanation]:
    inputs, doubts = [], []
    for each in given:
        if each.file is None:
            raise ValueError("explain takes predictions of image files: one has no file.")
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", InputWarning)
            pixels = read_image(each.file, network.in_channels)
            inputs.append(network.preprocess(pixels, names=[each.file.name]))
        doubts.append(tuple(str(w.message) for w in said if w.category is InputWarning))
    x = torch.cat(inputs)
    _, layers = solved_layers(network, x, certify=certified, progress=progress)
    seen = seen_pixels(network, x)
    try:
        maps: Tensor | None = gradcam(network, x).float().cpu()
    except ValueError:  # no layer gives a map
        maps = None
    return [
        Explanation(each, seen[i], tuple(layers[i]), None if maps is None else maps[i], doubts[i])
        for i, each in enumerate(given)
    ]


def solved_layers(
    network: nn.Module, x: Tensor, *, certify: bool, progress: bool = False
) -> tuple[Tensor, list[list[SolvedLayer]]]:
    """The logits of x [B, ...], and for each image its layers in the order in which they ran."""
    with torch.no_grad(), evaluating(network), _recording(network) as solves:
        logits: Tensor = network(x)
    layers: list[list[SolvedLayer]] = [[] for _ in x]
    with progress_bar(len(solves), "looking into layers", progress and certify) as advance:
        for solve in solves:
            for own, story in zip(layers, _stories(solve, certify), strict=True):
                own.append(story)
            advance()
    return logits, layers


def seen_pixels(network: Network, x: Tensor) -> Tensor:
    """uint8 pixels of normalized images x [B, C, S, S]."""
    made = network.preprocessing
    mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (made.mean, made.std))
    return ((x.float().cpu() * std + mean).clamp(0, 1) * 255).round().to(torch.uint8)


@contextmanager
def _recording(model: nn.Module) -> Iterator[list[_Solve]]:
    """Every solve of every innermost equilibrium layer inside the block, with its iterates."""
    found: list[_Solve] = []

    def recorded(name: str, layer: Any, own: Any) -> Any:
        def solve(given: Any, *more: Any, **options: Any) -> Solution[Any]:
            if "callback" in options:  # observed_solve, which was recorded, calls solve
                return own(given, *more, **options)  # type: ignore[no-any-return]
            path: list[tuple[Any, Tensor]] = []

            def keep(_: int, z: Any, norm: Tensor) -> None:
                path.append((pytree.tree_map(torch.clone, z), norm.clone()))

            solution: Solution[Any] = own(given, *more, **options, callback=keep)
            found.append(_Solve(name, layer, given, path, solution))
            return solution

        return solve

    changed: list[tuple[Any, str]] = []
    try:
        for name, layer in model.named_modules():
            if _innermost(layer):
                posed = hasattr(layer, "solve_posed")
                for way in ("solve_posed",) if posed else ("observed_solve", "solve"):
                    if hasattr(layer, way):
                        setattr(layer, way, recorded(name, layer, getattr(layer, way)))
                        changed.append((layer, way))
        yield found
    finally:
        for layer, way in changed:
            delattr(layer, way)


def _innermost(module: nn.Module) -> bool:
    """An equilibrium layer that holds no other."""
    return getattr(module, "is_equilibrium", False) and not any(
        getattr(child, "is_equilibrium", False) for child in module.modules() if child is not module
    )


@torch.no_grad()
def _stories(solve: _Solve, certified: bool) -> Iterator[SolvedLayer]:
    """One for each image of the batch."""
    layer, given, value = solve.layer, solve.given, solve.solution.value
    gates = _gates(given, value)
    seen = len(solve.path)
    steps = [min(count, seen) for count in solve.solution.stats.steps.tolist()]
    paths = [*(z for z, _ in solve.path), value]
    # Of each image its own iterates (after its end the solver holds its state), the answer last.
    last = [k - (k > 0 and _same(paths[k - 1], value, b)) for b, k in enumerate(steps)]
    rows = [(b, k) for b, count in enumerate(last) for k in [*range(count), seen]]
    states = pytree.tree_map(lambda *z: torch.stack([z[k][b] for b, k in rows]), *paths)
    chosen = [b for b, _ in rows]
    objective: list[float] = []
    proven: Any = None
    if isinstance(given, HiddenProblem):
        problem = given.with_inputs(*(t[chosen] for t in given.inputs()))
        states = problem.into_domain(states)
        objective = problem.in_double().objective(states.double()).tolist()
        if certified and not problem.couples_batch:
            proven = certify(problem, z=states)
    elif certified and hasattr(layer, "certify") and not layer.couples_batch():
        proven = certify(layer, pytree.tree_map(lambda t: t[chosen], given), states)
    ends = [0]
    for count in last:
        ends.append(ends[-1] + count + 1)
    lengths = torch.stack([z.double().flatten(1).norm(dim=1) for z in pytree.tree_leaves(value)])
    unknowns = sum(z[0].numel() for z in pytree.tree_leaves(value))
    for b, count in enumerate(steps):
        own = slice(ends[b], ends[b + 1])
        residual = [float(solve.path[k][1][b]) for k in range(count)]
        if proven is not None:
            residual = proven.residual[own].tolist()
        yield SolvedLayer(
            name=layer_label(solve.name),
            layer=type(layer).__name__,
            solver=_solver_name(layer.solver, solve.solution.choice),
            unknowns=unknowns,
            steps=count,
            residual=residual,
            objective=objective[own],
            least=[] if proven is None or not objective else _least(proven, objective, own),
            bound=[] if proven is None else proven.error_bound[own].tolist(),
            length=float(lengths[:, b].norm()),
            kind=None if proven is None else proven.kinds[ends[b + 1] - 1],
            contraction=None if proven is None else _at(proven.contraction, ends[b + 1] - 1),
            gate=None if gates is None else gates[b],
            frames=states[own].abs().mean(1).float().cpu() if _is_map(states) else None,
        )


def _same(z: Any, value: Any, b: int) -> bool:
    """Whether the answer is this iterate, moved into the domain at most."""
    pairs = zip(pytree.tree_leaves(z), pytree.tree_leaves(value), strict=True)
    return all(torch.allclose(one[b], other[b], rtol=1e-5, atol=1e-6) for one, other in pairs)


def _solver_name(solver: SolverOptions, choice: str) -> str:
    chosen = isinstance(solver, Auto) and choice
    return choice.split(":")[0] if chosen else type(solver).__name__


def _is_map(states: Any) -> bool:
    return isinstance(states, Tensor) and states.ndim == 4


def _at(value: Any, row: int) -> float | None:
    if value is None or isinstance(value, float):
        return value
    return float(value[row])


def _least(proven: Any, objective: list[float], own: slice) -> list[float]:
    """G* ≥ G(z) − dist(0, ∂G(z))²/2m, G strongly convex with modulus m > 0."""
    modulus = torch.as_tensor(proven.modulus, dtype=torch.float64).expand(len(objective))[own]
    slack = proven.stationarity[own].square() / (2.0 * modulus)
    slack = torch.where((modulus > 0) & slack.isfinite(), slack, math.inf)
    return [g - s for g, s in zip(objective[own], slack.tolist(), strict=True)]


def _gates(problem: Any, z: Tensor) -> Tensor | None:
    """[B, h, w]: eᵢ over patches, the mean over groups of channels."""
    coupling = getattr(problem, "coupling", None)
    if not isinstance(coupling, Gaussian) or coupling.patches is None:
        return None
    weights = gaussian_weights(coupling.energies(z), coupling.gamma)
    height, width = (n // coupling.patches.size for n in coupling.c.shape[-2:])
    return weights.view(len(z), -1, height, width).mean(1).float().cpu()


# ---------------------------------------------------------------------- the page


def explanation_page(explanations: Sequence[Explanation], model: nn.Module) -> str:
    """One self-contained HTML page, with a section for each image."""
    if not explanations:
        raise ValueError("explanation_page got no explanation.")
    name, count = model_name(model), len(explanations)
    what = f"in {_file(explanations[0])}" if count == 1 else f"in {count} images"
    proven = any(layer.kind is not None for each in explanations for layer in each.layers)
    title = f"What {name} saw {what}{', and why to believe it' * proven}"
    body = f"<h1>{html.escape(title)}</h1>" + _overview(explanations)
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


def _overview(explanations: Sequence[Explanation]) -> str:
    if len(explanations) == 1:
        return ""
    items = []
    for i, each in enumerate(explanations):
        said = html.escape(each.prediction.label)
        items.append(
            f'<a href="#image-{i + 1}">{photo(each.pixels, _file(each))}{said}</a><br>'
            + percent(each.prediction.confidence)
        )
    return f'<div class="card">{tiles(items)}</div>'


def _image(i: int, each: Explanation, step: str) -> str:
    said, layers = each.prediction, each.layers
    shown = photo(each.pixels, f"{_file(each)}, {each.pixels.shape[-1]} pixels wide")
    story = solved_words(layers) if layers else "It has no equilibrium layer: it solves nothing."
    text = f'<div class="hero">{shown}<p>{story}</p></div>'
    text += "".join(f'<p class="note bad">{html.escape(doubt)}</p>' for doubt in each.doubts)
    others = [label for label, _ in said.labels[1:]]
    alt = f"The likeliest classes: {said.label} has {percent(said.confidence, 2)}"
    text += f'<div class="card">{bars(said.labels, alt)}'
    if others:
        text += f'<p class="note">Nearest after it: {html.escape(", ".join(others))}.</p>'
    text += f"</div>{_radius_words(said.radius)}{_looked(each, shown)}{_charts(layers)}"
    title = f"{_file(each)}: {said.label}, {percent(said.confidence, 2)} sure"
    return section(f"image-{i + 1}", step, title, text)


def solved_words(layers: Sequence[SolvedLayer]) -> str:
    count = len(layers)
    what = "problem" if all(layer.objective for layer in layers) else "equilibrium"
    each = " and ".join(f"{layer.unknowns:,}" for layer in layers[:2])
    if count > 2:
        each = f"{min(v.unknowns for v in layers):,} to {max(v.unknowns for v in layers):,}"
    steps = sorted({layer.steps for layer in layers})
    took = f"{steps[0]}" if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"
    many = {"problem": "problems", "equilibrium": "equilibria"}[what]
    text = (
        f"To answer, the network solved for {'one' if count == 1 else count} "
        f"{what if count == 1 else many} with {each} unknowns, in {took} steps"
        f"{' each' if count > 1 else ''}. "
    )
    known = [layer for layer in layers if layer.kind is not None]
    if known and all(layer.kind is not None and layer.kind.means_unique for layer in known):
        worst = max(known, key=lambda layer: layer.bound[-1] / (layer.length or 1.0))
        text += (
            f"<strong>Proven: {'it has' if count == 1 else 'each has'} exactly one answer</strong>,"
            f" and what was computed is within {small(worst.bound[-1])} of it (a state of length "
            f"{worst.length:.3g})."
        )
    elif known:
        text += "It is not proven that there is only one answer."
    return text


def _radius_words(radius: float | None) -> str:
    """Nothing for a radius below one gray level of one pixel."""
    if radius is None or radius < _LEVEL:
        return ""
    return (
        f'<div class="short"><p>No picture within <strong>{radius:.3f}</strong> of this one gets '
        f"another label. That is one pixel changed by {percent(min(radius, 1.0), 0)} of the way "
        "from black to white, or many pixels by less: the root of the sum of the squared changes "
        "counts.</p></div>"
    )


def _looked(each: Explanation, shown: str) -> str:
    """GradCAM, and the gate of every Gaussian layer, over the picture."""
    items = []
    if each.saliency is not None:
        alt = "Where the label comes from, by GradCAM"
        items.append(overlay(shown, each.saliency, _CAM, alt) + "what counts for the label")
    for layer in each.layers:
        if layer.gate is not None:
            low, high = percent(float(layer.gate.min()), 0), percent(float(layer.gate.max()), 0)
            alt = f"The gate of {layer.name}: {low} to {high} open"
            items.append(
                overlay(shown, layer.gate, _GATE, alt)
                + f"{html.escape(layer.name)}<br>{low} to {high} open"
            )
    if not items:
        return ""
    gated = any(layer.gate is not None for layer in each.layers)
    words = "Orange: where the label comes from (GradCAM). " if each.saliency is not None else ""
    if gated:
        words += (
            "Green: where the Gaussian gate of a layer opened most. It is open where the state "
            "explains the patch, and lets the rest of the patch through in that measure."
        )
    return f'<div class="card">{tiles(items)}<p class="note">{words}</p></div>'


def _charts(layers: Sequence[SolvedLayer]) -> str:
    """Of the first layers in the open, of the others behind a line to click."""
    drawn = [layer_charts(layer) for layer in layers]
    text = "".join(drawn[:2])
    if len(drawn) > 2:
        rest = f"<summary>The other {len(drawn) - 2} layers, step by step</summary>"
        text += f"<details>{rest}{''.join(drawn[2:])}</details>"
    return text


def layer_charts(layer: SolvedLayer) -> str:
    """The objective and the residual of each step, with what is proven."""
    parts, name = [], f"{html.escape(layer.name)} ({layer.layer})"
    if layer.objective:
        points = list(enumerate(layer.objective))
        lines = [Line("objective", "a", points)]
        band = [(k, low, layer.objective[k]) for k, low in enumerate(layer.least)]
        proven = [row for row in band if math.isfinite(row[1])]
        if proven:
            lines.append(Line("proven: not below", "b", [(k, v) for k, v, _ in proven], dash=True))
        alt = f"{layer.name}: the objective of each step, {layer.objective[-1]:.4g} at the end"
        drawn = chart(lines, alt=alt, xlabel="step", ylabel="objective", band=proven)
        at = layer.objective[-1]
        ends = f"It ends at {f'{at:,.2f}' if abs(at) >= 10 else f'{at:.4g}'}".replace("-", "−")
        if proven and proven[-1][0] == len(points) - 1:
            gap = layer.objective[-1] - proven[-1][1]
            ends += f"; the minimum is at most {small(gap)} lower"
        parts.append(figure(drawn, f"{name}. {ends}."))
    lines = [Line("still moving: ‖T(z) − z‖", "a", list(enumerate(layer.residual)))]
    proven = [(k, 0.0, v) for k, v in enumerate(layer.bound) if math.isfinite(v)]
    if proven:
        lines.append(Line("proven: at most so far off", "b", [(k, v) for k, _, v in proven], True))
    drawn = chart(
        lines,
        alt=f"{layer.name}: residual of each step, {layer.residual[-1]:.2e} at the end",
        xlabel="step",
        ylabel="distance",
        log=True,
        band=proven,
    )
    ends = f"By {layer.solver}, {layer.steps} steps"
    if layer.kind is not None:
        factor = "" if layer.contraction is None else f" (ρ = {layer.contraction:.4g})"
        ends += f". Guarantee: {layer.kind}{factor}"
    if proven:
        ends += f". The exact answer is within {small(proven[-1][2])} of the last"
    parts.append(figure(drawn, f"{name}. {ends}."))
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
