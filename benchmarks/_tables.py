"""From rows to tables and checks."""

from __future__ import annotations

import statistics
from typing import Any

from _report import Table

Row = dict[str, Any]
Pairs = list[tuple[str, str]]

_MODES = {
    "tested": "Overhead per step besides the map, forward, convergence tested",
    "fixed": "Overhead per step besides the map, forward, fixed steps (no test)",
    "gradient": "Overhead per step besides the map, forward and backward, convergence tested",
}
_MODE_NOTES = {
    "tested": "Equal evaluations; the tolerance is out of reach, so both test and none stops.",
    "fixed": "equilibria with rtol=0, torchdeq with return_final=True.",
    "gradient": "As many backward steps as forward steps; the map column holds an evaluation "
    "and a vector-Jacobian product.",
}


def _cells(rows: list[Row], *keys: str) -> list[tuple[Any, ...]]:
    return list(dict.fromkeys(tuple(r[k] for k in keys) for r in rows))


def _find(rows: list[Row], contestant: str, **where: Any) -> Row | None:
    for r in rows:
        if r["contestant"] == contestant and all(r[k] == v for k, v in where.items()):
            return r
    return None


def _spread(value: dict[str, float], digits: int = 1) -> str:
    half = (value["high"] - value["low"]) / 2
    return f"{value['median']:.{digits}f} ±{half:.{digits}f}"


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def overhead_ratio(mine: Row, theirs: Row, of: str = "median") -> float | None:
    """Ours over theirs; None where theirs cannot be separated from the map itself."""
    below = theirs["overhead_us"][of]
    if below <= 0.02 * theirs["map_us"] or below <= 0.3:
        return None
    return float(max(mine["overhead_us"][of], 0.0) / below)


def _shown_pairs(rows: list[Row], pairs: Pairs) -> list[tuple[str, str, str]]:
    """(ours, theirs, label); without the peer each of ours once."""
    names = {r["contestant"] for r in rows}
    if any(n.startswith("torchdeq") for n in names):
        return [(a, b, f"{a} / {b}") for a, b in pairs if f"torchdeq:{b}" in names]
    return [(a, "", a) for a in dict.fromkeys(a for a, _ in pairs)]


def _overhead_table(rows: list[Row], pairs: Pairs, mode: str) -> Table:
    columns = ["pair", "map", "batch", "state", "map µs", "ours µs", "torchdeq µs", "ratio"]
    columns.append("of minima")
    table = Table(_MODES[mode], columns, _MODE_NOTES[mode])
    rows = [r for r in rows if r["mode"] == mode]
    for kind, batch, state in _cells(rows, "map", "batch", "state"):
        where = {"map": kind, "batch": batch, "state": state}
        for a, b, label in _shown_pairs(rows, pairs):
            mine = _find(rows, f"equilibria:{a}", **where)
            theirs = _find(rows, f"torchdeq:{b}", **where)
            if mine is None or (b and theirs is None):
                continue
            table.add(
                label,
                kind,
                str(batch),
                str(state),
                f"{mine['map_us']:.1f}",
                _spread(mine["overhead_us"]),
                "–" if theirs is None else _spread(theirs["overhead_us"]),
                _ratio(None if theirs is None else overhead_ratio(mine, theirs)),
                _ratio(None if theirs is None else overhead_ratio(mine, theirs, "least")),
            )
    return table


def _counts_table(rows: list[Row], memory: int) -> Table:
    table = Table(
        "Operations per step besides the map, and peak memory",
        [
            "solver",
            "kernels",
            "traffic",
            "syncs",
            "syncs, 24 steps",
            "kernels, fixed",
            "syncs, fixed",
            "peak",
            "back: kernels",
            "back: traffic",
            "back: syncs",
            "back: peak",
        ],
        "Kernels: operators that launch work (views and allocations are not counted). Traffic and "
        "peak in units of one state; traffic counts what operators read and write, peak what is "
        "alive at once besides z0, including z and T(z) but not the map's temporaries "
        f"(2m + 4 = {2 * memory + 4} for Anderson). Convergence tested unless 'fixed'; on a GPU "
        "the forward peak is the allocator's and holds the map's one temporary. Steps 16 to 48 are "
        "averaged, so set-up cancels.",
    )
    for r in rows:
        tested, fixed = r.get("tested"), r.get("fixed")
        shown = tested or fixed
        cells = ["–"] * 7
        if shown is not None:
            peak = shown.get("cuda_peak", shown["peak"])
            cells = [
                f"{shown['kernels']:.1f}",
                f"{shown['traffic']:.1f}",
                f"{shown['syncs']:.2f}",
                str(shown["syncs_a_solve"]),
                f"{fixed['kernels']:.1f}" if fixed else "–",
                str(fixed["syncs_a_solve"]) if fixed else "–",
                f"{peak:.1f}",
            ]
        back = r["backward"]
        table.add(
            r["contestant"],
            *cells,
            f"{back['kernels']:.1f}",
            f"{back['traffic']:.1f}",
            f"{back['syncs']:.2f}",
            f"{back['peak']:.1f}",
        )
    return table


def _end_to_end_table(rows: list[Row], pairs: Pairs, backward: bool) -> Table:
    rows = [r for r in rows if r["backward"] is backward]
    what = "forward and backward" if backward else "forward"
    columns = ["pair", "map", "batch", "state", "evals", "ours ms", "torchdeq ms", "ratio"]
    columns.append("of minima")
    columns.append("gradient error" if backward else "residual")
    note = (
        "ours / torchdeq; evaluations + vector-Jacobian products; error of dL/dx against float64."
        if backward
        else "ours / torchdeq; residual: the largest ‖T(z) − z‖/‖T(z)‖, computed in float64."
    )
    note += " ✗ marks a solve that missed the tolerance."
    table = Table(f"Time to tolerance, {what}", columns, note)
    for kind, batch, state in _cells(rows, "map", "batch", "state"):
        where = {"map": kind, "batch": batch, "state": state}
        for a, b, label in _shown_pairs(rows, pairs):
            mine = _find(rows, f"equilibria:{a}", **where)
            theirs = _find(rows, f"torchdeq:{b}", **where)
            if mine is None or (b and theirs is None):
                continue
            both = [mine] if theirs is None else [mine, theirs]
            work = [f"{r['evaluations']}" + (f"+{r['products']}" if backward else "") for r in both]
            key = "gradient_error" if backward else "residual"
            errors = [f"{r[key]:.1e}" + ("" if r["reached"] else " ✗") for r in both]
            table.add(
                label,
                kind,
                str(batch),
                str(state),
                " / ".join(work),
                _spread(mine["ms"], 2),
                "–" if theirs is None else _spread(theirs["ms"], 2),
                *(
                    _ratio(None if theirs is None else mine["ms"][of] / theirs["ms"][of])
                    for of in ("median", "least")
                ),
                " / ".join(errors),
            )
    return table


Ratios = list[tuple[float, float, str]]
"""Of medians, of minima, where."""


def _worst(ratios: Ratios) -> str:
    value, _, where = max(ratios)
    middle = statistics.median(v for v, _, _ in ratios)
    least = max(v for _, v, _ in ratios)
    return f"worst {value:.2f} ({where}), median {middle:.2f}; of minima: worst {least:.2f}"


def _checks(rows: dict[str, list[Row]], pairs: Pairs, small: int, memory: int) -> list[Row]:
    """What the documentation promises, and what was measured."""
    found: list[Row] = []

    def check(what: str, expected: str, measured: str, ok: bool) -> None:
        found.append({"check": what, "expected": expected, "measured": measured, "ok": ok})

    for a, b in (("Picard", "fixed_point_iter"), ("Anderson", "anderson")):
        ratios: Ratios = []
        for r in rows["overhead"]:
            if r["contestant"] != f"equilibria:{a}" or r["mode"] != "tested":
                continue
            where = {k: r[k] for k in ("map", "mode", "batch", "state")}
            theirs = _find(rows["overhead"], f"torchdeq:{b}", **where)
            if theirs is None or r["batch"] * r["state"] > small:
                continue
            middle, least = (overhead_ratio(r, theirs, of) for of in ("median", "least"))
            if middle is not None and least is not None:
                ratios.append((middle, least, f"{r['map']}, {r['batch']} × {r['state']}"))
        if ratios:
            ok = max(ratios)[0] <= 0.2
            what = f"overhead per step, {a} / {b}, batch × state ≤ {small}"
            check(what, "≤ 0.20", _worst(ratios), ok)
    for backward in (False, True):
        ratios = []
        for r in rows["end_to_end"]:
            for a, b in pairs:
                if r["contestant"] != f"equilibria:{a}" or r["backward"] is not backward:
                    continue
                where = {k: r[k] for k in ("map", "backward", "batch", "state")}
                theirs = _find(rows["end_to_end"], f"torchdeq:{b}", **where)
                if theirs is None or b.startswith("simple"):
                    continue
                middle, least = (r["ms"][of] / theirs["ms"][of] for of in ("median", "least"))
                ratios.append((middle, least, f"{a}, {r['map']}, {r['batch']} × {r['state']}"))
        if ratios:
            what = "forward and backward" if backward else "forward"
            check(f"time to tolerance, {what}", "≤ 1.00", _worst(ratios), max(ratios)[0] <= 1.0)
    mine = [r for r in rows["end_to_end"] if r["contestant"].startswith("equilibria")]
    if mine:
        missed = sum(not r["reached"] for r in mine)
        check("solves that missed the tolerance", "0", f"{missed} of {len(mine)}", missed == 0)
    for r in rows["counts"]:
        if r["contestant"] == "equilibria:Anderson":
            # The allocator sees the map's temporary, one state, too.
            seen = [r[m]["peak"] for m in ("tested", "fixed")]
            seen += [r[m]["cuda_peak"] - 1 for m in ("tested", "fixed") if "cuda_peak" in r[m]]
            peak, limit = max(seen), 2 * memory + 4
            check("Anderson's memory, states", f"≤ {limit}", f"{peak:.1f}", peak <= limit + 0.05)
        if r["contestant"].startswith("equilibria") and "fixed" in r:
            waits = r["fixed"]["syncs_a_solve"]
            check(f"syncs of a fixed-step solve, {r['contestant']}", "0", str(waits), waits == 0)
    return found


def make_tables(
    rows: dict[str, list[Row]], pairs: Pairs, small: int, memory: int
) -> tuple[list[Table], list[Row]]:
    """All tables, checks first, and the checks as rows."""
    checks = _checks(rows, pairs, small, memory)
    first = Table(
        "Checks",
        ["check", "expected", "measured", "holds"],
        "Ratios: equilibria over torchdeq, of medians and of the minimum times. Time to "
        "tolerance is not checked against simple_fixed_point_iter, which does not test.",
    )
    for c in checks:
        first.add(c["check"], c["expected"], c["measured"], "yes" if c["ok"] else "no")
    tables = [first, _counts_table(rows["counts"], memory)]
    tables += [_overhead_table(rows["overhead"], pairs, mode) for mode in _MODES]
    tables += [_end_to_end_table(rows["end_to_end"], pairs, b) for b in (False, True)]
    return tables, checks
