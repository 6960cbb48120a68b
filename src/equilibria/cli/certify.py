"""``equilibria certify``: what is proven about a trained network."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from equilibria.engine import write_json

from .console import check_file, fail, output, print_json, print_table, say
from .flags import numbers
from .loading import Data, Device, Json, Root, Split, Weights, prepared


def certify(
    weights: Weights,
    data: Data = None,
    root: Root = None,
    split: Split = "test",
    images: Annotated[int, typer.Option(min=1, help="How many images to certify on.")] = 64,
    device: Device = None,
    radius: Annotated[
        str | None,
        typer.Option(
            metavar="R,R",
            help="Instead of the layers, certify the labels: accuracy that is proven within these "
            "radii (pixels from 0 to 1), such as 36/255,72/255,108/255.",
        ),
    ] = None,
    norm: Annotated[
        Literal["2", "inf"], typer.Option(help="The norm of --radius: ℓ2, or ℓ∞ (every pixel).")
    ] = "2",
    attack: Annotated[
        bool, typer.Option("--attack", help="With --radius, also the accuracy under an attack.")
    ] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Print the whole certificate of every layer.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the numbers to this JSON file; with --radius a picture beside."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Is each layer's equilibrium unique, and how far from it is the answer?

    With --radius: which labels are proven not to change within it?

    An attack that gets under a certified radius is an error.

    Exits with 1 if some layer's equilibrium is not certified to be unique.
    """
    from equilibria import evaluation
    from equilibria.evaluation.model_certificate import certificate_dict
    from equilibria.evaluation.rich_output import make_table, number

    radii = None
    if radius is not None:
        wanted = "positive numbers, such as 36/255,72/255 or 0.1,0.5"
        radii = numbers(
            "--radius", radius, lambda r: float(Fraction(r)), lambda found: min(found) > 0, wanted
        )
    if radii is None and (attack or norm != "2"):
        raise fail("--attack and --norm go with --radius.", "Such as --radius 36/255,72/255.")
    if radii is not None and full:
        raise fail("--full prints the certificates of layers, and --radius certifies labels.")
    if out is not None:
        check_file(out)
        if radii is not None and out.suffix.lower() == ".png":
            raise fail(f"--out {out}: the picture has this name; give one for the numbers (.json).")
    model, dataset = prepared(weights, data, root, split, device, images)
    if radii is not None:
        _labels(model, dataset, radii, norm, attack, out, as_json)
        return
    whole = evaluation.certify_dataset(model, dataset, images, progress=not as_json)
    parts = certificate_dict(whole)
    rows = [_row(name, part) for name, part in parts.items()]
    unique = all(row["unique"] for row in rows)
    rigorous = all(part["rigorous"] for part in parts.values())
    found = {"unique": unique, "rigorous": rigorous, "layers": rows}
    if out is not None:
        write_json(out, found)
    if as_json:
        print_json(found)
    else:
        shown = ("contraction", "modulus", "error_bound", "lipschitz")
        cells = []
        for row in rows:
            words = (row["layer"], row["guarantee"], "yes" if row["unique"] else "no")
            cells.append([*words, *(number(row[key]) for key in shown)])
        names = ("layer", "guarantee", "unique", "ρ", "m", "‖z − z*‖ ≤", "Lipschitz")
        output().print(make_table(None, names, cells, left=3))
        if full:
            for name, each in whole.items():
                output().print(f"\n{name}\n{each}", markup=False, highlight=False)
    if not unique:
        raise typer.Exit(1)


def _labels(
    model: Any,
    dataset: Any,
    radii: list[float],
    norm: str,
    attack: bool,
    out: Path | None,
    as_json: bool,
) -> None:
    from equilibria import evaluation

    on_gpu = next(model.parameters()).is_cuda
    options: dict[str, Any] = {"norm": norm, "batch_size": 256 if on_gpu else 64}
    options["progress"] = not as_json
    found = evaluation.certified_accuracy(model, dataset, **options)
    report = found.to_dict(radii)
    if attack:
        for each in report["certified"]:
            each["attacked"] = evaluation.attacked_accuracy(
                model, dataset, each["radius"], certified=found, **options
            )
    if out is not None:
        write_json(out, report)
        found.save(out.with_suffix(".png"))
    if as_json:
        print_json(report)
        return
    rows = [["0", f"{found.accuracy:.1%}", "–"]]
    for each in report["certified"]:
        numbers = [f"{each[key]:.1%}" for key in ("accuracy", "attacked") if key in each]
        rows.append([f"{each['radius']:.4g}", *numbers])
    columns = ("radius", "certified accuracy", "under attack")[: 2 + attack]
    print_table(*columns, rows=[row[: len(columns)] for row in rows])
    say(
        f"{len(found.right)} images, median radius {report['median_radius']:.4g}, Lipschitz "
        f"constant {found.lipschitz:.4g} ({'ℓ∞' if norm == 'inf' else 'ℓ2'}, pixels from 0 to 1); "
        "the network at its equilibria."
    )
    for note in found.notes:
        say(f"note: {note}")


def _row(name: str, part: dict[str, Any]) -> dict[str, Any]:
    """Of a layer's certificate in numbers: the worst of all images."""
    ends = {"contraction": "max", "modulus": "min", "error_bound": "max", "residual": "max"}
    worst = {
        key: part[key][end] if isinstance(part[key], dict) else part[key]
        for key, end in ends.items()
    }
    unique = part["unique"] == 1.0
    found = {"layer": name, "guarantee": part["kind"], "unique": unique, **worst}
    return {**found, "lipschitz": part["lipschitz"]}
