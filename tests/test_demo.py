"""The report of ``make demo``: its sections, and numbers that agree with the JSON beside it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")

EXAMPLES = Path(__file__).parents[1] / "examples"
SECTIONS = ["solve", "proof", "confidence", "radius", "noise", "letters", "twins"]


class Page(HTMLParser):
    """The text of each section, and every tag with its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.sections: dict[str, str] = {}
        self.place = ""
        self.feed(text)
        self.sections = {k: re.sub(r"\s+", " ", v) for k, v in self.sections.items()}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "section":
            self.place = str(dict(attrs)["id"])

    def handle_data(self, data: str) -> None:
        self.sections[self.place] = self.sections.get(self.place, "") + data


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield
    torch.set_num_threads(threads)


def numbers() -> dict[str, Any]:
    """What report.json holds, made up."""
    gray = [[0, 128], [255, 64]]
    layer = {
        "name": "layer",
        "unknowns": 512,
        "objective": [[5.0, -1.0, -2.5], [9.0, -2.0, -2.5]],
        "minimum": -2.5,
        "apart": [4.0, 0.5, 1e-12],
        "length": 7.3,
        "contraction": 0.8125,
        "modulus": 0.375,
        "smoothness": 1.625,
        "unique": True,
        "kind": "contraction",
        "stationarity": 1e-12,
    }
    network = {
        "parameters": 1234,
        "metrics": {"accuracy": 0.975, "ece": 0.0123, "nll": 0.0456},
        "steps": [7.5],
        "converged": 1.0,
        "unique": True,
        "error_bound": 3.2e-5,
        "seconds": 44.0,
        "history": [{"epoch": 1, "train_loss": 2.0}, {"epoch": 2, "train_loss": 0.5}],
    }
    plain = {"steps": [], "converged": None, "unique": None, "error_bound": None, "seconds": 11.0}
    shot = {"picture": gray, "label": 3, "confidence": 0.625}
    return {
        "digit": {
            "index": 1,
            "picture": gray,
            "truth": 3,
            "label": 3,
            "probabilities": [0.02, 0.0, 0.0, 0.98, *[0.0] * 6],
        },
        "solve": {"starts": 2, "layers": [layer], "labels": [3, 3], "logits_apart": 1e-13},
        "error_bounds": {"layer": 0.0000079},
        "confidence": {
            "groups": [{"from": 0.9, "to": 1.0, "count": 40, "right": 39}],
            "mean": 0.9,
            "doubtful": [{**shot, "truth": 5}],
        },
        "radius": {
            "label": 3,
            "nearest": 8,
            "radius": 0.3456,
            "accuracy": 0.9375,
            "median": 0.25,
            "curve": [{"radius": r, "accuracy": 0.9 - r} for r in (0.0, 0.3, 0.6)],
            "attacks": [{"radius": 0.3, "accuracy": 0.8}],
            "random_tried": 1000,
            "random_changed": 0,
            "edge": {"picture": gray, "distance": 0.34, "label": 3},
            "broken": {"picture": gray, "distance": 0.71, "label": 8},
            "geq_radius": 0.00006,
            "parameters": 6210,
        },
        "noise": [
            {**shot, "sigma": s, "accuracy": a, "mean_confidence": 0.9, "unique": True}
            for s, a in ((0.0, 0.975), (0.4, 0.5125))
        ],
        "letters": {
            "letters": [{**shot, "letter": "A"}],
            "mean_confidence": 0.55,
            "sure": 1,
            "digits_mean_confidence": 0.95,
            "digits_sure": 0.9125,
            "font_digits_right": 9,
            "unique": True,
        },
        "networks": {"GEQ": network, "OptEq": network, "explicit": {**network, **plain}},
        "test_digits": 40,
        "epochs": 2,
        "seed": 0,
        "seconds": 60.0,
        "versions": {"equilibria": "1", "torch": "2", "python": "3"},
    }


def check(text: str, n: dict[str, Any]) -> Page:
    """Sections in the order of the story, self-contained, every picture described."""
    page = Page(text)
    assert [s for s in page.sections if s in SECTIONS] == SECTIONS
    assert not re.search(r"<script|<link|url\(|https?://", text)
    for tag, given in page.tags:
        if tag == "img":
            assert given["alt"]
            assert str(given["src"]).startswith("data:image/png")
        if tag == "svg":
            assert given["aria-label"]
    texts = page.sections
    assert f"{n['radius']['radius']:.3f}" in texts["radius"]
    assert f"{100 * n['radius']['accuracy']:.1f}%" in texts["radius"]
    assert f"{100 * n['noise'][-1]['accuracy']:.1f}%" in texts["noise"]
    assert f"{100 * n['letters']['mean_confidence']:.1f}%" in texts["letters"]
    for layer in n["solve"]["layers"]:
        assert f"ρ = {layer['contraction']:.4f}" in texts["proof"]
        assert f"m = {layer['modulus']:.4f}" in texts["proof"]
        assert f"{layer['minimum']:,.2f}".replace("-", "−") in texts["solve"]
    for name, network in n["networks"].items():
        assert name in texts["twins"]
        assert f"{100 * network['metrics']['accuracy']:.2f}%" in texts["twins"]
        assert f"{network['metrics']['ece']:.3f}" in texts["twins"]
        assert f"{network['metrics']['nll']:.3f}" in texts["twins"]
    return page


def test_the_page_claims_no_proof_that_the_numbers_do_not_give(examples: None) -> None:
    from demo_page import page

    n = numbers()
    texts = check(page(n), n).sections
    assert "0.0000079" in texts["proof"]
    assert "81.2%" in texts["proof"]
    n["solve"]["layers"][0] |= {"unique": False, "kind": "none", "contraction": 1.5}
    n["digit"]["label"] = 8
    n["radius"] |= {"radius": 0.0, "broken": None}
    n["noise"][1]["unique"] = n["letters"]["unique"] = False
    texts = check(page(n), n).sections
    assert "not proven that there is only one answer" in texts[""]
    assert "wrong: it is a 3" in texts[""]
    assert "nothing is proven" in texts["proof"]
    assert "no two answers" not in texts["proof"]
    assert "Nothing is proven for this picture" in texts["radius"]
    assert "provably unique" not in texts["noise"]
    assert "certificate holds" not in texts["letters"]


@pytest.mark.slow
def test_a_run_writes_the_report_and_the_same_numbers(examples: None, tmp_path: Path) -> None:
    import demo

    demo.main(["--out", str(tmp_path), "--epochs", "1"])
    n = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    check((tmp_path / "report.html").read_text(encoding="utf-8"), n)
    assert (tmp_path / "geq_digits.safetensors").is_file()
    for layer in n["solve"]["layers"]:
        assert layer["unique"]
        assert layer["apart"][-1] < 1e-9 * layer["length"]
        for before, after in zip(layer["apart"], layer["apart"][1:], strict=False):
            assert after <= layer["contraction"] * before + 1e-10
        for path in layer["objective"]:
            assert math.isclose(path[-1], layer["minimum"], rel_tol=1e-4)
            assert path == sorted(path, reverse=True)
    assert len(set(n["solve"]["labels"])) == 1
    found = n["radius"]
    assert found["random_changed"] == 0
    assert found["edge"]["label"] == found["label"]
    assert found["broken"] is None or found["broken"]["distance"] > found["radius"]
    proven = {round(p["radius"], 6): p["accuracy"] for p in found["curve"]}
    for attack in found["attacks"]:
        assert attack["accuracy"] >= proven[round(attack["radius"], 6)]
