"""Monotone networks: the pixels that the head reads."""

from __future__ import annotations

import pytest
import torch

from tests.models.small import images, make


@pytest.mark.parametrize("name", ["mondeq_single", "potential_certified_cifar"])
def test_a_head_of_all_pixels_reads_one_size_alone(name: str) -> None:
    model = make(name, image_size=8)
    with pytest.raises(
        ValueError, match=rf"{name} takes .*\[B, 3, 8, 8\], got .* \(1, 3, 16, 16\)"
    ):
        model(torch.randn(1, 3, 16, 16))


def test_logits_read_the_coarsest_tier() -> None:
    model = make("mondeq_multi").eval()
    x = images(model)
    with torch.no_grad():
        z = model.layer(x)
        assert [tuple(t.shape[1:]) for t in z] == [(4, 8, 8), (6, 4, 4)]
        pooled = z[-1].reshape(3, 6, 2, 2, 2, 2).mean((3, 5))
        torch.testing.assert_close(model(x), model.head(pooled.flatten(1)))
