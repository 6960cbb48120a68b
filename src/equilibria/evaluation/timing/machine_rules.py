"""Rules about adjoints, constraints, and how the device is used."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import nn

from equilibria.adjoints import Implicit, Phantom
from equilibria.engine.krylov import LinearSolver
from equilibria.nn import GEQ, NormBounded
from equilibria.nn.constraints import OperatorNorm
from equilibria.problems import NonNegative
from equilibria.solvers import ProximalGradient

from .ideas import GAIN, Case, Idea
from .instrument import solving_layers
from .measuring import race
from .probes import tolerance_of
from .report import Suggestion
from .timeline import ADJOINT_MAP, ADJOINT_SOLVER, NORM

__all__ = ["MACHINE_RULES"]

_LINEAR_RTOL = {torch.float64: 1e-10, torch.float32: 1e-5}
"""What GMRES and CG take if they are not told."""


def looser_adjoint(case: Case) -> Idea | None:
    """A gradient solved more precisely than the answer that it is taken at."""
    names: dict[str, float] = {}
    saved = 0.0
    dtype = case.work.x.dtype if case.work.x.is_floating_point() else torch.float32
    for layer in case.main.layers:
        module = solving_layers(case.work.model)[layer.name]
        adjoint = module.adjoint
        if not isinstance(adjoint, Implicit) or not isinstance(adjoint.solver, LinearSolver):
            continue
        forward = tolerance_of(module.solver, case.work.x)
        back = adjoint.solver.rtol
        back = _LINEAR_RTOL.get(dtype, 1e-3) if back is None else back
        if forward <= 0.0 or not 0.0 < back < 0.5 * forward or forward >= 1.0:
            continue
        names[layer.name] = forward
        # Digits cost about alike, so steps fall with the logarithm of the tolerance.
        part = layer.seconds[ADJOINT_MAP] + layer.seconds[ADJOINT_SOLVER]
        saved += part * (1.0 - math.log(forward) / math.log(back))
    if not names or case.without(saved) < GAIN:
        return None

    def edit(model: nn.Module) -> None:
        for name, layer in solving_layers(model).items():
            if name in names:
                solver = dataclasses.replace(layer.adjoint.solver, rtol=names[name])
                layer.adjoint = dataclasses.replace(layer.adjoint, solver=solver)

    said = Suggestion(
        "looser adjoint",
        "the backward solves go further than the forward ones (relative tolerance "
        f"{max(names.values()):.0e}): gradients cannot be better than the point they are taken at",
        f"adjoint=eq.Implicit(solver=eq.GMRES(rtol={max(names.values()):g}))",
        case.without(saved),
    )
    return Idea(said, edit)


def fewer_power_iterations(case: Case) -> Idea | None:
    """Norm constraints that take a large part of the step."""
    norms = [m for m in case.work.model.modules() if isinstance(m, OperatorNorm)]
    share = case.main.share(NORM)
    if case.main.kind != "train" or share < 0.1 or all(n.steps == 1 for n in norms):
        return None
    most = max(n.steps for n in norms)
    # A step of power iteration is two applications of W; σ itself is one more.
    saved = case.main.parts[NORM] * (1.0 - 3.0 / (2.0 * most + 1.0))

    def edit(model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, OperatorNorm):
                module.steps = 1

    said = Suggestion(
        "fewer power iterations",
        f"norm constraints take {share:.0%} of the step, {most} power iterations each",
        "NormBounded(bound=..., steps=1): the bound then lags more while weights move fast "
        "(check with certify)",
        case.without(saved),
    )
    return Idea(said, edit)


def larger_batch(case: Case) -> Idea | None:
    """A device that is not full takes a double batch in less than double the time."""
    work = case.work
    if any(layer.statistics is None for layer in case.main.layers):
        return None
    twice = dataclasses.replace(work, x=torch.cat([work.x, work.x]))
    with work.mode(train=False):
        try:
            found = race({"1": work.infer, "2": twice.infer}, work.device, 3)
        except RuntimeError:  # out of memory: the device is full
            return None
    gain = 2.0 * min(found["1"]) / min(found["2"])
    if gain < 1.2:
        return None
    said = Suggestion(
        "larger batch",
        f"twice the batch takes {2.0 / gain:.2f} times as long in inference: {work.batch} samples "
        "do not fill the device",
        f"--batch-size {2 * work.batch}",
        gain,
        note="a prediction for inference, per image",
    )
    return Idea(said)


def low_precision(case: Case) -> Idea | None:
    """Tensor cores want bf16."""
    if case.work.device.type != "cuda" or case.work.precision != "32-true":
        return None
    if not torch.cuda.is_bf16_supported():
        return None
    said = Suggestion(
        "bf16",
        "float32 on a GPU whose tensor cores take bf16",
        "--precision bf16-mixed (torch.autocast)",
        None,
    )
    return Idea(said, settings={"precision": "bf16-mixed"})


def memory_format(case: Case) -> Idea | None:
    """Convolutions on tensor cores want channels last."""
    x = case.work.x
    convolutions = any(isinstance(m, nn.Conv2d) for m in case.work.model.modules())
    if x.ndim != 4 or not convolutions or x.shape[1] == 1:
        return None
    weights = [m.weight for m in case.work.model.modules() if isinstance(m, nn.Conv2d)]
    if all(w.is_contiguous(memory_format=torch.channels_last) for w in weights):
        return None
    said = Suggestion(
        "channels last",
        "convolutions run on contiguous (NCHW) maps",
        "model.to(memory_format=torch.channels_last), and x too",
        None,
    )
    return Idea(said, settings={"channels_last": True})


def compiling(case: Case) -> Idea | None:
    """Fixed-step solves with explicit adjoints compile whole."""
    work = case.work
    if work.called is not work.model or work.device.type != "cuda":
        return None
    layers = solving_layers(work.model).values()
    whole = all(m.solver.fixed_steps and not isinstance(m.adjoint, Implicit) for m in layers)
    if not whole:
        return None
    said = Suggestion(
        "torch.compile",
        "every solve has fixed steps and an adjoint that compiles: the network fuses whole",
        "torch.compile(model), or --compile",
        None,
    )
    return Idea(said, settings={"compiled": True})


def cuda_graphs(case: Case) -> Idea | None:
    """Kernels that are launched one by one from Python leave a fast device waiting."""
    work = case.work
    if work.device.type != "cuda" or case.main.kind != "train" or work.called is not work.model:
        return None
    layers = solving_layers(work.model).values()
    if not layers or not all(m.solver.fixed_steps for m in layers):
        return None
    if any(isinstance(m.adjoint, Implicit) for m in layers):
        return None
    said = Suggestion(
        "CUDA graphs",
        "every solve has fixed steps: the step can be replayed without launches from Python",
        "--cuda-graphs, or training.GraphedModel(model)",
        None,
    )
    return Idea(said)


def express_lane(case: Case) -> Idea | None:
    """Gaussian patch layers with a ReLU have a solve that is one operation."""
    names = [
        name
        for name, layer in solving_layers(case.work.model).items()
        if isinstance(layer, GEQ)
        and layer.patch is not None
        and layer.hidden is not None
        and type(layer.prior) is NonNegative
        and isinstance(layer.constraint, NormBounded)
        and layer.solver.fixed_steps
        and not _takes_express(layer)
    ]
    if case.main.kind != "train" or not names:
        return None

    def edit(model: nn.Module) -> None:
        for name, layer in solving_layers(model).items():
            if name in names:
                steps = layer.solver.max_steps
                layer.solver = ProximalGradient(
                    rtol=0.0, atol=0.0, max_steps=steps, accelerate=False
                )
                terms = getattr(layer.adjoint, "steps", 3)
                layer.adjoint = Phantom(steps=terms, damping=1.0, form="neumann")

    said = Suggestion(
        "express lane",
        f"{len(names)} Gaussian layers take fixed steps on the general path",
        "solver=eq.ProximalGradient(rtol=0, atol=0, max_steps=4, accelerate=False), "
        'adjoint=eq.Phantom(steps=3, damping=1.0, form="neumann")',
        None,
    )
    return Idea(said, edit)


def _takes_express(layer: GEQ) -> bool:
    adjoint, solver = layer.adjoint, layer.solver
    series = isinstance(adjoint, Phantom) and adjoint.form == "neumann" and adjoint.damping == 1.0
    return series and isinstance(solver, ProximalGradient) and not solver.accelerate


MACHINE_RULES: tuple[Callable[[Case], Idea | None], ...] = (
    looser_adjoint,
    fewer_power_iterations,
    larger_batch,
    low_precision,
    memory_format,
    compiling,
    cuda_graphs,
    express_lane,
)
