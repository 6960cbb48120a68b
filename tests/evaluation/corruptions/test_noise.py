"""Noise: the distributions that the definitions name."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from equilibria.evaluation.corruptions import distortions as noise
from equilibria.evaluation.corruptions.filters import ImageNoise as Noise


def flat(value: int, size: int = 64) -> tuple[torch.Tensor, Noise]:
    image = torch.full((1, 3, size, size), value, dtype=torch.uint8)
    return image.float() / 255, Noise(image, (0,))


def test_gaussian_and_speckle_scale_with_one_and_with_x() -> None:
    x, draw = flat(102)
    for found, deviation in (
        (noise.gaussian_noise(x, 0.1, draw) - x, 0.1),
        (noise.speckle_noise(x, 0.1, draw) - x, 0.04),
    ):
        values = found.flatten().numpy() / deviation
        assert stats.kstest(values, "norm").pvalue > 1e-4


@pytest.mark.parametrize("value", [0, 1, 100, 255])
@pytest.mark.parametrize("photons", [3, 60, 500])
def test_shot_noise_is_poisson(value: int, photons: int) -> None:
    x, draw = flat(value)
    counts = np.rint(noise.shot_noise(x, photons, draw).flatten().numpy() * photons).astype(int)
    mean = value / 255 * photons
    if value == 0:
        assert not counts.any()
        return
    # Of the whole distribution: distance of the distribution functions at every count.
    top = counts.max() + 2
    seen = np.array([(counts <= k).mean() for k in range(top)])
    expected = stats.poisson.cdf(np.arange(top), mean)
    assert np.abs(seen - expected).max() < 2.0 / np.sqrt(len(counts))


def test_impulse_noise_hits_its_share_with_both_ends() -> None:
    x, draw = flat(102)
    found = noise.impulse_noise(x, 0.2, draw).flatten()
    count = found.numel()
    salt, pepper = int((found == 1).sum()), int((found == 0).sum())
    assert stats.binomtest(salt, count, 0.1).pvalue > 1e-4
    assert stats.binomtest(pepper, count, 0.1).pvalue > 1e-4
    assert torch.equal(found[(found != 0) & (found != 1)].unique(), x.unique())
