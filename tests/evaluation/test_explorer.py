"""The explorer: its answers in process, and the page in a real browser (slow)."""

from __future__ import annotations

import base64
import io
import math
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

import equilibria as eq
from equilibria.evaluation import Explorer, explorer_app
from tests.cli.running import run

CHROMIUM = Path("/usr/bin/chromium")
PLAIN = {"kernel": "gaussian", "gamma": 1.0, "solver": "Anderson", "rtol": 1e-4}


def small() -> Any:
    torch.manual_seed(0)
    model = eq.models.create("geq_digits", widths=[4, 8], hidden=8).eval()
    return model


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()


def drawing() -> bytes:
    image = Image.new("L", (256, 256))
    ImageDraw.Draw(image).line([(60, 50), (200, 50), (90, 220)], fill=255, width=24)
    return png(image)


def test_a_tighter_tolerance_takes_more_steps_and_proves_more() -> None:
    explorer = Explorer(small())
    image = explorer.read(drawing(), drawn=True)
    loose, tight = (explorer.solve(image, **{**PLAIN, "rtol": r}) for r in (1e-1, 1e-6))
    for one, other in zip(loose["layers"], tight["layers"], strict=True):
        assert other["steps"] > one["steps"]
        assert other["bound"] < one["bound"]
        assert len(other["frames"]) >= other["steps"]
        assert other["charts"] != one["charts"]
    assert tight["label"] in eq.models.create("geq_digits").classes


def test_gamma_and_kernel_change_the_solution_but_not_the_model() -> None:
    explorer = Explorer(small())
    before = {k: v.clone() for k, v in explorer.model.state_dict().items()}
    image = explorer.read(drawing(), drawn=True)
    plain = explorer.solve(image, **PLAIN)
    narrow = explorer.solve(image, **{**PLAIN, "gamma": 10.0})
    linear = explorer.solve(image, **{**PLAIN, "kernel": "linear"})
    assert plain["bars"] != narrow["bars"] != linear["bars"]
    # The linear kernel contracts with ‖W‖² ≤ 0.95²; both kinds are proven here.
    assert linear["layers"][0]["kind"] == plain["layers"][0]["kind"] == "contraction"
    assert linear["layers"][0]["contraction"] < 0.97
    for key, value in explorer.model.state_dict().items():
        assert torch.equal(value, before[key])
    assert explorer.solve(image, **PLAIN) == plain


def test_a_drawing_is_cut_to_its_ink_and_centered() -> None:
    explorer = Explorer(small())
    found = []
    for box in ([10, 10, 40, 70], [150, 120, 210, 240]):
        image = Image.new("L", (256, 256))
        ImageDraw.Draw(image).rectangle(box, fill=255)
        found.append(np.array(explorer.read(png(image), drawn=True)).astype(int))
    assert found[0].shape == (8, 8)
    assert abs(found[0] - found[1]).max() <= 8
    assert found[0][:, 3:5].min() > 200  # as high as the square
    assert found[0][:, 0].max() == 0


def test_images_are_read_as_the_data_are() -> None:
    """Sixteen bits of gray are not clipped; formats that run other programs are not opened."""
    explorer = Explorer(small())
    deep = Image.fromarray((np.arange(64, dtype=np.uint16) * 1000).reshape(8, 8))
    found = np.array(explorer.read(png(deep), drawn=False))
    assert np.array_equal(found, np.asarray(deep).astype(int) >> 8)
    with pytest.raises(ValueError, match="no image"):
        explorer.read(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n", drawn=False)


def test_the_requests_are_checked() -> None:
    pytest.importorskip("fastapi")
    pytest.importorskip("httpx")
    from fastapi.testclient import TestClient

    client = TestClient(explorer_app(Explorer(small())), base_url="http://127.0.0.1")
    page = client.get("/").text
    assert "geq_digits" in page
    assert "{{" not in page
    assert not re.search(r"https?://", page)
    assert client.get("/example/3").status_code == 404
    url = "data:image/png;base64," + base64.b64encode(drawing()).decode()
    good = {"image": url, "drawn": True, **PLAIN}
    assert client.post("/solve", json=good).json()["layers"][0]["steps"] > 0
    for wrong, said in (
        ({"image": "data:image/png;base64,AAAA"}, "not a readable image"),
        ({"image": "data:image/png;base64,?"}, ""),
        ({"kernel": "cubic"}, "kernel='cubic': expected gaussian"),
        ({"solver": "Newton"}, "solver='Newton': expected Anderson"),
        ({"gamma": -1}, "gamma=-1.0: expected a factor"),
        ({"gamma": "nan"}, "gamma=nan"),
        ({"rtol": 7}, "rtol=7.0: expected a tolerance"),
        ({"rtol": []}, ""),
    ):
        answer = client.post("/solve", json={**good, **wrong})
        assert answer.status_code == 422, wrong
        assert said in str(answer.json()["detail"])
    assert client.get("/", headers={"host": "evil.example"}).status_code == 400
    with pytest.raises(TypeError, match="classifies"):
        Explorer(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("command", ["explore", "serve"])
def test_a_port_in_use_is_an_error(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import socket

    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn")
    weights = tmp_path / "w.safetensors"
    eq.models.save(small(), weights)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert run(command, weights, "--port", str(port)) == 1
    said = capsys.readouterr().err
    assert "it cannot be used" in said
    assert "serving" not in said
    if command == "serve":  # nor is a port to blame for an address of documents (RFC 5737)
        assert run(command, weights, "--host", "192.0.2.1", "--port", "0") == 1
        assert "--host 192.0.2.1: no address of this machine" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["explore", "serve"])
def test_a_free_port_is_named(
    command: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("fastapi")
    uvicorn: Any = pytest.importorskip("uvicorn")
    weights, ports = tmp_path / "w.safetensors", []
    eq.models.save(small(), weights)

    def served(server: Any, sockets: Any) -> None:
        server.started = True
        ports.append(sockets[0].getsockname()[1])

    monkeypatch.setattr(uvicorn.Server, "run", served)
    assert run(command, weights, "--port", "0") == 0
    assert f"http://127.0.0.1:{ports[0]} " in capsys.readouterr().err.replace("\n", "")


def test_the_network_for_the_digits_is_trained_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from equilibria.cli.explore import _digits

    made: list[Path] = []

    def fit(config: Any, **_: Any) -> None:
        made.append(Path(config.out))
        made[-1].mkdir(parents=True)
        (made[-1] / "result.json").write_text("{}")

    monkeypatch.setenv("EQUILIBRIA_DATA", str(tmp_path))
    monkeypatch.setattr("equilibria.training.fit", fit)
    assert _digits() == _digits() == made[0]
    assert made[0].is_relative_to(tmp_path)
    assert len(made) == 1


# ---------------------------------------------------------------------- in a browser


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A running server with a network that was trained for a few epochs."""
    pytest.importorskip("fastapi")
    uvicorn = pytest.importorskip("uvicorn")
    out = tmp_path_factory.mktemp("explore") / "run"
    options = {"widths": [16, 32], "hidden": 16}
    config = eq.training.TrainConfig(epochs=6, out=str(out), loggers=(), model_options=options)
    result = eq.training.fit(config, progress=False)
    model = eq.models.load(result.weights)
    app = explorer_app(Explorer(model, eq.data.load("digits", "test")))
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    socket = server.config.bind_socket()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    yield f"http://127.0.0.1:{socket.getsockname()[1]}"
    server.should_exit = True
    thread.join(10)


@pytest.fixture
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api")
    if not CHROMIUM.exists():
        pytest.skip(f"{CHROMIUM} is not installed")
    with api.sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


class Tab:
    """A page of the explorer, and what its console said."""

    def __init__(self, browser: Any, address: str, width: int, scheme: str = "light") -> None:
        size = {"width": width, "height": 900}
        self.page = browser.new_page(viewport=size, color_scheme=scheme)
        self.errors: list[str] = []
        self.page.on("console", lambda m: m.type == "error" and self.errors.append(m.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.goto(address)

    def draw(self, *points: tuple[float, float]) -> None:
        """With the mouse, in shares of the paper."""
        box = self.page.locator("#paper").bounding_box()
        spots = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in points]
        self.page.mouse.move(*spots[0])
        self.page.mouse.down()
        for spot in spots[1:]:
            self.page.mouse.move(*spot, steps=5)
        self.page.mouse.up()
        self.wait()

    def wait(self) -> None:
        self.page.wait_for_timeout(350)
        self.page.wait_for_selector("#result[aria-busy=false]", timeout=60_000)
        self.page.wait_for_selector("#story:not([hidden])", timeout=60_000)

    def text(self, selector: str) -> str:
        return str(self.page.locator(selector).inner_text())

    def chart(self) -> str:
        return str(self.page.locator("#layers svg").first.inner_html())


ZERO = [(0.5 + 0.22 * math.sin(t / 6), 0.5 - 0.36 * math.cos(t / 6)) for t in range(39)]


@pytest.mark.slow
def test_draw_a_digit_get_the_answer_move_a_slider(browser: Any, address: str) -> None:
    tab = Tab(browser, address, 1200)
    tab.draw(*ZERO)
    assert tab.text("#answer") == "0"
    assert "exactly one answer" in tab.text("#words")
    assert tab.page.locator("#layers section").count() == 2
    before, steps = tab.chart(), tab.text("#layers h2 >> nth=0")
    tab.page.locator("#rtol").fill("-7")
    tab.wait()
    assert tab.chart() != before
    assert tab.text("#layers h2 >> nth=0") != steps
    tab.page.locator("#kernel").select_option("polynomial")
    tab.wait()
    assert "nothing is proven" in tab.text("#layers section >> nth=0")
    tab.page.locator("#kernel").select_option("gaussian")
    before = tab.chart()
    tab.page.locator("#gamma").fill("1")
    tab.wait()
    assert tab.chart() != before
    state = "() => document.querySelector('.frames canvas').toDataURL()"
    last = tab.page.evaluate(state)
    tab.page.locator(".frames input").first.fill("0")
    assert tab.page.evaluate(state) != last
    tab.page.locator("#clear").click()
    assert tab.page.locator("#story").is_hidden()
    assert tab.errors == []


@pytest.mark.slow
def test_the_keyboard_is_enough(browser: Any, address: str) -> None:
    tab = Tab(browser, address, 1200)
    tab.page.keyboard.press("Tab")
    assert tab.page.evaluate("document.activeElement.id") == "paper"
    for _ in range(22):
        tab.page.keyboard.press("Shift+ArrowDown")
    tab.wait()
    assert tab.text("#answer")
    seen = []
    for _ in range(7):
        tab.page.keyboard.press("Tab")
        seen.append(tab.page.evaluate("document.activeElement.id"))
        outlined = "getComputedStyle(document.activeElement.closest('.file') "
        outlined += "|| document.activeElement).outlineStyle"
        assert tab.page.evaluate(outlined) != "none"
    assert seen == ["clear", "example", "file", "kernel", "gamma", "solver", "rtol"]
    before = tab.chart()
    tab.page.keyboard.press("ArrowRight")
    tab.page.keyboard.press("ArrowRight")
    tab.wait()
    assert tab.chart() != before
    tab.page.locator("#example").press("Enter")
    tab.wait()
    assert tab.errors == []


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_has_no_overflow_and_text_has_contrast(
    browser: Any, address: str, scheme: str
) -> None:
    tab = Tab(browser, address, 390, scheme)
    tab.page.locator("#example").click()
    tab.wait()
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= 390
    low = tab.page.evaluate(CONTRAST)
    assert low == []
    assert tab.errors == []


# Every text that is shown, against the backgrounds behind it; WCAG 2 asks for 4.5.
CONTRAST = """() => {
  const numbers = c => {
    const v = [...c.match(/[\\d.]+/g).map(Number), 1].slice(0, 4);
    return c.startsWith("color(") ? [...v.slice(0, 3).map(x => 255 * x), v[3]] : v;
  };
  const over = (top, below) => [0, 1, 2].map(i => top[i] * top[3] + below[i] * (1 - top[3]));
  const light = c => c.slice(0, 3).map(v => v / 255).map(v => v <= 0.03928 ? v / 12.92 :
    ((v + 0.055) / 1.055) ** 2.4).reduce((s, v, i) => s + v * [0.2126, 0.7152, 0.0722][i], 0);
  const found = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
    if (!own || !node.getClientRects().length || node.disabled) continue;
    const style = getComputedStyle(node), layers = [];
    for (let at = node; at; at = at.parentElement)
      layers.push(numbers(getComputedStyle(at).backgroundColor));
    let back = [255, 255, 255];
    for (const layer of layers.reverse()) back = over(layer, back);
    const drawn = node.namespaceURI.endsWith("svg") ? style.fill : style.color;
    const [a, b] = [light(over(numbers(drawn), back)), light(back)];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) found.push([node.tagName, node.textContent.trim().slice(0, 30), ratio]);
  }
  return found;
}"""
