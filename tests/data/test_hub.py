"""Downloads from a hub on this machine: listed, resumed, checked, put in place."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from equilibria import data
from equilibria.data import DataError, DataNotFoundError, hub
from equilibria.data.hub import fetch, listing
from tests.data.made_files import pictures, png, write_parquet


@dataclass
class Hub:
    """What the server has and does, and what it was asked."""

    address: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    cut_after: int | None = None
    ranges: bool = True
    lie_about_sum: bool = False
    page: int = 100
    next_host: str = ""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    state = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            state.asked.append((self.path, self.headers.get("Range")))
            if "/api/datasets/" in self.path:
                self.answer_listing()
            elif "/resolve/main/" in self.path:
                self.answer_file(self.path.split("/resolve/main/")[1])
            else:
                self.send_error(404)

        def answer_listing(self) -> None:
            if not state.files:
                self.send_error(404)
                return
            start = int(self.path.split("cursor=")[1]) if "cursor=" in self.path else 0
            entries = []
            for name, body in list(state.files.items())[start : start + state.page]:
                sha = "0" * 64 if state.lie_about_sum else hashlib.sha256(body).hexdigest()
                entries.append(
                    {"type": "file", "path": name, "size": 130,
                     "lfs": {"oid": sha, "size": len(body)}}
                )  # fmt: skip
            entries.append({"type": "directory", "path": "deep", "size": 0})
            text = json.dumps(entries).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            if start + state.page < len(state.files):
                base = self.path.split("&cursor")[0]
                link = f"{state.next_host or state.address}{base}&cursor={start + state.page}"
                self.send_header("Link", f'<{link}>; rel="next"')
            self.end_headers()
            self.wfile.write(text)

        def answer_file(self, name: str) -> None:
            body = state.files[name]
            wanted = self.headers.get("Range")
            start = int(wanted.split("=")[1].rstrip("-")) if wanted and state.ranges else 0
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
            self.send_header("Content-Length", str(len(body) - start))
            self.end_headers()
            rest = body[start:]
            if state.cut_after is not None:
                self.wfile.write(rest[: state.cut_after])
                self.wfile.flush()
                self.close_connection = True  # before all of it has come
                return
            self.wfile.write(rest)

        def log_message(self, *args: object) -> None:
            pass

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    running.daemon_threads = True
    thread = threading.Thread(target=running.serve_forever, args=(0.02,))
    thread.start()
    state.address = f"http://127.0.0.1:{running.server_address[1]}"
    monkeypatch.setenv("HF_ENDPOINT", state.address)
    monkeypatch.setattr(hub, "_PATIENCE", 0.0)
    try:
        yield state
    finally:
        running.shutdown()
        thread.join()
        running.server_close()


BODY = np.random.default_rng(0).integers(0, 256, 300_000, dtype=np.uint8).tobytes()
SUM = hashlib.sha256(BODY).hexdigest()


def put_cifar(server: Hub, folder: Path) -> np.ndarray:
    pixels = pictures(5, 32, 32)
    for name, part in (("train", pixels), ("test", pixels[:2])):
        path = folder / f"{name}.parquet"
        labels = list(range(len(part)))
        write_parquet(path, {"img": [png(p) for p in part], "label": labels})
        server.files[f"plain_text/{name}-00000-of-00001.parquet"] = path.read_bytes()
    return pixels.transpose(0, 3, 1, 2)


@pytest.mark.parametrize("progress", [False, True])
def test_load_downloads_once(server: Hub, tmp_path: Path, own_cache: Path, progress: bool) -> None:
    pixels = put_cifar(server, tmp_path)
    with pytest.raises(DataNotFoundError, match="pass download=True"):
        data.load("cifar10")
    assert server.asked == []
    found = data.load("cifar10", download=True, progress=progress)
    assert np.array_equal(found.images, pixels)
    assert {p.name for p in (own_cache / "cifar10").iterdir()} == {
        "train-00000-of-00001.parquet",
        "test-00000-of-00001.parquet",
    }
    count = len(server.asked)
    assert len(data.load("cifar10", "test")) == 2  # the cache has it now
    data.load("cifar10", download=True)
    assert len(server.asked) == count


def test_download_into_root(server: Hub, tmp_path: Path, own_cache: Path) -> None:
    put_cifar(server, tmp_path)
    root = tmp_path / "root"
    assert len(data.load("cifar10", root=root, download=True)) == 5
    assert (root / "cifar10" / "test-00000-of-00001.parquet").is_file()
    assert not (own_cache / "cifar10").exists()


def test_listing_follows_pages(server: Hub) -> None:
    server.files = {f"plain_text/train-0000{k}-of-00005.parquet": bytes(k + 1) for k in range(5)}
    server.page = 2
    found = listing("uoft-cs/cifar10", "plain_text")
    assert [f.path for f in found] == list(server.files)
    assert [f.size for f in found] == [1, 2, 3, 4, 5]
    assert found[1].sha256 == hashlib.sha256(bytes(2)).hexdigest()
    assert server.asked[0][0].startswith("/api/datasets/uoft-cs/cifar10/tree/main/plain_text")


def test_another_host_is_not_followed(server: Hub) -> None:
    server.files = {f"plain_text/{k}.parquet": b"x" for k in range(3)}
    server.page, server.next_host = 2, "http://127.0.0.2:9"
    with pytest.raises(DataError, match="another host"):
        listing("uoft-cs/cifar10", "plain_text")


@pytest.mark.parametrize(
    "name",
    ["../../escape.parquet/..", "plain_text/.hidden.parquet", "x/train.zip", "x/a b.parquet"],
)
def test_names_that_are_not_plain_are_passed_over(server: Hub, name: str) -> None:
    server.files = {name: b"x", "plain_text/good.parquet": b"x"}
    assert [f.path for f in listing("uoft-cs/cifar10", "plain_text")] == ["plain_text/good.parquet"]


def test_fetch_resumes_where_it_stopped(server: Hub, tmp_path: Path) -> None:
    server.files = {"a": BODY}
    target = tmp_path / "a.parquet"
    part = tmp_path / "a.parquet.part"
    part.write_bytes(BODY[:100_000])
    moved: list[int] = []
    fetch(f"{server.address}/resolve/main/a", target, len(BODY), SUM, moved.append)
    assert target.read_bytes() == BODY
    assert not part.exists()
    assert server.asked == [("/resolve/main/a", "bytes=100000-")]
    assert sum(moved) == len(BODY)
    assert moved[0] == 100_000


def test_a_connection_that_breaks_is_taken_up_again(server: Hub, tmp_path: Path) -> None:
    server.files = {"a": BODY}
    server.cut_after = 110_000
    target = tmp_path / "a.parquet"
    moved: list[int] = []
    fetch(f"{server.address}/resolve/main/a", target, len(BODY), SUM, moved.append)
    assert target.read_bytes() == BODY
    assert [r for _, r in server.asked] == [None, "bytes=110000-", "bytes=220000-"]
    assert sum(moved) == len(BODY)


def test_giving_up_keeps_what_came(server: Hub, tmp_path: Path) -> None:
    server.files = {"a": BODY}
    server.cut_after = 10_000
    target = tmp_path / "a.parquet"
    with pytest.raises(DataNotFoundError, match=r"40,000 of 300,000 bytes.*next try goes on"):
        fetch(f"{server.address}/resolve/main/a", target, len(BODY), SUM)
    assert not target.exists()
    assert (tmp_path / "a.parquet.part").read_bytes() == BODY[:40_000]
    server.cut_after = None
    fetch(f"{server.address}/resolve/main/a", target, len(BODY), SUM)
    assert target.read_bytes() == BODY


def test_a_server_without_ranges_sends_all_again(server: Hub, tmp_path: Path) -> None:
    server.files, server.ranges = {"a": BODY}, False
    target = tmp_path / "a.parquet"
    (tmp_path / "a.parquet.part").write_bytes(b"other bytes")
    moved: list[int] = []
    fetch(f"{server.address}/resolve/main/a", target, len(BODY), SUM, moved.append)
    assert target.read_bytes() == BODY
    assert sum(moved) == len(BODY)


def test_a_part_that_is_whole_needs_no_server(tmp_path: Path) -> None:
    (tmp_path / "a.parquet.part").write_bytes(BODY)
    fetch("http://127.0.0.1:9/x", tmp_path / "a.parquet", len(BODY), SUM)
    assert (tmp_path / "a.parquet").read_bytes() == BODY


def test_wrong_bytes_are_thrown_away(server: Hub, tmp_path: Path) -> None:
    server.files = {"a": BODY}
    (tmp_path / "a.parquet.part").write_bytes(bytes(1000))
    with pytest.raises(DataError, match="another sha256"):
        fetch(f"{server.address}/resolve/main/a", tmp_path / "a.parquet", len(BODY), SUM)
    assert list(tmp_path.iterdir()) == []


def test_more_bytes_than_listed(server: Hub, tmp_path: Path) -> None:
    server.files = {"a": BODY}
    with pytest.raises(DataError, match="more bytes came"):
        fetch(f"{server.address}/resolve/main/a", tmp_path / "a.parquet", 1000, None)
    assert not (tmp_path / "a.parquet").exists()


def test_a_wrong_sum_through_load(server: Hub, tmp_path: Path, own_cache: Path) -> None:
    put_cifar(server, tmp_path)
    server.lie_about_sum = True
    with pytest.raises(DataError, match="another sha256"):
        data.load("cifar10", download=True, progress=False)
    assert list((own_cache / "cifar10").iterdir()) == []


def test_nothing_there(server: Hub) -> None:
    with pytest.raises(DataNotFoundError, match=r"the hub \(set by.*HF_ENDPOINT.*404"):
        data.load("cifar10", download=True, progress=False)


def test_no_server(tmp_path: Path) -> None:
    with pytest.raises(DataNotFoundError, match=r"cannot be reached"):
        data.load("mnist", download=True, root=tmp_path, progress=False)


def test_a_full_disk_is_told_before(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_cifar(server, tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 10))
    with pytest.raises(DataError, match=r"GB free.*EQUILIBRIA_DATA"):
        data.load("cifar10", download=True, progress=False)
    assert all("/resolve/" not in path for path, _ in server.asked)


@pytest.mark.parametrize("address", ["http://example.org", "ftp://127.0.0.1", "file:///etc"])
def test_only_https(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("HF_ENDPOINT", address)
    with pytest.raises(DataError, match="begins with https"):
        data.load("cifar10", download=True, progress=False)


def test_the_hub_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_ENDPOINT")
    assert hub.endpoint() == "https://huggingface.co"
