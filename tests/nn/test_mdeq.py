"""MDEQ, its stem and heads: against their formulas; dropout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import equilibria as eq
from equilibria.nn import MDEQ, MDEQClassifier, MDEQSegmenter, MDEQStem, WeightNormalized
from tests.contracts.layer_contract import EXACT, TIGHT
from tests.nn.checks import (
    check_autocast,
    check_bad_sample,
    check_compiles,
    check_copies,
    check_gradients,
)
from tests.problems.test_operators import randn


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
    if len(h) == 1:
        return h
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


@pytest.mark.parametrize("channels", [(4,), (4, 4), (4, 6, 8)])
@pytest.mark.parametrize(
    "options",
    [
        {"constraint": WeightNormalized()},
        {"constraint": None},
        {"kernel_size": 5, "blocks": 2},
    ],
    ids=["normalized", "free", "blocks"],
)
def test_the_map_is_the_formula(channels: tuple[int, ...], options: dict[str, Any]) -> None:
    layer = made(channels, **options)
    x = randn(2, 4, 8, 8)
    z = [randn(2, c, 8 >> i, 8 >> i) for i, c in enumerate(channels)]
    expected = reference(layer, z, x)
    for step in (layer.step, layer.bound_step()):
        for a, b in zip(step(tuple(z), x, ()), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_the_answer_is_a_fixed_point_of_the_formula() -> None:
    layer, x = made(solver=TIGHT), randn(2, 4, 4, 4)
    z = layer(x)
    for a, b in zip(reference(layer, z, x), z, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "adjoint",
    [EXACT, eq.Unrolled()],
    ids=["implicit", "unrolled"],
)
def test_gradients_with_both_kinds_of_adjoint(adjoint: Any) -> None:
    solver = eq.Picard(rtol=1e-11, max_steps=300)
    layer, x = made((2, 2), solver=solver, adjoint=adjoint), randn(1, 2, 4, 4)
    assert bool(layer.solve(x).converged.all())
    check_gradients(layer, x)


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


# ---------------------------------------------------------------------- dropout


def test_dropout_has_one_mask_a_solve() -> None:
    layer, x = made(dropout=0.5, solver=eq.Picard(rtol=1e-13, max_steps=600)), randn(3, 4, 4, 4)
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
    with eq.nn.collect_penalties(layer) as found:
        z = layer(x)
    torch.manual_seed(3)
    _, masks = layer.inject(x)  # the first random numbers of that forward
    expected = eq.jacobian_penalty(layer.step, z, (x, masks)).mean()
    torch.testing.assert_close(found.total(), expected)


# ---------------------------------------------------------------------- the module


def test_it_is_a_module_like_any_other() -> None:
    check_copies(made, randn(2, 4, 4, 4))
    check_bad_sample(made(solver=TIGHT).eval(), randn(3, 4, 4, 4))
    options: dict[str, Any] = {"solver": eq.Picard(rtol=0.0, max_steps=2)}
    fixed = made(adjoint=eq.Phantom(steps=1), **options)
    check_compiles(fixed.float(), torch.randn(2, 4, 4, 4))


@pytest.mark.parametrize("training", [True, False])
def test_autocast(training: bool) -> None:
    torch.manual_seed(0)
    layer, x = MDEQ((16, 16)).train(training), torch.randn(2, 16, 8, 8)
    check_autocast(layer, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        solution = layer.solve(x)
    assert bool(solution.converged.all())
    assert {z.dtype for z in solution.value} == {torch.bfloat16}


def test_memory_format_and_compaction() -> None:
    layer, x = made(solver=eq.Anderson(rtol=1e-10, compact=True)).eval(), randn(4, 4, 8, 8)
    plain = layer(x)
    last = layer(x.to(memory_format=torch.channels_last))
    for a, b in zip(last, plain, strict=True):
        assert a.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


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


# ---------------------------------------------------------------------- stem and heads


def network(
    channels: tuple[int, ...], head: tuple[int, ...], final: int, *, pointwise: bool
) -> tuple[nn.Module, nn.Module, nn.Module]:
    with torch.device("meta"):
        return (
            MDEQStem(channels[0], pointwise=pointwise),
            MDEQ(channels, post_affine=False),
            MDEQClassifier(channels, 10, head_channels=head, final_channels=final),
        )


@pytest.mark.parametrize(
    ("channels", "head", "final", "pointwise", "count", "paper"),
    [
        ((32, 64, 128, 256), (10, 20, 40, 80), 1280, True, 10_006_958, 10e6),
        ((24, 24), (8, 16), 340, False, 169_670, 170e3),
        # The authors' own files, which the paper rounds to 10 M and 170 k.
        ((32, 64, 128, 256), (14, 28, 56, 112), 1680, True, 11_097_438, None),
        ((24, 24), (8, 16), 200, False, 158_890, None),
    ],
)
def test_parameter_counts(
    channels: tuple[int, ...],
    head: tuple[int, ...],
    final: int,
    pointwise: bool,
    count: int,
    paper: float | None,
) -> None:
    modules = network(channels, head, final, pointwise=pointwise)
    found = sum(p.numel() for module in modules for p in module.parameters())
    assert found == count
    if paper is not None:
        assert abs(found / paper - 1) < 0.03


@pytest.mark.parametrize(("downsample", "size"), [(0, 16), (1, 8), (2, 4), (3, 2)])
def test_the_stem_halves(downsample: int, size: int) -> None:
    stem = MDEQStem(8, in_channels=1, downsample=downsample)
    assert stem(torch.randn(2, 1, 16, 16)).shape == (2, 8, size, size)
    assert len(stem) == 3 * (max(2, downsample) + 1)


def normalized(t: Tensor) -> Tensor:
    mean, var = t.mean((0, 2, 3), keepdim=True), t.var((0, 2, 3), keepdim=True, unbiased=False)
    return (t - mean) / (var + 1e-5).sqrt()


def test_the_classifier_is_its_formula() -> None:
    torch.manual_seed(0)
    head = MDEQClassifier((4, 8), 3, head_channels=(2, 3), final_channels=5).double()
    with torch.no_grad():
        for p in head.parameters():
            p.copy_(0.5 * torch.randn(p.shape))
    states = [torch.randn(3, 4, 4, 4).double(), torch.randn(3, 8, 2, 2).double()]
    w = head.state_dict()

    def affine(t: Tensor, name: str) -> Tensor:
        return normalized(t) * w[f"{name}.weight"].view(-1, 1, 1) + w[f"{name}.bias"].view(-1, 1, 1)

    def bottleneck(z: Tensor, at: str) -> Tensor:
        out = torch.relu(normalized(F.conv2d(z, w[f"{at}.narrow.weight"])))
        out = torch.relu(normalized(F.conv2d(out, w[f"{at}.spatial.weight"], padding=1)))
        out = normalized(F.conv2d(out, w[f"{at}.widen.weight"]))
        if f"{at}.skip.0.weight" in w:
            z = affine(F.conv2d(z, w[f"{at}.skip.0.weight"]), f"{at}.skip.1")
        return torch.relu(out + z)

    y = bottleneck(states[0], "widen.0")
    down = F.conv2d(y, w["down.0.0.weight"], w["down.0.0.bias"], stride=2, padding=1)
    y = bottleneck(states[1], "widen.1") + torch.relu(affine(down, "down.0.1"))
    y = torch.relu(affine(F.conv2d(y, w["final.0.weight"], w["final.0.bias"]), "final.1"))
    expected = y.mean((2, 3)) @ w["linear.weight"].mT + w["linear.bias"]
    torch.testing.assert_close(head(states), expected, rtol=1e-9, atol=1e-9)
    # A scale that has its 4·width channels already goes around without a convolution.
    assert isinstance(
        MDEQClassifier((8,), 3, head_channels=(2,), final_channels=5).widen[0].skip, nn.Identity
    )


def test_the_segmenter() -> None:
    torch.manual_seed(0)
    head = MDEQSegmenter((4, 8), 3, kernel_size=3)
    states = (torch.randn(2, 4, 8, 8), torch.randn(2, 8, 4, 4))
    logits = head(states)
    assert logits.shape == (2, 3, 8, 8)
    assert head(states, (16, 32)).shape == (2, 3, 16, 32)
    constant = (torch.randn(2, 4, 8, 8), torch.ones(2, 8, 4, 4))
    seen: list[Tensor] = []
    head.mix.register_forward_hook(lambda module, given, out: seen.append(given[0]))
    head(constant)
    assert torch.equal(seen[0][:, :4], constant[0])
    torch.testing.assert_close(seen[0][:, 4:], torch.ones(2, 8, 8, 8))
    logits.sum().backward()


# ---------------------------------------------------------------------- bad input


STATE = torch.zeros(1, 4, 2, 2)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: MDEQ((16, 12)), ValueError, r"groups=8 .* must divide channels\[1\]=12"),
        (lambda: MDEQ((8, 8), expansion=0), ValueError, r"expansion=0.*at least 1"),
        (lambda: MDEQ((8, 8), kernel_size=2), ValueError, "odd kernel size"),
        (lambda: MDEQ((8, 8), blocks=(1,)), ValueError, r"blocks=\(1,\)\): expected 2 entries"),
        (lambda: MDEQ(8), TypeError, r"channels=8\): expected a sequence"),  # type: ignore[arg-type]
        (lambda: MDEQ((8, 8), dropout=1.0), ValueError, r"dropout=1.*out of range"),
        (lambda: MDEQ((8, 8), affine=False), ValueError, "there are no gains; use calm=1.0"),
        (lambda: MDEQ((8, 8), calm=0.0), ValueError, r"calm=0.*out of range"),
        (lambda: MDEQStem(8, downsample=-1), ValueError, r"downsample=-1.*at least 0"),
        (lambda: MDEQSegmenter((4,), 3, kernel_size=2), ValueError, "odd kernel size"),
        (
            lambda: MDEQSegmenter((4, 8), 3)((STATE,)),
            ValueError,
            r"\(4, 8\), got states of \(4,\) ch",
        ),
        (lambda: MDEQSegmenter((4, 8), 3)(STATE), ValueError, "got Tensor"),
        (
            lambda: MDEQClassifier((4, 8), 3, head_channels=(2,), final_channels=5),
            ValueError,
            r"head_channels=\(2,\)\): expected 2 entries",
        ),
        (
            lambda: MDEQClassifier((4,), 0, head_channels=(2,), final_channels=5),
            ValueError,
            r"num_classes=0.*at least 1",
        ),
    ],
)
def test_bad_options(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(1, 8, 6, 8), "multiples of 4, got x of 6 × 8 pixels"),
        (torch.zeros(1, 4, 8, 8), r"takes x \[B, 8, H, W\], got shape \(1, 4, 8, 8\)"),
        (torch.zeros(1, 8, 8, 8, device="meta"), "lives on cpu and got x on meta"),
    ],
)
def test_bad_inputs(x: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MDEQ((8, 8, 8))(x)
