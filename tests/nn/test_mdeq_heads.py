"""The stem and the heads of MDEQ, and the parameter counts of the whole networks."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equilibria.nn import MDEQ, MDEQClassifier, MDEQSegmenter, MDEQStem


def parameters(*modules: nn.Module) -> int:
    return sum(p.numel() for module in modules for p in module.parameters())


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
    found = parameters(*network(channels, head, final, pointwise=pointwise))
    assert found == count
    assert f"{count:,}" in (MDEQ.__doc__ or "")
    if paper is not None:
        assert abs(found / paper - 1) < 0.03


def test_the_count_by_the_formulas() -> None:
    """By hand for two scales of C channels, width 5C, weight normalization, no gains at the end."""
    c = 24
    block = 2 * 9 * c * 5 * c + (5 * c + c) + 2 * (5 * c + c + c)
    fusion = 9 * c * c + 2 * c + c * c + 2 * c + 2 * (c * c + c)
    stem = 9 * 3 * c + 9 * c * c + 4 * c
    head = 0
    for width in (8, 16):
        head += c * width + 9 * width**2 + 4 * width**2  # bottleneck
        head += c * 4 * width + 8 * width  # skip and its norm
    head += 9 * 32 * 64 + 64 + 2 * 64  # down
    head += 64 * 340 + 340 + 2 * 340  # final
    head += 340 * 10 + 10
    assert 2 * block + fusion + stem + head == 169_670


def test_the_network_runs_and_trains() -> None:
    torch.manual_seed(0)
    stem, layer = MDEQStem(8, downsample=1), MDEQ((8, 8), groups=4)
    head = MDEQClassifier((8, 8), 3, head_channels=(2, 4), final_channels=6)
    x = torch.randn(4, 3, 8, 8)
    logits = head(layer(stem(x)))
    assert logits.shape == (4, 3)
    F.cross_entropy(logits, torch.tensor([0, 1, 2, 0])).backward()
    assert all(p.grad is not None for m in (stem, layer, head) for p in m.parameters())
    for module in (stem, head):
        twin = pickle.loads(pickle.dumps(copy.deepcopy(module).eval()))
        given = x if module is stem else layer(stem(x))
        assert torch.equal(twin(given), module.eval()(given))
        module.train()


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
    assert parameters(head) == 12 * 12 + 12 + 2 * 12 + 9 * 12 * 3 + 3


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"head_channels=\(2,\)\): expected 2 entries"):
        MDEQClassifier((4, 8), 3, head_channels=(2,), final_channels=5)
    with pytest.raises(ValueError, match=r"num_classes=0.*at least 1"):
        MDEQClassifier((4,), 0, head_channels=(2,), final_channels=5)
    with pytest.raises(ValueError, match=r"downsample=-1.*at least 0"):
        MDEQStem(8, downsample=-1)
    with pytest.raises(ValueError, match="odd kernel size"):
        MDEQSegmenter((4,), 3, kernel_size=2)
    head = MDEQSegmenter((4, 8), 3)
    with pytest.raises(ValueError, match=r"channels \(4, 8\), got states of \(4,\) channels"):
        head((torch.zeros(1, 4, 2, 2),))
    with pytest.raises(ValueError, match="got Tensor"):
        head(torch.zeros(1, 4, 2, 2))  # type: ignore[arg-type]
