"""The landscape of a linear model is a quadratic known in closed form; files go on where they
stopped; what diverges is recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import equilibria as eq
from equilibria_papers.theory.landscapes import (
    Grid,
    LandscapeFileError,
    Surface,
    measure_landscape,
    random_directions,
    repeated,
    squared_error,
)
from equilibria_papers.theory.landscapes.measuring import filter_dims, with_solver


def linear(seed: int = 0) -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(seed)
    model = nn.Linear(4, 3).double()
    return model, torch.randn(23, 4).double(), torch.randn(23, 3).double()


@settings(deadline=None, max_examples=10)
@given(st.integers(0, 99), st.sampled_from([3, 5, 7]), st.floats(0.1, 3.0), st.integers(1, 30))
def test_a_linear_model_with_squared_loss_is_a_quadratic(
    seed: int, points: int, radius: float, batch: int
) -> None:
    model, x, y = linear(seed)
    first, second = random_directions(model, 2, seed=seed)
    grid = Grid(points=points, radius=radius)
    found = measure_landscape(
        model, (x, y), (first, second), grid=grid, loss=squared_error, batch_size=batch
    )
    inputs, targets = x.numpy(), y.numpy()
    rest = inputs @ model.weight.detach().numpy().T + model.bias.detach().numpy() - targets
    u, v = (inputs @ d["weight"].numpy().T for d in (first, second))
    axis = np.linspace(-radius, radius, points)
    np.testing.assert_allclose(found.a.numpy(), axis, atol=1e-12)
    for i, a in enumerate(axis):
        for j, b in enumerate(axis):
            q = ((rest + a * u + b * v) ** 2).sum()
            np.testing.assert_allclose(float(found.loss[i, j]), 0.5 * q / 23, rtol=1e-9)
    assert bool(torch.isnan(found.values["accuracy"]).all())


def digits(count: int = 32) -> tuple[Tensor, Tensor]:
    part = eq.data.load("digits", "train").subset(range(count))
    return part.normalize(part.images), part.targets


def deq(std: float = 0.01, **options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        eq.nn.DEQ(eq.nn.ResidualBlock(8, 8, groups=4, std=std), **options),
        nn.Flatten(),
        nn.Linear(8 * 64, 10),
    )


def test_the_center_is_the_model_and_the_model_stays() -> None:
    model, (x, y) = deq(), digits()
    model.train()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    found = measure_landscape(model, (x, y), grid=Grid(points=3), batch_size=10)
    assert model.training
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    model.eval()
    with torch.no_grad():
        logits = model(x)
    torch.testing.assert_close(
        found.center_loss(), float(nn.functional.cross_entropy(logits, y)), rtol=1e-5, atol=0
    )
    assert float(found.values["accuracy"][1, 1]) == float((logits.argmax(1) == y).double().mean())
    assert found.summary()["converged"] == 1.0


def test_a_dataset_is_normalized_as_it_says() -> None:
    model = deq().eval()
    part = eq.data.load("digits", "train").subset(range(16))
    grid = Grid(points=3)
    one = measure_landscape(model, part, grid=grid)
    two = measure_landscape(model, (part.normalize(part.images), part.targets), grid=grid)
    torch.testing.assert_close(one.loss, two.loss)


def test_rows_are_kept_and_a_second_call_goes_on(tmp_path: Path) -> None:
    model, data = deq(), digits()
    grid, file = Grid(points=5), tmp_path / "grid.safetensors"
    whole = measure_landscape(model, data, grid=grid)

    def stop(surface: Surface) -> None:
        if int(surface.done.sum()) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_landscape(model, data, grid=grid, file=file, on_row=stop)
    half = Surface.load(file)
    assert half.done.tolist() == [True, True, False, False, False]
    assert not half.complete
    assert int(torch.isnan(half.loss).sum()) == 15
    assert not bool(half.holes.any())
    torch.testing.assert_close(half.loss[:2], whole.loss[:2])
    rows: list[int] = []
    again = measure_landscape(
        model, data, grid=grid, file=file, on_row=lambda s: rows.append(int(s.done.sum()))
    )
    assert rows == [3, 4, 5]
    for channel, values in whole.values.items():
        assert torch.equal(again.values[channel], values), channel
    kept = Surface.load(file)
    assert kept.complete
    assert torch.equal(kept.loss, whole.loss)
    assert [p.name for p in tmp_path.iterdir()] == ["grid.safetensors"]


def test_a_file_of_another_landscape_is_refused(tmp_path: Path) -> None:
    model, data = deq(), digits(8)
    grid, file = Grid(points=3), tmp_path / "grid.safetensors"
    measure_landscape(model, data, grid=grid, file=file)
    other = deq()
    with torch.no_grad():
        other[4].bias[0] += 1e-3
    changed: list[tuple[str, dict[str, Any]]] = [
        ("weights", {"model": other}),
        ("data", {"data": (data[0], data[1].flip(0))}),
        ("directions", {"seed": 1}),
        ("radius", {"grid": Grid(points=3, radius=2.0)}),
        ("network", {"solver": eq.Picard(max_steps=7)}),
        ("network", {"model": deq(solver=eq.Anderson(memory=3))}),
        ("loss", {"loss": lambda out, y: out.square().mean(1)}),
    ]
    for key, change in changed:
        given = {"model": model, "data": data, "grid": grid, "file": file, **change}
        with pytest.raises(LandscapeFileError, match=rf"another landscape.*{key} \("):
            measure_landscape(given.pop("model"), given.pop("data"), **given)
    replaced = measure_landscape(other, data, grid=grid, file=file, overwrite=True)
    assert torch.equal(Surface.load(file).loss, replaced.loss)


def test_losses_that_are_not_finite_are_holes(tmp_path: Path) -> None:
    model, x, y = linear()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        found = squared_error(outputs, targets)
        limit = 0.5 * float(found.mean())
        return torch.where(found > 3 * limit, torch.inf, found)

    found = measure_landscape(model, (x, y), grid=Grid(points=3, radius=5.0), loss=loss)
    assert bool(found.holes.any())
    assert bool(torch.isnan(found.loss[found.holes]).all())
    found.save(tmp_path / "grid.safetensors")
    again = Surface.load(tmp_path / "grid.safetensors")
    assert torch.equal(again.holes, found.holes)
    assert found.summary()["holes"] == int(found.holes.sum())


class Growing(nn.Module):
    """z ↦ wz + x: diverges where w > 1."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([[0.5]]))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return z * self.w + x


def test_the_share_of_solves_that_blew_up_is_recorded() -> None:
    model = nn.Sequential(eq.nn.DEQ(Growing(), solver=eq.Picard(max_steps=200)), nn.Flatten())
    x = torch.rand(6, 2) + 0.5
    step = {"0.block.w": torch.tensor([[1.0]])}
    found = measure_landscape(
        model, (x, torch.zeros(6, 2)), [step, {}], grid=Grid(points=5), loss=squared_error
    )
    # w = −0.5, 0, 0.5, 1, 1.5
    assert found.values["converged"][:3, 0].tolist() == [1.0, 1.0, 1.0]
    assert found.values["converged"][4, 0] == 0.0
    assert found.values["failed"][:, 0].tolist() == [0.0, 0.0, 0.0, 0.0, 1.0]
    exact = 0.5 * (x / 1.5).square().sum(1).mean()
    torch.testing.assert_close(float(found.loss[0, 0]), float(exact), rtol=1e-3, atol=0)
    assert found.values["steps"][1, 0] < found.values["steps"][2, 0]


@pytest.mark.parametrize("repeats", [1, 6, 11])
def test_repeat_k_is_the_weight_tied_network(repeats: int) -> None:
    model, (x, y) = deq(std=0.1), digits(8)
    twin = repeated(model, repeats)
    explicit = deq(std=0.1).eval()
    explicit[2] = explicit[2].repeated(repeats)
    with torch.no_grad():
        torch.testing.assert_close(twin(x), explicit(x), rtol=1e-5, atol=1e-6)
    found = measure_landscape(twin, (x, y), grid=Grid(points=3))
    assert "converged" not in found.summary()
    assert found.summary()["steps"] == repeats
    assert isinstance(model[2].solver, eq.Anderson)


def test_branches_of_fixed_steps_have_no_share_that_converged() -> None:
    torch.manual_seed(0)
    fixed, patch = eq.Picard(rtol=0.0, atol=0.0, max_steps=2), eq.Patches(channels=2, size=1)
    branches = [eq.nn.GEQ(1, 2, patch=patch, hidden=None, solver=fixed) for _ in range(2)]
    many = eq.nn.MultiBranch(branches, (8, 4))
    model = nn.Sequential(many, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1, 10))
    found = measure_landscape(model.eval(), digits(4), grid=Grid(points=3)).summary()
    assert found["steps"] == 2
    assert "converged" not in found


def test_a_splitting_is_kept_with_the_tolerance_asked_for() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(eq.nn.MonotoneDEQ(4, in_channels=3), nn.Linear(4, 2))
    made = with_solver(model, eq.Anderson(rtol=1e-2, max_steps=17))
    found: Any = made[0].solver
    assert type(found) is type(model[0].solver)
    assert (found.rtol, found.max_steps) == (1e-2, 17)
    assert found.iteration.rtol == 1e-2
    assert isinstance(repeated(model, 3)[0].solver, eq.Picard)  # type: ignore[index]


def test_small_loss_share_of_a_known_bowl() -> None:
    axis = torch.linspace(-1, 1, 5, dtype=torch.float64)
    bowl = 4 * (axis.unsqueeze(1) ** 2 + axis**2)
    done = torch.ones(5, dtype=torch.bool)
    surface = Surface("bowl", axis, axis, {"loss": bowl, "accuracy": bowl}, done)
    # Within 1 of the center: a² + b² ≤ ¼, which is the center and its four neighbors.
    assert surface.small_loss_share() == 5 / 25
    assert surface.small_loss_share(2.0) == 9 / 25


def test_errors_say_what_to_do(tmp_path: Path) -> None:
    for options in ({"points": 4}, {"points": 1}, {"radius": 0.0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            Grid(**options)  # type: ignore[arg-type]
    model, x, y = linear()
    grid = Grid(points=3)
    with pytest.raises(TypeError, match="ImageData"):
        measure_landscape(model, x, grid=grid)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="23 inputs and 3 targets"):
        measure_landscape(model, (x, y[:3]), grid=grid)
    with pytest.raises(ValueError, match="one number per sample"):
        measure_landscape(model, (x, y), grid=grid, loss=nn.functional.mse_loss)
    with pytest.raises(ValueError, match="1 direction"):
        measure_landscape(model, (x, y), random_directions(model, 1), grid=grid)
    with pytest.raises(ValueError, match="does not have"):
        measure_landscape(model, (x, y), [{"v": x}, {"v": x}], grid=grid)
    with pytest.raises(ValueError, match="shape"):
        measure_landscape(model, (x, y), [{"weight": x}, {"weight": x}], grid=grid)
    with pytest.raises(ValueError, match="batch_size"):
        measure_landscape(model, (x, y), grid=grid, batch_size=0)
    with pytest.raises(TypeError, match="solver"):
        measure_landscape(model, (x, y), grid=grid, solver="anderson")  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError, match="no folder"):
        measure_landscape(model, (x, y), grid=grid, file=tmp_path / "none" / "a")
    with pytest.raises(ValueError, match="no equilibrium layer"):
        repeated(model, 6)
    with pytest.raises(ValueError, match="repeats"):
        repeated(deq(), 0)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 6, 3),
        nn.BatchNorm2d(6),
        nn.ConvTranspose2d(6, 4, 3),
        nn.GroupNorm(2, 4),
        nn.Flatten(),
        nn.Linear(4 * 16, 5),
    )


def test_every_filter_has_the_norm_of_the_weights_filter() -> None:
    model = network()
    weights = {n: p.detach().double().numpy() for n, p in model.named_parameters()}
    for direction in random_directions(model, 2, seed=1):
        # Biases and the gains of norms do not move.
        assert set(direction) == {"0.weight", "2.weight", "5.weight"}
        for name, step in direction.items():
            d, w = step.double().numpy(), weights[name]
            filters = d.shape[1] if name == "2.weight" else d.shape[0]
            for i in range(filters):
                mine, theirs = (a[:, i] if name == "2.weight" else a[i] for a in (d, w))
                size = np.sqrt((theirs**2).sum())
                np.testing.assert_allclose(np.sqrt((mine**2).sum()), size, rtol=1e-6)


def test_seeds() -> None:
    model = network()
    first, second = random_directions(model, 2, seed=3)
    again = random_directions(model, 1, seed=3)[0]
    assert all(torch.equal(first[n], again[n]) for n in first)
    assert not torch.equal(first["5.weight"], second["5.weight"])


def test_a_filter_of_zeros_stays() -> None:
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight[0] = 0.0
    (d,) = random_directions(model, 1)
    assert d["weight"][0].tolist() == [0.0, 0.0, 0.0]
    assert bool(torch.isfinite(d["weight"]).all())


def test_frozen_and_missing_parameters() -> None:
    model = network()
    model[0].weight.requires_grad_(False)
    assert set(filter_dims(model)) == {"2.weight", "5.weight"}
    with pytest.raises(ValueError, match="no parameter"):
        random_directions(nn.BatchNorm1d(3))
    with pytest.raises(ValueError, match="count"):
        random_directions(model, 0)
