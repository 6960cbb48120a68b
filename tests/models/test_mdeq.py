"""MDEQ networks: layout, padding, head."""

from __future__ import annotations

import pytest
import torch

from tests.models.small import make


def test_padding_repeats_the_edge_and_is_cut_off_again() -> None:
    model = make("mdeq_seg").eval()
    assert model.multiple == 8
    x = torch.randn(1, 3, 13, 16)
    below = x[:, :, -1:].expand(-1, -1, 3, -1)
    with torch.no_grad():
        whole = model(torch.cat([x, below], 2))
        torch.testing.assert_close(model(x), whole[:, :, :13])


def test_overrides_reach_the_layer() -> None:
    model = make("mdeq_cifar", dropout=0.1, jacobian_weight=0.25, groups=4)
    assert model.layer.dropout == 0.1
    assert model.layer.jacobian_weight == 0.25
    with pytest.raises(ValueError, match=r"mdeq_cifar: .*groups"):
        make("mdeq_cifar", groups=5)
