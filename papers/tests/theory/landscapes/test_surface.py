"""Files of landscapes: whole, checked, never unpickled."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from equilibria_papers.theory.landscapes import LandscapeFileError, Surface
from equilibria_papers.theory.landscapes.measuring import fingerprint


def surface() -> Surface:
    a, b = torch.linspace(-1, 1, 3).double(), torch.linspace(-2, 2, 5).double()
    loss = torch.arange(15.0).double().view(3, 5)
    loss[0, 0] = torch.nan
    values = {"loss": loss, "accuracy": torch.rand(3, 5).double()}
    done = torch.tensor([True, False, True])
    return Surface("a name", a, b, values, done, {"seed": 3, "model": "µ"})


def test_there_and_back(tmp_path: Path) -> None:
    given = surface()
    file = given.save(tmp_path / "grid.safetensors")
    found = Surface.load(file)
    assert found.name == given.name
    assert found.about == given.about
    for name in ("a", "b", "done", "holes"):
        assert torch.equal(getattr(found, name), getattr(given, name)), name
    torch.testing.assert_close(found.loss, given.loss, equal_nan=True)
    assert found.holes.nonzero().tolist() == [[0, 0]]
    assert bool(torch.isnan(found.loss[1]).all())


def test_files_of_other_kinds(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no landscape file"):
        Surface.load(tmp_path / "none")
    (tmp_path / "text").write_text("not a grid")
    with pytest.raises(LandscapeFileError, match="cannot be read"):
        Surface.load(tmp_path / "text")
    save_file({"a": torch.zeros(2)}, tmp_path / "weights.safetensors")
    with pytest.raises(LandscapeFileError, match="no landscape of this library"):
        Surface.load(tmp_path / "weights.safetensors")
    header = {"format": "equilibria-landscape-1", "name": "x", "about": "{}"}
    save_file({"a": torch.zeros(2)}, tmp_path / "part.safetensors", header)
    with pytest.raises(LandscapeFileError, match="damaged"):
        Surface.load(tmp_path / "part.safetensors")


def test_fingerprints_see_names_shapes_types_and_values() -> None:
    base = {"w": torch.arange(6.0), "b": torch.zeros(2)}
    same = {"b": torch.zeros(2), "w": torch.arange(6.0)}
    assert fingerprint(base) == fingerprint(same)
    others = [
        {"w": torch.arange(6.0).view(2, 3), "b": torch.zeros(2)},
        {"w": torch.arange(6.0).double(), "b": torch.zeros(2)},
        {"v": torch.arange(6.0), "b": torch.zeros(2)},
        {"w": torch.arange(6.0) + torch.tensor([0, 0, 0, 0, 0, 1e-6]), "b": torch.zeros(2)},
    ]
    assert len({fingerprint(x) for x in (base, *others)}) == 5
    strided = torch.arange(12.0)[::2]
    assert fingerprint({"w": strided}) == fingerprint({"w": strided.contiguous()})
    assert len(fingerprint({"n": torch.tensor(3), "e": torch.zeros(0)})) == 16
