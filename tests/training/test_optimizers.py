"""Which parameters decay, and what the optimizers are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import equilibria as eq
from equilibria.training import TrainConfig
from equilibria.training.optimizers import (
    decay_groups,
    gradient_norm,
    make_optimizer,
    scale_gradients,
)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.layer_norm = nn.LayerNorm((4, 2))  # a matrix of scales
        self.bounded = eq.nn.GEQ(4, 4, hidden=3, gamma=eq.LearnedGamma(0.5))
        self.scaled = eq.nn.constrain(nn.Linear(4, 4), "weight", eq.nn.WeightNormalized())
        self.frozen = nn.Linear(2, 2).requires_grad_(False)


def test_weights_decay_and_norms_biases_scales_do_not() -> None:
    model = Mixed()
    decayed, free = decay_groups(model, 0.1)
    names = {p: n for n, p in model.named_parameters()}
    assert decayed["weight_decay"] == 0.1
    assert free["weight_decay"] == 0.0
    assert {names[p] for p in decayed["params"]} == {
        "conv.weight",
        "bounded.U.weight",
        "bounded.W.parametrizations.weight.original",
        "bounded.W_h.parametrizations.weight.original",
        "scaled.parametrizations.weight.original1",
    }
    assert {names[p] for p in free["params"]} == {
        "conv.bias",
        "norm.weight",
        "norm.bias",
        "layer_norm.weight",
        "layer_norm.bias",
        "bounded.U.bias",
        "bounded.log_gamma",
        "scaled.bias",
        "scaled.parametrizations.weight.original0",
    }


def test_the_options_reach_the_optimizer() -> None:
    config = TrainConfig(lr=0.3, momentum=0.8, nesterov=False, weight_decay=0.01)
    made = make_optimizer(Mixed(), config)
    group = made.param_groups[0]
    assert isinstance(made, torch.optim.SGD)
    assert len(made.param_groups) == 1
    assert (group["lr"], group["momentum"], group["nesterov"]) == (0.3, 0.8, False)
    assert group["weight_decay"] == 0.01
    adamw = make_optimizer(Mixed(), config.with_overrides(optimizer="adamw", decay_norms=False))
    assert isinstance(adamw, torch.optim.AdamW)
    assert [g["weight_decay"] for g in adamw.param_groups] == [0.01, 0.0]
    assert adamw.param_groups[0]["betas"] == (0.8, 0.999)


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to train"):
        make_optimizer(nn.ReLU(), TrainConfig())


@pytest.mark.parametrize("dtypes", [(torch.float32,) * 3, (torch.float32, torch.float64) * 2])
def test_norm_and_clipping(dtypes: tuple[torch.dtype, ...]) -> None:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(3, k + 1, dtype=d)) for k, d in enumerate(dtypes)]
    assert gradient_norm(parameters) is None
    for p in parameters[1:]:
        p.grad = torch.randn_like(p)
    flat = torch.cat([p.grad.double().flatten() for p in parameters if p.grad is not None])
    norm = gradient_norm(parameters)
    assert norm is not None
    assert float(norm) == pytest.approx(float(flat.norm()), rel=1e-6)
    scale_gradients(parameters, 0.5, norm)
    after = torch.cat([p.grad.double().flatten() for p in parameters if p.grad is not None])
    torch.testing.assert_close(after, flat * 0.5 / flat.norm(), rtol=1e-5, atol=1e-7)
    again = gradient_norm(parameters)
    assert again is not None
    scale_gradients(parameters, 10.0, again)  # inside the limit: nothing changes
    same = torch.cat([p.grad.double().flatten() for p in parameters if p.grad is not None])
    assert torch.equal(same, after)
