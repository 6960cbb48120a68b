"""The message and its derivative without autograd, against autograd in float64; rows of patches."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from equilibria.engine.result import Result
from equilibria.ops.gaussian import plain_message
from equilibria.ops.gaussian_patches import (
    can_unshuffle,
    merge_planes,
    patch_energies,
    plane_rows,
)
from equilibria.ops.gaussian_steps import PatchMessage, judge, residual_norms, threshold_sum

CUT = (3, 2)


def drawn(batch: int = 3) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    a, c, g = (torch.randn(batch, 6, 4, 8, dtype=torch.float64) for _ in range(3))
    root = torch.randn(12, 20, dtype=torch.float64) / 4
    return a, c, g, root @ root.T, torch.rand(batch, dtype=torch.float64) + 0.1


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("scale", [1.0, -0.7])
def test_message_and_pullback(layout: torch.memory_format, scale: float) -> None:
    a, c, g, metric, gamma = drawn()
    a, c, g = (t.to(memory_format=layout) for t in (a, c, g))
    kernel = PatchMessage(c, metric, gamma, CUT)
    leaves = [t.clone().requires_grad_() for t in (a, metric, gamma)]
    right = scale * plain_message(leaves[0], c, leaves[1], leaves[2], *CUT)
    found = kernel.message(a, scale)
    torch.testing.assert_close(found, right.detach())
    assert found.is_contiguous(memory_format=layout)
    grads = torch.autograd.grad(right, leaves, g)
    pulled = kernel.pull(a, g, scale, with_metric=True, with_gamma=True)
    for mine, true in zip(pulled, grads, strict=True):
        assert mine is not None
        torch.testing.assert_close(mine, true)
    alone = kernel.pull(a, g, scale, with_metric=False, with_gamma=False)
    assert alone[1] is alone[2] is None
    torch.testing.assert_close(alone[0], grads[0])


def test_no_image_is_an_image_of_zeros() -> None:
    a, c, _, metric, gamma = drawn()
    kernel = PatchMessage(c, metric, gamma, CUT)
    torch.testing.assert_close(kernel.message(None, 0.5), kernel.message(torch.zeros_like(a), 0.5))


def test_failed_samples_send_and_receive_nothing() -> None:
    a, c, g, metric, gamma = drawn()
    sound = PatchMessage(c[[0, 2]], metric, gamma[[0, 2]], CUT)
    right = sound.pull(a[[0, 2]], g[[0, 2]], 1.0, with_metric=True, with_gamma=True)
    for t in (a, c, gamma):
        t[1] = float("nan")
    g[1] = 0.0
    failed = torch.tensor([False, True, False])
    kernel = PatchMessage(c, metric, gamma, CUT, failed)
    assert float(kernel.message(a, 1.0)[1].abs().max()) == 0.0
    dr, dm, dgamma = kernel.pull(a, g, 1.0, with_metric=True, with_gamma=True)
    assert dgamma is not None
    assert float(dr[1].abs().max()) == float(dgamma[1].abs()) == 0.0
    torch.testing.assert_close(dm, right[1])


def test_energies_are_those_of_the_rows() -> None:
    _, c, _, metric, _ = drawn()
    found = patch_energies(c, metric, *CUT)
    first = c[1, 0:3, 0:2, 0:2].flatten()
    torch.testing.assert_close(found[1, 0], first @ metric @ first)
    assert found.shape == (3, 16)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("with_metric", [True, False])
def test_energies_have_gradients_to_any_order(
    layout: torch.memory_format, with_metric: bool
) -> None:
    _, c, _, metric, _ = drawn(2)
    c = c[:, :, :2, :4].contiguous(memory_format=layout).requires_grad_()
    leaves = (c, metric.clone().requires_grad_()) if with_metric else (c,)

    def energies(c: Tensor, metric: Tensor | None = None) -> Tensor:
        return patch_energies(c, metric, *CUT)

    assert torch.autograd.gradcheck(energies, leaves)
    assert torch.autograd.gradgradcheck(energies, leaves)
    (dc,) = torch.autograd.grad(energies(*leaves).sum(), c)
    assert dc.is_contiguous(memory_format=layout)
    # Under torch.func by the plain form.
    pulled = torch.func.grad(lambda c: energies(c, *leaves[1:]).sum())(c)
    torch.testing.assert_close(pulled, dc)


def test_energies_keep_only_their_inputs() -> None:
    """For the backward pass: no rows, and no product with M."""
    _, c, _, metric, _ = drawn()
    kept: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        patch_energies(c.requires_grad_(), metric, *CUT)
    assert {t.data_ptr() for t in kept} == {c.data_ptr(), metric.data_ptr()}


def test_the_small_passes() -> None:
    z, g, d = drawn()[:3]
    y = torch.randn_like(z)
    found = threshold_sum(z, g, d, y, 0.3)
    right = torch.where(z > 0, g + 0.3 * d + y, torch.zeros_like(z))
    torch.testing.assert_close(found, right)
    moved, scale = residual_norms(z, g)[:, 0].unbind(1)
    torch.testing.assert_close(moved, (z - g).flatten(1).norm(dim=1))
    torch.testing.assert_close(scale, z.flatten(1).norm(dim=1))
    assert torch.equal(*residual_norms(z, None)[:, 0].unbind(1))


# Residual and ‖f‖ of the first and of the last step, and how a solve with them ends at a limit of
# 10 times the first: at the limit, above it, not a number, infinite, both at once, nothing moved.
JUDGED: list[tuple[tuple[float, float], tuple[float, float], str]] = [
    ((1.0, 1.0), (20.0, 4.0), "fixed_steps"),
    ((1.0, 1.0), (20.1, 4.0), "diverged"),
    ((1.0, 1.0), (math.nan, 4.0), "nonfinite"),
    ((1.0, 1.0), (0.5, math.inf), "nonfinite"),
    ((math.nan, 1.0), (math.inf, math.nan), "nonfinite"),
    ((math.nan, 1.0), (0.5, 1.0), "nonfinite"),
    ((0.0, 0.0), (0.0, 0.0), "fixed_steps"),
]


def test_a_verdict_on_every_sample() -> None:
    first, last = (torch.tensor([row[i] for row in JUDGED]).unsqueeze(1) for i in (0, 1))
    z = torch.randn(len(JUDGED), 3, 2, 2)
    given = z.clone()
    found_failed, residual, relative, code, steps = judge(z, first, last, 10.0, 5)
    codes = torch.tensor([int(Result[name]) for *_, name in JUDGED], dtype=torch.int8)
    assert torch.equal(code, codes)
    assert code.dtype == torch.int8
    failed = codes != int(Result.fixed_steps)
    assert torch.equal(found_failed, failed)
    assert float(z[failed].abs().max()) == 0.0
    assert torch.equal(z[~failed], given[~failed])
    torch.testing.assert_close(residual, last[:, 0, 0], rtol=0.0, atol=0.0, equal_nan=True)
    assert relative[[0, -1]].tolist() == [5.0, 0.0]
    assert steps.tolist() == [5] * len(JUDGED)
    assert steps.dtype == torch.int32


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
                patch = r[:, g * channels :, a * size :, b * size :][:, :channels, :size, :size]
                assert torch.equal(rows[:, (a * 2 + b) * groups + g], patch.flatten(1))
    assert torch.equal(merge_planes(rows, shape, size), r)


def test_it_serves_channels_last_maps_on_a_cpu() -> None:
    r = torch.zeros(2, 8, 4, 4)
    assert not can_unshuffle(r)
    assert can_unshuffle(r.to(memory_format=torch.channels_last))
    assert not can_unshuffle(torch.zeros(2, 1, 4, 4))
