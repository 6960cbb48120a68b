"""load: its options, places and downloads, from a hub on this machine; check."""

from __future__ import annotations

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
from rich.console import Console

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


def put(folder: Path, label: int) -> None:
    columns = {"img": [png(pictures(1, 32, 32)[0])], "label": [label]}
    write_parquet(folder / "train-00000-of-00001.parquet", columns)


def test_root_comes_before_the_cache(tmp_path: Path, own_cache: Path) -> None:
    put(own_cache / "cifar10" / "plain_text", 3)
    assert data.load("cifar10").targets.tolist() == [3]
    assert data.load("cifar10", root=tmp_path).targets.tolist() == [3]  # it is not in root
    write_cifar10_pickles(tmp_path / "cifar-10-batches-py")
    assert len(data.load("cifar10", root=tmp_path)) == 20
    put(tmp_path / "cifar10", 5)  # Parquet comes before batches
    assert data.load("cifar10", root=tmp_path).targets.tolist() == [5]
    assert data.load("cifar10", root=str(tmp_path / "cifar10")).targets.tolist() == [5]
    with pytest.raises(DataNotFoundError, match="there is no such folder"):
        data.load("cifar10", root=tmp_path / "typo")
    with pytest.raises(DataNotFoundError):
        data.load("mnist", root=tmp_path)  # a set of another name is not taken
    with pytest.raises(ValueError, match="goes with the name of a data set"):
        data.load(tmp_path, root=tmp_path)


def test_the_error_names_every_place_and_option(tmp_path: Path, own_cache: Path) -> None:
    with pytest.raises(DataNotFoundError) as raised:
        data.load("cifar100", root=tmp_path)
    text = str(raised.value)
    for part in (
        "cifar100 (train) was not found",
        f"the folder {tmp_path} (root=…)",
        f"the cache {own_cache / 'cifar100'} (set by the variable EQUILIBRIA_DATA)",
        "the hub, uoft-cs/cifar100: not asked; pass download=True",
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
    lie_about_sum: bool = False


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The part of the hub's interface that huggingface_hub uses to fetch a data set."""
    pytest.importorskip("huggingface_hub")
    state, commit = Hub(), "0" * 40

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def sent(self, body: bytes, **headers: object) -> None:
            self.send_response(200)
            for name, value in {**headers, "Content-Length": len(body)}.items():
                self.send_header(name, str(value))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

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


@pytest.mark.parametrize("given", [False, True])
def test_load_downloads_once(server: Hub, tmp_path: Path, own_cache: Path, given: bool) -> None:
    """Into the cache, with bars, or into the folder that is given, without."""
    pixels = serve_cifar(server, tmp_path)
    with pytest.raises(DataNotFoundError, match="pass download=True"):
        data.load("cifar10")
    assert server.asked == []
    place = tmp_path / "root" if given else own_cache
    options: dict[str, Any] = {"root": place} if given else {}
    found = data.load("cifar10", download=True, progress=not given, **options)
    assert np.array_equal(found.images, pixels)
    there = {p.name for p in (place / "cifar10").rglob("*") if p.suffix in (".md", ".parquet")}
    assert there == {"train-00000-of-00001.parquet", "test-00000-of-00001.parquet"}
    assert (own_cache / "cifar10").exists() != given
    count = len(server.asked)
    assert len(data.load("cifar10", "test", **options)) == 2  # it is there now
    data.load("cifar10", download=True, **options)
    assert len(server.asked) == count


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


def test_a_wrong_sum_is_thrown_away(server: Hub, tmp_path: Path, own_cache: Path) -> None:
    serve_cifar(server, tmp_path)
    server.lie_about_sum = True
    with pytest.raises(DataError, match=r"another checksum .*train-00000-of-00001\.parquet"):
        data.load("cifar10", download=True, progress=False)
    assert list((own_cache / "cifar10").rglob("*.parquet")) == []


def test_no_server_and_nothing_there(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataNotFoundError, match=r"the hub \(set by.*HF_ENDPOINT.*404"):
        data.load("cifar10", download=True, progress=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DataNotFoundError, match=r"the hub .*not fetched"):
        data.load("mnist", download=True, progress=False)


@pytest.mark.parametrize("address", ["http://example.org", "ftp://127.0.0.1", "file:///etc"])
def test_only_https(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("HF_ENDPOINT", address)
    with pytest.raises(DataError, match="begins with https"):
        data.load("cifar10", download=True, progress=False)


def test_digits_are_as_expected() -> None:
    report = data.check("digits")
    assert report.ok
    found = {(f.split, f.what): f.found for f in report.findings}
    assert found["train", "images"] == "1,438"
    assert found["test", "classes"] == "10"
    assert found["train", "size"] == "1×8×8"
    assert json.loads(json.dumps(report.to_dict()))["ok"] is True


def test_a_folder_is_checked_without_expectations(tmp_path: Path) -> None:
    with pytest.raises(data.DataNotFoundError, match="is empty"):
        data.check(tmp_path)
    write_class_folders(tmp_path / "train", {"a": 3, "b": 5})
    write_class_folders(tmp_path / "val", {"a": 1, "b": 1})
    report = data.check(tmp_path)
    assert report.ok
    assert {f.split for f in report.findings} == {"train", "val"}
    found = {(f.split, f.what): f.found for f in report.findings}
    assert found["train", "images per class"] == "3 to 5"


def test_corrupt_images_and_wrong_counts_are_wrong(tmp_path: Path) -> None:
    encoded = [png(p) for p in pictures(3, 32, 32)] + [b"broken"]
    for split in ("train", "test"):
        columns = {"img": encoded, "label": [0, 1, 2, 3]}
        write_parquet(tmp_path / f"{split}-00000-of-00001.parquet", columns)
    report = data.check("cifar10", root=tmp_path)
    assert not report.ok
    wrong = {f.what for f in report.findings if not f.ok}
    assert wrong == {"images", "unreadable", "images per class", "mean of 255"}
    assert all("row 3" in f.found for f in report.findings if f.what == "unreadable")
    console = Console(record=True, width=200, stderr=True)
    console.print(report.table())
    assert "wrong" in console.export_text()
    assert "NOT as expected" in str(report)


def test_masks(tmp_path: Path) -> None:
    ids = pictures(2, 6, 8, channels=1) % 12
    for split in ("train", "val", "test"):
        columns = {"image": [png(p) for p in pictures(2, 6, 8)], "mask": [png(i) for i in ids]}
        write_parquet(tmp_path / f"{split}.parquet", columns)
    found = {(f.split, f.what): f.found for f in data.check("camvid", root=tmp_path).findings}
    assert found["val", "pixels ignored"] == f"{(ids == 11).mean():.1%}"
