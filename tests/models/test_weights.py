"""Saving and loading: what a file keeps, what is refused, and eight bits against numpy."""

from __future__ import annotations

import hashlib
import json
import pickle
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor, nn

import equilibria as eq
from equilibria import models
from equilibria.models.weights import quantize
from tests.models.small import images, make


@pytest.fixture
def model() -> models.Network:
    return make("geq_digits").eval()


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a file."""
    path = tmp_path_factory.mktemp("good") / "model.safetensors"
    extra = {"classes": ["a", "b"], "mean": [0.5]}
    return models.save(make("explicit_digits").eval(), path, extra=extra).read_bytes()


def _contents(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """What the safetensors library finds in a file: an oracle that shares no code with ours."""
    with safetensors.safe_open(path, "pt") as file:
        metadata = dict(file.metadata())
    return safetensors.torch.load_file(path), metadata


def _parts(data: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def _file(header: Any, body: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


Change = Callable[[dict[str, Any]], Any]


def _rewrite(path: Path, change: Change) -> None:
    """Change a file's header through ``change(header)``; tensors stay.

    Without checksums, as older versions wrote it: what the header says is to be refused.
    """
    header, body = _parts(path.read_bytes())
    header["__metadata__"].pop("sha256", None)
    change(header)
    path.write_bytes(_file(header, body))


def _check_refused(path: Path, match: str) -> None:
    for read in (models.read_header, models.load):
        with pytest.raises(models.ModelFileError, match=match) as caught:
            read(path)  # type: ignore[operator]
        assert str(path) in str(caught.value)


# ---------------------------------------------------------------------- what is kept


def test_solver_and_adjoint_come_back(tmp_path: Path) -> None:
    solver = eq.BestIterate(eq.Anderson(memory=3, rtol=1e-2, max_steps=11, damping=0.9))
    adjoint = eq.Implicit(solver=eq.CG(rtol=1e-3))
    model = make("geq_digits", solver=solver, adjoint=adjoint, gamma=eq.LearnedGamma(0.4))
    loaded = models.load(models.save(model, tmp_path / "m"))
    layers = eq.nn.equilibrium_layers(loaded)
    assert len(layers) == 2
    for layer in layers.values():
        assert layer.solver == solver
        assert layer.adjoint == adjoint
        assert layer.gamma == eq.LearnedGamma(0.4)


def test_extra_travels_and_is_kept_on_the_next_save(model: models.Network, tmp_path: Path) -> None:
    extra = {"classes": ["é", "☂"], "mean": [0.1, 0.2], "metrics": {"accuracy": 0.5, "n": None}}
    loaded = models.load(models.save(model, tmp_path / "a", extra=extra))
    assert loaded.extra == extra
    assert models.load(models.save(loaded, tmp_path / "b")).extra == extra
    assert models.load(models.save(loaded, tmp_path / "c", extra={})).extra == {}
    with pytest.raises(TypeError, match=r"takes what JSON can hold.*Tensor"):
        models.save(model, tmp_path / "d", extra={"mean": torch.zeros(3)})
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("dtype", [None, torch.int8])
def test_a_loaded_network_trains_on(tmp_path: Path, dtype: torch.dtype | None) -> None:
    path = models.save(make("geq_digits"), tmp_path / "m", dtype=dtype)
    loaded, fresh = models.load(path).train(), models.load(path)
    before = {key: value.clone() for key, value in loaded.state_dict().items()}
    loaded(images(loaded)).square().sum().backward()
    torch.optim.SGD(loaded.parameters(), lr=0.1).step()
    assert all(not torch.equal(before[key], value) for key, value in loaded.named_parameters())
    # ... and weights are the network's own, not windows into the file.
    with path.open("r+b") as file:
        file.write(b"\0" * path.stat().st_size)
    assert all(torch.equal(before[key], value) for key, value in fresh.named_parameters())


@pytest.mark.slow
def test_compiled_and_channels_last_networks_are_saved_as_they_are(
    model: models.Network, tmp_path: Path
) -> None:
    x = images(model)
    with torch.no_grad():
        expected = model(x)
    wrapped = torch.compile(model.to(memory_format=torch.channels_last))
    loaded = models.load(models.save(wrapped, tmp_path / "m"))
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), expected)


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16, torch.float16])
def test_a_file_holds_the_state_in_the_precision_asked_for(
    model: models.Network, tmp_path: Path, dtype: torch.dtype | None
) -> None:
    path = models.save(model, tmp_path / "m", dtype=dtype, extra={"n": 1})
    found, metadata = _contents(path)
    assert metadata.keys() == {"format", "config", "library", "extra", "sha256"}
    tensors = {
        key: value.to(dtype) if dtype is not None and value.is_floating_point() else value
        for key, value in model.state_dict().items()
    }
    # The library orders metadata as it likes; length and tensors are all that it leaves to us.
    assert path.stat().st_size == len(safetensors.torch.save(tensors, metadata))
    as_stored, in_full = models.load(path), models.load(path, dtype=torch.float32)
    assert found.keys() == tensors.keys()
    for key, value in tensors.items():
        for other in (found[key], as_stored.state_dict()[key]):
            assert other.dtype == value.dtype, key
            assert torch.equal(other, value), key
        wide = value.float() if value.is_floating_point() else value
        assert torch.equal(in_full.state_dict()[key], wide), key


def test_precisions_may_be_mixed(model: models.Network, tmp_path: Path) -> None:
    model.stem.half()  # type: ignore[union-attr]
    path = models.save(model, tmp_path / "m")
    assert models.load(path).stem.weight.dtype == torch.float16  # type: ignore[union-attr]
    assert {p.dtype for p in models.load(path, dtype=torch.float32).parameters()} == {torch.float32}


def test_what_a_header_tells(good: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(good)
    header = models.read_header(path)
    assert header["config"]["name"] == "explicit_digits"
    assert header["config"]["num_classes"] == 5
    assert header["extra"] == {"classes": ["a", "b"], "mean": [0.5]}
    assert header["library"] == eq.__version__
    assert header["bytes"] == len(good)
    assert header["quantization"] is None
    raw = {name: value.numpy().tobytes() for name, value in _contents(path)[0].items()}
    assert header["sha256"] == {name: hashlib.sha256(d).hexdigest() for name, d in raw.items()}
    found = {name: tuple(value.shape) for name, value in _contents(path)[0].items()}
    assert found == {name: entry["shape"] for name, entry in header["tensors"].items()}


# ---------------------------------------------------------------------- what save refuses


def test_what_is_no_named_network_is_check_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"made by models\.create, got Linear without a config"):
        models.save(nn.Linear(2, 2), tmp_path / "m")


def test_places_that_are_no_place(model: models.Network, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is a folder; give a file"):
        models.save(model, tmp_path)
    with pytest.raises(FileNotFoundError, match="lies in no folder"):
        models.save(model, tmp_path / "none" / "m.safetensors")
    with pytest.raises(FileNotFoundError, match="does not exist: expected a file written by"):
        models.load(tmp_path / "none.safetensors")
    with pytest.raises(FileNotFoundError, match="is a folder"):
        models.read_header(tmp_path)


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8, torch.complex64, torch.bool, "int8"])
def test_dtypes_that_are_none(model: models.Network, tmp_path: Path, dtype: Any) -> None:
    with pytest.raises(ValueError, match=r"one of torch\.float64, .*torch\.float16, torch\.int8\."):
        models.save(model, tmp_path / "m", dtype=dtype)
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------- files that are none


class _Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("a pickle was executed",))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5, "torch"])
def test_pickles_are_recognized_and_not_opened(protocol: int | str, tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    if isinstance(protocol, int):
        path.write_bytes(pickle.dumps(_Bomb(), protocol))
    else:
        torch.save({"bomb": _Bomb()}, path)
    _check_refused(path, "looks like a pickle .torch.save., which is never opened")


def test_a_length_that_reads_like_a_pickle_is_fine(good: bytes, tmp_path: Path) -> None:
    # The header is padded to a multiple of 8, so one file in 32 begins with the byte 0x80.
    header, body = _parts(good)
    path = tmp_path / "m"
    text = json.dumps(header).encode()
    for low in range(0, 256, 8):
        padded = text + b" " * ((low - len(text)) % 256)
        data = _file(padded, body)
        assert data[0] == low
        path.write_bytes(data)
        assert models.load(path).extra["mean"] == [0.5]


@pytest.mark.parametrize(
    "damage",
    [
        *(lambda data, n=n: data[:n] for n in (0, 1, 8)),
        *(lambda data, n=n: struct.pack("<Q", n) + data[8:] for n in (0, 1, 2**40, 2**64 - 1)),
        lambda data: data + b"\0\0\0",
        *(
            lambda data, text=text: _file(text, b"")
            for text in (b"{ ", b'{"a": \xff}', b"[1, 2]", b"[" * 100_000, b"{}")
        ),
    ],
)
def test_files_that_are_none(good: bytes, damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_bytes(damage(good))
    _check_refused(path, "is not a usable model file")


@given(cut=st.floats(0.0, 0.999999))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_truncation_is_found(good: bytes, tmp_path: Path, cut: float) -> None:
    path = tmp_path / "m"
    path.write_bytes(good[: int(cut * len(good))])
    with pytest.raises(models.ModelFileError, match="truncated or damaged"):
        models.load(path)


@given(data=st.data())
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_header_never_raises_anything_else(
    good: bytes, tmp_path: Path, data: st.DataObject
) -> None:
    (length,) = struct.unpack("<Q", good[:8])
    place = data.draw(st.integers(0, 8 + length - 1))
    byte = data.draw(st.integers(0, 255))
    path = tmp_path / "m"
    path.write_bytes(good[:place] + bytes([byte]) + good[place + 1 :])
    try:
        model = models.load(path)
    except models.ModelFileError:
        return
    # A byte inside extra, or one that says the same: the network is whole.
    with torch.no_grad():
        assert torch.isfinite(model(images(model))).all()


def _field(name: str, **fields: Any) -> Change:
    return lambda header: header[name].update(fields)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (_field("stem.weight", dtype="F128"), "truncated or damaged"),
        (_field("stem.weight", shape=[9]), "truncated or damaged"),
        (_field("stem.weight", shape=[2**62, 2**62]), "truncated or damaged"),
        (_field("stem.weight", data_offsets=[4, 0]), "truncated or damaged"),
        (lambda header: header.update({"stem.weight": 3}), "truncated or damaged"),
        *(
            (_field("__metadata__", **fields), match)
            for fields, match in (
                ({"format": "pt"}, r"without the mark of models.save \(format='pt'"),
                ({"format": "equilibria-model/2"}, "format='equilibria-model/2'"),
                ({"config": "{"}, "its config is not valid JSON"),
                ({"config": "[]"}, "its config is a JSON list"),
                ({"config": '{"name": 3}'}, "its config has name=3, expected str"),
                ({"config": '{"name": "geq_digits"}'}, "num_classes=None, expected int"),
                ({"extra": "nothing"}, "its extra is not valid JSON"),
                ({"library": None}, "truncated or damaged"),
            )
        ),
        (lambda header: header.pop("__metadata__"), "without the mark of models.save"),
    ],
)
def test_headers_that_lie(good: bytes, tmp_path: Path, change: Change, match: str) -> None:
    path = tmp_path / "m"
    path.write_bytes(good)
    _rewrite(path, change)
    _check_refused(path, match)


# ---------------------------------------------------------------------- weights of another network


def _config(model: models.Network, change: dict[str, Any]) -> Change:
    config = model.config.to_dict()
    options = {**config["options"], **change.get("options", {})}
    text = json.dumps({**config, **change, "options": options})
    return _field("__metadata__", config=text)


def _nested(depth: int) -> list[Any]:
    made: list[Any] = []
    for _ in range(depth):
        made = [made]
    return made


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"num_classes": 6}, r"head.4.weight is F32 of shape \(5, 16\), expected .* \(6, 16\)"),
        ({"in_channels": 2}, r"shape \(8, 1, 3, 3\), expected .* \(8, 2, 3, 3\)"),
        ({"options": {"depth": 2}}, r"its network: tensors \d+ missing \(.*, …\)"),
        ({"num_classes": 0}, "num_classes=0, expected an integer"),
        ({"num_classes": 10**12}, "expected an integer in"),
        ({"num_classes": 10**4000}, r"expected an integer in \[1, 65536\]"),
        ({"image_size": 30000}, r"image_size=30000, expected an integer in \[1, 4096\]"),
        ({"options": {"widths": [10**4000]}}, "a list of 1 to 16 values"),
        ({"options": {"widths": _nested(900)}}, "cannot build"),
        (
            {"options": {"depth": 64}},
            r"depth=64 in 2 stage\(s\), more layers than the limit, .*, 31",
        ),
        ({"options": {"depth": 10**4000}}, "more layers than the limit"),
        *(
            ({"options": {option: {"kind": kind, **fields}}}, match)
            for option, kind, fields, match in (
                ("solver", "Anderson", {"max_steps": 10**9}, "max_steps=1000000000 in Anderson"),
                ("solver", "Anderson", {"max_steps": 10**4000}, "in Anderson; the limit is 100,00"),
                ("solver", "Anderson", {"memory": 10**9}, r"in Anderson; the limit is 1,000 \("),
                ("solver", "Anderson", {"rtol": 10**400}, "in Anderson; the limit is 10,000"),
                ("adjoint", "Phantom", {"steps": 10**6}, "in Phantom; the limit is 10,000"),
                (
                    "adjoint",
                    "Implicit",
                    {"solver": {"kind": "GMRES", "restart": 10**9}},
                    "restart=1000000000 in GMRES; the limit is 1,000",
                ),
            )
        ),
        ({"image_size": 7}, "image_size=7 is no multiple of"),
        ({"name": "geq_digitz"}, "there is no model 'geq_digitz'. Did you mean geq_digits"),
        ({"name": "__main__"}, "there is no model '__main__'"),
        ({"options": {"depth": 10**9}}, "depth=1000000000 in 2 stage"),
        ({"options": {"num_classes": 3}}, "cannot build"),
        ({"options": {"name": "x"}}, "cannot build"),
        ({"options": {"novelty": 3}}, "has no option 'novelty'"),
        ({"options": {"solver": {"kind": "Popen", "args": "true"}}}, "kind='Popen' is not known"),
    ],
)
def test_configurations_that_do_not_fit(
    model: models.Network, tmp_path: Path, change: dict[str, Any], match: str
) -> None:
    path = models.save(model, tmp_path / "m")
    _rewrite(path, _config(model, change))
    with pytest.raises(models.ModelFileError, match=match) as caught:
        models.load(path)
    assert len(str(caught.value)) < 1000 + len(str(path))  # numbers of any length are cut short


def test_limits_are_for_files_of_others(tmp_path: Path) -> None:
    solver = eq.Anderson(max_steps=10**6)
    path = models.save(make("geq_digits", solver=solver), tmp_path / "m")
    with pytest.raises(models.ModelFileError, match=r"load\(path, trusted=True\) has none"):
        models.load(path)
    loaded = models.load(path, trusted=True)
    assert {layer.solver for layer in eq.nn.equilibrium_layers(loaded).values()} == {solver}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            lambda header: header["stem.weight"].update(shape=[1] * 10**5 + [8, 1, 3, 3]),
            "stem.weight has 100,004 dimensions; the limit is 8",
        ),
        (
            lambda header: header["__metadata__"].update(extra=json.dumps("x" * 2**22)),
            "its extra has 4,194,306 characters; the limit is 4,194,304",
        ),
    ],
)
def test_headers_beyond_the_limits(good: bytes, tmp_path: Path, change: Change, match: str) -> None:
    path = tmp_path / "m"
    path.write_bytes(good)
    _rewrite(path, change)
    _check_refused(path, match)


# ---------------------------------------------------------------------- damage and values


@pytest.mark.parametrize(("dtype", "count"), [(None, 400), (torch.bfloat16, 25), (torch.int8, 25)])
def test_flipped_bytes_of_the_data_are_found(
    tmp_path: Path, dtype: torch.dtype | None, count: int
) -> None:
    path = models.save(make("explicit_digits"), tmp_path / "m", dtype=dtype)
    data = path.read_bytes()
    header, body = _parts(data)
    start = len(data) - len(body)
    places = np.random.default_rng(0).choice(len(body), count, replace=False).tolist()
    for place in places:
        damaged = bytearray(data)
        damaged[start + place] ^= 1 << place % 8
        path.write_bytes(damaged)
        (hit,) = (
            name
            for name, entry in header.items()
            if name != "__metadata__"
            and entry["data_offsets"][0] <= place < entry["data_offsets"][1]
        )
        with pytest.raises(models.ModelFileError, match=rf"m is not .*: {re.escape(hit)} does not"):
            models.load(path)
    path.write_bytes(data)
    models.load(path)


def test_flipped_bytes_of_the_configuration_are_found(good: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m"
    for old, new in ((b"[0.5]", b"[0.7]"), (b'"a', b'"c'), (b"explicit_", b"explicid_")):
        assert old in good.replace(b'\\"', b'"')
        changed = good.replace(old.replace(b'"', b'\\"'), new.replace(b'"', b'\\"'))
        assert changed != good
        path.write_bytes(changed)
        _check_refused(path, "its metadata do not have the checksum")


def test_a_checksum_that_is_missing_is_damage(good: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m"
    header, body = _parts(good)
    sums = json.loads(header["__metadata__"]["sha256"])
    del sums["stem.weight"]
    header["__metadata__"]["sha256"] = json.dumps(sums)
    path.write_bytes(_file(header, body))
    with pytest.raises(models.ModelFileError, match=r"stem\.weight does not have the SHA-256"):
        models.load(path)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("key", ["stem.weight", "head.0.running_var"])
def test_values_that_are_not_finite_are_named(
    model: models.Network, tmp_path: Path, key: str, bad: float
) -> None:
    with torch.no_grad():
        model.state_dict()[key].view(-1)[1] = bad
    path = models.save(model, tmp_path / "m")
    with pytest.raises(models.ModelFileError, match=rf"m is not .*: {key} holds NaN or infinity"):
        models.load(path)
    assert not torch.isfinite(models.load(path, trusted=True).state_dict()[key]).all()


COUNT = "stages.0.norm.num_batches_tracked"


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            lambda header: header.update({"stam.weight": header.pop("stem.weight")}),
            r"1 missing \(stem.weight\) and 1 that the network does not have \(stam.weight\)",
        ),
        (_field(COUNT, dtype="F64"), rf"{COUNT} is F64 of shape .*, expected I64"),
        (_field("stem.weight", dtype="I32"), "stem.weight is I32 of shape .*, expected F64 or F32"),
    ],
)
def test_tensors_that_do_not_fit(
    model: models.Network, tmp_path: Path, change: Change, match: str
) -> None:
    path = models.save(model, tmp_path / "m")
    _rewrite(path, change)
    with pytest.raises(models.ModelFileError, match=match):
        models.load(path)


# ---------------------------------------------------------------------- eight bits: the rule

Array = np.ndarray[Any, Any]


def _oracle(w: Array) -> tuple[Array, Array]:
    """s = max|w|/127 and q = round(w/s), row after row."""
    whole, scales = np.zeros(w.shape, np.int8), np.ones(len(w), np.float32)
    for row, values in enumerate(w.astype(np.float64)):
        if np.any(values):
            scales[row] = np.float32(np.max(np.abs(values)) / 127)
            whole[row] = np.rint(values / np.float64(scales[row])).astype(np.int8)
    return whole, scales


def _rows() -> st.SearchStrategy[Any]:
    """Matrices whose entries are 0 or between 2⁻¹⁰⁰ and 2⁹⁹ in size."""
    sizes = st.floats(2.0**-100, 2.0**99, width=32, allow_subnormal=False)
    entries = st.one_of(st.just(0.0), sizes, sizes.map(lambda v: -v), st.floats(-1, 1, width=16))
    shapes = st.tuples(st.integers(1, 4), st.integers(1, 6))
    return shapes.flatmap(lambda shape: arrays(np.float32, shape, elements=entries))


@settings(max_examples=200, deadline=None)
@given(_rows())
def test_integers_and_scales_are_numpy_s_and_within_half_a_step(w: Array) -> None:
    made, scale = quantize("w", torch.from_numpy(w))
    q, s = made.numpy(), scale.numpy()
    for found, wanted in zip((q, s), _oracle(w), strict=True):
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(found, wanted)
    half = np.abs(w.astype(np.float64)).max(1, keepdims=True) / 254
    exact = q.astype(np.float64) * s.astype(np.float64)[:, None]
    assert np.all(np.abs(w - exact) <= half * (1 + 1e-6))
    # The product in float32 is rounded once more: by 2⁻²⁴ of itself, which is 254·2⁻²⁴ of half.
    product = q.astype(np.float32) * s[:, None]
    assert np.all(np.abs(w - product.astype(np.float64)) <= half * (1 + 1e-6 + 254 * 2.0**-24))
    # What was quantized has the same integers. One rounding of s·127 and one of its 127th part: a
    # bit of the scale may flip, no more.
    again, other = quantize("w", torch.from_numpy(product))
    assert torch.equal(again, made)
    torch.testing.assert_close(other, scale, rtol=2.0**-22, atol=0)


def test_rows_by_hand() -> None:
    w = torch.tensor([[127.0, -127.0, 0.5, 1.5, -63.4], [0.0] * 5, [0.0, 0.0, -2.54, 0.01, 0.0]])
    q, s = quantize("w", w)
    assert q.tolist() == [[127, -127, 0, 2, -63], [0] * 5, [0, 0, -127, 0, 0]]  # ties go to even
    assert s.tolist() == pytest.approx([1.0, 1.0, 0.02])
    # Rows without a normal scale are rows of zeros.
    q, s = quantize("w", torch.tensor([[1e-37, -3e-38], [1e-45, 0.0], [1e-35, 0.0]]))
    assert q.tolist() == [[0, 0], [0, 0], [127, 0]]
    assert s[:2].tolist() == [1.0, 1.0]
    assert s[2] >= torch.finfo(torch.float32).tiny


@pytest.mark.parametrize("size", [1e39, 1e300])
def test_weights_beyond_float32(size: float) -> None:
    with pytest.raises(ValueError, match=r"head\.weight holds a weight of size 1e\+3"):
        quantize("head.weight", torch.tensor([[1.0, -size]], dtype=torch.float64))


# ---------------------------------------------------------------------- eight bits: whole networks

FAMILIES = [
    *("geq_digits", "opteq_digits", "geq_cifar_5m", "kerdeq_cifar_5m", "mopteq_cifar_5m"),
    *("deep_opteq_199k", "mondeq_multi", "mdeq_cifar", "explicit_digits", "deep_opteq_seg"),
]
STEM = "stem.weight"
SCALE = f"{STEM}.scale."
BUFFER = "stages.0.layer.W_h.parametrizations.weight.0.v"


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


def _assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert found[key].dtype == value.dtype, key
        assert torch.equal(found[key], value), key


@pytest.mark.parametrize("name", FAMILIES)
def test_round_trip(name: str, tmp_path: Path) -> None:
    model = make(name)
    model(images(model))  # running means and vectors of power iterations that are no defaults
    path = models.save(model.eval(), tmp_path / "m", dtype=torch.int8, extra={"classes": ["a"]})
    wanted = _expected(model)
    found, metadata = _contents(path)
    _assert_equal(found, wanted)
    note = json.loads(metadata["quantization"])
    assert models.read_header(path)["quantization"] == note
    assert (note["version"], note["scheme"], note["suffix"]) == (1, "int8 rows", ".scale.")
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
    assert models.save(model, tmp_path / "m", dtype=torch.int8).stat().st_size < 0.26 * whole


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_load_casts_once(model: models.Network, tmp_path: Path, dtype: torch.dtype) -> None:
    path = models.save(model, tmp_path / "m", dtype=torch.int8)
    plain, cast = models.load(path).state_dict(), models.load(path, dtype=dtype).state_dict()
    for key, value in plain.items():
        assert torch.equal(cast[key], value.to(dtype) if value.is_floating_point() else value), key


@pytest.mark.parametrize(
    "change",
    [
        nn.Module.double,
        lambda model: model.requires_grad_(False),
        lambda model: model.to(memory_format=torch.channels_last),
    ],
)
def test_what_does_not_change_the_file(
    model: models.Network, tmp_path: Path, change: Callable[[nn.Module], object]
) -> None:
    plain = _contents(models.save(model, tmp_path / "plain", dtype=torch.int8))
    change(model)
    tensors, metadata = _contents(models.save(model, tmp_path / "other", dtype=torch.int8))
    assert metadata == plain[1]
    _assert_equal(tensors, plain[0])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("key", [STEM, "head.0.bias", "head.0.running_var", BUFFER])
def test_weights_that_are_no_numbers(
    model: models.Network, tmp_path: Path, key: str, bad: float
) -> None:
    path = models.save(model, tmp_path / "m", dtype=torch.int8)
    with torch.no_grad():
        model.state_dict()[key].view(-1)[1] = bad
    with pytest.raises(ValueError, match=rf"{key} holds NaN or infinity.*dtype=None"):
        models.save(model, tmp_path / "other", dtype=torch.int8)
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
    if key != STEM:
        _damage(path, _tensor(key, lambda value: torch.full_like(value, bad)))
        with pytest.raises(models.ModelFileError, match=rf"{key} holds NaN or infinity"):
            models.load(path)


def test_no_network_computes_in_eight_bits(model: models.Network, tmp_path: Path) -> None:
    path = models.save(model, tmp_path / "m", dtype=torch.int8)
    with pytest.raises(ValueError, match=r"torch\.int8: weights are kept.*torch\.float16\.$"):
        models.load(path, dtype=torch.int8)


def test_a_buffer_that_float16_cannot_hold(model: models.Network, tmp_path: Path) -> None:
    model.get_buffer(BUFFER).view(-1)[0] = 1e6
    with pytest.raises(ValueError, match=rf"size 1e\+06 does not fit \({BUFFER}\)"):
        models.save(model, tmp_path / "m", dtype=torch.int8)


# ---------------------------------------------------------------------- eight bits: files that lie

Lie = Callable[[dict[str, Tensor], dict[str, str]], Any]


def _damage(path: Path, change: Lie) -> None:
    """Write the file again with other tensors or metadata; the header's sizes stay honest.

    Without checksums, as older versions wrote it.
    """
    tensors, metadata = _contents(path)
    metadata.pop("sha256", None)
    change(tensors, metadata)
    path.write_bytes(safetensors.torch.save(tensors, metadata))


def _tensor(name: str, value: Callable[[Tensor], Tensor] | None) -> Lie:
    def apply(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        old = tensors.pop(name)
        if value is not None:
            tensors[name] = value(old).contiguous()

    return apply


def _note(text: str | None = None, **fields: Any) -> Lie:
    def apply(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        changed = json.dumps({**json.loads(metadata["quantization"]), **fields})
        metadata["quantization"] = changed if text is None else text

    return apply


def _row(value: float) -> Lie:
    return _tensor(SCALE, lambda scale: scale.index_fill(0, torch.tensor([2]), value))


def _seven_rows(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    tensors[STEM], tensors[SCALE] = tensors[STEM][:7].clone(), tensors[SCALE][:7].clone()


HEADERS: list[tuple[Lie, str]] = [
    (_note(version=2), r"has version=2, and this version reads 1; use the version"),
    (_note(version=None), r"has version=None"),
    (_note(scheme="int4"), r"scheme='int4', and this version reads 'int8 rows'"),
    (_note(suffix=""), r"suffix='', and this version reads '\.scale\.'"),
    (_note("{"), r"its quantization is not valid JSON"),
    (_note("{}"), r"has version=None"),
    (_note("[1]"), r"its quantization is a JSON list, not an object"),
    (_note("null"), r"is a JSON NoneType, not an object"),
    (_note("[" * 100_000), r"is not valid JSON"),
]
BODIES: list[tuple[Lie, str]] = [
    (_tensor(SCALE, None), r"1 missing \(stem.weight.scale.\)"),
    (_tensor(SCALE, lambda s: s[:7]), r"F32 of shape \(7,\), expected F32.*\(8,\)"),
    (_tensor(SCALE, lambda s: s[:, None]), r"of shape \(8, 1\), expected F32"),
    (_tensor(SCALE, lambda s: s.half()), r"is F16 of shape \(8,\), expected F32"),
    (lambda tensors, metadata: metadata.pop("quantization"), r"network does not have \(.*scale"),
    (_tensor(STEM, lambda q: q.flatten()), r"is I8 of shape \(72,\), expected"),
    (_row(0.0), r"a scale of stem.weight is 0, expected a positive finite"),
    (_row(-0.1), r"a scale of stem.weight is -0.1"),
    (_row(float("nan")), r"a scale of stem.weight is nan"),
    (_row(float("inf")), r"a scale of stem.weight is inf"),
    (_row(3e38), r"stem.weight times its scales, up to 3e\+38, exceeds float32"),
    (_tensor(STEM, lambda q: torch.full_like(q, -128)), r"holds -128, expected −127 to 127"),
    (
        lambda tensors, metadata: tensors.update({"ghost.scale.": torch.ones(3)}),
        r"1 that the network does not have \(ghost.scale.\)",
    ),
    (_seven_rows, r"is I8 of shape \(7, 1, 3, 3\), expected I8 of shape \(8, 1, 3, 3\)"),
    (_tensor(STEM, lambda q: q.float()), r"is F32 of shape \(8, 1, 3, 3\), expected I8"),
    (_tensor(BUFFER, lambda v: v.to(torch.int8)), r"0\.v is I8 of shape .*, expected F16"),
    (_tensor("head.0.weight", lambda w: w.half()), r"is F16 of shape .*, expected F32"),
    (_tensor("head.4.bias", None), r"1 missing \(head.4.bias\)"),
]


@pytest.mark.parametrize(("change", "match"), [*HEADERS, *BODIES])
def test_files_in_eight_bits_that_lie(
    model: models.Network, tmp_path: Path, change: Lie, match: str
) -> None:
    path = models.save(model, tmp_path / "m", dtype=torch.int8)
    before = models.load(path).state_dict()
    _damage(path, lambda tensors, metadata: None)
    _assert_equal(models.load(path).state_dict(), before)  # the damage is what is refused
    _damage(path, change)
    if (change, match) in HEADERS:
        _check_refused(path, match)
    with pytest.raises(models.ModelFileError, match=match) as caught:
        models.load(path)
    assert str(path) in str(caught.value)
