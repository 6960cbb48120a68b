"""load: its options, the places in their order, downloads from a hub on this machine."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from equilibria import data
from equilibria.data import DataError, DataNotFoundError
from tests.data.made_files import (
    pictures,
    png,
    write_cifar10_pickles,
    write_class_folders,
    write_parquet,
)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "trian"}, "expected 'train', 'val' or 'test'"),
        ({"image_size": 0}, "image_size=0"),
        ({"image_size": 10**6}, "image_size=1000000"),
        ({"image_size": True}, "image_size=True"),
        ({"image_size": (8, 9)}, "images to classify are square"),
        ({"image_size": (8, 8, 8)}, "image_size="),
        ({"image_size": 8.5}, "image_size=8.5"),
        ({"channels": 2}, "channels=2"),
        ({"on_corrupt": "ignore"}, "on_corrupt='ignore'"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        data.load("digits", **options)


def test_the_name_is_kept_and_a_pair_is_a_size(tmp_path: Path) -> None:
    write_class_folders(tmp_path / "train", {"a": 4, "b": 4})
    found = data.load(tmp_path)
    assert (found.name, found.split_name) == (str(tmp_path), "train")
    assert data.load(found.name).name == found.name
    assert data.load("digits").name == "digits"
    one, two = data.load("digits", image_size=12), data.load("digits", image_size=[12, 12])
    assert torch.equal(one.images, two.images)


def put(folder: Path, label: int) -> None:
    columns = {"img": [png(pictures(1, 32, 32)[0])], "label": [label]}
    write_parquet(folder / "train-00000-of-00001.parquet", columns)


def test_root_comes_before_the_cache(tmp_path: Path, own_cache: Path) -> None:
    put(own_cache / "cifar10" / "plain_text", 3)
    assert data.load("cifar10").targets.tolist() == [3]
    assert data.load("cifar10", root=tmp_path).targets.tolist() == [3]  # it is not in root
    put(tmp_path / "cifar10", 5)
    assert data.load("cifar10", root=tmp_path).targets.tolist() == [5]
    assert data.load("cifar10", root=str(tmp_path / "cifar10")).targets.tolist() == [5]
    with pytest.raises(DataNotFoundError, match="there is no such folder"):
        data.load("cifar10", root=tmp_path / "typo")
    with pytest.raises(DataNotFoundError):
        data.load("mnist", root=tmp_path)  # a set of another name is not taken
    with pytest.raises(ValueError, match="goes with the name of a data set"):
        data.load(tmp_path, root=tmp_path)


def test_parquet_before_batches(tmp_path: Path) -> None:
    write_cifar10_pickles(tmp_path / "cifar-10-batches-py")
    assert len(data.load("cifar10", root=tmp_path)) == 20
    put(tmp_path, 5)
    assert len(data.load("cifar10", root=tmp_path)) == 1


def test_the_error_names_every_place_and_option(tmp_path: Path, own_cache: Path) -> None:
    with pytest.raises(DataNotFoundError) as raised:
        data.load("cifar100", root=tmp_path)
    text = str(raised.value)
    for part in (
        "cifar100 (train) was not found",
        f"the folder {tmp_path} (root=…)",
        f"the cache {own_cache / 'cifar100'} (set by the variable EQUILIBRIA_DATA)",
        "the hub, uoft-cs/cifar100: not asked; pass download=True",
        "digits needs no files",
    ):
        assert part in text
    assert isinstance(raised.value, FileNotFoundError)
    with pytest.raises(DataNotFoundError, match="does not have it, no copy"):
        data.load("camvid", root=tmp_path)
    with pytest.raises(DataNotFoundError, match="register at its site"):
        data.load("cityscapes", root=tmp_path, download=True)


@dataclass
class Hub:
    """What the server has and does, and what it was asked."""

    files: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    ranges: list[str] = field(default_factory=list)
    cut_after: int | None = None
    lie_about_sum: bool = False


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The part of the hub's interface that huggingface_hub uses to fetch a data set."""
    pytest.importorskip("huggingface_hub")
    state, commit = Hub(), "0" * 40

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def sent(self, body: bytes, **headers: object) -> None:
            start = 0
            if "resolve" in self.path and (wanted := self.headers.get("Range")):
                state.ranges.append(wanted)
                start = int(wanted.split("=")[1].split("-")[0])
                headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
            self.send_response(206 if start else 200)
            for name, value in {**headers, "Content-Length": len(body) - start}.items():
                self.send_header(name, str(value))
            self.end_headers()
            if self.command == "HEAD":
                return
            cut = state.cut_after if "resolve" in self.path else None
            self.wfile.write(body[start:][:cut])
            self.close_connection = cut is not None

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            state.asked.append(self.path)
            name = self.path.split(f"/resolve/{commit}/")[-1]
            sums = {n: hashlib.sha256(body).hexdigest() for n, body in state.files.items()}
            if not state.files:
                self.send_error(404)
            elif name in state.files:
                headers = {"ETag": f'"{sums[name]}"', "X-Repo-Commit": commit}
                self.sent(state.files[name], **headers)
            elif "/tree/" in self.path:
                wrong = "f" * 64 if state.lie_about_sum else None
                entries = [
                    {"type": "file", "path": n, "size": len(body), "oid": "a" * 40,
                     "lfs": {"oid": wrong or sums[n], "size": len(body), "pointerSize": 1}}
                    for n, body in state.files.items()
                ]  # fmt: skip
                self.sent(json.dumps(entries).encode(), **{"Content-Type": "application/json"})
            elif "/api/datasets/" in self.path:
                files = [{"rfilename": n} for n in state.files]
                about = {"id": "uoft-cs/cifar10", "sha": commit, "siblings": files}
                self.sent(json.dumps(about).encode(), **{"Content-Type": "application/json"})
            else:
                self.send_error(404)

        def log_message(self, *args: object) -> None:
            pass

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    running.daemon_threads = True
    thread = threading.Thread(target=running.serve_forever, args=(0.02,))
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{running.server_address[1]}")
    try:
        yield state
    finally:
        running.shutdown()
        thread.join()
        running.server_close()


def serve_cifar(server: Hub, folder: Path) -> np.ndarray:
    pixels = pictures(5, 32, 32)
    for name, part in (("train", pixels), ("test", pixels[:2])):
        path = folder / f"{name}.parquet"
        write_parquet(path, {"img": [png(p) for p in part], "label": list(range(len(part)))})
        server.files[f"plain_text/{name}-00000-of-00001.parquet"] = path.read_bytes()
    server.files["README.md"] = b"not asked for"
    return pixels.transpose(0, 3, 1, 2)


@pytest.mark.parametrize("progress", [False, True])
def test_load_downloads_once(server: Hub, tmp_path: Path, own_cache: Path, progress: bool) -> None:
    pixels = serve_cifar(server, tmp_path)
    with pytest.raises(DataNotFoundError, match="pass download=True"):
        data.load("cifar10")
    assert server.asked == []
    found = data.load("cifar10", download=True, progress=progress)
    assert np.array_equal(found.images, pixels)
    there = {p.name for p in (own_cache / "cifar10").rglob("*") if p.suffix in (".md", ".parquet")}
    assert there == {"train-00000-of-00001.parquet", "test-00000-of-00001.parquet"}
    count = len(server.asked)
    assert len(data.load("cifar10", "test")) == 2  # the cache has it now
    data.load("cifar10", download=True)
    assert len(server.asked) == count


def test_download_into_root(server: Hub, tmp_path: Path, own_cache: Path) -> None:
    serve_cifar(server, tmp_path)
    root = tmp_path / "root"
    assert len(data.load("cifar10", root=root, download=True, progress=False)) == 5
    assert (root / "cifar10" / "plain_text" / "test-00000-of-00001.parquet").is_file()
    assert not (own_cache / "cifar10").exists()


@pytest.mark.parametrize("missing", ["train-00001-of-00002.parquet", "test-00000-of-00001.parquet"])
def test_a_download_that_was_interrupted_goes_on(
    server: Hub, tmp_path: Path, own_cache: Path, missing: str
) -> None:
    serve_cifar(server, tmp_path)
    first = server.files.pop("plain_text/train-00000-of-00001.parquet")
    server.files |= {f"plain_text/train-0000{k}-of-00002.parquet": first for k in (0, 1)}
    assert len(data.load("cifar10", download=True, progress=False)) == 10
    (own_cache / "cifar10" / "plain_text" / missing).unlink()
    split = missing.split("-")[0]
    with pytest.raises(DataError, match=r"missing: train-00001|no split 'test'"):
        data.load("cifar10", split)
    expected = {"train": 10, "test": 2}[split]
    assert len(data.load("cifar10", split, download=True, progress=False)) == expected
    count = len(server.asked)
    with pytest.raises(DataError, match=r"no split 'val'.*Hold out part of train"):
        data.load("cifar10", "val", download=True)  # no copy has it: the hub is not asked
    assert len(server.asked) == count


def test_a_connection_that_breaks_is_taken_up_again(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = serve_cifar(server, tmp_path)
    server.cut_after = 30_000  # of 43,000
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1000)
    assert np.array_equal(data.load("cifar10", download=True, progress=False).images, pixels)
    assert "bytes=30000-" in server.ranges


def test_a_wrong_sum_is_thrown_away(server: Hub, tmp_path: Path, own_cache: Path) -> None:
    serve_cifar(server, tmp_path)
    server.lie_about_sum = True
    with pytest.raises(DataError, match=r"another checksum .*train-00000-of-00001\.parquet"):
        data.load("cifar10", download=True, progress=False)
    assert list((own_cache / "cifar10").rglob("*.parquet")) == []


@pytest.mark.parametrize("name", ["../../escape.parquet", "/tmp/escape.parquet"])
def test_a_name_that_leaves_the_folder_is_not_written(
    server: Hub, tmp_path: Path, own_cache: Path, name: str
) -> None:
    serve_cifar(server, tmp_path)
    server.files[f"plain_text/{name}"] = b"x"
    server.files[name] = b"x"
    with contextlib.suppress(DataError):
        data.load("cifar10", download=True, progress=False)
    escaped = [*tmp_path.rglob("escape*"), *own_cache.parent.rglob("escape*")]
    assert [path for path in escaped if own_cache / "cifar10" not in path.parents] == []
    assert not Path("/tmp/escape.parquet").exists()


def test_nothing_there(server: Hub) -> None:
    with pytest.raises(DataNotFoundError, match=r"the hub \(set by.*HF_ENDPOINT.*404"):
        data.load("cifar10", download=True, progress=False)


def test_no_server(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    with pytest.raises(DataNotFoundError, match=r"the hub .*not fetched"):
        data.load("mnist", download=True, root=tmp_path, progress=False)


@pytest.mark.parametrize("address", ["http://example.org", "ftp://127.0.0.1", "file:///etc"])
def test_only_https(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("HF_ENDPOINT", address)
    with pytest.raises(DataError, match="begins with https"):
        data.load("cifar10", download=True, progress=False)
