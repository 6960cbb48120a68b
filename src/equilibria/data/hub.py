"""Fetch Parquet files from the hub over https: listed, resumed, checked, then put in place."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import re
import shutil
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equilibria._version import __version__

from .cards import DataCard
from .errors import DataError, DataNotFoundError
from .extras import progress_bar

__all__ = ["HUB_VARIABLE", "RemoteFile", "download", "endpoint", "fetch", "listing"]

HUB_VARIABLE = "HF_ENDPOINT"
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.parquet$")
_BLOCK = 2**20
_TRIES = 4
_TIMEOUT = 60.0
_PATIENCE = 1.0  # seconds before the second try; doubled after each
_NETWORK = (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError)


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository."""

    path: str
    size: int
    sha256: str | None


def endpoint() -> str:
    """The hub's address: $HF_ENDPOINT (a mirror), or https://huggingface.co."""
    url = os.environ.get(HUB_VARIABLE, "").rstrip("/") or "https://huggingface.co"
    parts = urllib.parse.urlsplit(url)
    local = parts.hostname in ("localhost", "127.0.0.1", "::1")
    if parts.scheme != "https" and not (parts.scheme == "http" and local):
        raise DataError(f"{HUB_VARIABLE}={url}: expected an address that begins with https://")
    return url


def download(card: DataCard, folder: Path, *, progress: bool = True) -> list[Path]:
    """Fetch the Parquet files of ``card`` into ``folder``; what is there already stays.

    Let one process do it: two at a time would write to the same partial files.
    """
    if not card.hub:
        raise DataNotFoundError(f"{card.name} cannot be downloaded: {card.hub_note}.")
    files = listing(card.hub, card.hub_folder)
    if not files:
        raise DataNotFoundError(f"{endpoint()}/datasets/{card.hub} lists no Parquet files.")
    targets = {file: folder / Path(file.path).name for file in files}
    missing = [f for f, t in targets.items() if not (t.is_file() and t.stat().st_size == f.size)]
    if not missing:
        return list(targets.values())
    folder.mkdir(parents=True, exist_ok=True)
    _check_space(folder, sum(file.size for file in missing))
    with progress_bar(progress, of_bytes=True) as bar:
        task = bar.add_task(card.name, total=sum(file.size for file in missing))
        for file in missing:
            path = urllib.parse.quote(file.path)
            url = f"{endpoint()}/datasets/{card.hub}/resolve/main/{path}"
            fetch(url, targets[file], file.size, file.sha256, lambda n: bar.advance(task, n))
    return list(targets.values())


def listing(repository: str, folder: str) -> list[RemoteFile]:
    """The Parquet files in a folder of a repository, with size and sha256."""
    url: str | None = f"{endpoint()}/api/datasets/{repository}/tree/main/{folder}?recursive=true"
    found: list[RemoteFile] = []
    while url is not None:
        try:
            with _opened(url) as answer:
                text = answer.read(2**24)
                link = answer.headers.get("Link") or ""
        except _NETWORK as error:
            raise DataNotFoundError(f"{url} cannot be reached ({error}).") from error
        try:
            found += [_remote(entry) for entry in json.loads(text) if _wanted(entry)]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{url}: not a list of files ({type(error).__name__}).") from error
        following = re.search(r'<([^>]+)>;\s*rel="next"', link)
        url = urllib.parse.urljoin(url, following[1]) if following else None
        if url is not None and not url.startswith(endpoint()):
            raise DataError(f"the list of files goes on at another host: {url}; refused.")
    return found


def fetch(
    url: str,
    target: Path,
    size: int,
    sha256: str | None,
    advance: Callable[[int], Any] = lambda _: None,
) -> None:
    """Download ``url`` to ``target``: it appears there whole and with the right sum, or not at all.

    What came before an interruption stays in ``target.part``, and the next call goes on from there.
    """
    part = target.with_name(target.name + ".part")
    seen = 0
    for attempt in range(_TRIES):
        have = part.stat().st_size if part.exists() else 0
        if have > size:
            part.unlink()
            have = 0
        advance(have - seen)
        seen = have
        if have == size:
            break
        try:
            seen = _append(url, part, have, size, advance)
        except _NETWORK as error:
            seen = part.stat().st_size if part.exists() else 0
            fatal = isinstance(error, urllib.error.HTTPError) and 400 <= error.code < 500
            if fatal or attempt == _TRIES - 1:
                raise DataNotFoundError(
                    f"{url} cannot be fetched ({error}). {seen:,} of {size:,} bytes are kept in "
                    f"{part}; the next try goes on from there."
                ) from error
            time.sleep(min(2.0**attempt, 8.0) * _PATIENCE)
    found = part.stat().st_size
    if found != size:
        raise DataNotFoundError(
            f"{url}: {found:,} of {size:,} bytes came. The next try goes on from {part}."
        )
    if sha256 is not None and _sha256(part) != sha256:
        part.unlink()
        raise DataError(f"{url}: the bytes that came have another sha256 than the hub says.")
    part.replace(target)


def _append(url: str, part: Path, have: int, size: int, advance: Callable[[int], Any]) -> int:
    """Bytes ``have`` … of ``url`` behind what ``part`` holds; the size of ``part`` after that."""
    headers = {"Range": f"bytes={have}-"} if have else {}
    with _opened(url, headers) as answer:
        resumed = answer.status == 206 and str(answer.headers.get("Content-Range", "")).startswith(
            f"bytes {have}-"
        )
        if have and not resumed:
            advance(-have)  # the server sends the whole file again
            have = 0
        with part.open("ab" if have else "wb") as file:
            while block := answer.read(min(_BLOCK, size - have + 1)):
                have += len(block)
                if have > size:
                    file.truncate(0)
                    raise DataError(f"{url}: more bytes came than the {size:,} that were listed.")
                file.write(block)
                advance(len(block))
            file.flush()
            os.fsync(file.fileno())
    return have


@contextlib.contextmanager
def _opened(url: str, headers: dict[str, str] | None = None) -> Iterator[Any]:
    agent = {"User-Agent": f"equilibria/{__version__}"}
    request = urllib.request.Request(url, headers={**agent, **(headers or {})})
    with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
        yield answer


def _wanted(entry: Any) -> bool:
    """A Parquet file with a plain name: the name becomes a path on this machine."""
    return entry["type"] == "file" and bool(_PLAIN.match(entry["path"].rsplit("/", 1)[-1]))


def _remote(entry: Any) -> RemoteFile:
    stored = entry.get("lfs") or {}
    sha = stored.get("oid") or stored.get("sha256")
    size = int(stored.get("size") or entry["size"])
    return RemoteFile(str(entry["path"]), size, None if sha is None else str(sha))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DataError(
            f"{folder} has {free / 1e9:.1f} GB free, {needed / 1e9:.1f} GB are needed. Make room, "
            "or name another folder: root=…, or EQUILIBRIA_DATA for the cache."
        )
