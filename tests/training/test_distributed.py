"""Two processes on the CPU take the steps that one takes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from equilibria.training import Interrupted, Run, processes, read_checkpoint
from equilibria.training.progress import StopRequest

from .ranks import CASES, case
from .small import RaiseAt, config, run

ROOT = Path(__file__).parent.parent.parent

SCRIPT = f"""
import json, sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
import torch
from tests.training.small import config, run

torch.set_num_threads(1)
run(config(Path(sys.argv[1]), devices=2, strategy="ddp", **json.loads(sys.argv[2])))
"""


def clean(**more: str) -> dict[str, str]:
    """The environment without what a launcher left there."""
    kept = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "RANK", "WORLD_SIZE")}
    return {**kept, "OMP_NUM_THREADS": "1", **more}


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def start(out: Path, **options: Any) -> subprocess.Popen[str]:
    """A run of two processes, in a group of its own, as a terminal makes it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    script = out.with_suffix(".py")
    script.write_text(SCRIPT)
    return subprocess.Popen(
        [sys.executable, str(script), str(out), json.dumps(options)],
        env=clean(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_both_processes_at_one_step(tmp_path: Path, number: int) -> None:
    """Ctrl-C goes to the group, as from a terminal; SIGTERM to the first process alone."""
    out = tmp_path / "two"
    process = start(out, epochs=500, log_every=3)
    began = time.monotonic()
    while not (out / "last.ckpt").exists() and time.monotonic() - began < 200:
        time.sleep(0.2)
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    text, _ = process.communicate(timeout=200)
    assert process.returncode != 0
    assert "Go on with" in text
    saved = read_checkpoint(out / "last.ckpt")["equilibria"]
    assert saved["exact"]
    assert saved["progress"]["step"] >= 6


def test_a_signal_that_comes_as_the_processes_agree_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = Run.__new__(Run)
    one.request, one.module = StopRequest(), SimpleNamespace(device="cpu")  # type: ignore[assignment]
    trainer: Any = SimpleNamespace(world_size=2)

    def heard(flag: torch.Tensor, op: Any) -> None:
        one.request.asked = True

    monkeypatch.setattr(torch.distributed, "all_reduce", heard)
    assert not one._asked(trainer)  # the others do not know of it yet
    assert one._asked(trainer)


def compare(tmp_path: Path, world: int, accelerator: str, backend: str) -> None:
    """Trainings under torchrun with those of this process, which has no process group."""
    with pytest.raises(Interrupted):
        case("resumed", tmp_path / "cut", stop=[RaiseAt(4)], accelerator=accelerator)
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={world}"]
    command += ["--standalone", "-m", "tests.training.ranks", str(tmp_path), accelerator]
    done = subprocess.run(
        command, cwd=ROOT, env=clean(), capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [torch.load(tmp_path / f"rank{k}.pt") for k in range(world)]
    for name, options in CASES.items():
        given = {**options, "strategy": "auto", "accelerator": accelerator, "devices": 1}
        one = case(name, tmp_path / "one" / name, **given)
        assert one["backend"] == "none"
        close = {"rtol": 1e-4, "atol": 1e-5} if name == "sharded" else {"rtol": 1e-9, "atol": 1e-12}
        for found in ranks:
            assert found[name]["backend"] == backend
            for a, b in zip(found[name]["history"], one["history"], strict=True):
                assert a["train_loss"] == pytest.approx(b["train_loss"], rel=close["rtol"]), name
                assert a == pytest.approx(b, rel=max(1e-6, close["rtol"])), name  # in float32
            if name not in ("sharded", "resumed"):  # shards have no whole gradient
                torch.testing.assert_close(found[name]["gradients"], one["gradients"], **close)
            torch.testing.assert_close(found[name]["weights"], one["weights"], **close)


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
@pytest.mark.parametrize("world", [2, 4])
def test_a_step_of_several_is_that_of_one_on_the_joined_batch(tmp_path: Path, world: int) -> None:
    """Under torchrun: first gradients and final weights in float64, also where each process takes
    another number of solver steps, batches are uneven, labels do not count, batch norms are joint,
    weights are sharded, and the run was begun by one process."""
    compare(tmp_path, world, "cpu", "gloo")


@pytest.mark.gpu
@pytest.mark.slow
def test_one_process_of_nccl_trains_as_one_without(tmp_path: Path) -> None:
    """The same trainings on a GPU, in a group of one process."""
    assert torch.distributed.is_nccl_available()
    compare(tmp_path, 1, "gpu", "nccl")


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_dies_or_freezes_ends_the_run_which_one_process_resumes(
    tmp_path: Path, number: int
) -> None:
    out = tmp_path / "two"
    options: dict[str, Any] = {"epochs": 5000, "schedule": "constant", "lr": 0.02}
    process = start(out, **options, process_timeout=8)
    began = time.monotonic()
    while not (out / "last.ckpt").exists() and time.monotonic() - began < 200:
        time.sleep(0.1)
    listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for child in listed:
        os.kill(int(child), number)
    text, _ = process.communicate(timeout=200)  # Lightning would wait for half an hour
    assert process.returncode != 0
    assert "is complete: resume from it" in text, text
    for child in listed:  # gone, or dead and not yet collected
        stat = Path(f"/proc/{child}/stat")
        assert not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] == "Z"
    done = read_checkpoint(out / "last.ckpt")["equilibria"]["progress"]["epoch"]
    found = run(config(out, **{**options, "epochs": done + 2}), resume=out)
    assert [row["epoch"] for row in found.history] == list(range(1, done + 3))


SLURM = {"SLURM_NTASKS": "2", "SLURM_JOB_NAME": "train", "SLURM_JOB_ID": "7"}
SLURM |= {"SLURM_NTASKS_PER_NODE": "1", "SLURM_JOB_NUM_NODES": "2", "SLURM_NODELIST": "localhost"}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["lightning", "slurm"])
def test_two_machines_print_one_document(tmp_path: Path, launcher: str) -> None:
    """``--nodes 2``, each started by hand (NODE_RANK) or by SLURM, here with its variables."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    words = ["--samples", "128", "--epochs", "1", "--accelerator", "cpu", "--nodes", "2"]
    words += ["--strategy", "ddp", "--json", "--out", str(tmp_path / "run")]
    group = []
    for node in ("0", "1"):
        own = {"NODE_RANK": node}
        if launcher == "slurm":
            own = {**SLURM, "SLURM_PROCID": node, "SLURM_LOCALID": "0", "SLURM_NODEID": node}
        command = [sys.executable, "-m", "equilibria", "train", *words]
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        group.append(subprocess.Popen(command, env=clean(**place, **own), **pipes))
    said = [process.communicate(timeout=300) for process in group]
    assert [process.returncode for process in group] == [0, 0], said
    assert json.loads(said[0][0])["folder"] == str(tmp_path / "run")
    assert said[1][0] == ""
    assert json.loads((tmp_path / "run" / "result.json").read_text())["processes"] == 2


@pytest.fixture
def alone() -> Any:
    """A group of one process, so that a sum over processes can be called."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("momentum", [0.2, 0.0, None])
def test_a_joint_norm_is_a_batch_norm_and_those_inside_layers_stay(momentum: Any) -> None:
    inside = torch.nn.BatchNorm2d(3)
    layer = torch.nn.Sequential(inside)
    layer.is_equilibrium = True  # type: ignore[assignment]
    plain, twin = (torch.nn.BatchNorm2d(3, momentum=momentum) for _ in range(2))
    model: Any = torch.nn.Sequential(plain, layer).double()
    model.trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cpu")))
    twin.double()
    joint = processes.JointNorms()
    joint.apply(model)
    assert layer[0] is inside
    assert type(model[0]) is not torch.nn.BatchNorm2d
    x = torch.randn(5, 3, 4, 4, dtype=torch.float64).requires_grad_()
    y = x.detach().clone().requires_grad_()
    for _ in range(2):
        first, second = model[0](x), twin(y)
        torch.testing.assert_close(first, second)
        first.pow(3).sum().backward()
        second.pow(3).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    model.eval()
    torch.testing.assert_close(model[0](x), twin.eval()(y))
    assert joint.revert(model)[0] is plain
    torch.testing.assert_close(plain.state_dict(), twin.state_dict())
    assert not plain.training


def test_the_rank_is_known_from_every_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes.rank_zero_only, "rank", 0, raising=False)
    assert processes.rank() == 0
    monkeypatch.setenv("NODE_RANK", "1")  # the first process of the second machine
    assert processes.rank() == 1


def test_what_backends_say_of_a_lost_process() -> None:
    said = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer"
    assert processes.is_lost(RuntimeError(said))
    assert processes.is_lost(RuntimeError("Timed out waiting 45000ms for recv operation"))
    assert processes.is_lost(RuntimeError("Application timeout caused pair closure"))
    assert not processes.is_lost(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
