"""Certificates of maps and of parts: what they say, and how parts add up."""

from __future__ import annotations

import math

import pytest
import torch

from equilibria.certify import CompositeCertificate, Guarantee, MapCertificate


def certificate(
    kinds: list[Guarantee], residual: list[float], error: list[float], *, rigorous: bool = True
) -> MapCertificate:
    return MapCertificate(
        kinds=tuple(kinds),
        residual=torch.tensor(residual, dtype=torch.float64),
        error_bound=torch.tensor(error, dtype=torch.float64),
        rounding=torch.full((len(kinds),), 1e-15, dtype=torch.float64),
        contraction=0.5,
        modulus=None,
        lipschitz=2.0,
        lipschitz_note="‖U‖/(1 − ρ)",
        solver="z was given",
        rigorous=rigorous,
        numbers={"‖W_1‖": "0.7"},
        notes=("a note",),
    )


def test_text_says_what_is_known() -> None:
    text = str(certificate([Guarantee.contraction, Guarantee.none], [0.1, 0.2], [0.2, math.inf]))
    for part in ("contraction: one", "1 of 2 samples", "‖U‖/(1 − ρ)", "‖W_1‖", "a note", "0.5"):
        assert part in text


def test_a_whole_is_as_good_as_its_worst_part() -> None:
    good = certificate([Guarantee.contraction] * 2, [0.3, 0.0], [0.6, 0.0])
    mixed = certificate(
        [Guarantee.strong_monotonicity, Guarantee.none], [0.4, 1.0], [0.8, math.inf], rigorous=False
    )
    whole = CompositeCertificate({"a": good, "b": mixed})
    assert whole.kinds == (Guarantee.strong_monotonicity, Guarantee.none)
    assert whole.kind is Guarantee.none
    assert not whole.unique
    assert whole.certified.tolist() == [True, False]
    assert not whole.rigorous
    assert whole.residual.tolist() == pytest.approx([0.5, 1.0])
    assert whole.error_bound.tolist() == pytest.approx([1.0, math.inf])
    assert list(whole) == ["a", "b"]
    assert whole["a"] is good
    assert "a: Certificate for 2 samples" in str(whole)


def test_parts_of_other_batches_are_refused() -> None:
    one = certificate([Guarantee.contraction], [0.0], [0.0])
    two = certificate([Guarantee.contraction] * 2, [0.0] * 2, [0.0] * 2)
    with pytest.raises(ValueError, match="different sizes"):
        CompositeCertificate({"a": one, "b": two})
    with pytest.raises(ValueError, match="at least one"):
        CompositeCertificate({})
