"""A package that is missing is told with the line that installs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from equilibria import data
from tests.data.made_files import pictures, png, write_class_folders, write_parquet

LINE = r'pip install "equilibria\[train\]"'


def hide(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    for name in [m for m in sys.modules if m.split(".")[0] in names]:
        monkeypatch.delitem(sys.modules, name)
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)


def test_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "sklearn")
    with pytest.raises(ImportError, match=f"digits needs scikit-learn.*{LINE}"):
        data.load("digits")


def test_without_pillow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_class_folders(tmp_path / "train", {"a": 1, "b": 1})
    hide(monkeypatch, "PIL")
    with pytest.raises(ImportError, match=f"needs pillow.*{LINE}"):
        data.load(tmp_path)


def test_without_pyarrow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_parquet(tmp_path / "train.parquet", {"img": [png(pictures(1)[0])], "label": [0]})
    hide(monkeypatch, "pyarrow")
    with pytest.raises(ImportError, match=f"Parquet files needs pyarrow.*{LINE}"):
        data.load(tmp_path)


def test_without_kornia(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "kornia")
    with pytest.raises(ImportError, match=f"RandAugment needs kornia.*{LINE}"):
        data.RandAugment()(torch.rand(2, 3, 8, 8))


def test_without_rich(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report = data.check("digits")
    hide(monkeypatch, "rich")
    with pytest.raises(ImportError, match=f"needs rich.*{LINE}"):
        report.table()
    write_class_folders(tmp_path / "train", {"a": 1, "b": 1})
    assert len(data.load(tmp_path)) == 2  # a bar that is not shown needs nothing


@pytest.mark.slow
def test_the_room_imports_with_torch_alone() -> None:
    """Fresh, since this process has everything imported already."""
    code = (
        "import sys\n"
        "for name in ('PIL', 'pyarrow', 'sklearn', 'kornia', 'rich', 'safetensors'):\n"
        "    sys.modules[name] = None\n"
        "from equilibria import data\n"
        "assert data.names()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
