"""MultiBranch: branches at their scales, solved apart or as one, fused, certified."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import equilibria as eq
from equilibria.certify import CompositeCertificate, Guarantee
from equilibria.engine.result import BackwardStats
from equilibria.nn.multi_branch import combine
from tests.certify.test_map_certificate import certificate
from tests.contracts.layer_contract import EXACT, TIGHT
from tests.nn.checks import (
    check_autocast,
    check_bad_sample,
    check_compiles,
    check_copies,
)
from tests.problems.test_operators import randn

PATCH = eq.Patches(channels=2, size=2)
LAPS = eq.Picard(rtol=0.0, max_steps=3)


def opteq(**options: Any) -> eq.nn.OptEq:
    return eq.nn.OptEq(4, 6, in_channels=3, kernel_size=3, **options)


def geq(**options: Any) -> eq.nn.GEQ:
    return eq.nn.GEQ(4, 6, in_channels=3, patch=PATCH, hidden=4, gamma=0.3, **options)


def made(*, seed: int = 0, output: Any = None, **options: Any) -> eq.nn.MultiBranch:
    """An OptEq at 8 pixels and two GEQs at 4 and 2, in float64."""
    torch.manual_seed(seed)
    layers = [opteq(**options), geq(**options), geq(**options)]
    return eq.nn.MultiBranch(layers, (8, 4, 2), output=output).double()


# ---------------------------------------------------------------------- answers


CHAIN_SCALES = (8, 4, 4, 2)


def chain(*, chain: bool = True, **options: Any) -> eq.nn.MultiBranch:
    """Four branches of four channels in float64, with norms that have seen some data."""
    torch.manual_seed(0)
    layers = [
        eq.nn.GEQ(4, 6, patch=PATCH, hidden=4, gamma=0.3, **options),
        eq.nn.OptEq(4, 6, kernel_size=3, form="state", **options),
        eq.nn.GEQ(4, 6, patch=PATCH, hidden=4, gamma=0.3, **options),
        eq.nn.GEQ(4, 6, patch=PATCH, hidden=4, gamma=0.3, **options),
    ]
    model = eq.nn.MultiBranch(layers, CHAIN_SCALES, output=4, chain=chain).double()
    if chain:
        for norm in model.norms:
            torch.nn.init.normal_(norm.weight)
            torch.nn.init.normal_(norm.bias)
        for _ in range(3):
            model(torch.randn(5, 4, 8, 8, dtype=torch.float64))
    return model.eval()


def by_hand(model: eq.nn.MultiBranch, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """y and the inputs of the branches, written out with torch's own pooling and norms."""
    seen: list[Tensor] = []
    outputs: list[Tensor] = []
    for i, size in enumerate(CHAIN_SCALES):
        own = F.adaptive_avg_pool2d(x, size)
        for earlier in outputs if model.chain else []:
            own = own + F.adaptive_avg_pool2d(earlier, size)
        seen.append(own)
        z = model.branches[i](own)
        if model.chain:
            norm = model.norms[i]
            z = F.batch_norm(z, norm.running_mean, norm.running_var, norm.weight, norm.bias, False)
        outputs.append(z)
    moved = [
        F.interpolate(y, size=4) if y.shape[2] < 4 else F.adaptive_avg_pool2d(y, 4) for y in outputs
    ]
    return torch.stack(moved).mean(0), seen


@pytest.mark.parametrize("chained", [False, True])
def test_branches_against_the_formula(chained: bool) -> None:
    model = chain(chain=chained, solver=TIGHT, adjoint=EXACT)
    x = torch.randn(3, 4, 8, 8, dtype=torch.float64, requires_grad=True)
    expected, seen = by_hand(model, x)
    torch.testing.assert_close(model(x), expected)
    leaves = [x, *model.parameters()]
    whole = torch.autograd.grad(model(x).square().sum(), leaves)
    for a, b in zip(whole, torch.autograd.grad(expected.square().sum(), leaves), strict=True):
        torch.testing.assert_close(a, b)
    found = model.certify(x.detach())
    for i, own in enumerate(seen):
        alone = eq.certify(model.branches[i], own.detach())  # type: ignore[arg-type]
        torch.testing.assert_close(
            found[f"branch {i}"].error_bound,  # type: ignore[attr-defined]
            alone.error_bound,
            rtol=0.1,
            atol=1e-12,
        )


@given(
    st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=4),
    st.sampled_from([1, 2, 4, 8]),
)
@settings(max_examples=10, deadline=None)
def test_split_and_merge_keep_the_mean(scales: list[int], output: int) -> None:
    """Average pooling and nearest upsampling both keep the mean over pixels of every channel."""
    model = eq.nn.MultiBranch([opteq() for _ in scales], scales, output=output)
    x = randn(2, 3, 8, 8)
    parts = model.split(x)
    assert [tuple(p.shape) for p in parts] == [(2, 3, s, s) for s in scales]
    y = model.merge(parts)
    assert y.shape == (2, 3, output, output)
    for t in (*parts, y):
        torch.testing.assert_close(t.mean((2, 3)), x.mean((2, 3)))


def test_every_kind_of_branch() -> None:
    torch.manual_seed(0)
    layers = [
        eq.nn.GEQ(4, 8, patch=PATCH, hidden=4),
        eq.nn.KerDEQ(4, 8, patch=PATCH, hidden=4),
        eq.nn.OptEq(4, 8, kernel_size=3),
        eq.nn.OptEq(8, 4, in_channels=4, kernel_size=3, form="hidden"),
        eq.nn.SigmoidEq(4, 8, kernel_size=3, radius=0.5),
        eq.nn.DEQ(eq.nn.ResidualBlock(4, groups=2)),
        eq.nn.DeepOptEq(4, (4, 4), kernel_size=3),
        eq.nn.MonotoneDEQ(4, kernel_size=3),
    ]
    model = eq.nn.MultiBranch(layers, (8, 4, 4, 4, 2, 4, 4, 4), output=4)
    y = model(torch.randn(2, 4, 8, 8))
    assert y.shape == (2, 4, 4, 4)
    y.square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_warm_start_and_options() -> None:
    model, x = made(solver=TIGHT).eval(), randn(2, 3, 8, 8)
    cold = model.solve(x)
    warm = model.solve(x, [z.detach() for z in cold.value])
    assert int(warm.stats.steps.max()) < int(cold.stats.steps.max())
    torch.testing.assert_close(model(x, cold.value), model(x), rtol=1e-8, atol=1e-9)
    assert model.solve(x, solver=LAPS).stats.steps.tolist() == [3, 3]
    with pytest.raises(eq.NotConvergedError):
        model.solve(x, solver=eq.Picard(rtol=1e-14, max_steps=2), throw=True)
    with pytest.raises(ValueError, match="a state for each of the 3 branches, got 2"):
        model.solve(x, cold.value[:2])


def test_observing() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 1), made().float())
    x = torch.randn(2, 2, 8, 8)
    assert list(eq.nn.equilibrium_layers(model)) == ["1"]
    with eq.nn.observe(model) as seen, eq.nn.observe(model[1].branches[1]) as inside:
        model(x)
    (solution,) = seen.solutions["1"]
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


@pytest.mark.parametrize("output", [2, 4, 8])
def test_the_norm_of_the_average(output: int) -> None:
    """The bound for y is attained: pooling and upsampling have the norms that it takes."""
    model = made(solver=TIGHT, output=output).eval()
    states = model.solve(randn(1, 3, 8, 8)).value
    # Errors that are constant over pixels and alike in all branches add up without loss.
    moved = [z.detach() + 1e-3 for z in states]
    gap = (model.merge(moved) - model.merge(states)).norm().detach()
    sizes = [float((a - b).detach().norm()) for a, b in zip(moved, states, strict=True)]
    parts = {str(i): certificate([Guarantee.contraction], [s], [s]) for i, s in enumerate(sizes)}
    found = model.output_error(CompositeCertificate(parts))
    torch.testing.assert_close(found[0], gap, rtol=1e-9, atol=0)


def test_a_branch_that_certifies_nothing() -> None:
    torch.manual_seed(0)
    model = eq.nn.MultiBranch(
        [eq.nn.OptEq(4, 6, kernel_size=3), eq.nn.DEQ(eq.nn.ResidualBlock(4, groups=2))], (4, 2)
    )
    found = model.certify(torch.randn(2, 4, 4, 4))
    assert found["branch 0"].unique
    assert found.kinds == (Guarantee.none,) * 2
    assert torch.isinf(model.output_error(found)).all()


# ---------------------------------------------------------------------- the module


def test_it_is_a_module_like_any_other() -> None:
    check_copies(made, randn(2, 3, 8, 8))
    check_bad_sample(made(solver=TIGHT).eval(), randn(3, 3, 8, 8))
    layers = [eq.nn.OptEq(4, 6, kernel_size=3), eq.nn.DEQ(eq.nn.ResidualBlock(4, groups=2))]
    check_autocast(eq.nn.MultiBranch(layers, (8, 4)), torch.randn(2, 4, 8, 8))


@pytest.mark.parametrize("chain", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_fixed_step_layer_compiles_whole(chain: bool) -> None:
    torch.manual_seed(0)
    fixed: dict[str, Any] = {"solver": LAPS, "adjoint": eq.Phantom(steps=1)}
    layers = [eq.nn.OptEq(4, 4, kernel_size=3, **fixed), eq.nn.OptEq(4, 4, kernel_size=3, **fixed)]
    model = eq.nn.MultiBranch(layers, (4, 2), chain=chain).train(not chain)
    check_compiles(model, torch.randn(2, 4, 4, 4))


def test_memory_format_compaction_and_shapes() -> None:
    solver = eq.Anderson(rtol=1e-9, compact=True)
    model, x = made(solver=solver).eval(), randn(4, 3, 8, 8)
    x[:2] *= 1e-2
    last = model(x.to(memory_format=torch.channels_last))
    assert last.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(last, model(x), rtol=1e-6, atol=1e-7)
    wide = eq.nn.MultiBranch([eq.nn.OptEq(4, 6, kernel_size=3)] * 2, [(4, 8), (2, 4)])
    assert wide(torch.randn(1, 4, 8, 16)).shape == (1, 4, 4, 8)


@pytest.mark.parametrize("scale", [(8, 4), (4, 8), (2, 8)])
def test_scales_that_differ_from_the_output_along_one_axis(scale: tuple[int, int]) -> None:
    model = eq.nn.MultiBranch([opteq(), opteq()], (8, scale))
    z = torch.randn(2, 4, *scale)
    zero = torch.zeros(2, 4, 8, 8)
    expected = z.repeat_interleave(8 // scale[0], 2).repeat_interleave(8 // scale[1], 3) / 2
    torch.testing.assert_close(model.merge((zero, z)), expected)
    assert model(torch.randn(2, 3, 8, 8)).shape == (2, 4, 8, 8)


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("layers", "scales", "options", "error", "message"),
    [
        ([opteq()], (8, 4), {}, ValueError, "got 1 layers and 2 scales"),
        ([], (), {}, ValueError, "at least one"),
        ([opteq(), nn.Conv2d(3, 3, 1)], (8, 4), {}, TypeError, "layer 1 is a Conv2d; a branch is"),
        ([opteq()], (0,), {}, ValueError, r"scales\[0\]=0\): expected a number of pixels"),
        ([opteq()], (8,), {"output": (4, 4, 4)}, ValueError, r"output=\(4, 4, 4\)"),
        ([opteq(), opteq()], (8, 6), {}, ValueError, r"6 × 6 pixels cannot be pooled.*8 × 8"),
        ([opteq()], [(8, 2)], {"output": 4}, ValueError, "8 × 2 pixels cannot be pooled"),
        # Both fit the output, and a sum cannot go from one to the other.
        *(
            ([opteq(), opteq()], sizes, {"output": 24, "chain": True}, ValueError, "next branch of")
            for sizes in ((8, 12), (12, 8), ((8, 24), (24, 8)))
        ),
        (
            [eq.nn.DEQ(eq.nn.ResidualBlock(8, 8))],
            (4,),
            {"chain": True},
            TypeError,
            "a DEQ does not say the channels of its state",
        ),
    ],
)
def test_bad_options(
    layers: Any, scales: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        eq.nn.MultiBranch(layers, scales, **options)


@pytest.mark.parametrize(
    ("layers", "x", "error", "message"),
    [
        (
            [opteq()],
            torch.zeros(1, 3, 12, 12),
            ValueError,
            r"12 × 12 pixels to .* 8 × 8.*not factors",
        ),
        ([opteq()], torch.zeros(3, 8, 8), ValueError, r"got shape \(3, 8, 8\)"),
        ([opteq()], None, TypeError, "takes a tensor"),
        (
            [opteq(), eq.nn.OptEq(5, 6, in_channels=3, kernel_size=3)],
            torch.randn(1, 3, 8, 8),
            ValueError,
            r"equal channels in all branches, got \[4, 5\]",
        ),
        ([eq.nn.MDEQ((8, 8))], torch.randn(1, 8, 8, 8), ValueError, "feature map.*got a tuple"),
    ],
)
def test_bad_inputs(layers: Any, x: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        eq.nn.MultiBranch(layers, (8,) * len(layers))(x)


# ---------------------------------------------------------------------- chains


@pytest.mark.parametrize("chained", [False, True])
def test_the_inputs_of_the_branches(chained: bool) -> None:
    model = chain(chain=chained, solver=TIGHT)
    x = torch.randn(3, 4, 8, 8, dtype=torch.float64)
    with torch.no_grad():
        _, expected = by_hand(model, x)
    before = copy.deepcopy(model.train().state_dict())
    for found, wanted in zip(model.inputs(x), expected, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-8, rtol=1e-8)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


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
    alone = eq.nn.MultiBranch(list(model.branches), CHAIN_SCALES, output=4).double()
    assert (bound > alone.output_error(found)).all()


def test_norms_see_a_batch_once() -> None:
    model = chain().train()
    before = [int(norm.num_batches_tracked) for norm in model.norms]
    model(torch.randn(2, 4, 8, 8, dtype=torch.float64))
    assert [int(norm.num_batches_tracked) for norm in model.norms] == [n + 1 for n in before]


# ---------------------------------------------------------------------- one Solution out of several


def part(
    codes: list[int], steps: list[int], residual: list[float], choice: str = ""
) -> eq.Solution[Tensor]:
    r = torch.tensor(residual)
    stats = eq.Stats(torch.tensor(steps, dtype=torch.int32), r, r / 10, 7, 2)
    value = torch.ones(len(codes), 2, requires_grad=True) * 2
    return eq.Solution(value, torch.tensor(codes, dtype=torch.int8), stats, choice)


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
    assert found.counts()[eq.Result.converged] == 1
    assert "1 converged" in found.summary()
    cut = found.detach()
    assert isinstance(cut, eq.nn.BranchSolution)
    assert not any(z.requires_grad for z in (*cut.value, *(p.value for p in cut.parts)))


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
