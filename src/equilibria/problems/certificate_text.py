"""A certificate in words: aligned lines, and per sample the least, the middle and the largest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from equilibria.problems.guarantee import Guaranteed

if TYPE_CHECKING:
    from equilibria.problems.certificate import Certificate

__all__ = ["describe", "either", "guarantee_rows", "lines", "spread"]

_WORDS = {
    "contraction": "one equilibrium, and plain iteration converges to it",
    "strong convexity": "one equilibrium (G is strongly convex)",
    "strong monotonicity": "one equilibrium (I − W is strongly monotone)",
    "local": "one equilibrium within the bound below, a strict local minimizer; others may exist",
    "none": "nothing is proven",
}


def _one(value: float) -> str:
    return f"{value:.4g}"


def spread(values: Tensor) -> str:
    """One number, or min, median and max; NaN samples are counted apart."""
    flat = values.detach().flatten().double().cpu()
    known = flat[~flat.isnan()]
    if flat.numel() == 1 or known.numel() == 0:
        return _one(float(flat[0])) if flat.numel() else "no samples"
    least, largest = float(known.min()), float(known.max())
    lost = flat.numel() - known.numel()
    text = f"min {_one(least)}, median {_one(float(known.median()))}, max {_one(largest)}"
    if least == largest:
        text = _one(least)
    return f"{text} ({lost} NaN)" if lost else text


def either(value: float | Tensor) -> str:
    return spread(value) if isinstance(value, Tensor) else _one(value)


def guarantee_rows(certificate: Guaranteed) -> list[tuple[str, str]]:
    counts = {str(kind): 0 for kind in certificate.kinds}
    for kind in certificate.kinds:
        counts[str(kind)] += 1
    total = len(certificate.kinds)
    rows: list[tuple[str, str]] = []
    for name, words in _WORDS.items():
        if name in counts:
            share = "" if counts[name] == total else f" ({counts[name]} of {total} samples)"
            rows.append(("guarantee" if not rows else "", f"{name}: {words}{share}"))
    return rows


def _origins(certificate: Certificate) -> list[tuple[str, str]]:
    numbers = certificate.numbers
    rows = []
    for name, bound in (("‖W‖", numbers.norm), ("μ", numbers.mu)):
        if bound is not None:
            rows.append((name, f"{_one(bound.estimate)}, at most {_one(bound.upper)}"))
    if numbers.hidden_norm is not None:
        rows.append(("‖W_h‖", f"at most {_one(numbers.hidden_norm)}"))
    if numbers.gamma is not None:
        rows.append(("γ", numbers.gamma))
    if numbers.input_norm is not None:
        rows.append(("‖x → c̃‖", f"at most {_one(numbers.input_norm)}"))
    return rows


def describe(certificate: Certificate) -> str:
    """The lines that ``print(certificate)`` shows."""
    c = certificate
    certain = int(c.certified.sum())
    total = len(c.kinds)
    unique = "yes" if c.unique else f"certified for {certain} of {total} samples"
    lipschitz = "none" if c.lipschitz is None else _one(c.lipschitz)
    rows = [
        *guarantee_rows(c),
        ("unique", unique),
        ("contraction ρ", either(c.contraction)),
        ("modulus m", either(c.modulus)),
        ("smoothness L", either(c.smoothness)),
        ("modulus at z", spread(c.modulus_local)),
        ("objective", spread(c.objective)),
        ("stationarity", spread(c.stationarity)),
        ("residual", spread(c.residual)),
        ("‖z − z*‖ ≤", spread(c.error_bound)),
        ("rounding", f"{spread(c.rounding)} (of the residual; paid for in the bound)"),
        (f"Lipschitz in {c.lipschitz_in}", f"{lipschitz} ({c.lipschitz_note})"),
    ]
    if c.lipschitz_local is not None:
        text = f"{spread(c.lipschitz_local)} ({c.lipschitz_local_note})"
        rows.append(("  at this input", text))
    rows += [*_origins(c), ("solver", c.solver)]
    rows += [("note", note) for note in c.notes]
    return lines(c, rows, rigorous=c.rigorous)


def lines(certificate: Guaranteed, rows: list[tuple[str, str]], *, rigorous: bool) -> str:
    """A heading and aligned rows of (name, text)."""
    total = len(certificate.kinds)
    width = max(len(name) for name, _ in rows)
    samples = "1 sample" if total == 1 else f"{total} samples"
    status = "proven, in float64" if rigorous else "partly estimated, see the notes"
    made = [f"Certificate for {samples}: {status}"]
    made += [f"  {name:<{width}}  {text}".rstrip() for name, text in rows]
    return "\n".join(made)
