"""A run repeats bit for bit; so does one that was interrupted and resumed, anywhere."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from equilibria.training import (
    CheckpointError,
    Interrupted,
    TrainConfig,
    TrainResult,
    read_checkpoint,
)

from .small import Losses, RaiseAt, SignalAt, config, run, same_rows, same_weights

# Every part that has a state of its own.
RICH: dict[str, Any] = {
    "ema": 0.9,
    "augment": ["flip", {"crop": {"padding": 1}}],
    "schedule": "onecycle",
    "clip": 1.0,
}


def test_a_seed_repeats_a_run_bit_for_bit(tmp_path: Path) -> None:
    first, second = Losses(), Losses()
    a = run(config(tmp_path / "a", **RICH), dropout=0.2, callbacks=[first])
    b = run(config(tmp_path / "b", **RICH), dropout=0.2, callbacks=[second])
    assert len(first.values) == 18
    assert first.values == second.values
    assert same_weights(a.model, b.model)
    assert same_rows(a.history, b.history)


def test_another_seed_is_another_run(tmp_path: Path) -> None:
    first, second = Losses(), Losses()
    run(config(tmp_path / "a", epochs=1), callbacks=[first])
    run(config(tmp_path / "b", epochs=1, seed=1), callbacks=[second])
    assert first.values != second.values


def test_the_callers_random_numbers_are_untouched(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    run(config(tmp_path, epochs=1))
    assert torch.equal(torch.rand(3), expected)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainResult, list[float]]:
    """The run that nothing disturbs, and the loss of each of its 18 steps (3 epochs)."""
    losses = Losses()
    place = config(tmp_path_factory.mktemp("whole"), **RICH)
    return run(place, dropout=0.2, callbacks=[losses]), losses.values


# In the middle of an epoch, at the first step of one, at the very first step.
@pytest.mark.parametrize("step", [9, 13, 1])
def test_ctrl_c_in_the_middle_and_resume_is_exact(
    tmp_path: Path, step: int, whole: tuple[TrainResult, list[float]]
) -> None:
    expected, losses = whole
    before, after = Losses(), Losses()
    place = config(tmp_path, **RICH)
    with pytest.raises(Interrupted, match="Go on with") as caught:
        run(place, dropout=0.2, callbacks=[before, RaiseAt(step, KeyboardInterrupt())])
    assert caught.value.exact
    assert caught.value.checkpoint == tmp_path / "last.ckpt"
    found = run(place, dropout=0.2, resume=tmp_path, callbacks=[after])
    assert len(before.values) == step
    assert before.values + after.values == losses
    assert same_rows(found.history, expected.history)
    assert same_weights(found.model, expected.model)


# A signal is heard between two steps; one at the last step of an epoch waits for validation.
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("step", [9, 12])
def test_a_signal_stops_after_the_step_and_resume_is_exact(
    tmp_path: Path, step: int, number: int, whole: tuple[TrainResult, list[float]]
) -> None:
    expected, losses = whole
    before, after = Losses(), Losses()
    place = config(tmp_path, **RICH)
    with pytest.raises(Interrupted):
        run(place, dropout=0.2, callbacks=[before, SignalAt(step, number=number)])
    found = run(place, dropout=0.2, resume=tmp_path, callbacks=[after])
    assert len(before.values) == step
    assert before.values + after.values == losses
    assert same_rows(found.history, expected.history)
    assert same_weights(found.model, expected.model)


def test_adamw_resumes_exactly(tmp_path: Path) -> None:
    options = {**RICH, "optimizer": "adamw", "lr": 0.01, "decay_norms": False}
    expected = run(config(tmp_path / "whole", **options))
    place = config(tmp_path / "cut", **options)
    with pytest.raises(Interrupted):
        run(place, callbacks=[RaiseAt(8, KeyboardInterrupt())])
    found = run(place, resume=tmp_path / "cut")
    assert same_rows(found.history, expected.history)
    assert same_weights(found.model, expected.model)


@pytest.mark.parametrize("schedule", ["onecycle", "cosine"])
def test_resume_at_the_end_of_an_epoch_is_exact(tmp_path: Path, schedule: str) -> None:
    options = {**RICH, "schedule": schedule}
    expected = run(config(tmp_path / "whole", **options), dropout=0.2)
    place = config(tmp_path / "cut", **options)
    with pytest.raises(RuntimeError, match="power cut"):
        # In the second epoch: the checkpoint is that of the end of the first.
        run(place, dropout=0.2, callbacks=[RaiseAt(8, RuntimeError("power cut"))])
    saved = read_checkpoint(tmp_path / "cut" / "last.ckpt")["equilibria"]
    assert saved["progress"] == {"epoch": 1, "batch": 0, "step": 6}
    found = run(place, dropout=0.2, resume=tmp_path / "cut" / "last.ckpt")
    assert same_rows(found.history, expected.history)
    assert same_weights(found.model, expected.model)


def test_a_run_may_be_cut_twice(tmp_path: Path) -> None:
    expected = run(config(tmp_path / "whole", **RICH))
    place = config(tmp_path / "cut", **RICH)
    for step in (4, 5):
        with pytest.raises(Interrupted):
            run(
                place,
                resume=tmp_path / "cut" if step == 5 else None,
                callbacks=[RaiseAt(step, KeyboardInterrupt())],
            )
    found = run(place, resume=tmp_path / "cut")
    assert same_rows(found.history, expected.history)
    assert same_weights(found.model, expected.model)


def test_an_interruption_inside_a_step_says_that_it_is_not_exact(tmp_path: Path) -> None:
    place = config(tmp_path)
    with pytest.raises(Interrupted, match="not bit for bit") as caught:
        run(place, callbacks=[RaiseAt(8, KeyboardInterrupt(), "on_before_optimizer_step")])
    assert not caught.value.exact
    assert run(place, resume=tmp_path).history[-1]["epoch"] == 3


# Everything that the end of an epoch decides, and two batches of validation.
EPOCH_END: dict[str, Any] = {
    "epochs": 3,
    "batch_size": 16,
    "select": "best",
    "keep_every": 1,
    "ema": 0.9,
    "schedule": "constant",
    "lr": 0.4,
}


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    return run(config(tmp_path_factory.mktemp("judged"), **EPOCH_END))


def same_run(found: TrainResult, expected: TrainResult) -> bool:
    """History, final weights and the kept weights, bit for bit."""
    kept = [sorted((r.folder / "epochs").iterdir()) for r in (found, expected)]
    return (
        same_rows(found.history, expected.history)
        and found.metrics == expected.metrics
        and same_weights(found.model, expected.model)
        and [p.name for p in kept[0]] == [p.name for p in kept[1]]
        and all(
            torch.equal(load_file(a)[k], v)
            for a, b in zip(*kept, strict=True)
            for k, v in load_file(b).items()
        )
    )


@pytest.mark.parametrize("epoch", [0, 1, 2])
@pytest.mark.parametrize(
    ("number", "times"), [(signal.SIGINT, 1), (signal.SIGTERM, 1), (signal.SIGTERM, 2)]
)
@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_batch_end"])
def test_a_signal_at_the_end_of_an_epoch_is_exact(
    tmp_path: Path, judged: TrainResult, hook: str, number: int, times: int, epoch: int
) -> None:
    step = 12 * (epoch + 1) if hook == "on_train_batch_end" else 2 * epoch + 1
    place = config(tmp_path, **EPOCH_END)
    with pytest.raises(Interrupted) as caught:
        run(place, callbacks=[SignalAt(step, times, number, hook)])
    assert caught.value.exact
    assert same_run(run(place, resume=tmp_path), judged)


@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_cut_in_validation_it_is_validated_on_resume(
    tmp_path: Path, judged: TrainResult, epoch: int
) -> None:
    place = config(tmp_path, **EPOCH_END)
    stop = RaiseAt(2 * epoch + 1, KeyboardInterrupt(), "on_validation_batch_end")
    with pytest.raises(Interrupted) as caught:
        run(place, callbacks=[stop])
    assert caught.value.exact
    saved = read_checkpoint(tmp_path / "last.ckpt")["equilibria"]["progress"]
    assert saved == {"epoch": epoch, "batch": 12, "step": 12 * (epoch + 1)}
    losses = Losses()
    assert same_run(run(place, resume=tmp_path, callbacks=[losses]), judged)
    assert len(losses.values) == 12 * (2 - epoch)


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("name", ["model.safetensors", "epoch_0001.safetensors", "history.csv"])
def test_cut_as_an_epoch_is_closed_it_is_closed_on_resume(
    tmp_path: Path,
    judged: TrainResult,
    name: str,
    moment: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second Ctrl-C before or after a file of the first epoch is moved into its place."""
    move, left = Path.replace, [1]

    def cut(self: Path, target: Any) -> Any:
        here = Path(target).name == name and left
        if here and moment == "before":
            left.clear()
            raise KeyboardInterrupt
        found = move(self, target)
        if here:
            left.clear()
            raise KeyboardInterrupt
        return found

    place = config(tmp_path, **EPOCH_END)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", cut)
        with pytest.raises(Interrupted) as caught:
            run(place)
    assert caught.value.exact
    assert same_run(run(place, resume=tmp_path), judged)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("precision", ["64-true", "bf16-true", "bf16-mixed"])
def test_every_precision_resumes_exactly(tmp_path: Path, precision: str, optimizer: str) -> None:
    options = {"precision": precision, "ema": 0.9, "select": "best", "optimizer": optimizer}
    options |= {"lr": 0.01, "epochs": 2}
    expected = run(config(tmp_path / "whole", **options))
    place = config(tmp_path / "cut", **options)
    with pytest.raises(Interrupted):
        run(place, callbacks=[RaiseAt(8, KeyboardInterrupt())])
    cut, found = (read_checkpoint(tmp_path / n / "last.ckpt") for n in ("cut", "whole"))
    found_result = run(place, resume=tmp_path / "cut")
    assert {p.dtype for p in found_result.model.parameters()} == {
        p.dtype for p in expected.model.parameters()
    }
    assert same_rows(found_result.history, expected.history)
    assert same_weights(found_result.model, expected.model)
    after = read_checkpoint(tmp_path / "cut" / "last.ckpt")
    for part in ("state_dict", "optimizer_states", "callbacks"):
        assert _tensors(after[part]) == _tensors(found[part]), part
    assert _tensors(cut["state_dict"]) != _tensors(found["state_dict"])
    # A run that is complete gives its result again.
    assert same_weights(run(place, resume=tmp_path / "cut").model, expected.model)


def _tensors(value: Any) -> list[tuple[Any, ...]]:
    """Dtype and bytes of every tensor in a tree, but for the random numbers' own."""
    if isinstance(value, torch.Tensor):
        return [(value.dtype, value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())]
    if isinstance(value, dict):
        return [t for k, v in value.items() if k != "random" for t in _tensors(v)]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in _tensors(v)]
    return []


@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-true"])
def test_a_complete_run_gives_its_result_again(tmp_path: Path, precision: str) -> None:
    place = config(tmp_path, ema=0.9, precision=precision)
    first = run(place)
    first.weights.unlink()
    again = run(place, resume=tmp_path)
    assert same_weights(first.model, again.model)
    assert same_rows(first.history, again.history)
    assert again.weights.exists()


def test_more_epochs_where_the_schedule_allows_it(tmp_path: Path) -> None:
    options = {"schedule": "step", "milestones": [1]}
    whole = run(config(tmp_path / "whole", epochs=4, **options))
    run(config(tmp_path / "cut", epochs=2, **options))
    found = run(config(tmp_path / "cut", epochs=4, **options), resume=tmp_path / "cut")
    assert same_weights(found.model, whole.model)
    with pytest.raises(CheckpointError, match="epochs: now 5, then 4"):
        run(config(tmp_path / "whole", epochs=5), resume=tmp_path / "whole")


def test_resume_continues_in_the_folder_of_the_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        run(config(tmp_path / "a"), callbacks=[RaiseAt(8, KeyboardInterrupt())])
    settings = TrainConfig.from_yaml(tmp_path / "a" / "config.yaml").with_overrides(out=None)
    assert run(settings, resume=tmp_path / "a").folder == tmp_path / "a"


def test_resume_into_another_folder_leaves_the_first(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        run(config(tmp_path / "a"), callbacks=[RaiseAt(8, KeyboardInterrupt())])
    before = (tmp_path / "a" / "last.ckpt").read_bytes()
    found = run(config(tmp_path / "b"), resume=tmp_path / "a")
    assert found.folder == tmp_path / "b"
    assert (tmp_path / "a" / "last.ckpt").read_bytes() == before
    expected = run(config(tmp_path / "c"))
    assert same_weights(found.model, expected.model)
