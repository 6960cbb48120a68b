"""Networks of a deep OptEq layer, and their segmenters."""

from __future__ import annotations

import pytest
import torch

import equilibria as eq
from equilibria import models
from tests.models.small import images, laid_out, make


def test_options_of_the_paper() -> None:
    options = {
        "alpha": (0.5, 1.0),
        "regularizer": eq.SquaredNorm(0.1),
        "regularize": "prox",
        "solver": eq.SequentialAveraging(regularizer=eq.SquaredNorm(1.0)),
        "adjoint": eq.Unrolled(),
    }
    model = make("deep_opteq_199k", **options)
    assert {name: getattr(model.layer, name) for name in options} == options
    assert torch.isfinite(model(images(model))).all()
    learned, plain = make("deep_opteq_199k", learn_alpha=True), make("deep_opteq_199k")
    more = models.count_parameters(learned) - models.count_parameters(plain)
    assert more == 2  # one a block
    with pytest.raises(ValueError, match=r"deep_opteq_199k: .*alpha=\(0.5, 0.5, 0.5\)"):
        make("deep_opteq_199k", alpha=(0.5, 0.5, 0.5))


def test_middle_alternates_its_kernels() -> None:
    model = laid_out("deep_opteq_middle")
    kernels = [block.W.depthwise.weight.shape for block in model.layer.blocks]
    assert kernels == [(512, 1, 5, 5), (512, 1, 3, 3)] * 3
    mids = [block.W.pointwise.weight.shape[0] for block in model.layer.blocks]
    assert mids == [1024, 512] * 3
    injected = [block.U.depthwise.weight.shape[-1] for block in model.layer.blocks]
    assert injected == [5, 3] * 3


def test_a_layer_of_mixed_kernels_still_solves_and_certifies() -> None:
    # The blocks of Middle, small: one layer whose first block was replaced by a 5 × 5 one.
    torch.manual_seed(0)
    layer = eq.nn.DeepOptEq(4, (6, 4), kernel_size=3, separable=True).eval()
    constraint = eq.nn.NormBounded(bound=0.95)
    layer.blocks[0] = eq.nn.OptEqBlock(
        4, 6, 4, kernel_size=5, separable=True, constraint=constraint, bias=True
    ).eval()
    x = torch.randn(3, 4, 8, 8)
    certificate = eq.certify(layer, x)
    assert certificate.unique
    assert float(certificate.error_bound.max()) < 1e-2


@pytest.mark.parametrize("name", ["deep_opteq_seg", "fcn_seg", "fcn_resnet18"])
def test_segmenters_answer_where_the_image_changes(name: str) -> None:
    # A change in one corner moves the scores there much more than in the opposite one.
    model = make(name).eval()
    x = torch.zeros(1, 3, 96, 96)
    y = x.clone()
    y[..., :16, :16] = 3.0
    with torch.no_grad():
        moved = (model(y) - model(x)).abs().sum(1)[0]
    assert float(moved[:16, :16].mean()) > 5 * float(moved[-16:, -16:].mean())
