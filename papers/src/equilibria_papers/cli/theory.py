"""``equilibria theory``: bounds, tangent kernels, trajectories, landscapes, the audit."""

from __future__ import annotations

import typer

from . import audit, bounds, dynamics, landscape, ntk, trajectory

app = typer.Typer(
    help="What the papers prove, on your own model: bounds, tangent kernels, solver paths, loss "
    "landscapes, and an audit of every proposition.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

app.command("bounds")(bounds.bounds)
app.command("ntk")(ntk.ntk)
app.command("landscape")(landscape.landscape)
app.command("trajectory")(trajectory.trajectory)
app.command("dynamics")(dynamics.dynamics)
app.command("audit")(audit.audit)
