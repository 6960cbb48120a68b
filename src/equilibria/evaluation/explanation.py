"""explain(model, predictions): what the network did for each image.

For every equilibrium layer, the iterates z₀, z₁, … of its own solver are kept and judged together:

    G* ≥ G(zₖ) − dist(0, ∂G(zₖ))²/2m,    ‖zₖ − z*‖ ≤ the error bound of the certificate at zₖ.

The gate of a Gaussian layer is eᵢ = exp(−γsᵢ), the share of the message of patch i that passes
(GEQ Eq 16), at the answer and averaged over groups of channels.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from equilibria.certify import Guarantee, certify
from equilibria.data import read_image
from equilibria.data.parquet import parquet_images
from equilibria.engine.result import Solution
from equilibria.engine.solver import SolverOptions
from equilibria.models import Network, Prediction
from equilibria.models.preprocessing import InputWarning
from equilibria.ops.gaussian import gaussian_weights
from equilibria.problems import Gaussian, HiddenProblem
from equilibria.solvers import Auto

from .layer_solvers import layer_label, with_solver
from .model_on_data import evaluating
from .predictions import image_of
from .rich_output import progress_bar
from .saliency import gradcam

_TOGETHER = 8  # images at a time


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
    given, rows = list(predictions), functools.cache(parquet_images)  # a file is read once
    found: list[Explanation] = []
    for start in range(0, len(given), _TOGETHER):
        part, inputs = given[start : start + _TOGETHER], []
        for each in part:
            if each.file is None:
                raise ValueError("explain takes predictions of image files: one has no file.")
            pixels = read_image(image_of(each.file, rows), network.in_channels)
            inputs.append(doubted(network, pixels, names=[each.file.name]))
        x = torch.cat([made for made, _ in inputs])
        _, layers = solved_layers(network, x, certify=certify, progress=progress)
        seen = seen_pixels(network, x)
        try:
            maps: Any = gradcam(network, x).float().cpu()
        except ValueError:  # no layer gives a map
            maps = [None] * len(part)
        found += [
            Explanation(each, seen[i], tuple(layers[i]), maps[i], inputs[i][1])
            for i, each in enumerate(part)
        ]
    return found


def doubted(network: Network, image: Any, **names: Any) -> tuple[Tensor, tuple[str, ...]]:
    """What the network is given of an image, and why it is unlike the images of training."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", InputWarning)
        x = network.preprocess(image, **names)
    return x, tuple(str(w.message) for w in said if w.category is InputWarning)


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

    with ExitStack() as changes:
        for name, layer in model.named_modules():
            if [m for m in layer.modules() if getattr(m, "is_equilibrium", False)] == [layer]:
                posed = hasattr(layer, "solve_posed")
                for way in ("solve_posed",) if posed else ("observed_solve", "solve"):
                    if hasattr(layer, way):
                        setattr(layer, way, recorded(name, layer, getattr(layer, way)))
                        changes.callback(delattr, layer, way)
        yield found


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
    ends = [0, *itertools.accumulate(count + 1 for count in last)]
    lengths = torch.stack([z.double().flatten(1).norm(dim=1) for z in pytree.tree_leaves(value)])
    chosen_by_auto = isinstance(layer.solver, Auto) and solve.solution.choice.split(":")[0]
    is_map = isinstance(states, Tensor) and states.ndim == 4
    unknowns = sum(z[0].numel() for z in pytree.tree_leaves(value))
    for b, count in enumerate(steps):
        own = slice(ends[b], ends[b + 1])
        norms = [float(solve.path[k][1][b]) for k in range(count)]
        yield SolvedLayer(
            name=layer_label(solve.name),
            layer=type(layer).__name__,
            solver=chosen_by_auto or type(layer.solver).__name__,
            unknowns=unknowns,
            steps=count,
            residual=norms if proven is None else proven.residual[own].tolist(),
            objective=objective[own],
            least=[] if proven is None or not objective else _least(proven, objective, own),
            bound=[] if proven is None else proven.error_bound[own].tolist(),
            length=float(lengths[:, b].norm()),
            kind=None if proven is None else proven.kinds[ends[b + 1] - 1],
            contraction=_at(getattr(proven, "contraction", None), ends[b + 1] - 1),
            gate=None if gates is None else gates[b],
            frames=states[own].abs().mean(1).float().cpu() if is_map else None,
        )


def _same(z: Any, value: Any, b: int) -> bool:
    """Whether the answer is this iterate, moved into the domain at most."""
    pairs = zip(pytree.tree_leaves(z), pytree.tree_leaves(value), strict=True)
    return all(torch.allclose(one[b], other[b], rtol=1e-5, atol=1e-6) for one, other in pairs)


def _at(value: Any, row: int) -> float | None:
    return value if value is None or isinstance(value, float) else float(value[row])


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
