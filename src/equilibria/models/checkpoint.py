"""Save and load a network as safetensors, with its configuration inside. Nothing is unpickled."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from equilibria._version import __version__

from .header import FORMAT, ModelFileError, read_header
from .network import ModelConfig, Network
from .quantized import (
    FIELD,
    QuantizationError,
    check_finite,
    dequantize,
    layout,
    make_note,
    quantize,
    scale_name,
)
from .table import create

__all__ = ["ModelFileError", "load", "read_header", "save"]

_CHUNK = 1 << 24


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
        state, note = _in_eight_bits(state, layout(network))
        metadata[FIELD] = json.dumps(note)
        dtype = None
    tensors = {
        name: _rounded(name, value, dtype).cpu().contiguous().clone()
        for name, value in state.items()
    }
    _write(place, _safetensors().torch.save(tensors, metadata))
    return place


def _in_eight_bits(
    state: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a quantized file, scales among them, and the note for its metadata."""
    made: dict[str, Tensor] = {}
    names = [name for name, dtype in dtypes.items() if dtype == torch.int8]
    for name, value in state.items():
        if dtypes[name] == torch.int8:
            made[name], made[scale_name(name)] = quantize(name, value)
        else:
            check_finite(name, value)
            made[name] = _rounded(name, value, dtypes[name])
    return made, make_note(names)


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


_PRECISIONS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


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
    header = read_header(path)
    model = _build(path, header)
    _check_weights(path, header, model)
    stored = _read(path)
    if header[FIELD] is not None:
        stored = _in_full(path, stored, header[FIELD]["tensors"])
        dtype = torch.float32 if dtype is None else dtype
    tensors = {name: _rounded(name, value, dtype) for name, value in stored.items()}
    # The network was laid out without memory; the file's tensors become its weights.
    model.load_state_dict(tensors, strict=True, assign=True)
    model.extra = header["extra"]
    return model.to(device).eval()


def _read(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    library = _safetensors()
    try:
        # Copies: the reader's tensors are windows into the file, which another may cut short.
        return {name: value.clone() for name, value in library.torch.load_file(path).items()}
    except library.SafetensorError as error:
        raise ModelFileError(f"{path} cannot be read: {error}.") from error


def _in_full(
    path: str | os.PathLike[str], stored: Mapping[str, Tensor], names: list[str]
) -> dict[str, Tensor]:
    """The tensors of a quantized file with q·s in the place of q and s."""
    made = dict(stored)
    try:
        for name in names:
            made[name] = dequantize(name, made[name], made.pop(scale_name(name)))
        for name, value in made.items():
            check_finite(name, value)
    except QuantizationError as error:
        raise ModelFileError(f"{path} is not a usable model file: {error}.") from error
    return made


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


def _check_weights(path: str | os.PathLike[str], header: Mapping[str, Any], model: Network) -> None:
    """Names, shapes and dtypes; floating-point weights may all be of another precision."""
    note, wanted = header[FIELD], model.state_dict()
    scales = set() if note is None else {scale_name(name) for name in note["tensors"]}
    found = {name: entry for name, entry in header["tensors"].items() if name not in scales}
    _check_names(path, found, wanted)
    floating = {found[name]["dtype"] for name, value in wanted.items() if value.is_floating_point()}
    if note is None and len(floating) > 1:
        raise ModelFileError(f"{path} mixes the precisions {', '.join(sorted(floating))}.")
    dtypes = {} if note is None else layout(model)
    for name, value in wanted.items():
        entry = found[name]
        if entry["shape"] != tuple(value.shape):
            raise ModelFileError(
                f"{path} does not fit its network: {name} has shape {entry['shape']}, expected "
                f"{tuple(value.shape)}."
            )
        free = note is None and value.is_floating_point()
        allowed = _FLOATS if free else (_DTYPES[dtypes.get(name, value.dtype)],)
        if entry["dtype"] not in allowed:
            raise ModelFileError(
                f"{path} does not fit its network: {name} has dtype {entry['dtype']}, expected "
                f"{' or '.join(allowed)}."
            )


def _check_names(
    path: str | os.PathLike[str], found: Mapping[str, Any], wanted: Mapping[str, Tensor]
) -> None:
    missing = [name for name in wanted if name not in found]
    foreign = [name for name in found if name not in wanted]
    if missing or foreign:
        parts = []
        if missing:
            parts.append(f"{len(missing)} missing ({_some(missing)})")
        if foreign:
            parts.append(f"{len(foreign)} that the network does not have ({_some(foreign)})")
        raise ModelFileError(f"{path} does not fit its network: tensors {' and '.join(parts)}.")


_FLOATS = ("F64", "F32", "BF16", "F16")
_DTYPES = {
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.int8: "I8",
    torch.float16: "F16",
    torch.float32: "F32",
}


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return f"{shown}, …" if len(names) > 3 else shown


def _extra_text(extra: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(extra))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"models.save(extra=...) takes what JSON can hold (text, numbers, lists, "
            f"dictionaries with text keys): {error}."
        ) from error


def _write(place: Path, data: bytes) -> None:
    """All of ``data`` at ``place``, or nothing changed."""
    temporary = place.with_name(f".{place.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            view = memoryview(data)
            for begin in range(0, len(view), _CHUNK):
                file.write(view[begin : begin + _CHUNK])
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(place)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    _sync_folder(place.parent)


def _sync_folder(folder: Path) -> None:
    """Make the new name itself durable, where folders can be opened for that."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            'saving and loading models needs safetensors: pip install "equilibria[train]".'
        ) from error
    return safetensors
