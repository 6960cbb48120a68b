"""The Gaussian patch message in one pass over memory, forward and backward, in Triton.

    r = a − c cut into rows rᵢ,  v = rᵢM,  s = ⟨rᵢ, v⟩,  e = exp(−γs),  out = e·v

Forward reads a and c and writes out; backward reads a, c and the incoming gradient g and writes

    dr = e·(gM − 2γ⟨g, v⟩v),   dM = Σᵢ rᵢᵀ(e·g − γe⟨g, v⟩rᵢ),   dγ = −Σᵢ se⟨g, v⟩

The energies s of c alone, of which γ is made, have kernels of their own: for gradients gᵢ of sᵢ

    dc = 2gᵢ·cᵢM,   dM = Σᵢ gᵢ·cᵢᵀcᵢ

A row is c_s channels of p × p pixels, read where it lies: no tensor of rows is made. Columns are
taken in the order (dy, dx, channel), in which a channels-last row is runs of c_s numbers; M is
permuted to it by the caller. The plain twin, and the oracle, is ``ops/gaussian.py``.

Both are linear in something that callers scale: forward writes scale·out, backward takes scale·g
for g. A sample with γ < 0 is read as if a = c (its message is 0): so samples that failed, whose
numbers may be NaN, are kept out at no cost.
"""

# A kernel is Triton's language, not Python: its parameters are pointers and tiles without types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from equilibria.engine.transforms import products_take_tf32

__all__ = ["backward", "direct", "energies", "energies_backward", "forward"]

_WAVES = 4  # programs a multiprocessor: each loops over its share of the rows
_TILE = 4096  # numbers a tile
_WARPS = 4


@triton.jit
def _offsets(
    rows, columns, groups, across, down, sb, sc, sh, sw, CS: tl.constexpr, P: tl.constexpr
):
    """Where ``rows`` lie: row → (sample, y, x, group), column → (dy, dx, channel)."""
    group = rows % groups
    x = (rows // groups) % across
    y = (rows // (groups * across)) % down
    sample = rows // (groups * across * down)
    start = sample * sb + (y * P) * sh + (x * P) * sw + (group * CS) * sc
    dy = columns // (P * CS)
    dx = (columns // CS) % P
    channel = columns % CS
    inside = dy * sh + dx * sw + channel * sc
    return start[:, None] + inside[None, :], sample


@triton.jit
def _energy(r, v):
    """⟨r, v⟩ of each row: not negative by rounding, and not infinite, as in the plain twin.

    By comparisons: Triton's maximum and minimum would hide a NaN, which must show.
    """
    s = tl.sum(r.to(tl.float32) * v, 1)
    s = tl.where(s < 0.0, 0.0, s)
    return tl.where(s > 3.0e38, 3.0e38, s)


@triton.jit
def _weight(rate, s):
    """exp(−γs), cut where it is 0 anyway."""
    t = rate * s
    return tl.exp(-tl.where(t > 110.0, 110.0, t))


@triton.jit
def _forward_kernel(
    a, c, metric, gamma, out, scale,
    count, groups, across, down,
    asb, asc, ash, asw, csb, csc, csh, csw, osb, osc, osh, osw,
    CS: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, PRECISION: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, COLUMNS)
    live = columns < WIDTH
    square = columns[:, None] * WIDTH + columns[None, :]
    m = tl.load(metric + square, mask=live[:, None] & live[None, :], other=0.0)
    for block in range(tl.program_id(0), tl.cdiv(count, ROWS), tl.num_programs(0)):
        rows = block * ROWS + tl.arange(0, ROWS)
        mask = (rows < count)[:, None] & live[None, :]
        at, sample = _offsets(rows, columns, groups, across, down, asb, asc, ash, asw, CS, P)
        ct, _ = _offsets(rows, columns, groups, across, down, csb, csc, csh, csw, CS, P)
        left = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        if GIVEN:
            left = tl.load(a + at, mask=mask, other=0.0).to(tl.float32)
        right = tl.load(c + ct, mask=mask, other=0.0).to(tl.float32)
        rate = tl.load(gamma + sample, mask=rows < count, other=0.0)
        # Chosen after the loads, which then wait for nothing. A NaN is not a failure: it must show.
        r = tl.where((rate < 0.0)[:, None], 0.0, left - right).to(m.dtype)
        v = tl.dot(r, m, input_precision=PRECISION)
        s = _energy(r, v)
        e = scale * _weight(rate, s)
        ot, _ = _offsets(rows, columns, groups, across, down, osb, osc, osh, osw, CS, P)
        tl.store(out + ot, (e[:, None] * v).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _energy_kernel(
    c, metric, out,
    count, groups, across, down, csb, csc, csh, csw,
    CS: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, COLUMNS)
    live = columns < WIDTH
    square = columns[:, None] * WIDTH + columns[None, :]
    m = tl.load(metric + square, mask=live[:, None] & live[None, :], other=0.0)
    for block in range(tl.program_id(0), tl.cdiv(count, ROWS), tl.num_programs(0)):
        rows = block * ROWS + tl.arange(0, ROWS)
        mask = (rows < count)[:, None] & live[None, :]
        at, _ = _offsets(rows, columns, groups, across, down, csb, csc, csh, csw, CS, P)
        r = tl.load(c + at, mask=mask, other=0.0).to(m.dtype)
        v = tl.dot(r, m, input_precision=PRECISION)
        s = _energy(r, v)
        tl.store(out + rows, s, mask=rows < count)


@triton.jit
def _energy_backward_kernel(
    c, metric, g, dc, partial,
    count, groups, across, down, csb, csc, csh, csw, osb, osc, osh, osw,
    CS: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, PRECISION: tl.constexpr, WITH_METRIC: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, COLUMNS)
    live = columns < WIDTH
    square = columns[:, None] * WIDTH + columns[None, :]
    m = tl.load(metric + square, mask=live[:, None] & live[None, :], other=0.0)
    dm = tl.zeros((COLUMNS, COLUMNS), dtype=tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(count, ROWS), tl.num_programs(0)):
        rows = block * ROWS + tl.arange(0, ROWS)
        mask = (rows < count)[:, None] & live[None, :]
        ct, _ = _offsets(rows, columns, groups, across, down, csb, csc, csh, csw, CS, P)
        up = tl.load(g + rows, mask=rows < count, other=0.0)
        r = tl.load(c + ct, mask=mask, other=0.0).to(tl.float32)
        # A sample without a gradient may hold NaN, and 0·NaN is no 0.
        r = tl.where((up == 0.0)[:, None], 0.0, r).to(m.dtype)
        v = tl.dot(r, m, input_precision=PRECISION)
        ot, _ = _offsets(rows, columns, groups, across, down, osb, osc, osh, osw, CS, P)
        tl.store(dc + ot, ((2.0 * up)[:, None] * v).to(dc.dtype.element_ty), mask=mask)
        if WITH_METRIC:
            pull = up[:, None] * r.to(tl.float32)
            dm += tl.dot(tl.trans(r), pull.to(m.dtype), input_precision=PRECISION)
    if WITH_METRIC:
        place = tl.program_id(0) * WIDTH * WIDTH + square
        tl.store(partial + place, dm, mask=live[:, None] & live[None, :])


@triton.jit
def _backward_kernel(
    a, c, metric, gamma, g, dr, partial, dgamma, scale,
    count, groups, across, down,
    asb, asc, ash, asw, csb, csc, csh, csw, gsb, gsc, gsh, gsw, osb, osc, osh, osw,
    CS: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
    WITH_METRIC: tl.constexpr, WITH_GAMMA: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, COLUMNS)
    live = columns < WIDTH
    square = columns[:, None] * WIDTH + columns[None, :]
    m = tl.load(metric + square, mask=live[:, None] & live[None, :], other=0.0)
    dm = tl.zeros((COLUMNS, COLUMNS), dtype=tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(count, ROWS), tl.num_programs(0)):
        rows = block * ROWS + tl.arange(0, ROWS)
        mask = (rows < count)[:, None] & live[None, :]
        at, sample = _offsets(rows, columns, groups, across, down, asb, asc, ash, asw, CS, P)
        ct, _ = _offsets(rows, columns, groups, across, down, csb, csc, csh, csw, CS, P)
        gt, _ = _offsets(rows, columns, groups, across, down, gsb, gsc, gsh, gsw, CS, P)
        left = tl.load(a + at, mask=mask, other=0.0).to(tl.float32)
        right = tl.load(c + ct, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(g + gt, mask=mask, other=0.0)
        rate = tl.load(gamma + sample, mask=rows < count, other=0.0)
        failed = (rate < 0.0)[:, None]
        r = tl.where(failed, 0.0, left - right).to(m.dtype)
        up = tl.where(failed, 0.0, up)
        v = tl.dot(r, m, input_precision=PRECISION)
        s = _energy(r, v)
        e = scale * _weight(rate, s)
        e = tl.where(rate * s >= 110.0, 0.0, e)
        gm = tl.dot(up.to(m.dtype), m, input_precision=PRECISION)
        wide = up.to(tl.float32)
        along = e * tl.sum(wide * v, 1)
        back = e[:, None] * gm - (2.0 * rate * along)[:, None] * v
        ot, _ = _offsets(rows, columns, groups, across, down, osb, osc, osh, osw, CS, P)
        tl.store(dr + ot, back.to(dr.dtype.element_ty), mask=mask)
        if WITH_METRIC:
            pull = e[:, None] * wide - (rate * along)[:, None] * r.to(tl.float32)
            dm += tl.dot(tl.trans(r), pull.to(m.dtype), input_precision=PRECISION)
        if WITH_GAMMA:
            tl.store(dgamma + rows, -s * along, mask=rows < count)
    if WITH_METRIC:
        place = tl.program_id(0) * WIDTH * WIDTH + square
        tl.store(partial + place, dm, mask=live[:, None] & live[None, :])


def _blocks(width: int) -> tuple[int, int]:
    """(rows, columns) of a tile: about _TILE numbers, and what a matrix unit takes."""
    columns = max(16, triton.next_power_of_2(width))
    return max(16, min(256, _TILE // columns)), int(columns)


def _layout(t: Tensor, channels: int, size: int) -> tuple[int, int, int, int]:
    """(rows, channel groups, patches across, patches down) of a map [B, C, H, W]."""
    b, c, h, w = t.shape
    groups, down, across = c // channels, h // size, w // size
    return b * groups * down * across, groups, across, down


def _precision(metric: Tensor) -> str:
    if metric.dtype != torch.float32:
        return "ieee"  # a half-precision product is exact before it is summed
    # Three products of ten bits each make a float32 one on the matrix units.
    return "tf32" if products_take_tf32() else "tf32x3"


def _programs(t: Tensor, count: int, rows: int) -> int:
    """Enough programs to fill the chip, each looping over its share."""
    if t.device.type != "cuda":
        return min(int(triton.cdiv(count, rows)), 2)  # the interpreter
    chip = torch.cuda.get_device_properties(t.device).multi_processor_count
    return min(int(triton.cdiv(count, rows)), _WAVES * chip)


def direct(kernel: Any) -> Any:
    """The ``wrap`` of an eager launch; under a compiler it is ``torch.library.wrap_triton``."""
    return kernel


def _launch(
    t: Tensor, metric: Tensor, channels: int, size: int
) -> tuple[tuple[int, int, int, int], int, dict[str, Any]]:
    """The layout of a map t, the number of programs, and the constants of a launch."""
    layout, width = _layout(t, channels, size), channels * size * size
    rows, columns = _blocks(width)
    constants = {
        "CS": channels, "P": size, "WIDTH": width, "ROWS": rows, "COLUMNS": columns,
        "PRECISION": _precision(metric), "num_warps": _WARPS,
    }  # fmt: skip
    return layout, _programs(t, layout[0], rows), constants


def forward(
    a: Tensor | None,
    c: Tensor,
    metric: Tensor,
    gamma: Tensor,
    channels: int,
    size: int,
    wrap: Any,
    scale: float = 1.0,
) -> Tensor:
    """scale·e·v for every row of a − c, lying in memory as c; None is a = 0, which is not read.

    a, c [B, C, H, W]; metric [k, k] permuted; gamma [B] float32.
    """
    layout, programs, constants = _launch(c, metric, channels, size)
    out, left = torch.empty_like(c), c if a is None else a
    strides = *left.stride(), *c.stride(), *out.stride()
    given = left, c, metric, gamma, out, scale
    wrap(_forward_kernel)[(programs,)](*given, *layout, *strides, GIVEN=a is not None, **constants)
    return out


def energies(c: Tensor, metric: Tensor, channels: int, size: int, wrap: Any) -> Tensor:
    """⟨rᵢM, rᵢ⟩ of every row of c, [B, P] float32, rows in the order (y, x, group)."""
    layout, programs, constants = _launch(c, metric, channels, size)
    out = c.new_empty((c.shape[0], layout[0] // c.shape[0]), dtype=torch.float32)
    wrap(_energy_kernel)[(programs,)](c, metric, out, *layout, *c.stride(), **constants)
    return out


def energies_backward(
    c: Tensor, metric: Tensor, g: Tensor, channels: int, size: int, with_metric: bool, wrap: Any
) -> tuple[Tensor, Tensor]:
    """(dc [B, C, H, W], dM [k, k] float32, empty if not asked for) of Σᵢ gᵢ⟨cᵢM, cᵢ⟩.

    g [B, P] float32, contiguous, in the order of ``energies``.
    """
    layout, programs, constants = _launch(c, metric, channels, size)
    dc, width = torch.empty_like(c), constants["WIDTH"]
    partial = c.new_empty((programs if with_metric else 0, width, width), dtype=torch.float32)
    given = c, metric, g, dc, partial, *layout, *c.stride(), *dc.stride()
    wrap(_energy_backward_kernel)[(programs,)](*given, WITH_METRIC=with_metric, **constants)
    return dc, partial.sum(0)


def backward(
    a: Tensor,
    c: Tensor,
    metric: Tensor,
    gamma: Tensor,
    g: Tensor,
    channels: int,
    size: int,
    with_metric: bool,
    with_gamma: bool,
    wrap: Any,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dr [B, C, H, W], dM [k, k] float32, dγ [B] float32); the last two empty if not asked for."""
    layout, programs, constants = _launch(a, metric, channels, size)
    dr, width = torch.empty_like(c), constants["WIDTH"]
    partial = a.new_empty((programs if with_metric else 0, width, width), dtype=torch.float32)
    dgamma = a.new_empty(layout[0] if with_gamma else 0, dtype=torch.float32)
    given = a, c, metric, gamma, g, dr, partial, dgamma, scale
    strides = *a.stride(), *c.stride(), *g.stride(), *dr.stride()
    wrap(_backward_kernel)[(programs,)](
        *given, *layout, *strides, WITH_METRIC=with_metric, WITH_GAMMA=with_gamma, **constants
    )
    per_sample = dgamma.view(a.shape[0], -1).sum(1) if with_gamma else dgamma
    return dr, partial.sum(0), per_sample
