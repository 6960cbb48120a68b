"""Filter norms by numpy; planes of a training by SVD."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from equilibria_papers.theory.landscapes import random_directions, training_plane
from equilibria_papers.theory.landscapes.directions import filter_dims


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


def walk(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    start = {"a": torch.randn(3, 4, generator=generator), "b": torch.randn(5, generator=generator)}
    return [
        {n: w + i * 0.3 + torch.randn(w.shape, generator=generator) for n, w in start.items()}
        for i in range(count)
    ]


def test_the_plane_of_a_training_by_svd() -> None:
    states = walk(7)
    plane = training_plane(states)
    flat = np.stack([np.concatenate([s[n].double().numpy().ravel() for n in s]) for s in states])
    moved = flat[:-1] - flat[-1]
    _, values, rows = np.linalg.svd(moved, full_matrices=False)
    found = np.stack(
        [
            np.concatenate([d[n].double().numpy().ravel() for n in states[0]])
            for d in plane.directions
        ]
    )
    np.testing.assert_allclose(found @ found.T, np.eye(2), atol=1e-5)
    for i in range(2):
        np.testing.assert_allclose(abs(found[i] @ rows[i]), 1.0, rtol=1e-5)
        share = values[i] ** 2 / (values**2).sum()
        np.testing.assert_allclose(float(plane.explained[i]), share, rtol=1e-6)
    expected = np.concatenate([moved, np.zeros((1, moved.shape[1]))]) @ found.T
    np.testing.assert_allclose(plane.path.numpy(), expected, atol=1e-4)


def test_models_give_the_same_plane_as_their_weights() -> None:
    models = []
    for i in range(3):
        torch.manual_seed(i)
        models.append(nn.Linear(3, 2))
    one = training_plane(models)
    two = training_plane([dict(m.named_parameters()) for m in models])
    torch.testing.assert_close(one.path, two.path)
    assert float(one.path[-1].abs().max()) == 0.0


def test_errors_of_training_plane() -> None:
    with pytest.raises(ValueError, match="three checkpoints"):
        training_plane(walk(2))
    states = walk(3)
    states[1]["a"] = torch.zeros(2, 2)
    with pytest.raises(ValueError, match="checkpoint 1 has other weights"):
        training_plane(states)
