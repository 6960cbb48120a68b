"""One self-contained HTML page: its style sheet, charts, pictures and sections.

Charts are inline SVG in the colors of the style sheet (page.css), so that one file is right in
light and in dark; pictures are PNGs inside the page. The demo, ``explain`` and the report of a
training use it.
"""

from __future__ import annotations

import base64
import html
import io
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from equilibria.engine.optional import needs


def _read(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def fill(file: str, /, **parts: str) -> str:
    """A file of this folder, {{key}} in it replaced by parts[key]."""
    return re.sub(r"\{\{(\w+)\}\}", lambda key: parts[key[1]], _read(file))


STYLE = _read("page.css")
_PROOFS: dict[str, str] = dict(
    re.findall(r'<template id="(.*?)">(.*?)</template>', _read("proofs.html"), re.DOTALL)
)


@dataclass(frozen=True)
class Line:
    """A curve, or dots, in one of the colors a, b, c, s (soft) of the style sheet."""

    name: str
    color: str
    points: Sequence[tuple[float, float]]
    dash: bool = False
    thin: bool = False
    dots: bool = False


def small(value: float) -> str:
    """A number that is easy to read: 0.000008 rather than 7.9e-06."""
    if value == 0.0:
        return "0"
    if abs(value) >= 0.001:
        return f"{value:.3g}"
    power = math.floor(math.log10(abs(value)))
    if power >= -7:
        return f"{value:.{1 - power}f}"
    return f"{value / 10**power:.1f}\u00a0·\u00a010<sup>{_minus(power)}</sup>"


def _minus(value: object) -> str:
    return str(value).replace("-", "−")


def percent(value: float, digits: int = 1) -> str:
    """A share in percent; never 100% for less than all."""
    text = f"{100 * value:.{digits}f}%"
    return f">{100 - 10**-digits:.{digits}f}%" if value < 1 and text.startswith("100") else text


def _shown(points: Iterable[tuple[float, float]], log: bool) -> list[tuple[float, float]]:
    return [(x, y) for x, y in points if math.isfinite(y) and (y > 0 or not log)]


def chart(
    lines: Sequence[Line],
    *,
    alt: str,
    xlabel: str,
    ylabel: str,
    log: bool = False,
    share: bool = False,
    top: float | None = None,
    band: Sequence[tuple[float, float, float]] = (),
) -> str:
    """Curves on one pair of axes as an inline SVG with a legend; ``share`` prints y in percent.

    ``band`` fills between two curves, (x, low, high); on a log axis from the bottom. Points that
    are not finite, and on a log axis not positive, are left out.
    """
    lines = [replace(line, points=_shown(line.points, log)) for line in lines]
    band = [row for row in band if len(_shown([(row[0], row[2])], log)) and row[1] > -math.inf]
    points = [point for line in lines for point in line.points]
    points += [(x, y) for x, *ends in band for y in ends[log:]]
    if not points:
        return ""
    xs = [x for x, _ in points]
    low, high, ticks = _ticks([math.log10(y) if log else y for _, y in points], log, top)

    def named(tick: float) -> str:
        if log:
            return f'10<tspan dy="-5" font-size="9">{_minus(round(tick))}</tspan>'
        return f"{100 * tick:.0f}%" if share else _minus(f"{tick:,.6g}")

    # Room for the longest number beside the axis.
    left = 52 if log else max(52, 12 + 7 * max(len(named(tick)) for tick in ticks))
    right, upper, lower, first = 344, 26, 206, min(xs)
    span = (max(xs) - first) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        """In pixels, of a y that is a logarithm already where the axis is one."""
        down = lower - (lower - upper) * (y - low) / ((high - low) or 1.0)
        return round(left + (right - left) * (x - first) / span, 1), round(down, 1)

    def spots(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
        return [place(x, math.log10(y) if log else y) for x, y in points]

    def path(points: Iterable[tuple[float, float]]) -> str:
        return "M" + "L".join(f"{x} {y}" for x, y in spots(points))

    parts = []
    for tick, y in ((tick, place(first, tick)[1]) for tick in ticks):
        parts.append(f'<line class="axis" x1="{left}" x2="{right}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{left - 7}" y="{y + 4}" text-anchor="end">{named(tick)}</text>')
    for tick in _round_numbers(first, max(xs), 5, span > 5, [1, 2, 5, 10]):
        x = place(tick, low)[0]
        parts.append(f'<text x="{x}" y="224" text-anchor="middle">{tick:g}</text>')
    parts.append(f'<text x="2" y="13">{html.escape(ylabel)}</text>')
    parts.append(f'<text x="{right}" y="242" text-anchor="end">{html.escape(xlabel)}</text>')
    if band:
        under = [(x, 10**low if log else y) for x, y, _ in band]
        around = path([*((x, high) for x, _, high in band), *under[::-1]])
        parts.append(f'<path class="fill" d="{around}Z"/>')
    legend = ""
    for line in (line for line in lines if line.points):
        kind = f"{line.color}{' dash' * line.dash}"
        if line.dots:
            for x, y in spots(line.points):
                parts.append(f'<circle class="{kind}" cx="{x}" cy="{y}" r="4"/>')
        else:
            parts.append(f'<path class="{kind}{" thin" * line.thin}" d="{path(line.points)}"/>')
        if line.name:
            legend += f'<li><i class="{kind}{" dot" * line.dots}"></i>{html.escape(line.name)}</li>'
    return (
        f'<svg viewBox="0 0 360 246" role="img" aria-label="{html.escape(alt)}">{"".join(parts)}'
        f'</svg><ul class="legend">{legend}</ul>'
    )


def _round_numbers(
    low: float, high: float, count: int, whole: bool, steps: list[int] | None = None
) -> list[float]:
    """At most about ``count`` round numbers from ``low`` to ``high``."""
    with needs("matplotlib", "A chart"):
        from matplotlib.ticker import MaxNLocator
    found = MaxNLocator(nbins=count, integer=whole, steps=steps).tick_values(low, high)
    return [float(tick) for tick in found if low - 1e-9 <= tick <= high + 1e-9]


def _ticks(ys: list[float], log: bool, top: float | None) -> tuple[float, float, list[float]]:
    """Both ends of the axis, and the numbers on it."""
    low, high = (min(ys), max(ys)) if top is None else (0.0, top)
    if log and high - low < 2.0:  # whole decades around it
        low, high = float(math.floor(low)), float(max(math.ceil(high), math.floor(low) + 1))
    elif high - low < 1e-9 * max(abs(high), 1.0):
        low, high = low - 1.0, high + 1.0
    return low, high, _round_numbers(low, high, 4, log)


def picture(shades: Sequence[Sequence[int]], alt: str) -> str:
    """Ink on paper, 0 (white) to 255; the browser enlarges the pixels."""
    return photo(255 - torch.tensor(shades, dtype=torch.uint8)[None], alt)


def photo(pixels: Tensor, alt: str) -> str:
    """uint8 pixels [C, H, W] of one channel, three, or four with an alpha, as they are."""
    return f'<img alt="{html.escape(alt)}" src="{data_url(pixels)}">'


def data_url(pixels: Tensor) -> str:
    """The same pixels as a PNG inside an address."""
    with needs("pillow", "A picture"):
        from PIL import Image
    file = io.BytesIO()
    image = Image.fromarray(pixels.cpu().permute(1, 2, 0).squeeze(2).contiguous().numpy())
    image.save(file, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def overlay(below: str, values: Tensor, color: str, alt: str) -> str:
    """A map [h, w] over a picture: clear at its least, in ``color`` (#rrggbb) at its largest."""
    low, span = values.min(), (values.max() - values.min()).clamp_min(1e-12)
    solid = torch.tensor(list(bytes.fromhex(color[1:]))).view(3, 1, 1).expand(3, *values.shape)
    strength = ((values - low) / span * 210.0).round()
    pixels = torch.cat([solid, strength[None]]).to(torch.uint8)
    return f'<span class="over">{below}{photo(pixels, alt)}</span>'


def bars(shares: Iterable[tuple[str, float]], alt: str) -> str:
    """Named shares from 0 to 1 as bars, with their percentage."""
    rows = "".join(
        f"<b>{html.escape(name)}</b><span><i style='width:{100 * share:.2f}%'></i></span>"
        f"<span>{percent(share, 2)}</span>"
        for name, share in shares
    )
    return f'<div class="bars" role="img" aria-label="{html.escape(alt)}">{rows}</div>'


def section(name: str, step: str, title: str, body: str) -> str:
    return (
        f'<section id="{name}"><p class="step">{step}</p><h2>{html.escape(title)}</h2>'
        f"{body}</section>"
    )


def figure(image: str, caption: str) -> str:
    return f'<figure class="card">{image}<figcaption>{caption}</figcaption></figure>'


def tiles(items: Sequence[str]) -> str:
    """Pictures with a line below each: four to a row on a phone, eight at most elsewhere."""
    phone, wide = 3 + (len(items) % 4 == 0), len(items) if len(items) <= 8 else 6
    listed = "".join(f"<li>{item}</li>" for item in items)
    return f'<ul class="tiles" style="--phone:{phone};--wide:{wide}">{listed}</ul>'


def proof_words(kind: str, share: float) -> str:
    """Why there is one answer, by the kind of guarantee (``Guarantee``), for a reader without
    mathematics; ``share`` of a distance is what a step of a contraction leaves at most."""
    words = _PROOFS.get(kind, _PROOFS["none"]).replace("{{share}}", percent(share))
    return f'<div class="short">{words}</div>'


def shell(title: str, body: str, footer: str) -> str:
    """The whole page around ``body``."""
    return fill("page.html", title=html.escape(title), style=STYLE, body=body, footer=footer)
