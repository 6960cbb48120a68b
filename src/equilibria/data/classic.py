"""The classic files: CIFAR's pickled or binary batches, MNIST's idx files, scikit-learn's digits.

A pickle may have any function of any package called. Here every name that arrays are written with
stands for a class that only remembers its arguments, and any other name is an error: nothing runs.
"""

from __future__ import annotations

import gzip
import io
import math
import pickle
import pickletools
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equilibria.engine.optional import needs

from . import sources
from .catalog import DataCard, describe, resolve_split
from .sources import DataError, Found, check_expansion, read_file, too_many

_PIXELS = 3 * 32 * 32
_CIFAR: dict[str, dict[str, tuple[str, ...]]] = {
    "cifar10": {"train": tuple(f"data_batch_{k}" for k in range(1, 6)), "test": ("test_batch",)},
    "cifar100": {"train": ("train",), "test": ("test",)},
}
# Files by which a folder of the user's own is recognized.
_SIGNS = {
    "batches.meta": "cifar10",
    "data_batch_1.bin": "cifar10",
    "meta": "cifar100",
    "fine_label_names.txt": "cifar100",
}


def read_digits() -> Found:
    """1,797 images 8×8, values round(255 v / 16), as one set ("all"); ``load`` splits it."""
    with needs("scikit-learn", "The data set digits"):
        from sklearn.datasets import load_digits  # type: ignore[import-untyped, unused-ignore]
    bunch = load_digits()
    images = torch.from_numpy(bunch.images).mul(255 / 16).round().to(torch.uint8).unsqueeze(1)
    targets = torch.from_numpy(bunch.target).long()
    return Found(images, targets, describe("digits").classes, "all", ())


def read_cifar_batches(folder: Path, asked: str, card: DataCard | None) -> Found | None:
    """The split of CIFAR-10 or CIFAR-100 batches in ``folder``; None where there are none."""
    signs = [name for sign, name in _SIGNS.items() if (folder / sign).is_file()]
    name = card.name if card is not None else next(iter(signs), "")
    stems = _CIFAR.get(name, {})
    every = [folder / stem for group in stems.values() for stem in group]
    binary = any(path.with_suffix(".bin").is_file() for path in every)
    if not binary and not any(path.is_file() for path in every):
        return None
    split = resolve_split(asked, tuple(stems), str(folder))
    files = tuple(folder / f"{stem}{'.bin' if binary else ''}" for stem in stems[split])
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise DataError(f"{folder} has no {', '.join(missing)}; the {split} split needs it.")
    parts = [(_binary if binary else _pickled)(file, name) for file in files]
    images, targets, *coarse = (torch.cat(column) for column in zip(*parts, strict=True))
    known = describe(name)
    found = Found(images, targets, known.classes, split, files)
    if not coarse:
        return found
    return replace(found, superclasses=coarse[0], superclass_names=known.superclasses)


def _pickled(file: Path, name: str) -> tuple[Tensor, ...]:
    """Images, labels and, where there are any, superclasses."""
    batch = read_pickle(file)
    key = "labels" if name == "cifar10" else "fine_labels"
    missing = [k for k in ("data", key) if k not in batch]
    if missing:
        raise DataError(f"{file} has no {' and '.join(missing)}; it has: {', '.join(batch)}.")
    data = batch["data"]
    if not isinstance(data, Tensor) or data.shape[1:] != (_PIXELS,) or data.dtype != torch.uint8:
        kind = tuple(data.shape) if isinstance(data, Tensor) else type(data).__name__
        raise DataError(f"{file}: data is {kind}; expected uint8 [N, {_PIXELS}].")
    found = [data.reshape(-1, 3, 32, 32)]
    for kind in (k for k in (key, "coarse_labels") if k in batch):
        try:
            labels = torch.as_tensor(batch[kind])
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError(f"{file}: {kind} are not a list of integers ({error}).") from error
        if labels.shape != (len(data),) or labels.is_floating_point():
            raise DataError(f"{file}: {kind} are {tuple(labels.shape)} for {len(data)} images.")
        found.append(labels.long())
    return tuple(found)


def _binary(file: Path, name: str) -> tuple[Tensor, ...]:
    labels = 1 if name == "cifar10" else 2  # CIFAR-100 stores coarse, then fine
    raw = torch.frombuffer(bytearray(_bytes(file) or b"\0"), dtype=torch.uint8)
    record = labels + _PIXELS
    if len(raw) % record:
        raise DataError(
            f"{file}: {file.stat().st_size:,} bytes are no whole number of records of {record}; "
            "the file is cut off. Fetch it again."
        )
    rows = raw.view(-1, record)
    images = rows[:, labels:].reshape(-1, 3, 32, 32)
    return images, *(rows[:, k].long() for k in reversed(range(labels)))


def _bytes(file: Path) -> bytes:
    try:
        return read_file(file)
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error}).") from error


def read_idx(folder: Path, asked: str, card: DataCard | None) -> Found | None:
    """The split of the idx files in ``folder``, plain or gzipped; None where there are none."""
    if card is not None and card.name != "mnist":
        return None
    prefixes = {"train": "train", "test": "t10k"}
    if not any(_idx_file(folder, prefix, "images", 3) for prefix in prefixes.values()):
        return None
    split = resolve_split(asked, tuple(prefixes), str(folder))
    values, files = [], []
    for kind, dims in (("images", 3), ("labels", 1)):
        file = _idx_file(folder, prefixes[split], kind, dims)
        if file is None:
            raise DataError(f"{folder} has no {kind} of the {split} split ({prefixes[split]}-…).")
        values.append(_idx(file, dims))
        files.append(file)
    images, labels = values
    if len(images) != len(labels):
        raise DataError(f"{files[0]}: {len(images)} images and {len(labels)} labels.")
    classes = describe("mnist").classes
    return Found(images.unsqueeze(1), labels.long(), classes, split, tuple(files))


def _idx_file(folder: Path, prefix: str, kind: str, dims: int) -> Path | None:
    ends = [f"{dot}idx{dims}-ubyte{suffix}" for dot in ("-", ".") for suffix in ("", ".gz")]
    paths = [folder / f"{prefix}-{kind}{end}" for end in ends]
    return next((path for path in paths if path.is_file()), None)


def _idx(path: Path, dims: int) -> Tensor:
    """uint8 of ``dims`` dimensions: 0, 0, 8 (ubyte), dims, then big-endian sizes, then values."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            head = file.read(4 + 4 * dims)
            if len(head) < 4 + 4 * dims or head[:4] != bytes((0, 0, 8, dims)):
                raise DataError(f"{path} is not an idx file of {dims}-dimensional bytes.")
            shape = [int.from_bytes(head[4 + 4 * k : 8 + 4 * k], "big") for k in range(dims)]
            count = math.prod(shape)
            check_expansion(path, count)
            if count > (most := sources.MOST_FILE_BYTES):
                found = f"{path}: says it holds {shape} values"
                raise DataError(too_many(found, most, "sources.MOST_FILE_BYTES"))
            body = file.read(count + 1)  # one more than there should be, and no more than that
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read ({error}). Fetch it again.") from error
    if len(body) != count or count == 0:
        raise DataError(f"{path}: {shape} values are promised, {len(body)} are there; cut off?")
    return torch.frombuffer(bytearray(body), dtype=torch.uint8).view(shape)


def read_pickle(path: Path) -> dict[str, Any]:
    """The dict in the pickle at ``path``: text, numbers, lists of them, and arrays as tensors."""
    content = _bytes(path)
    try:
        _check_memo(content)
        found = _value(_Reader(io.BytesIO(content), encoding="latin-1").load())
    except _RefusedError as error:
        raise DataError(f"{path}: refused to read it: {error}.") from None
    # A damaged pickle can raise nearly anything: the format has no checks.
    except Exception as error:
        raise DataError(
            f"{path} is not a readable pickle ({type(error).__name__}: {error}). Fetch it again."
        ) from error
    if not isinstance(found, dict):
        raise DataError(f"{path}: holds a {type(found).__name__}, expected a dict of a batch.")
    return found


def _check_memo(content: bytes) -> None:
    """Raise where a value gets a number that no pickler gives it: the unpickler makes a table."""
    for count, (code, number, _) in enumerate(pickletools.genops(content)):
        if code.name in ("PUT", "BINPUT", "LONG_BINPUT") and (number or 0) > count:
            raise _RefusedError(f"it numbers value {count} as {number}")


class _RefusedError(Exception):
    """The pickle asks for something that is not an array."""


class _Remembered:
    """Stands for a function or a class of numpy: its arguments and its state."""

    args: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


_NAMES = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
    ("__builtin__", "bytes"),  # how protocols 0 to 2 write no bytes
    ("builtins", "bytes"),
    *((f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")),
    *((f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")),
}
_DTYPES = {"u1": torch.uint8, "i8": torch.int64, "i4": torch.int32}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _NAMES:
            raise _RefusedError(
                f"it names {module}.{name}, and a batch of images needs numpy arrays only"
            )
        # A class of its own for each mention: a pickle can set attributes of what it names.
        return type(name, (_Remembered,), {})


def _value(found: Any, depth: int = 0) -> Any:
    """Plain values of what a pickle holds: a dict, of lists, of text, numbers and arrays.

    No deeper: a pickle can hold the same list a thousand times in another, and so on.
    """
    if isinstance(found, dict) and depth == 0 and len(found) <= 16:
        return {str(_value(key, 2)): _value(item, 1) for key, item in found.items()}
    if isinstance(found, list | tuple) and depth < 2:
        return [_value(item, 2) for item in found]
    if isinstance(found, bytes):
        return found.decode("latin-1")
    if found is None or isinstance(found, str | int | float):
        return found
    match type(found).__name__, found:
        case "_reconstruct", _Remembered(state=(_, shape, kind, fortran, data)) if depth < 2:
            return _array(data, kind, shape, bool(fortran))
        case "_frombuffer", _Remembered(args=(data, kind, shape, order)) if depth < 2:
            return _array(data, kind, shape, order == "F")
        case "encode", _Remembered(args=(str(text), "latin1" | "latin-1")):
            return text
        case "bytes", _Remembered(args=()):
            return ""
    raise _RefusedError(f"it holds a {type(found).__name__}")


def _array(data: Any, kind: Any, shape: Any, fortran: bool) -> Tensor:
    if isinstance(data, _Remembered):
        data = _value(data, 2)
    data = data.encode("latin-1") if isinstance(data, str) else data
    named = isinstance(kind, _Remembered) and kind.args
    name = str(_value(kind.args[0], 2)) if named else "unknown"
    dtype = _DTYPES.get(name.lstrip("<|="))
    if dtype is None or not isinstance(data, bytes | bytearray):
        raise _RefusedError(f"it holds an array of type {name}; expected uint8")
    if isinstance(kind.state, tuple) and kind.state[1:2] in ((">",), (b">",)):
        raise _RefusedError("it holds an array of another byte order")
    if not (isinstance(shape, tuple) and all(isinstance(n, int) and n >= 0 for n in shape)):
        raise _RefusedError(f"it holds an array of shape {shape!r}")
    if math.prod(shape) * dtype.itemsize != len(data):
        raise _RefusedError(f"an array of shape {shape} has {len(data)} bytes; the file is cut off")
    if not data:
        return torch.zeros(shape, dtype=dtype)
    values = torch.frombuffer(bytearray(data), dtype=dtype)
    if not fortran:
        return values.view(shape)
    return values.view(shape[::-1]).permute(*reversed(range(len(shape))))
