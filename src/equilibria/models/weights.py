"""Save and load a network as safetensors, with its configuration inside. Nothing is unpickled."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from equilibria._version import __version__
from equilibria.engine.files import write_bytes
from equilibria.engine.optional import needs

from .network import ModelConfig, Network
from .quantized import (
    FIELD,
    KIND,
    QuantizationError,
    check_finite,
    dequantize,
    layout,
    quantize,
    scale_name,
)
from .table import create

__all__ = ["ModelFileError", "load", "read_header", "save"]

FORMAT = "equilibria-model/1"
_PRECISIONS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


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
    config = getattr(network, "config", None)
    if not isinstance(config, ModelConfig):
        raise TypeError(
            f"models.save takes a network made by models.create, got {type(network).__name__} "
            "without a configuration. For a module of your own use safetensors.torch.save_model."
        )
    _check_dtype(dtype, (*_PRECISIONS, torch.int8))
    place = Path(path)
    if place.is_dir() or not place.parent.is_dir():
        what = "is a folder" if place.is_dir() else f"lies in no folder ({place.parent})"
        raise FileNotFoundError(f"models.save: {place} {what}; give a file in an existing folder.")
    metadata = {
        "format": FORMAT,
        "config": json.dumps(config.to_dict()),
        "library": __version__,
        "extra": _extra_text(network.extra if extra is None else extra),
    }
    state = {name: value.detach() for name, value in network.state_dict().items()}
    if dtype == torch.int8:
        dtypes = layout(network)
        state = _in_eight_bits(state, dtypes)
        names = [name for name, kind in dtypes.items() if kind == torch.int8]
        metadata[FIELD] = json.dumps({**KIND, "tensors": names})
        dtype = None
    tensors = {
        name: _rounded(name, value, dtype).cpu().contiguous().clone()
        for name, value in state.items()
    }
    return write_bytes(place, _safetensors().torch.save(tensors, metadata))


def _in_eight_bits(
    state: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]
) -> dict[str, Tensor]:
    """The tensors of a quantized file, scales among them."""
    made: dict[str, Tensor] = {}
    for name, value in state.items():
        if dtypes[name] == torch.int8:
            made[name], made[scale_name(name)] = quantize(name, value)
        else:
            check_finite(name, value)
            made[name] = _rounded(name, value, dtypes[name])
    return made


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


def _extra_text(extra: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(extra))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"models.save(extra=...) takes what JSON can hold (text, numbers, lists, "
            f"dictionaries with text keys): {error}."
        ) from error


# ---------------------------------------------------------------------- read


def read_header(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a model file says of itself; no tensor is loaded and nothing is ever unpickled.

    Returns a dictionary with ``config`` (name, num_classes, in_channels, image_size, options),
    ``library`` (the version that wrote it), ``extra``, ``quantization`` (which tensors are in eight
    bits, and how; None where none is), ``tensors`` (name → dtype and shape) and ``bytes`` (the size
    of the file).

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
) -> Network:
    """The network of a file that ``save`` wrote, in evaluation mode.

    ``model.config`` says what it is, ``model.extra`` what was saved with it. The dtype is the
    file's if not given, and float32 for a file in eight bits, whose weights are q·s. Names, shapes
    and dtypes are checked against the network that the configuration describes before a weight is
    taken over.

    Raises:
        FileNotFoundError: no such file.
        ModelFileError: damaged, no model of this library, or weights of another network.
    """
    _check_dtype(dtype, _PRECISIONS)
    with _opened(path) as file:
        header = _header(Path(path), file)
        model = _build(path, header)
        quantized = header[FIELD] is not None
        _check_tensors(path, header["tensors"], model, quantized=quantized)
        # Copies: the reader's tensors are windows into the file, which another may cut short.
        stored = {name: file.get_tensor(name).clone() for name in header["tensors"]}
    if quantized:
        stored = _in_full(path, stored)
        dtype = torch.float32 if dtype is None else dtype
    tensors = {name: _rounded(name, value, dtype) for name, value in stored.items()}
    # The network was laid out without memory; the file's tensors become its weights.
    model.load_state_dict(tensors, strict=True, assign=True)
    model.extra = header["extra"]
    return model.to(device).eval()


def _refuse(path: str | os.PathLike[str], why: str) -> NoReturn:
    raise ModelFileError(f"{path} is not a usable model file: {why}.")


@contextlib.contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[Any]:
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
        if start == b"PK\x03\x04" or start[:1] == b"\x80":
            _refuse(
                place,
                "it looks like a pickle (torch.save), which is never opened here because reading "
                "one can run any code; load it where it was made and write it with models.save",
            )
        _refuse(place, f"it is truncated or damaged ({error})")


def _header(path: Path, file: Any) -> dict[str, Any]:
    metadata = file.metadata() or {}
    if metadata.get("format") != FORMAT:
        _refuse(
            path,
            "it is a safetensors file without the mark of models.save "
            f"(format={metadata.get('format')!r}, expected {FORMAT!r})",
        )
    for key in ("config", "extra", "library"):
        if key not in metadata:
            _refuse(path, f"its metadata has no {key!r}")
    config = _json(path, "its config", metadata["config"])
    wanted = {"name": str, "num_classes": int, "in_channels": int, "image_size": int}
    for key, kind in {**wanted, "options": dict}.items():
        if not isinstance(config.get(key), kind):
            _refuse(path, f"its config has {key}={config.get(key)!r}, expected {kind.__name__}")
    note = metadata.get(FIELD)
    return {
        "config": config,
        "library": metadata["library"],
        "extra": _json(path, "its extra", metadata["extra"]),
        FIELD: None if note is None else _quantization(path, note),
        "tensors": {name: _entry(file.get_slice(name)) for name in list(file.keys())},
        "bytes": path.stat().st_size,
    }


def _entry(window: Any) -> dict[str, Any]:
    return {"dtype": window.get_dtype(), "shape": tuple(window.get_shape())}


def _json(path: Path, what: str, text: str) -> dict[str, Any]:
    try:
        made = json.loads(text)
    except (ValueError, RecursionError) as error:
        _refuse(path, f"{what} is not valid JSON ({error})")
    if not isinstance(made, dict):
        _refuse(path, f"{what} is a JSON {type(made).__name__}, not an object")
    return made


def _quantization(path: Path, text: str) -> dict[str, Any]:
    note = _json(path, "its quantization", text)
    for key, known in KIND.items():
        if note.get(key) != known:
            _refuse(
                path,
                f"its quantization has {key}={note.get(key)!r}, and this version reads {known!r}; "
                "use the version of the library that wrote the file, or write it with models.save",
            )
    return note


def _build(path: str | os.PathLike[str], header: Mapping[str, Any]) -> Network:
    """The network that the header describes, on the meta device: no memory, no random numbers."""
    config = header["config"]
    shape = {key: config[key] for key in ("num_classes", "in_channels", "image_size")}
    try:
        with torch.device("meta"):
            return create(config["name"], **shape, **config["options"])
    except (TypeError, ValueError) as error:
        raise ModelFileError(
            f"{path} was written by version {header['library']} and describes a network that "
            f"version {__version__} cannot build: {error}"
        ) from error


def _check_tensors(
    path: str | os.PathLike[str],
    found: Mapping[str, Mapping[str, Any]],
    model: Network,
    *,
    quantized: bool,
) -> None:
    """Names, shapes and dtypes; weights not in eight bits may all be of another precision."""
    wanted: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
        name: ((_NAMES[value.dtype],), tuple(value.shape))
        for name, value in model.state_dict().items()
    }
    if quantized:
        for name, dtype in layout(model).items():
            wanted[name] = ((_NAMES[dtype],), wanted[name][1])
            if dtype == torch.int8:
                wanted[scale_name(name)] = (("F32",), wanted[name][1][:1])
    else:
        floats = tuple(_NAMES[dtype] for dtype in _PRECISIONS)
        wanted = {n: (floats if d[0] in floats else d, shape) for n, (d, shape) in wanted.items()}
        mixed = {found[n]["dtype"] for n in wanted if n in found and wanted[n][0] == floats}
        if len(mixed) > 1:
            raise ModelFileError(f"{path} mixes the precisions {', '.join(sorted(mixed))}.")
    missing = [name for name in wanted if name not in found]
    foreign = [name for name in found if name not in wanted]
    problems = [f"{len(missing)} missing ({_some(missing)})"] if missing else []
    if foreign:
        problems.append(f"{len(foreign)} that the network does not have ({_some(foreign)})")
    if problems:
        raise ModelFileError(f"{path} does not fit its network: tensors {' and '.join(problems)}.")
    for name, (dtypes, shape) in wanted.items():
        entry = found[name]
        if entry["shape"] != shape or entry["dtype"] not in dtypes:
            raise ModelFileError(
                f"{path} does not fit its network: {name} is {entry['dtype']} of shape "
                f"{entry['shape']}, expected {' or '.join(dtypes)} of shape {shape}."
            )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return f"{shown}, …" if len(names) > 3 else shown


def _in_full(path: str | os.PathLike[str], stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a quantized file with q·s in the place of q and s."""
    made = dict(stored)
    try:
        for name, value in stored.items():
            if value.dtype == torch.int8:
                made[name] = dequantize(name, value, made.pop(scale_name(name)))
        for name, value in made.items():
            check_finite(name, value)
    except QuantizationError as error:
        raise ModelFileError(f"{path} is not a usable model file: {error}.") from error
    return made


def _safetensors() -> Any:
    with needs("safetensors", "Saving and loading models"):
        import safetensors.torch
    return safetensors
