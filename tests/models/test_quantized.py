"""Weights in eight bits: integers and scales against numpy, and the lies that files can tell."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from safetensors import safe_open
from torch import Tensor, nn

from equilibria import models
from equilibria.engine.files import SaveError
from equilibria.models.quantized import quantize
from tests.models.small import images, make

FAMILIES = [
    *("geq_digits", "opteq_digits", "geq_cifar_5m", "kerdeq_cifar_5m", "mopteq_cifar_5m"),
    *("deep_opteq_199k", "mondeq_multi", "mdeq_cifar", "explicit_digits", "deep_opteq_seg"),
]
STEM = "stem.weight"
BUFFER = "stages.0.layer.W_h.parametrizations.weight.0.v"


@pytest.fixture
def model() -> models.Network:
    return make("geq_digits").eval()


def _oracle(w: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """s = max|w|/127 and q = round(w/s), row after row."""
    whole, scales = np.zeros(w.shape, np.int8), np.ones(len(w), np.float32)
    for row, values in enumerate(w.astype(np.float64)):
        if np.any(values):
            scales[row] = np.float32(np.max(np.abs(values)) / 127)
            whole[row] = np.rint(values / np.float64(scales[row])).astype(np.int8)
    return whole, scales


def _contents(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """What the safetensors library finds in a file: an oracle that shares no code with ours."""
    with safe_open(path, "pt") as file:
        metadata = dict(file.metadata())
    return safetensors.torch.load_file(path), metadata


# ---------------------------------------------------------------------- the rule


def _rows(low: float) -> st.SearchStrategy[Any]:
    """Matrices whose entries are 0 or between ``low`` and 2⁹⁹ in size."""
    sizes = st.floats(low, 2.0**99, width=32, allow_subnormal=False)
    entries = st.one_of(st.just(0.0), sizes, sizes.map(lambda v: -v), st.floats(-1, 1, width=16))
    shapes = st.tuples(st.integers(1, 4), st.integers(1, 6))
    return shapes.flatmap(lambda shape: arrays(np.float32, shape, elements=entries))


@settings(max_examples=150, deadline=None)
@given(_rows(2.0**-100))
def test_no_weight_moves_by_more_than_half_a_step(w: np.ndarray[Any, Any]) -> None:
    q, s = (t.numpy() for t in quantize("w", torch.from_numpy(w)))
    assert q.dtype == np.int8
    assert s.dtype == np.float32
    assert q.min() >= -127
    assert np.all(s > 0)
    half = np.abs(w.astype(np.float64)).max(1, keepdims=True) / 254
    exact = q.astype(np.float64) * s.astype(np.float64)[:, None]
    assert np.all(np.abs(w - exact) <= half * (1 + 1e-6))
    # The product in float32 is rounded once more: by 2⁻²⁴ of itself, which is 254·2⁻²⁴ of half.
    product = q.astype(np.float32) * s[:, None]
    assert np.all(np.abs(w - product.astype(np.float64)) <= half * (1 + 1e-6 + 254 * 2.0**-24))


@settings(max_examples=150, deadline=None)
@given(_rows(2.0**-100))
def test_what_was_quantized_has_the_same_integers(w: np.ndarray[Any, Any]) -> None:
    q, s = quantize("w", torch.from_numpy(w))
    again, scale = quantize("w", q.float() * s[:, None])
    assert torch.equal(again, q)
    # One rounding of s·127 and one of its 127th part: a bit of the scale may flip, no more.
    torch.testing.assert_close(scale, s, rtol=2.0**-22, atol=0)


@settings(max_examples=100, deadline=None)
@given(_rows(2.0**-100))
def test_integers_and_scales_are_numpy_s(w: np.ndarray[Any, Any]) -> None:
    q, s = quantize("w", torch.from_numpy(w))
    whole, scales = _oracle(w)
    np.testing.assert_array_equal(q.numpy(), whole)
    np.testing.assert_array_equal(s.numpy(), scales)


def test_rows_by_hand() -> None:
    w = torch.tensor([[127.0, -127.0, 0.5, 1.5, -63.4], [0.0] * 5, [0.0, 0.0, -2.54, 0.01, 0.0]])
    q, s = quantize("w", w)
    assert q.tolist() == [[127, -127, 0, 2, -63], [0] * 5, [0, 0, -127, 0, 0]]  # ties go to even
    assert s.tolist() == pytest.approx([1.0, 1.0, 0.02])


def test_rows_without_a_normal_scale_are_rows_of_zeros() -> None:
    q, s = quantize("w", torch.tensor([[1e-37, -3e-38], [1e-45, 0.0], [1e-35, 0.0]]))
    assert q.tolist() == [[0, 0], [0, 0], [127, 0]]
    assert s[:2].tolist() == [1.0, 1.0]
    assert s[2] >= torch.finfo(torch.float32).tiny


@pytest.mark.parametrize("size", [1e39, 1e300])
def test_weights_beyond_float32(size: float) -> None:
    with pytest.raises(ValueError, match=r"head\.weight holds a weight of size 1e\+3"):
        quantize("head.weight", torch.tensor([[1.0, -size]], dtype=torch.float64))


# ---------------------------------------------------------------------- whole networks


def _expected(model: nn.Module) -> dict[str, Tensor]:
    """What a file in eight bits should hold, from the rule and numpy alone."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    wanted: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if not value.is_floating_point():
            wanted[name] = value
        elif value.ndim < 2:
            wanted[name] = value.float()
        elif name in parameters:
            whole, scales = _oracle(value.numpy())
            wanted[name], wanted[f"{name}.scale."] = map(torch.from_numpy, (whole, scales))
        else:
            wanted[name] = value.half()
    return wanted


@pytest.mark.parametrize("name", FAMILIES)
def test_round_trip(name: str, tmp_path: Path) -> None:
    model = make(name)
    model(images(model))  # running means and vectors of power iterations that are no defaults
    path = models.save(model.eval(), tmp_path / "m", dtype=torch.int8, extra={"classes": ["a"]})
    wanted = _expected(model)
    found, metadata = _contents(path)
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert found[key].dtype == value.dtype, key
        assert torch.equal(found[key], value), key
    note = json.loads(metadata["quantization"])
    assert {f"{key}.scale." for key in note["tensors"]} == wanted.keys() - model.state_dict().keys()
    assert all(wanted[key].dtype == torch.int8 for key in note["tensors"])

    loaded = models.load(path)
    assert loaded.extra == {"classes": ["a"]}
    assert loaded.config == model.config
    assert not loaded.training
    for key, value in loaded.state_dict().items():
        scale = wanted.get(f"{key}.scale.")
        stored = wanted[key]
        if scale is not None:
            stored = stored.float() * scale.view(-1, *[1] * (stored.ndim - 1))
        floating = model.state_dict()[key].is_floating_point()
        assert torch.equal(value, stored.float() if floating else stored), key
        assert value.dtype == (torch.float32 if floating else torch.int64), key

    again, _ = _contents(models.save(loaded, tmp_path / "again", dtype=torch.int8))
    assert again.keys() == found.keys()
    for key, value in again.items():
        if not key.endswith(".scale."):
            assert torch.equal(value, found[key]), key


def test_logits_stay_close(model: models.Network, tmp_path: Path) -> None:
    with torch.no_grad():
        model.train()(images(model, batch=16))  # norms that fit the images
        x = images(model.eval(), batch=16, seed=5)
        expected = model(x)
        loaded = models.load(models.save(model, tmp_path / "m", dtype=torch.int8))
        error = torch.linalg.vector_norm(loaded(x) - expected) / torch.linalg.vector_norm(expected)
    assert 0 < float(error) < 0.05


def test_a_quarter_of_the_size(tmp_path: Path) -> None:
    model = make("resnet18_cifar")
    whole = models.save(model, tmp_path / "whole").stat().st_size
    path = models.save(model, tmp_path / "small", dtype=torch.int8)
    assert path.stat().st_size < 0.26 * whole
    loaded = models.load(path).state_dict()
    for key, value in model.named_parameters():
        rows = value.detach().flatten(1) if value.ndim > 1 else value.detach()[:, None]
        bound = rows.abs().amax(1, keepdim=True) / 254 * (1 + 2e-5) if value.ndim > 1 else 0.0
        assert bool(((loaded[key].view_as(rows) - rows).abs() <= bound).all()), key


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_load_casts_once(model: models.Network, tmp_path: Path, dtype: torch.dtype) -> None:
    path = models.save(model, tmp_path / "m", dtype=torch.int8)
    plain, cast = models.load(path).state_dict(), models.load(path, dtype=dtype).state_dict()
    for key, value in plain.items():
        if value.is_floating_point():
            assert cast[key].dtype == dtype
            assert torch.equal(cast[key], value.to(dtype)), key


def _frozen(model: nn.Module) -> None:
    model.requires_grad_(False)


def _channels_last(model: nn.Module) -> None:
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


@pytest.mark.parametrize("change", [nn.Module.double, _frozen, _channels_last])
def test_what_does_not_change_the_file(
    model: models.Network, tmp_path: Path, change: Callable[[nn.Module], object]
) -> None:
    plain = _contents(models.save(model, tmp_path / "plain", dtype=torch.int8))
    change(model)
    tensors, metadata = _contents(models.save(model, tmp_path / "other", dtype=torch.int8))
    assert metadata == plain[1]
    assert tensors.keys() == plain[0].keys()
    for key, value in tensors.items():
        assert value.dtype == plain[0][key].dtype
        assert torch.equal(value, plain[0][key]), key


def test_a_loaded_network_trains_on(model: models.Network, tmp_path: Path) -> None:
    loaded = models.load(models.save(model, tmp_path / "m", dtype=torch.int8)).train()
    loaded(images(loaded)).square().sum().backward()
    assert all(p.grad is not None and p.is_leaf for p in loaded.parameters())


def test_the_header_tells(model: models.Network, tmp_path: Path) -> None:
    note = models.read_header(models.save(model, tmp_path / "m", dtype=torch.int8))["quantization"]
    assert (note["version"], note["scheme"], note["suffix"]) == (1, "int8 rows", ".scale.")
    assert STEM in note["tensors"]
    assert models.read_header(models.save(model, tmp_path / "n"))["quantization"] is None


# ---------------------------------------------------------------------- files as before


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16, torch.float16])
def test_other_files_are_what_they_were(
    model: models.Network, tmp_path: Path, dtype: torch.dtype | None
) -> None:
    path = models.save(model, tmp_path / "m", dtype=dtype, extra={"n": 1})
    _, metadata = _contents(path)
    assert metadata.keys() == {"format", "config", "library", "extra"}
    tensors = {
        key: value.to(dtype) if dtype is not None and value.is_floating_point() else value
        for key, value in model.state_dict().items()
    }
    # The library orders metadata as it likes; length and tensors are all that it leaves to us.
    written, again = path.read_bytes(), safetensors.torch.save(tensors, metadata)
    assert len(written) == len(again)
    start = 8 + int.from_bytes(written[:8], "little")
    assert written[start:] == again[start:]
    loaded = models.load(path)
    assert all(torch.equal(loaded.state_dict()[key], value) for key, value in tensors.items())
    assert all(loaded.state_dict()[key].dtype == value.dtype for key, value in tensors.items())


# ---------------------------------------------------------------------- what save refuses


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_no_numbers(model: models.Network, tmp_path: Path, bad: float) -> None:
    path = models.save(model, tmp_path / "m", dtype=torch.int8)
    old = path.read_bytes()
    key = "stages.2.layer.W.parametrizations.weight.original"
    with torch.no_grad():
        model.get_parameter(key)[3, 1, 0, 2] = bad
    with pytest.raises(ValueError, match=rf"{key} holds NaN or infinity.*dtype=None"):
        models.save(model, path, dtype=torch.int8)
    assert path.read_bytes() == old
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("key", ["head.0.bias", "head.0.running_var", BUFFER])
def test_what_is_not_quantized_is_finite_too(
    model: models.Network, tmp_path: Path, key: str
) -> None:
    path = models.save(model, tmp_path / "m", dtype=torch.int8)
    model.state_dict()[key].view(-1)[1] = float("nan")
    with pytest.raises(ValueError, match=rf"{key} holds NaN or infinity"):
        models.save(model, tmp_path / "other", dtype=torch.int8)
    tensors, metadata = _contents(path)
    tensors[key].view(-1)[1] = float("inf")
    safetensors.torch.save_file(tensors, path, metadata)
    with pytest.raises(models.ModelFileError, match=rf"{key} holds NaN or infinity"):
        models.load(path)


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8, torch.complex64, torch.bool, "int8"])
def test_dtypes_that_are_none(model: models.Network, tmp_path: Path, dtype: Any) -> None:
    with pytest.raises(ValueError, match=r"one of torch\.float64, .*torch\.float16, torch\.int8\."):
        models.save(model, tmp_path / "m", dtype=dtype)
    assert list(tmp_path.iterdir()) == []


def test_no_network_computes_in_eight_bits(model: models.Network, tmp_path: Path) -> None:
    path = models.save(model, tmp_path / "m", dtype=torch.int8)
    with pytest.raises(ValueError, match=r"torch\.int8: weights are kept.*torch\.float16\.$"):
        models.load(path, dtype=torch.int8)


def test_a_buffer_that_float16_cannot_hold(model: models.Network, tmp_path: Path) -> None:
    key = "stages.0.layer.W.parametrizations.weight.0.v"
    model.get_buffer(key)[0, 0, 0, 0] = 1e6
    with pytest.raises(ValueError, match=rf"size 1e\+06 does not fit \({key}\)"):
        models.save(model, tmp_path / "m", dtype=torch.int8)


def test_a_failed_rename_leaves_the_old_file(
    model: models.Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = models.save(model, tmp_path / "m")
    old = path.read_bytes()

    def refuse(self: Path, target: Path) -> None:
        raise PermissionError(errno.EACCES, "refused")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(SaveError, match="refused"):
        models.save(model, path, dtype=torch.int8)
    assert path.read_bytes() == old
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


# ---------------------------------------------------------------------- files that lie

Change = Callable[[dict[str, Tensor], dict[str, Any]], None]
SCALE = f"{STEM}.scale."
FROZEN = "head.0.weight"  # a norm's: of one dimension, kept in float32


def _damage(path: Path, change: Change) -> None:
    """Write the file again with other tensors or another note; the header's sizes stay honest."""
    tensors, metadata = _contents(path)
    note = json.loads(metadata.pop("quantization"))
    change(tensors, note)
    if "whole text" in note:
        note = note["whole text"]
    if note != {}:
        metadata["quantization"] = note if isinstance(note, str) else json.dumps(note)
    path.write_bytes(safetensors.torch.save(tensors, metadata))


def _tensor(name: str, value: Callable[[Tensor], Tensor] | None) -> Change:
    def apply(tensors: dict[str, Tensor], note: dict[str, Any]) -> None:
        old = tensors.pop(name)
        if value is not None:
            tensors[name] = value(old).contiguous()

    return apply


def _note(**fields: Any) -> Change:
    return lambda tensors, note: note.update(fields)


def _row(value: float) -> Change:
    def put(scale: Tensor) -> Tensor:
        scale[2] = value
        return scale

    return _tensor(SCALE, put)


def _both(first: Change, second: Change) -> Change:
    def apply(tensors: dict[str, Tensor], note: dict[str, Any]) -> None:
        first(tensors, note)
        second(tensors, note)

    return apply


HEADERS: dict[str, tuple[Change, str]] = {
    "later version": (
        _note(version=2),
        r"has version=2, and this version reads 1; use the version",
    ),
    "no version": (lambda t, note: note.pop("version"), r"has version=None"),
    "other scheme": (_note(scheme="int4"), r"scheme='int4', and this version reads 'int8 rows'"),
    "other suffix": (_note(suffix=""), r"suffix='', and this version reads '\.scale\.'"),
    "no JSON": (_note(**{"whole text": "{"}), r"its quantization is not valid JSON"),
    "a list": (_note(**{"whole text": "[1]"}), r"its quantization is a JSON list, not an object"),
    "null": (_note(**{"whole text": "null"}), r"is a JSON NoneType, not an object"),
    "deep": (_note(**{"whole text": "[" * 100_000}), r"is not valid JSON"),
}
BODIES: dict[str, tuple[Change, str]] = {
    "no scale": (_tensor(SCALE, None), r"1 missing \(stem.weight.scale.\)"),
    "short scale": (_tensor(SCALE, lambda s: s[:7]), r"F32 of shape \(7,\), expected F32.*\(8,\)"),
    "deep scale": (_tensor(SCALE, lambda s: s[:, None]), r"of shape \(8, 1\), expected F32"),
    "half scale": (_tensor(SCALE, lambda s: s.half()), r"is F16 of shape \(8,\), expected F32"),
    "no note": (lambda tensors, note: note.clear(), "mixes the precisions F16, F32, I8"),
    "one dimension": (_tensor(STEM, lambda q: q.flatten()), r"is I8 of shape \(72,\), expected"),
    "zero": (_row(0.0), r"scale of row 2 of stem.weight is 0.0, expected a positive finite"),
    "negative": (_row(-0.1), r"scale of row 2 of stem.weight is -0.1"),
    "NaN": (_row(float("nan")), r"scale of row 2 of stem.weight is nan"),
    "infinite": (_row(float("inf")), r"scale of row 2 of stem.weight is inf"),
    "overflow": (_row(3e38), r"stem.weight times its scales, up to 3e\+38, exceeds float32"),
    "-128": (
        _tensor(STEM, lambda q: torch.full_like(q, -128)),
        r"stem.weight holds -128, expected −127 to 127",
    ),
    "orphaned scale": (
        lambda tensors, note: tensors.update({"ghost.scale.": torch.ones(3)}),
        r"1 that the network does not have \(ghost.scale.\)",
    ),
    "other rows": (
        _both(_tensor(STEM, lambda q: q[:7]), _tensor(SCALE, lambda s: s[:7])),
        r"stem.weight is I8 of shape \(7, 1, 3, 3\), expected I8 of shape \(8, 1, 3, 3\)",
    ),
    "a weight not quantized": (
        _tensor(STEM, lambda q: q.float()),
        r"stem.weight is F32 of shape \(8, 1, 3, 3\), expected I8",
    ),
    "a buffer quantized": (
        _tensor(BUFFER, lambda v: v.to(torch.int8)),
        r"0\.v is I8 of shape .*, expected F16",
    ),
    "a norm in half": (_tensor(FROZEN, lambda w: w.half()), r"is F16 of shape .*, expected F32"),
    "missing": (_tensor("head.4.bias", None), r"1 missing \(head.4.bias\)"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_headers_that_lie(model: models.Network, tmp_path: Path, case: str) -> None:
    change, match = HEADERS[case]
    path = models.save(model, tmp_path / "m", dtype=torch.int8)
    _damage(path, change)
    for read in (models.read_header, models.load):
        with pytest.raises(models.ModelFileError, match=match) as caught:
            read(path)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize("case", BODIES)
def test_tensors_that_lie(model: models.Network, tmp_path: Path, case: str) -> None:
    change, match = BODIES[case]
    path = models.save(model, tmp_path / "m", dtype=torch.int8)
    _damage(path, change)
    with pytest.raises(models.ModelFileError, match=match) as caught:
        models.load(path)
    assert str(path) in str(caught.value)


def test_the_damage_is_what_is_refused(model: models.Network, tmp_path: Path) -> None:
    path = models.save(model, tmp_path / "m", dtype=torch.int8)
    before = models.load(path).state_dict()
    _damage(path, lambda tensors, note: None)
    after = models.load(path).state_dict()
    assert all(torch.equal(value, before[key]) for key, value in after.items())


@pytest.mark.parametrize("kept", [0.1, 0.5, 0.999])
def test_truncated_files(model: models.Network, tmp_path: Path, kept: float) -> None:
    path = models.save(model, tmp_path / "m", dtype=torch.int8)
    data = path.read_bytes()
    path.write_bytes(data[: int(kept * len(data))])
    with pytest.raises(models.ModelFileError, match="truncated"):
        models.load(path)
