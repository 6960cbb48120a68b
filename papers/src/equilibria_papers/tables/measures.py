"""What is read off a trained network: numbers in the units of the papers' tables.

Accuracies, IoU and shares are in percent.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from equilibria import evaluation
from equilibria.data import ImageData
from equilibria.engine import ConvergenceWarning
from equilibria.evaluation import batches, evaluating, model_input
from equilibria.models import count_parameters
from equilibria.nn import equilibrium_layers, observe
from equilibria.solvers import Anderson
from equilibria_papers.theory import pictures
from equilibria_papers.theory.landscapes import Grid, contour_figure, measure_landscape
from equilibria_papers.theory.trajectories import (
    SolverPath,
    TrainingPath,
    layer_input,
    path_figure,
    principal_components,
    record_path,
    residual_figure,
)

from .images import known_classes
from .thesis import STAGES
from .unseen_classes import known_unknown_kl, superclass_accuracy


@dataclass(frozen=True, eq=False)
class Scene:
    """What a measure looks at: a network in eval mode, the images, and a folder to draw in."""

    model: nn.Module
    train: ImageData
    test: ImageData
    folder: Path
    device: torch.device
    batch_size: int  # Images at a time, of the test
    train_batch: int  # Images of a training step
    precision: str  # Of the training, in Lightning's words
    seed: int
    progress: bool
    smoke: bool
    held_out: ImageData | None = None  # What choices may look at
    epochs: int = 0  # Of the whole training


_BATCHES, _BATCH = 80, 125  # OptEq §7.4: "the total time for 80 iteration steps", batches of 125
_WARM, _TIMED = 3, 10


def _seconds(device: torch.device, work: Callable[[], Any]) -> tuple[float, Any]:
    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    wait()
    began = time.perf_counter()
    done = work()
    wait()
    return time.perf_counter() - began, done


def _autocast(scene: Scene) -> Any:
    """The precision of the training; mixed ones only, for the weights are float32."""
    kinds = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
    kind = kinds.get(scene.precision)
    return nullcontext() if kind is None else torch.autocast(scene.device.type, dtype=kind)


@contextmanager
def _training_copy(model: nn.Module) -> Iterator[nn.Module]:
    """A copy in training mode: running statistics and weights of the measured one stay."""
    made = copy.deepcopy(model).train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        yield made


def _batch(scene: Scene, size: int) -> tuple[Tensor, Tensor]:
    """``size`` training images, normalized, on the device; small sets are repeated."""
    index = torch.arange(size) % len(scene.train)
    images, targets = scene.train.images[index], scene.train.targets[index]
    return scene.train.normalize(images.to(scene.device)), targets.to(scene.device)


def times(scene: Scene) -> dict[str, float]:
    """OptEq Table 8: seconds of 80 forward passes and of 80 backward passes, batches of 125.

    Measured with the graph of training. A smoke test runs two batches and scales.
    """
    count, size = (2, 16) if scene.smoke else (_BATCHES, _BATCH)
    x, y = _batch(scene, size)
    forward = backward = 0.0
    with _training_copy(scene.model) as model, _autocast(scene):
        for number in range(count + 1):
            spent, logits = _seconds(scene.device, lambda: model(x))
            loss = nn.functional.cross_entropy(logits, y)
            back, _ = _seconds(scene.device, loss.backward)
            model.zero_grad(set_to_none=True)
            if number:  # the first one warms up
                forward, backward = forward + spent, backward + back
    scale = _BATCHES * _BATCH / (count * size)
    return {"seconds.forward": scale * forward, "seconds.backward": scale * backward}


def throughput(scene: Scene) -> dict[str, float]:
    """OptEq Table 9: training images per second, a step being forward, backward and SGD's."""
    size, timed = (8, 2) if scene.smoke else (scene.train_batch, _TIMED)
    x, y = _batch(scene, size)
    with _training_copy(scene.model) as model:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

        def steps(count: int) -> None:
            for _ in range(count):
                optimizer.zero_grad(set_to_none=True)
                with _autocast(scene):
                    loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()

        steps(1 if scene.smoke else _WARM)
        spent, _ = _seconds(scene.device, lambda: steps(timed))
    count = sum(p.numel() for p in scene.model.parameters())
    return {"images_per_second": size * timed / spent, "parameters_m": count / 1e6}


Measure = Callable[[Scene], dict[str, float]]
_CERTIFIED = 16
_SALIENT = 64
_CORRUPTED = 2000  # test images: 190,000 with all kinds and severities


def _size(model: nn.Module) -> dict[str, float]:
    count = count_parameters(model)
    return {"parameters_k": count / 1e3, "parameters_m": count / 1e6}


def _judged(
    scene: Scene, images: ImageData, *, batch_size: int | None = None, flip: bool = False
) -> evaluation.Report:
    return evaluation.evaluate(
        scene.model,
        images,
        batch_size=scene.batch_size if batch_size is None else batch_size,
        certify=0,  # takes minutes for wide layers: a measure of its own
        progress=scene.progress,
        flip=flip,
        nonfinite="report",
    )


def quality(scene: Scene) -> dict[str, float]:
    """Accuracy, top-5, NLL, calibration, size; steps and residual of the layers."""
    report = _judged(scene, scene.test)
    metrics = report.metrics
    assert isinstance(metrics, evaluation.ClassificationMetrics)
    found = {
        "accuracy": 100 * metrics.accuracy,
        "top5": 100 * metrics.top_k,
        "nll": metrics.nll,
        "ece": 100 * metrics.ece,
        "nonfinite": float(len(metrics.nonfinite)),
        "test_seconds": report.seconds,
        **_size(scene.model),
    }
    if report.statistics:
        middle = [float(part.residual[3]) for part in report.statistics.values()]
        found["median_residual"] = float(torch.tensor(middle, dtype=torch.float64).max())  # or NaN
        found["steps"] = max(part.mean_steps for part in report.statistics.values())
    return found


def held_out(scene: Scene) -> dict[str, float]:
    """Accuracy on the images that were held out: what choices are made by."""
    if scene.held_out is None:
        raise ValueError("nothing was held out (validation=0): there is nothing to choose by.")
    return {"held_out.accuracy": 100 * _judged(scene, scene.held_out).accuracy}


def flipped(scene: Scene) -> dict[str, float]:
    """Accuracy and calibration with the mean of an image's and its mirror image's probabilities."""
    found = _judged(scene, scene.test, flip=True).flip
    assert isinstance(found, evaluation.ClassificationMetrics)
    calibration = {"flip.nll": found.nll, "flip.ece": 100 * found.ece}
    return {"flip.accuracy": 100 * found.accuracy, **calibration}


def certificate(scene: Scene) -> dict[str, float]:
    """The share of 16 test images whose equilibrium is proven unique, in the worst layer."""
    found = evaluation.certify_dataset(scene.model, scene.test, _CERTIFIED)
    shares = [float(part.certified.double().mean()) for part in found.values()]
    return {"certified": 100 * min(shares)}


def segmentation(scene: Scene) -> dict[str, float]:
    """mIoU, mean accuracy of the classes, share of right pixels."""
    metrics = _judged(scene, scene.test, batch_size=min(scene.batch_size, 16)).metrics
    assert isinstance(metrics, evaluation.SegmentationMetrics)
    share = metrics.per_class
    return {
        "miou": 100 * metrics.miou,
        "macc": 100 * float(share[~share.isnan()].mean()),
        "aacc": 100 * metrics.accuracy,
        **_size(scene.model),
    }


def corruptions(scene: Scene) -> dict[str, float]:
    """Accuracy under each of the 19 corruptions, mean over five severities (smoke: over one).

    Of the first 2,000 test images.
    """
    study = evaluation.corruption_study(
        scene.model,
        scene.test.subset(range(min(_CORRUPTED, len(scene.test)))),
        severities=(3,) if scene.smoke else (1, 2, 3, 4, 5),
        batch_size=scene.batch_size,
        progress=scene.progress,
    )
    found = {f"corruption.{kind}": 100 * value for kind, value in study.by_kind.items()}
    found |= {"corruption.mean": 100 * study.mean_accuracy, "corruption.clean": 100 * study.clean}
    study.save(scene.folder)
    return found


def known_and_unknown(scene: Scene) -> dict[str, float]:
    """KerDEQ Table 3: accuracy and KL on learned classes, KL to uniform on the others."""
    known = known_classes(scene.test)
    found = known_unknown_kl(scene.model, scene.test, known, scene.batch_size, scene.device)
    names = ("known.accuracy", "known.kl", "unknown.kl")
    return {**dict(zip(names, (100 * found[0], *found[1:]), strict=True)), **_size(scene.model)}


def superclass(scene: Scene) -> dict[str, float]:
    """GEQ Table 3: accuracy on superclasses, for learned and for unseen classes."""
    where = (scene.batch_size, scene.device)
    known, unknown = superclass_accuracy(scene.model, scene.test, *where)
    found = {"known_accuracy": 100 * known, "unknown_accuracy": 100 * unknown}
    return {**found, **_size(scene.model)}


def saliency(scene: Scene) -> dict[str, float]:
    """GradCAM: the share of a map's mass in the fifth of its pixels where it is largest.

    A flat map has 20, one of zeros counts as flat; a map of one bright spot has 100. The picture
    lies in the run folder.
    """
    part = scene.test.subset(range(min(_SALIENT, len(scene.test))))
    shares = []
    for images, _ in batches(part, 8, scene.device):
        maps = evaluation.gradcam(scene.model, model_input(scene.model, part, images)).flatten(1)
        top = maps.topk(max(1, maps.shape[1] // 5), dim=1).values.sum(1)
        mass = maps.sum(1)
        shares.append(torch.where(mass > 0, top / mass, 0.2))
    evaluation.save_gradcam(scene.model, part, scene.folder / "gradcam.png")
    return {"focus": 100 * float(torch.cat(shares).mean())}


@torch.no_grad()
def features(scene: Scene) -> dict[str, float]:
    """Mean of |z| and of z² over the equilibria of the test images (OptEq Table 3)."""
    total, count = torch.zeros(2, dtype=torch.float64, device=scene.device), 0
    for images, _ in batches(scene.test, scene.batch_size, scene.device):
        with evaluating(scene.model), observe(scene.model) as seen:
            scene.model(model_input(scene.model, scene.test, images))
        for z in (found.value for each in seen.solutions.values() for found in each):
            total += torch.stack([z.double().abs().sum(), z.double().square().sum()])
            count += z.numel()
    absolute, square = (total / count).tolist()
    return {"mean_absolute": absolute, "mean_square": square}


@contextmanager
def _without_tf32() -> Iterator[None]:
    places: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    kept = [place.allow_tf32 for place in places]
    try:
        for place in places:
            place.allow_tf32 = False
        yield
    finally:
        for place, allowed in zip(places, kept, strict=True):
            place.allow_tf32 = allowed


@torch.no_grad()
def residual(scene: Scene) -> dict[str, float]:
    """‖z − T(z)‖₂/‖z‖₂ of a batch, mean over the test batches (OptEq Table 8).

    Without TF32, whose rounding alone leaves 1e-4 and more.
    """
    ratios: list[torch.Tensor] = []

    def watch(layer: nn.Module, inputs: tuple[torch.Tensor, ...], z: torch.Tensor) -> None:
        after = layer.step(z, *layer.inject(*inputs))  # type: ignore[operator]
        ratios.append((z - after).double().norm() / z.double().norm())

    with ExitStack() as hooks, evaluating(scene.model), _without_tf32():
        for layer in equilibrium_layers(scene.model).values():
            hooks.enter_context(layer.register_forward_hook(watch))
        for images, _ in batches(scene.test, scene.batch_size, scene.device):
            scene.model(model_input(scene.model, scene.test, images))
    return {"residual": float(torch.stack(ratios).mean())}


# Chapter 4 of the thesis: solver paths and loss landscapes.


_SAMPLES, _STEPS = 256, 50
_SPANNED = 32  # samples whose paths span the plane: all 256 would be 13,056 points of 37,632
_TOLERANCE = 1e-2
_EXAMPLES, _GRID = 1024, 51


def _path(model: nn.Module, scene: Scene, data: ImageData) -> tuple[SolverPath, Tensor]:
    """The path of Anderson for the first images of ``data``, and their classes [B]."""
    count = min(16 if scene.smoke else _SAMPLES, len(data))
    images = torch.as_tensor(data.images[slice(0, count)]).to(scene.device)
    layer, given = layer_input(model, data.normalize(images))
    solver = Anderson(rtol=_TOLERANCE, max_steps=_STEPS)
    path = record_path(layer, given, solver=solver, steps=_STEPS)
    return path, torch.as_tensor(data.targets[slice(0, count)]).cpu()


def _first_step(states: Tensor) -> float:
    """The first step's share of the length of a path [K, B, n], mean over samples, in percent.

    100: one leap and rest. Samples that blew up are left out.
    """
    lengths = states.diff(dim=0).double().norm(dim=2)
    total = lengths.sum(0)
    kept = torch.isfinite(total) & (total > 0)
    return 100.0 * float((lengths[0][kept] / total[kept]).mean())


def path_measure(scene: Scene) -> dict[str, float]:
    """Figures 4.1 and 4.2: the residual by step, and how the path lies in a plane."""
    path, _ = _path(scene.model, scene, scene.test)
    curve, plane = path.mean_curve(), principal_components(path.states[:, :_SPANNED])
    found = {f"path.residual.{k}": float(curve[k - 1]) for k in (5, 20, 50)}
    found["path.settled"] = 100.0 * float((path.steps_to(_TOLERANCE) > 0).double().mean())
    found["path.first_step"] = _first_step(path.states)
    found["path.plane"] = 100.0 * float(plane.explained.sum())
    name = scene.folder.name.rsplit("-", 1)[0]
    pictures.save_picture(residual_figure({name: {"Anderson": path}}), scene.folder / "residuals")
    pictures.save_picture(path_figure({name: path}), scene.folder / "paths")
    return found


def training_paths(scene: Scene) -> dict[str, float]:
    """Figure 4.3: paths of training images at the start, after 1, a quarter, half, all epochs."""
    found: dict[str, float] = {}
    drawn: dict[str, SolverPath] = {}
    moments = zip(STAGES, _snapshots(scene.folder / "epochs", scene.epochs), strict=True)
    for stage, (epoch, file) in moments:
        model = copy.deepcopy(scene.model)
        model.load_state_dict(load_file(file))
        path, classes = _path(model.eval(), scene, scene.train)
        steps = path.steps_to(_TOLERANCE)
        found[f"stage.{stage}.first_step"] = _first_step(path.states)
        # Variance between the class means over the whole variance of the last states.
        spread = TrainingPath((stage,), classes, (path,)).spread()
        found[f"stage.{stage}.separation"] = 100.0 * float(spread)
        taken = torch.where(steps > 0, steps, path.steps).double().mean()
        found[f"stage.{stage}.steps"] = float(taken)
        drawn[f"{stage} (epoch {epoch})"] = path
    pictures.save_picture(path_figure(drawn), scene.folder / "training_paths")
    return found


def _snapshots(folder: Path, end: int) -> list[tuple[int, Path]]:
    """Epoch and weights of each stage. In a short run stages fall together, on the same epoch."""
    files = {int(p.stem.split("_")[1]): p for p in folder.glob("epoch_*.safetensors")}
    wanted = (0, 1, max(1, end // 4), max(1, end // 2), end)  # of STAGES
    if set(wanted) - set(files):
        held = f"the weights of epochs {sorted(files)} alone" if files else "no weights"
        raise FileNotFoundError(
            f"{folder} holds {held}, where Figure 4.3 looks at epochs {sorted(set(wanted))}: they "
            "are written while training. Remove the run's folder and train again."
        )
    return [(epoch, files[epoch]) for epoch in wanted]


def local_minima(loss: Tensor) -> int:
    """Points of a grid [H, W] below all their neighbors (up to eight); a hole is no neighbor."""
    padded = torch.nn.functional.pad(loss.nan_to_num(nan=torch.inf), (1, 1, 1, 1), value=torch.inf)
    around = padded.unfold(0, 3, 1).unfold(1, 3, 1).flatten(2)  # [H, W, 9], the point in the middle
    lowest = (loss.unsqueeze(2) < around[:, :, [0, 1, 2, 3, 5, 6, 7, 8]]).all(2)
    return int((torch.isfinite(loss) & lowest).sum())


def _landscape(scene: Scene, data: ImageData, name: str) -> dict[str, float]:
    """Φ(a, b) around the weights, 51 × 51 over [−1, 1]², filter-normalized.

    Figure 4.4 is of training images, Figure 4.5 of test images: ImageNet's own are 50 a class, the
    first 1,024 of 21 classes.
    Rows are kept as they are measured, so that an interrupted landscape goes on.
    """
    count = min(32 if scene.smoke else _EXAMPLES, len(data))
    surface = measure_landscape(
        scene.model,
        data.subset(range(count)),
        grid=Grid(points=5 if scene.smoke else _GRID),
        name=scene.folder.name.rsplit("-", 1)[0],
        seed=scene.seed,
        batch_size=scene.batch_size,
        file=scene.folder / f"{name}.safetensors",
        overwrite=True,
        progress=scene.progress,
    )
    pictures.save_picture(contour_figure([surface]), scene.folder / name)
    return {
        f"{name}.center": surface.center_loss(),
        f"{name}.flat": 100.0 * surface.small_loss_share(1.0),
        f"{name}.minima": float(local_minima(surface.loss)),
        f"{name}.holes": float(surface.holes.sum()),
    }


MEASURES: Mapping[str, Measure] = MappingProxyType(
    {
        "quality": quality,
        "held out": held_out,
        "flip": flipped,
        "certificate": certificate,
        "segmentation": segmentation,
        "corruptions": corruptions,
        "known and unknown": known_and_unknown,
        "superclass": superclass,
        "saliency": saliency,
        "features": features,
        "residual": residual,
        "times": times,
        "throughput": throughput,
        "paths": path_measure,
        "paths of training images": training_paths,
        "landscape": lambda scene: _landscape(scene, scene.train, "landscape"),
        "landscape of test images": lambda scene: _landscape(scene, scene.test, "test_landscape"),
    }
)
"""name → what a job measures."""
