"""Iterates and residuals against closed forms of linear maps and the engine's own answers."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import equilibria as eq
from equilibria_papers.theory.trajectories import (
    SolverPath,
    at_scale,
    clipped_stds,
    layer_input,
    record_path,
)

# The input of a layer inside a network, and weights at other scales.


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        eq.nn.DEQ(eq.nn.ResidualBlock(8, 16, groups=4)),
        eq.nn.DEQ(eq.nn.ResidualBlock(8, 8, groups=4)),
        nn.Flatten(),
    )


def test_the_input_is_what_comes_out_of_the_parts_before() -> None:
    model, x = network(), torch.randn(3, 1, 6, 6)
    model.train()
    state = copy.deepcopy(model.state_dict())
    layer, given = layer_input(model, x)
    assert layer is model[2]
    frozen = copy.deepcopy(model).eval()
    with torch.no_grad():
        torch.testing.assert_close(given, frozen[:2](x))
    second, given = layer_input(model, x, "3")
    assert second is model[3]
    with torch.no_grad():
        torch.testing.assert_close(given, frozen[:3](x))
    alone = torch.randn(2, 8, 4, 4)
    assert layer_input(layer, alone) == (layer, alone)
    assert all(m.training for m in (model, model[1]))
    assert not model[2]._forward_pre_hooks
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name


def test_a_branch_is_followed_from_the_input_that_it_sees() -> None:
    torch.manual_seed(0)
    layers = [eq.nn.OptEq(3, 3, in_channels=3, kernel_size=3, form="state") for _ in range(2)]
    model = nn.Sequential(eq.nn.MultiBranch(layers, scales=(8, 4), chain=True)).eval()
    x = torch.randn(2, 3, 8, 8)
    assert layer_input(model, x)[0] is layers[0]
    layer, given = layer_input(model, x, "0.branches.1")
    path = record_path(layer, given, solver=eq.Anderson(rtol=1e-6), steps=40)
    with torch.no_grad(), eq.nn.observe(model) as seen:
        model(x)
    state = seen.solutions["0"][0].value[1]
    torch.testing.assert_close(path.states[-1], state.flatten(1), atol=1e-3, rtol=1e-3)
    with pytest.raises(ValueError, match=r"has: '0\.branches\.0', '0\.branches\.1'"):
        layer_input(model, x, "0")


@pytest.mark.parametrize("std", [1.0, 0.01])
def test_kernels_inside_the_layer_have_the_scale(std: float) -> None:
    model = network()
    made = at_scale(model, std, seed=3)
    kernels = torch.cat([model.flatten() for model in _kernels(made)])
    assert abs(float(kernels.std()) / std - 1) < 0.05
    assert abs(float(kernels.mean())) < 0.1 * std
    assert torch.equal(made[0].weight, model[0].weight)
    assert torch.equal(made[2].block.norm1.weight, model[2].block.norm1.weight)
    again = at_scale(model, std, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(_kernels(made), _kernels(again), strict=True))
    other = at_scale(model, std, seed=4)
    assert not torch.equal(_kernels(made)[0], _kernels(other)[0])


def _kernels(model: nn.Module) -> list[torch.Tensor]:
    layers = [m for m in model.modules() if isinstance(m, eq.nn.ResidualBlock)]
    return [conv.weight.detach() for m in layers for conv in (m.conv1, m.conv2)]


def test_a_bounded_layer_clips_and_says_to_what() -> None:
    torch.manual_seed(0)
    layer = eq.nn.OptEq(32, 32, constraint=eq.nn.NormBounded(bound=0.9)).eval()
    with pytest.warns(UserWarning, match=r"std=1 was asked for.*W\.weight 0\.0"):
        made = at_scale(layer, 1.0, seed=2)
    weight = made.W.weight.detach().double().numpy()  # type: ignore[union-attr, operator]
    # The weight that acts is a draw of N(0, 1), scaled onto the bound: its norm is 0.9 exactly.
    assert np.linalg.norm(weight, 2) == pytest.approx(0.9, rel=1e-3)
    held = clipped_stds(made, 1.0)
    assert held["W.weight"] == pytest.approx(weight.std(), rel=0.05)
    assert held["W.weight"] < 0.1
    # Inside the bound nothing is clipped, and nothing is said.
    small = at_scale(layer, 0.01, seed=2)
    assert clipped_stds(small, 0.01) == {}
    inside = small.W.weight.detach()  # type: ignore[union-attr, operator]
    assert float(inside.std()) == pytest.approx(0.01, rel=0.1)
    ratio = inside.double().numpy() / weight
    np.testing.assert_allclose(ratio, ratio.mean(), rtol=1e-4)


class Affine(nn.Module):
    """z ↦ Az + x, fixed point (I − A)⁻¹x."""

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        self.matrix = nn.Parameter(matrix)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return z @ self.matrix.T + x


def affine(n: int = 5, factor: float = 0.6, seed: int = 0) -> tuple[eq.nn.DEQ, np.ndarray]:
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(n, n, generator=generator, dtype=torch.float64)
    matrix *= factor / torch.linalg.matrix_norm(matrix, 2)
    return eq.nn.DEQ(Affine(matrix)), matrix.numpy()


def inputs(batch: int, n: int = 5, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, n, generator=generator, dtype=torch.float64)


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 99), st.integers(1, 4), st.integers(1, 12))
def test_picard_on_an_affine_map_in_closed_form(seed: int, batch: int, steps: int) -> None:
    layer, a = affine(seed=seed)
    x = inputs(batch, seed=seed)
    path = record_path(layer, x, solver=eq.Picard(), steps=steps)
    for k in range(steps):
        # z_k = Σ_{i<k} Aⁱx and T(z_k) − z_k = Aᵏx.
        z = sum((x.numpy() @ np.linalg.matrix_power(a, i).T for i in range(k)), np.zeros(x.shape))
        residual = x.numpy() @ np.linalg.matrix_power(a, k).T
        value = z + residual
        np.testing.assert_allclose(path.states[k].numpy(), z, rtol=1e-10, atol=1e-12)
        size = np.linalg.norm(residual, axis=1)
        np.testing.assert_allclose(path.residual[k].numpy(), size, rtol=1e-8)
        relative = size / np.linalg.norm(value, axis=1)
        np.testing.assert_allclose(path.relative[k].numpy(), relative, rtol=1e-8)


SOLVERS = [
    eq.Picard(),
    eq.Picard(damping=0.7),
    eq.Anderson(),
    eq.Broyden(),
    eq.Auto(),
    eq.BestIterate(eq.Anderson()),
    eq.Anderson(rtol=0.0, atol=0.0, max_steps=9),
]


@pytest.mark.parametrize("solver", SOLVERS, ids=repr)
def test_iterates_are_those_of_the_plain_solve(solver: eq.Solver) -> None:
    torch.manual_seed(0)
    layer = eq.nn.DEQ(eq.nn.ResidualBlock(8, 8, groups=2)).double()
    x = torch.randn(1, 8, 4, 4, dtype=torch.float64)  # in a batch a finished sample stands still
    seen: list[Tensor] = []
    with torch.no_grad():
        layer.solve(x, solver=solver, callback=lambda k, z, r: seen.append(z.clone()))
    path = record_path(layer, x, solver=solver, steps=max(len(seen), 4))
    assert len(seen) > 5
    for mine, theirs in zip(path.states, seen, strict=False):
        torch.testing.assert_close(mine, theirs.flatten(1), rtol=1e-9, atol=1e-11)


def test_samples_that_stall_are_restarted_as_in_the_plain_solve() -> None:
    torch.manual_seed(0)
    layer = eq.nn.DEQ(eq.nn.ResidualBlock(8, 8, groups=2, std=1.0)).double()
    x = torch.randn(3, 8, 4, 4, dtype=torch.float64)
    seen: list[Tensor] = []
    solver = eq.Anderson(max_steps=60, patience=1000)
    with torch.no_grad(), pytest.warns(eq.ConvergenceWarning):
        layer.solve(x, solver=solver, callback=lambda k, z, r: seen.append(z.clone()))
    path = record_path(layer, x, solver=solver)
    assert path.steps == len(seen) == 60
    assert torch.equal(path.states, torch.stack(seen).flatten(2))
    with torch.no_grad():
        for z, residual, relative in zip(seen, path.residual, path.relative, strict=True):
            value = layer.block(z, x)
            gap = (value - z).flatten(1).norm(dim=1)
            torch.testing.assert_close(residual, gap)
            torch.testing.assert_close(relative, gap / value.flatten(1).norm(dim=1))


def test_steps_to_the_tolerance_are_the_solver_s_own() -> None:
    layer, _ = affine(factor=0.8)
    x = inputs(6)
    solver = eq.Picard(rtol=1e-3, block=1)
    path = record_path(layer, x, solver=solver, steps=80)
    with torch.no_grad():
        steps = layer.solve(x, solver=solver).stats.steps
    assert path.tolerance == 1e-3
    assert path.steps_to().tolist() == steps.tolist()
    short = record_path(layer, x, solver=solver, steps=5)
    assert short.steps_to().tolist() == [0] * 6


@pytest.mark.parametrize("kind", ["GEQ", "OptEq", "MonotoneDEQ", "DeepOptEq"])
def test_every_layer_s_own_solver_ends_at_its_equilibrium(kind: str) -> None:
    torch.manual_seed(0)
    sizes = {"MonotoneDEQ": (4,), "DeepOptEq": (4, [3, 5])}.get(kind, (4, 4))
    layer = getattr(eq.nn, kind)(*sizes, in_channels=3).double().eval()
    x = torch.randn(2, 3, dtype=torch.float64)
    path = record_path(layer, x, steps=200)
    with torch.no_grad():
        answer = layer.solve(x).value
    torch.testing.assert_close(path.states[-1], answer, rtol=1e-6, atol=1e-8)
    assert float(path.relative[-1].max()) < 1e-7


def test_a_tree_of_states_lies_side_by_side() -> None:
    torch.manual_seed(0)
    layer = eq.nn.MDEQ((4, 8), groups=2).eval()
    path = record_path(layer, torch.randn(2, 4, 8, 8), steps=4)
    assert path.states.shape == (4, 2, 4 * 64 + 8 * 16)


def test_a_sample_that_blows_up_harms_no_other() -> None:
    layer, _ = affine(factor=0.5)
    x = inputs(3)
    alone = record_path(layer, x[:1], solver=eq.Picard(), steps=40)
    x[1] = torch.nan
    both = record_path(layer, x, solver=eq.Picard(), steps=40)
    torch.testing.assert_close(both.relative[:, 0], alone.relative[:, 0])
    assert both.steps == 40
    assert not bool(torch.isfinite(both.relative[:, 1]).any())
    assert bool(torch.isfinite(both.mean_curve()).all())
    torch.testing.assert_close(both.mean_curve(), both.relative[:, [0, 2]].mean(1))
    assert bool(torch.isinf(both.quantile_curve(1.0)).all())


def test_an_exact_answer_ends_the_path_at_zero() -> None:
    layer, _ = affine()
    path = record_path(layer, torch.zeros(2, 5, dtype=torch.float64), steps=7)
    assert float(path.relative[-1].max()) == 0.0
    assert path.steps_to().tolist() == [1, 1]


def test_quantiles_by_numpy() -> None:
    generator = torch.Generator().manual_seed(0)
    relative = torch.rand(4, 11, generator=generator)
    path = SolverPath("x", 0.0, relative, relative, None)
    for q in (0.0, 0.1, 0.5, 1.0):
        expected = np.quantile(relative.double().numpy(), q, axis=1, method="nearest")
        np.testing.assert_allclose(path.quantile_curve(q).numpy(), expected)


def test_errors_say_what_to_do() -> None:
    with pytest.raises(ValueError, match="no equilibrium layer"):
        layer_input(nn.Linear(2, 2), torch.zeros(1, 2))
    with pytest.raises(ValueError, match="'2', '3'"):
        layer_input(network(), torch.zeros(1, 1, 4, 4), "layer")
    for std in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="std"):
            at_scale(network(), std)
    with pytest.raises(ValueError, match="no equilibrium layer"):
        at_scale(nn.Linear(2, 2), 1.0)
    layer, _ = affine()
    with pytest.raises(TypeError, match="layer_input"):
        record_path(nn.Linear(2, 2), torch.zeros(1, 2))
    with pytest.raises(TypeError, match="solver"):
        record_path(layer, inputs(1), solver="anderson")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="steps"):
        record_path(layer, inputs(1), steps=0)
    branch = eq.nn.MultiBranch([eq.nn.OptEq(4, 4, in_channels=4, kernel_size=3)], scales=[4])
    with pytest.raises(TypeError, match=r"one of layer\.branches"):
        record_path(branch, torch.zeros(1, 4, 4, 4))
