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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from equilibria.engine.optional import needs

STYLE = Path(__file__).with_name("page.css").read_text(encoding="utf-8")


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
    return f"{value:.{1 - power}f}" if power >= -7 else _ten(value)


def _ten(value: float) -> str:
    power = math.floor(math.log10(abs(value)))
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
    with needs("matplotlib", "A chart"):
        from matplotlib.ticker import MaxNLocator
    lines = [replace(line, points=_shown(line.points, log)) for line in lines]
    band = [row for row in band if len(_shown([(row[0], row[2])], log)) and row[1] > -math.inf]
    filled = [(x, high) for x, _, high in band]
    filled += [] if log else [(x, low) for x, low, _ in band]
    points = [point for line in lines for point in line.points] + filled
    if not points:
        return ""
    xs = [x for x, _ in points]
    ys = [math.log10(y) if log else y for _, y in points]
    low, high = (min(ys), max(ys)) if top is None else (0.0, top)
    if log and high - low < 2.0:  # whole decades around it
        low, high = float(math.floor(low)), float(max(math.ceil(high), math.floor(low) + 1))
    elif high - low < 1e-9 * max(abs(high), 1.0):
        low, high = low - 1.0, high + 1.0
    ticks = list(MaxNLocator(nbins=4, integer=log).tick_values(low, high))
    if top is None:  # room for one more line where it is near
        low, high = min(low, ticks[1]), max(high, ticks[-2])
    ticks = [t for t in ticks if low - 1e-9 <= t <= high + 1e-9]

    def named(tick: float) -> str:
        if log:
            power = _minus(round(tick))
            return f'10<tspan dy="-5" font-size="9">{power}</tspan>'
        return f"{100 * tick:.0f}%" if share else _minus(f"{tick:,.6g}")

    # Room for the longest number beside the axis.
    left = 52 if log else max(52, 12 + 7 * max(len(named(tick)) for tick in ticks))
    right, upper, lower = 344, 26, 206
    span = (max(xs) - min(xs)) or 1.0

    def at(x: float, y: float) -> str:
        y = math.log10(y) if log else y
        across = left + (right - left) * (x - min(xs)) / span
        return f"{across:.1f} {lower - (lower - upper) * (y - low) / ((high - low) or 1.0):.1f}"

    parts = []
    for tick in ticks:
        y = float(at(min(xs), 10**tick if log else tick).split()[1])
        parts.append(f'<line class="axis" x1="{left}" x2="{right}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{left - 7}" y="{y + 4}" text-anchor="end">{named(tick)}</text>')
    for tick in MaxNLocator(nbins=5, integer=span > 5, steps=[1, 2, 5, 10]).tick_values(
        min(xs), max(xs)
    ):
        if min(xs) - 1e-9 <= tick <= max(xs) + 1e-9:
            x = left + (right - left) * (tick - min(xs)) / span
            parts.append(f'<text x="{x:.1f}" y="224" text-anchor="middle">{tick:g}</text>')
    parts.append(f'<text x="2" y="13">{html.escape(ylabel)}</text>')
    parts.append(f'<text x="{right}" y="242" text-anchor="end">{html.escape(xlabel)}</text>')
    if band:
        under = [(x, 10**low if log else y) for x, y, _ in band]
        around = [(x, high) for x, _, high in band] + under[::-1]
        parts.append(f'<path class="fill" d="M{"L".join(at(*point) for point in around)}Z"/>')
    for line in lines:
        if not line.points:
            continue
        kind = f"{line.color}{' dash' * line.dash}{' thin' * line.thin}"
        if line.dots:
            for cx, cy in (at(*point).split() for point in line.points):
                parts.append(f'<circle class="{kind}" cx="{cx}" cy="{cy}" r="4"/>')
        else:
            path = "M" + "L".join(at(*point) for point in line.points)
            parts.append(f'<path class="{kind}" d="{path}"/>')
    legend = "".join(
        f'<li><i class="{line.color}{" dash" * line.dash}{" dot" * line.dots}"></i>'
        f"{html.escape(line.name)}</li>"
        for line in lines
        if line.name and line.points
    )
    title = html.escape(alt)
    return (
        f'<svg viewBox="0 0 360 246" role="img" aria-label="{title}">{"".join(parts)}</svg>'
        f'<ul class="legend">{legend}</ul>'
    )


def picture(shades: Sequence[Sequence[int]], alt: str) -> str:
    """Ink on paper, 0 (white) to 255; the browser enlarges the pixels."""
    with needs("pillow", "A picture"):
        from PIL import Image
    image = Image.new("L", (len(shades[0]), len(shades)))
    image.putdata([255 - shade for row in shades for shade in row])
    return _png(image, alt)


def photo(pixels: Tensor, alt: str) -> str:
    """uint8 pixels [C, H, W] of one channel or three, as they are."""
    with needs("pillow", "A picture"):
        from PIL import Image
    gray = pixels.shape[0] == 1
    rows = pixels[0] if gray else pixels.permute(1, 2, 0)
    size = (pixels.shape[2], pixels.shape[1])
    data = bytes(rows.contiguous().flatten().tolist())
    return _png(Image.frombytes("L" if gray else "RGB", size, data), alt)


def overlay(below: str, values: Tensor, color: str, alt: str) -> str:
    """A map [h, w] over a picture: clear at its least, in ``color`` (#rrggbb) at its largest."""
    with needs("pillow", "A picture"):
        from PIL import Image
    low, span = values.min(), (values.max() - values.min()).clamp_min(1e-12)
    strength = ((values - low) / span * 210.0).round().int()
    image = Image.new("RGBA", (values.shape[1], values.shape[0]))
    solid = tuple(bytes.fromhex(color[1:]))
    image.putdata([(*solid, a) for a in strength.flatten().tolist()])
    return f'<span class="over">{below}{_png(image, alt)}</span>'


def _png(image: Any, alt: str) -> str:
    file = io.BytesIO()
    image.save(file, format="PNG")
    data = base64.b64encode(file.getvalue()).decode()
    return f'<img alt="{html.escape(alt)}" src="data:image/png;base64,{data}">'


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
    count = len(items)
    phone = 4 if count % 4 == 0 else 3
    wide = count if count <= 8 else 6
    listed = "".join(f"<li>{item}</li>" for item in items)
    return f'<ul class="tiles" style="--phone:{phone};--wide:{wide}">{listed}</ul>'


def proof_words(kind: str, share: float) -> str:
    """Why there is one answer, by the kind of guarantee (``Guarantee``), for a reader without
    mathematics; ``share`` of a distance is what a step of a contraction leaves at most."""
    if kind == "contraction":
        words = f"""<p>Take any two states and let both make one step. Afterwards they are closer:
at most <strong>{percent(share)}</strong> of the distance is left, wherever they were. The weights
of the network were kept small enough in training for this, and it was checked again for this
picture.</p>
<p>Now suppose that there were two answers. An answer is a state that a step does not move. So a
step would leave the two exactly as far apart as before. But it must bring them closer. So there
are no two answers: <strong>there is one, and every start leads to it.</strong></p>"""
    elif kind == "strong convexity":
        words = """<p>The objective curves upwards in every direction, like a bowl. A bowl has one
lowest point: <strong>there is one answer.</strong></p>"""
    elif kind == "strong monotonicity":
        words = """<p>Move the state away from an answer, in any direction: the layer pulls it back,
and harder the farther it is (it is strongly monotone). Between two answers nothing could pull. So
<strong>there is one answer.</strong></p>"""
    elif kind == "local":
        words = """<p>Near the state that was computed there is exactly one answer. Farther away
there may be others: that is not excluded.</p>"""
    else:
        words = """<p>For this picture nothing is proven: there may be several answers. Train with
smaller weights to exclude it.</p>"""
    return f'<div class="short">{words}</div>'


def shell(title: str, body: str, footer: str) -> str:
    """The whole page around ``body``."""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1">
<meta name="color-scheme" content="light dark"><title>{html.escape(title)}</title>
<style>{STYLE}</style></head><body><main>{body}
<footer>{footer}</footer>
</main></body></html>
"""
