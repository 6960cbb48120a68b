"""Every Python block of the README and the docs runs as printed, page by page.

A block after the line ``<!-- not run: reason -->`` is left out. Trainings end after an epoch, and
of the digits few are tested, which is faster.
"""

from __future__ import annotations

import csv
import importlib.util
import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from equilibria import data, training

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"(<!-- not run: [^\n]* -->\n+)?^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks(page: Path) -> list[str]:
    return [code for skipped, code in BLOCK.findall(page.read_text("utf-8")) if not skipped]


@pytest.fixture
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    fit, load = training.fit, data.load

    def one_epoch(config: Any, **options: Any) -> Any:
        return fit(config.with_overrides(epochs=1), **options)

    def few(name: Any, split: str = "train", **options: Any) -> Any:
        found = load(name, split, **options)
        return found.subset(range(128)) if (name, split) == ("digits", "test") else found

    monkeypatch.setattr(training, "fit", one_epoch)
    monkeypatch.setattr(data, "load", few)


@pytest.mark.usefixtures("_short")
@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: p.name)
def test_code_blocks_run_as_printed(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setenv("MPLBACKEND", "Agg")
    torch.manual_seed(0)
    namespace: dict[str, object] = {"__name__": "__main__"}
    before = torch.get_default_dtype()
    try:
        for number, code in enumerate(blocks(page), 1):
            where = f"{page.name}, block {number}"
            exec(compile(code, where, "exec", dont_inherit=True), namespace)
    finally:
        torch.set_default_dtype(before)


def test_readme_prints_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    """The output below the README's code: same words, and numbers within a factor of two."""
    text = (ROOT / "README.md").read_text("utf-8")
    found = re.search(r"^```python\n(.*?)^```\n+```text\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert found is not None
    exec(compile(found[1], "README.md", "exec", dont_inherit=True), {"__name__": "__main__"})
    printed, number = capsys.readouterr().out, re.compile(r"-?\d[\d.]*(?:e-?\d+)?")
    assert number.sub("n", printed) == number.sub("n", found[2])
    ratios = [
        float(ours) / float(shown)
        for ours, shown in zip(number.findall(printed), number.findall(found[2]), strict=True)
    ]
    assert all(0.5 < ratio < 2 for ratio in ratios)


def result(name: str) -> Any:
    return json.loads((ROOT / "results" / name).read_text("utf-8"))


def spread(percents: list[float]) -> str:
    return f"{statistics.mean(percents):.2f} ± {statistics.stdev(percents):.2f}%"


def test_the_headline_numbers_are_those_of_the_files() -> None:
    readme, speed, labels, promises = (
        (ROOT / page).read_text("utf-8")
        for page in ("README.md", "docs/performance.md", "docs/certified.md", "docs/promises.md")
    )
    seeds = ("", "seed1/", "seed2/")
    stack = [result(f"cifar10_geq_stack_8m_after/{s}measured.json") for s in seeds]
    chain = [result(f"cifar10_geq_chain_5m/{s}evaluation.json") for s in seeds]
    assert f"{spread([s['measures']['quality']['accuracy'] for s in stack])}, three" in readme
    table = result("reproduce/geq-table1--recipe=randaugment.json")["cells"]
    found = {
        (c["row"], c["column"].removesuffix(", accuracy in %")): [s["value"] for s in c["samples"]]
        for c in table
    }
    for images in ("CIFAR-10", "CIFAR-100"):
        assert f"**{found['GEQ 8M', images][0]:.2f}%**" in readme
    assert f"{spread(found['ResNet-18', 'CIFAR-10'])} (two seeds)" in readme
    assert f"{found['ResNet-18', 'CIFAR-100'][0]:.2f}%" in readme
    assert f"**{spread([100 * s['metrics']['accuracy'] for s in chain])}**" in readme
    kernels = {
        c["row"]: f"{c['mean']:.2f} ± {c['std']:.2f}"
        for c in result("reproduce/ours-kernels--epochs=50.json")["cells"]
        if c["metric"] == "accuracy" and c["n"] == 3
    }
    gaussian, linear = (kernels[f"chain, {kernel}, equal"] for kernel in ("Gaussian", "linear"))
    assert f"({gaussian} and {linear}%, 50 epochs, three seeds)" in readme
    assert f"twin has {kernels['chain, two convolutions: explicit twin']}%" in readme
    proven = result("certified_cifar/certified.json")
    assert f"**{proven['certified'][0]['accuracy']:.1%}**" in readme
    assert f"{proven['accuracy']:.1%} are right" in readme
    five, ten = (result(f"geq_step_{name}.json")["rows"] for name in ("equal", "defaults"))
    ours, peer = five["branches graph"], "branches torchdeq anderson"
    for start, theirs in (("**", five[peer]), ("; ", ten[peer])):
        ratio = ours["train_images_per_second"] / theirs["train_images_per_second"]
        assert f"{start}{ratio:.1f} times" in readme
        assert f"{theirs['train_images_per_second']:,}" in speed
        assert f"{theirs['residual']:.4f}" in speed
    assert f"{ours['train_images_per_second']:,} and" in speed
    assert f"residuals {ours['residual']:.4f} and" in speed
    for network in result("certified_digits.json")["networks"].values():
        cells = [f"{c['accuracy']:.1%} ({c['attacked']:.1%})" for c in network["certified"]]
        assert " | ".join([f"{network['accuracy']:.1%}", *cells]) in labels
    with (ROOT / "results/cifar10_geq_stack_8m_after/seed2/history.csv").open() as file:
        rate = float(list(csv.DictReader(file))[-1]["images_per_second"])
    assert f"{rate:,.0f} images per second" in promises.replace("\n", " ")


def test_blocks_are_found() -> None:
    assert sum(len(blocks(p)) for p in PAGES) >= 8


def test_no_claim_is_lost_between_the_pages_of_the_audit() -> None:
    spec = importlib.util.spec_from_file_location("split_audit", ROOT / "docs/split_audit.py")
    assert spec is not None
    assert spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    whole = hook.AUDIT.read_text("utf-8")
    pages = [page.read_text("utf-8") for page in (ROOT / "docs/holds").glob("*.md")]
    built = "".join(hook.on_page_markdown(page) for page in pages)
    anchors = re.findall(r"\{#(\S+)\}", whole)
    assert sorted(re.findall(r"\{#(\S+)\}", built)) == sorted(anchors)
    assert sorted(re.findall(r"\]\(#(\S+)\)", built)) == sorted(anchors)
    assert built.count("| **fails**") == whole.count("| **fails**")
    words = "<p>W_lᵀσ(W_hz) e^{−s} λ_min <code>W_l</code> fog_blur ‖J‖²_F</p>"
    assert hook.raised(words) == (
        "<p>W<sub>l</sub>ᵀσ(W_hz) e<sup>−s</sup> λ<sub>min</sub> <code>W_l</code> fog_blur "
        "‖J‖²<sub>F</sub></p>"
    )
