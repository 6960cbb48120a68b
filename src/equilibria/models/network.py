"""What every named network is: a module with its configuration, and an entry of the table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from equilibria.adjoints import Phantom
from equilibria.certify import LabelStopping
from equilibria.engine.options import hint
from equilibria.engine.result import warn_user
from equilibria.engine.transforms import transforms_active
from equilibria.ops.pooling import average_pool
from equilibria.solvers import ProximalGradient

from .hub import OnHub
from .options import from_json, option, short
from .prediction import Prediction, predictions, stopped_predictions
from .preprocessing import InputWarning, Preprocessing


@dataclass(frozen=True)
class ModelConfig:
    """All that ``models.create`` needs to build a network again, in JSON's types.

    Images [B, in_channels, image_size, image_size] → num_classes.
    """

    name: str
    num_classes: int
    in_channels: int
    image_size: int
    options: Mapping[str, Any] = field(default_factory=dict)
    """Every option of the model, defaults included; objects as {"kind": ..., fields}."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


Task = Literal["classification", "segmentation"]


class Network(nn.Module, OnHub, ABC):
    """x [B, C, H, W], normalized images ↦ logits [B, num_classes], or [B, num_classes, H, W].

    Made by ``models.create``, which sets ``config``; ``models.load`` sets ``extra`` too.
    ``model(model.preprocess(images))`` takes images as they are; ``model.predict(images)`` names
    their classes. ``Network.from_pretrained``, ``model.save_pretrained`` and ``model.push_to_hub``
    read and write folders and repositories of the Hugging Face hub.
    """

    config: ModelConfig
    task: Task = "classification"
    one_scale: bool = False
    """Whether training divides all channels of the images by one number instead of their own."""
    extra: dict[str, Any]
    """What was saved beside the weights: class names, mean and deviation, metrics."""

    def __init__(self, in_channels: int, side: int | None = None) -> None:
        super().__init__()
        self.in_channels = in_channels
        self.side = side
        """Pixels of a side of the images, where the head reads every pixel; None: any."""
        self.extra = {}

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, as saved with the weights; without any "0", "1", …"""
        count = self.config.num_classes
        names = self.extra.get("classes") or [str(i) for i in range(count)]
        if not isinstance(names, (list, tuple)) or len(names) != count:
            found = len(names) if isinstance(names, (list, tuple)) else type(names).__name__
            raise ValueError(
                f"the weights name {found} classes and {self.config.name} has {count}: set "
                'model.extra["classes"] to the names in the order of the logits.'
            )
        return tuple(map(str, names))

    def preprocess(self, images: Any, *, names: Sequence[str] | None = None) -> Tensor:
        """Images as the network was trained on them: (pixels − mean)/std, [B, C, S, S].

        The middle square of each image is resized to S × S pixels by Pillow, bilinear with
        antialiasing, S the size of the training images; an image of that size stays as it is.
        For a network that segments, the whole image is resized so that its shorter side has S
        pixels. ``mean`` and ``std`` are those saved with the weights; without them pixels stay from
        0 to 1. The result has the device and the dtype of the network.

        An ``InputWarning`` says which images are unlike those of training: values outside of 0 to
        1 (normalized already, or 0 to 255 in floating point), no contrast, or a mean more than two
        standard deviations away.

        Args:
            images: a uint8 tensor of pixels from 0 to 255, or a floating one from 0 to 1, [B, C, H,
                W], [C, H, W] or, for one channel, [H, W]; a PIL image of any mode of 8 bits, which
                becomes gray or RGB; or a list of them, of any sizes.
            names: what the images are called in errors and warnings; None: by their position.
        """
        held = next(self.parameters(), None)
        device = None if held is None else held.device
        x = self.preprocessing(images, names, device)
        return x if held is None else x.to(held.dtype)

    def predict(
        self,
        images: Any,
        *,
        top: int = 1,
        certify: bool = False,
        batch_size: int = 64,
        stop: Literal["label"] | None = None,
    ) -> list[Prediction]:
        """One Prediction for each image: label, confidence, steps, converged, radius.

        The network runs in evaluation mode and is left as it is. A solve that does not converge is
        reported by its Prediction and does not warn.

        Args:
            images: what ``preprocess`` takes.
            top: how many of the likeliest classes.
            certify: add the proven ``radius`` of the label (ℓ2, pixels from 0 to 1 after resizing).
            batch_size: images at a time.
            stop: "label": stop each image when its label is proven to be that of the converged
                network (``certify.LabelStopping``); the others get the full solve.
        """
        x = self.preprocess(images)
        return self.predict_normalized(
            x, top=top, certify=certify, batch_size=batch_size, stop=stop
        )

    def predict_normalized(
        self,
        x: Tensor,
        *,
        top: int = 1,
        certify: bool = False,
        batch_size: int = 64,
        stop: Literal["label"] | None = None,
    ) -> list[Prediction]:
        """``predict`` of images x [B, C, H, W] that ``preprocess`` made."""
        if stop not in (None, "label") or (stop is not None and certify):
            raise ValueError(f"stop={stop!r}: expected None or, without certify=True, 'label'.")
        sizes: dict[str, Any] = {"top": top, "batch_size": batch_size}
        for name, value in sizes.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r}: expected an integer of at least 1.")
        if self.task == "segmentation":
            raise ValueError(
                f"{self.config.name} segments images; a prediction is one class an image. Use a "
                "classification network, or model(model.preprocess(images)) for scores by pixel."
            )
        unit = min(self.preprocessing.std) if certify else None
        run = partial(predictions, radius_unit=unit)
        if stop is not None:
            run = partial(stopped_predictions, LabelStopping(self))
        parts = x.split(batch_size)
        return [answer for part in parts for answer in run(self, part, self.classes, top=top)]

    @property
    def preprocessing(self) -> Preprocessing:
        """Size, mean and std of the images that the network takes, as saved with the weights."""
        config, whole = self.config, self.task == "segmentation"
        return Preprocessing.of(config.in_channels, config.image_size, whole, self.extra)

    @abstractmethod
    def logits(self, x: Tensor) -> Tensor:
        """The network itself, for an x that was checked."""

    def forward(self, x: Tensor) -> Tensor:
        self.check_input(x)
        return self.logits(x)

    def check_input(self, x: Tensor) -> None:
        """Raise unless x is a floating tensor [B, in_channels, H, W], or of the one size."""
        name = self.config.name if hasattr(self, "config") else type(self).__name__
        height, width = self.side or "H", self.side or "W"
        expected = f"{name} takes normalized images [B, {self.in_channels}, {height}, {width}]"
        if not isinstance(x, Tensor):
            raise TypeError(f"{expected} as a tensor, got {type(x).__name__}.")
        fits = x.ndim == 4 and x.shape[1] == self.in_channels
        if not fits or (self.side is not None and x.shape[2:] != (height, width)):
            raise ValueError(f"{expected}, got a tensor of shape {tuple(x.shape)}.")
        if not x.is_floating_point():
            raise TypeError(
                f"{expected} in floating point, got {x.dtype}; use model.preprocess(images)."
            )
        self._check_range(x)

    def _check_range(self, x: Tensor) -> None:
        """Warn if x holds pixels that were not normalized; on CPUs alone, as the host waits."""
        if torch.compiler.is_compiling() or self.training or not self.extra.get("mean"):
            return
        if type(x) is not Tensor or x.device.type != "cpu" or x.numel() == 0 or transforms_active():
            return
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call, unused-ignore]
            return
        try:
            made = self.preprocessing
        except ValueError:  # of what was saved with the weights: preprocess says so
            return
        low, high = map(float, torch.aminmax(x.detach()))
        if (made.normalizes and low >= 0.0 and high <= 1.0) or high > 10.0 * made.largest:
            warn_user(
                f"{self.config.name} takes images normalized as in training, and these look like "
                f"plain pixels (from {low:.3g} to {high:.3g}): use model(model.preprocess(images)) "
                "or model.predict(images).",
                InputWarning,
            )


def count_parameters(model: nn.Module) -> int:
    """Numbers that training moves; buffers and frozen parameters do not count.

    A parameter that stands at two places counts once.
    """
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


# ---------------------------------------------------------------------- entries of the table


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """What is known of a named network before it is built."""

    name: str
    text: str
    """One line."""
    task: Task = "classification"
    paper: str = "ours"
    """Where it comes from, or "ours"."""
    paper_parameters: int | None = None
    """What the paper says it counts, as rounded there; None where none is printed."""
    paper_classes: int = 10
    """The number of classes that this count is for."""
    in_channels: int = 3
    image_size: int = 32
    options: Mapping[str, str]
    """What ``create`` takes by keyword: name → default and meaning."""
    revision: int = 0
    """How often a default has changed: results of an earlier revision are of another network."""

    def __str__(self) -> str:
        count = "–" if self.paper_parameters is None else f"{self.paper_parameters:,}"
        rows = [
            f"{self.name}: {self.text}",
            f"  task         {self.task}",
            f"  input        {self.in_channels} × {self.image_size} × {self.image_size}",
            f"  paper        {self.paper}",
            f"  its count    {count}",
            *(f"  {name:<12} {about}" for name, about in self.options.items()),
        ]
        return "\n".join(rows)


@dataclass(frozen=True)
class ModelSpec:
    """An entry of the table: ``build(config, **options)``, the defaults and the card."""

    build: Callable[..., Network]
    defaults: Mapping[str, Any]
    card: ModelCard

    def parse(self, overrides: Mapping[str, Any]) -> dict[str, Any]:
        made = dict(self.defaults)
        for name, value in overrides.items():
            if name not in made:
                raise TypeError(
                    f"{self.card.name} has no option {name!r} (got {value!r}).{hint(name, made)} "
                    f"Its options: {', '.join(made) or 'none'}."
                )
            where, allowed = f"{self.card.name}: option {name}={value!r}", option(name, made[name])
            try:
                made[name] = from_json(value)
            except (TypeError, ValueError) as error:
                raise prefixed(error, where) from error
            if not allowed.accepts(made[name]):
                kind = type(value).__name__
                raise ValueError(f"{where} ({kind}): expected {allowed.allowed}.")
        return made


def prefixed(error: TypeError | ValueError, where: str) -> TypeError | ValueError:
    kind = TypeError if isinstance(error, TypeError) else ValueError
    return kind(f"{where}: {error}")


def entry(
    name: str, build: Callable[..., Network], text: str, options: Mapping[str, Any], **card: Any
) -> ModelSpec:
    """The entry of a network: ``options`` are its defaults, ``card`` the other fields of its card.

    Raise ``revision`` by one whenever a default changes; tests/models/test_revisions.py watches.
    """
    about = {key: f"{short(value)}: {option(key, value).about}" for key, value in options.items()}
    return ModelSpec(build, options, ModelCard(name=name, text=text, options=about, **card))


segmenter = partial(entry, image_size=180, task="segmentation")  # CamVid at 240 × 180 pixels


# ---------------------------------------------------------------------- parts of several networks


def check_pixels(size: int, needed: int, why: str) -> None:
    if size % needed:
        raise ValueError(f"image_size={size} is no multiple of {needed}: {why}.")


def patch_size(options: Mapping[str, Any]) -> int:
    """Pixels of a side of the layers' patches; 1 where the kernel has none."""
    return options["patch"].size if "patch" in options else 1


def few_steps(steps: int, terms: int, tau: float | None = None) -> dict[str, Any]:
    """``steps`` of size τ (None: the certificate's) and ``terms`` of the backward series.

    Nothing waits for the device; Gaussian layers and OptEq's state form take the fused path.
    """
    return {
        "solver": ProximalGradient(rtol=0.0, atol=0.0, max_steps=steps, accelerate=False, tau=tau),
        "adjoint": Phantom(steps=terms, damping=1.0, form="neumann"),
    }


def conv_norm_relu(
    before: int, after: int, size: int, stride: int = 1, *, kaiming: bool = False
) -> list[nn.Module]:
    """A convolution of ``size`` × ``size`` pixels with a border of zeros, BatchNorm, ReLU."""
    conv = nn.Conv2d(before, after, size, stride=stride, padding=size // 2, bias=False)
    if kaiming:
        nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return [conv, nn.BatchNorm2d(after), nn.ReLU()]


def features_to_logits(channels: int, num_classes: int) -> nn.Sequential:
    """BatchNorm, ReLU, global average, linear: the head of the stacks and branches."""
    return nn.Sequential(
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(channels, num_classes),
    )


class AveragePool(nn.Module):
    """Means over blocks of ``size`` × ``size`` pixels, which must divide the map."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        return average_pool(x, self.size, self.size)


def upsample(x: Tensor, like: Tensor) -> Tensor:
    """Bilinear resize of maps x [B, C, h, w] to the pixels of ``like``."""
    return torch.nn.functional.interpolate(
        x, size=like.shape[-2:], mode="bilinear", align_corners=False
    )
