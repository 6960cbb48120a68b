"""Images into a network: against Pillow and arithmetic by hand; labels, and warnings of doubt."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

import equilibria as eq
from equilibria import models
from tests.models.small import images as normal
from tests.models.small import make

MEAN, STD = (0.49, 0.48, 0.45), (0.25, 0.24, 0.26)
EXTRA = {"mean": list(MEAN), "std": list(STD), "classes": ["bee", "cat", "cow", "dog", "elk"]}


@pytest.fixture(scope="module")
def model() -> models.Network:
    """Takes 3 × 8 × 8."""
    made = make("geq_digits", in_channels=3).eval()
    made.extra = {**EXTRA, "image_size": [8, 8]}
    return made


def _photo(height: int, width: int, channels: int = 3, seed: int = 0) -> Tensor:
    """uint8 [C, H, W] with contrast."""
    source = np.random.default_rng(seed)
    return torch.from_numpy(source.integers(0, 256, (channels, height, width), dtype=np.uint8))


def _picture(photo: Tensor) -> Image.Image:
    return Image.fromarray(photo.permute(1, 2, 0).contiguous().numpy())


def _normalized(pixels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """(pixels/255 − mean)/std in float64, [C, H, W]."""
    mean, std = (np.array(v, np.float64).reshape(3, 1, 1) for v in (MEAN, STD))
    return np.asarray((pixels.astype(np.float64) / 255 - mean) / std)


# ---------------------------------------------------------------------- preprocess


def test_uint8_floats_and_pictures_are_the_same_image(model: models.Network) -> None:
    photo = _photo(8, 8)
    wanted = torch.from_numpy(_normalized(photo.numpy())).float()[None]
    batch = photo[None]
    for form in (photo, batch, photo / 255, batch / 255, _picture(photo), [photo], (photo / 255,)):
        found = model.preprocess(form)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 99))
def test_any_size_becomes_pillow_s_middle_square(height: int, width: int, seed: int) -> None:
    made = make("explicit_digits", in_channels=3)
    made.extra = {"mean": list(MEAN), "std": list(STD)}
    photo = _photo(height, width, seed=seed)
    side = min(height, width)
    left, top = (width - side) // 2, (height - side) // 2
    box = (left, top, left + side, top + side)
    resized = _picture(photo).resize((8, 8), Image.Resampling.BILINEAR, box=box)
    wanted = _normalized(np.asarray(resized).transpose(2, 0, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", models.InputWarning)  # of one pixel there is no contrast
        found = _levels(made.preprocess(photo)[0])
        between = _levels(made.preprocess(photo / 255)[0])
    np.testing.assert_allclose(found, _levels(torch.from_numpy(wanted)), atol=1e-3)
    # Floats are not rounded to levels; Pillow rounds twice.
    assert np.abs(between - found).max() <= 1.0 + 1e-3


def _levels(x: Tensor) -> np.ndarray[Any, Any]:
    """Normalized pixels as levels from 0 to 255."""
    mean, std = (np.array(v, np.float64).reshape(3, 1, 1) for v in (MEAN, STD))
    return np.asarray((x.double().numpy() * std + mean) * 255)


def test_pictures_of_all_modes_and_sizes_make_one_batch(model: models.Network) -> None:
    pictures = [_picture(_photo(9 + i, 20)).convert(m) for i, m in enumerate(("RGB", "L", "P"))]
    pictures += [_picture(_photo(30, 12)).convert(m) for m in ("RGBA", "CMYK", "LA")]
    assert model.preprocess([*pictures, _photo(5, 5)]).shape == (7, 3, 8, 8)
    gray = make("geq_digits")
    assert gray.preprocess(pictures).shape == (6, 1, 8, 8)
    assert gray.preprocess(_photo(9, 9, 1)[0]).shape == (1, 1, 8, 8)


def test_the_result_has_the_dtype_of_the_network(model: models.Network) -> None:
    half = make("geq_digits", in_channels=3).to(torch.bfloat16)
    assert half.preprocess(_photo(8, 8)).dtype == torch.bfloat16


def test_whole_images_are_segmented() -> None:
    made = make("mdeq_seg")
    made.extra = {"image_size": [36, 48], "task": "segmentation"}
    assert made.preprocess(_photo(72, 100)).shape == (1, 3, 36, 50)
    with pytest.raises(ValueError, match="different shapes"):
        made.preprocess([_photo(72, 100), _photo(72, 72)])
    with pytest.raises(ValueError, match="36 × 18000; the limit is 16384 for a side"):
        made.preprocess(_photo(1, 500))
    with pytest.raises(ValueError, match="mdeq_seg segments images"):
        made.predict(_photo(36, 36))


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ([], ValueError, "there is no image: expected a uint8 tensor"),
        ("photo.png", TypeError, "image 0: got str; expected a uint8 tensor"),
        (np.zeros((8, 8, 3), np.uint8), TypeError, r"got ndarray.*torch\.from_numpy"),
        (torch.zeros(3, 8, 8, dtype=torch.int64), TypeError, r"torch\.int64.*to\(torch\.uint8\)"),
        (torch.zeros(8, 8, 3), ValueError, r"shape \[8, 8, 3\], expected \[3, h.*permute\(2, 0, 1"),
        (torch.zeros(1, 8, 8), ValueError, r"shape \[1, 8, 8\].*\.expand\(3, -1, -1\)"),
        (torch.zeros(3, 0, 8), ValueError, r"shape \[3, 0, 8\]"),
        (torch.zeros(2, 1, 3, 8, 8), ValueError, r"shape \[2, 1, 3, 8, 8\], expected"),
        (torch.full((3, 8, 8), float("nan")), ValueError, "image 0: it holds NaN or infinity"),
        (Image.new("F", (8, 8)), ValueError, "mode F has no fixed range"),
        (Image.new("I;16", (8, 8)), ValueError, "mode I;16 has no fixed range"),
    ],
)
def test_what_is_no_image(
    model: models.Network, given: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        model.preprocess(given)


@pytest.mark.parametrize(
    ("extra", "match"),
    [
        ({"mean": [0.5]}, r"mean=\[0\.5\]: expected 3 finite"),
        ({"mean": [0.5, 0.5, 10**400]}, "expected 3 finite"),
        ({"std": [1.0, 1.0, float("nan")]}, "std=.*expected 3 finite"),
        ({"std": [1.0, 1.0, 0.0]}, "expected positive"),
        ({"std": "one"}, "std='one'"),
        ({"image_size": [30000, 30000]}, r"image_size=\[30000, 30000\]: the limit is 4096 pixels"),
        ({"image_size": [8, 9]}, "expected the side of a square"),
        ({"image_size": "8"}, "expected the side of a square"),
        ({"image_size": [8] * 10**5}, "expected the side of a square"),
    ],
)
def test_files_that_say_nonsense(extra: dict[str, Any], match: str) -> None:
    made = make("explicit_digits", in_channels=3).eval()
    made.extra = {**EXTRA, **extra}
    for call in (made.preprocess, made.predict):
        with pytest.raises(ValueError, match=match) as caught:
            call(_photo(8, 8))
        assert len(str(caught.value)) < 300
    made(normal(made))  # the network itself needs none of it


# ---------------------------------------------------------------------- doubt


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (torch.randn(3, 8, 8), "image 0: values from .*normalized already, call model"),
        (_photo(8, 8).float(), "values from .* to 2.*; divide by 255, or give uint8"),
        (torch.zeros(3, 8, 8, dtype=torch.uint8), "almost no contrast"),
        (Image.new("RGB", (50, 50), "red"), "almost no contrast"),
        (_photo(8, 8).float() / 255 / 255, "almost no contrast"),
        (255 - 60 * (_photo(8, 8) > 240).byte(), "much brighter .* standard deviations"),
        ([_photo(8, 8), *[torch.zeros(3, 8, 8)] * 3], "image 1 and 2 more: almost no contrast"),
    ],
)
def test_images_unlike_those_of_training_are_named(
    model: models.Network, given: Any, match: str
) -> None:
    torch.manual_seed(0)
    with pytest.warns(models.InputWarning, match=match) as caught:
        model.preprocess(given)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    with pytest.warns(models.InputWarning, match=match) as caught:
        model.predict(given)


def test_pixels_that_were_not_normalized_are_noticed(model: models.Network) -> None:
    photo = _photo(8, 8)[None]
    for pixels in (photo / 255, photo.float()):
        with pytest.warns(models.InputWarning, match=r"plain pixels.*model\.preprocess") as caught:
            model(pixels)
        assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(model.preprocess(photo))
        model(normal(model))
        torch.func.vmap(model)(photo[None] / 255)
        explicit = make("explicit_digits", in_channels=3).eval()
        explicit.extra = dict(model.extra)
        torch.compile(explicit, fullgraph=True, backend="eager")(photo / 255)
        plain = make("geq_digits", in_channels=3).eval()  # nothing is known of its training
        plain(photo / 255)


def test_digits_raise_no_doubt() -> None:
    digits = eq.data.load("digits")
    made = make("geq_digits").eval()
    made.extra = {"mean": list(digits.mean), "std": list(digits.std)}
    some = digits.images[:300]
    x = made.preprocess(some)  # a warning is an error here
    torch.testing.assert_close(x, digits.normalize(some))
    made(x[:64])


# ---------------------------------------------------------------------- predict


def test_predictions_are_those_of_the_network_by_hand(model: models.Network) -> None:
    photos = torch.stack([_photo(8, 8, seed=i) for i in range(5)])
    with torch.no_grad():
        x = torch.from_numpy(_normalized(photos.numpy()))
        p = model(x.float()).double().softmax(1).numpy()
    found = model.predict(photos, top=2, batch_size=2)
    assert len(found) == 5
    for answer, row in zip(found, p, strict=True):
        order = np.argsort(-row)[:2]
        assert [name for name, _ in answer.labels] == [EXTRA["classes"][k] for k in order]
        assert [c for _, c in answer.labels] == pytest.approx(row[order], abs=1e-4)
        assert (answer.label, answer.confidence) == answer.labels[0]
        assert answer.steps >= 1
        assert answer.converged is True
        assert answer.radius is None
        assert answer.file is None


def test_predict_leaves_a_training_network_as_it_is() -> None:
    made = make("geq_digits").train()
    before = {key: value.clone() for key, value in made.state_dict().items()}
    (once,) = made.predict(_photo(8, 8, 1))
    assert made.training
    assert all(torch.equal(before[key], value) for key, value in made.state_dict().items())
    assert once == made.eval().predict(_photo(8, 8, 1))[0]
    assert once.label in ("0", "1", "2", "3", "4")  # without names: the numbers of the classes
    with pytest.raises(ValueError, match="top=0: expected an integer of at least 1"):
        made.predict(_photo(8, 8, 1), top=0)


def test_an_image_stops_when_its_label_is_proven() -> None:
    torch.manual_seed(0)
    made = models.create("geq_certified_digits", widths=(8,), depth=1).eval()
    photos = torch.stack([_photo(8, 8, 1, seed=i) for i in range(6)])
    plain, found = made.predict(photos, top=2), made.predict(photos, top=2, stop="label")
    exact = eq.certify(made, made.preprocess(photos)).label.tolist()
    assert any(answer.proven for answer in found)
    for answer, other, label in zip(found, plain, exact, strict=True):
        assert other.proven is None
        assert answer.labels == other.labels or answer.proven
        assert not answer.proven or answer.label == str(label)
        assert answer.steps in ((1, 2) if answer.proven else (4,))
    with pytest.raises(ValueError, match="stop='label': expected None or, without certify"):
        made.predict(photos, stop="label", certify=True)


def test_a_radius_holds_against_random_changes() -> None:
    torch.manual_seed(0)
    made = models.create("geq_certified_digits", widths=(8,), depth=1).eval()
    made.extra = {"mean": [0.3], "std": [0.4]}
    photo = _photo(8, 8, 1) / 255
    (answer,) = made.predict(photo, certify=True)
    assert answer.radius > 0
    changes = torch.randn(64, 1, 8, 8)
    changes *= 0.999 * answer.radius / changes.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
    mean, std = 0.3, 0.4
    with torch.no_grad():
        logits = made((photo + changes - mean) / std)
    assert set(logits.argmax(1).tolist()) == {int(answer.label)}


def test_classes_are_those_of_the_file(model: models.Network, tmp_path: Path) -> None:
    loaded = models.load(models.save(model, tmp_path / "m"))
    assert loaded.classes == tuple(EXTRA["classes"])
    assert make("geq_digits").classes == ("0", "1", "2", "3", "4")
    loaded.extra["classes"] = ["a", "b"]
    with pytest.raises(ValueError, match="name 2 classes and geq_digits has 5"):
        loaded.predict(_photo(8, 8))
