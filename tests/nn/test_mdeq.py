"""MDEQ: the map against its formula, the fixed point against scipy, gradients, dropout."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import equilibria as eq
from equilibria.nn import MDEQ, NormBounded, WeightNormalized
from tests.contracts.layer_contract import EXACT, TIGHT
from tests.problems.test_operators import randn

PICARD = eq.Picard(rtol=1e-13, max_steps=600)


def made(channels: tuple[int, ...] = (4, 4), seed: int = 0, **options: Any) -> MDEQ:
    torch.manual_seed(seed)
    layer = MDEQ(channels, **{"groups": 2, "expansion": 2, **options})
    with torch.no_grad():
        for p in layer.parameters():
            p.mul_(1 + 0.1 * torch.randn(p.shape)).add_(0.02 * torch.randn(p.shape))
    return layer.double()


def kernel(state: dict[str, Tensor], name: str) -> Tensor:
    """A weight-normalized kernel g·V/‖V‖ from the state dict, or a plain one."""
    if f"{name}.weight" in state:
        return state[f"{name}.weight"]
    g, v = (state[f"{name}.parametrizations.weight.original{i}"] for i in (0, 1))
    return g * v / v.flatten(1).norm(dim=1).view(-1, 1, 1, 1)


def reference(layer: MDEQ, z: list[Tensor], x: Tensor, groups: int = 2) -> list[Tensor]:
    """The map of the paper on the numbers of the state dict, written for up to three scales."""
    state = layer.state_dict()

    def norm(t: Tensor, name: str, count: int = groups) -> Tensor:
        return F.group_norm(t, count, state.get(f"{name}.weight"), state.get(f"{name}.bias"))

    h = []
    for i, part in enumerate(z):
        k = 0
        while any(name.startswith(f"scales.{i}.{k}.") for name in state):
            at = f"scales.{i}.{k}"
            first, second = (kernel(state, f"{at}.conv{n}") for n in (1, 2))
            out = torch.relu(norm(F.conv2d(part, first, padding="same"), f"{at}.norm1"))
            out = F.conv2d(out, second, padding="same")
            out = norm(out + (x if i == k == 0 else 0), f"{at}.norm2")
            part = norm(torch.relu(out + part), f"{at}.norm3")
            k += 1
        h.append(part)
    made = []
    for i in range(len(z)):
        total = h[i]
        for j in range(len(z)):
            at = f"fusion.exchange.{i}.{j}"
            if j < i:  # finer: i − j strided convolutions, ReLU in between
                t = h[j]
                for level in range(i - j):
                    first = 3 * level
                    t = F.conv2d(t, state[f"{at}.net.{first}.weight"], stride=2, padding=1)
                    t = norm(t, f"{at}.net.{first + 1}")
                    t = torch.relu(t) if level < i - j - 1 else t
                total = total + t
            if j > i:  # coarser: 1 × 1, then each pixel 2^(j − i) times in both directions
                t = norm(F.conv2d(h[j], state[f"{at}.conv.weight"]), f"{at}.norm")
                k = 2 ** (j - i)
                total = total + t.repeat_interleave(k, 2).repeat_interleave(k, 3)
        mixed = F.conv2d(torch.relu(total), kernel(state, f"fusion.mix.{i}"))
        made.append(norm(mixed, f"fusion.norm.{i}", max(1, groups // 2)))
    return made


@pytest.mark.parametrize("channels", [(4, 4), (4, 6, 8)])
@pytest.mark.parametrize("constraint", [WeightNormalized(), None], ids=["normalized", "free"])
def test_the_map_is_the_formula(channels: tuple[int, ...], constraint: Any) -> None:
    layer = made(channels, constraint=constraint)
    x = randn(2, 4, 8, 8)
    z = [randn(2, c, 8 >> i, 8 >> i) for i, c in enumerate(channels)]
    for a, b in zip(layer.step(tuple(z), x, ()), reference(layer, z, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    for a, b in zip(layer.bound_step()(tuple(z), x, ()), reference(layer, z, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_fixed_points_agree_with_scipy() -> None:
    layer, x = made(solver=TIGHT), randn(1, 4, 4, 4)
    shapes = [(1, 4, 4, 4), (1, 4, 2, 2)]

    def split(flat: Any) -> list[Tensor]:
        parts = np.split(flat, [64])
        return [torch.from_numpy(p).reshape(s) for p, s in zip(parts, shapes, strict=True)]

    def gap(flat: Any) -> Any:
        with torch.no_grad():
            out = reference(layer, split(flat), x)
        return np.concatenate([t.numpy().ravel() for t in out]) - flat

    root = scipy.optimize.root(gap, np.zeros(80), tol=1e-12)
    assert root.success
    for a, b in zip(layer(x), split(root.x), strict=True):
        torch.testing.assert_close(a.detach(), b, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    "adjoint",
    [EXACT, eq.Phantom(steps=50, damping=1.0), eq.Unrolled()],
    ids=["implicit", "phantom", "unrolled"],
)
def test_gradients_with_every_adjoint(adjoint: Any) -> None:
    solver = eq.Picard(rtol=1e-11, max_steps=300)
    layer, x = made(solver=solver, adjoint=adjoint), randn(1, 4, 4, 4)
    assert bool(layer.solve(x).converged.all())
    names, values = zip(*layer.named_parameters(), strict=True)

    def run(x: Tensor, *values: Tensor) -> Any:
        return functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    inputs = [t.detach().clone().requires_grad_() for t in (x, *values)]
    assert torch.autograd.gradcheck(run, inputs, atol=1e-5, rtol=1e-4, fast_mode=True)


def test_every_parameter_trains_and_the_answer_converges_untrained() -> None:
    """The gains of ``calm``: without them no solver finds a fixed point at the start."""
    x = torch.randn(4, 16, 8, 8, generator=torch.Generator().manual_seed(0)).relu()
    torch.manual_seed(0)
    layer = MDEQ((16, 16, 32))
    solution = layer.solve(x)
    assert bool(solution.converged.all())
    assert [tuple(z.shape) for z in solution.value] == [
        (4, 16, 8, 8),
        (4, 16, 4, 4),
        (4, 32, 2, 2),
    ]
    sum(z.pow(3).mean() for z in layer(x)).backward()
    for name, p in layer.named_parameters():
        assert p.grad is not None, name
        assert p.grad.abs().max() > 0, name
    torch.manual_seed(0)
    with pytest.warns(eq.ConvergenceWarning):
        restless = MDEQ((16, 16, 32), calm=1.0).solve(x)
    assert not bool(restless.converged.any())
    assert (layer.spectral_radius(x) < 1).all()


def test_a_single_scale_has_no_fusion() -> None:
    single = made((4,), solver=TIGHT)
    x = randn(2, 4, 4, 4)
    (found,) = single(x)
    state = single.state_dict()
    first, second = (kernel(state, f"scales.0.0.conv{i}") for i in (1, 2))
    norms = [
        (state[f"scales.0.0.norm{i}.weight"], state[f"scales.0.0.norm{i}.bias"]) for i in (1, 2, 3)
    ]
    out = torch.relu(F.group_norm(F.conv2d(found, first, padding=1), 2, *norms[0]))
    out = F.group_norm(F.conv2d(out, second, padding=1) + x, 2, *norms[1])
    out = F.group_norm(torch.relu(out + found), 2, *norms[2])
    torch.testing.assert_close(out, found, rtol=0, atol=1e-10)
    assert single.fusion is None


def test_more_blocks_and_another_kernel() -> None:
    layer = made((4, 4), blocks=(2, 1), kernel_size=5)
    x = randn(1, 4, 4, 4)
    assert len(layer.weights()) == 2 * 3 + 2
    z = [randn(1, 4, 4, 4), randn(1, 4, 2, 2)]
    for a, b in zip(layer.step(tuple(z), x, ()), reference(layer, z, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    assert MDEQ((4, 4), groups=2, constraint=NormBounded(bound=0.5)).weights()[0].isfinite().all()


def test_repeat_is_picard() -> None:
    layer, x = made(), randn(2, 4, 4, 4)
    expected = layer.solve(x, solver=eq.Picard(rtol=0.0, max_steps=4), adjoint=eq.Unrolled()).value
    z: list[Tensor] = [torch.zeros(2, 4, 4, 4).double(), torch.zeros(2, 4, 2, 2).double()]
    for _ in range(4):
        z = reference(layer, z, x)
    for a, b, c in zip(layer.repeat(x, 4), expected, z, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a.detach(), c, rtol=1e-9, atol=1e-9)


# ---------------------------------------------------------------------- dropout


def test_dropout_has_one_mask_a_solve() -> None:
    layer, x = made(dropout=0.5, solver=PICARD), randn(3, 4, 4, 4)
    torch.manual_seed(1)
    solution = layer.solve(x)
    assert bool(solution.converged.all())  # a new mask at each evaluation would never settle
    torch.manual_seed(1)
    _, masks = layer.inject(x)
    assert [tuple(m.shape) for m in masks] == [(3, 4, 1, 1), (3, 4, 1, 1)]
    assert set(torch.cat([m.flatten() for m in masks]).tolist()) == {0.0, 2.0}
    image = layer.step(solution.value, x, masks)
    for a, b in zip(image, solution.value, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
    again = layer(x)
    assert not torch.equal(again[0], solution.value[0])
    layer.eval()
    assert torch.equal(layer(x)[0], layer(x)[0])
    assert layer.inject(x)[1] == ()


def test_the_penalty_takes_the_masks_of_the_solve() -> None:
    layer, x = made(dropout=0.5, jacobian_weight=1.0), randn(2, 4, 4, 4)
    torch.manual_seed(3)
    z, penalty = layer.forward_with_penalty(x)
    torch.manual_seed(3)
    _, masks = layer.inject(x)  # the first random numbers of that forward
    expected = eq.jacobian_penalty(layer.step, z, (x, masks))
    torch.testing.assert_close(penalty, expected)


# ---------------------------------------------------------------------- the module


def test_batch_mates_and_bad_samples() -> None:
    layer, x = made(solver=TIGHT).eval(), randn(3, 4, 4, 4)
    together = layer(x)
    alone = layer(x[1:2])
    torch.testing.assert_close(alone[1][0], together[1][1], rtol=1e-8, atol=1e-9)
    x[1, 0, 0, 0] = float("nan")
    with pytest.warns(eq.ConvergenceWarning):
        solution = layer.solve(x)
    assert solution.converged.tolist() == [True, False, True]
    torch.testing.assert_close(solution.value[0][2], together[0][2], rtol=1e-8, atol=1e-9)
    weights = list(layer.parameters())
    found = torch.autograd.grad(sum(z[[0, 2]].sum() for z in solution.value), weights)
    wanted = torch.autograd.grad(sum(z.sum() for z in layer(x[[0, 2]])), weights)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


def test_copies() -> None:
    layer, x = made().eval(), randn(2, 4, 4, 4)
    expected = layer(x)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    fresh = made(seed=4).eval()
    assert not torch.equal(fresh(x)[0], expected[0])
    fresh.load_state_dict(torch.load(file, weights_only=True))
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), fresh):
        for a, b in zip(twin(x), expected, strict=True):
            assert torch.equal(a, b)
    with torch.no_grad():
        next(twin.parameters()).add_(1.0)
    assert torch.equal(layer(x)[0], expected[0])


@pytest.mark.parametrize("training", [True, False])
def test_autocast(training: bool) -> None:
    torch.manual_seed(0)
    layer, x = MDEQ((16, 16)).train(training), torch.randn(2, 16, 8, 8)
    expected = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        solution = layer.solve(x)
    assert bool(solution.converged.all())
    for z, known in zip(solution.value, expected, strict=True):
        assert z.dtype == torch.bfloat16
        scale = float(known.detach().abs().max())
        torch.testing.assert_close(z.float(), known, rtol=0, atol=0.2 * scale)
    sum(z.float().square().sum() for z in solution.value).backward()
    for name, p in layer.named_parameters():
        assert p.grad is not None, name
        assert p.grad.dtype == torch.float32
        assert torch.isfinite(p.grad).all(), name


def test_a_fixed_step_layer_compiles_whole() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    options = {"solver": eq.Picard(rtol=0.0, max_steps=2), "adjoint": eq.Phantom(steps=1)}
    layer = MDEQ((4, 4), groups=2, **options)  # type: ignore[arg-type]
    twin, x = copy.deepcopy(layer), torch.randn(2, 4, 4, 4)
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)
    for a, b in zip(compiled(x), layer(x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    sum(z.square().sum() for z in compiled(x)).backward()
    assert all(p.grad is not None for p in twin.parameters())


def test_memory_format_and_compaction() -> None:
    layer, x = made(solver=eq.Anderson(rtol=1e-10, compact=True)).eval(), randn(4, 4, 8, 8)
    plain = layer(x)
    last = layer(x.to(memory_format=torch.channels_last))
    for a, b in zip(last, plain, strict=True):
        assert a.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_it_is_observed_and_trains() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), MDEQ((8, 8), groups=4))
    x, target = torch.randn(8, 3, 4, 4), torch.randn(8, 8, 2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    with eq.nn.observe(model) as seen:
        for _ in range(12):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x)[1], target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < 0.85 * losses[0]
    assert len(seen.solutions["1"]) == 12


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"groups=8 .* must divide channels\[1\]=12"):
        MDEQ((16, 12))
    with pytest.raises(ValueError, match=r"expansion=0.*at least 1"):
        MDEQ((8, 8), expansion=0)
    with pytest.raises(ValueError, match="odd kernel size"):
        MDEQ((8, 8), kernel_size=2)
    with pytest.raises(ValueError, match=r"blocks=\(1,\)\): expected 2 entries"):
        MDEQ((8, 8), blocks=(1,))
    with pytest.raises(TypeError, match=r"channels=8\): expected a sequence"):
        MDEQ(8)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"dropout=1.*out of range"):
        MDEQ((8, 8), dropout=1.0)
    with pytest.raises(ValueError, match=r"calm=0.2\): there are no gains; use calm=1.0"):
        MDEQ((8, 8), affine=False)
    with pytest.raises(ValueError, match=r"calm=0.*out of range"):
        MDEQ((8, 8), calm=0.0)
    layer = MDEQ((8, 8, 8))
    with pytest.raises(ValueError, match=r"multiples of 4, got \(6, 8\)"):
        layer(torch.zeros(1, 8, 6, 8))
    with pytest.raises(ValueError, match=r"takes x \[B, 8, H, W\], got shape \(1, 4, 8, 8\)"):
        layer(torch.zeros(1, 4, 8, 8))
    with pytest.raises(TypeError, match="takes a tensor"):
        layer(None)
    with pytest.raises(TypeError, match="floating-point"):
        layer(torch.zeros(1, 8, 8, 8).long())
    with pytest.raises(TypeError, match=r"weights of torch.float32 and got x of torch.float64"):
        layer(torch.zeros(1, 8, 8, 8).double())
    with pytest.raises(ValueError, match=r"lives on cpu and got x on meta"):
        layer(torch.zeros(1, 8, 8, 8, device="meta"))


def test_looking_at_the_spectral_radius_changes_nothing() -> None:
    """A layer in training keeps its power iterations and draws no dropout mask."""
    torch.manual_seed(0)
    bounded = eq.nn.NormBounded(bound=0.9)
    layer = eq.nn.MDEQ((4, 8), groups=2, dropout=0.2, constraint=bounded).train()
    x = torch.randn(2, 4, 4, 4)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    drawn = torch.get_rng_state()
    found = layer.spectral_radius(x, generator=torch.Generator().manual_seed(0))
    assert found.shape == (2,)
    assert layer.training
    assert torch.equal(torch.get_rng_state(), drawn)
    for name, value in layer.state_dict().items():
        assert torch.equal(value, before[name]), name
