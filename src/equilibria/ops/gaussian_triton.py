"""The Gaussian patch message in one pass over memory, forward and backward, in Triton.

    r = a − c cut into rows rᵢ,  v = rᵢM,  s = ⟨rᵢ, v⟩,  e = exp(−γs),  out = e·v

Forward reads a and c and writes out; backward reads a, c and the incoming gradient g and writes

    dr = e·(g − 2γ⟨g, v⟩rᵢ)M,   dM = Σᵢ rᵢᵀ(e·g − γe⟨g, v⟩rᵢ),   dγ = −Σᵢ se⟨g, v⟩

The energies s of c alone, of which γ is made, have kernels of their own: for gradients gᵢ of sᵢ

    dc = 2gᵢ·cᵢM,   dM = Σᵢ gᵢ·cᵢᵀcᵢ

A row is c_s channels of p × p pixels, read where it lies: no tensor of rows is made. Columns are
taken in the order (dy, dx, channel), in which a channels-last row is runs of c_s numbers; M is
permuted to it by the caller. The plain twin, and the oracle, is ``ops/gaussian.py``.

Both are linear in something that callers scale: forward writes scale·out, backward takes scale·g
for g. A sample with γ < 0 has failed: its message and its gradients are 0, also where its numbers
are NaN.
"""

# A kernel is Triton's language, not Python: its parameters are pointers and tiles without types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from equilibria.engine.transforms import products_take_tf32


class Plan(NamedTuple):
    """How a kernel is launched."""

    rows: int  # of a tile
    warps: int
    stages: int  # tiles that are loaded ahead, and the one at work
    waves: int  # programs a multiprocessor: each loops over its share of the tiles


PLANS = {
    # kernel, columns of a tile: on large maps, on small maps (benchmarks/gaussian_op.py --tune)
    ("forward", 16): (Plan(128, 4, 2, 32), Plan(128, 4, 2, 32)),
    ("forward", 32): (Plan(64, 4, 1, 8), Plan(64, 4, 1, 8)),
    ("forward", 64): (Plan(64, 4, 1, 4), Plan(64, 4, 1, 4)),
    ("forward", 128): (Plan(64, 4, 1, 2), Plan(64, 4, 1, 2)),
    ("backward", 16): (Plan(128, 4, 1, 32), Plan(128, 4, 1, 32)),
    ("backward", 32): (Plan(64, 4, 1, 8), Plan(64, 4, 1, 8)),
    ("backward", 64): (Plan(64, 4, 2, 4), Plan(64, 4, 2, 4)),
    ("backward", 128): (Plan(64, 4, 2, 2), Plan(64, 4, 2, 2)),
    ("metric", 16): (Plan(128, 4, 2, 4), Plan(128, 4, 2, 4)),
    ("metric", 32): (Plan(64, 4, 2, 8), Plan(64, 4, 2, 4)),
    ("metric", 64): (Plan(64, 4, 1, 2), Plan(64, 4, 1, 2)),
    ("metric", 128): (Plan(128, 8, 2, 1), Plan(128, 8, 2, 1)),
    ("energies", 16): (Plan(256, 4, 2, 32), Plan(256, 4, 2, 32)),
    ("energies", 32): (Plan(128, 4, 1, 32), Plan(128, 4, 1, 8)),
    ("energies", 64): (Plan(64, 4, 3, 4), Plan(64, 4, 3, 4)),
    ("energies", 128): (Plan(64, 4, 3, 2), Plan(64, 4, 3, 2)),
}
"""Of numbers of 16 bits. "backward" is without the gradient of M, "metric" with it."""

SMALL = 2**24
"""The most numbers of a small map."""

_SIZES = ["count", "groups", "across", "down"]  # of a map: kernels are compiled once for all


@triton.jit
def _offsets(
    rows, columns, groups, across, down, sb, sc, sh, sw, CS: tl.constexpr, P: tl.constexpr
):
    """Where ``rows`` lie: row → (sample, y, x, group), column → (dy, dx, channel)."""
    patch = rows // groups
    line = patch // across
    sample = line // down
    group = rows - patch * groups
    x = patch - line * across
    y = line - sample * down
    start = sample * sb + (y * P) * sh + (x * P) * sw + (group * CS) * sc
    dy = columns // (P * CS)
    dx = (columns // CS) % P
    channel = columns % CS
    inside = dy * sh + dx * sw + channel * sc
    return start[:, None] + inside[None, :], sample


@triton.jit
def _square(columns, WIDTH: tl.constexpr):
    """Where the numbers of M lie, and which there are."""
    live = columns < WIDTH
    return columns[:, None] * WIDTH + columns[None, :], live[:, None] & live[None, :]


@triton.jit
def _mask(there, columns, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Which numbers of a tile there are."""
    mask = there[:, None]
    if WIDTH < COLUMNS:
        mask = mask & (columns < WIDTH)[None, :]
    return mask


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


@triton.jit(do_not_specialize=_SIZES)
def _forward_kernel(
    a, c, metric, gamma, out, scale,
    count, groups, across, down,
    asb, asc, ash, asw, csb, csc, csh, csw, osb, osc, osh, osw,
    CS: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, PRECISION: tl.constexpr, SAME: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, COLUMNS)
    square, live = _square(columns, WIDTH)
    m = tl.load(metric + square, mask=live, other=0.0)
    for block in range(tl.program_id(0), tl.cdiv(count, ROWS), tl.num_programs(0)):
        rows = block * ROWS + tl.arange(0, ROWS)
        mask = _mask(rows < count, columns, WIDTH, COLUMNS)
        at, sample = _offsets(rows, columns, groups, across, down, asb, asc, ash, asw, CS, P)
        ct = at
        ot = at
        if not SAME:
            ct, _ = _offsets(rows, columns, groups, across, down, csb, csc, csh, csw, CS, P)
            ot, _ = _offsets(rows, columns, groups, across, down, osb, osc, osh, osw, CS, P)
        left = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        if GIVEN:
            left = tl.load(a + at, mask=mask, other=0.0).to(tl.float32)
        right = tl.load(c + ct, mask=mask, other=0.0).to(tl.float32)
        rate = tl.load(gamma + sample, mask=rows < count, other=0.0)
        r = (left - right).to(m.dtype)
        v = tl.dot(r, m, input_precision=PRECISION)
        e = scale * _weight(rate, _energy(r, v))
        # Chosen last, so that nothing waits for it. A NaN is not a failure: it must show.
        found = tl.where((rate < 0.0)[:, None], 0.0, e[:, None] * v)
        tl.store(out + ot, found.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=_SIZES)
def _energy_kernel(
    c, metric, out,
    count, groups, across, down, csb, csc, csh, csw,
    CS: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, COLUMNS)
    square, live = _square(columns, WIDTH)
    m = tl.load(metric + square, mask=live, other=0.0)
    for block in range(tl.program_id(0), tl.cdiv(count, ROWS), tl.num_programs(0)):
        rows = block * ROWS + tl.arange(0, ROWS)
        mask = _mask(rows < count, columns, WIDTH, COLUMNS)
        at, _ = _offsets(rows, columns, groups, across, down, csb, csc, csh, csw, CS, P)
        r = tl.load(c + at, mask=mask, other=0.0).to(m.dtype)
        v = tl.dot(r, m, input_precision=PRECISION)
        s = _energy(r, v)
        tl.store(out + rows, s, mask=rows < count)


@triton.jit(do_not_specialize=_SIZES)
def _energy_backward_kernel(
    c, metric, g, dc, partial,
    count, groups, across, down, csb, csc, csh, csw, osb, osc, osh, osw,
    CS: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, PRECISION: tl.constexpr, SAME: tl.constexpr,
    WITH_METRIC: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, COLUMNS)
    square, live = _square(columns, WIDTH)
    m = tl.load(metric + square, mask=live, other=0.0)
    dm = tl.zeros((COLUMNS, COLUMNS), dtype=tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(count, ROWS), tl.num_programs(0)):
        rows = block * ROWS + tl.arange(0, ROWS)
        mask = _mask(rows < count, columns, WIDTH, COLUMNS)
        ct, _ = _offsets(rows, columns, groups, across, down, csb, csc, csh, csw, CS, P)
        ot = ct
        if not SAME:
            ot, _ = _offsets(rows, columns, groups, across, down, osb, osc, osh, osw, CS, P)
        up = tl.load(g + rows, mask=rows < count, other=0.0)
        r = tl.load(c + ct, mask=mask, other=0.0).to(tl.float32)
        # A sample without a gradient may hold NaN, and 0·NaN is no 0.
        r = tl.where((up == 0.0)[:, None], 0.0, r).to(m.dtype)
        v = tl.dot(r, m, input_precision=PRECISION)
        tl.store(dc + ot, ((2.0 * up)[:, None] * v).to(dc.dtype.element_ty), mask=mask)
        if WITH_METRIC:
            pull = up[:, None] * r.to(tl.float32)
            dm += tl.dot(tl.trans(r), pull.to(m.dtype), input_precision=PRECISION)
    if WITH_METRIC:
        place = tl.program_id(0) * WIDTH * WIDTH + square
        tl.store(partial + place, dm, mask=live)


@triton.jit(do_not_specialize=_SIZES)
def _backward_kernel(
    a, c, metric, gamma, g, dr, partial, dgamma, scale,
    count, groups, across, down,
    asb, asc, ash, asw, csb, csc, csh, csw, gsb, gsc, gsh, gsw, osb, osc, osh, osw,
    CS: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, PRECISION: tl.constexpr, SAME: tl.constexpr,
    WITH_METRIC: tl.constexpr, WITH_GAMMA: tl.constexpr, FLIP: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, COLUMNS)
    square, live = _square(columns, WIDTH)
    m = tl.load(metric + square, mask=live, other=0.0)
    dm = tl.zeros((COLUMNS, COLUMNS), dtype=tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(count, ROWS), tl.num_programs(0)):
        rows = block * ROWS + tl.arange(0, ROWS)
        mask = _mask(rows < count, columns, WIDTH, COLUMNS)
        at, sample = _offsets(rows, columns, groups, across, down, asb, asc, ash, asw, CS, P)
        ct = at
        gt = at
        ot = at
        if not SAME:
            ct, _ = _offsets(rows, columns, groups, across, down, csb, csc, csh, csw, CS, P)
            gt, _ = _offsets(rows, columns, groups, across, down, gsb, gsc, gsh, gsw, CS, P)
            ot, _ = _offsets(rows, columns, groups, across, down, osb, osc, osh, osw, CS, P)
        left = tl.load(a + at, mask=mask, other=0.0).to(tl.float32)
        right = tl.load(c + ct, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(g + gt, mask=mask, other=0.0)
        rate = tl.load(gamma + sample, mask=rows < count, other=0.0)
        failed = rate < 0.0
        r = (left - right).to(m.dtype)
        v = tl.dot(r, m, input_precision=PRECISION)
        s = _energy(r, v)
        e = scale * _weight(rate, s)
        e = tl.where(rate * s >= 110.0, 0.0, e)
        wide = up.to(tl.float32)
        along = e * tl.sum(wide * v, 1)
        straight = e[:, None] * wide
        bent = (rate * along)[:, None] * r.to(tl.float32)
        turned = (straight - 2.0 * bent).to(m.dtype)
        if WITH_METRIC:  # a sum over rows: no row of a failed sample
            pull = tl.where(failed[:, None], 0.0, straight - bent).to(m.dtype)
            kept = tl.where(failed[:, None], 0.0, r).to(m.dtype)
            if FLIP:
                dm += tl.dot(tl.trans(pull), kept, input_precision=PRECISION)
            else:
                dm += tl.dot(tl.trans(kept), pull, input_precision=PRECISION)
        back = tl.dot(turned, m, input_precision=PRECISION)
        back = tl.where(failed[:, None], 0.0, back)
        tl.store(dr + ot, back.to(dr.dtype.element_ty), mask=mask)
        if WITH_GAMMA:
            tl.store(dgamma + rows, tl.where(failed, 0.0, -s * along), mask=rows < count)
    if WITH_METRIC:
        if FLIP:
            dm = tl.trans(dm)
        place = tl.program_id(0) * WIDTH * WIDTH + square
        tl.store(partial + place, dm, mask=live)


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


def direct(kernel: Any) -> Any:
    """The ``wrap`` of an eager launch; under a compiler it is ``torch.library.wrap_triton``."""
    return kernel


@functools.cache
def _chip(device: torch.device) -> tuple[int, bool]:
    """(multiprocessors, whether their memory is as large as the table of plans needs)."""
    if device.type != "cuda":
        return 1, True  # the interpreter
    chip = torch.cuda.get_device_properties(device)
    shared = getattr(chip, "shared_memory_per_block_optin", 0)  # not on AMD's
    return chip.multi_processor_count, shared >= 200 * 1024


def _launch(
    kernel: str, t: Tensor, metric: Tensor, channels: int, size: int
) -> tuple[tuple[int, int, int, int], int, dict[str, Any]]:
    """The layout of a map t, the number of programs, and the constants of a launch."""
    layout, width = _layout(t, channels, size), channels * size * size
    columns = max(16, int(triton.next_power_of_2(width)))
    chips, roomy = _chip(t.device)
    plan = Plan(4096 // columns, 4, 2, 4)
    if roomy and t.element_size() == 2:
        plan = PLANS[kernel, columns][t.numel() <= SMALL]
    constants = {
        "CS": channels, "P": size, "WIDTH": width, "ROWS": plan.rows, "COLUMNS": columns,
        "PRECISION": _precision(metric), "num_warps": plan.warps,
        "num_stages": plan.stages,
    }  # fmt: skip
    return layout, min(-(-layout[0] // plan.rows), plan.waves * chips), constants


def _same(*maps: Tensor) -> bool:
    """Whether the maps lie alike in memory, so that one set of offsets serves them all."""
    return all(t.stride() == maps[0].stride() for t in maps)


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
    layout, programs, constants = _launch("forward", c, metric, channels, size)
    out, left = torch.empty_like(c), c if a is None else a
    strides = *left.stride(), *c.stride(), *out.stride()
    constants |= {"SAME": _same(left, c, out), "GIVEN": a is not None}
    given = left, c, metric, gamma, out, scale
    wrap(_forward_kernel)[(programs,)](*given, *layout, *strides, **constants)
    return out


def energies(c: Tensor, metric: Tensor, channels: int, size: int, wrap: Any) -> Tensor:
    """⟨rᵢM, rᵢ⟩ of every row of c, [B, P] float32, rows in the order (y, x, group)."""
    layout, programs, constants = _launch("energies", c, metric, channels, size)
    out = c.new_empty((c.shape[0], layout[0] // c.shape[0]), dtype=torch.float32)
    wrap(_energy_kernel)[(programs,)](c, metric, out, *layout, *c.stride(), **constants)
    return out


def energies_backward(
    c: Tensor, metric: Tensor, g: Tensor, channels: int, size: int, with_metric: bool, wrap: Any
) -> tuple[Tensor, Tensor]:
    """(dc [B, C, H, W], dM [k, k] float32, empty if not asked for) of Σᵢ gᵢ⟨cᵢM, cᵢ⟩.

    g [B, P] float32, contiguous, in the order of ``energies``.
    """
    kernel = "metric" if with_metric else "backward"
    layout, programs, constants = _launch(kernel, c, metric, channels, size)
    dc, width = torch.empty_like(c), constants["WIDTH"]
    partial = c.new_empty((programs if with_metric else 0, width, width), dtype=torch.float32)
    given = c, metric, g, dc, partial, *layout, *c.stride(), *dc.stride()
    wrap(_energy_backward_kernel)[(programs,)](
        *given, SAME=_same(c, dc), WITH_METRIC=with_metric, **constants
    )
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
    kernel = "metric" if with_metric else "backward"
    layout, programs, constants = _launch(kernel, a, metric, channels, size)
    dr, width = torch.empty_like(c), constants["WIDTH"]
    partial = a.new_empty((programs if with_metric else 0, width, width), dtype=torch.float32)
    dgamma = a.new_empty(layout[0] if with_gamma else 0, dtype=torch.float32)
    given = a, c, metric, gamma, g, dr, partial, dgamma, scale
    strides = *a.stride(), *c.stride(), *g.stride(), *dr.stride()
    # Of wide rows the transpose of dM is summed: r is no left factor then, and Triton's compiler
    # loads a and c ahead. In float32 that would not fit into the memory of a multiprocessor.
    flip = with_metric and width > 32 and a.element_size() == 2
    flags = {"WITH_METRIC": with_metric, "WITH_GAMMA": with_gamma, "FLIP": flip}
    flags["SAME"] = _same(a, c, g, dr)
    wrap(_backward_kernel)[(programs,)](*given, *layout, *strides, **flags, **constants)
    per_sample = dgamma.view(a.shape[0], -1).sum(1) if with_gamma else dgamma
    return dr, partial.sum(0), per_sample
