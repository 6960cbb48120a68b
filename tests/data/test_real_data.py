"""The real data sets, where they lie beside the repository; skipped where they do not."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from equilibria import data

ROOT = Path(__file__).resolve().parents[3] / "shared" / "data"


def needs(name: str) -> pytest.MarkDecorator:
    there = (ROOT / name).is_dir()
    return pytest.mark.skipif(not there, reason=f"../shared/data/{name} is not here")


@needs("camvid")
def test_camvid_is_what_pillow_reads() -> None:
    rows = pq.read_table(ROOT / "camvid" / "val-00000-of-00001.parquet").to_pylist()
    found = data.load("camvid", "val", root=ROOT, progress=False)
    assert len(found) == len(rows) == 101
    for k in (0, 50, 100):
        image = Image.open(io.BytesIO(rows[k]["image"]["bytes"])).convert("RGB")
        mask = np.asarray(Image.open(io.BytesIO(rows[k]["mask"]["bytes"]))).astype(int)
        assert np.array_equal(found.images[k], np.asarray(image).transpose(2, 0, 1))
        assert np.array_equal(found.targets[k], np.where(mask == 11, 255, mask))
    # Sky is above the road: the order of the classes is the one that is named.
    height = torch.arange(180.0).view(1, -1, 1).expand(found.targets.shape)
    middle = [float(height[found.targets == k].mean()) for k in range(11)]
    assert middle[0] == min(middle)
    assert middle[found.classes.index("road")] == max(middle)


@needs("cifar10")
def test_cifar10_test_is_what_pillow_reads() -> None:
    table = pq.read_table(ROOT / "cifar10" / "test-00000-of-00001.parquet")
    found = data.load("cifar10", "test", root=ROOT, lazy=True)
    assert found.targets.tolist() == table["label"].to_pylist()
    for k in (0, 4321, 9999):
        image = Image.open(io.BytesIO(table["img"][k].as_py()["bytes"])).convert("RGB")
        assert np.array_equal(found.images[k], np.asarray(image).transpose(2, 0, 1))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mnist", "cifar10", "cifar100", "camvid"])
def test_check_finds_nothing_wrong(name: str) -> None:
    if not (ROOT / name).is_dir():
        pytest.skip(f"../shared/data/{name} is not here")
    report = data.check(name, root=ROOT, progress=False)
    assert report.ok, str(report)
