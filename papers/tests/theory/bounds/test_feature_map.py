"""Proposition 1 on a layer: the truncated kernel against the explicit features and its bound."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import equilibria as eq
from equilibria_papers.theory.bounds import feature_map_report
from papers.tests.theory.bounds.layers import drawn, geq, iterate_geq, opteq


def test_errors_are_those_of_the_explicit_features() -> None:
    w, u, gamma = drawn(0, 2, 3, 0.9), drawn(1, 2, 4, 1.5), 0.8
    x = drawn(2, 5, 4, 3.0)
    r = feature_map_report(geq(w, u, gamma), x, terms=(1, 3, 5))
    c = (x @ u.mT).numpy()
    y = iterate_geq(w.numpy(), c, gamma) @ w.numpy().T
    true = -np.exp(-gamma * ((c - y) ** 2).sum(1)) / (2 * gamma)
    scale = np.exp(-gamma * ((c**2).sum(1) + (y**2).sum(1))) / (2 * gamma)

    def features(v: np.ndarray, terms: int) -> np.ndarray:
        parts, power = [np.ones(1)], np.ones(1)
        for k in range(1, terms):
            power = np.outer(power, v).ravel()
            parts.append(math.sqrt((2 * gamma) ** k / math.factorial(k)) * power)
        return np.concatenate(parts)

    for i, k in enumerate(r.terms):
        inner = np.array([features(a, k) @ features(b, k) for a, b in zip(c, y, strict=True)])
        assert r.error[i] == pytest.approx(np.abs(-scale * inner - true).max(), rel=1e-6)
        assert r.features[i] == len(features(c[0], k))
    printed = -np.exp(-gamma * ((c**2).sum(1) + np.linalg.norm(y, axis=1)))
    printed *= np.exp(2 * gamma * (c * y).sum(1))
    assert r.printed_error == pytest.approx(np.abs(printed - true).max(), rel=1e-8)


def test_errors_are_below_the_bound_and_vanish() -> None:
    torch.manual_seed(0)
    layer = eq.nn.GEQ(4, 8, in_channels=3, patch=eq.Patches(channels=4, size=2))
    r = feature_map_report(layer, torch.randn(3, 3, 4, 4))
    for error, bound in zip(r.error, r.error_bound, strict=True):
        assert error <= bound * (1 + 1e-9) + 1e-13
    assert r.error[-1] < 1e-13
    assert r.printed_error > 0.01
    assert r.features[-1] is None
    assert "K = 4" in str(r)


def test_bad_input() -> None:
    with pytest.raises(TypeError, match="linear kernel already"):
        feature_map_report(opteq(drawn(0, 2, 2, 0.5), drawn(1, 2, 2, 0.5)), torch.ones(1, 2))
    with pytest.raises(ValueError, match="terms"):
        feature_map_report(
            geq(drawn(0, 2, 2, 0.5), drawn(1, 2, 2, 0.5), 1.0), torch.ones(1, 2), terms=(0,)
        )
