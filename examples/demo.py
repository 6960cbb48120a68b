"""Train a GEQ, its linear twin (OptEq) and an explicit twin of equal size on the digits.

    python examples/demo.py [--out demo] [--epochs 15]

Prints accuracy, calibration, solver steps and certificate of all three in one table and writes
demo/report.html with the curves. Needs no download: the digits come with scikit-learn.
"""

from __future__ import annotations

import argparse
import base64
import html
import io
import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from rich.console import Console
from rich.table import Table

import equilibria as eq

mpl.use("Agg")
from matplotlib import pyplot as plt

MODELS = {"GEQ": "geq_digits", "OptEq (linear twin)": "opteq_digits", "explicit": "explicit_digits"}
COLORS = dict(zip(MODELS, ("#0072B2", "#E69F00", "#555555"), strict=True))
MARKS = dict(zip(MODELS, ("o", "s", "^"), strict=True))


@dataclass(frozen=True)
class Trained:
    """One network after training: its report on the test digits and its training history."""

    name: str
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
    report = eq.evaluation.evaluate(result.model, test, certify=64, progress=False)
    return Trained(name, report, result.history, seconds, result.model)


def row(each: Trained) -> list[str]:
    """A row of the table for one network."""
    report = each.report
    steps = [f"{s.mean_steps:.1f}" for s in report.statistics.values()]
    converged = [s.converged for s in report.statistics.values()]
    certificate = report.certificate
    proven = "no equilibrium"
    bound = lipschitz = "–"
    if certificate is not None:
        unique = all(part.unique for part in certificate.values())
        kinds = sorted({str(part.kind) for part in certificate.values()})
        proven = f"{'unique' if unique else 'not certified'} ({', '.join(kinds)})"
        worst = max(float(part.error_bound.max()) for part in certificate.values())
        bound = f"{worst:.1e}"
        constants = [part.lipschitz for part in certificate.values()]
        if all(c is not None for c in constants):
            lipschitz = ", ".join(f"{c:.2f}" for c in constants)
    return [
        each.name,
        f"{report.parameters:,}",
        f"{report.metrics.accuracy:.2%}",
        f"{report.metrics.ece:.3f}",
        f"{report.metrics.nll:.3f}",
        ", ".join(steps) or "–",
        f"{min(converged):.0%}" if converged else "–",
        proven,
        bound,
        lipschitz,
        f"{each.seconds:.0f} s",
    ]


HEADINGS = (
    *("network", "parameters", "accuracy", "ECE", "NLL", "solver steps", "converged"),
    *("equilibrium", "‖z − z*‖ ≤", "Lipschitz", "trained in"),
)


def picture(draw: Any, width: float = 6.0, height: float = 3.6) -> str:
    """One set of axes, drawn by ``draw(axes)``, as an <img>."""
    figure, axes = plt.subplots(figsize=(width, height), layout="constrained")
    draw(axes)
    return embedded(figure)


def embedded(figure: Any) -> str:
    """An <img> with the picture inside the page."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=130)
    plt.close(figure)
    data = base64.b64encode(file.getvalue()).decode()
    return f'<img alt="" src="data:image/png;base64,{data}">'


def curves(found: list[Trained], key: str, label: str) -> Any:
    def draw(axes: Any) -> None:
        for each in found:
            points = [(h["epoch"], h[key]) for h in each.history if h.get(key) is not None]
            axes.plot(
                *zip(*points, strict=True),
                color=COLORS[each.name],
                marker=MARKS[each.name],
                markersize=4,
                label=each.name,
            )
        axes.set(xlabel="epoch", ylabel=label)
        axes.grid(alpha=0.3)
        axes.legend()

    return draw


def reliability(found: list[Trained]) -> Any:
    def draw(axes: Any) -> None:
        axes.plot([0, 1], [0, 1], color="0.7", linestyle="--", label="perfect")
        for each in found:
            bins = each.report.metrics.reliability
            used = bins.count >= 5  # too few samples in other bins
            axes.plot(
                bins.confidence[used],
                bins.accuracy[used],
                color=COLORS[each.name],
                marker=MARKS[each.name],
                label=f"{each.name}, ECE {bins.ece:.3f}",
            )
        axes.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1), ylim=(0, 1.02))
        axes.grid(alpha=0.3)
        axes.legend()

    return draw


def convergence(geq: Trained, test: Any) -> Any:
    """‖T(z) − z‖ of the GEQ's first layer on test digits, step by step, with the proven rate."""
    layers = eq.nn.equilibrium_layers(geq.model)
    name, layer = next(iter(layers.items()))
    x = test.normalize(test.images[:64])
    caught: list[torch.Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _, given: caught.append(given[0].detach()))
    with torch.no_grad():
        geq.model.eval()(x)
    hook.remove()
    residuals: list[torch.Tensor] = []
    solver = eq.Picard(rtol=1e-6, max_steps=60, block=1)
    with torch.no_grad():
        layer.solve(caught[0], solver=solver, callback=lambda _, __, r: residuals.append(r.clone()))
    rate = float(torch.as_tensor(eq.certify(layer, caught[0]).contraction).max())

    def draw(axes: Any) -> None:
        paths = torch.stack(residuals)
        paths = paths / paths[0]
        axes.semilogy(paths.numpy(), color=COLORS["GEQ"], alpha=0.15)
        bound = [rate**k for k in range(len(paths))]
        axes.semilogy(bound, color="black", linestyle="--", label=f"proven: ρ = {rate:.3f}")
        axes.set(xlabel="step of plain iteration", ylabel="residual, relative to the first")
        axes.set_title(f"64 digits through {name}", fontsize=10)
        axes.grid(alpha=0.3)
        axes.legend()

    return draw


def gallery(geq: Trained, test: Any) -> str:
    """The test digits with the least confident predictions of the GEQ."""
    with torch.no_grad():
        probabilities = geq.model.eval()(test.normalize(test.images)).softmax(1)
    confidence, said = probabilities.max(1)
    doubtful = confidence.argsort()[:12].tolist()
    figure, axes = plt.subplots(2, 6, figsize=(8.4, 3.4), layout="constrained")
    for place, i in zip(axes.flat, doubtful, strict=True):
        place.imshow(test.images[i, 0], cmap="gray_r")
        right = int(said[i]) == int(test.targets[i])
        place.set_title(
            f"{int(said[i])} ({confidence[i]:.0%})" + ("" if right else f", is {test.targets[i]}"),
            fontsize=9,
            color="black" if right else "#B00020",
        )
        place.axis("off")
    return embedded(figure)


def page(found: list[Trained], test: Any, certificate: str) -> str:
    head = "".join(f"<th>{html.escape(h)}</th>" for h in HEADINGS)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row(each)) + "</tr>"
        for each in found
    )
    figures = [
        ("Loss in training", picture(curves(found, "train_loss", "training loss"))),
        (
            "Accuracy on held-out training digits",
            picture(curves(found, "val_accuracy", "accuracy")),
        ),
        ("Are the confidences right? (bins of five digits or more)", picture(reliability(found))),
        ("The solve converges at the proven rate or faster", picture(convergence(found[0], test))),
        ("The test digits that the GEQ is least sure of", gallery(found[0], test)),
    ]
    shown = "".join(
        f"<figure>{image}<figcaption>{html.escape(text)}</figcaption></figure>"
        for text, image in figures
    )
    return f"""<!doctype html><html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width"><title>equilibria: demo</title>
<style>body{{font:16px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem}}
table{{border-collapse:collapse;font-size:14px}}td,th{{border:1px solid #ccc;padding:.3rem .6rem;
text-align:left}}th{{background:#f3f3f3}}figure{{display:inline-block;margin:1rem 1rem 1rem 0}}
figcaption{{color:#444}}img{{max-width:100%;width:33rem}}pre{{background:#f7f7f7;padding:1rem;
overflow-x:auto;font-size:13px}}.wide{{overflow-x:auto}}</style>
<h1>Three networks of equal size on handwritten digits</h1>
<p>Trained on four fifths of the digits (a tenth of these held out for the curves), judged on the
other {len(test):,}. What an equilibrium layer returns is the solution of an optimization problem;
its certificate says whether that solution is unique and how far from it the answer is.</p>
<div class="wide"><table><tr>{head}</tr>{body}</table></div>{shown}
<h2>The GEQ's certificate</h2><p>On the first 64 test digits, layer by layer.</p>
<pre>{html.escape(certificate)}</pre>
<p>equilibria {eq.__version__}, torch {torch.__version__}; made by <code>make demo</code>.</p>
</html>
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder of the report")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    console = Console()
    torch.set_num_threads(1)  # the networks are too small for a second thread
    test = eq.data.load("digits", "test")
    found = []
    for name in MODELS:
        console.print(f"[bold]{name}[/]: training {MODELS[name]} for {options.epochs} epochs")
        found.append(train(name, options.out, options.epochs, options.seed, test))
    table = Table(title=f"{len(test)} test digits", title_justify="left")
    for heading in ("", *(each.name for each in found)):
        table.add_column(heading)
    for i, heading in enumerate(HEADINGS[1:], start=1):
        table.add_row(heading, *(row(each)[i] for each in found))
    console.print(table)
    options.out.mkdir(parents=True, exist_ok=True)
    parts = found[0].report.certificate
    certificate = "\n\n".join(f"{name}\n{part}" for name, part in parts.items())
    (options.out / "report.html").write_text(page(found, test, certificate), encoding="utf-8")
    numbers = {each.name: {**each.report.to_dict(), "history": each.history} for each in found}
    (options.out / "report.json").write_text(json.dumps(numbers, indent=1) + "\n")
    weights = options.out / "geq_digits.safetensors"
    shutil.copy(options.out / "runs" / MODELS["GEQ"] / "model.safetensors", weights)
    console.print(f"report: {options.out / 'report.html'}, weights: {weights}")


if __name__ == "__main__":
    main()
