"""Parameter counts, by hand, beside the papers' and in the docs. Nothing is allocated."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from equilibria import models
from tests.models.small import laid_out


def count(name: str, *num_classes: int) -> int:
    return models.count_parameters(laid_out(name, *num_classes))


# Six branches: U (with bias) and W, 3 × 3, per branch; W_h; a batch norm has two numbers a channel,
# and each branch of a chain has one.
def _six_branches(
    channels: int, mids: list[int], patch: int, hidden: int, stem: int, extra: int, classes: int
) -> int:
    branches = sum(2 * 9 * channels * mid + mid + patch * hidden for mid in mids)
    norms = 2 * channels * (extra + 2 + len(mids))
    return branches + stem + extra * 9 * channels**2 + norms + channels * classes + classes


CIFAR_5M = [64, 128, 128, 128, 256, 256]
CIFAR_8M = [80, 160, 160, 160, 320, 320]
IMAGENET_6M = [32, 64, 128, 128, 256, 256]
IMAGENET_13M = [48, 96, 192, 192, 384, 384]


@pytest.mark.parametrize(
    ("name", "by_hand", "thousands"),
    [
        ("geq_cifar_5m", _six_branches(256, CIFAR_5M, 32, 64, 27 * 256, 1, 10), 5_040),
        ("geq_cifar_8m", _six_branches(320, CIFAR_8M, 32, 64, 27 * 320, 1, 10), 7_860),
        # The second stem convolution is the third of the three C → C convolutions.
        ("geq_imagenet_6m", _six_branches(256, IMAGENET_6M, 32, 128, 147 * 256, 3, 100), 5_850),
        ("geq_imagenet_13m", _six_branches(384, IMAGENET_13M, 32, 128, 147 * 384, 3, 100), 13_070),
        ("kerdeq_cifar_5m", _six_branches(256, CIFAR_5M, 32, 64, 27 * 256, 1, 10), 5_040),
        ("kerdeq_imagenet_6m", _six_branches(256, IMAGENET_6M, 64, 128, 147 * 256, 3, 100), 5_870),
        ("mopteq_cifar_8m", _six_branches(320, CIFAR_8M, 0, 0, 27 * 320, 1, 10), 7_850),
    ],
)
def test_six_branches_by_hand(name: str, by_hand: int, thousands: int) -> None:
    assert count(name) == by_hand
    assert round(by_hand, -4) == thousands * 1000


# Those of Table 6 do not add up; the authors' count of the other has weights of a zero border.
_OTHER_COUNTS = ("deep_opteq_small", "deep_opteq_middle", "mondeq_multi")


@pytest.mark.parametrize("name", [n for n in models.names() if n not in _OTHER_COUNTS])
def test_within_three_percent_of_the_paper(name: str) -> None:
    printed = models.describe(name).paper_parameters
    if printed is not None:
        assert count(name) == pytest.approx(printed, rel=0.03)


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("resnet18_cifar", 11_173_962),
        ("resnet50_cifar", 23_520_842),
        ("resnet18_imagenet", 11_689_512),
        ("resnet50_imagenet", 25_557_032),
        ("mondeq_single", 172_218),
    ],
)
def test_published_to_the_digit(name: str, published: int) -> None:
    assert count(name) == published


def test_multi_tier_monotone_lacks_only_the_weights_of_a_zero_border() -> None:
    # The authors' head reads the last tier with a border of one pixel that is always zero: 10 × 10
    # instead of 8 × 8 pixels of 60 channels, for 10 classes.
    assert count("mondeq_multi") + (100 - 64) * 60 * 10 == 170_194


def test_deep_opteq_by_hand() -> None:
    for name, m, mids in (
        ("deep_opteq_199k", 30, [16, 32, 64, 128, 128]),
        ("deep_opteq_162k", 30, [16, 32, 64, 64, 128]),
        ("deep_opteq_1m4", 64, [64, 128, 256, 256, 512]),
    ):
        kernels = sum(2 * 9 * m * n + n for n in mids)
        assert count(name) == kernels + 27 * m + 2 * 2 * m + 10 * m + 10


def test_imagenet_deep_opteq_as_described_not_as_printed() -> None:
    # Table 6 prints 18 M and 40 M, which its own parts do not add up to (docs/models.md).
    classifier = 512 * 1024 + 1024 * 2048 + 2 * (1024 + 2048) + 2048 * 1000 + 1000
    small = 5 * (2 * (9 * 512 + 512 * 512) + 512)
    # conv 7 × 7, then 3 and 4 bottlenecks: the first two stages of a ResNet-50
    extractor = 1_444_928
    assert count("deep_opteq_small") == extractor + small + classifier
    assert models.describe("deep_opteq_small").paper_parameters == 18_000_000
    middle = 3 * (2 * (25 * 512 + 512 * 1024) + 1024 + 2 * (9 * 512 + 512 * 512) + 512)
    wide = count("deep_opteq_middle") - middle - classifier
    assert wide == pytest.approx(4.13e6, rel=0.01)
    assert models.describe("deep_opteq_middle").paper_parameters == 40_000_000


# At most what the name says, up to rounding: the papers' accuracies are at a size.
_LARGEST = {"cifar_3m": 2.79e6, "cifar_5m": 5.0e6, "cifar_8m": 8.0e6}


_KINDS = ("geq", "opteq", "explicit")


@pytest.mark.parametrize(
    ("twins", "classes"),
    [
        *(([f"{k}_stack_{s}" for k in _KINDS], 10) for s in ("digits", "mnist", *_LARGEST)),
        *(([f"{k}_{s}" for k in _KINDS], 10) for s in ("digits", "mnist")),
        *(([f"geq_{s}", f"explicit_{s}"], 10) for s in ("cifar_5m", "cifar_8m")),
        (["deep_opteq_seg", "fcn_seg"], 11),
        *(
            ([f"mopteq{k}_{s}" for k in ("", "_polynomial", "_sigmoid")], 10)
            for s in ("cifar_5m", "cifar_8m")
        ),
    ],
)
def test_twins_are_of_equal_size(twins: list[str], classes: int) -> None:
    first, *others = (count(name, classes) for name in twins)
    assert others == pytest.approx([first] * len(others), rel=0.03)
    if twins[0] in ("geq_digits", "geq_mnist"):
        assert first < 100_000
    if twins[0].startswith("geq_stack_cifar"):
        goal = _LARGEST[twins[0].removeprefix("geq_stack_")]
        assert 0.85 * goal < first <= goal


def test_the_table_in_the_docs_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "create", laid_out)
    root = Path(__file__).parents[2]
    found = runpy.run_path(str(root / "docs" / "make_model_table.py"))["table"]()
    written = (root / "results" / "models.md").read_text(encoding="utf-8")
    assert written == found, "run: python docs/make_model_table.py"
