"""The Triton kernels against the plain form: in Triton's interpreter, and on a GPU if there is one.

The interpreter is chosen when Triton is first imported, so its tests run in a process of their own.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from equilibria.ops.gaussian import (
    gaussian_energies,
    permuted,
    plain_message,
    split_rows,
)
from equilibria.ops.gaussian_patches import can_fuse, fused_message, patch_energies

from . import on_gpu, run_interpreted

# batch, channels, height, width, c_s, p: also rows of 12 and 27, which fill no power of two.
SHAPES = [(2, 16, 4, 6, 8, 2), (3, 6, 4, 4, 3, 2), (1, 32, 8, 8, 4, 4), (2, 6, 6, 3, 3, 3)]
SHAPES += [(2, 64, 4, 4, 32, 2)]

_SCRIPT = """
import json, torch
from equilibria.ops import gaussian_fused, gaussian_triton as kernels
from equilibria.ops import gaussian_patches as patches
from equilibria.ops.gaussian import gaussian_energies, permuted, plain_message, split_rows

patches.can_fuse = lambda *_: True  # the energies run the kernels too

def relative(found, true):
    return float((found.detach().double() - true.detach()).norm() / true.detach().norm())

def inputs(shape, dtype, layout):
    b, c, h, w, group, size = shape
    torch.manual_seed(0)
    k = group * size * size
    a, q, g = (torch.randn(b, c, h, w).to(dtype).to(memory_format=layout) for _ in range(3))
    root = torch.randn(k, 2 * k) / k
    metric, gamma = (root @ root.T).to(dtype), torch.rand(b) + 0.3
    return [t.requires_grad_() for t in (a, q, metric, gamma)], g, (group, size)

rows = []
for shape in json.loads(input()):
    for dtype in (torch.float32, torch.float16):  # the interpreter has no product in bfloat16
        for layout in (torch.channels_last, torch.contiguous_format):
            leaves, g, cut = inputs(shape, dtype, layout)
            a, q, metric, gamma = leaves
            out = gaussian_fused.message(a, q, permuted(metric, *cut), gamma, *cut)
            grads = torch.autograd.grad(out, leaves, g)
            wide = [t.detach().double().requires_grad_() for t in leaves]
            true = plain_message(*wide, *cut)
            exact = torch.autograd.grad(true, wide, g.double())
            errors = [relative(out, true)]
            errors += [relative(x, y) for x, y in zip(grads, exact)]
            # Weights that tell the patches apart would ask for their order: one a sample.
            weight = torch.randn(len(a), 1)
            mine = (patches.patch_energies(q, metric, *cut).sin() * weight).sum()
            s = gaussian_energies(split_rows(wide[1], *cut), wide[2])
            true = (s.sin() * weight.double()).sum()
            grads = torch.autograd.grad(mine, (q, metric))
            exact = torch.autograd.grad(true, wide[1:3])
            errors += [relative(x, y) for x, y in zip(grads, exact)]
            laid = grads[0].is_contiguous(memory_format=layout)
            rows.append({"shape": shape, "dtype": str(dtype), "errors": errors,
                         "layout": laid and out.is_contiguous(memory_format=layout)})
leaves, g, cut = inputs((2, 4, 4, 4, 4, 2), torch.float32, torch.channels_last)
orders = []
forms = (
    lambda a, q, m, y: gaussian_fused.message(a, q, permuted(m, *cut), y, *cut),
    lambda a, q, m, y: plain_message(a, q, m, y, *cut),
)
for form in forms:
    first = torch.autograd.grad(form(*leaves).sin().sum(), leaves, create_graph=True)
    second = torch.autograd.grad(sum(x.square().sum() for x in first), leaves, create_graph=True)
    third = torch.autograd.grad(sum(x.square().sum() for x in second), leaves)
    orders.append([*second, *third])
higher = [relative(x, y.double()) for x, y in zip(*orders)]
same = leaves[0]
twice = gaussian_fused.message(same, same, permuted(leaves[2], *cut), leaves[3], *cut)
far = torch.full_like(same.detach(), 1e20)
dr, _, dgamma = kernels.backward(
    far, torch.zeros_like(far), torch.eye(16), leaves[3].detach(), g, *cut,
    False, True, lambda kernel: kernel,
)
huge = [float(dr.abs().max()), float(dgamma.abs().max())]
far[0, 0, 0, 0] = float("nan")
shown = kernels.forward(
    far, torch.zeros_like(far), torch.eye(16), leaves[3].detach(), *cut, lambda kernel: kernel
)
huge.append(float(shown[0].isnan().any()) + 10.0 * float(shown[1].isnan().any()))
zero = float(twice.abs().max())
orders = []
for form in (patches.patch_energies, lambda c, m, *cut: gaussian_energies(split_rows(c, *cut), m)):
    total = form(leaves[1], leaves[2], *cut).sin().sum()
    first = torch.autograd.grad(total, leaves[1:3], create_graph=True)
    orders.append(torch.autograd.grad(sum(x.square().sum() for x in first), leaves[1:3]))
higher += [relative(x, y.double()) for x, y in zip(*orders)]
sick = leaves[1].detach().clone()
sick[1, 0, 0, 0] = float("nan")
sick.requires_grad_()
energies = patches.patch_energies(sick, leaves[2], *cut)
for got in torch.autograd.grad(energies[0].sum() + 0.0 * energies[1].sum(), (sick, leaves[2])):
    huge.append(float(got.isnan().any()))
failed = []
for name, columns in kernels.PLANS:  # small tiles: one program takes several of them
    kernels.PLANS[name, columns] = (kernels.Plan(16, 4, 2, 1),) * 2
for dtype in (torch.float32, torch.float16):
    leaves, g, cut = inputs((3, 32, 4, 8, 16, 2), dtype, torch.channels_last)
    a, q, metric, gamma = (t.detach() for t in leaves)
    none, keep = torch.zeros((), dtype=dtype).expand_as(q), torch.tensor([0, 2])
    true = plain_message(*(t.double() for t in (none, q, metric, gamma)), *cut)[keep]
    metric, rest = permuted(metric, *cut), (*cut, True, True, kernels.direct)
    sound = kernels.backward(a[keep], q[keep], metric, gamma[keep], g[keep], *rest)
    for t in (a, q, g):
        t[1] = float("nan")
    gamma[1] = -1.0
    out = kernels.forward(none, q, metric, gamma, *cut, kernels.direct)  # of different strides
    dr, dm, dgamma = kernels.backward(a, q, metric, gamma, g, *rest)
    plain, _, _ = kernels.backward(a, q, metric, gamma, g, *cut, False, False, kernels.direct)
    failed.append({
        "zeros": [float(t[1].abs().max()) for t in (out, dr, plain, dgamma)],
        "errors": [relative(out[keep], true), relative(dm, sound[1].double()),
                   relative(dr[keep], sound[0].double()), relative(plain, dr.double())],
    })
print(json.dumps({"failed": failed, "rows": rows, "higher": higher, "of_zero": zero, "huge": huge}))
"""


@pytest.fixture(scope="module")
def interpreted() -> Any:
    return run_interpreted(_SCRIPT, SHAPES)


def test_the_kernels_agree_with_the_plain_form_in_float64(interpreted: Any) -> None:
    assert len(interpreted["rows"]) == 4 * len(SHAPES)
    for row in interpreted["rows"]:
        bound = 2e-6 if row["dtype"] == "torch.float32" else 1e-2
        assert max(row["errors"]) < bound, row
        assert row["layout"], row


def test_second_and_third_derivatives(interpreted: Any) -> None:
    assert max(interpreted["higher"]) < 1e-5
    assert interpreted["of_zero"] == 0.0


def test_columns_are_permuted_as_the_kernel_reads_them() -> None:
    metric = torch.arange(12.0 * 12).view(12, 12)
    moved = permuted(metric, 3, 2)
    for row, column in ((0, 5), (7, 2), (11, 11)):
        # Kernel order (dy, dx, channel) → ours (channel, dy, dx).
        places = [(j % 3) * 4 + j // 3 for j in (row, column)]
        assert moved[row, column] == metric[places[0], places[1]]


def drawn_on_the_gpu(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Three maps and a metric."""
    batch, channels, height, width, group, size = shape
    torch.manual_seed(0)
    k = group * size * size
    maps = torch.randn(3, batch, channels, height, width, device="cuda", dtype=dtype)
    root = torch.randn(k, 2 * k, device="cuda") / k
    laid = [x.contiguous(memory_format=torch.channels_last) for x in maps]
    return laid, (root @ root.T).to(dtype).requires_grad_()


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [*SHAPES, (64, 64, 16, 16, 32, 2)])
def test_on_the_gpu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    group, size = shape[4:]
    (a, c, g), metric = drawn_on_the_gpu(shape, dtype)
    a, c = a.requires_grad_(), c.requires_grad_()
    gamma = (torch.rand(shape[0], device="cuda") + 0.3).requires_grad_()
    assert can_fuse(a, c, metric, group, size)
    leaves = (a, c, metric, gamma)
    out = fused_message(*leaves, group, size)
    grads = torch.autograd.grad(out, leaves, g)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    true = plain_message(*wide, group, size)
    exact = torch.autograd.grad(true, wide, g.double())
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    for found, right in zip((out, *grads), (true, *exact), strict=True):
        off = (found.detach().double() - right.detach()).norm()
        assert float(off / right.detach().norm()) < bound


def _energy_gradients(energies: Any, c: Tensor, metric: Tensor, cut: tuple[int, int]) -> Any:
    """Of a function that sees every patch, but not their order."""
    total = energies(c, metric, *cut).log().square().sum()
    return torch.autograd.grad(total, (c, metric))


def _plain_energies(c: Tensor, metric: Tensor, channels: int, size: int) -> Tensor:
    return gaussian_energies(split_rows(c, channels, size), metric)


@on_gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [*SHAPES, (64, 64, 16, 16, 8, 2)])
def test_energies_on_the_gpu(shape: tuple[int, ...], dtype: torch.dtype, compiled: bool) -> None:
    group, size = shape[4:]
    (c, _, _), metric = drawn_on_the_gpu(shape, dtype)
    c = c.requires_grad_()
    assert can_fuse(c, c, metric, group, size)
    torch._dynamo.reset()  # another shape is another graph, and their number is limited
    form: Any = torch.compile(patch_energies, backend="aot_eager") if compiled else patch_energies
    found = _energy_gradients(form, c, metric, (group, size))
    wide = [t.detach().double().requires_grad_() for t in (c, metric)]
    right = _energy_gradients(_plain_energies, *wide, (group, size))
    for mine, true in zip(found, right, strict=True):
        off = float((mine.double() - true).norm() / true.norm())
        assert off < (1e-5 if dtype == torch.float32 else 2e-2), off


def test_energies_beyond_the_largest_number(interpreted: Any) -> None:
    """As in the plain twin: weight 0 times an energy is 0, not NaN."""
    # The third: a NaN shows in its own sample, and in no other. The last two: where a sample has no
    # gradient its NaN reaches neither dc nor dM.
    assert interpreted["huge"] == [0.0, 0.0, 1.0, 0.0, 0.0]


def test_wide_rows_are_left_to_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    from equilibria.ops import gaussian_patches as patches

    monkeypatch.setattr(patches, "TRITON", True)
    x = torch.empty(2, 32, 4, 4, device="meta").to(memory_format=torch.channels_last)

    class OnGPU:
        """A tensor that says that it lies on a GPU."""

        device = type("Device", (), {"type": "cuda"})()
        dtype, shape = x.dtype, x.shape

        def stride(self, _: int) -> int:
            return 1

        def numel(self) -> int:
            return x.numel()

    assert not patches.can_fuse(torch.randn(2, 8, 4, 4), x, torch.eye(32), 8, 2)  # on a CPU
    given: Any = OnGPU()
    assert patches.can_fuse(given, given, given, 32, 2)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not patches.can_fuse(given, given, given, 32, 2)
    assert patches.can_fuse(given, given, given, 8, 2)


def test_failed_samples_send_and_receive_nothing(interpreted: Any) -> None:
    """Their NaN reaches neither the message nor dr, dM and dγ; a = 0 may be one number expanded."""
    for row, bound in zip(interpreted["failed"], (2e-6, 1e-2), strict=True):
        assert max(row["zeros"]) == 0.0
        assert max(row["errors"]) < bound
