"""The page of ``equilibria explore``: draw an image, change the problem, see it solved.

A FastAPI application for one person on this machine. The page (explorer.html) has no build step;
charts and words are made here, by the same functions as those of ``explain``.
"""

from __future__ import annotations

import base64
import copy
import html
import math
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from equilibria.data import CorruptImageError, ImageData
from equilibria.data.decoding import decode_image
from equilibria.engine.optional import needs
from equilibria.engine.solver import SolverOptions
from equilibria.models import Network
from equilibria.problems import Gaussian, Linear, Polynomial, Problem, Sigmoidal
from equilibria.solvers import Anderson, Broyden, Picard, ProximalGradient

from .explanation import SolvedLayer, doubted, seen_pixels, solved_layers
from .explanation_html import layer_charts, story
from .layer_solvers import with_solver
from .page import STYLE, bars, data_url, fill, percent, photo, proof_words

SOLVERS: dict[str, Callable[..., SolverOptions]] = {
    kind.__name__: kind for kind in (Anderson, Picard, ProximalGradient, Broyden)
}
# The twins of the Gaussian kernel scale c into a ball in which they are convex (docs/kernels.md).
KERNELS: dict[str, tuple[Any, float | None]] = {
    "gaussian": (None, None),
    "linear": (Linear, None),
    "polynomial": (Polynomial, 0.45),
    "sigmoid": (Sigmoidal, 0.75),
}
_STEPS = 100
_LARGEST = 8 * 2**20  # bytes of an image
_HOSTS = ["127.0.0.1", "localhost"]


class Explorer:
    """Solves one image at a time with another kernel, γ, solver or tolerance than was trained."""

    def __init__(self, model: nn.Module, examples: ImageData | None = None) -> None:
        if not isinstance(model, Network) or model.task != "classification":
            raise TypeError("explore takes a network that classifies, from models.load.")
        self.model, self.examples = model, examples
        self._lock = threading.Lock()  # one solve at a time: a slider asks faster than it is solved

    @property
    def gaussian(self) -> bool:
        """Whether there is a γ to change."""
        return any(hasattr(m, "gamma") and hasattr(m, "patch") for m in self.model.modules())

    def read(self, data: bytes, *, drawn: bool) -> Any:
        """An image file as a PIL image; what was ``drawn``, light on dark, is cut to its ink."""
        try:
            pixels = decode_image(data, self.model.in_channels, None, square=False)
        except CorruptImageError as error:
            raise ValueError(f"this is not a readable image ({error}).") from None
        from PIL import Image

        image = Image.fromarray(pixels.permute(1, 2, 0).squeeze(2).contiguous().numpy())
        if drawn and self.model.in_channels == 1:
            image = _fitted(image, self.model.preprocessing.size)
        return image

    def solve(
        self, image: Any, *, kernel: str, gamma: float, solver: str, rtol: float
    ) -> dict[str, Any]:
        """What the page shows of an image: label, probabilities, charts, states.

        ``gamma`` multiplies the γ that was trained.
        """
        made = self._changed(kernel, gamma, solver, rtol)
        x, doubts = doubted(made, image)
        with self._lock:
            logits, layers = solved_layers(made, x, certify=True)
        shares, order = logits[0].float().softmax(0).sort(descending=True)
        names = made.classes
        top = [(names[k], float(p)) for k, p in zip(order.tolist()[:5], shares, strict=False)]
        return {
            "label": top[0][0],
            "confidence": percent(top[0][1], 2),
            "bars": bars(top, f"The likeliest classes; {top[0][0]} has {percent(top[0][1], 2)}"),
            "seen": photo(seen_pixels(made, x)[0], "What the network sees of the image"),
            "words": story(layers[0], *top[0], doubts),
            "layers": [_shown(layer, kernel) for layer in layers[0]],
        }

    def _changed(self, kernel: str, gamma: float, solver: str, rtol: float) -> Network:
        for name, value, known in (("kernel", kernel, KERNELS), ("solver", solver, SOLVERS)):
            if value not in known:
                raise ValueError(f"{name}={value!r}: expected {', '.join(known)}.")
        if not 0.01 <= gamma <= 100.0:
            raise ValueError(f"gamma={gamma!r}: expected a factor from 0.01 to 100.")
        if not 1e-9 <= rtol <= 0.5:
            raise ValueError(f"rtol={rtol!r}: expected a tolerance from 1e-9 to 0.5.")
        options = {"rtol": rtol, "max_steps": _STEPS, "block": 1}
        made = copy.deepcopy(with_solver(self.model, SOLVERS[solver](**options))).eval()
        for layer in made.modules():
            if getattr(layer, "is_equilibrium", False) and hasattr(layer, "problem"):
                _change(layer, kernel, gamma)
        return made  # type: ignore[return-value]


def _change(layer: Any, kernel: str, gamma: float) -> None:
    """Let the layer pose another problem with the same weights and the same input."""
    own, (kind, radius) = layer.problem, KERNELS[kernel]

    def problem(x: Tensor) -> Any:
        found = own(x)
        coupling = getattr(found, "coupling", None)
        if not isinstance(coupling, Gaussian):
            return found
        if kind is None:
            return Problem(found.prior, coupling.with_inputs(coupling.c, gamma * coupling.gamma))
        c = coupling.c
        if tuple(c.shape[1:]) != tuple(coupling.operator.input_shape(c.shape[1:])):
            raise ValueError(f"kernel={kernel!r} takes as many channels of Wz as of z.")
        if radius is not None:
            c = c * (radius / c.flatten(1).norm(dim=1).clamp_min(radius)).view(-1, 1, 1, 1)
        return Problem(found.prior, kind(coupling.operator, c))

    layer.problem = problem
    if kind is not None:
        layer.nominal_bounds = lambda _: None


def _shown(layer: SolvedLayer, kernel: str) -> dict[str, Any]:
    if kernel != "gaussian":
        layer = replace(layer, layer=f"{kernel} kernel")
    frames: list[list[list[int]]] = []
    if layer.frames is not None:
        largest = layer.frames[-1].max().clamp_min(1e-12)
        frames = (layer.frames / largest * 255).clamp(0, 255).round().int().tolist()
    kind = "none" if layer.kind is None else str(layer.kind)
    finite = layer.bound and math.isfinite(layer.bound[-1])
    return {
        "name": html.escape(f"{layer.name} ({layer.layer})"),
        "steps": layer.steps,
        "frames": frames,
        "charts": layer_charts(layer),
        "kind": kind,
        "contraction": layer.contraction,
        "bound": layer.bound[-1] if finite else None,
        "proof": proof_words(kind, layer.contraction or 0.0),
    }


def _fitted(image: Any, size: int) -> Any:
    """Ink of any place and size as the digits were made: as high as the square, in its middle.

    MNIST and larger images have a margin of a seventh.
    """
    from PIL import Image

    box = image.getbbox()
    if box is None:
        return image
    cut = image.crop(box)
    side = 16 * size
    room = side if size <= 8 else round(side * 5 / 7)
    scale = room / max(cut.size)
    cut = cut.resize([max(1, round(n * scale)) for n in cut.size], Image.Resampling.BOX)
    canvas = Image.new(image.mode, (side, side))
    canvas.paste(cut, ((side - cut.width) // 2, (side - cut.height) // 2))
    return canvas.resize((size, size), Image.Resampling.BOX)


def explorer_app(explorer: Explorer) -> Any:
    """The FastAPI application: the page, an example image, and POST /solve."""
    with needs("fastapi", "equilibria explore", extra="explore"):
        from fastapi import Body, FastAPI, HTTPException
        from fastapi.responses import HTMLResponse
        from starlette.middleware.trustedhost import TrustedHostMiddleware

    app = FastAPI(title="equilibria explore", docs_url=None, redoc_url=None, openapi_url=None)
    # Another site that a browser has open cannot reach it under a name of its own.
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=_HOSTS)
    kernels = KERNELS if explorer.gaussian else ["as trained"]
    page = fill(
        "explorer.html",
        style=STYLE,
        name=html.escape(explorer.model.config.name),
        kernels="".join(f"<option>{name}</option>" for name in kernels),
        solvers="".join(f"<option>{name}</option>" for name in SOLVERS),
        gaussian="" if explorer.gaussian else "disabled",
        examples="" if explorer.examples is not None else "disabled",
    )

    @app.get("/", response_class=HTMLResponse)
    def index() -> str:
        return page

    @app.get("/example/{number}")
    def example(number: int) -> dict[str, str]:
        data = explorer.examples
        if data is None:
            raise HTTPException(404, "this network came without example images.")
        at = number % len(data)
        return {"image": data_url(data.images[at : at + 1][0])}

    @app.post("/solve")
    def solve(
        image: str = Body(""),
        drawn: bool = Body(False),
        kernel: str = Body("gaussian"),
        gamma: float = Body(1.0),
        solver: str = Body("Anderson"),
        rtol: float = Body(1e-4),
    ) -> dict[str, Any]:
        try:
            given = image.partition("base64,")[2]
            if len(given) > _LARGEST:
                raise ValueError(f"the image is larger than {_LARGEST >> 20} MiB.")
            seen = explorer.read(base64.b64decode(given, validate=True), drawn=drawn)
            if seen.getbbox() is None:
                raise ValueError("the picture is empty: draw something.")
            kind = "gaussian" if kernel == "as trained" else kernel
            return explorer.solve(seen, kernel=kind, gamma=gamma, solver=solver, rtol=rtol)
        except (ValueError, TypeError) as error:
            raise HTTPException(422, str(error)) from None

    return app
