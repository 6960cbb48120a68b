"""Read a pickle of dicts, lists, numbers, strings and numpy arrays, and run nothing of it.

A pickle is a program: it may name any function of any installed package and have it called. The
reader here knows the few names that arrays and bytes are written with, and each stands for a class
or function of this file that only remembers its arguments. Any other name is an error.
"""

from __future__ import annotations

import io
import math
import pickle
from pathlib import Path
from typing import Any

from .errors import DataError
from .extras import numpy

__all__ = ["read_pickle"]

_MOST_BYTES = 2**31
_DTYPES = {"u1": "uint8", "i8": "int64", "i4": "int32"}


def read_pickle(path: Path) -> dict[str, Any]:
    """The dict in the pickle at ``path``, with keys as text and arrays as numpy arrays."""
    size = path.stat().st_size
    if size > _MOST_BYTES:
        raise DataError(f"{path}: {size:,} bytes are more than a batch of images holds.")
    try:
        found = _Reader(io.BytesIO(path.read_bytes())).load()
    except _RefusedError as error:
        raise DataError(f"{path}: refused to read it: {error}.") from None
    # A damaged pickle can raise nearly anything: the format has no checks.
    except Exception as error:
        raise DataError(
            f"{path} is not a readable pickle ({type(error).__name__}: {error}). Fetch it again."
        ) from error
    if not isinstance(found, dict):
        raise DataError(f"{path}: holds a {type(found).__name__}, expected a dict of a batch.")
    return {_text(key): _value(value, path) for key, value in found.items()}


class _RefusedError(Exception):
    """The pickle asks for something that is not an array."""


class _Type:
    """Stands for numpy.dtype(name, …)."""

    def __init__(self, name: object = "", *_: object) -> None:
        self.name = _text(name).lstrip("<|=")

    def __setstate__(self, state: object) -> None:
        if isinstance(state, tuple) and len(state) > 1 and state[1] in (">", b">"):
            raise _RefusedError("an array of another byte order")


class _Array:
    """Stands for an array: shape, type and bytes, remembered."""

    def __init__(self, *_: object) -> None:
        self.shape: Any = ()
        self.type: Any = None
        self.order = "C"
        self.data: Any = b""

    def __setstate__(self, state: Any) -> None:
        if not (isinstance(state, tuple) and len(state) == 5):
            raise _RefusedError("an array in an unknown form")
        _, self.shape, self.type, fortran, self.data = state
        self.order = "F" if fortran else "C"


def _reconstruct(*_: object) -> _Array:
    return _Array()


def _frombuffer(data: Any, kind: Any, shape: Any, order: Any) -> _Array:
    array = _Array()
    array.data, array.type, array.shape, array.order = data, kind, shape, _text(order)
    return array


def _encode(text: object, encoding: object = "latin1") -> bytes:
    if not isinstance(text, str) or _text(encoding) not in ("latin1", "latin-1"):
        raise _RefusedError("text in an unknown encoding")
    return text.encode("latin-1")


def _stand_ins() -> dict[tuple[str, str], Any]:
    """The names that may occur. Made anew for each file: a pickle can set attributes of what it
    names, and the next file must not see them."""
    arrays = {
        ("multiarray", "_reconstruct"): lambda *args: _reconstruct(*args),
        ("numeric", "_frombuffer"): lambda *args: _frombuffer(*args),
    }
    return {
        ("numpy", "ndarray"): _Array,
        ("numpy", "dtype"): _Type,
        ("_codecs", "encode"): lambda *args: _encode(*args),
        ("__builtin__", "bytes"): lambda: b"",  # how protocols 0 to 2 write no bytes
        ("builtins", "bytes"): lambda: b"",
        **{(f"numpy.core.{module}", name): f for (module, name), f in arrays.items()},
        **{(f"numpy._core.{module}", name): f for (module, name), f in arrays.items()},
    }


class _Reader(pickle.Unpickler):
    def __init__(self, file: io.BytesIO) -> None:
        # latin-1 maps every byte to one character: Python 2's strings come back as they were.
        super().__init__(file, encoding="latin-1")
        self._stand_ins = _stand_ins()

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._stand_ins[module, name]
        except KeyError:
            raise _RefusedError(
                f"it names {module}.{name}, and a batch of images needs numpy arrays only"
            ) from None

    def persistent_load(self, pid: Any) -> Any:
        raise _RefusedError("it refers to objects outside of itself")


def _value(value: Any, path: Path) -> Any:
    if isinstance(value, _Array):
        return _array(value, path)
    if isinstance(value, list | tuple):
        return [_value(item, path) for item in value]
    if isinstance(value, bytes):
        return _text(value)
    if value is None or isinstance(value, str | int | float):
        return value
    raise DataError(f"{path}: refused to read it: it holds a {type(value).__name__}.")


def _array(found: _Array, path: Path) -> Any:
    np = numpy()
    data = found.data.encode("latin-1") if isinstance(found.data, str) else found.data
    kind = found.type.name if isinstance(found.type, _Type) else ""
    shape = found.shape
    if kind not in _DTYPES or not isinstance(data, bytes | bytearray | memoryview):
        raise DataError(f"{path}: holds an array of type {kind or 'unknown'}; expected uint8.")
    if not (isinstance(shape, tuple) and all(isinstance(n, int) and n >= 0 for n in shape)):
        raise DataError(f"{path}: holds an array of shape {shape!r}.")
    dtype = np.dtype(_DTYPES[kind])
    if math.prod(shape) * dtype.itemsize != len(data):
        raise DataError(
            f"{path}: an array of shape {shape} has {len(data)} bytes; the file is cut off."
        )
    return np.frombuffer(bytes(data), dtype).reshape(shape, order=found.order).copy()


def _text(value: object) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)
