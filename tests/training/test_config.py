"""TrainConfig: helpful refusals, a YAML round trip, overrides."""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import equilibria as eq
from equilibria.engine import OptionError
from equilibria.training import TrainConfig


def test_it_writes_its_defaults_out() -> None:
    config = TrainConfig(schedule="cosine")
    full = config.resolved()
    assert (full.model, full.data, full.warmup) == ("geq_digits", "digits", 0.05)
    assert full.out == str(config.folder) == "runs/digits-geq_digits"
    assert full.resolved() == full


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"epohcs": 3}, "Did you mean 'epochs'"),
        ({"optimizer": "smg"}, "did you mean 'sgd'"),
        ({"strategy": "ddp_spawn"}, "expected one of|did you mean"),
        ({"augment": ["corp"]}, "augment.*Did you mean 'crop'"),
        ({"augment": [{"crop": {"paddding": 2}}]}, "augment.*padding"),
        ({"lr": 0.0}, r"lr=0.0\) is out of range"),
        ({"lr": "fast"}, "expected a number"),
        ({"lr": True}, "got bool"),
        ({"epochs": 0}, "epochs=0"),
        ({"epochs": 2.5}, "expected an integer"),
        ({"momentum": 0.0}, "Nesterov"),
        ({"ema": 1.0}, "ema"),
        ({"validation": 1.0}, "validation"),
        ({"validation": 0.0, "early_stop": 3}, "nothing is held out"),
        ({"validation": 0.0, "select": "best"}, "nothing is held out"),
        ({"schedule": "step"}, "needs milestones"),
        ({"milestones": [3]}, "no other schedule has them"),
        ({"schedule": "step", "milestones": [40]}, "before the end of the run"),
        ({"schedule": "step", "milestones": [9, 3]}, "rising"),
        ({"devices": 0}, "at least 1"),
        ({"compile": "yes"}, "True or False"),
        ({"model": ""}, "non-empty"),
        ({"model_options": 3}, "mapping"),
        ({"model_options": {"solver": object()}}, "cannot be stored"),
        ({"jacobian_weight": 1.0, "compile": True}, "choose one"),
        ({"strategy": "fsdp", "ema": 0.9}, "not averaged"),
        ({"cuda_graphs": True, "compile": True}, "choose one"),
        ({"cuda_graphs": True, "strategy": "ddp"}, "one GPU"),
        ({"loggers": ["tensorbord"]}, "did you mean 'tensorboard'"),
    ],
)
def test_a_wrong_value_is_refused_with_a_remedy(given: dict[str, Any], said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        TrainConfig(**given)


def test_what_is_read_as_something_else() -> None:
    # PyYAML reads 1e-3, without a dot, as text.
    assert yaml.safe_load("1e-3") == "1e-3"
    given: list[Any] = [TrainConfig(lr=lr) for lr in ("1e-3", 1)]  # type: ignore[arg-type]
    assert [c.lr for c in given] == [0.001, 1.0]
    given = [TrainConfig(precision=p) for p in (32, "bf16", "16", 64)]  # type: ignore[arg-type]
    assert [c.precision for c in given] == ["32-true", "bf16-mixed", "16-mixed", "64-true"]
    assert TrainConfig(loggers="csv").loggers == ("csv",)  # type: ignore[arg-type]
    solver = eq.Picard(max_steps=4, rtol=0.0)
    options = TrainConfig(model_options={"solver": solver, "widths": (8, 16)}).model_options
    assert (options["solver"]["kind"], options["solver"]["max_steps"]) == ("Picard", 4)
    assert options["widths"] == [8, 16]
    nested = {"solver": {"rtol": "1e-4"}, "gains": ["1.5e3", "-2E-1"], "name": "e1"}
    options = TrainConfig(model_options=nested).model_options
    assert options == {"solver": {"rtol": 1e-4}, "gains": [1500.0, -0.2], "name": "e1"}


configs = st.fixed_dictionaries(
    {},
    optional={
        "epochs": st.integers(31, 500),
        "batch_size": st.integers(1, 4096),
        "lr": st.floats(1e-6, 10.0),
        "weight_decay": st.floats(0.0, 1.0),
        "ema": st.none() | st.floats(0.001, 0.9999),
        "clip": st.none() | st.floats(1e-3, 1e3),
        "warmup": st.none() | st.floats(0.0, 0.99),
        "devices": st.integers(1, 8) | st.just("auto") | st.lists(st.integers(0, 7), min_size=1),
        "augment": st.lists(st.sampled_from(["flip", "cutout", {"crop": {"padding": 2}}])),
        "model_options": st.dictionaries(
            st.text("abc", min_size=1), st.integers() | st.booleans() | st.none() | st.text("xyz:")
        ),
        "data": st.text("ab/ :#-é", min_size=1),
        "out": st.none() | st.text("ab/ :#-é", min_size=1),
        "seed": st.integers(0, 2**32 - 1),
    },
)


@given(configs)
@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
def test_yaml_brings_everything_back(options: dict[str, Any]) -> None:
    config = TrainConfig(**options)
    assert TrainConfig(**yaml.safe_load(config.to_yaml())) == config


def test_a_file_may_hold_all_or_a_part(tmp_path: Path) -> None:
    path = tmp_path / "part.yaml"
    solver = {"solver": eq.Picard(max_steps=4)}
    whole = TrainConfig(schedule="step", milestones=(3, 7), epochs=9, model_options=solver)
    text = whole.to_yaml(path)
    assert path.read_text("utf-8") == text
    assert TrainConfig.from_yaml(path) == whole
    path.write_text("epochs: 3\nlr: 1e-2\naugment: [flip, {crop: {padding: 2}}]\n", "utf-8")
    config = TrainConfig.from_yaml(path)
    assert (config.epochs, config.lr) == (3, 0.01)
    assert config.augment == ("flip", {"crop": {"padding": 2}})
    path.write_text("", "utf-8")
    assert TrainConfig.from_yaml(path) == TrainConfig()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("epohcs: 3\n", "part.yaml.*Did you mean 'epochs'"),
        ("- 1\n- 2\n", "name: value"),
        ("lr: [1\n", "not valid YAML"),
        ("lr: \0\n", "not valid YAML"),
        ("!!python/object/apply:os.system ['true']\n", "not valid YAML"),
        ("1: 2\n", "name: value"),
        (b"\xff\xfe\x00\x01", "UTF-8"),
        (None, "no configuration file"),
    ],
)
def test_a_bad_or_missing_file_is_named(tmp_path: Path, text: Any, said: str) -> None:
    path = tmp_path / "part.yaml"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises((TypeError, ValueError, FileNotFoundError), match=said):
        TrainConfig.from_yaml(path)


BOMB = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 10)}]\n" for a, b in pairwise("abcdefghi")
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BOMB, r"line \d+: more than 10,000 values with all aliases.*MOST_VALUES"),
        (BOMB.replace("[*", "[<<, *"), "MOST_VALUES"),
        ("base: &b {k: 1}\n" + "x: {<<: [" + "*b, " * 10_000 + "]}\n", "MOST_VALUES"),
        ("model_options: &a {b: *a}\n", "line 1: a value that contains itself"),
        ("augment: &a [*a]\n", "line 1: a value that contains itself"),
        ("lr: 0.1\nepochs: 3\nlr: 0.2\n", "line 3: 'lr' is given twice"),
        ("model_options: {depth: 1, depth: 2}\n", "'depth' is given twice"),
        ("augment: " + "[" * 200 + "]" * 200, "MOST_DEPTH"),
        ("augment: " + "[" * 2000, "MOST_DEPTH"),
        ("lr: " + "9" * 5000, r"line 1: a value of 5,000 characters.*MOST_LETTERS"),
        ("#" * 300_000, "MOST_CHARACTERS"),
        ("lr: " + "9" * 400, r"lr=9+ \.\.\.\) is out of range"),
        ("epochs: 0x" + "f" * 4000, r"epochs=an integer of thousands of digits\) is out of"),
    ],
)
def test_a_file_that_is_small_and_means_harm(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "part.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"{path}.*{said}"):
        TrainConfig.from_yaml(path)


def test_aliases_are_read_within_the_limits(tmp_path: Path) -> None:
    path = tmp_path / "part.yaml"
    path.write_text(
        "model_options: {first: &o {depth: 2}, second: *o, third: {<<: *o, width: 3}}\n"
    )
    found = TrainConfig.from_yaml(path).model_options
    assert found["second"] == {"depth": 2}
    assert found["third"] == {"depth": 2, "width": 3}


@pytest.mark.skipif(os.name == "nt", reason="a device of POSIX")
def test_an_endless_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="MOST_CHARACTERS"):
        TrainConfig.from_yaml("/dev/zero")


@pytest.mark.parametrize("name", TrainConfig().to_dict())
def test_a_huge_integer_is_refused_by_the_name_of_its_option(name: str) -> None:
    for value in (10**400, -(10**400), 16**5000):
        for one in (value, [value]):
            with pytest.raises(OptionError, match=rf"TrainConfig\({name}="):
                TrainConfig(**{name: one})


def test_overrides_are_checked_again() -> None:
    config = TrainConfig(epochs=5)
    other = config.with_overrides({"lr": 0.2}, seed=3)
    assert (other.epochs, other.lr, other.seed) == (5, 0.2, 3)
    assert config.lr != 0.2
    assert config.differences(other) == {"lr": (config.lr, 0.2), "seed": (0, 3)}
    with pytest.raises(TypeError, match="Did you mean 'seed'"):
        config.with_overrides(sed=1)


def test_a_configuration_needs_no_lightning_and_fit_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(eq, "training", eq.training)  # an import below replaces it
    for name in [name for name in sys.modules if name.startswith("equilibria.training")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lightning", None)  # type: ignore[arg-type]
    fresh = importlib.import_module("equilibria.training")
    assert fresh.TrainConfig is not TrainConfig
    assert fresh.TrainConfig().to_dict() == TrainConfig().to_dict()
    with pytest.raises(ImportError, match=r'pip install "equilibria\[train\]"'):
        _ = fresh.fit


def test_the_table_of_the_documentation_is_that_of_the_declarations() -> None:
    root = Path(__file__).parents[2]
    found = runpy.run_path(str(root / "docs" / "make_option_table.py"))["table"]()
    written = (root / "results" / "train_options.md").read_text(encoding="utf-8")
    assert written == found, "run: python docs/make_option_table.py"
