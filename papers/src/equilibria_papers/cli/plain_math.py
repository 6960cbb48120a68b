"""Formulas of the claims as plain text for a terminal: ``$\\|W\\| \\le 1$`` is ``‖W‖ ≤ 1``."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

_SYMBOLS = {
    "le": "≤", "ge": "≥", "ne": "≠", "in": "∈", "to": "→", "mapsto": "↦", "preceq": "⪯",
    "succeq": "⪰", "partial": "∂", "nabla": "∇", "sum": "Σ", "prod": "∏", "otimes": "⊗",
    "odot": "⊙", "circ": "∘", "cdot": "·", "dots": "…", "infty": "∞", "langle": "⟨",
    "rangle": "⟩", "ell": "ℓ", "top": "ᵀ", "varphi": "φ", "big": "",
}  # fmt: skip
_ACCENTS = {"tilde": "\u0303", "bar": "\u0304", "hat": "\u0302"}
_RAISED = dict(zip("0123456789+-−n*ᵀ", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁻ⁿ⋆ᵀ", strict=True))
_ATOM = r"\s*(\{[^{}]*\}|[^\s{}\\])"


def plain_math(text: str) -> str:
    """The text with every ``$…$``, and exponents outside of them, in plain characters."""
    text = re.sub(r"\$([^$]+)\$", lambda found: _plain(found[1]), text)
    return re.sub(r"\^(\{[^{}]*\})", _superscript, text)


def _plain(formula: str) -> str:
    text = formula.replace(r"\|", "‖").replace(r"\,", " ").replace(r"\mathbb R", "ℝ")
    text = re.sub(r"\\([A-Za-z]+)(?:\s+(?=[A-Za-z]))?", _symbol, text)
    before = ""
    while before != text:  # from the inside out
        before = text
        for pattern, plain in _RULES:
            text = re.sub(pattern, plain, text)
    return re.sub(r" +", " ", re.sub(r"[{}]", "", text)).strip()


def _symbol(found: re.Match[str]) -> str:
    name = found[1]
    if name in {*_ACCENTS, "frac", "sqrt", "mathcal", "mathrm", "text"}:
        return found[0]
    if name in _SYMBOLS:
        space = " " if found[0][-1].isspace() and name not in ("partial", "nabla", "top") else ""
        return _SYMBOLS[name] + space
    size = "CAPITAL" if name[0].isupper() else "SMALL"
    try:
        return unicodedata.lookup(f"GREEK {size} LETTER {name.replace('ambda', 'amda')}")
    except KeyError:  # max, sin, …
        return name if found.string[found.end() :].startswith("(") else f"{name} "


def _grouped(text: str) -> str:
    text = text.strip("{} ")
    return text if re.fullmatch(r"\d*|[A-Za-z]*|.", text) else f"({text})"


def _subscript(found: re.Match[str]) -> str:
    text = _grouped(found[1])
    return f"_{text} " if found[2] and len(text) > 1 and text[-1] != ")" else f"_{text}"


def _superscript(found: re.Match[str]) -> str:
    text = found[1].strip("{}")
    raised = "".join(_RAISED.get(sign, "") for sign in text)
    return raised if len(raised) == len(text) else "^" + _grouped(text)


_RULES: list[tuple[str, Callable[[re.Match[str]], str]]] = [
    (rf"\\frac{_ATOM}{_ATOM}", lambda found: f"{_grouped(found[1])}/{_grouped(found[2])}"),
    (rf"\\sqrt{_ATOM}", lambda found: "√" + _grouped(found[1])),
    (rf"\\(?:mathcal|mathrm|text){_ATOM}", lambda found: found[1].strip("{}")),
    (r"\\(tilde|bar|hat)\s*\{?([^\s{}\\])\}?", lambda found: found[2] + _ACCENTS[found[1]]),
    (rf"\^{_ATOM}", _superscript),
    (r"_(\{[^{}]*\})(?=(\w)?)", _subscript),
]
