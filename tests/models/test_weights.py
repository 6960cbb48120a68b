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
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor, nn

import equilibria as eq
from equilibria import models
from equilibria.models.weights import quantize
from tests.models.small import images, make

STEM = "stem.weight"
SCALE = f"{STEM}.scale."
BUFFER = "stages.0.layer.W_h.parametrizations.weight.0.v"
EXTRA = {"classes": ["a", "b"], "mean": [0.5]}
DTYPES = [None, torch.int8]


@pytest.fixture
def model() -> models.Network:
    return make("geq_digits").eval()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[torch.dtype | None, bytes]:
    """The bytes of a file in full precision, under None, and of one in eight bits."""
    path, made = tmp_path_factory.mktemp("written") / "m", make("geq_digits").eval()
    return {d: models.save(made, path, dtype=d, extra=EXTRA).read_bytes() for d in DTYPES}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "m"


def _contents(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """What the safetensors library finds in a file: an oracle that shares no code with ours."""
    with safetensors.safe_open(path, "pt") as file:
        metadata = dict(file.metadata())
    return safetensors.torch.load_file(path), metadata


def _assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert found[key].dtype == value.dtype, key
        assert torch.equal(found[key], value), key


# ---------------------------------------------------------------------- what is kept


def test_extra_travels_and_is_kept_on_the_next_save(model: models.Network, tmp_path: Path) -> None:
    extra = {"classes": ["é", "☂"], "mean": [0.1, 0.2], "metrics": {"accuracy": 0.5, "n": None}}
    loaded = models.load(models.save(model, tmp_path / "a", extra=extra))
    assert loaded.extra == extra
    assert models.load(models.save(loaded, tmp_path / "b")).extra == extra
    assert models.load(models.save(loaded, tmp_path / "c", extra={})).extra == {}
    with pytest.raises(TypeError, match=r"takes what JSON can hold.*Tensor"):
        models.save(model, tmp_path / "d", extra={"mean": torch.zeros(3)})
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_loaded_network_trains_on(path: Path, dtype: torch.dtype | None) -> None:
    models.save(make("geq_digits"), path, dtype=dtype)
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
    model: models.Network, path: Path
) -> None:
    x = images(model)
    with torch.no_grad():
        expected = model(x)
    wrapped = torch.compile(model.to(memory_format=torch.channels_last))
    loaded = models.load(models.save(wrapped, path))
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), expected)


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16, torch.float16])
def test_a_file_holds_the_state_in_the_precision_asked_for(
    model: models.Network, path: Path, dtype: torch.dtype | None
) -> None:
    found, metadata = _contents(models.save(model, path, dtype=dtype, extra={"n": 1}))
    assert metadata.keys() == {"format", "config", "library", "extra", "sha256"}
    tensors = {
        key: value.to(dtype) if dtype is not None and value.is_floating_point() else value
        for key, value in model.state_dict().items()
    }
    # The library orders metadata as it likes; length and tensors are all that it leaves to us.
    assert path.stat().st_size == len(safetensors.torch.save(tensors, metadata))
    for state in (found, models.load(path).state_dict()):
        _assert_equal(state, tensors)
    wide = {k: v.float() if v.is_floating_point() else v for k, v in tensors.items()}
    _assert_equal(models.load(path, dtype=torch.float32).state_dict(), wide)


def test_what_a_header_tells(written: dict[Any, bytes], path: Path) -> None:
    path.write_bytes(written[None])
    header = models.read_header(path)
    assert header["config"]["name"] == "geq_digits"
    assert header["config"]["num_classes"] == 5
    assert header["extra"] == EXTRA
    assert header["library"] == eq.__version__
    assert header["bytes"] == len(written[None])
    assert header["quantization"] is None
    found = _contents(path)[0]
    sums = {n: hashlib.sha256(value.numpy().tobytes()).hexdigest() for n, value in found.items()}
    assert header["sha256"] == sums
    shapes = {name: tuple(value.shape) for name, value in found.items()}
    assert shapes == {name: entry["shape"] for name, entry in header["tensors"].items()}


# ---------------------------------------------------------------------- what is no option, no place


def test_what_is_no_named_network_is_refused(path: Path) -> None:
    with pytest.raises(TypeError, match=r"made by models\.create, got Linear without a config"):
        models.save(nn.Linear(2, 2), path)


def test_a_network_with_another_head_is_not_saved(path: Path) -> None:
    """``models.load`` would refuse the file: its configuration says ten classes."""
    network: Any = models.create("geq_digits", widths=(4, 4))
    network.head[-1] = torch.nn.Linear(4, 5)
    with pytest.raises(
        models.ModelFileError, match=r"parts replaced.*\(5, 4\), expected.*\(10, 4\)"
    ):
        models.save(network, path)
    assert not path.exists()


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
def test_dtypes_that_are_none(model: models.Network, path: Path, dtype: Any) -> None:
    with pytest.raises(ValueError, match=r"one of torch\.float64, .*torch\.float16, torch\.int8\."):
        models.save(model, path, dtype=dtype)
    assert not path.exists()


def test_no_network_computes_in_eight_bits(written: dict[Any, bytes], path: Path) -> None:
    path.write_bytes(written[torch.int8])
    with pytest.raises(ValueError, match=r"torch\.int8: weights are kept.*torch\.float16\.$"):
        models.load(path, dtype=torch.int8)


# ---------------------------------------------------------------------- damaged files

Damage = Callable[[bytes], bytes]


def _check_refused(path: Path, match: str, *readers: Callable[[Path], Any]) -> None:
    for read in readers or (models.read_header, models.load):
        with pytest.raises(models.ModelFileError, match=match) as caught:
            read(path)
        text = str(caught.value)
        assert str(path) in text
        assert len(text) < 1000 + len(str(path))  # numbers of any length are cut short


def _parts(data: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def _file(header: Any, body: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


class _Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("a pickle was executed",))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5, "torch"])
def test_pickles_are_recognized_and_not_opened(protocol: int | str, path: Path) -> None:
    if isinstance(protocol, int):
        path.write_bytes(pickle.dumps(_Bomb(), protocol))
    else:
        torch.save({"bomb": _Bomb()}, path)
    _check_refused(path, "looks like a pickle .torch.save., which is never opened")


def test_a_length_that_reads_like_a_pickle_is_fine(written: dict[Any, bytes], path: Path) -> None:
    # The header is padded to a multiple of 8, so one file in 32 begins with the byte 0x80.
    header, body = _parts(written[None])
    text = json.dumps(header).encode()
    path.write_bytes(_file(text + b" " * ((0x80 - len(text)) % 256), body))
    assert path.read_bytes()[0] == 0x80
    assert models.load(path).extra == EXTRA


@pytest.mark.parametrize(
    "damage",
    [
        *(lambda data, n=n: data[:n] for n in (0, 1, 7, 8, 9, 500, 20_000, -1)),
        *(lambda data, n=n: struct.pack("<Q", n) + data[8:] for n in (0, 1, 2**40, 2**64 - 1)),
        lambda data: data + b"\0\0\0",
        *(
            lambda data, text=text: _file(text, b"")
            for text in (b"{ ", b'{"a": \xff}', b"[1, 2]", b"[" * 100_000, b"{}")
        ),
    ],
)
def test_files_that_are_none(written: dict[Any, bytes], damage: Damage, path: Path) -> None:
    path.write_bytes(damage(written[None]))
    _check_refused(path, "is not a usable model file")


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.int8])
def test_a_flipped_bit_of_any_tensor_is_found(path: Path, dtype: torch.dtype | None) -> None:
    data = models.save(make("explicit_digits"), path, dtype=dtype).read_bytes()
    header, body = _parts(data)
    source = np.random.default_rng(0)
    for name in header.keys() - {"__metadata__"}:
        place = len(data) - len(body) + int(source.integers(*header[name]["data_offsets"]))
        damaged = bytearray(data)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        _check_refused(path, rf"m is not .*: {re.escape(name)} does not have the SHA", models.load)
    path.write_bytes(data)
    models.load(path)


def test_flipped_bytes_of_the_configuration_are_found(
    written: dict[Any, bytes], path: Path
) -> None:
    for old, new in ((b"[0.5]", b"[0.7]"), (rb"\"a", rb"\"c"), (b"geq_digits", b"geq_digitz")):
        changed = written[None].replace(old, new)
        assert changed != written[None]
        path.write_bytes(changed)
        _check_refused(path, "its metadata do not have the checksum")


def test_a_checksum_that_is_missing_is_damage(written: dict[Any, bytes], path: Path) -> None:
    header, body = _parts(written[None])
    sums = json.loads(header["__metadata__"]["sha256"])
    del sums[STEM]
    header["__metadata__"]["sha256"] = json.dumps(sums)
    path.write_bytes(_file(header, body))
    _check_refused(path, r"stem\.weight does not have the SHA-256", models.load)


# ---------------------------------------------------------------------- files that lie
# Without checksums, as older versions wrote them: what a file says is to be refused.


def _header(change: Callable[[dict[str, Any]], Any]) -> Damage:
    """Change the header; tensors stay."""

    def damage(data: bytes) -> bytes:
        header, body = _parts(data)
        header["__metadata__"].pop("sha256", None)
        change(header)
        return _file(header, body)

    return damage


def _field(name: str, **fields: Any) -> Damage:
    return _header(lambda header: header[name].update(fields))


def _metadata(**fields: Any) -> Damage:
    return _field("__metadata__", **fields)


def _json(key: str, **fields: Any) -> Damage:
    """Change an object of the metadata, and where a field of it is an object, that."""

    def change(header: dict[str, Any]) -> None:
        held = json.loads(header["__metadata__"][key])
        for name, value in fields.items():
            inner = held.get(name)
            held[name] = {**inner, **value} if isinstance(inner, dict) else value
        header["__metadata__"][key] = json.dumps(held)

    return _header(change)


def _tensor(name: str, value: Callable[[Tensor], Tensor] | None) -> Damage:
    """Write another tensor, or none; the header's sizes stay honest."""

    def damage(data: bytes) -> bytes:
        tensors, metadata = safetensors.torch.load(data), _parts(data)[0]["__metadata__"]
        del metadata["sha256"]
        old = tensors.pop(name)
        if value is not None:
            tensors[name] = value(old).contiguous()
        return safetensors.torch.save(tensors, metadata)

    return damage


def test_older_files_without_checksums_load(written: dict[Any, bytes], path: Path) -> None:
    for data in written.values():
        path.write_bytes(data)
        expected = models.load(path).state_dict()
        for damage in (_header(lambda header: None), _tensor(STEM, lambda value: value)):
            path.write_bytes(damage(data))
            assert models.read_header(path)["sha256"] is None
            _assert_equal(models.load(path).state_dict(), expected)


HEADERS: list[tuple[Damage, str]] = [
    (_field(STEM, dtype="F128"), "truncated or damaged"),
    (_field(STEM, shape=[9]), "truncated or damaged"),
    (_field(STEM, shape=[2**62, 2**62]), "truncated or damaged"),
    (_field(STEM, data_offsets=[4, 0]), "truncated or damaged"),
    (_header(lambda header: header.update({STEM: 3})), "truncated or damaged"),
    (_metadata(library=None), "truncated or damaged"),
    (_metadata(format="pt"), r"without the mark of models.save \(format='pt'"),
    (_metadata(format="equilibria-model/2"), "format='equilibria-model/2'"),
    (_header(lambda header: header.pop("__metadata__")), "without the mark of models.save"),
    (_metadata(config="{"), "its config is not valid JSON"),
    (_metadata(config="[]"), "its config is a JSON list"),
    (_metadata(config='{"name": 3}'), "its config has name=3, expected str"),
    (_metadata(config='{"name": "geq_digits"}'), "num_classes=None, expected int"),
    (_metadata(extra="nothing"), "its extra is not valid JSON"),
    (_metadata(quantization="null"), "its quantization is a JSON NoneType, not an object"),
    (_metadata(quantization="[" * 100_000), "its quantization is not valid JSON"),
    (_metadata(quantization="{}"), "its quantization has version=None"),
    (_json("quantization", version=2), "has version=2, and this version reads 1; use the version"),
    (_json("quantization", scheme="int4"), "scheme='int4', and this version reads 'int8 rows'"),
    (_json("quantization", suffix=""), r"suffix='', and this version reads '\.scale\.'"),
    (
        _field(STEM, shape=[1] * 10**5 + [8, 1, 3, 3]),
        "stem.weight has 100,004 dimensions; the limit is 8",
    ),
    (
        _metadata(extra=json.dumps("x" * 2**22)),
        "its extra has 4,194,306 characters; the limit is 4,194,304",
    ),
]


@pytest.mark.parametrize(("damage", "match"), HEADERS)
def test_headers_that_lie(
    written: dict[Any, bytes], path: Path, damage: Damage, match: str
) -> None:
    path.write_bytes(damage(written[torch.int8]))
    _check_refused(path, match)


def _nested(depth: int) -> list[Any]:
    made: list[Any] = []
    for _ in range(depth):
        made = [made]
    return made


def _solver(kind: str, **fields: Any) -> dict[str, Any]:
    return {"options": {"solver": {"kind": kind, **fields}}}


def _adjoint(kind: str, **fields: Any) -> dict[str, Any]:
    return {"options": {"adjoint": {"kind": kind, **fields}}}


CONFIGURATIONS: list[tuple[dict[str, Any], str]] = [
    ({"num_classes": 6}, r"head.4.weight is F32 of shape \(5, 16\), expected .* \(6, 16\)"),
    ({"options": {"depth": 2}}, r"its network: tensors \d+ missing \(.*, …\)"),
    ({"num_classes": 10**4000}, r"expected an integer in \[1, 65536\]"),
    ({"image_size": 30000}, r"image_size=30000, expected an integer in \[1, 4096\]"),
    ({"image_size": 7}, "image_size=7 is no multiple of"),
    ({"name": "__main__"}, "there is no model '__main__'"),
    ({"options": {"num_classes": 3}}, "cannot build"),
    ({"options": {"name": "x"}}, "cannot build"),
    ({"options": {"novelty": 3}}, "has no option 'novelty'"),
    ({"options": {"widths": [10**4000]}}, "a list of 1 to 16 values"),
    ({"options": {"widths": _nested(900)}}, "cannot build"),
    ({"options": {"depth": 64}}, r"depth=64 in 2 stage\(s\), more layers than the limit, .*, 31"),
    ({"options": {"depth": 10**4000}}, "more layers than the limit"),
    (_solver("Popen", args="true"), "kind='Popen' is not known"),
    (_solver("Anderson", max_steps=10**9), "max_steps=1000000000 in Anderson"),
    (_solver("Anderson", max_steps=10**4000), "in Anderson; the limit is 100,000"),
    (_solver("Anderson", memory=10**9), r"in Anderson; the limit is 1,000 \("),
    (_solver("Anderson", rtol=10**400), "in Anderson; the limit is 10,000"),
    (_adjoint("Phantom", steps=10**6), "in Phantom; the limit is 10,000"),
    (
        _adjoint("Implicit", solver={"kind": "GMRES", "restart": 10**9}),
        "restart=1000000000 in GMRES; the limit is 1,000",
    ),
]


@pytest.mark.parametrize(("change", "match"), CONFIGURATIONS)
def test_configurations_that_do_not_fit(
    written: dict[Any, bytes], path: Path, change: dict[str, Any], match: str
) -> None:
    path.write_bytes(_json("config", **change)(written[None]))
    _check_refused(path, match, models.load)


def test_limits_are_for_files_of_others_and_options_come_back(path: Path) -> None:
    chosen = (eq.BestIterate(eq.Anderson(max_steps=10**6)), eq.Implicit(solver=eq.CG(rtol=1e-3)))
    models.save(make("geq_digits", solver=chosen[0], adjoint=chosen[1]), path)
    with pytest.raises(models.ModelFileError, match=r"load\(path, trusted=True\) has none"):
        models.load(path)
    layers = eq.nn.equilibrium_layers(models.load(path, trusted=True)).values()
    assert [(layer.solver, layer.adjoint) for layer in layers] == [chosen] * 2


COUNT = "stages.0.norm.num_batches_tracked"
TENSORS: list[tuple[Damage, str]] = [
    (_field(COUNT, dtype="F64"), rf"{COUNT} is F64 of shape .*, expected I64"),
    (_field(STEM, dtype="I32"), "stem.weight is I32 of shape .*, expected F64 or F32"),
    (
        _header(lambda header: header.update({"stam.weight": header.pop(STEM)})),
        r"1 missing \(stem.weight\) and 1 that the network does not have \(stam.weight\)",
    ),
]


def _row(value: float) -> Damage:
    return _tensor(SCALE, lambda scale: scale.index_fill(0, torch.tensor([2]), value))


QUANTIZED: list[tuple[Damage, str]] = [
    (_tensor(SCALE, None), r"1 missing \(stem.weight.scale.\)"),
    (_tensor(SCALE, lambda s: s[:7]), r"F32 of shape \(7,\), expected F32.*\(8,\)"),
    (_tensor(SCALE, lambda s: s[:, None]), r"of shape \(8, 1\), expected F32"),
    (_tensor(SCALE, lambda s: s.half()), r"is F16 of shape \(8,\), expected F32"),
    (_row(0.0), r"a scale of stem.weight is 0, expected a positive finite"),
    (_row(-0.1), r"a scale of stem.weight is -0.1"),
    (_row(float("nan")), r"a scale of stem.weight is nan"),
    (_row(float("inf")), r"a scale of stem.weight is inf"),
    (_row(3e38), r"stem.weight times its scales, up to 3e\+38, exceeds float32"),
    (_tensor(STEM, lambda q: torch.full_like(q, -128)), r"holds -128, expected −127 to 127"),
    (_tensor(STEM, lambda q: q[:7]), r"is I8 of shape \(7, 1, 3, 3\), expected I8 of .* \(8, 1"),
    (_tensor(STEM, lambda q: q.float()), r"is F32 of shape \(8, 1, 3, 3\), expected I8"),
    (_tensor(BUFFER, lambda v: v.to(torch.int8)), r"0\.v is I8 of shape .*, expected F16"),
    (_tensor("head.0.weight", lambda w: w.half()), r"is F16 of shape .*, expected F32"),
    (_tensor("head.0.running_var", lambda v: v * torch.nan), "running_var holds NaN or infinity"),
    (
        _header(lambda header: header["__metadata__"].pop("quantization")),
        r"network does not have \(.*scale",
    ),
]


@pytest.mark.parametrize(
    ("dtype", "damage", "match"),
    [*((None, *lie) for lie in TENSORS), *((torch.int8, *lie) for lie in QUANTIZED)],
)
def test_tensors_that_do_not_fit(
    written: dict[Any, bytes], path: Path, dtype: torch.dtype | None, damage: Damage, match: str
) -> None:
    path.write_bytes(damage(written[dtype]))
    _check_refused(path, match, models.load)


@pytest.mark.parametrize("bad", [float("nan"), -float("inf")])
@pytest.mark.parametrize("key", [STEM, "head.0.bias", "head.0.running_var", BUFFER])
def test_values_that_are_not_finite_are_named(
    model: models.Network, tmp_path: Path, key: str, bad: float
) -> None:
    with torch.no_grad():
        model.state_dict()[key].view(-1)[1] = bad
    with pytest.raises(ValueError, match=rf"{key} holds NaN or infinity.*dtype=None"):
        models.save(model, tmp_path / "eight", dtype=torch.int8)
    assert list(tmp_path.iterdir()) == []
    path = models.save(model, tmp_path / "m")
    _check_refused(path, rf"m is not .*: {key} holds NaN or infinity", models.load)
    assert not torch.isfinite(models.load(path, trusted=True).state_dict()[key]).all()


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


@settings(max_examples=100, deadline=None, derandomize=True)
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


def test_what_eight_bits_cannot_hold(model: models.Network, path: Path) -> None:
    with pytest.raises(ValueError, match=r"head\.weight holds a weight of size 1e\+39"):
        quantize("head.weight", torch.tensor([[1.0, -1e39]], dtype=torch.float64))
    model.get_buffer(BUFFER).view(-1)[0] = 1e6  # kept in float16
    with pytest.raises(ValueError, match=rf"size 1e\+06 does not fit \({BUFFER}\)"):
        models.save(model, path, dtype=torch.int8)


# ---------------------------------------------------------------------- eight bits: whole networks


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


@pytest.mark.parametrize(
    "name", ["geq_digits", "geq_cifar_5m", "deep_opteq_199k", "mondeq_multi", "mdeq_cifar"]
)
def test_round_trip(name: str, path: Path) -> None:
    model = make(name)
    model(images(model))  # running means and vectors of power iterations that are no defaults
    models.save(model.eval(), path, dtype=torch.int8)
    wanted, (found, metadata) = _expected(model), _contents(path)
    _assert_equal(found, wanted)
    note = json.loads(metadata["quantization"])
    assert models.read_header(path)["quantization"] == note
    assert (note["version"], note["scheme"], note["suffix"]) == (1, "int8 rows", ".scale.")
    assert note["tensors"] == [k for k in model.state_dict() if wanted[k].dtype == torch.int8]

    in_full: dict[str, Tensor] = {}
    for key, value in model.state_dict().items():
        stored, scale = wanted[key], wanted.get(f"{key}.scale.")
        if scale is not None:
            stored = stored.float() * scale.view(-1, *[1] * (stored.ndim - 1))
        in_full[key] = stored.float() if value.is_floating_point() else stored
    loaded = models.load(path)
    _assert_equal(loaded.state_dict(), in_full)
    rounded = {k: v.bfloat16() if v.is_floating_point() else v for k, v in in_full.items()}
    _assert_equal(models.load(path, dtype=torch.bfloat16).state_dict(), rounded)  # rounded once
    again, _ = _contents(models.save(loaded, path, dtype=torch.int8))
    same = [key for key in found if not key.endswith(".scale.")]
    _assert_equal({k: again[k] for k in same}, {k: found[k] for k in same})


@pytest.mark.parametrize(
    "change",
    [
        nn.Module.double,
        lambda model: model.requires_grad_(False),
        lambda model: model.to(memory_format=torch.channels_last),
    ],
)
def test_what_does_not_change_the_file(
    model: models.Network, path: Path, change: Callable[[nn.Module], object]
) -> None:
    plain = _contents(models.save(model, path, dtype=torch.int8))
    change(model)
    tensors, metadata = _contents(models.save(model, path, dtype=torch.int8))
    assert metadata == plain[1]
    _assert_equal(tensors, plain[0])
