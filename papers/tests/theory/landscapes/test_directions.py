"""Filter norms by numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from equilibria_papers.theory.landscapes import random_directions
from equilibria_papers.theory.landscapes.measuring import filter_dims


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
