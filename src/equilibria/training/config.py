"""All that decides a training run, in one frozen object that YAML can hold."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, NoReturn

from equilibria.data import build_augmentation
from equilibria.engine.optional import needs
from equilibria.engine.options import check_number, options
from equilibria.models.values import to_json

__all__ = ["TrainConfig"]

# Name: lowest, highest, "(" or ")" where an end is open, "i" for an integer.
_COUNTS = ("epochs", "batch_size", "nodes", "log_every", "image_size", "samples", "early_stop")
_NUMBERS: dict[str, tuple[float, float, str]] = {
    **dict.fromkeys((*_COUNTS, "keep_every"), (1, math.inf, "i")),
    "workers": (0, math.inf, "i"),
    "seed": (0, 2**32 - 1, "i"),
    **dict.fromkeys(("validation", "momentum", "warmup", "label_smoothing"), (0.0, 1.0, ")")),
    **dict.fromkeys(("weight_decay", "jacobian_weight"), (0.0, math.inf, "")),
    **dict.fromkeys(("lr", "clip"), (0.0, math.inf, "(")),
    "drop": (0.0, 1.0, "("),
    "ema": (0.0, 1.0, "()"),
}
_CHOICES = {
    "optimizer": ("sgd", "adamw"),
    "schedule": ("onecycle", "cosine", "step", "constant"),
    "select": ("last", "best"),
    "on_corrupt": ("raise", "skip"),
    "accelerator": ("auto", "cpu", "gpu", "cuda", "mps"),
    # Spawned and forked processes cannot hand their history back: Lightning's own limit.
    "strategy": ("auto", "ddp", "ddp_find_unused_parameters_true", "fsdp"),
    "precision": (
        *("32-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true", "64-true"),
        *("transformer-engine", "transformer-engine-float16"),
    ),
}
_LOGGERS = ("tensorboard", "csv", "wandb", "mlflow")
_SHORT = {"32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed", "64": "64-true"}
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
    """Where data sets are looked for; None: the usual places of ``equilibria.data``."""
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
    loggers: tuple[str, ...] = ("tensorboard",)
    """Lightning's loggers that get these numbers: tensorboard, csv, wandb, mlflow."""
    out: str | None = None
    """Folder of the run; None: ``runs/<data>-<model>``."""

    def __post_init__(self) -> None:
        for name, parse in _PARSED.items():
            object.__setattr__(self, name, parse(getattr(self, name)))
        for given in dataclasses.fields(self):
            name, value, optional = given.name, getattr(self, given.name), given.default is None
            if name in ("model", "data", "out", "data_root") and not (optional and value is None):
                if not isinstance(value, (str, Path)) or not str(value):
                    also = " or None" if optional else ""
                    _refuse(name, value, f"expected a non-empty text{also}", TypeError)
                object.__setattr__(self, name, str(value))
            elif isinstance(given.default, bool) and not isinstance(value, bool):
                _refuse(name, value, "expected True or False", TypeError)
            elif name in _CHOICES and value not in _CHOICES[name]:
                _refuse(name, value, _one_of(value, _CHOICES[name]))
            elif name in _NUMBERS:
                low, high, how = _NUMBERS[name]
                ends = {"low_open": "(" in how, "high_open": ")" in how}
                kind = {"integer": "i" in how, "optional": optional}
                check_number(self, name, low=low, high=high, **ends, **kind)
        self._check_together()

    def _check_together(self) -> None:
        last = self.milestones[-1] if self.milestones else 0
        if (self.schedule == "step") != bool(self.milestones) or last >= self.epochs:
            raise ValueError(
                f"TrainConfig(schedule={self.schedule!r}, milestones={self.milestones}, "
                f"epochs={self.epochs}): schedule='step' needs milestones, the epochs after which "
                "the rate falls, all before the end of the run, and no other schedule has them; "
                f"such as milestones=({self.epochs // 2}, {self.epochs * 3 // 4})."
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
        if self.cuda_graphs + self.compile + (self.jacobian_weight > 0.0) > 1:
            raise ValueError(
                f"TrainConfig(cuda_graphs={self.cuda_graphs}, compile={self.compile}, "
                f"jacobian_weight={self.jacobian_weight}): a captured or compiled step is run as "
                "it is, and cannot be looked into for its Jacobian; choose one of the three."
            )
        if self.cuda_graphs and (self.strategy != "auto" or self.nodes > 1):
            raise ValueError(
                f"TrainConfig(cuda_graphs=True, strategy={self.strategy!r}, nodes={self.nodes}): "
                "graphs are for one GPU; leave cuda_graphs out to train on several."
            )
        aside = self.ema is not None or self.keep_every is not None or self.select == "best"
        if self.strategy == "fsdp" and aside:
            raise ValueError(
                "TrainConfig(strategy='fsdp'): sharded weights are not averaged or copied aside; "
                "leave out ema, keep_every and select='best', or use strategy='ddp'."
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
        with needs("yaml", "a configuration file"):
            import yaml  # type: ignore[import-untyped, unused-ignore]
        try:
            found = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
            if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
                raise ValueError(f"expected lines 'name: value', got {str(found)[:60]!r}")
            return cls(**found)
        except FileNotFoundError:
            raise FileNotFoundError(
                f"there is no configuration file {path}; TrainConfig().to_yaml({str(path)!r}) "
                "writes one with the defaults."
            ) from None
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not a text file in UTF-8: {error}") from error
        except yaml.YAMLError as error:
            raise ValueError(f"{path} is not valid YAML: {error}") from error
        except (TypeError, ValueError) as error:
            raise type(error)(f"{path}: {error}") from error

    def to_yaml(self, path: str | Path | None = None) -> str:
        """The text of a file that ``from_yaml`` reads; written there too if a path is given."""
        with needs("yaml", "a configuration file"):
            import yaml
        made = yaml.safe_dump(
            self.to_dict(), sort_keys=False, allow_unicode=True, default_flow_style=None
        )
        if path is not None:
            Path(path).write_text(made, encoding="utf-8")
        return str(made)

    def differences(self, other: TrainConfig) -> dict[str, tuple[Any, Any]]:
        """Options whose values differ, name → (mine, the other's)."""
        mine, theirs = self.to_dict(), other.to_dict()
        return {k: (mine[k], theirs[k]) for k in mine if mine[k] != theirs[k]}


def _refuse(name: str, value: Any, why: str, kind: type[Exception] = ValueError) -> NoReturn:
    got = f", got {type(value).__name__}" if kind is TypeError else ""
    raise kind(f"TrainConfig({name}={value!r}): {why}{got}.")


def _one_of(given: object, choices: Sequence[str]) -> str:
    """ "did you mean 'x'? Expected one of …"."""
    close = difflib.get_close_matches(str(given), choices, n=1)
    start = f"did you mean {close[0]!r}? Expected" if close else "expected"
    return f"{start} one of {', '.join(map(repr, choices))}"


def _number(value: Any) -> Any:
    """An integer or the text of a number as a float: YAML reads ``1e-3`` as text."""
    try:
        return value if isinstance(value, bool) or value is None else float(value)
    except (TypeError, ValueError):
        return value


def _plain(value: Any) -> Any:
    """In the types of JSON."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else to_json(value)


def _model_options(value: Any) -> Any:
    if not isinstance(value, Mapping):
        _refuse("model_options", value, "expected a mapping from option to value", TypeError)
    return _plain(value)


def _augment(value: Any) -> tuple[Any, ...]:
    """("flip", {"crop": {"padding": 2}}): each a name, or a name with its options."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        example = "['crop', 'flip'] or [{'crop': {'padding': 2}}, 'flip']"
        _refuse("augment", value, f"expected a list such as {example}", TypeError)
    plain = tuple(_plain(entry) for entry in value)
    try:
        build_augmentation(plain, num_classes=2)  # its errors know every name and option
    except (TypeError, ValueError) as error:
        raise type(error)(f"TrainConfig(augment=...): {error}") from error
    return plain


def _loggers(value: Any) -> tuple[str, ...]:
    found = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    for name in found:
        if name not in _LOGGERS:
            _refuse("loggers", value, _one_of(name, _LOGGERS))
    return found


def _integers(value: Any, least: int) -> bool:
    """A list of integers of at least ``least``."""
    return isinstance(value, (list, tuple)) and all(
        isinstance(item, int) and not isinstance(item, bool) and item >= least for item in value
    )


def _milestones(value: Any) -> tuple[int, ...]:
    if not _integers(value, 1) or list(value) != sorted(set(value)):
        _refuse("milestones", value, "expected a list of rising epochs, such as [60, 120]")
    return tuple(value)


def _devices(value: Any) -> int | str | tuple[int, ...]:
    if isinstance(value, (list, tuple)) and value and _integers(value, 0):
        return tuple(value)
    if value != "auto" and not _integers([value], 1):
        what = "a number of devices of at least 1, a list of their indices, or 'auto'"
        _refuse("devices", value, f"expected {what}")
    return value  # type: ignore[no-any-return]


_PARSED: dict[str, Callable[[Any], Any]] = {
    **{name: _number for name, (_, _, how) in _NUMBERS.items() if "i" not in how},
    "augment": _augment,
    "devices": _devices,
    "loggers": _loggers,
    "milestones": _milestones,
    "model_options": _model_options,
    "precision": lambda value: _SHORT.get(str(value), str(value)),
}
