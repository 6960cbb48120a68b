"""Labels that stop early: each is the label of the converged network, however small its margin."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn

import equilibria as eq
from equilibria.certify import LabelStopping

Array = NDArray[np.float64]


def dense_network(seed: int, bound: float = 0.8) -> nn.Sequential:
    torch.manual_seed(seed)
    options: Any = {
        "constraint": eq.nn.NormBounded(bound=bound),
        "solver": eq.Picard(rtol=0.0, atol=0.0, max_steps=16),
    }
    return nn.Sequential(
        eq.nn.OptEq(8, 6, in_channels=5, **options), nn.Tanh(), eq.nn.OptEq(8, 6, **options),
        nn.Linear(8, 3),
    ).eval()  # fmt: skip


def wide(t: Tensor) -> Array:
    return t.detach().double().numpy()


def by_numpy(model: nn.Sequential, x: Tensor) -> Array:
    """The converged logits: z = Wᵀσ(Wz + Ux + b) by plain iteration in float64 (‖W‖² ≤ 0.91)."""
    value = wide(x)
    for part in model:
        if isinstance(part, eq.nn.OptEq):
            w, u, bias = (wide(t) for t in (part.W.weight, part.U.weight, part.U.bias))
            c = value @ u.T + bias
            z = np.zeros((len(c), w.shape[1]))
            for _ in range(400):
                z = np.maximum(z @ w.T + c, 0.0) @ w
            value = z
        elif isinstance(part, nn.Linear):
            value = value @ wide(part.weight).T + wide(part.bias)
        else:
            value = np.tanh(value)
    return value


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    bound=st.floats(0.3, 0.95),
    scale=st.floats(-12.0, 0.0),
    double=st.booleans(),
)
def test_a_proven_label_is_that_of_the_converged_network(
    seed: int, bound: float, scale: float, double: bool
) -> None:
    """The head's bias is set so that a sample's two best classes are 10^scale apart, or tied."""
    model = dense_network(seed, bound)
    x = torch.randn(12, 5, generator=torch.Generator().manual_seed(seed))
    if double:
        model, x = model.double(), x.double()
    head = model[-1]
    assert isinstance(head, nn.Linear)
    for row in range(2):
        logits = by_numpy(model, x)
        order = logits[row].argsort()
        gap = logits[row, order[-1]] - logits[row, order[-2]]
        with torch.no_grad():
            head.bias[order[-1]] -= gap - (10.0**scale if row else -(10.0**scale))
        exact = by_numpy(model, x)
        found = LabelStopping(model, steps=(1, 2, 4, 8)).certify(x)
        proven = found.proven.numpy()
        assert (found.label.numpy() == exact.argmax(1))[proven].all()
        off = np.linalg.norm(wide(found.logits) - exact, axis=1)
        assert (off <= found.error.numpy() + 1e-12).all()


def test_easy_samples_stop_first_and_none_needs_the_batch() -> None:
    model, x = dense_network(3), torch.randn(64, 5)
    stopping = LabelStopping(model)
    assert stopping.steps == (1, 2, 4, 8)
    found = stopping.certify(x)
    assert found.proven.double().mean() > 0.8
    exact = np.sort(by_numpy(model, x), axis=1)
    margin = torch.from_numpy(exact[:, -1] - exact[:, -2])
    early = found.proven & (found.steps == found.steps[found.proven].min())
    assert margin[early].mean() > margin[~early].mean()
    assert len(found.steps.unique()) > 1
    for i in (0, 17):
        alone = stopping.certify(x[i : i + 1])
        assert torch.equal(alone.steps, found.steps[i : i + 1])
        assert torch.equal(alone.proven, found.proven[i : i + 1])
        torch.testing.assert_close(alone.logits, found.logits[i : i + 1])


@pytest.mark.gpu
def test_the_same_on_the_gpu() -> None:
    model, x = dense_network(3), torch.randn(64, 5)
    exact = by_numpy(model, x)
    found = LabelStopping(model.cuda()).certify(x.cuda())
    proven = found.proven.cpu().numpy()
    assert proven.mean() > 0.8
    assert (found.label.cpu().numpy() == exact.argmax(1))[proven].all()
    off = np.linalg.norm(wide(found.logits.cpu()) - exact, axis=1)
    assert (off <= found.error.cpu().numpy() + 1e-12).all()


def test_a_bad_sample_is_never_proven_and_harms_no_other() -> None:
    model, x = dense_network(3), torch.randn(6, 5)
    clean = LabelStopping(model).certify(x)
    x[2] = torch.nan
    found = LabelStopping(model).certify(x)
    assert not found.proven[2]
    rest = [0, 1, 3, 4, 5]
    assert torch.equal(found.proven[rest], clean.proven[rest])
    torch.testing.assert_close(found.logits[rest], clean.logits[rest])


def geq() -> nn.Module:
    return eq.nn.GEQ(4, 4, patch=eq.Patches(channels=2, size=2), gamma=0.5, hidden=None)


LAYERS: dict[str, Any] = {
    "geq": geq,
    "chain": lambda: eq.nn.MultiBranch([geq(), geq()], scales=(4, 2), chain=True),
    "envelope": lambda: eq.nn.Envelope(geq()),
    "monotone": lambda: eq.nn.MonotoneDEQ(4, kernel_size=3, m=1.0),
}


def with_layer(name: str) -> nn.Sequential:
    torch.manual_seed(0)
    rest = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    return nn.Sequential(nn.Conv2d(1, 4, 1), LAYERS[name](), *rest).eval()


@pytest.mark.filterwarnings("ignore::equilibria.ConvergenceWarning")
@pytest.mark.parametrize("name", LAYERS)
def test_other_layers_and_the_model_is_left_as_it_is(name: str) -> None:
    model, x = with_layer(name), torch.randn(8, 1, 4, 4)
    before, kept = model(x), copy.deepcopy(model.state_dict())
    found = LabelStopping(model).certify(x)
    assert found.proven.any()
    exact = eq.certify(model, x)
    assert torch.equal(found.label[found.proven], exact.label[found.proven])
    off = (found.logits - exact.logits).norm(dim=1)
    assert bool((off <= found.error + exact.error).all())
    assert torch.equal(model(x), before)
    assert all(torch.equal(t, kept[name]) for name, t in model.state_dict().items())


class Exponential(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.exp()


def test_where_nothing_is_proven_one_try_says_why() -> None:
    model = nn.Sequential(Exponential(), with_layer("geq"))
    found = LabelStopping(model).certify(torch.randn(3, 1, 4, 4))
    assert not found.proven.any()
    assert found.steps.tolist() == [1, 1, 1]
    assert any("exp" in note for note in found.notes)


def test_without_layers_and_wrong_steps() -> None:
    plain = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    found = LabelStopping(plain).certify(torch.randn(5, 4))
    assert found.proven.all()
    with pytest.raises(ValueError, match=r"steps=\(2, 1\)"):
        LabelStopping(plain, steps=(2, 1))


def test_a_network_of_one_step_is_tried_once() -> None:
    model = dense_network(3)
    assert LabelStopping(eq.nn.set_steps(model, 1)).steps == (1,)
