"""Tell the story of one handwritten digit: what the network solved, how sure it is, what is proven.

    python examples/demo.py [--out demo] [--epochs 10]

Trains a GEQ, its linear twin (OptEq), an explicit twin of equal size and a network whose labels
have a proven radius. Writes demo/report.html (one self-contained page), demo/report.json (every
number on it) and the weights of the GEQ. Needs no download: the digits come with scikit-learn.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import shutil
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from certified_labels import train as train_certified
from demo_page import page
from matplotlib import font_manager
from PIL import Image, ImageDraw, ImageFont
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import equilibria as eq
from equilibria import evaluation

MODELS = {"GEQ": "geq_digits", "OptEq": "opteq_digits", "explicit": "explicit_digits"}
STARTS = 5
SHORT_STEPS = eq.Picard(rtol=1e-13, max_steps=30, damping=0.25, block=1)
NOISE = (0.0, 0.1, 0.2, 0.3, 0.4)
LETTERS = "AEFHKMNRTVWX"  # none of them looks like a digit


@dataclass(frozen=True)
class Trained:
    """One network after training: its report on the test digits and its training history."""

    report: Any
    history: list[dict[str, Any]]
    seconds: float
    model: Any


def train(name: str, out: Path, epochs: int, seed: int, test: Any) -> Trained:
    config = eq.training.TrainConfig(
        model=MODELS[name],
        data="digits",
        epochs=epochs,
        seed=seed,
        out=str(out / "runs" / MODELS[name]),
    )
    began = time.perf_counter()
    result = eq.training.fit(config, overwrite=True)
    seconds = time.perf_counter() - began
    report = evaluation.evaluate(result.model, test, certify=64, progress=False)
    return Trained(report, result.history, seconds, result.model.eval())


def answers(model: nn.Module, test: Any, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """(label, probabilities) of pictures [B, 1, 8, 8] with pixels from 0 to 1."""
    with torch.no_grad():
        probabilities = model(evaluation.model_input(model, test, pixels)).softmax(1)
    return probabilities.argmax(1), probabilities


def grays(picture: Tensor) -> list[list[int]]:
    """Pixels from 0 to 1 as whole numbers from 0 (white) to 255 (ink)."""
    shades: list[list[int]] = (picture.clamp(0, 1).squeeze() * 255).round().int().tolist()
    return shades


@torch.no_grad()
def solved(model: nn.Module, x: Tensor, seed: int) -> dict[str, Any]:
    """Every layer's problem for one digit x [1, 1, 8, 8], solved in float64 from random starts.

    The method is plain iteration z ← T(z), whose steps the certificate speaks of.
    """
    exact = evaluation.with_solver(
        copy.deepcopy(model).double(), eq.Picard(rtol=1e-13, max_steps=400, block=1)
    )
    layers = eq.nn.equilibrium_layers(exact)
    inputs: dict[str, Tensor] = {}
    hooks = [
        layer.register_forward_pre_hook(
            lambda _, given, name=name: inputs.__setitem__(name, given[0].detach())
        )
        for name, layer in layers.items()
    ]
    exact(x.double())
    for hook in hooks:
        hook.remove()
    generator = torch.Generator().manual_seed(seed)
    found, hooks = [], []
    for name, layer in layers.items():
        inside: Any = layer
        state = inside.solve(inputs[name]).value
        scale = state.square().mean().sqrt()
        shape = (STARTS, *state.shape[1:])
        sizes = torch.linspace(0.5, 2.5, STARTS).view(-1, 1, 1, 1) * scale  # near and far ones
        starts = sizes * torch.randn(shape, generator=generator, dtype=torch.float64).abs()
        repeated = inputs[name].expand(STARTS, -1, -1, -1)
        problem = inside.problem(repeated)
        full, small = [], []  # states; the start is the first
        inside.solve(repeated, starts, callback=lambda _, z, __, path=full: path.append(z.clone()))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", eq.ConvergenceWarning)  # stopped on purpose
            inside.solve(
                repeated,
                starts,
                solver=SHORT_STEPS,
                callback=lambda _, z, __, path=small: path.append(z.clone()),
            )
        certificate = eq.certify(inside, inputs[name])
        found.append(
            {
                "name": name,
                "unknowns": state.numel(),
                "objective": torch.stack([problem.objective(z) for z in small]).T.tolist(),
                "minimum": float(problem.objective(full[-1]).min()),
                "apart": [float(_spread(states)) for states in full],
                "length": float(state.norm()),
                "contraction": float(torch.as_tensor(certificate.contraction).max()),
                "modulus": float(torch.as_tensor(certificate.modulus).min()),
                "smoothness": float(torch.as_tensor(certificate.smoothness).max()),
                "unique": bool(certificate.unique),
                "kind": str(certificate.kind),
                "stationarity": float(certificate.stationarity.max()),
            }
        )
        hooks.append(layer.register_forward_pre_hook(lambda _, given, z=starts: (given[0], z)))
    ends = exact(x.double().expand(STARTS, -1, -1, -1))
    for hook in hooks:
        hook.remove()
    return {
        "starts": STARTS,
        "layers": found,
        "labels": ends.argmax(1).tolist(),
        "logits_apart": float(_spread(ends)),
    }


def _spread(states: Tensor) -> Tensor:
    """The largest distance between two of the states [N, ...]."""
    return torch.pdist(states.flatten(1)).max()


def error_bounds(model: nn.Module, x: Tensor) -> dict[str, float]:
    """How far each layer's answer, as the network computed it, is from the exact one, at most."""
    found = evaluation.certify_model(model, x)
    return {name: float(part.error_bound.max()) for name, part in found.items()}


def confidence(model: nn.Module, test: Any) -> dict[str, Any]:
    """Is the network right as often as it says? And which digits is it least sure of?"""
    said, probabilities = answers(model, test, test.images / 255.0)
    sure, right = probabilities.amax(1), said == test.targets
    groups = []
    for low, high in ((0.99, 1.01), (0.9, 0.99), (0.0, 0.9)):
        chosen = (sure >= low) & (sure < high)
        groups.append(
            {
                "from": low,
                "to": min(high, 1.0),
                "count": int(chosen.sum()),
                "right": int(right[chosen].sum()),
            }
        )
    doubtful = [
        {
            "picture": test.images[i, 0].int().tolist(),
            "label": int(said[i]),
            "truth": int(test.targets[i]),
            "confidence": float(sure[i]),
        }
        for i in sure.argsort()[:8].tolist()
    ]
    return {"groups": groups, "mean": float(sure.mean()), "doubtful": doubtful}


def radius(test: Any, index: int, seed: int, epochs: int, geq: nn.Module) -> dict[str, Any]:
    """A network made to be certified: the radius of one digit, and of all of them."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Flatten(), eq.nn.MonotoneDEQ(40, in_channels=64, m=20.0), nn.Linear(40, 10)
    )
    train_certified(model, eq.data.load("digits", "train"), epochs)
    found = evaluation.certified_accuracy(model, test, batch_size=len(test))
    pixels = test.images[index : index + 1] / 255.0
    own = float(found.radius[index])
    certificate = eq.certify(model, evaluation.model_input(model, test, pixels))
    label, nearest = int(certificate.label[0]), int(certificate.nearest[0])
    # The steepest way from the label to the class that limits the radius.
    moved = pixels.clone().requires_grad_()
    logits = model(evaluation.model_input(model, test, moved))[0]
    (slope,) = torch.autograd.grad(logits[nearest] - logits[label], moved)
    way = F.normalize(slope.flatten(), dim=0).view_as(pixels)
    lengths = torch.linspace(0.0, 4.0, 401).view(-1, 1, 1, 1)
    tried = (pixels + lengths * way).clamp(0.0, 1.0)
    distance = (tried - pixels).flatten(1).norm(dim=1)
    changed = answers(model, test, tried)[0] != label
    first = int(changed.int().argmax()) if bool(changed.any()) else None
    at_radius = int((distance <= own).nonzero().max())
    noise = torch.randn(1000, 64, generator=torch.Generator().manual_seed(seed))
    random = pixels + (own * F.normalize(noise, dim=1)).view(-1, 1, 8, 8)
    grid = [k / 100 for k in range(61)]
    attacks = [
        {
            "radius": r,
            "accuracy": evaluation.attacked_accuracy(
                model, test, r, steps=20, restarts=1, batch_size=len(test), seed=seed
            ),
        }
        for r in (0.1, 0.2, 0.3, 0.4)
    ]
    other = eq.certify(geq, evaluation.model_input(geq, test, pixels))
    return {
        "label": label,
        "nearest": nearest,
        "radius": own,
        "confidence": float(answers(model, test, pixels)[1].max()),
        "accuracy": found.accuracy,
        "median": float(found.radius.median()),
        "curve": [{"radius": r, "accuracy": found.at(r)} for r in grid],
        "attacks": attacks,
        "random_tried": len(random),
        "random_changed": int((answers(model, test, random)[0] != label).sum()),
        "edge": {
            "picture": grays(tried[at_radius]),
            "distance": float(distance[at_radius]),
            "label": int(answers(model, test, tried[at_radius : at_radius + 1])[0]),
        },
        "broken": None
        if first is None
        else {
            "picture": grays(tried[first]),
            "distance": float(distance[first]),
            "label": int(answers(model, test, tried[first : first + 1])[0]),
        },
        "geq_radius": float(other.radius[0]) * min(test.std),
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def noisy(model: nn.Module, test: Any, index: int, seed: int) -> list[dict[str, Any]]:
    """The digit and all test digits with Gaussian noise of growing size."""
    clean = test.images / 255.0
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(seed))
    found, own = [], []
    for sigma in NOISE:
        pixels = (clean + sigma * noise).clamp(0.0, 1.0)
        said, probabilities = answers(model, test, pixels)
        sure = probabilities.amax(1)
        own.append(pixels[index])
        found.append(
            {
                "sigma": sigma,
                "picture": grays(pixels[index]),
                "label": int(said[index]),
                "confidence": float(sure[index]),
                "accuracy": float((said == test.targets).double().mean()),
                "mean_confidence": float(sure.mean()),
            }
        )
    parts = evaluation.certify_model(model, evaluation.model_input(model, test, torch.stack(own)))
    for i, level in enumerate(found):
        level["unique"] = all(bool(part.certified[i]) for part in parts.values())
    return found


def typeset(text: str) -> Tensor:
    """Characters made as the digits were: 32 × 32 dots, averaged over 4 × 4. [N, 1, 8, 8]."""
    font = ImageFont.truetype(font_manager.findfont("DejaVu Sans"), 200)
    pictures = []
    for character in text:
        large = Image.new("L", (400, 400))
        ImageDraw.Draw(large).text((200, 200), character, fill=255, font=font, anchor="mm")
        cut = large.crop(large.getbbox())
        width = min(32, round(32 * cut.width / cut.height))
        canvas = Image.new("L", (32, 32))
        canvas.paste(cut.resize((width, 32)), ((32 - width) // 2, 0))
        dots = torch.frombuffer(bytearray(canvas.tobytes()), dtype=torch.uint8).view(1, 32, 32)
        pictures.append(F.avg_pool2d(dots.float() / 255.0, 4))
    return torch.stack(pictures)


def letters(model: nn.Module, test: Any) -> dict[str, Any]:
    """What the network says of letters; digits of the same font are the control."""
    said, probabilities = answers(model, test, typeset(LETTERS))
    sure = probabilities.amax(1)
    control, _ = answers(model, test, typeset("0123456789"))
    usual = answers(model, test, test.images / 255.0)[1].amax(1)
    parts = evaluation.certify_model(model, evaluation.model_input(model, test, typeset(LETTERS)))
    return {
        "letters": [
            {
                "letter": letter,
                "picture": grays(picture),
                "label": int(label),
                "confidence": float(c),
            }
            for letter, picture, label, c in zip(LETTERS, typeset(LETTERS), said, sure, strict=True)
        ],
        "mean_confidence": float(sure.mean()),
        "sure": int((sure > 0.9).sum()),
        "digits_mean_confidence": float(usual.mean()),
        "digits_sure": float((usual > 0.9).double().mean()),
        "font_digits_right": int((control == torch.arange(10)).sum()),
        "unique": all(bool(part.unique) for part in parts.values()),
    }


def compared(each: Trained) -> dict[str, Any]:
    """The row of one network in the table: its report in plain numbers."""
    report = each.report
    found = {
        **report.to_dict(),
        "history": each.history,
        "seconds": each.seconds,
        "steps": [s.mean_steps for s in report.statistics.values()],
        "converged": min(
            (s.converged for s in report.statistics.values() if not s.fixed_steps), default=None
        ),
        "unique": None,
        "error_bound": None,
    }
    if report.certificate is not None:
        parts = report.certificate.values()
        found["unique"] = all(bool(part.unique) for part in parts)
        found["error_bound"] = max(float(part.error_bound.max()) for part in parts)
    return found


def shown(numbers: dict[str, Any]) -> Table:
    """The comparison, for the terminal."""
    networks = numbers["networks"]
    table = Table(title=f"{numbers['test_digits']} test digits", title_justify="left")
    for heading in ("", *networks):
        table.add_column(heading)
    table.add_row("parameters", *(f"{n['parameters']:,}" for n in networks.values()))
    table.add_row("accuracy", *(f"{n['metrics']['accuracy']:.2%}" for n in networks.values()))
    table.add_row(
        "one answer, proven",
        *(
            "–" if n["unique"] is None else "yes" if n["unique"] else "no"
            for n in networks.values()
        ),
    )
    table.add_row("trained in", *(f"{n['seconds']:.0f} s" for n in networks.values()))
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder of the report")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--digit", type=int, default=1, help="the test digit of the story")
    options = parser.parse_args(arguments)
    began = time.perf_counter()
    console = Console()
    torch.set_num_threads(1)  # the networks are too small for a second thread
    test = eq.data.load("digits", "test")
    if not 0 <= options.digit < len(test):
        parser.error(f"--digit {options.digit}: expected 0 to {len(test) - 1}.")
    found = {}
    for name in MODELS:
        console.print(f"[bold]{name}[/]: training {MODELS[name]} for {options.epochs} epochs")
        found[name] = train(name, options.out, options.epochs, options.seed, test)
    model, index = found["GEQ"].model, options.digit
    console.print("[bold]The story of one digit[/]: solving, certifying, adding noise")
    pixels = test.images[index : index + 1] / 255.0
    x = evaluation.model_input(model, test, pixels)
    said, probabilities = answers(model, test, pixels)
    numbers: dict[str, Any] = {
        "digit": {
            "index": index,
            "picture": test.images[index, 0].int().tolist(),
            "truth": int(test.targets[index]),
            "label": int(said),
            "probabilities": probabilities[0].tolist(),
        },
        "solve": solved(model, x, options.seed),
        "error_bounds": error_bounds(model, x),
        "confidence": confidence(model, test),
        "radius": radius(test, index, options.seed, 6 * options.epochs, model),
        "noise": noisy(model, test, index, options.seed),
        "letters": letters(model, test),
        "networks": {name: compared(each) for name, each in found.items()},
        "test_digits": len(test),
        "epochs": options.epochs,
        "seed": options.seed,
        "versions": {
            "equilibria": eq.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }
    numbers["seconds"] = time.perf_counter() - began
    console.print(shown(numbers))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "report.json").write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    (options.out / "report.html").write_text(page(numbers), encoding="utf-8")
    weights = options.out / "geq_digits.safetensors"
    shutil.copy(options.out / "runs" / MODELS["GEQ"] / "model.safetensors", weights)
    console.print(f"report: {options.out / 'report.html'}, weights: {weights}")


if __name__ == "__main__":
    main()
