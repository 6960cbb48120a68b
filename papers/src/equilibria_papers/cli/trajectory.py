"""``equilibria theory trajectory``: the way of a solver, at a start and through a training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from equilibria.cli import Device, Root, error_console, fail, make_folder, output, write_json

from .common import THESIS, Data, Json, Split, Weights, answer, images_of, networks, numbers_of


def trajectory(
    weights: Weights = None,
    model: Annotated[
        str | None,
        typer.Option(help=f"A network by name, untrained; {THESIS}, the thesis' own, if none."),
    ] = None,
    data: Data = None,
    root: Root = None,
    split: Split = "test",
    images: Annotated[int, typer.Option(min=2, help="How many, drawn by --seed.")] = 64,
    layer: Annotated[
        str | None, typer.Option(help="Which equilibrium layer, by name; the first if not given.")
    ] = None,
    solvers: Annotated[
        str, typer.Option(help="picard, anderson, broyden, own (the layer's), with commas.")
    ] = "picard,anderson,broyden",
    steps: Annotated[int, typer.Option(min=1, help="Evaluations of the map to follow.")] = 50,
    init_scales: Annotated[
        str,
        typer.Option(metavar="STD,STD", help="Draw the layer's weights anew; the thesis: 1,0.01."),
    ] = "",
    seed: Annotated[int, typer.Option(min=0, help="Of the images and of drawn weights.")] = 0,
    device: Device = None,
    out: Annotated[
        Path, typer.Option(help="Write trajectory.json and pictures into this folder.")
    ] = Path("runs/trajectory"),
    as_json: Json = False,
) -> None:
    """Residuals and paths of z through the solver (Figures 4.1 to 4.3 of the thesis)."""
    from equilibria_papers.theory import trajectories as module
    from equilibria_papers.theory.pictures import save_picture

    scales = numbers_of("--init-scales", init_scales, "1,0.01")
    chosen = _solvers(solvers)
    make_folder(out)
    found, dataset = networks(weights or [], model, data, root, split, device, seed)
    x, labels = images_of(dataset, images, seed, device)
    last = next(reversed(found.values()))
    groups = _scaled(last, scales, seed) if scales else found
    recorded: dict[str, dict[str, Any]] = {}
    with error_console.status("following the solvers"):
        for name, network in groups.items():
            part, given = module.layer_input(network, x, layer)
            recorded[name] = {
                label: module.record_path(part, given, solver=solver, steps=steps)
                for label, solver in chosen.items()
            }
        preferred = "anderson" if "anderson" in chosen else next(iter(chosen))
        drawn = {name: paths[preferred] for name, paths in recorded.items()}
        written = save_picture(module.residual_figure(recorded), out / "residuals")
        written += save_picture(module.path_figure(drawn), out / "paths")
        training = None
        if len(found) > 1 and not scales:
            training = module.TrainingPath(tuple(found), labels.cpu(), tuple(drawn.values()))
            written += save_picture(module.class_figure(training), out / "classes")
    rows = [_row(g, s, path) for g, paths in recorded.items() for s, path in paths.items()]
    record: dict[str, Any] = {
        "data": {"name": dataset.name, "split": dataset.split_name, "images": len(x)},
        "seed": seed,
        "steps": steps,
        "rows": rows,
    }
    if training is not None:
        record["between_classes"] = dict(zip(found, training.spread().tolist(), strict=True))
    written.append(write_json(out / "trajectory.json", record))
    answer(record, as_json, lambda: _show(rows), written)


def _scaled(network: Any, scales: list[float], seed: int) -> dict[str, Any]:
    """The network at each scale, named by it, and by the scale in effect where a bound clips it."""
    from equilibria_papers.theory import trajectories as module

    made = {}
    for std in scales:
        scaled = module.at_scale(network, std, seed=seed)
        held = module.clipped_stds(scaled, std).values()
        low, high = (f"{f(held, default=std):.2g}" for f in (min, max))
        held_at = f" (bounded: {low if low == high else f'{low} to {high}'})" if held else ""
        made[f"std {std:g}{held_at}"] = scaled
    return made


def _row(group: str, solver: str, path: Any) -> dict[str, Any]:
    reached = path.steps_to()
    passed = reached > 0
    return {
        "network": group,
        "solver": solver,
        "tolerance": path.tolerance,
        "converged": float(passed.double().mean()),
        "median_steps": int(reached[passed].median()) if bool(passed.any()) else None,
        "last_residual": float(path.mean_curve()[-1]),
        "mean_residual": path.mean_curve().tolist(),
        "residual_10": path.quantile_curve(0.1).tolist(),
        "residual_90": path.quantile_curve(0.9).tolist(),
    }


def _show(rows: list[dict[str, Any]]) -> None:
    table = Table("network", "solver", "tolerance", "converged", "median steps", "last residual")
    for row in rows:
        steps = "–" if row["median_steps"] is None else str(row["median_steps"])
        table.add_row(
            *(row["network"], row["solver"], f"{row['tolerance']:.0e}", f"{row['converged']:.0%}"),
            *(steps, f"{row['last_residual']:.2e}"),
        )
    output().print(table)


def _solvers(text: str) -> dict[str, Any]:
    from equilibria.solvers import Anderson, Broyden, Picard

    kinds = {"picard": Picard, "anderson": Anderson, "broyden": Broyden}
    names = [part.strip().lower() for part in text.split(",") if part.strip()]
    wrong = [name for name in names if name not in (*kinds, "own")]
    if wrong or not names:
        raise fail(f"--solvers {text}: expected some of {', '.join(kinds)}, own, with commas.")
    return {name: None if name == "own" else kinds[name]() for name in names}
