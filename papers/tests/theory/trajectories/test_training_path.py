"""States through training: class means, shares between classes."""

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
    TrainingPath,
    follow_training,
    principal_components,
    residual_figure,
)

# Principal components against numpy's SVD.


@settings(deadline=None, max_examples=30)
@given(st.integers(3, 30), st.integers(2, 40), st.integers(0, 99), st.integers(1, 4))
def test_components_are_those_of_the_svd(points: int, dims: int, seed: int, count: int) -> None:
    cloud = np.random.default_rng(seed).normal(size=(points, dims)) * np.linspace(1, 3, dims)
    found = principal_components(torch.from_numpy(cloud), count)
    centered = cloud - cloud.mean(0)
    _, values, rows = np.linalg.svd(centered, full_matrices=False)
    rank = min(points - 1, dims)
    assert found.components.shape == (count, dims)
    for i in range(min(count, rank)):
        row = found.components[i].numpy()
        assert row[np.abs(row).argmax()] > 0
        np.testing.assert_allclose(abs(row @ rows[i]), 1.0, rtol=1e-7)
        share = values[i] ** 2 / (values**2).sum()
        np.testing.assert_allclose(float(found.explained[i]), share, rtol=1e-8)
        np.testing.assert_allclose(
            found.project(torch.from_numpy(cloud))[:, i].numpy(), centered @ row, atol=1e-9
        )
    assert not bool(found.components[rank:].any())


def test_neither_order_nor_precision_matters() -> None:
    generator = torch.Generator().manual_seed(0)
    for shape in ((50, 7), (3, 4, 25)):
        cloud = torch.randn(shape, generator=generator) * torch.arange(1.0, shape[-1] + 1)
        first = principal_components(cloud)
        again = principal_components(cloud.flip(0).double())
        torch.testing.assert_close(first.components, again.components, rtol=1e-5, atol=1e-6)
        projected = again.project(cloud)
        assert projected.shape == (*shape[:-1], 2)
        torch.testing.assert_close(first.project(cloud), projected, rtol=1e-4, atol=1e-4)


def test_points_that_are_not_finite_are_left_out_and_equal_ones_have_no_components() -> None:
    cloud = torch.tensor([[0.0, 0.0], [2.0, 0.0], [torch.nan, 1.0], [torch.inf, 0.0]])
    found = principal_components(cloud)
    torch.testing.assert_close(found.mean, torch.tensor([1.0, 0.0], dtype=torch.float64))
    torch.testing.assert_close(found.explained, torch.tensor([1.0, 0.0], dtype=torch.float64))
    found = principal_components(torch.ones(5, 3))
    assert not bool(found.components.any())
    assert found.explained.tolist() == [0.0, 0.0]


def test_what_cannot_be() -> None:
    for points, count, match in (
        (torch.ones(3), 2, r"\[..., n\]"),
        (torch.ones(3, 2, dtype=torch.long), 2, "floating"),
        (torch.full((3, 2), torch.nan), 2, "two finite points"),
        (torch.ones(3, 2), 0, "count"),
    ):
        with pytest.raises(ValueError, match=match):
            principal_components(points, count)


def made(states: Tensor, labels: Tensor) -> TrainingPath:
    """A training whose z* are these [E, B, n]."""
    flat = torch.zeros(1, states.shape[1])
    paths = tuple(SolverPath("x", 0.0, flat, flat, z.unsqueeze(0)) for z in states)
    return TrainingPath(tuple(str(i) for i in range(len(states))), labels, paths)


def test_class_means_and_spread_by_numpy() -> None:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(3, 20, 4, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 3, (20,), generator=generator) * 2
    training = made(states, labels)
    assert training.classes == [0, 2, 4]
    means = training.class_means(training.equilibria).numpy()
    z, y = states.numpy(), labels.numpy()
    for e in range(3):
        between = 0.0
        for i, label in enumerate((0, 2, 4)):
            mean = z[e, y == label].mean(0)
            np.testing.assert_allclose(means[e, i], mean)
            between += (y == label).sum() * ((mean - z[e].mean(0)) ** 2).sum()
        whole = ((z[e] - z[e].mean(0)) ** 2).sum()
        np.testing.assert_allclose(float(training.spread()[e]), between / whole)


def test_points_that_are_not_finite_do_not_count_in_a_mean() -> None:
    states = torch.tensor([[[1.0], [torch.nan], [5.0]]])
    training = made(states, torch.tensor([0, 0, 1]))
    assert training.class_means(training.equilibria).flatten().tolist() == [1.0, 5.0]


def tiny() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        eq.nn.DEQ(eq.nn.ResidualBlock(4, 4, groups=2)),
        nn.Flatten(),
        nn.Linear(4 * 16, 2),
    )


def test_checkpoints_are_followed_one_by_one() -> None:
    models = [tiny(), copy.deepcopy(tiny())]
    with torch.no_grad():
        models[1][0].weight.mul_(2.0)
    x, labels = torch.randn(6, 1, 4, 4), torch.arange(6) % 2
    found = follow_training((m for m in models), x, labels, moments=["start", "end"], steps=60)
    assert found.moments == ("start", "end")
    for model, z in zip(models, found.equilibria, strict=True):
        with torch.no_grad():
            answer = model[1](model[0](x)).flatten(1)
        torch.testing.assert_close(z, answer, rtol=1e-2, atol=1e-2)


def test_errors_of_follow_training() -> None:
    x, labels = torch.randn(2, 1, 4, 4), torch.zeros(2, dtype=torch.long)
    with pytest.raises(ValueError, match="labels"):
        follow_training([tiny()], x, labels[:1])
    with pytest.raises(ValueError, match="one checkpoint"):
        follow_training([], x, labels)
    with pytest.raises(ValueError, match="2 moments"):
        follow_training([tiny()], x, labels, moments=["a", "b"], steps=2)


def path(seed: int = 0, steps: int = 6, batch: int = 5) -> SolverPath:
    generator = torch.Generator().manual_seed(seed)
    relative = 0.5 ** torch.arange(1.0, steps + 1).unsqueeze(1) * torch.rand(
        steps, batch, generator=generator
    )
    states = torch.randn(steps, batch, 7, generator=generator)
    return SolverPath("Anderson", 1e-3, relative, relative, states)


def test_residual_curves_are_the_means() -> None:
    first, second = path(0), path(1)
    figure = residual_figure({"a": {"one": first, "two": second}, "b": {"one": second}})
    axes = figure.axes
    assert [a.get_title() for a in axes] == ["a", "b"]
    lines = {line.get_label(): line for line in axes[0].get_lines()}
    np.testing.assert_allclose(lines["two"].get_ydata(), second.relative.double().mean(1))
    assert set(lines["tolerance"].get_ydata()) == {1e-3}
    assert axes[0].get_yscale() == "log"


def test_what_cannot_be_drawn() -> None:
    with pytest.raises(ValueError, match="no path"):
        residual_figure({})
