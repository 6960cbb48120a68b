"""Fuzzing of the loaders: damaged files, each answered by a value or by the loader's own error.

    python -m tests.fuzz --minutes 60 --seed 1 --state fuzz.json

Case i of a seed is drawn from (seed, i) alone, as in tests/adversarial.py. A case is wrong if a
loader raises anything else, takes more than ``SECONDS`` of processor time or ``MEMORY`` more than
before, or returns what its file cannot hold. Half of the weight files and checkpoints get the
checksums that belong to their damage, so that what comes after the checksums is reached, too.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import pickle
import resource
import signal
import struct
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from PIL import Image

from equilibria import data, models
from equilibria.training import CheckpointError, TrainConfig, read_checkpoint
from equilibria.training.run_folder import ENTRY, FORMAT
from tests.adversarial import main
from tests.data.made_files import pictures, png, write_cifar10_pickles, write_idx, write_parquet
from tests.models.small import make

SECONDS, MEMORY = 10.0, 3 * 2**30  # pyarrow asks for the size that a page states, below 2 GiB
TOKENS = [
    b"&a ",
    b"*a",
    b"<<: *a",
    b"[",
    b"]",
    b"{",
    b"}",
    b": ",
    b"- ",
    b"\n",
    b'"',
    b"!!int ",
    b"|",
]
TOKENS += [b"!!python/object/apply:os.getcwd []", b"9" * 5000, b"-1", b"1e999", b".nan", b"null"]
TOKENS += [b"\x00", b"\xff\xff\xff\xff", b"\xff" * 8, b"\x7f\xff\xff\xff", b"\x00" * 8, b"\x80"]


@dataclass(frozen=True)
class Kind:
    path: Path
    good: bytes
    load: Callable[[Path], bool]
    """Whether what was read is what such a file can hold."""
    errors: type[Exception] | tuple[type[Exception], ...]
    repair: Callable[[Random, bytes], bytes] | None = None
    """Damages the contents and puts the checksums right."""


def _weights(path: Path) -> bool:
    return all(bool(torch.isfinite(p).all()) for p in models.load(path).parameters())


def _config(path: Path) -> bool:
    read = TrainConfig.from_yaml(path)
    copy = path.with_suffix(".copy")
    read.to_yaml(copy)
    return TrainConfig.from_yaml(copy) == read


def _images(path: Path) -> bool:
    found = data.load(path.parent, progress=False)
    return found.images[: len(found)].dtype == torch.uint8


def _image(path: Path) -> bool:
    return tuple(data.read_image(str(path), 3, 8).shape) == (3, 8, 8)


def _header(r: Random, whole: bytes) -> bytes:
    (length,) = struct.unpack("<Q", whole[:8])
    header = json.loads(whole[8 : 8 + length])
    header["__metadata__"].pop("sha256")
    text = mutated(r, json.dumps(header).encode())
    return struct.pack("<Q", len(text)) + text + whole[8 + length :]


def _records(r: Random, whole: bytes) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(whole)) as read, zipfile.ZipFile(made, "w") as write:
        records = {name: read.read(name) for name in read.namelist()}
        hit = r.choice([name for name in records if "data" in name])
        for name, content in records.items():
            write.writestr(name, mutated(r, content) if name == hit else content)
    return made.getvalue()


@functools.cache
def kinds() -> dict[str, Kind]:
    """A good file of every kind, on disk until the process ends."""
    kinds.folder = tempfile.TemporaryDirectory()  # type: ignore[attr-defined]
    root = Path(kinds.folder.name)  # type: ignore[attr-defined]
    made: dict[str, Kind] = {}

    def add(name: str, path: Path, *rest: Any) -> None:
        made[name] = Kind(path, path.read_bytes(), *rest)

    extra = {"classes": ["a", "b"], "mean": [0.5]}
    weights = models.save(make("geq_digits").eval(), root / "m.safetensors", extra=extra)
    add("weights", weights, _weights, models.ModelFileError, _header)
    state = {"w": torch.randn(4, 3), "n": torch.arange(5), "h": torch.ones(2).half()}
    optimizer = [{"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1}]}]
    entry = {"format": FORMAT, "version": "0", "rng": b"1234", "config": {"a": (1, None, "b")}}
    torch.save({ENTRY: entry, "state_dict": state, "optimizer_states": optimizer}, root / "c.ckpt")
    add(
        "checkpoint", root / "c.ckpt", lambda p: bool(read_checkpoint(p)), CheckpointError, _records
    )
    TrainConfig().to_yaml(root / "config.yaml")
    add("configuration", root / "config.yaml", _config, (ValueError, TypeError))
    files = [png(pixels) for pixels in pictures(12)]
    columns = {"img": files, "label": [i % 3 for i in range(12)]}
    write_parquet(root / "parquet" / "train-00000-of-00001.parquet", columns)
    add("parquet", root / "parquet" / "train-00000-of-00001.parquet", _images, data.DataError)
    for packed in (False, True):
        folder, end = root / f"idx{packed}", ".gz" if packed else ""
        write_idx(folder / f"train-images-idx3-ubyte{end}", pictures(6, channels=1), packed)
        write_idx(folder / f"train-labels-idx1-ubyte{end}", pictures(6)[:, 0, 0, 0] % 10, packed)
        file = folder / f"train-images-idx3-ubyte{end}"
        add(f"idx{end}", file, _images, data.DataError)
    cifar = root / "cifar-10-batches-py"
    write_cifar10_pickles(cifar)
    (cifar / "batches.meta").write_bytes(pickle.dumps({b"label_names": []}))
    add("pickle", cifar / "data_batch_1", _images, data.DataError)
    for form in ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM"):
        Image.fromarray(pictures(1, 24, 31)[0]).save(root / f"a.{form}", form)
        add(form, root / f"a.{form}", _image, data.DataError)
    return made


def mutated(r: Random, good: bytes) -> bytes:
    """Some bytes flipped, overwritten, removed, repeated, exchanged or put in; or the end cut."""
    made = bytearray(good)
    for _ in range(r.choice((1, 1, 2, 4, 16))):
        # Headers are at the beginning or at the end, so most of the damage is.
        near, far = r.randrange(min(len(made), 300) + 1), r.randrange(len(made) + 1)
        at = r.choice((near, far, max(0, len(made) - near)))
        length = r.choice((1, 2, 4, 8, 60))
        how = r.randrange(7)
        if how == 0 and at < len(made):
            made[at] ^= 1 << r.randrange(8)
        elif how == 1:
            made[at : at + length] = r.randbytes(length)
        elif how == 2:
            del made[at : at + length]
        elif how == 3:
            made[at:at] = made[at : at + length] * r.choice((1, 3, 200))
        elif how == 4:
            other = r.randrange(len(made) + 1)
            made[at : at + length] = made[other : other + length]
        elif how == 5:
            token = r.choice(TOKENS)
            made[at : at + r.choice((0, len(token)))] = token
        elif r.random() < 0.1:
            del made[at:]
    return bytes(made)


class _Slow(BaseException):
    """Not an Exception: no loader takes it for damage of its file."""


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    def late(*_: object) -> None:
        raise _Slow

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, handler)


def _asked_too_much(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def run_case(seed: int, number: int) -> tuple[str, list[str]]:
    """What was tried and what was wrong."""
    r = Random(f"fuzz/{seed}/{number}")
    name = r.choice(list(kinds()))
    kind = kinds()[name]
    change = kind.repair if kind.repair is not None and r.random() < 0.5 else mutated
    kind.path.write_bytes(change(r, kind.good))
    try:
        with _bounded(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fits = kind.load(kind.path)
        wrong = [] if fits else ["it is read as something that it cannot hold"]
    except _Slow:
        wrong = [f"it takes more than {SECONDS:g} s"]
    except Exception as error:  # noqa: BLE001  # any other kind of error is the finding
        wrong = [] if isinstance(error, kind.errors) else [f"{type(error).__name__}: {error}"[:300]]
        if _asked_too_much(error):
            wrong = [f"it asks for more than {MEMORY:,} bytes"]
    finally:
        kind.path.write_bytes(kind.good)
    return name, wrong


if __name__ == "__main__":
    main(run_case, __doc__)
