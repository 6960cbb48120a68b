"""A study's numbers and files."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from equilibria_papers.theory import empirical_ntk, study_kernels
from equilibria_papers.theory.ntk import study as module


def networks() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    second = copy.deepcopy(first)
    with torch.no_grad():
        second[2].weight.mul_(2)
    return {"start": first, "later": second}


def test_a_study_compares_with_the_first(tmp_path: Path) -> None:
    both, x, y = networks(), torch.randn(6, 4), torch.arange(6) % 3
    calls: list[tuple[int, int]] = []
    study = study_kernels(both, x, y, layers=True, progress=lambda *a: calls.append(a))
    rows = study.rows()
    assert [row["network"] for row in rows] == ["start", "later"]
    assert rows[0]["drift"] == 0
    a, b = (empirical_ntk(m, x).matrix for m in both.values())
    assert rows[1]["drift"] == pytest.approx(float((a - b).norm() / a.norm()), rel=1e-5)
    assert calls[-1] == (12, 12)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    written = study.save(tmp_path)
    expected = {"ntk.json", "ntk.safetensors", "spectrum.png", "spectrum.svg"}
    assert {p.name for p in written} == expected == {p.name for p in tmp_path.iterdir()}
    saved = load_file(tmp_path / "ntk.safetensors")
    torch.testing.assert_close(saved["later/kernel"], b)
    found = json.loads((tmp_path / "ntk.json").read_text())
    assert found["samples"] == 6
    assert set(found["networks"][0]["shares"]) == {"0", "2"}


def test_an_interruption_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = study_kernels(networks(), torch.randn(3, 4))

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_spectra_figure", stop)
    with pytest.raises(KeyboardInterrupt):
        study.save(tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_networks_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="one architecture"):
        study_kernels({"a": nn.Linear(4, 2), "b": nn.Linear(4, 3)}, torch.randn(3, 4))
    with pytest.raises(ValueError, match="one network at least"):
        study_kernels({}, torch.randn(3, 4))
