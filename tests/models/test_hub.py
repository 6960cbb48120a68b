"""Networks on the hub, with a stub in the place of its client: what is sent, fetched, refused."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from equilibria import models
from tests.cli.running import run
from tests.models.small import images, make
from tests.optional import optional

hub: Any = optional("huggingface_hub")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def model() -> models.Network:
    made = make("geq_digits").eval()
    made.extra = {"classes": list("abcde"), "mean": [0.3], "std": [0.4], "image_size": 8}
    return made


class Stub:
    """A hub in a folder; ``calls`` is what it was asked."""

    def __init__(self, root: Path) -> None:
        self.root, self.calls = root, []  # type: tuple[Path, list[tuple[Any, ...]]]

    def HfApi(self, token: Any = None) -> Stub:
        return self

    def create_repo(self, repo: str, **how: Any) -> SimpleNamespace:
        (self.root / repo).mkdir(parents=True, exist_ok=True)
        return SimpleNamespace(repo_id=repo)

    def file_exists(self, repo: str, name: str, **how: Any) -> bool:
        return (self.root / repo / name).exists()

    def upload_folder(
        self, *, repo_id: str, folder_path: Path, ignore_patterns: Any, **how: Any
    ) -> str:
        for file in Path(folder_path).iterdir():
            if file.name not in (ignore_patterns or ()):
                (self.root / repo_id / file.name).write_bytes(file.read_bytes())
        return f"https://hub/{repo_id}/commit/1"

    def hf_hub_download(self, repo: str, name: str, **how: Any) -> str:
        self.calls.append((repo, name, how["local_files_only"]))
        file = self.root / repo / name
        if how["local_files_only"] or not file.exists():
            raise hub.errors.LocalEntryNotFoundError("it is not there")
        if how.get("local_dir") is None:
            return str(file)
        target = Path(how["local_dir"]) / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.read_bytes())
        return str(target)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Stub:
    made = Stub(tmp_path / "hub")
    for name in ("HfApi", "hf_hub_download"):
        monkeypatch.setattr(hub, name, getattr(made, name))
    return made


def same(a: models.Network, b: models.Network) -> None:
    x = images(a)
    assert torch.equal(a(x), b(x))
    assert (a.config, a.extra, a.preprocessing) == (b.config, b.extra, b.preprocessing)


def test_a_folder_holds_a_network_and_its_card(model: models.Network, tmp_path: Path) -> None:
    folder = model.save_pretrained(tmp_path / "new" / "net")
    assert {file.name for file in folder.iterdir()} == {"model.safetensors", "README.md"}
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: equilibria\n")
    assert "a, b, c, d, e" in card
    assert models.describe("geq_digits").text in card
    for place in (folder, str(folder), folder / "model.safetensors"):
        same(model, models.Network.from_pretrained(place))
    same(model, type(model).from_pretrained(folder))
    (folder / "README.md").write_text("my own")
    model.save_pretrained(folder, dtype=torch.int8)
    assert (folder / "README.md").read_text() == "my own"
    assert models.read_header(folder / "model.safetensors")["quantization"] is not None


def test_another_class_is_refused(model: models.Network, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    other = type(make("mondeq_single"))
    with pytest.raises(TypeError, match=r"geq_digits.*use eq\.models\.Network\.from_pretrained"):
        other.from_pretrained(tmp_path)


def test_there_and_back(model: models.Network, stub: Stub) -> None:
    """Nothing is fetched unless asked; cards of people stay."""
    assert model.push_to_hub("me/net").startswith("https://hub/me/net")
    with pytest.raises(FileNotFoundError, match=r"download=True.*models pull me/net"):
        models.Network.from_pretrained("me/net")
    same(model, models.Network.from_pretrained("me/net", download=True))
    assert stub.calls == [("me/net", "model.safetensors", local) for local in (True, False)]
    card = stub.root / "me/net/README.md"
    card.write_text("by a person")
    model.push_to_hub("me/net")
    assert card.read_text() == "by a person"
    with pytest.raises(OSError, match=r"me/other: model\.safetensors was not fetched.*not there"):
        models.Network.from_pretrained("me/other", download=True)


def test_a_pickle_is_not_fetched(stub: Stub) -> None:
    """Nor is it opened in the place of the weights: test_weights.py."""
    place = stub.root / "me/old"
    place.mkdir(parents=True)
    (place / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    with pytest.raises(OSError, match="not fetched"):
        models.Network.from_pretrained("me/old", download=True)


def test_pull(
    model: models.Network, stub: Stub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model.push_to_hub("me/net")
    assert run("models", "pull", "me/net", "--folder", tmp_path / "here", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer == {"name": "geq_digits", "file": str(tmp_path / "here" / "model.safetensors")}
    same(model, models.load(answer["file"]))
    assert run("models", "pull", "me/net") == 0
    assert "geq_digits: " in capsys.readouterr().out
    assert run("models", "pull", "me/none") == 1
    assert "was not fetched" in capsys.readouterr().err
    for wrong in (["pull"], ["geq_*", "me/net"], ["--folder", "here"]):
        assert run("models", *wrong) == 1
        assert "pull needs REPO" in capsys.readouterr().err
    weights = stub.root / "me/net/model.safetensors"
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    weights.write_bytes(damaged)
    assert run("models", "pull", "me/net") == 1
    assert "does not have the SHA-256" in " ".join(capsys.readouterr().err.split())


def test_torch_hub(model: models.Network, tmp_path: Path) -> None:
    made = torch.hub.load(
        str(ROOT), "equilibria_model", "geq_digits", 3, source="local", widths=(8, 16)
    )
    assert (made.config.name, made.config.num_classes) == ("geq_digits", 3)
    model.save_pretrained(tmp_path)
    same(model, torch.hub.load(str(ROOT), "equilibria_pretrained", str(tmp_path), source="local"))


def test_timm_builds_our_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its registry is a stub: it keeps functions by their names and calls them with its options."""
    monkeypatch.setitem(sys.modules, "timm.models", None)
    with pytest.raises(ImportError, match=r"pip install \"equilibria\[timm\]\""):
        models.register_timm()
    known: dict[str, Any] = {}
    stub = ModuleType("timm.models")
    stub.register_model = lambda fn: known.setdefault(fn.__name__, fn)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "timm", ModuleType("timm"))
    monkeypatch.setitem(sys.modules, "timm.models", stub)
    assert models.register_timm() == list(known)
    assert list(known) == [f"equilibria_{n}" for n in models.names(task="classification")]
    build, always = known["equilibria_geq_digits"], {"pretrained_cfg": None, "drop_rate": 0.0}
    model = build(pretrained=False, num_classes=3, in_chans=2, img_size=16, **always)
    assert model(torch.randn(1, 2, 16, 16)).shape == (1, 3)
    with pytest.raises(ValueError, match=r"pretrained=True.*from_pretrained"):
        build(pretrained=True)
    with pytest.raises(TypeError, match="drop_rate"):
        build(drop_rate=0.5)
