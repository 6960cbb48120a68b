"""Save and load a network as safetensors, with its configuration inside. Nothing is unpickled.

In eight bits, a weight is w ≈ q·s, q in −127 … 127, with one scale s for each row, which is one
index of the first dimension, an output channel:

    s = max|w| / 127,  q = round(w / s),  |w − q·s| ≤ s/2 = max|w| / 254.

Parameters of two or more dimensions are kept so. Buffers of two or more dimensions are kept in
float16, and all that has fewer (norms, biases, running means) in float32. The scales of the tensor
``name`` are the tensor ``name`` + ".scale.": no name of a state dict ends with a dot.

The metadata hold the SHA-256 of each tensor's bytes, and of the other metadata under the name
"__metadata__", so that damage is found. Older files have none, and load without that test.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from equilibria._version import __version__
from equilibria.engine import write_bytes
from equilibria.engine.optional import needs

from .network import ModelConfig, Network
from .options import KINDS
from .registry import create

Place = str | os.PathLike[str]
FORMAT = "equilibria-model/1"
_SCALE = ".scale."
_QUANTIZATION = {"version": 1, "scheme": "int8 rows", "suffix": _SCALE}
_LARGEST = 127
_FLOATS = {torch.float64: "F64", torch.float32: "F32"}
_FLOATS |= {torch.bfloat16: "BF16", torch.float16: "F16"}
_NAMES = {**_FLOATS, torch.int64: "I64", torch.int8: "I8"}
_METADATA = "__metadata__"  # no tensor of a safetensors file can have this name
_MOST_DIMENSIONS = 8
MOST_TEXT = 1 << 22
_MOST = {"max_steps": 100_000, "memory": 1000, "restart": 1000}
_MOST_ELSE = 10_000
"""What a file may ask of a solver, an adjoint, …: the cost of a solve grows with each of them."""


class ModelFileError(ValueError):
    """A file that is not a model of this library, is damaged, or does not fit its own model."""


# ---------------------------------------------------------------------- write


def save(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    extra: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
) -> Path:
    """Write the weights and the configuration of a network to one file.

    The file appears whole or not at all: it is written beside its place, flushed to the disk and
    renamed. A full disk, a crash or Ctrl-C leaves an older file of that name as it was.

    Args:
        model: made by ``create`` or ``load``; one wrapped by ``torch.compile`` is unwrapped.
        path: where to; its folder must exist.
        extra: what should travel with it, in JSON's types: class names, mean and deviation,
            metrics. None keeps ``model.extra``.
        dtype: what floating weights are rounded to, such as torch.float16 for half the size; None
            keeps them as they are. torch.int8 keeps parameters of two or more dimensions in eight
            bits with a scale for each row, which moves a weight by max|w|/254 of its row at most;
            the rest is kept in float32, large buffers in float16.

    Returns:
        The path.
    """
    network: Any = getattr(model, "_orig_mod", model)
    config: Any = getattr(network, "config", None)
    known = isinstance(config, ModelConfig)
    weights = network.state_dict(keep_vars=True) if known else {}
    if not weights:  # an ONNX file's are in its graph
        raise TypeError(
            f"models.save takes a network made by models.create, got {type(network).__name__} "
            f"without {'weights' if known else 'a configuration'}. For a module of your own use "
            "safetensors.torch.save_model."
        )
    if any(getattr(module, "lost_constraints", False) for module in network.modules()):
        raise ValueError(
            "models.save got a copy by nn.frozen_copy, whose weights have lost the constraints of "
            "its configuration; save the network itself, and freeze what models.load returns."
        )
    _check_dtype(dtype, (*_FLOATS, torch.int8))
    place = Path(path)
    if place.is_dir() or not place.parent.is_dir():
        what = "is a folder" if place.is_dir() else f"lies in no folder ({place.parent})"
        raise FileNotFoundError(f"models.save: {place} {what}; give a file in an existing folder.")
    try:
        text = json.dumps(dict(network.extra if extra is None else extra))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"models.save(extra=...) takes what JSON can hold (text, numbers, lists, "
            f"dictionaries with text keys): {error}."
        ) from error
    metadata = {"format": FORMAT, "library": __version__, "extra": text}
    metadata["config"] = json.dumps(config.to_dict())
    stored: dict[str, Tensor] = {}
    for name, value in weights.items():
        stored |= _encoded(name, value, dtype)
    # A network with another head than its configuration says would make a file that none can load.
    held = {k: {"dtype": _NAMES.get(v.dtype), "shape": tuple(v.shape)} for k, v in stored.items()}
    described = _build(place, {"config": config.to_dict(), "library": "this"})
    _check_tensors("models.save: a state with parts replaced", held, described, dtype == torch.int8)
    if dtype == torch.int8:
        quantized = [name for name, value in stored.items() if value.dtype == torch.int8]
        metadata["quantization"] = json.dumps({**_QUANTIZATION, "tensors": quantized})
    sums = {name: _checksum(value) for name, value in stored.items()}
    metadata["sha256"] = json.dumps({**sums, _METADATA: _metadata_checksum(metadata)})
    return write_bytes(place, _safetensors().torch.save(stored, metadata))


def _encoded(name: str, value: Tensor, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """What a file holds of an entry of the state dict, ``dtype`` that of ``save``."""
    kind = dtype
    if dtype == torch.int8:
        if not _finite(value):
            raise ValueError(
                f"{name} holds NaN or infinity, and a file in eight bits (dtype=torch.int8) holds "
                "finite numbers alone; repair it, or save with dtype=None to keep it as it is"
            )
        kind = _stored_as(value)
    if kind == torch.int8:
        whole, scale = quantize(name, value)
        return {name: whole, name + _SCALE: scale}
    return {name: _rounded(name, value.detach(), kind).cpu().contiguous().clone()}


def _checksum(tensor: Tensor) -> str:
    """SHA-256 of the bytes of a tensor on the CPU, as they lie in the file (little endian)."""
    data: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(data).hexdigest()


def _metadata_checksum(metadata: Mapping[str, str]) -> str:
    others = {key: value for key, value in metadata.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()


def _check_dtype(dtype: torch.dtype | None, allowed: tuple[torch.dtype, ...]) -> None:
    if dtype is not None and dtype not in allowed:
        known = ", ".join(str(d) for d in allowed)
        raise ValueError(f"dtype={dtype}: weights are kept in one of {known}.")


def _rounded(name: str, value: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A floating tensor in another precision; one that would overflow there is an error."""
    if dtype is None or not value.is_floating_point():
        return value
    rounded = value.to(dtype)
    if bool((torch.isfinite(value) & ~torch.isfinite(rounded)).any()):
        raise ValueError(
            f"dtype={dtype}: a weight or statistic of size {float(value.abs().max()):.3g} does not "
            f"fit ({name}); take torch.bfloat16 or torch.float32."
        )
    return rounded


# ---------------------------------------------------------------------- read


def read_header(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a model file says of itself; no tensor is loaded and nothing is ever unpickled.

    Returns a dictionary with ``config`` (name, num_classes, in_channels, image_size, options),
    ``library`` (the version that wrote it), ``extra``, ``quantization`` (which tensors are in eight
    bits, and how; None where none is), ``sha256`` (name → checksum of the tensor's bytes; None in
    older files), ``tensors`` (name → dtype and shape) and ``bytes`` (the size of the file).

    Raises:
        FileNotFoundError: no such file.
        ModelFileError: truncated, damaged, a pickle, or not written by ``models.save``.
    """
    with _opened(path) as file:
        return _header(Path(path), file)


def load(
    path: str | os.PathLike[str],
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    trusted: bool = False,
) -> Network:
    """The network of a file that ``save`` wrote, in evaluation mode.

    ``model.config`` says what it is, ``model.extra`` what was saved with it, ``model.preprocess``
    brings images into its form. The dtype is the file's if not given, and float32 for a file in
    eight bits, whose weights are q·s. Names, shapes and dtypes are checked against the network that
    the configuration describes before a weight is taken over; then the checksums, and that all
    values are finite.

    ``trusted=True`` is for files of your own: it also loads weights that are NaN or infinite, and a
    configuration beyond the limits (max_steps of 100,000, memory and restart of 1,000, other
    integers of solvers and adjoints of 10,000), which keep a file from asking for endless work.

    Raises:
        FileNotFoundError: no such file.
        ModelFileError: damaged, no model of this library, or weights of another network.
    """
    _check_dtype(dtype, tuple(_FLOATS))
    with _opened(path) as file:
        header = _header(Path(path), file)
        if not trusted:
            _check_limits(path, header["config"]["options"], len(header["tensors"]))
        model = _build(path, header)
        quantized = header["quantization"] is not None
        _check_tensors(path, header["tensors"], model, quantized)
        # Copies: the reader's tensors are windows into the file, which another may cut short.
        stored = {name: file.get_tensor(name).clone() for name in header["tensors"]}
    sums = header["sha256"]
    for name, value in {} if sums is None else stored.items():
        if sums.get(name) != _checksum(value):
            _refuse(path, f"{name} does not have the SHA-256 that it was written with: damaged")
    if quantized:
        stored = _in_full(path, stored)
        dtype = torch.float32 if dtype is None else dtype
    for name, value in stored.items():
        if not (trusted or _finite(value)):
            why = "holds NaN or infinity, as after a training that diverged"
            _refuse(path, f"{name} {why}; models.load(path, trusted=True) loads it as it is")
    tensors = {name: _rounded(name, value, dtype) for name, value in stored.items()}
    # The network was laid out without memory; the file's tensors become its weights.
    model.load_state_dict(tensors, strict=True, assign=True)
    model.extra = header["extra"]
    return model.to(device).eval()


def _refuse(path: Place, why: str) -> NoReturn:
    raise ModelFileError(f"{path} is not a usable model file: {_shortened(why)}.")


def _shortened(text: object, most: int = 600) -> str:
    """A text of a length that can be printed: files hold numbers and names of any length."""
    shown = str(text)
    return shown if len(shown) <= most else f"{shown[: most // 2]} … {shown[-most // 2 :]}"


@contextlib.contextmanager
def _opened(path: Place) -> Iterator[Any]:
    """The file behind safetensors' own reader, which checks every size and offset."""
    place = Path(path)
    if not place.is_file():
        what = "is a folder" if place.is_dir() else "does not exist"
        raise FileNotFoundError(f"{place} {what}: expected a file written by models.save.")
    library = _safetensors()
    try:
        with library.safe_open(place, "pt") as file:
            yield file
    except (library.SafetensorError, OSError) as error:
        with place.open("rb") as file:
            start = file.read(4)
        why = f"it is truncated or damaged ({error})"
        if start == b"PK\x03\x04" or start[:1] == b"\x80":
            why = (
                "it looks like a pickle (torch.save), which is never opened here because reading "
                "one can run any code; load it where it was made and write it with models.save"
            )
        _refuse(place, why)


def _header(path: Path, file: Any) -> dict[str, Any]:
    metadata = file.metadata() or {}
    for key, text in metadata.items():
        if len(text) > MOST_TEXT:
            _refuse(path, f"its {key} has {len(text):,} characters; the limit is {MOST_TEXT:,}")
    if metadata.get("format") != FORMAT:
        found = f"format={metadata.get('format')!r}, expected {FORMAT!r}"
        _refuse(path, f"it is a safetensors file without the mark of models.save ({found})")
    keys = ("config", "extra", "quantization", "sha256")
    config, extra, quantization, sums = (_json(path, k, metadata.get(k, "{}")) for k in keys)
    wanted = {"name": str, "num_classes": int, "in_channels": int, "image_size": int}
    for key, kind in {**wanted, "options": dict}.items():
        if not isinstance(config.get(key), kind):
            _refuse(path, f"its config has {key}={config.get(key)!r}, expected {kind.__name__}")
    for key, known in _QUANTIZATION.items() if "quantization" in metadata else ():
        if quantization.get(key) != known:
            has = f"its quantization has {key}={quantization.get(key)!r}, and this version reads"
            _refuse(path, f"{has} {known!r}; use the version of the library that wrote the file")
    if "sha256" in metadata and sums.pop(_METADATA, None) != _metadata_checksum(metadata):
        _refuse(path, "its metadata do not have the checksum that they were written with: damaged")
    slices = {name: file.get_slice(name) for name in list(file.keys())}
    for name, part in slices.items():
        if (count := len(part.get_shape())) > _MOST_DIMENSIONS:
            _refuse(path, f"{name} has {count:,} dimensions; the limit is {_MOST_DIMENSIONS}")
    return {
        "config": config,
        "library": metadata.get("library"),
        "extra": extra,
        "quantization": quantization or None,
        "sha256": sums if "sha256" in metadata else None,
        "tensors": {
            name: {"dtype": part.get_dtype(), "shape": tuple(part.get_shape())}
            for name, part in slices.items()
        },
        "bytes": path.stat().st_size,
    }


def _json(path: Path, key: str, text: str) -> dict[str, Any]:
    try:
        made = json.loads(text)
    except (ValueError, RecursionError) as error:
        _refuse(path, f"its {key} is not valid JSON ({error})")
    if not isinstance(made, dict):
        _refuse(path, f"its {key} is a JSON {type(made).__name__}, not an object")
    return made


def _build(path: Place, header: Mapping[str, Any]) -> Network:
    """The network that the header describes, on the meta device: no memory, no random numbers."""
    config = header["config"]
    shape = {key: config[key] for key in ("num_classes", "in_channels", "image_size")}
    try:
        with torch.device("meta"):
            options = dict(config["options"])
            if "fusion" in options:  # six branches; files of 0.1.0 have no reading
                options.setdefault("reading", "parallel")
            if "_certified_" in config["name"] and header["library"] == "0.2.0":
                raise ValueError("its layers are pooled and scaled otherwise now: train it again")
            return create(config["name"], **shape, **options)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ModelFileError(
            f"{path} was written by version {_shortened(header['library'], 40)} and describes a "
            f"network that version {__version__} cannot build: {_shortened(error)}"
        ) from error


def _check_limits(path: Place, options: Mapping[str, Any], tensors: int) -> None:
    """Raise if an object (solver, adjoint, …) of the configuration holds too large an integer.

    Nor may it ask for more layers than there are tensors: laying out many takes long.
    """
    depth, widths = options.get("depth"), options.get("widths")
    if isinstance(depth, int) and isinstance(widths, list) and depth * len(widths) > tensors:
        asked = f"depth={_shortened(depth, 40)} in {len(widths):,} stage(s)"
        over = f"more layers than the limit, the number of tensors, {tensors:,}"
        _refuse(path, f"its config has {asked}, {over}")
    left: list[Any] = list(options.values())
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += value
        if not isinstance(value, dict):
            continue
        left += value.values()
        for key, number in value.items():
            most = _MOST.get(key, _MOST_ELSE)
            if isinstance(number, int) and abs(number) > most:
                kind = value.get("kind")
                name = kind if isinstance(kind, str) and kind in KINDS else "an option"
                asked = f"{_shortened(key, 40)}={_shortened(number, 40)} in {name}"
                limit = f"the limit is {most:,} (models.load(path, trusted=True) has none)"
                _refuse(path, f"its config has {asked}; {limit}")


def _check_tensors(
    path: Place,
    found: Mapping[str, Mapping[str, Any]],
    model: Network,
    quantized: bool,
) -> None:
    """Names, shapes and dtypes; weights not in eight bits may be of any precision."""
    wanted: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        dtype = _stored_as(value) if quantized else value.dtype
        several = not quantized and value.is_floating_point()
        dtypes = tuple(_FLOATS.values()) if several else (_NAMES[dtype],)
        wanted[name] = (dtypes, tuple(value.shape))
        if dtype == torch.int8:
            wanted[name + _SCALE] = (("F32",), tuple(value.shape[:1]))
    others = {"missing": wanted.keys() - found.keys()}
    others["that the network does not have"] = found.keys() - wanted.keys()
    problems = [f"{len(names)} {what} ({_some(names)})" for what, names in others.items() if names]
    if problems:
        raise ModelFileError(f"{path} does not fit its network: tensors {' and '.join(problems)}.")
    for name, (dtypes, shape) in wanted.items():
        entry = found[name]
        if entry["shape"] != shape or entry["dtype"] not in dtypes:
            raise ModelFileError(
                f"{path} does not fit its network: {name} is {entry['dtype']} of shape "
                f"{entry['shape']}, expected {' or '.join(dtypes)} of shape {shape}."
            )


def _some(names: Set[str]) -> str:
    shown = ", ".join(_shortened(name, 200) for name in sorted(names)[:3])
    return f"{shown}, …" if len(names) > 3 else shown


def _safetensors() -> Any:
    with needs("safetensors", "Saving and loading models"):
        import safetensors.torch
    return safetensors


# ---------------------------------------------------------------------- eight bits


def _stored_as(value: Tensor) -> torch.dtype:
    """The dtype of an entry of a state dict in a file in eight bits."""
    if not value.is_floating_point():
        return value.dtype
    if value.ndim < 2:
        return torch.float32
    return torch.int8 if isinstance(value, nn.Parameter) else torch.float16


def _finite(value: Tensor) -> bool:
    return not value.is_floating_point() or bool(torch.isfinite(value).all())


def quantize(name: str, weight: Tensor) -> tuple[Tensor, Tensor]:
    """w [R, …] ↦ q = round(w/s) in int8 [R, …] and s = max|w|/127 in float32 [R].

    A row of zeros has s = 1 and q = 0. So has one whose scale would be below float32's smallest
    normal number, 1.2e-38: some devices take such a scale for 0.
    """
    # Exact to float32's rounding: a quotient in float32 misses ties by up to 8e-6 of a step.
    exact = weight.detach().cpu().double().flatten(1)
    scale = (exact.abs().amax(1) / _LARGEST).float()
    scale[scale < torch.finfo(torch.float32).tiny] = 1.0
    whole = torch.round(exact / scale[:, None].double()).clamp_(-_LARGEST, _LARGEST)
    if not bool(torch.isfinite(whole.float() * scale[:, None]).all()):
        raise ValueError(
            f"dtype=torch.int8: {name} holds a weight of size {float(exact.abs().max()):.3g}, more "
            "than a scale in float32 can give back; save with dtype=None."
        )
    return whole.to(torch.int8).view(weight.shape), scale


def dequantize(whole: Tensor, scale: Tensor) -> Tensor:
    """q int8 [R, …], s float32 [R] ↦ q·s, computed in float32."""
    return (whole.flatten(1).float() * scale[:, None]).view(whole.shape)


def _in_full(path: Place, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a file in eight bits, q·s in the place of q and s, neither of them trusted."""
    made = dict(stored)
    for name, whole in stored.items():
        if whole.dtype != torch.int8:
            continue
        scale = made.pop(name + _SCALE)
        made[name] = dequantize(whole, scale)
        unusable = scale[~(torch.isfinite(scale) & (scale > 0))]
        if unusable.numel():
            found = f"{float(unusable[0]):.3g}"
            why = f"a scale of {name} is {found}, expected a positive finite number"
        elif bool((whole < -_LARGEST).any()):
            why = f"{name} holds {int(whole.min())}, expected −{_LARGEST} to {_LARGEST}"
        elif not _finite(made[name]):
            why = f"{name} times its scales, up to {float(scale.max()):.3g}, exceeds float32"
        else:
            continue
        _refuse(path, f"{why}; the file is damaged, fetch or save it again")
    return made
