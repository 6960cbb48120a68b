"""Certificates of maps and of parts: what they say, how they compose, a wrong factor refuted."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria.certify import CompositeCertificate, Guarantee, MapCertificate
from equilibria.nn import DEQ, MDEQ
from equilibria.problems.operators import DenseOperator
from tests.contracts.layer_contract import TIGHT
from tests.nn.test_deq import TanhBlock
from tests.problems.test_operators import randn


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


class BoundedBlock(TanhBlock):
    """tanh has slopes in [0, 1], so ‖W‖₂ is a Lipschitz constant."""

    def contraction_bound(self) -> float:
        return DenseOperator(self.W.weight).norm_upper()


def made(block: nn.Module, **options: Any) -> DEQ:
    return DEQ(block, start=(5,), **options).double()


def test_nothing_is_claimed_of_a_general_map() -> None:
    torch.manual_seed(0)
    layer, x = made(TanhBlock()), randn(3, 4)
    found = eq.certify(layer, x)
    assert found.kinds == (Guarantee.none,) * 3
    assert not found.unique
    assert not found.rigorous
    assert found.contraction is None
    assert torch.isinf(found.error_bound).all()
    z = layer(x).detach()
    gap = torch.linalg.vector_norm(layer.block(z, x) - z, dim=1).detach()
    torch.testing.assert_close(found.residual, gap, rtol=1e-6, atol=1e-12)
    assert "nothing is proven" in str(found)
    assert "estimate" in found.numbers["radius at z"]


@pytest.mark.parametrize("rtol", [1e-1, 1e-4])
def test_a_proven_factor_bounds_the_true_error(rtol: float) -> None:
    torch.manual_seed(0)
    block = BoundedBlock(scale=0.9)
    layer, x = made(block, solver=eq.Picard(rtol=rtol)), randn(4, 4)
    factor = float(torch.linalg.matrix_norm(block.W.weight.detach(), 2))
    assert 0.5 < factor < 0.95
    found = layer.certify(x)
    assert found.kinds == (Guarantee.contraction,) * 4
    assert found.contraction == pytest.approx(factor, rel=1e-6)
    truth = layer.solve(x, solver=TIGHT).value
    error = torch.linalg.vector_norm(layer(x) - truth, dim=1).detach()
    assert (error <= found.error_bound).all()
    assert (found.error_bound <= (1 + factor) / (1 - factor) * error * 1.01 + 1e-12).all()
    assert "contraction_bound()" in str(found)


class ClaimedBlock(TanhBlock):
    """With a factor that nobody has proven."""

    def __init__(self, claim: float) -> None:
        super().__init__()
        self.claim = claim
        with torch.no_grad():  # J = 0.8 I at z = 0, where x = 0 leads
            self.W.weight.copy_(0.8 * torch.eye(5))
            self.U.bias.zero_()

    def contraction_bound(self) -> float:
        return self.claim


def test_a_claimed_factor_and_a_given_state() -> None:
    layer, x, z = made(ClaimedBlock(0.9)), randn(3, 4), randn(3, 5)
    found = layer.certify(x, z)
    assert found.solver == "z was given"
    gap = torch.linalg.vector_norm(layer.block(z, x) - z, dim=1).detach()
    torch.testing.assert_close(found.error_bound, gap / (1 - 0.9), rtol=1e-9, atol=0)
    above = made(ClaimedBlock(1.5)).certify(x)
    assert above.kind == Guarantee.none
    assert "not below 1" in str(above)


def test_a_wrong_factor_is_refuted() -> None:
    found = made(ClaimedBlock(0.5)).certify(torch.zeros(2, 4, dtype=torch.float64))
    assert found.kind == Guarantee.none
    assert torch.isinf(found.error_bound).all()
    assert "REFUTED" in str(found)


def test_a_block_that_takes_one_dtype_only() -> None:
    shift = torch.full((5,), 0.25)

    def block(z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(torch.addmv(shift, 0.1 * torch.eye(5), z[0]))[None] + 0 * x[:, :1]

    found = DEQ(block, start=(5,)).certify(torch.randn(1, 4))
    assert found.residual[0] < 1e-4
    assert any("does not take float64" in note for note in found.notes)


def test_mdeq() -> None:
    torch.manual_seed(0)
    layer, x = MDEQ((4, 4), groups=2), torch.randn(2, 4, 4, 4)
    found = eq.certify(layer, x)
    assert found.kinds == (Guarantee.none,) * 2
    z = layer.eval()(x)
    image = layer.step(z, x, ())
    parts = [(a - b).flatten(1) for a, b in zip(z, image, strict=True)]
    gap = torch.linalg.vector_norm(torch.cat(parts, 1), dim=1).detach()
    torch.testing.assert_close(found.residual.float(), gap, rtol=0.02, atol=1e-6)
