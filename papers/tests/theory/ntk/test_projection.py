"""Projected kernels: unbiased, with the stated spread, of both kinds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria_papers.theory import Projection, empirical_ntk
from equilibria_papers.theory.ntk.projection import standard_error


def network() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2)).double()
    return model, torch.randn(4, 6, dtype=torch.float64)


@pytest.mark.parametrize("kind", ["sparse", "gaussian"])
@pytest.mark.parametrize("outputs", ["all", "trace"])
def test_the_mean_is_the_kernel_and_the_spread_is_bounded(kind: Any, outputs: str) -> None:
    model, x = network()
    exact = empirical_ntk(model, x, outputs=outputs).matrix
    size, trials = 16, 150
    found = torch.stack(
        [
            empirical_ntk(
                model, x, outputs=outputs, method="vmap",
                projection=Projection(size=size, kind=kind, seed=seed),
            ).matrix
            for seed in range(trials)
        ]
    )  # fmt: skip
    diagonal = exact.diagonal()
    bound = standard_error(exact, diagonal, diagonal, size, sums=outputs == "trace")
    # Five standard errors of the mean, in 4 to 64 entries.
    assert bool(((found.mean(0) - exact).abs() < 5 * bound / trials**0.5).all())
    spread = found.std(0)
    assert bool((spread < 1.25 * bound).all())
    if kind == "gaussian" and outputs == "all":  # there the bound is an equality
        torch.testing.assert_close(spread, bound, rtol=0.35, atol=0.0)
    relative = (found - exact).square().sum((1, 2)).mean().sqrt() / exact.norm()
    told = empirical_ntk(
        model, x, outputs=outputs, projection=Projection(size=256, kind=kind)
    ).relative_error
    assert told is not None
    # Told from one projection of 256; the truth at 16 is four times that, at most.
    assert float(relative) < 1.5 * 4 * told
    assert float(relative) > 0.3 * 4 * told


@pytest.mark.parametrize("kind", ["sparse", "gaussian"])
def test_parts_of_a_projection_fit_together(kind: Any) -> None:
    model, x = network()
    projection = Projection(size=40, kind=kind, seed=3)
    whole = empirical_ntk(model, x, projection=projection)
    cross = empirical_ntk(model, x[:1], x[1:], projection=projection)
    torch.testing.assert_close(cross.matrix, whole.matrix[:2, 2:])
    again = empirical_ntk(model, x, projection=projection, batch_size=1)
    torch.testing.assert_close(again.matrix, whole.matrix)
    parts = empirical_ntk(model, x, projection=projection, layers=True)
    torch.testing.assert_close(sum(parts.parts.values()), parts.matrix)
    other = empirical_ntk(model, x, projection=Projection(size=40, kind=kind, seed=4))
    assert not torch.allclose(other.matrix, whole.matrix)


def test_a_gaussian_projection_is_the_product_with_its_directions() -> None:
    """f = Wx: along direction V the derivative is Vx, so K̂ = Σ_c (V_c x)(V_c x′)ᵀ/r."""
    model, x = nn.Linear(3, 2, bias=False).double(), torch.randn(4, 3, dtype=torch.float64)
    found = empirical_ntk(model, x, projection=Projection(size=3000, kind="gaussian")).kernel
    expected = torch.einsum("ij,ab->ijab", x @ x.mT, torch.eye(2, dtype=x.dtype))
    assert float((found - expected).norm() / expected.norm()) < 0.1


def test_equilibrium_networks_project_both_ways() -> None:
    torch.manual_seed(0)
    model = eq.models.create("opteq_digits")
    x = torch.randn(3, 1, 8, 8)
    exact = empirical_ntk(model, x, outputs="trace").matrix
    for kind in ("sparse", "gaussian"):
        found = empirical_ntk(
            model, x, outputs="trace", projection=Projection(size=64, kind=kind)  # type: ignore[arg-type]
        )  # fmt: skip
        assert found.relative_error is not None
        off = float((found.matrix - exact).norm() / exact.norm())
        assert off < 2.5 * found.relative_error < 1.0


def test_a_model_without_forward_mode_is_told_of_the_other_kind() -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            return 2 * ctx.saved_tensors[0] * grad

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = Square.apply(self.linear(x))
            return out

    model, x = Model(), torch.randn(2, 3)
    with pytest.raises(RuntimeError, match="kind='sparse'"):
        empirical_ntk(model, x, projection=Projection(kind="gaussian", size=4))
    found = empirical_ntk(model, x, projection=Projection(size=4000))
    assert found.method == "autograd"
    exact = empirical_ntk(model, x)
    torch.testing.assert_close(found.matrix, exact.matrix, rtol=0.2, atol=0.2)


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="out of range"):
        Projection(size=0)
    with pytest.raises(ValueError, match="'sparse' or 'gaussian'"):
        Projection(kind="hadamard")  # type: ignore[arg-type]
    model, x = network()
    with pytest.raises(MemoryError, match="more than memory"):
        empirical_ntk(model, x, projection=10**6, memory=10**6)
