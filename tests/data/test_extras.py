"""Without a package of the extra, what needs it says so, and the rest works."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from equilibria import data
from tests.data.made_files import pictures, png, write_class_folders, write_parquet


def parquet(folder: Path) -> object:
    return write_parquet(folder / "train.parquet", {"img": [png(pictures(1)[0])], "label": [0]})


def images(folder: Path) -> object:
    return write_class_folders(folder / "train", {"a": 1, "b": 1})


@pytest.mark.parametrize(
    ("module", "message", "prepare", "call"),
    [
        ("sklearn", "digits needs scikit-learn", None, lambda _: data.load("digits")),
        ("PIL", "images needs pillow", images, data.load),
        ("pyarrow", "Parquet files needs pyarrow", parquet, data.load),
        ("huggingface_hub", "download=True needs huggingface_hub", None,
         lambda _: data.load("mnist", download=True)),
        ("rich", "check needs rich", None, lambda _: data.CheckReport("digits").table()),
    ],
)  # fmt: skip
def test_without(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    module: str,
    message: str,
    prepare: Callable[[Path], object] | None,
    call: Callable[[Path], object],
) -> None:
    if prepare is not None:
        prepare(tmp_path)
    for name in [m for m in sys.modules if m.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf'{message}, .*pip install "equilibria\[train\]"'):
        call(tmp_path)


@pytest.mark.slow
def test_the_package_imports_with_torch_alone() -> None:
    """Fresh, since this process has everything imported already."""
    code = (
        "import sys\n"
        "for name in ('PIL', 'pyarrow', 'sklearn', 'kornia', 'rich', 'safetensors', 'numpy'):\n"
        "    sys.modules[name] = None\n"
        "from equilibria import data\n"
        "import torch\n"
        "x = torch.rand(8, 3, 16, 16)\n"
        "names = ['crop', 'flip', 'cutout', 'rand_augment', 'mixup', 'cutmix']\n"
        "recipe = data.build_augmentation(names, num_classes=4)\n"
        "assert recipe(x, torch.arange(8) % 4, torch.Generator())[0].shape == x.shape\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120)
