"""All that decides a training run, in one frozen object that YAML can hold."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from equilibria.data import build_augmentation
from equilibria.engine.optional import needs
from equilibria.engine.options import OptionError, OptionTypeError, check_number, options, shown
from equilibria.models.options import to_json

from .yaml_values import MOST_CHARACTERS, parse_yaml

_LOGGERS = ("tensorboard", "csv", "wandb", "mlflow")
_SHORT = {"32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed", "64": "64-true"}
_WARMUP = {"onecycle": 0.25, "cosine": 0.05, "poly": 0.0, "step": 0.0, "constant": 0.0}
_PRECISIONS = (
    *("32-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true", "64-true"),
    *("transformer-engine", "transformer-engine-float16"),
)
_COUNT: dict[str, Any] = {"low": 1, "integer": True}
_SHARE: dict[str, Any] = {"low": 0.0, "high": 1.0, "high_open": True}
_POSITIVE: dict[str, Any] = {"low": 0.0, "low_open": True}


def option(
    default: Any,
    text: str,
    panel: str = "Other",
    *,
    choices: tuple[str, ...] = (),
    parse: Callable[[Any], Any] | None = None,
    **number: Any,
) -> Any:
    """A field of ``TrainConfig``; a default of None also says that None is allowed.

    ``text`` and ``panel`` are for the help of the command and the documentation. A given value goes
    through ``parse``, then is one of ``choices`` or passes ``check_number(**number)``.
    """
    if choices:
        text = f"{text}: {', '.join(choices)}."
    if number and not number.get("integer"):
        parse = _number
    known = {"help": text, "panel": panel, "choices": choices, "parse": parse, "number": number}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=default.copy, metadata=known)
    return dataclasses.field(default=default, metadata=known)


def refuse(name: str, value: Any, why: str, kind: type[OptionError] = OptionError) -> NoReturn:
    """Raise the error of an option, which says why, what is allowed and what to do."""
    got = f", got {type(value).__name__}" if kind is OptionTypeError else ""
    raise kind("TrainConfig", {name: value}, f": {why}{got}.")


def _one_of(given: object, choices: Sequence[str]) -> str:
    close = difflib.get_close_matches(given if isinstance(given, str) else shown(given), choices, 1)
    start = f"did you mean {close[0]!r}? Expected" if close else "expected"
    return f"{start} one of {', '.join(map(repr, choices))}"


def _number(value: Any) -> Any:
    """An integer or the text of a number as a float: YAML reads ``1e-3`` as text."""
    try:
        return value if isinstance(value, bool) or value is None else float(value)
    except (TypeError, ValueError, OverflowError):
        return value


def plain(value: Any) -> Any:
    """``value`` in the types of YAML, and texts such as "1e-3" as the numbers that they mean."""
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, str):
        return float(value) if re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+", value) else value
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else to_json(value)


def _model_options(value: Any) -> Any:
    if not isinstance(value, Mapping):
        refuse("model_options", value, "expected a mapping from option to value", OptionTypeError)
    return plain(value)


def _augment(value: Any) -> tuple[Any, ...]:
    """("flip", {"crop": {"padding": 2}}): each a name, or a name with its options."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        example = "['crop', 'flip'] or [{'crop': {'padding': 2}}, 'flip']"
        refuse("augment", value, f"expected a list such as {example}", OptionTypeError)
    entries = tuple(plain(entry) for entry in value)
    try:
        build_augmentation(entries, num_classes=2)  # its errors know every name and option
    except (TypeError, ValueError) as error:
        raise OptionError("TrainConfig", {"augment": value}, f": {error}") from error
    return entries


def _loggers(value: Any) -> tuple[str, ...]:
    found = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    for name in found:
        if name not in _LOGGERS:
            refuse("loggers", value, _one_of(name, _LOGGERS))
    return found


def _integers(value: Any, least: int) -> bool:
    return isinstance(value, (list, tuple)) and all(
        isinstance(item, int) and not isinstance(item, bool) and least <= item < 2**31
        for item in value
    )


def _milestones(value: Any) -> tuple[int, ...]:
    if not _integers(value, 1) or list(value) != sorted(set(value)):
        refuse("milestones", value, "expected a list of rising epochs, such as [60, 120]")
    return tuple(value)


def _devices(value: Any) -> int | str | tuple[int, ...]:
    if isinstance(value, (list, tuple)) and value and _integers(value, 0):
        return tuple(value)
    if value != "auto" and not _integers([value], 1):
        what = "a number of devices of at least 1, a list of their indices, or 'auto'"
        refuse("devices", value, f"expected {what}")
    return value  # type: ignore[no-any-return]


@options
class TrainConfig:
    """What is trained, on what, and how. The defaults train ``geq_digits`` on the digits.

    Objects in ``model_options`` (a solver, an adjoint) are kept in the form that YAML can hold,
    ``{"kind": "Picard", "max_steps": 4}``.
    """

    # fmt: off
    model: str = option("geq_digits", "Name of a network; `equilibria models` lists them.", "What")
    model_options: Mapping[str, Any] = option({},
        "Options of the network as one mapping, such as {depth: 2}.", "What", parse=_model_options)
    data: str = option("digits",
        "Name of a data set (`equilibria data list`), or a folder of images.", "What")
    data_root: str | None = option(None,
        "The folder that holds the data; not given: the local cache.", "What")
    download: bool = option(False,
        "Whether a data set that is not at hand may be fetched from the hub.", "What")
    image_size: int | None = option(None,
        "Pixels of a side that images are resized to; not given: as they are.", "What", **_COUNT,
        high=8192)
    on_corrupt: str = option("raise", "What to do with an image that cannot be read",
        choices=("raise", "skip"))
    validation: float = option(0.1,
        "Share of the training images held out, stratified by class; 0: none.", "Training",
        **_SHARE)
    samples: int | None = option(None,
        "Train on only so many images, of each class its share, drawn by the seed; not given: on "
        "all that are not held out.", "Training", **_COUNT)
    augment: tuple[Any, ...] = option((),
        "Names in order, each alone or with options, such as crop,flip or flip,{crop: {padding: "
        "2}}; known: crop, flip, cutout, resized_crop, color_jitter, rand_augment, mixup, cutmix.",
        "Training", parse=_augment)
    epochs: int = option(10, "Passes over the training images.", "Training", **_COUNT)
    batch_size: int = option(64, "Images of one step, over all devices together.", "Training",
        **_COUNT)
    optimizer: str = option("sgd", "The optimizer", "Training", choices=("sgd", "adamw"))
    lr: float = option(0.1, "Learning rate at its highest.", "Training", **_POSITIVE)
    momentum: float = option(0.9,
        "Of SGD, and β₁ of AdamW; the schedule onecycle moves it by default.", **_SHARE)
    nesterov: bool = option(True, "Nesterov's form of momentum.")
    weight_decay: float = option(5e-4, "Weight decay, by default of every parameter.", "Training",
        low=0.0)
    decay_norms: bool = option(True, "Whether norms, biases and scales decay too.")
    schedule: str = option("onecycle", "How the rate moves, at every step", "Training",
        choices=tuple(_WARMUP))
    warmup: float | None = option(None,
        "Share of the steps in which the rate rises; not given: 0.25 (onecycle), 0.05 (cosine), "
        "else 0.", **_SHARE)
    milestones: tuple[int, ...] = option((),
        "Epochs after which the schedule step lowers the rate, such as 30,60.", parse=_milestones)
    drop: float = option(0.1, "What the schedule step multiplies the rate by at each milestone.",
        low=0.0, high=1.0, low_open=True)
    cycle_momentum: bool = option(True,
        "Whether onecycle moves momentum from 0.95 to 0.85 and back, against the rate.")
    label_smoothing: float = option(0.0, "Share of the target that is spread over all classes.",
        "Training", **_SHARE)
    margin: float = option(0.0,
        "Subtracted from the logit of the true class in the training loss, so that a network of "
        "bounded slope learns labels that hold within a radius; 0: left out.", low=0.0)
    temperature: float = option(1.0,
        "τ of the training loss τ·CE(logits/τ); below 1 small margins of a 1-Lipschitz network "
        "count.", **_POSITIVE)
    jacobian_weight: float = option(0.0,
        "Weight of ‖∂T/∂z‖²_F / n at the equilibrium, averaged over layers; 0: left out.", low=0.0)
    half_steps: float = option(0.0,
        "Share of the epochs, the first, in which layers of fixed steps take half of their steps "
        "and Phantom half of its terms, for faster steps; 0: none.", "Training", **_SHARE)
    clip: float | None = option(None, "Largest norm of the gradient; not given: not clipped.",
        "Training", **_POSITIVE)
    ema: float | None = option(None,
        "Decay of the running average of the weights, which is then what is validated and saved; "
        "not given: no average.", "Training", **_SHARE, low_open=True)
    precision: str = option("32-true", "As Lightning's", "Machine", choices=_PRECISIONS,
        parse=lambda value: _SHORT.get(shown(value).strip("'"), value))
    channels_last: bool = option(False,
        "Memory format of images and convolutions; faster with tensor cores.", "Machine")
    compile: bool = option(False,
        "torch.compile the training step's model; takes minutes, pays in long runs on a GPU.",
        "Machine")
    cuda_graphs: bool = option(False,
        "Replay the training step's model as CUDA graphs: no time between kernels, no compilation. "
        "For solvers of fixed steps on one GPU; several times faster than eager for deep stacks.",
        "Machine")
    early_stop: int | None = option(None,
        "Stop after this many epochs without a better validation; not given: never.", "Training",
        **_COUNT)
    select: str = option("last", "Which epoch's weights are saved at the end", "Training",
        choices=("last", "best"))
    keep_every: int | None = option(None,
        "Keep the weights of every so many epochs too, and those of the start, in the folder "
        "epochs of the run: for trajectories, tangent kernels and landscapes along training; not "
        "given: not kept.", "Training", **_COUNT)
    seed: int = option(0, "Of the weights, the order, the augmentation and the held-out images.",
        "What", low=0, high=2**32 - 1, integer=True)
    accelerator: str = option("auto", "As Lightning's", "Machine",
        choices=("auto", "cpu", "gpu", "cuda", "mps"))
    devices: int | str | tuple[int, ...] = option(1,
        "As Lightning's: how many, auto, or a list of which.", "Machine", parse=_devices)
    nodes: int = option(1, "Machines.", "Machine", **_COUNT)
    # Spawned and forked processes cannot hand their history back: Lightning's own limit.
    strategy: str = option("auto", "As Lightning's", "Machine",
        choices=("auto", "ddp", "ddp_find_unused_parameters_true", "fsdp"))
    sync_batchnorm: bool = option(False,
        "Whether batch norms take their statistics over all processes, not each over its own "
        "images; those inside an equilibrium layer do not.", "Machine")
    process_timeout: float = option(45.0,
        "Seconds that a process waits for the others before the run ends with an error; with "
        "compile Lightning's own half hour.", "Machine", **_POSITIVE)
    workers: int = option(3,
        "Batches that threads make ready ahead, where the images are not all on the device.",
        "Machine", low=0, integer=True)
    log_every: int = option(20,
        "Steps between two readings of loss, accuracy and solver statistics.", **_COUNT)
    loggers: tuple[str, ...] = option(("tensorboard",),
        f"Lightning's loggers that get these numbers: {', '.join(_LOGGERS)}.", parse=_loggers)
    out: str | None = option(None, "Folder of the run; not given: runs/<data>-<model>.", "What")
    # fmt: on

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            name, known, optional = field.name, field.metadata, field.default is None
            value = getattr(self, name)
            free = optional and value is None
            if known["parse"] is not None:
                value = known["parse"](value)
            elif isinstance(value, Path):
                value = str(value)
            object.__setattr__(self, name, value)
            if known["number"]:
                check_number(self, name, optional=optional, **known["number"])
            elif known["choices"]:
                if value not in known["choices"]:
                    refuse(name, value, _one_of(value, known["choices"]))
            elif isinstance(field.default, bool):
                if not isinstance(value, bool):
                    refuse(name, value, "expected True or False", OptionTypeError)
            elif known["parse"] is None and not (value if isinstance(value, str) else free):
                wanted = f"expected a non-empty text{' or None' * optional}"
                refuse(name, value, wanted, OptionTypeError)
        for wrong, names, why in self._conflicts():
            if wrong:
                given = {name: getattr(self, name) for name in names.split()}
                raise OptionError("TrainConfig", given, f": {why}")

    # fmt: off
    def _conflicts(self) -> Iterator[tuple[bool, str, str]]:
        """Whether options do not go together, their names, and why."""
        last = self.milestones[-1] if self.milestones else 0
        yield ((self.schedule == "step") != bool(self.milestones) or last >= self.epochs,
            "schedule milestones epochs",
            "the schedule step needs milestones, the epochs after which the rate falls, all before "
            "the end of the run, and no other schedule has them; such as "
            f"{self.epochs // 2} and {self.epochs * 3 // 4}.")
        yield (self.nesterov and self.optimizer == "sgd" and self.momentum == 0.0,
            "nesterov momentum",
            "Nesterov's form needs a momentum; turn it off, or set a momentum such as 0.9.")
        yield (self.validation == 0.0 and (self.early_stop is not None or self.select == "best"),
            "validation early_stop select",
            "early stopping and the best epoch compare validation results, and nothing is held "
            "out; hold out a share such as 0.1, or leave them out.")
        yield (self.cuda_graphs + self.compile + (self.jacobian_weight > 0.0) > 1,
            "cuda_graphs compile jacobian_weight",
            "a captured or compiled step is run as it is, and cannot be looked into for its "
            "Jacobian; choose one of the three.")
        yield (self.cuda_graphs and (self.strategy != "auto" or self.nodes > 1),
            "cuda_graphs strategy nodes",
            "graphs are for one GPU; leave them out to train on several.")
        aside = self.ema is not None or self.keep_every is not None or self.select == "best"
        yield (self.strategy == "fsdp" and aside, "strategy ema keep_every select",
            "sharded weights are not averaged or copied aside; leave these out, or use the "
            "strategy ddp.")
    # fmt: on

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
        return TrainConfig(**{**self.to_dict(), **(overrides or {}), **more})

    def to_dict(self) -> dict[str, Any]:
        """Every option in the types of YAML and JSON."""
        found = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: list(v) if isinstance(v, tuple) else v for name, v in found.items()}

    @classmethod
    def from_yaml(cls, path: str | Path) -> TrainConfig:
        """Read a file of ``name: value`` lines; names that are left out keep their default."""
        try:
            with Path(path).open("rb") as file:  # a device may not end
                text = file.read(4 * MOST_CHARACTERS + 1).decode("utf-8")
            found = parse_yaml(text) or {}
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
        except OptionError as error:
            error.source = str(path)
            raise
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"{path}: {error}") from error

    def to_yaml(self, path: str | Path | None = None) -> str:
        """The text of a file that ``from_yaml`` reads; written there too if a path is given."""
        with needs("yaml", "a configuration file"):
            import yaml  # type: ignore[import-untyped, unused-ignore]
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


TrainConfig.__doc__ = f"{inspect.cleandoc(TrainConfig.__doc__ or '')}\n\nArgs:\n" + "\n".join(
    f"    {field.name}: {field.metadata['help']}" for field in dataclasses.fields(TrainConfig)
)
