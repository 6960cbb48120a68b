"""A profile as tables for the terminal."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import Tensor

from equilibria.evaluation.extras import rich_module
from equilibria.evaluation.solver_statistics import layer_label

from .measuring import Spread
from .report import GROUPS, LayerProfile, PassProfile, Profile
from .timeline import (
    ADJOINT_MAP,
    ADJOINT_SOLVER,
    BACKWARD,
    FORWARD,
    LOSS,
    MAP,
    NORM,
    OPTIMIZER,
    PREPARE,
    SOLVER,
)

__all__ = ["as_text", "binned", "profile_tables", "steps_histogram"]

_ROWS, _WIDTH = 12, 36
_SHORT = {
    ADJOINT_MAP: "the map: graph and products",
    ADJOINT_SOLVER: "its solver",
    PREPARE: "layers before and after solves",
    NORM: "norm constraints",
    FORWARD: "explicit layers, forward",
    LOSS: "loss",
    BACKWARD: "explicit layers, backward",
    OPTIMIZER: "optimizer",
}


def profile_tables(profile: Profile) -> list[Any]:
    """Times, layers, steps, suggestions, notes."""
    found = [_times(profile), _layers(profile.main)] if profile.main.layers else [_times(profile)]
    histogram = steps_histogram(profile.main)
    if histogram is not None:
        found.append(_histogram(histogram, fixed=_all_fixed(profile.main)))
    found.append(_suggestions(profile))
    rich = rich_module()
    found.extend(rich.text.Text(f"note: {note}", style="dim") for note in profile.notes)
    return found


def as_text(profile: Profile) -> str:
    """The tables as plain text."""
    rich = rich_module()
    console = rich.console.Console(file=io.StringIO(), width=100)
    for table in profile_tables(profile):
        console.print(table)
    return str(console.file.getvalue())


def _table(title: str) -> Any:
    rich = rich_module()
    box = rich.box.SIMPLE_HEAD
    return rich.table.Table(
        title=title,
        title_justify="left",
        box=box,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
    )


def _times(profile: Profile) -> Any:
    """One column a pass: seconds, images a second, the parts, memory."""
    passes = [p for p in (profile.train, profile.inference) if p is not None]
    images = "×".join(map(str, profile.shape))
    table = _table(
        f"{profile.model}, {profile.parameters:,} parameters, batch {images}, {profile.precision}"
        f"{', compiled' if profile.compiled else ''}, {profile.device} ({profile.machine})"
    )
    table.add_column("")
    for one in passes:
        table.add_column("training step" if one.kind == "train" else "inference", justify="right")
    rows: list[tuple[str, list[str]]] = [
        ("time", [_ms(p.seconds.median) for p in passes]),
        (_dim("  quartiles"), [_dim(_quartiles(p.seconds)) for p in passes]),
        ("images a second", [f"{p.images_per_second:,.4g}" for p in passes]),
    ]
    for group, parts in GROUPS.items():
        rows.append((f"[bold]{group}[/bold]", [_part(p, p.group(group)) for p in passes]))
        if len(parts) > 1:
            for part in parts:
                if any(p.parts.get(part, 0.0) > 0.0 for p in passes):
                    cells = [_part(p, p.parts.get(part, 0.0)) for p in passes]
                    rows.append(
                        (f"  [dim]{_SHORT[part]}[/dim]", [f"[dim]{c}[/dim]" for c in cells])
                    )
    rows.append(("peak memory of the pass", [_bytes(p.memory.peak) for p in passes]))
    if passes[0].waits is not None:
        rows.append(("the host waited for the GPU", [f"{p.waits} times" for p in passes]))
    rows.append(("the marks cost", [f"{p.overhead:+.0%}" for p in passes]))
    for name, cells in rows:
        table.add_row(name, *cells)
    return table


def _layers(main: PassProfile) -> Any:
    table = _table("equilibrium layers: milliseconds, and evaluations (T, T with a graph, Jᵀ)")
    table.add_column("layer", overflow="fold")
    for name in ("share", "map", "solver", "adjoint", "T", "graph", "Jᵀ", "steps", "residual"):
        table.add_column(name, justify="right")
    for layer in main.layers:
        seconds = layer.seconds
        adjoint = seconds[ADJOINT_MAP] + seconds[ADJOINT_SOLVER]
        table.add_row(
            layer_label(layer.name),
            f"{layer.total / main.total:.0%}",
            *(f"{1e3 * s:.3g}" for s in (seconds[MAP], seconds[SOLVER], adjoint)),
            *(str(n) for n in (layer.evaluations, layer.graph_evaluations, layer.products)),
            _steps(layer),
            "–" if layer.statistics is None else f"{float(layer.statistics.residual[3]):.1e}",
        )
    return table


def _steps(layer: LayerProfile) -> str:
    if layer.statistics is None:
        return "–"
    taken = layer.statistics.histogram.nonzero()[:, 0]
    low, high = int(taken[0]), int(taken[-1])
    return str(low) if low == high else f"{low}–{high}"


def _all_fixed(main: PassProfile) -> bool:
    return all(p.statistics is None or p.statistics.fixed_steps for p in main.layers)


def steps_histogram(main: PassProfile) -> Tensor | None:
    """Long: entry s counts the solves of s steps, of all layers together; None without any."""
    known = [p.statistics.histogram for p in main.layers if p.statistics is not None]
    if not known:
        return None
    length = max(len(h) for h in known)
    return torch.stack([torch.nn.functional.pad(h, (0, length - len(h))) for h in known]).sum(0)


def binned(histogram: Tensor, rows: int = _ROWS) -> list[tuple[int, int, int]]:
    """(first step, last step, solves) of at most ``rows`` bins of equal width."""
    taken = histogram.nonzero()[:, 0]
    low, high = int(taken[0]), int(taken[-1])
    width = -(-(high - low + 1) // rows)
    found = []
    for start in range(low, high + 1, width):
        end = min(start + width - 1, high)
        found.append((start, end, int(histogram[start : end + 1].sum())))
    return found


def _histogram(histogram: Tensor, *, fixed: bool) -> Any:
    title = "steps per sample, all layers" + (" (fixed by the solvers)" if fixed else "")
    table = _table(title)
    table.add_column("steps", justify="right")
    table.add_column("solves", justify="right")
    table.add_column("")
    bins = binned(histogram)
    most = max(count for *_, count in bins)
    for start, end, count in bins:
        label = str(start) if start == end else f"{start}–{end}"
        table.add_row(label, str(count), "█" * max(round(_WIDTH * count / most), int(count > 0)))
    return table


def _suggestions(profile: Profile) -> Any:
    table = _table(f"what would help the {profile.main.kind} pass")
    if not profile.suggestions:
        table.add_column("nothing that the rules know of: the time is in the map and the layers")
        return table
    tried = any(s.measured is not None or s.note for s in profile.suggestions)
    table.add_column("what", no_wrap=True)
    table.add_column("at best", justify="right")
    if tried:
        table.add_column("measured", justify="right")
    table.add_column("why, and how")
    for s in profile.suggestions:
        cells = [s.name, "?" if s.predicted is None else f"{s.predicted:.2f}×"]
        if tried:
            cells.append("–" if s.measured is None else f"{s.measured:.2f}×")
        text = f"{s.reason}.\n[dim]{s.do}[/dim]"
        if s.change is not None:
            text += f"\n[dim]the answer changes by {s.change:.1e}[/dim]"
        if s.note:
            text += f"\n[dim]{s.note.replace('[', chr(92) + '[')}[/dim]"
        table.add_row(*cells, text)
    return table


def _dim(text: str) -> str:
    return f"[dim]{text}[/dim]"


def _quartiles(spread: Spread) -> str:
    return f"{_ms(spread.low)} to {_ms(spread.high)}"


def _part(one: PassProfile, seconds: float) -> str:
    return f"{_ms(seconds)} {seconds / one.total:4.0%}"


def _ms(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1.0 else f"{1e3 * seconds:.3g} ms"


def _bytes(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
