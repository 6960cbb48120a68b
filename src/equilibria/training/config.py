"""All that decides a training run, in one frozen object that YAML can hold."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from equilibria.engine.options import check_number, options

from .config_values import (
    check_choice,
    check_flag,
    check_text,
    parse_augment,
    parse_devices,
    parse_milestones,
    parse_number,
    parse_options,
    parse_precision,
    read_mapping,
    write_mapping,
)

__all__ = ["TrainConfig"]

_FLOATS = (
    *("lr", "momentum", "weight_decay", "drop", "warmup", "label_smoothing"),
    *("ema", "clip", "validation", "jacobian_weight"),
)
_FLAGS = (
    *("nesterov", "decay_norms", "cycle_momentum", "channels_last"),
    *("compile", "cuda_graphs", "download"),
)
_CHOICES = {
    "optimizer": ("sgd", "adamw"),
    "schedule": ("onecycle", "cosine", "step", "constant"),
    "select": ("last", "best"),
    "on_corrupt": ("raise", "skip"),
    "accelerator": ("auto", "cpu", "gpu", "cuda", "mps"),
    # Spawned and forked processes cannot hand their history back: Lightning's own limit.
    "strategy": ("auto", "ddp", "ddp_find_unused_parameters_true", "fsdp"),
}
_WARMUP = {"onecycle": 0.25, "cosine": 0.05, "step": 0.0, "constant": 0.0}


@options
class TrainConfig:
    """What is trained, on what, and how. The defaults train ``geq_digits`` on the digits.

    Checked when made: a wrong value says what it was, what is allowed and what to do. Objects in
    ``model_options`` (a solver, an adjoint) are kept in the form that YAML can hold,
    ``{"kind": "Picard", "max_steps": 4}``.
    """

    model: str = "geq_digits"
    """A name of ``models.names()``."""
    model_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the model, as ``models.create`` takes them by keyword."""
    data: str = "digits"
    """A name of ``data.names()`` or a folder."""
    data_root: str | None = None
    """Where data sets are looked for; None: the data room's own places."""
    download: bool = False
    """Whether a data set that is not at hand may be fetched from the hub."""
    image_size: int | None = None
    """Pixels of a side that images are resized to; None: as they are."""
    on_corrupt: str = "raise"
    """What to do with an image that cannot be read: "raise" or "skip"."""
    validation: float = 0.1
    """Share of the training images held out, stratified by class; 0: none."""
    samples: int | None = None
    """Train on only so many images, of each class its share, drawn by the seed; None: on all that
    are not held out."""
    augment: tuple[Any, ...] = ()
    """Names, or names with options, in order: ``("flip", {"crop": {"padding": 2}})``; crop, flip,
    cutout, resized_crop, color_jitter, rand_augment, mixup and cutmix are known."""
    epochs: int = 10
    """Passes over the training images."""
    batch_size: int = 64
    """Images of one step, over all devices together."""
    optimizer: str = "sgd"
    """"sgd" or "adamw"."""
    lr: float = 0.1
    """Learning rate at its highest."""
    momentum: float = 0.9
    """Of SGD, and β₁ of AdamW; with ``cycle_momentum`` the one-cycle schedule moves it."""
    nesterov: bool = True
    """Nesterov's form of momentum."""
    weight_decay: float = 5e-4
    """On every parameter, or see ``decay_norms``."""
    decay_norms: bool = True
    """Whether norms, biases and scales decay too."""
    schedule: str = "onecycle"
    """"onecycle", "cosine", "step" or "constant"; each moves at every step."""
    warmup: float | None = None
    """Share of the steps in which the rate rises; None: 0.25 (onecycle), 0.05 (cosine), else 0."""
    milestones: tuple[int, ...] = ()
    """Epochs after which "step" multiplies the rate by ``drop``."""
    drop: float = 0.1
    """See ``milestones``."""
    cycle_momentum: bool = True
    """Whether "onecycle" moves momentum from 0.95 to 0.85 and back, against the rate."""
    label_smoothing: float = 0.0
    """Share of the target that is spread over all classes."""
    jacobian_weight: float = 0.0
    """Weight of ‖∂T/∂z‖²_F / n at the equilibrium, averaged over layers; 0: left out."""
    clip: float | None = None
    """Largest norm of the gradient; None: not clipped."""
    ema: float | None = None
    """Decay of the running average of the weights, which is then what is validated and saved."""
    precision: str = "32-true"
    """As Lightning's: "32-true", "bf16-mixed", "16-mixed", "64-true", ..."""
    channels_last: bool = False
    """Memory format of images and convolutions; faster with tensor cores."""
    compile: bool = False
    """torch.compile the training step's model; takes minutes, pays in long runs on a GPU."""
    cuda_graphs: bool = False
    """Replay the training step's model as CUDA graphs: no time between kernels, no compilation. For
    solvers of fixed steps on one GPU; several times faster than eager for deep stacks."""
    early_stop: int | None = None
    """Stop after this many epochs without a better validation; None: never."""
    select: str = "last"
    """Which epoch's weights are saved at the end: the "last" or the "best" on validation."""
    keep_every: int | None = None
    """Keep the weights of every so many epochs too, and those of the start, in the folder "epochs"
    of the run: for trajectories, tangent kernels and landscapes along training; None: not kept."""
    seed: int = 0
    """Of the weights, the order, the augmentation and the held-out images."""
    accelerator: str = "auto"
    """As Lightning's."""
    devices: int | str | tuple[int, ...] = 1
    """As Lightning's: how many, "auto", or which."""
    nodes: int = 1
    """Machines."""
    strategy: str = "auto"
    """As Lightning's: "auto", "ddp", "fsdp"."""
    workers: int = 3
    """Batches that threads make ready ahead, where the images are not all on the device."""
    log_every: int = 20
    """Steps between two readings of loss, accuracy and solver statistics."""
    out: str | None = None
    """Folder of the run; None: ``runs/<data>-<model>``."""

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        for name in ("model", "data"):
            check_text(self, name)
        for name in ("out", "data_root"):
            put(name, check_text(self, name, optional=True))
        put("data", str(self.data))
        for name in _FLOATS:
            put(name, parse_number(getattr(self, name)))
        for name in _FLAGS:
            check_flag(self, name)
        for name, allowed in _CHOICES.items():
            check_choice(self, name, allowed)
        put("model_options", parse_options(self.model_options))
        put("augment", parse_augment(self.augment))
        put("milestones", parse_milestones(self.milestones))
        put("devices", parse_devices(self.devices))
        put("precision", parse_precision(self.precision))
        self._check_numbers()
        self._check_together()

    def _check_numbers(self) -> None:
        for name in ("epochs", "batch_size", "nodes", "log_every"):
            check_number(self, name, low=1, integer=True)
        for name in ("image_size", "samples", "early_stop", "keep_every"):
            check_number(self, name, low=1, integer=True, optional=True)
        check_number(self, "workers", low=0, integer=True)
        check_number(self, "seed", low=0, high=2**32 - 1, integer=True)
        check_number(self, "validation", low=0.0, high=1.0, high_open=True)
        check_number(self, "lr", low=0.0, low_open=True)
        check_number(self, "momentum", low=0.0, high=1.0, high_open=True)
        check_number(self, "weight_decay", low=0.0)
        check_number(self, "drop", low=0.0, high=1.0, low_open=True)
        check_number(self, "warmup", low=0.0, high=1.0, high_open=True, optional=True)
        check_number(self, "label_smoothing", low=0.0, high=1.0, high_open=True)
        check_number(self, "jacobian_weight", low=0.0)
        check_number(self, "clip", low=0.0, low_open=True, optional=True)
        check_number(self, "ema", low=0.0, high=1.0, low_open=True, high_open=True, optional=True)

    def _check_together(self) -> None:
        if self.schedule == "step" and not self.milestones:
            raise ValueError(
                "TrainConfig(schedule='step') needs milestones, the epochs after which the rate "
                f"falls, such as milestones=({self.epochs // 2}, {self.epochs * 3 // 4})."
            )
        if self.schedule != "step" and self.milestones:
            raise ValueError(
                f"TrainConfig(milestones={self.milestones}) belongs to schedule='step', but the "
                f"schedule is {self.schedule!r}: set schedule='step' or leave milestones out."
            )
        if self.milestones and self.milestones[-1] >= self.epochs:
            raise ValueError(
                f"TrainConfig(milestones={self.milestones}) goes beyond the run of "
                f"{self.epochs} epochs: give milestones below {self.epochs}, or more epochs."
            )
        if self.nesterov and self.optimizer == "sgd" and self.momentum == 0.0:
            raise ValueError(
                "TrainConfig(nesterov=True, momentum=0.0): Nesterov's form needs a momentum; set "
                "nesterov=False or a momentum such as 0.9."
            )
        if self.validation == 0.0 and (self.early_stop is not None or self.select == "best"):
            raise ValueError(
                "TrainConfig(validation=0): early_stop and select='best' compare validation "
                "results, and nothing is held out; set validation=0.1 or leave them out."
            )
        if self.cuda_graphs and (self.compile or self.jacobian_weight):
            other = "compile" if self.compile else "jacobian_weight"
            raise ValueError(
                f"TrainConfig(cuda_graphs=True, {other}={getattr(self, other)!r}): a captured step "
                "is replayed as it is; choose one."
            )
        if self.cuda_graphs and (self.strategy != "auto" or self.nodes > 1):
            raise ValueError(
                f"TrainConfig(cuda_graphs=True, strategy={self.strategy!r}, nodes={self.nodes}): "
                "graphs are for one GPU; leave cuda_graphs out to train on several."
            )
        if self.jacobian_weight and self.compile:
            raise ValueError(
                "TrainConfig(jacobian_weight=..., compile=True): a compiled layer cannot be "
                "looked into for its Jacobian; choose one of the two."
            )
        if self.strategy == "fsdp" and self.keep_every is not None:
            raise ValueError(
                "TrainConfig(strategy='fsdp', keep_every=...): sharded weights are gathered at the "
                "end alone; leave keep_every out."
            )
        if self.strategy == "fsdp" and (self.ema is not None or self.select == "best"):
            raise ValueError(
                "TrainConfig(strategy='fsdp'): sharded weights are not averaged or copied aside; "
                "leave out ema and select='best', or use strategy='ddp'."
            )

    @property
    def warmup_share(self) -> float:
        """``warmup``, or what the schedule takes where it is None."""
        return _WARMUP[self.schedule] if self.warmup is None else self.warmup

    @property
    def model_revision(self) -> int:
        """Of the named model's defaults, which are not spelled out here; 0 for no name of ours."""
        from equilibria import models

        known = self.model in models.names()
        return models.describe(self.model).revision if known else 0

    @property
    def folder(self) -> Path:
        """Where the run is written: ``out`` or its default."""
        if self.out is not None:
            return Path(self.out)
        return Path("runs") / f"{Path(self.data).name or 'data'}-{self.model}"

    def resolved(self) -> TrainConfig:
        """The same with every default that depends on another option written out."""
        return self.with_overrides(warmup=self.warmup_share, out=str(self.folder))

    def with_overrides(
        self, overrides: Mapping[str, Any] | None = None, **more: Any
    ) -> TrainConfig:
        """A copy with other values, checked again; unknown names are an error with a hint."""
        made = {**self.to_dict(), **(overrides or {}), **more}
        return TrainConfig(**made)

    def to_dict(self) -> dict[str, Any]:
        """Every option in the types of YAML and JSON."""
        found = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: list(v) if isinstance(v, tuple) else v for name, v in found.items()}

    @classmethod
    def from_yaml(cls, path: str | Path) -> TrainConfig:
        """Read a file of ``name: value`` lines; names that are left out keep their default."""
        given = read_mapping(Path(path))
        try:
            return cls(**given)
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"{path}: {error}") from error

    def to_yaml(self, path: str | Path | None = None) -> str:
        """The text of a file that ``from_yaml`` reads; written there too if a path is given."""
        text = write_mapping(self.to_dict())
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def differences(self, other: TrainConfig) -> dict[str, tuple[Any, Any]]:
        """Options whose values differ, name → (mine, the other's)."""
        mine, theirs = self.to_dict(), other.to_dict()
        return {k: (mine[k], theirs[k]) for k in mine if not _same(mine[k], theirs[k])}


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, (int, float)):
        return math.isclose(a, b, rel_tol=1e-12, abs_tol=0.0)
    return bool(a == b)
