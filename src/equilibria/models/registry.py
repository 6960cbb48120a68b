"""Networks by name: what a name stands for, and the three functions that look names up."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from .network import ModelConfig, Network, Shape
from .options import Option, prefixed
from .values import short, to_json

__all__ = ["ModelCard", "ModelSpec", "Registry"]

Task = Literal["classification", "segmentation"]
_LARGEST = 1 << 16


@dataclass(frozen=True)
class ModelCard:
    """What is known of a named network before it is built."""

    name: str
    task: Task
    text: str
    """One line."""
    paper: str
    """Where it comes from, or "ours"."""
    paper_parameters: int | None
    """What the paper says it counts, as rounded there; None where none is printed."""
    paper_classes: int
    """The number of classes that this count is for."""
    in_channels: int
    image_size: int
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
    """An entry of the table: ``build(shape, **options)`` and the card."""

    name: str
    build: Callable[..., Network]
    text: str
    in_channels: int
    image_size: int
    options: Mapping[str, Option] = field(default_factory=dict)
    task: Task = "classification"
    paper: str = "ours"
    paper_parameters: int | None = None
    paper_classes: int = 10
    revision: int = 0
    """Raised by one whenever a default changes; tests/models/test_revisions.py watches."""

    def card(self) -> ModelCard:
        return ModelCard(
            name=self.name,
            task=self.task,
            text=self.text,
            paper=self.paper,
            paper_parameters=self.paper_parameters,
            paper_classes=self.paper_classes,
            in_channels=self.in_channels,
            image_size=self.image_size,
            options={
                name: f"{short(option.default)}: {option.about}"
                for name, option in self.options.items()
            },
            revision=self.revision,
        )

    def parse(self, overrides: Mapping[str, Any]) -> dict[str, Any]:
        """Every option with its value, overrides checked."""
        unknown = [name for name in overrides if name not in self.options]
        if unknown:
            close = difflib.get_close_matches(unknown[0], self.options, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            allowed = ", ".join(self.options) or "none"
            raise TypeError(
                f"{self.name} has no option {unknown[0]!r} (got {overrides[unknown[0]]!r}).{hint} "
                f"Its options: {allowed}."
            )
        made = {name: option.default for name, option in self.options.items()}
        for name, value in overrides.items():
            try:
                made[name] = self.options[name].parse(name, value)
            except (TypeError, ValueError) as error:
                raise prefixed(error, self.name) from error
        return made


class Registry:
    """The networks of a table. Nothing is ever added to it after it was made."""

    def __init__(self, *families: tuple[ModelSpec, ...]) -> None:
        specs = [spec for family in families for spec in family]
        table = {spec.name: spec for spec in specs}
        if len(table) != len(specs):
            twice = sorted({s.name for s in specs if sum(t.name == s.name for t in specs) > 1})
            raise ValueError(f"two models have one name: {', '.join(twice)}.")
        self._specs: Mapping[str, ModelSpec] = MappingProxyType(table)

    def spec(self, name: str) -> ModelSpec:
        """The entry of that name, or an error that offers the nearest ones."""
        if not isinstance(name, str):
            raise TypeError(f"a model is named by a string, got {name!r}.")
        if name not in self._specs:
            close = difflib.get_close_matches(name, self._specs, n=3, cutoff=0.5)
            hint = f" Did you mean {', '.join(close)}?" if close else ""
            raise ValueError(
                f"there is no model {name!r}.{hint} models.names() and `equilibria models` list "
                f"all {len(self._specs)}."
            )
        return self._specs[name]

    def names(self, pattern: str = "*", task: str | None = None) -> list[str]:
        """The names that match a glob pattern, sorted.

        Args:
            pattern: as of file names: "geq_*", "*_cifar_5m".
            task: "classification" or "segmentation"; None: both.
        """
        if task not in (None, "classification", "segmentation"):
            raise ValueError(f"task={task!r}: expected 'classification', 'segmentation' or None.")
        return sorted(
            name
            for name, spec in self._specs.items()
            if fnmatch.fnmatchcase(name, pattern) and task in (None, spec.task)
        )

    def describe(self, name: str) -> ModelCard:
        """The card of a network: what it is, its input, its options. Nothing is built."""
        return self.spec(name).card()

    def create(
        self,
        name: str,
        num_classes: int = 10,
        *,
        in_channels: int | None = None,
        image_size: int | None = None,
        **overrides: Any,
    ) -> Network:
        """Build a network by its name, with fresh weights from torch's random numbers.

        Args:
            name: one of ``names()``.
            num_classes: logits of the head.
            in_channels: channels of the images; None: what the model was made for.
            image_size: pixels of a side that the network is laid out for; None: what it was made
                for. Other sizes can be given to most networks, where their patches divide them.
            overrides: options of the model, listed by ``describe(name).options``. Objects (solver,
                adjoint, constraint, ...) may also be given as they stand in
                ``model.config.options``.

        Returns:
            The network in training mode; ``model.config`` is all that is needed to build it again.
        """
        spec = self.spec(name)
        options = spec.parse(overrides)
        shape = Shape(
            _size(name, "num_classes", num_classes),
            _size(name, "in_channels", spec.in_channels if in_channels is None else in_channels),
            _size(name, "image_size", spec.image_size if image_size is None else image_size),
        )
        config = ModelConfig(
            name,
            shape.num_classes,
            shape.in_channels,
            shape.image_size,
            {key: to_json(value) for key, value in options.items()},
        )
        try:
            model = spec.build(shape, **options)
        except (TypeError, ValueError) as error:
            raise prefixed(error, name) from error
        model.config = config
        return model


def _size(name: str, what: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _LARGEST:
        raise ValueError(f"{name}: {what}={value!r}, expected an integer in [1, {_LARGEST}].")
    return value
