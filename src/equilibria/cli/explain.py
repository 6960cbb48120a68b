"""``equilibria explain``: what a network did for some images, as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from equilibria.engine.files import write_text

from .console import check_file, say
from .loading import Converged, Device, Images, Weights, device_of, load, solver_of


def explain(
    weights: Weights,
    images: Images,
    out: Annotated[Path, typer.Option(help="The page.")] = Path("explanation.html"),
    top: Annotated[int, typer.Option(min=1, help="How many classes an image.")] = 5,
    device: Device = None,
    converged: Converged = None,
    certify: Annotated[
        bool, typer.Option(help="Prove how far each step is from the answer (slow if large).")
    ] = True,
    radius: Annotated[
        bool | None,
        typer.Option(
            "--radius/--no-radius",
            help="The proven radius of the label; not given: for networks that are made for it.",
        ),
    ] = None,
) -> None:
    """Explain predictions: image, answer, gates, GradCAM, every solver step, the certificate.

    Writes one self-contained HTML page.
    """
    from equilibria import evaluation
    from equilibria.models.certified import CertifiedNet

    check_file(out)
    model, solver = load(weights, device_of(device)), solver_of(converged)
    wanted = isinstance(model, CertifiedNet) if radius is None else radius
    answers = evaluation.predict_files(
        model, images, top=top, solver=solver, certify=wanted, progress=True
    )
    found = evaluation.explain(model, answers, certify=certify, solver=solver, progress=True)
    write_text(out, evaluation.explanation_page(found, model))
    say(f"wrote {out}")
