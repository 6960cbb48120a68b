"""Formulas of the claims as plain text for a terminal: ``$\\|W\\| \\le 1$`` is ``‖W‖ ≤ 1``."""

from __future__ import annotations

import re
import unicodedata

_SYMBOLS = {
    "le": "≤", "ge": "≥", "ne": "≠", "in": "∈", "to": "→", "mapsto": "↦", "preceq": "⪯",
    "succeq": "⪰", "partial": "∂", "nabla": "∇", "sum": "Σ", "prod": "∏", "otimes": "⊗",
    "odot": "⊙", "circ": "∘", "cdot": "·", "dots": "…", "infty": "∞", "langle": "⟨",
    "rangle": "⟩", "ell": "ℓ", "top": "ᵀ", "varphi": "φ", "big": "", "left": "", "right": "",
}  # fmt: skip
_ACCENTS = {"tilde": "\u0303", "bar": "\u0304", "hat": "\u0302"}
_RAISED = dict(zip("0123456789+-−n", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁻ⁿ", strict=True)) | {"*": "⋆", "ᵀ": "ᵀ"}
_ATOM = r"(?:\{([^{}]*)\}|([^\s{}\\]))"


def plain_math(text: str) -> str:
    """The text with every ``$…$``, and exponents outside of them, in plain characters."""
    text = re.sub(r"\$([^$]+)\$", lambda found: _plain(found[1]), text)
    return re.sub(r"\^\{([^{}]*)\}", _superscript, text)


def _plain(formula: str) -> str:
    text = formula.replace(r"\|", "‖").replace(r"\{", "❴").replace(r"\}", "❵")
    text = re.sub(r"\\[,;!: ]|~", " ", text)
    text = re.sub(r"\\mathbb\s*\{?R\}?", "ℝ", text)
    text = re.sub(r"\\([A-Za-z]+)(?:\s+(?=[A-Za-z]))?", _symbol, text)
    before = ""
    while before != text:
        before = text
        text = re.sub(r"\\frac" + _ATOM + _ATOM, _fraction, text)
        text = re.sub(r"\\sqrt\s*" + _ATOM, lambda m: "√" + _grouped(m[1] or m[2]), text)
        text = re.sub(r"\\(?:mathcal|mathrm|text)\s*" + _ATOM, lambda m: m[1] or m[2], text)
        text = re.sub(r"\\(tilde|bar|hat)\s*" + _ATOM, _accented, text)
        text = re.sub(r"\^" + _ATOM, _superscript, text)
        text = re.sub(r"_\{([^{}]*)\}(?=(\w)?)", _subscript, text)
    text = re.sub(r"[{}]", "", text).replace("❴", "{").replace("❵", "}")
    return re.sub(r" +", " ", text).strip()


def _symbol(found: re.Match[str]) -> str:
    name = found[1]
    if name in _SYMBOLS:
        space = " " if found[0][-1].isspace() and name not in ("partial", "nabla", "top") else ""
        return _SYMBOLS[name] + space
    size = "CAPITAL" if name[0].isupper() else "SMALL"
    spelled = {"lambda": "lamda"}.get(name.lower(), name.lower())
    try:
        return unicodedata.lookup(f"GREEK {size} LETTER {spelled}")
    except KeyError:
        kept = name in {*_ACCENTS, "frac", "sqrt", "mathcal", "mathrm", "text"}
        if kept:
            return found[0]
        return name if found.string[found.end() :].startswith("(") else f"{name} "  # max, sin, …


def _grouped(text: str) -> str:
    text = text.strip()
    return text if re.fullmatch(r"\d*|[A-Za-z]*|.", text) else f"({text})"


def _fraction(found: re.Match[str]) -> str:
    return f"{_grouped(found[1] or found[2])}/{_grouped(found[3] or found[4])}"


def _accented(found: re.Match[str]) -> str:
    base = found[2] or found[3]
    return base[:1] + _ACCENTS[found[1]] + base[1:]


def _subscript(found: re.Match[str]) -> str:
    text = _grouped(found[1])
    return f"_{text} " if found[2] and len(text) > 1 and text[-1] != ")" else f"_{text}"


def _superscript(found: re.Match[str]) -> str:
    text = found[1] or found[2]
    if all(sign in _RAISED for sign in text):
        return "".join(_RAISED[sign] for sign in text)
    return "^" + _grouped(text)
