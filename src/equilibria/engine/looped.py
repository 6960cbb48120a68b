"""A solve with a tolerance as one ``torch.while_loop``: for compilers, which cannot read a test.

torch.export and ``torch.compile(fullgraph=True)`` take it; in ONNX it is a Loop. Each turn
evaluates the map once (a loop must not capture two views of one weight), tests every sample and
freezes those that are done. Stagnation and coupling are not looked for.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._higher_order_ops.while_loop import while_loop

from .judge import HEALTH, Judge, judged_norms, relative_norm
from .maps import Map
from .result import Iterated, Result
from .solver import Point, Solver
from .tree import Leaves, join_samples, part_samples, sample_norm, where_sample

_RUNNING = -1


def run_looped(fn: Map, z0: Leaves, solver: Solver) -> Iterated:
    """Solve z = T(z) from z0, testing after every evaluation."""
    size = fn.group if fn.coupled and solver.joins else 0
    meant = fn.joined() if size else fn
    start = [x.contiguous() for x in (join_samples(z0, size) if size else z0)]
    judge = Judge(meant, start, solver, None, size)
    last, count = solver.max_steps, len(start)

    def image(z: Leaves) -> Leaves:
        return join_samples(fn.bare(part_samples(z)), size) if size else fn.bare(z)

    def unfinished(step: Tensor, code: Tensor, *rest: Tensor) -> Tensor:
        return ((code == _RUNNING) & (step < last)).any()

    def advance(*state: Tensor) -> tuple[Tensor, ...]:
        step, code, steps, residual, scale, limit, peak, *rest = state
        z, held = rest[:count], rest[count:]
        active, step = code == _RUNNING, step + 1
        point = Point(z, image(z))
        found, length = judged_norms(meant, point)
        limit = torch.where(step == 1, solver.divergence * (found + length), limit)
        look = (step == 1) | (step % HEALTH == 0)
        peak = torch.where(look, torch.maximum(found, peak), peak)
        fell = judge.fell(found, peak) | (step <= judge.patience)
        passed = judge.passes(point, found, length) & fell
        finite = torch.isfinite(found) & torch.isfinite(length)
        ended = torch.where(found > limit, int(Result.diverged), _RUNNING)
        ended = torch.where(passed, int(Result.converged), ended)
        ended = torch.where(finite, ended, int(Result.nonfinite)).to(torch.int8)
        following, held = solver.loop_step(point, held)
        move = active & (ended == _RUNNING) & (step < last)
        return (
            step,
            torch.where(active, ended, code),
            torch.where(active, step, steps),
            torch.where(active, found, residual),
            torch.where(active, length, scale),
            limit,
            peak,
            *(x.contiguous() for x in where_sample(move, following, z)),
            *(x.contiguous() for x in held),
        )

    none = torch.zeros_like(sample_norm(start))
    code = torch.full_like(none, _RUNNING, dtype=torch.int8)
    zero = torch.zeros((), dtype=torch.int64, device=none.device)
    state = (zero, code, none.to(torch.int64), *(none.clone() for _ in range(4)), *start)
    _, code, steps, residual, scale, _, _, *rest = while_loop(
        unfinished, advance, (*state, *solver.loop_state(start))
    )
    z = rest[:count]
    code = torch.where(code == _RUNNING, int(Result.max_steps), code).to(torch.int8)
    z = where_sample(torch.isfinite(sample_norm(z)), z, start)
    relative = relative_norm(residual, scale)
    done = Iterated(z, code, steps.to(torch.int32), residual, relative, last, 1)
    return done.spread(size) if size else done
