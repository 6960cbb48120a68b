"""Average pooling of whole blocks against torch's own, and the kernels in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from equilibria.ops.pooling import average_pool

from . import on_gpu, run_interpreted
from .test_gaussian_steps import JUDGED

BLOCKS = [(1, 1), (2, 2), (2, 4), (8, 1)]


@pytest.mark.parametrize("block", BLOCKS)
def test_it_is_the_mean_of_blocks(block: tuple[int, int]) -> None:
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    found = average_pool(x, *block)
    for i, j in ((0, 0), (8 // block[0] - 1, 8 // block[1] - 1)):
        corner = x[:, :, i * block[0] :, j * block[1] :]
        right = corner[:, :, : block[0], : block[1]].mean((2, 3))
        torch.testing.assert_close(found[:, :, i, j], right)


def test_blocks_must_divide_the_map() -> None:
    with pytest.raises(ValueError, match="blocks of 3 × 2 do not divide a map of 8 × 8"):
        average_pool(torch.randn(1, 2, 8, 8), 3, 2)


_SCRIPT = """
import json, torch, torch.nn.functional as F
from equilibria.ops import gaussian_steps as steps, gaussian_triton as kernels
from equilibria.ops import pointwise_triton as points, pooling_triton as pools
from equilibria.problems import MeanPatchEnergy

def off(a, b):
    return float((a.double() - b.double()).abs().max())

torch.manual_seed(0)
last_format = {"memory_format": torch.channels_last}
x, z, g, d, y = (torch.randn(3, 20, 8, 12).to(**last_format) for _ in range(5))
up = torch.randn(3, 20, 4, 3).to(**last_format)
found = {
    "pool": off(pools.pool(x, 2, 4), F.avg_pool2d(x, (2, 4))),
    "spread": off(pools.spread(up, 2, 4), F.interpolate(up, scale_factor=(2, 4)) / 8),
    "layout": float(not pools.pool(x, 2, 4).is_contiguous(**last_format)),
    "masked_sum": off(points.masked_sum(z, g, d, y, 0.3), torch.where(z > 0, g + 0.3 * d + y, 0.0)),
}
poisoned = g.clone()
poisoned[z <= 0] = float("nan")
found["masked_nan"] = off(points.masked_sum(z, poisoned, d, y, 0.3).isnan().sum(), torch.zeros(()))
points._BLOCK = 512  # a sample is cut into parts
moved, scale = points.residual_norms(x, z).norm(dim=1).unbind(1)
found["moved"] = off(moved, (x - z).flatten(1).norm(dim=1))
found["scale"] = off(scale, x.flatten(1).norm(dim=1))
alone, scale = points.residual_norms(x, None).norm(dim=1).unbind(1)
found["alone"] = off(alone, x.flatten(1).norm(dim=1)) + off(alone, scale)

# The verdicts, on norms of one part and of the parts that a solve hands over.
cases = json.loads(input())
first, last = (torch.tensor([row[i] for row in cases]).unsqueeze(1) for i in (0, 1))
split = torch.cat([0.6 * first, 0.8 * first, 0.0 * first.nan_to_num()], 1).double()
for name, start in (("whole", first), ("split", split)):
    sick = torch.randn(len(cases), 20, 8, 12).to(**last_format)
    wanted = sick.clone()
    plain = steps.judge(wanted, first, last, 10.0, 5)
    kernel = points.judge(sick, start, last, 10.0, 5)
    found[name] = off(sick, wanted)
    for a, b in zip(kernel, plain):
        assert a.dtype == b.dtype
        found[name] += off(a.float().nan_to_num(7.0), b.float().nan_to_num(7.0))
sick = x.clone(memory_format=torch.preserve_format)
sick[1, 3, 2, 1] = float("nan")
norms = points.residual_norms(sick, z)
failed, _, relative, _, _ = points.judge(sick, norms, norms, 10.0, 1)
assert failed.tolist() == [False, True, False]
found["blank"] = off(sick[1], torch.zeros_like(sick[1])) + off(sick[[0, 2]], x[[0, 2]])
true = (x - z).flatten(1).norm(dim=1) / x.flatten(1).norm(dim=1)
found["relative"] = off(relative[[0, 2]], true[[0, 2]])

# γ of the mean energy: usual, below the floor, NaN, overflow of one and of the sum.
energies = torch.rand(6, 1500)
energies[1] = 1e-14
largest = torch.finfo(torch.float32).max
energies[2, 7], energies[3, 1200], energies[5, 3] = float("nan"), largest, float("inf")
energies[4] = 1e36
policy = MeanPatchEnergy(0.2)
rate, true = points.mean_rate(energies, policy.scale, policy.floor), policy(energies)
assert torch.equal(rate.isnan(), true.isnan()) and true.isnan().tolist() == [False] * 3 + [True] * 3
found["rate"] = off(rate[:3] / true[:3], torch.ones(3))

# No image is an image of zeros.
metric = torch.eye(16)
given = (x, metric, torch.rand(3) + 0.3, 4, 2, lambda kernel: kernel, -0.7)
found["none"] = off(kernels.forward(None, *given), kernels.forward(torch.zeros_like(x), *given))
print(json.dumps(found))
"""


def test_the_kernels_agree_with_torch() -> None:
    found = run_interpreted(_SCRIPT, [(first, last) for first, last, _ in JUDGED])
    assert len(found) == 14
    for name, off in found.items():
        assert off < (1e-4 if name in ("moved", "scale", "alone") else 1e-6), (name, off)


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_the_gpu(dtype: torch.dtype) -> None:
    x = torch.randn(16, 40, 16, 16, device="cuda", dtype=dtype)
    x = x.to(memory_format=torch.channels_last).requires_grad_()
    found = average_pool(x, 4, 2)
    g = torch.randn_like(found).requires_grad_()
    (dx,) = torch.autograd.grad(found, x, g, create_graph=True)
    (again,) = torch.autograd.grad(dx.float().square().sum(), g)
    exact = x.detach().double().requires_grad_()
    right = F.avg_pool2d(exact, (4, 2))
    (right_dx,) = torch.autograd.grad(right, exact, g.detach().double())
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    known = ((found, right), (dx, right_dx), (again, 2 * g.detach().double() / 8))
    for mine, true in known:
        torch.testing.assert_close(mine.double(), true, rtol=tolerance, atol=tolerance)
