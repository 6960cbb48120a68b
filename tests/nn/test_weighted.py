"""The options that layers with weights share are written once."""

from __future__ import annotations

import inspect
from typing import get_type_hints

import pytest

import equilibria as eq
from equilibria.nn import GEQ, KerDEQ, LayerOptions, NormBounded, OptEq, PolynomialEq, SigmoidEq
from equilibria.nn.weighted import WeightedLayer

LAYERS = (GEQ, KerDEQ, OptEq, PolynomialEq, SigmoidEq)


@pytest.mark.parametrize("kind", LAYERS)
def test_shared_options_have_one_default(kind: type[WeightedLayer]) -> None:
    known = set(inspect.signature(WeightedLayer.__init__).parameters)
    shared = known - {"self", "channels", "mid", "features"}
    assert shared == set(get_type_hints(LayerOptions))
    assert not shared & set(inspect.signature(kind.__init__).parameters)
    layer = kind(4, 4)
    assert (layer.in_channels, layer.prior) == (4, eq.NonNegative())
    assert layer.constraint == NormBounded(bound=0.95)
    assert layer.U.bias is not None
    with pytest.raises(TypeError, match="kernal_size"):
        kind(4, 4, kernal_size=3)  # type: ignore[call-arg]


def test_a_kernel_without_patches_is_refused() -> None:
    with pytest.raises(ValueError, match=r"GEQ\(kernel_size=3\) without patches: .* Give patch="):
        GEQ(3, 4, kernel_size=3)
    with pytest.raises(ValueError, match=r"KerDEQ\(kernel_size=3\) without patches"):
        KerDEQ(4, 4, patch=None, kernel_size=3)
