"""Rows by unshuffling are the rows of the definition, in another order; merging undoes them."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equilibria.ops.gaussian_planes import can_unshuffle, merge_planes, plane_rows


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_rows_are_patches(groups: int, channels: int, cells: int, size: int) -> None:
    shape = (2, groups * channels, cells * size, 2 * size)
    r = torch.arange(float(torch.Size(shape).numel())).view(shape)
    r = r.to(memory_format=torch.channels_last)
    rows = plane_rows(r, channels, size)
    for a in range(cells):
        for b in range(2):
            for g in range(groups):
                patch = r[
                    :,
                    g * channels : (g + 1) * channels,
                    a * size : (a + 1) * size,
                    b * size : (b + 1) * size,
                ]
                assert torch.equal(rows[:, (a * 2 + b) * groups + g], patch.flatten(1))
    assert torch.equal(merge_planes(rows, shape, size), r)


def test_it_serves_channels_last_maps_on_a_cpu() -> None:
    r = torch.zeros(2, 8, 4, 4)
    assert not can_unshuffle(r)
    assert can_unshuffle(r.to(memory_format=torch.channels_last))
    assert not can_unshuffle(torch.zeros(2, 1, 4, 4))
