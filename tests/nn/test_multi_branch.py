"""MultiBranch: branches at their scales, solved apart or as one, fused, certified."""

from __future__ import annotations

import copy
import io
import math
import pickle
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call

import equilibria as eq
from equilibria.certify import CompositeCertificate, Guarantee
from equilibria.engine.result import BackwardStats, Result, Solution, Stats
from equilibria.nn import (
    DEQ,
    GEQ,
    MDEQ,
    BranchSolution,
    DeepOptEq,
    KerDEQ,
    MultiBranch,
    OptEq,
    ResidualBlock,
)
from equilibria.nn.monotone import MonotoneDEQ
from equilibria.nn.multi_branch import combine
from tests.contracts.layer_contract import EXACT, TIGHT
from tests.problems.test_operators import randn

PATCH = eq.Patches(channels=2, size=2)
LAPS = eq.Picard(rtol=0.0, max_steps=3)
PATIENT = eq.Picard(rtol=1e-12, max_steps=20_000, patience=5000)
LONG = eq.Implicit(solver=eq.GMRES(max_steps=500, restart=60))
SPLITTINGS = (
    eq.PeacemanRachford(rtol=1e-12, max_steps=2000),
    eq.ForwardBackward(rtol=1e-13, max_steps=100_000, patience=10_000),
)


def opteq(**options: Any) -> OptEq:
    return OptEq(4, 6, in_channels=3, kernel_size=3, **options)


def geq(**options: Any) -> GEQ:
    return GEQ(4, 6, in_channels=3, patch=PATCH, hidden=4, gamma=0.3, **options)


def made(joint: bool = False, *, seed: int = 0, output: Any = None, **options: Any) -> MultiBranch:
    """An OptEq at 8 pixels and two GEQs at 4 and 2, in float64."""
    torch.manual_seed(seed)
    own = {} if joint else options
    layers = [opteq(**own), geq(**own), geq(**own)]
    whole = options if joint else {}
    return MultiBranch(layers, (8, 4, 2), joint=joint, output=output, **whole).double()


def pool(x: np.ndarray, k: int) -> np.ndarray:
    b, c, h, w = x.shape
    return x.reshape(b, c, h // k, k, w // k, k).mean((3, 5))


# ---------------------------------------------------------------------- answers


@pytest.mark.parametrize("joint", [False, True])
def test_states_and_output_against_scipy(joint: bool) -> None:
    """Two OptEq branches, each solved by scipy on its own pooled input, fused by numpy."""
    torch.manual_seed(0)
    own = {} if joint else {"solver": TIGHT}
    model = MultiBranch(
        [opteq(**own), opteq(**own)],
        (4, 2),
        joint=joint,
        solver=TIGHT if joint else None,
    )
    model = model.double().eval()
    x = randn(1, 3, 4, 4)
    expected = []
    for branch, k in zip(model.branches, (1, 2), strict=True):
        seen = torch.from_numpy(pool(x.numpy(), k))
        w, u, b = (t.detach() for t in (branch.W.weight, branch.U.weight, branch.U.bias))
        c = F.conv2d(seen, u, b, padding=1)
        shape = (1, 4, *seen.shape[2:])

        def gap(flat: Any, w: Any = w, c: Any = c, shape: Any = shape) -> Any:
            z = torch.from_numpy(flat).reshape(shape)
            hidden = torch.relu(F.conv2d(z, w, padding=1) + c)
            return F.conv_transpose2d(hidden, w, padding=1).numpy().ravel() - flat

        root = scipy.optimize.root(gap, np.zeros(int(np.prod(shape))), tol=1e-13)
        assert root.success
        expected.append(root.x.reshape(shape))
    solution = model.solve(x)
    assert isinstance(solution, BranchSolution)
    for a, b in zip(solution.value, expected, strict=True):
        np.testing.assert_allclose(a.detach().numpy(), b, rtol=1e-8, atol=1e-10)
    fused = (expected[0] + expected[1].repeat(2, 2).repeat(2, 3)) / 2
    np.testing.assert_allclose(model(x).detach().numpy(), fused, rtol=1e-8, atol=1e-10)


def test_joint_and_separate_agree() -> None:
    x = randn(3, 3, 8, 8)
    apart, together = made(solver=TIGHT).eval(), made(joint=True, solver=TIGHT).eval()
    together.load_state_dict(apart.state_dict())
    for a, b in zip(apart.solve(x).value, together.solve(x).value, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)
    grads = []
    for model in (apart, together):
        model(x).square().sum().backward()
        grads.append([p.grad for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_a_joint_solve_tests_once_for_all() -> None:
    x = randn(4, 3, 8, 8)
    apart, together = made().solve(x), made(joint=True).solve(x)
    assert together.stats.syncs < apart.stats.syncs
    assert together.stats.evaluations < apart.stats.evaluations
    assert "one fixed point" in together.choice
    assert apart.stats.evaluations == sum(p.stats.evaluations for p in apart.parts)
    assert torch.equal(apart.stats.steps, torch.stack([p.stats.steps for p in apart.parts]).amax(0))


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize(
    "adjoint",
    [EXACT, eq.Phantom(steps=40, damping=1.0), eq.Unrolled()],
    ids=["implicit", "phantom", "unrolled"],
)
def test_gradients_with_every_adjoint(joint: bool, adjoint: Any) -> None:
    solver = eq.Picard(rtol=1e-13, max_steps=400)
    torch.manual_seed(0)
    both = {"solver": solver, "adjoint": adjoint}
    own, whole = ({}, both) if joint else (both, {})
    layers = [
        OptEq(2, 3, in_channels=2, kernel_size=3, constraint=None, **own),
        GEQ(2, 4, in_channels=2, patch=PATCH, hidden=None, gamma=0.3, constraint=None, **own),
    ]
    with torch.no_grad():
        for layer in layers:
            layer.W.weight.mul_(0.3)
    model = MultiBranch(layers, (4, 2), joint=joint, **whole).double().eval()
    names, values = zip(*model.named_parameters(), strict=True)

    def run(x: Tensor, *values: Tensor) -> Tensor:
        return functional_call(model, dict(zip(names, values, strict=True)), (x,))

    inputs = [t.detach().clone().requires_grad_() for t in (randn(1, 2, 4, 4), *values)]
    assert torch.autograd.gradcheck(run, inputs, atol=1e-5, rtol=1e-4, fast_mode=True)


@given(
    st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=4),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from(["average", "sum", "concatenate"]),
)
@settings(max_examples=30, deadline=None)
def test_split_and_merge_keep_the_mean(scales: list[int], output: int, fuse: Any) -> None:
    """Average pooling and nearest upsampling both keep the mean over pixels of every channel."""
    layers = [opteq() for _ in scales]
    model = MultiBranch(layers, scales, output=output, fuse=fuse)
    x = randn(2, 3, 8, 8)
    parts = model.split(x)
    assert [tuple(p.shape) for p in parts] == [(2, 3, s, s) for s in scales]
    for p in parts:
        torch.testing.assert_close(p.mean((2, 3)), x.mean((2, 3)))
    y = model.merge(parts)
    n = len(scales)
    assert y.shape == (2, 3 * n if fuse == "concatenate" else 3, output, output)
    means = {"average": 1.0, "sum": float(n), "concatenate": 1.0}
    wanted = x.mean((2, 3)) * means[fuse]
    found = y.mean((2, 3))
    torch.testing.assert_close(found, wanted.repeat(1, n) if fuse == "concatenate" else wanted)


def test_every_kind_of_branch() -> None:
    torch.manual_seed(0)
    layers = [
        GEQ(4, 8, patch=PATCH, hidden=4),
        KerDEQ(4, 8, patch=PATCH, hidden=4),
        OptEq(4, 8, kernel_size=3),
        OptEq(8, 4, in_channels=4, kernel_size=3, form="hidden"),
        eq.nn.SigmoidEq(4, 8, kernel_size=3, radius=0.5),
        DEQ(ResidualBlock(4, groups=2)),
        DeepOptEq(4, (4, 4), kernel_size=3),
        MonotoneDEQ(4, kernel_size=3),
    ]
    for joint in (False, True):
        scales = (8, 4, 4, 4, 2, 4, 4, 4)
        model = MultiBranch(copy.deepcopy(layers), scales, joint=joint, output=4)
        y = model(torch.randn(2, 4, 8, 8))
        assert y.shape == (2, 4, 4, 4)
        y.square().sum().backward()
        assert all(p.grad is not None for p in model.parameters())


def test_warm_start_and_options() -> None:
    for joint in (False, True):
        model, x = made(joint, solver=TIGHT).eval(), randn(2, 3, 8, 8)
        cold = model.solve(x)
        warm = model.solve(x, [z.detach() for z in cold.value])
        assert int(warm.stats.steps.max()) < int(cold.stats.steps.max())
        torch.testing.assert_close(model(x, cold.value), model(x), rtol=1e-8, atol=1e-9)
        few = model.solve(x, solver=LAPS)
        assert few.stats.steps.tolist() == [3, 3]
        with pytest.raises(eq.NotConvergedError):
            model.solve(x, solver=eq.Picard(rtol=1e-14, max_steps=2), throw=True)
        with pytest.raises(ValueError, match="a state for each of the 3 branches, got 2"):
            model.solve(x, cold.value[:2])


@pytest.mark.parametrize("joint", [False, True])
def test_batch_mates_and_bad_samples(joint: bool) -> None:
    model, x = made(joint, solver=TIGHT).eval(), randn(3, 3, 8, 8)
    good = model(x).detach()
    torch.testing.assert_close(model(x[1:2])[0], good[1], rtol=1e-8, atol=1e-9)
    x[1, 0, 0, 0] = float("nan")
    with pytest.warns(eq.ConvergenceWarning):
        solution = model.solve(x)
    assert solution.converged.tolist() == [True, False, True]
    with pytest.warns(eq.ConvergenceWarning):
        y = model(x)
    torch.testing.assert_close(y[[0, 2]], good[[0, 2]], rtol=1e-8, atol=1e-9)
    weights = list(model.parameters())
    found = torch.autograd.grad(y[[0, 2]].sum(), weights)
    wanted = torch.autograd.grad(model(x[[0, 2]]).sum(), weights)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


def test_observing() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 1), made().float())
    x = torch.randn(2, 2, 8, 8)
    assert list(eq.nn.equilibrium_layers(model)) == ["1"]
    with eq.nn.observe(model) as seen, eq.nn.observe(model[1].branches[1]) as inside:
        model(x)
    (solution,) = seen.solutions["1"]
    assert isinstance(solution, BranchSolution)
    assert len(solution.value) == 3
    assert not solution.value[0].requires_grad
    assert torch.equal(inside.solutions[""][0].value, solution.value[1])


def test_backward_stats_reach_the_whole() -> None:
    model, x = made(), randn(2, 3, 8, 8)
    solution = model.solve(x)
    assert solution.stats.backward.solves == 0
    model.merge(solution.value).sum().backward()
    assert solution.stats.backward.solves == 3
    assert solution.stats.backward.steps.shape == (2,)


# ---------------------------------------------------------------------- certificates


def test_certificates_compose() -> None:
    model, x = made(solver=eq.Picard(rtol=1e-3)).eval(), randn(2, 3, 8, 8)
    found = eq.certify(model, x)
    assert isinstance(found, CompositeCertificate)
    assert list(found) == ["branch 0", "branch 1", "branch 2"]
    assert found.kinds == (Guarantee.contraction,) * 2
    assert found.rigorous
    for i, (branch, seen) in enumerate(zip(model.branches, model.split(x), strict=True)):
        alone = eq.certify(branch, seen)
        torch.testing.assert_close(found[f"branch {i}"].residual, alone.residual)
    truth = model.solve(x, solver=TIGHT)
    given = model.solve(x)
    errors = torch.stack(
        [(a - b).flatten(1).norm(dim=1) for a, b in zip(given.value, truth.value, strict=True)]
    ).detach()
    assert (errors.norm(dim=0) <= found.error_bound).all()
    output = (model.merge(given.value) - model.merge(truth.value)).flatten(1).norm(dim=1).detach()
    bound = model.output_error(found)
    assert (output <= bound).all()
    assert (bound < 1e3 * output).all()
    again = model.certify(x, given.value)
    torch.testing.assert_close(again.residual, found.residual)
    assert "branch 2" in str(found)


@pytest.mark.parametrize("fuse", ["average", "sum", "concatenate"])
@pytest.mark.parametrize("output", [2, 4, 8])
def test_the_norm_of_the_fusion(fuse: Any, output: int) -> None:
    """The bound for y is attained: pooling and upsampling have the norms that it takes."""
    model = made(solver=TIGHT, output=output).eval()
    model.fuse = fuse
    x = randn(1, 3, 8, 8)
    states = model.solve(x).value
    # Errors that are constant over pixels and alike in all branches add up without loss.
    moved = [z.detach() + 1e-3 for z in states]
    gap = (model.merge(moved) - model.merge(states)).norm().detach()
    sizes = [float((a - b).detach().norm()) for a, b in zip(moved, states, strict=True)]

    class Part(eq.Certificate):
        def __init__(self, size: float) -> None:
            object.__setattr__(self, "kinds", (Guarantee.contraction,))
            object.__setattr__(self, "residual", torch.tensor([size]))
            object.__setattr__(self, "error_bound", torch.tensor([size], dtype=torch.float64))

    whole = CompositeCertificate({str(i): Part(size) for i, size in enumerate(sizes)})
    torch.testing.assert_close(model.output_error(whole)[0], gap, rtol=1e-9, atol=0)


def test_a_branch_that_certifies_nothing() -> None:
    torch.manual_seed(0)
    for joint in (False, True):
        layers = [OptEq(4, 6, kernel_size=3), DEQ(ResidualBlock(4, groups=2))]
        model = MultiBranch(layers, (4, 2), joint=joint)
        found = model.certify(torch.randn(2, 4, 4, 4))
        assert found["branch 0"].unique
        assert found.kinds == (Guarantee.none,) * 2
        assert torch.isinf(model.output_error(found)).all()


# ---------------------------------------------------------------------- the module


@pytest.mark.parametrize("joint", [False, True])
def test_copies(joint: bool) -> None:
    model, x = made(joint).eval(), randn(2, 3, 8, 8)
    expected = model(x)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    fresh = made(joint, seed=3).eval()
    assert not torch.equal(fresh(x), expected)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), fresh):
        assert torch.equal(twin(x), expected)
    with torch.no_grad():
        next(twin.parameters()).add_(1.0)
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("joint", [False, True])
def test_autocast(joint: bool) -> None:
    torch.manual_seed(0)
    layers = [OptEq(4, 6, kernel_size=3), DEQ(ResidualBlock(4, groups=2))]
    model, x = MultiBranch(layers, (8, 4), joint=joint), torch.randn(2, 4, 8, 8)
    expected = model(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model(x)
    scale = float(expected.detach().abs().max())
    torch.testing.assert_close(y.float(), expected, rtol=0, atol=0.2 * scale)
    y.float().square().sum().backward()
    for p in model.parameters():
        assert p.grad is not None
        assert p.grad.dtype == torch.float32
        assert torch.isfinite(p.grad).all()


@pytest.mark.parametrize(
    "joint", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["separate", "joint"]
)
def test_a_fixed_step_layer_compiles_whole(joint: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    both: dict[str, Any] = {"solver": LAPS, "adjoint": eq.Phantom(steps=1)}
    own, whole = ({}, both) if joint else (both, {})
    layers = [OptEq(4, 4, kernel_size=3, **own), OptEq(4, 4, kernel_size=3, **own)]
    model = MultiBranch(layers, (4, 2), joint=joint, **whole)
    twin, x = copy.deepcopy(model), torch.randn(2, 4, 4, 4)
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
    compiled(x).square().sum().backward()
    assert all(p.grad is not None for p in twin.parameters())


@pytest.mark.parametrize("joint", [False, True])
def test_memory_format_compaction_and_shapes(joint: bool) -> None:
    solver = eq.Anderson(rtol=1e-9, compact=True)
    model, x = made(joint, solver=solver).eval(), randn(4, 3, 8, 8)
    x[:2] *= 1e-2
    plain = model(x)
    last = model(x.to(memory_format=torch.channels_last))
    assert last.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(last, plain, rtol=1e-6, atol=1e-7)
    wide = MultiBranch([OptEq(4, 6, kernel_size=3)] * 2, [(4, 8), (2, 4)])
    assert wide(torch.randn(1, 4, 8, 16)).shape == (1, 4, 4, 8)


def test_training_moves_the_branches() -> None:
    model, x = made(joint=True).train(), randn(2, 3, 8, 8)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    model(x)
    moved = [k for k, v in model.state_dict().items() if not torch.equal(v, before[k])]
    assert moved
    assert all(k.endswith(".v") for k in moved)
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = norm

        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            return 0.5 * torch.tanh(self.norm(z) + x)

    for joint in (False, True):
        whole = MultiBranch([DEQ(Block())], (4,), joint=joint)
        count = int(norm.num_batches_tracked)
        whole(torch.randn(3, 4, 4, 4)).sum().backward()
        assert int(norm.num_batches_tracked) == count + 1


@pytest.mark.parametrize("z0", [False, True])
def test_a_joint_solve_splits_monotone_branches(z0: bool) -> None:
    """Their own maps σ(Wz + c) expand here; the splitting that the layer would take contracts."""
    torch.manual_seed(0)
    layers = [MonotoneDEQ(3, kernel_size=3, m=0.5, solver=s) for s in SPLITTINGS]
    for layer in layers:
        layer.W.g.data.mul_(2.0)  # type: ignore[operator]
    apart = MultiBranch(layers, (4, 2)).double()
    joint = MultiBranch(layers, (4, 2), joint=True, solver=PATIENT, adjoint=LONG).double()
    x = randn(2, 3, 4, 4).requires_grad_()
    expected = apart.solve(x)
    found = joint.solve(x, [z.detach() for z in expected.value] if z0 else None)
    for a, b in zip(found.value, expected.value, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    grads = [torch.autograd.grad(joint.merge(s.value).sum(), x)[0] for s in (found, expected)]
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-6)
    if z0:
        assert found.stats.steps.max() <= 3


@pytest.mark.parametrize("scale", [(8, 4), (4, 8), (2, 8)])
def test_scales_that_differ_from_the_output_along_one_axis(scale: tuple[int, int]) -> None:
    model = MultiBranch([opteq(), opteq()], (8, scale))
    z = torch.randn(2, 4, *scale)
    zero = torch.zeros(2, 4, 8, 8)
    expected = z.repeat_interleave(8 // scale[0], 2).repeat_interleave(8 // scale[1], 3) / 2
    torch.testing.assert_close(model.merge((zero, z)), expected)
    assert model(torch.randn(2, 3, 8, 8)).shape == (2, 4, 8, 8)


# ---------------------------------------------------------------------- bad input


def test_errors() -> None:
    with pytest.raises(ValueError, match="got 1 layers and 2 scales"):
        MultiBranch([opteq()], (8, 4))
    with pytest.raises(ValueError, match="at least one"):
        MultiBranch([], ())
    with pytest.raises(TypeError, match=r"layer 1 is a Conv2d; a branch is an equilibrium layer"):
        MultiBranch([opteq(), nn.Conv2d(3, 3, 1)], (8, 4))
    with pytest.raises(ValueError, match=r"scales\[0\]=0\): expected a number of pixels"):
        MultiBranch([opteq()], (0,))
    with pytest.raises(ValueError, match=r"output=\(4, 4, 4\)"):
        MultiBranch([opteq()], (8,), output=(4, 4, 4))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"6 × 6 pixels cannot be pooled or upsampled.*8 × 8"):
        MultiBranch([opteq(), opteq()], (8, 6))
    with pytest.raises(ValueError, match=r"8 × 2 pixels cannot be pooled"):
        MultiBranch([opteq()], [(8, 2)], output=4)
    with pytest.raises(ValueError, match=r"fuse='max'.*'average', 'sum' or 'concatenate'"):
        MultiBranch([opteq()], (8,), fuse="max")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="with joint=True; else each branch has its own"):
        MultiBranch([opteq()], (8,), solver=eq.Picard())
    with pytest.raises(TypeError, match="solver must be a solver object"):
        MultiBranch([opteq()], (8,), joint=True, solver="picard")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="adjoint must be an object"):
        MultiBranch([opteq()], (8,), joint=True, adjoint="ift")  # type: ignore[arg-type]
    model = MultiBranch([opteq(), opteq()], (8, 4))
    with pytest.raises(ValueError, match=r"map of 12 × 12 pixels to the scale 8 × 8.*not factors"):
        model(torch.zeros(1, 3, 12, 12))
    with pytest.raises(ValueError, match=r"got shape \(3, 8, 8\)"):
        model(torch.zeros(3, 8, 8))
    with pytest.raises(TypeError, match="takes a tensor"):
        model(None)  # type: ignore[arg-type]
    uneven = MultiBranch([opteq(), OptEq(5, 6, in_channels=3, kernel_size=3)], (8, 4))
    with pytest.raises(ValueError, match=r"equal channels in all branches, got \[4, 5\]"):
        uneven(torch.randn(1, 3, 8, 8))
    tuples = MultiBranch([MDEQ((8, 8))], (8,))
    with pytest.raises(ValueError, match=r"branch 0 must be a feature map.*got a tuple"):
        tuples(torch.randn(1, 8, 8, 8))

    for joint in (False, True):
        deep = MultiBranch([DeepOptEq(3, (2,), kernel_size=3)], (8,), joint=joint)
        with pytest.raises(ValueError, match="the state of DeepOptEq for x"):
            deep.solve(torch.zeros(1, 3, 8, 8), [torch.zeros(1, 3, 4, 4)])

    class Odd(nn.Module):
        is_equilibrium = True

    with pytest.raises(TypeError, match=r"joint=True needs branches.*got Odd; use joint=False"):
        MultiBranch([Odd()], (8,), joint=True)(torch.zeros(1, 3, 8, 8))


def test_repr() -> None:
    assert "scales=((8, 8), (4, 4), (2, 2))" in repr(made())
    assert "joint" in repr(made(joint=True))


# ---------------------------------------------------------------------- chains


CHAIN_SCALES = (8, 4, 4, 2)


def chain(**options: Any) -> MultiBranch:
    """Four branches of four channels in float64, with norms that have seen some data."""
    torch.manual_seed(0)
    layers = [
        GEQ(4, 6, patch=PATCH, hidden=4, gamma=0.3, **options),
        OptEq(4, 6, kernel_size=3, form="state", **options),
        GEQ(4, 6, patch=PATCH, hidden=4, gamma=0.3, **options),
        GEQ(4, 6, patch=PATCH, hidden=4, gamma=0.3, **options),
    ]
    model = MultiBranch(layers, CHAIN_SCALES, output=4, chain=True).double()
    for norm in model.norms:
        torch.nn.init.normal_(norm.weight)
        torch.nn.init.normal_(norm.bias)
    for _ in range(3):
        model(torch.randn(5, 4, 8, 8, dtype=torch.float64))
    return model.eval()


def chain_by_hand(model: MultiBranch, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """y and the inputs of the branches, written out with torch's own pooling and norms."""
    seen: list[Tensor] = []
    outputs: list[Tensor] = []
    for i, size in enumerate(CHAIN_SCALES):
        own = F.adaptive_avg_pool2d(x, size)
        for earlier in outputs:
            own = own + F.adaptive_avg_pool2d(earlier, size)
        seen.append(own)
        norm = model.norms[i]
        z = model.branches[i](own)
        outputs.append(
            F.batch_norm(z, norm.running_mean, norm.running_var, norm.weight, norm.bias, False)
        )
    moved = [
        F.interpolate(y, size=4) if y.shape[2] < 4 else F.adaptive_avg_pool2d(y, 4) for y in outputs
    ]
    return torch.stack(moved).mean(0), seen


def test_a_chain_against_the_formula() -> None:
    model = chain(solver=TIGHT)
    x = torch.randn(3, 4, 8, 8, dtype=torch.float64, requires_grad=True)
    expected, seen = chain_by_hand(model, x)
    torch.testing.assert_close(model(x), expected)
    whole = torch.autograd.grad(model(x).square().sum(), x)[0]
    torch.testing.assert_close(whole, torch.autograd.grad(expected.square().sum(), x)[0])
    found = model.certify(x.detach())
    for i, own in enumerate(seen):
        alone = eq.certify(model.branches[i], own.detach())  # type: ignore[arg-type]
        torch.testing.assert_close(
            found[f"branch {i}"].error_bound,  # type: ignore[attr-defined]
            alone.error_bound,
            rtol=0.1,
            atol=1e-12,
        )


def test_the_error_of_a_chain_is_bounded() -> None:
    model = chain(solver=eq.Picard(rtol=1e-2))
    tight = copy.deepcopy(model)
    for branch in tight.branches:
        branch.solver = TIGHT  # type: ignore[assignment]
    x = torch.randn(4, 4, 8, 8, dtype=torch.float64)
    found = model.certify(x)
    assert found.unique
    bound = model.output_error(found)
    error = (model(x) - tight(x)).flatten(1).norm(dim=1).detach()
    assert (error > 1e-6).all()
    assert (error <= bound).all()
    # Errors of early branches pass the later ones: without that the bound would be too small.
    alone = MultiBranch(list(model.branches), CHAIN_SCALES, output=4).double()
    assert (bound > alone.output_error(found)).all()


def test_norms_see_a_batch_once() -> None:
    model = chain().train()
    before = [int(norm.num_batches_tracked) for norm in model.norms]
    model(torch.randn(2, 4, 8, 8, dtype=torch.float64))
    assert [int(norm.num_batches_tracked) for norm in model.norms] == [n + 1 for n in before]


@pytest.mark.slow
def test_a_chain_compiles_whole() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    fixed: dict[str, Any] = {
        "solver": eq.Picard(rtol=0.0, max_steps=3),
        "adjoint": eq.Phantom(steps=1),
    }
    layers = [OptEq(4, 4, kernel_size=3, **fixed), OptEq(4, 4, kernel_size=3, **fixed)]
    model = MultiBranch(layers, (4, 2), chain=True).eval()
    x = torch.randn(2, 4, 4, 4)
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)


def test_errors_of_chains() -> None:
    layers = [OptEq(4, 4, kernel_size=3), OptEq(4, 4, kernel_size=3)]
    with pytest.raises(ValueError, match="chain=True, joint=True"):
        MultiBranch(layers, (4, 2), chain=True, joint=True)
    with pytest.raises(TypeError, match="a DEQ does not say the channels of its state"):
        MultiBranch([DEQ(ResidualBlock(8, 8))], (4,), chain=True)


@pytest.mark.parametrize("name", ["geq_cifar_5m", "mopteq_cifar_5m", "mopteq_sigmoid_cifar_5m"])
def test_chains_by_name(name: str) -> None:
    """A network in both readings: a chain has one batch norm a branch more, and trains."""
    options: dict[str, Any] = {"channels": 16, "mids": (8, 8, 16), "scales": (1, 2, 2)}
    if name.startswith("geq"):
        options["hidden"] = 8
    torch.manual_seed(0)
    model = eq.models.create(name, image_size=8, reading="chain", **options)
    parallel = eq.models.create(name, image_size=8, reading="parallel", **options)
    count = [sum(p.numel() for p in m.parameters()) for m in (model, parallel)]
    assert count[0] - count[1] == 3 * 2 * 16
    model(torch.randn(4, 3, 8, 8)).square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


# ---------------------------------------------------------------------- one Solution out of several


def part(
    codes: list[int], steps: list[int], residual: list[float], choice: str = ""
) -> Solution[Tensor]:
    r = torch.tensor(residual)
    stats = Stats(torch.tensor(steps, dtype=torch.int32), r, r / 10, 7, 2)
    value = torch.ones(len(codes), 2, requires_grad=True) * 2
    return Solution(value, torch.tensor(codes, dtype=torch.int8), stats, choice)


def test_numbers_of_a_branch_solution() -> None:
    a = part([0, 0, 2, 4, 0], [3, 4, 5, 6, 7], [3.0, 0.0, 1.0, 1.0, 1.0], "Picard")
    b = part([0, 1, 3, 2, 4], [9, 1, 1, 1, 1], [4.0, 0.5, math.nan, 1.0, 1.0])
    found = combine([a, b])
    assert found.result.tolist() == [0, 1, 3, 2, 4]
    assert found.result.dtype == torch.int8
    assert found.stats.steps.tolist() == [9, 4, 5, 6, 7]
    torch.testing.assert_close(found.stats.residual[:2], torch.tensor([5.0, 0.5]))
    assert math.isnan(float(found.stats.residual[2]))
    assert float(found.stats.relative[0]) == pytest.approx(0.4)
    assert (found.stats.evaluations, found.stats.syncs) == (14, 4)
    assert found.choice == "0: Picard"
    assert found.counts()[Result.converged] == 1
    assert "1 converged" in found.summary()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_worst_code_of_every_pair(order: tuple[int, int]) -> None:
    ranks = [0, 1, 4, 2, 3]  # converged, max_steps, stagnated, diverged, nonfinite
    for i, good in enumerate(ranks):
        for bad in ranks[i:]:
            pair = [part([good], [1], [1.0]), part([bad], [1], [1.0])]
            assert combine([pair[k] for k in order]).result.tolist() == [bad]


def test_backward_numbers_are_read_when_asked() -> None:
    parts = [part([0], [1], [1.0]), part([0], [1], [1.0])]
    found = combine(parts).stats.backward
    assert isinstance(found, BackwardStats)
    assert (found.solves, found.unconverged, found.masked) == (0, 0, 0)
    assert found.steps is None
    for i, one in enumerate(parts):
        one.stats.backward.solves = 1
        one.stats.backward.unconverged = i
        one.stats.backward.steps = torch.tensor([3 + i])
        one.stats.backward.residual = torch.tensor([0.5 - i / 4])
    assert (found.solves, found.unconverged) == (2, 1)
    assert found.steps.tolist() == [4]
    assert found.residual.tolist() == [0.5]
    parts[0].stats.backward.masked = 2
    assert found.masked == 2
    parts[1].stats.backward.masked = -1
    assert found.masked == -1
    assert copy.deepcopy(found).solves == 2


def test_a_branch_solution_detaches() -> None:
    found = combine([part([0], [1], [1.0]), part([0], [1], [1.0])])
    assert all(z.requires_grad for z in found.value)
    cut = found.detach()
    assert isinstance(cut, BranchSolution)
    assert not any(z.requires_grad for z in (*cut.value, *(p.value for p in cut.parts)))
