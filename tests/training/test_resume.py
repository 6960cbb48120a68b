"""A run repeats bit for bit; so does one that was interrupted and resumed, anywhere."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from equilibria.training import (
    CheckpointError,
    Interrupted,
    TrainConfig,
    TrainResult,
    read_checkpoint,
)
from equilibria.training import run as run_module
from equilibria.training.progress import StopRequest

from .small import At, Losses, RaiseAt, SignalAt, assert_same_run, config, digits, run

ROOT = Path(__file__).parent.parent.parent

# Every part that has a state of its own, and everything that the end of an epoch decides.
RICH: dict[str, Any] = {"ema": 0.9, "clip": 1.0, "batch_size": 16, "select": "best"}
RICH |= {"augment": ["flip", {"crop": {"padding": 1}}], "keep_every": 1}
ADAMW: dict[str, Any] = {"optimizer": "adamw", "lr": 0.01, "decay_norms": False}
OPTIONS: dict[str, dict[str, Any]] = {
    "onecycle": RICH,
    "constant": {**RICH, "schedule": "constant", "lr": 2.5},  # the best epoch is not the last
    "cosine": {**RICH, "schedule": "cosine", "jacobian_weight": 0.1},
    "float64": {**RICH, "precision": "64-true"},
    "float64, adamw": {**RICH, **ADAMW, "precision": "64-true"},
    "bfloat16": {**RICH, **ADAMW, "precision": "bf16-true"},
    "mixed": {**RICH, "precision": "bf16-mixed", "select": "last"},
    "half steps": {**RICH, "half_steps": 0.5},  # in the first of three epochs
}


def train(place: TrainConfig, **more: Any) -> TrainResult:
    """An epoch has six steps and two batches of validation."""
    return run(place, dropout=0.2, data=digits(96), **more)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """The run that nothing disturbs, its result and the loss of each of its 18 steps."""
    made: dict[str, tuple[TrainResult, list[float]]] = {}

    def get(name: str) -> tuple[TrainResult, list[float]]:
        if name not in made:
            losses = Losses()
            place = config(tmp_path_factory.mktemp("whole"), **OPTIONS[name])
            made[name] = train(place, callbacks=[losses]), losses.values
        return made[name]

    return get


def interrupted_and_resumed(
    folder: Path, name: str, whole: Any, stop: At, error: type[BaseException] = Interrupted
) -> BaseException:
    """Stop, resume, and compare with the whole run; what was raised."""
    expected, losses = whole(name)
    before, after = Losses(), Losses()
    place = config(folder, **OPTIONS[name])
    with pytest.raises(error) as caught:
        train(place, callbacks=[before, stop])
    assert not (folder / "run.lock").exists()
    start = read_checkpoint(folder / "last.ckpt")["equilibria"]["progress"]["step"]
    found = train(place, resume=folder, callbacks=[after])
    assert before.values[:start] + after.values == losses
    assert_same_run(found, expected)
    # A run that is complete gives its result again.
    if place.select == "last":
        found.weights.unlink()
    assert_same_run(train(place, resume=folder), expected)
    return caught.value


def test_a_seed_repeats_a_run_bit_for_bit(tmp_path: Path, whole: Any) -> None:
    expected, losses = whole("onecycle")
    again, other = Losses(), Losses()
    torch.manual_seed(5)
    numbers = torch.rand(3)
    torch.manual_seed(5)
    found = train(config(tmp_path / "a", **RICH), callbacks=[again])
    assert torch.equal(torch.rand(3), numbers)  # the caller's own go on as before
    assert len(losses) == 18
    assert again.values == losses
    assert_same_run(found, expected)
    train(config(tmp_path / "b", **RICH, seed=1, epochs=1), callbacks=[other])
    assert other.values[0] != losses[0]


# At once, by Ctrl-C, by Ctrl-C twice; the very first step, in the middle of an epoch, its first.
STOPS = [partial(RaiseAt, step) for step in (1, 9, 13)]
STOPS += [partial(SignalAt, 1), partial(SignalAt, 13), partial(SignalAt, 9, times=2)]


@pytest.mark.parametrize("stop", STOPS)
def test_stopped_in_the_middle_of_an_epoch(tmp_path: Path, stop: Any, whole: Any) -> None:
    error = interrupted_and_resumed(tmp_path, "onecycle", whole, stop())
    assert isinstance(error, Interrupted)
    assert error.exact
    assert error.checkpoint == tmp_path / "last.ckpt"
    assert "Go on with" in str(error)


@pytest.mark.parametrize("name", [n for n in OPTIONS if n not in ("onecycle", "constant")])
def test_whatever_is_trained(tmp_path: Path, name: str, whole: Any) -> None:
    error = interrupted_and_resumed(tmp_path, name, whole, RaiseAt(9))
    assert isinstance(error, Interrupted)
    assert error.exact


@pytest.mark.parametrize("step", [3, 6])
def test_stopped_in_the_epoch_of_half_steps_and_at_its_end(
    tmp_path: Path, step: int, whole: Any
) -> None:
    interrupted_and_resumed(tmp_path, "half steps", whole, RaiseAt(step))
    rows = whole("half steps")[0].history
    assert [row["solver_steps"] for row in rows] == [2.0, 3.0, 3.0]


@pytest.mark.parametrize("hook", ["setup", "on_fit_start", "on_train_start"])
def test_interrupted_before_it_has_resumed_it_leaves_the_checkpoint_alone(
    tmp_path: Path, hook: str, whole: Any
) -> None:
    """Before and after Lightning has put the weights back, and before the sums of the epoch are."""
    place, after = config(tmp_path, **RICH), Losses()
    with pytest.raises(Interrupted):
        train(place, callbacks=[RaiseAt(9), Losses()])
    with pytest.raises(Interrupted, match="Go on with"):
        train(place, resume=tmp_path, callbacks=[RaiseAt(1, hook=hook)])
    assert_same_run(train(place, resume=tmp_path, callbacks=[after]), whole("onecycle")[0])
    assert after.values == whole("onecycle")[1][9:]


def test_crashes_go_back_to_the_end_of_an_epoch(tmp_path: Path, whole: Any) -> None:
    stop, place = RaiseAt(9, RuntimeError("power cut")), config(tmp_path / "b", **RICH)
    interrupted_and_resumed(tmp_path / "a", "onecycle", whole, stop, RuntimeError)
    for step, resume in ((9, None), (4, place.folder)):  # once more on the way
        with pytest.raises(Interrupted):
            train(place, resume=resume, callbacks=[RaiseAt(step), Losses()])
    found = train(place, resume=place.folder, callbacks=[Losses()])
    assert_same_run(found, whole("onecycle")[0])


@pytest.mark.parametrize("epoch", [0, 1, 2])
@pytest.mark.parametrize("moment", ["last step", "validation"])
def test_a_signal_at_the_end_of_an_epoch_waits_for_its_validation(
    tmp_path: Path, whole: Any, moment: str, epoch: int
) -> None:
    """Ctrl-C in the last step; SIGTERM, by which Lightning ends a validation, in that."""
    stop = SignalAt(6 * (epoch + 1))
    if moment == "validation":
        stop = SignalAt(2 * epoch + 1, 2, signal.SIGTERM, hook="on_validation_batch_end")
    error = interrupted_and_resumed(tmp_path, "constant", whole, stop)
    assert ("the training is complete" in str(error)) == (epoch == 2)
    assert ("Go on with" in str(error)) == (epoch < 2)


@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_cut_in_validation_it_is_validated_on_resume(
    tmp_path: Path, whole: Any, epoch: int
) -> None:
    stop = RaiseAt(2 * epoch + 1, hook="on_validation_batch_end")
    error = interrupted_and_resumed(tmp_path, "constant", whole, stop)
    assert getattr(error, "exact", False)


# In the order in which they are written: before one is after the one above it.
@pytest.mark.parametrize(
    ("name", "moment"),
    [
        ("history.csv", "before"),
        ("history.csv", "after"),
        ("model.safetensors", "after"),
        ("epoch_0001.safetensors", "after"),
    ],
)
def test_cut_as_an_epoch_is_closed_it_is_closed_on_resume(
    tmp_path: Path, whole: Any, name: str, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second Ctrl-C before or after a file of the first epoch is moved into its place."""
    move, left = Path.replace, [1]

    def cut(self: Path, target: Any) -> Any:
        here = Path(target).name == name and left
        found = move(self, target) if not here or moment == "after" else None
        if here:
            left.clear()
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(Path, "replace", cut)
    interrupted_and_resumed(tmp_path, "constant", whole, At(0, None))
    assert not left  # the file was written, and the run was cut there


def test_an_interruption_inside_a_step_says_that_it_is_not_exact(tmp_path: Path) -> None:
    place = config(tmp_path)
    with pytest.raises(Interrupted, match="not bit for bit") as caught:
        run(place, callbacks=[RaiseAt(8, hook="on_before_optimizer_step")])
    assert not caught.value.exact
    with pytest.raises(Interrupted, match="not bit for bit"):  # nor is what is resumed from it
        run(place, resume=tmp_path, callbacks=[RaiseAt(2)])
    assert run(place, resume=tmp_path).history[-1]["epoch"] == 3


def test_more_epochs_where_the_schedule_allows_it(tmp_path: Path) -> None:
    options = {"schedule": "step", "milestones": [1]}
    whole = run(config(tmp_path / "whole", epochs=3, **options))
    run(config(tmp_path / "cut", epochs=2, **options))
    found = run(config(tmp_path / "cut", epochs=3, **options), resume=tmp_path / "cut")
    assert_same_run(found, whole)


def test_another_number_of_epochs_would_warm_up_otherwise(tmp_path: Path) -> None:
    options = {"schedule": "constant", "warmup": 0.5}
    run(config(tmp_path, epochs=1, **options))
    with pytest.raises(CheckpointError, match="epochs: now 2, then 1"):
        run(config(tmp_path, epochs=2, **options), resume=tmp_path)


@pytest.mark.parametrize("less", [{"epochs": 1}, {"early_stop": 1}])
def test_weights_and_numbers_are_of_one_epoch(tmp_path: Path, less: dict[str, Any]) -> None:
    """Stopped inside the third epoch, and resumed when the second should be the last."""
    options = {"schedule": "constant", "lr": 2.5, "clip": 1.0, "epochs": 4}
    with pytest.raises(Interrupted):
        run(config(tmp_path, **options), callbacks=[SignalAt(15)])
    found = run(config(tmp_path, **{**options, **less}), resume=tmp_path)
    expected = run(config(tmp_path / "whole", **{**options, "epochs": 3}))
    assert_same_run(found, expected)


def test_other_data_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        run(config(tmp_path), callbacks=[SignalAt(8)])
    for count in (64, 96, 256):
        with pytest.raises(CheckpointError, match=f"other data.* 192 images.* {count} now"):
            run(config(tmp_path), resume=tmp_path, data=digits(count))


def test_resume_in_the_folder_of_the_checkpoint_and_in_another(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        run(config(tmp_path / "a", select="best"), callbacks=[RaiseAt(8)])
    before = (tmp_path / "a" / "last.ckpt").read_bytes()
    other = run(config(tmp_path / "b", select="best"), resume=tmp_path / "a")
    assert other.folder == tmp_path / "b"
    assert (tmp_path / "a" / "last.ckpt").read_bytes() == before
    settings = TrainConfig.from_yaml(tmp_path / "a" / "config.yaml").with_overrides(out=None)
    same = run(settings, resume=tmp_path / "a")
    assert same.folder == tmp_path / "a"
    assert_same_run(same, other)


def test_a_resumed_run_stays_where_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole_run: TrainResult
) -> None:
    """Its config.yaml says ``out: runs/a``, and it was moved, or the current folder is another."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Interrupted):
        run(config(Path("runs") / "a"), callbacks=[RaiseAt(8)])
    (tmp_path / "runs").rename(tmp_path / "moved")
    monkeypatch.chdir(tmp_path / "elsewhere")
    folder = Path("..") / "moved" / "a"
    settings = TrainConfig.from_yaml(folder / "config.yaml")
    assert settings.out == "runs/a"
    for error in (RuntimeError, Interrupted):
        with pytest.raises(error):
            run(settings, resume=folder, callbacks=[RaiseAt(1, error("", None))])
    (tmp_path / "moved").rename(tmp_path / "again")
    folder = tmp_path / "again" / "a"
    found = run(settings, resume=folder / "last.ckpt")
    assert found.folder == folder
    assert not list((tmp_path / "elsewhere").iterdir())
    assert_same_run(found, whole_run)


def test_the_first_asks_the_second_raises_and_the_handlers_come_back() -> None:
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    said: list[int] = []
    with StopRequest(lambda: said.append(1)) as request:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
            assert request.asked
        assert said == [1]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_run_works_in_a_thread_and_leaves_the_signals_alone(tmp_path: Path) -> None:
    before, seen, found = signal.getsignal(signal.SIGINT), [], []
    look = At(1, lambda: seen.append(signal.getsignal(signal.SIGINT)))

    def work() -> None:
        found.append(run(config(tmp_path, epochs=1), callbacks=[look]))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found[0].history[0]["epoch"] == 1
    assert seen == [before]


def test_as_the_result_is_written_it_waits_and_twice_it_can_be_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = run_module.write_json
    for times, words in ((1, "training is complete"), (2, "Go on with")):
        folder = tmp_path / str(times)

        def pressed(*given: Any, presses: int = times) -> None:
            for _ in range(presses):
                signal.raise_signal(signal.SIGINT)
            write(*given)

        with monkeypatch.context() as patch:
            patch.setattr(run_module, "write_json", pressed)
            with pytest.raises(Interrupted, match=words):
                run(config(folder, epochs=1))
        assert (folder / "result.json").exists() == (times == 1)
        run(config(folder, epochs=1), resume=folder)
        assert (folder / "result.json").exists()


KILLED = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from tests.training.small import config, run
from tests.training.test_resume import RICH

folder = Path(sys.argv[2])
resume = folder if (folder / "last.ckpt").exists() else None
print("begin", flush=True)
run(config(folder, **RICH, epochs=8), dropout=0.2, resume=resume)
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_killed_twenty_times_at_random_moments(tmp_path: Path) -> None:
    """kill -9 anywhere, in writes too: a plain restart before the first checkpoint, else a resume,
    and in the end the uninterrupted run, with no file left over."""
    settings = {**RICH, "epochs": 8}
    begin = time.perf_counter()
    expected = run(config(tmp_path / "whole", **settings), dropout=0.2)
    length = time.perf_counter() - begin
    names = {path.name for path in expected.folder.iterdir()}
    moments, kills, folder, rounds = random.Random(0), 0, tmp_path / "0", 0
    while kills < 20 or rounds:
        command = [sys.executable, "-c", KILLED, str(ROOT), str(folder)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout.readline() == b"begin\n"
        if rounds < 4:
            time.sleep(moments.uniform(0.0, 0.6 * length))
            process.kill()
        _, said = process.communicate()
        assert process.returncode in (0, -signal.SIGKILL), said.decode()
        kills, rounds = kills + (process.returncode != 0), rounds + 1
        if process.returncode == 0:
            found = run(config(folder, **settings), dropout=0.2, resume=folder)
            assert_same_run(found, expected)
            assert {path.name for path in folder.iterdir()} == names
            folder, rounds = tmp_path / str(kills), 0
