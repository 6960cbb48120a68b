"""Frozen copies: the same answers as the network's, from weights that are made ready once."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode

import equilibria as eq
from equilibria.engine.result import Result
from tests.ops import on_gpu

PATCH = eq.Patches(channels=4, size=2)


def layer(**changes: Any) -> eq.nn.GEQ:
    torch.manual_seed(0)
    solver = eq.ProximalGradient(rtol=0.0, atol=0.0, max_steps=2, accelerate=False)
    options: dict[str, Any] = {"patch": PATCH, "hidden": 8, "solver": solver, **changes}
    return eq.nn.GEQ(8, 8, in_channels=5, **options)


def images(batch: int = 3) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(batch, 5, 4, 8).to(memory_format=torch.channels_last)


def stack(name: str = "geq") -> nn.Module:
    torch.manual_seed(0)
    options = {} if name == "explicit" else {"hidden": 8}
    made = eq.models.create(f"{name}_stack_cifar_3m", widths=(16, 16), depth=2, **options)
    if name == "geq":
        eq.nn.set_steps(made, 1)
    return made.to(memory_format=torch.channels_last).eval()  # type: ignore[call-overload,no-any-return]


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "bounded": layer,
    "free": lambda: layer(constraint=None),
    "weight norm": lambda: layer(constraint=eq.nn.WeightNormalized()),
    "learned rate": lambda: layer(gamma=eq.LearnedGamma(0.3)),
    "no metric": lambda: layer(hidden=None),
    "to a tolerance": lambda: layer(solver=eq.Anderson()),
    "envelope": lambda: eq.nn.Envelope(
        eq.nn.GEQ(5, 8, patch=PATCH, hidden=8, gamma=0.5, kernel_size=3)
    ),
    "linear": lambda: eq.nn.OptEq(8, 8, in_channels=5, kernel_size=3),
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("cast", [False, True])
@torch.no_grad()
def test_answers_are_those_of_the_model(kind: str, cast: bool) -> None:
    made, x = LAYERS[kind]().eval(), images()
    frozen = eq.nn.frozen_copy(made)
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        right = made(x)
        for _ in range(2):  # the second time from what was kept
            assert torch.equal(frozen(x), right)
        assert torch.equal(frozen(x[:1]), made(x[:1]))
    assert not any(parametrize.is_parametrized(m) for m in frozen.modules())
    assert not any(p.requires_grad for p in frozen.parameters())
    wanted = sum(p.requires_grad for p in LAYERS[kind]().parameters())
    assert sum(p.requires_grad for p in made.parameters()) == wanted  # the model is left alone


def test_a_whole_network_and_its_explicit_twin() -> None:
    for name in ("geq", "explicit"):
        model = stack(name).train()
        frozen = eq.nn.frozen_copy(model)
        assert model.training
        assert not frozen.training
        x = torch.randn(2, 3, 32, 32).to(memory_format=torch.channels_last)
        for mode in (torch.no_grad, torch.inference_mode, torch.no_grad):
            with mode():
                assert torch.equal(frozen(x), model.eval()(x))


@torch.no_grad()
def test_other_weights_are_seen() -> None:
    made, x = layer().eval(), images()
    frozen: Any = eq.nn.frozen_copy(made)
    before = frozen(x)
    # From one precision to another and back: the second float32 is another weight.
    wide = frozen.double()(x.double())
    torch.testing.assert_close(wide, before.double(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(frozen.float()(x), before)
    rounded = frozen.bfloat16().float()
    fresh = eq.nn.frozen_copy(rounded)
    assert not torch.equal(rounded(x), before)
    assert torch.equal(rounded(x), fresh(x))
    frozen.W.weight.mul_(0.5)
    frozen.W_h.weight.mul_(0.9)
    assert torch.equal(frozen(x), eq.nn.frozen_copy(frozen)(x))
    assert not torch.equal(frozen(x), fresh(x))
    frozen.load_state_dict(eq.nn.frozen_copy(made).state_dict())
    assert torch.equal(frozen(x), before)
    for twin in (copy.deepcopy(frozen), pickle.loads(pickle.dumps(frozen))):
        assert torch.equal(twin(x), before)
        twin.W.weight.zero_()
        assert torch.equal(frozen(x), before)
        assert float(twin(x).abs().max()) == 0.0


def test_gradients_pass_a_frozen_network() -> None:
    made, x = layer().eval(), images()
    frozen = eq.nn.frozen_copy(made)
    with torch.inference_mode():
        frozen(x)
    found, right = (
        torch.autograd.grad(module(given).sum(), given)[0]
        for module, given in ((m, x.clone().requires_grad_()) for m in (frozen, made))
    )
    assert torch.equal(found, right)


@torch.no_grad()
def test_a_bad_sample_is_told_and_harms_nobody() -> None:
    made, x = layer().eval(), images()
    frozen = eq.nn.frozen_copy(made)
    right = made.solve(x)
    frozen.solve(x)
    sick = x.clone()
    sick[1, 0, 0, 0] = float("nan")
    found = frozen.solve(sick)
    assert found.result.tolist()[1] == int(Result.nonfinite)
    assert float(found.value[1].abs().max()) == 0.0
    rest = [0, 2]
    for mine, true in (
        (found.value, right.value),
        (found.result, right.result),
        (found.stats.residual, right.stats.residual),
        (found.stats.relative, right.stats.relative),
        (found.stats.steps, right.stats.steps),
    ):
        assert torch.equal(mine[rest], true[rest])


def test_certificates_are_those_of_the_model() -> None:
    made, x = layer(constraint=eq.nn.NormBounded(bound=0.9)).eval(), images()
    frozen = eq.nn.frozen_copy(made)
    with torch.no_grad():
        frozen(x)
    right, found = eq.certify(made, x), eq.certify(frozen, x)
    assert found.contraction == right.contraction
    torch.testing.assert_close(found.error_bound, right.error_bound)


@pytest.mark.slow
def test_it_compiles() -> None:
    frozen, x = eq.nn.frozen_copy(layer()), images()
    compiled = torch.compile(frozen, backend="eager", fullgraph=True)
    with torch.no_grad():
        right = frozen(x)
        torch.testing.assert_close(compiled(x), right)


@on_gpu
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_captured_copy_on_the_gpu(dtype: torch.dtype) -> None:
    """Replayed on other images than at capture, one of them not a number."""
    own = stack().cuda()
    frozen = eq.nn.frozen_copy(own)
    cast = dtype == torch.bfloat16
    x = torch.randn(4, 3, 32, 32, device="cuda").to(memory_format=torch.channels_last)

    def answer(model: nn.Module) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=cast, cache_enabled=False):
            found: Tensor = model(x)
        return found

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.testing.assert_close(answer(frozen), answer(own))
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), eq.nn.observe(frozen) as seen:
        logits = answer(frozen)
    x.copy_(torch.randn_like(x))
    healthy = answer(own)
    x[1, 0, 0, 0] = float("nan")
    graph.replay()
    rest = [0, 2, 3]
    torch.testing.assert_close(logits[rest], healthy[rest])
    for (found,) in seen.solutions.values():
        assert found.result[rest].tolist() == [int(Result.fixed_steps)] * 3
        assert bool(found.stats.relative[rest].isfinite().all())
        assert found.stats.steps.tolist() == [1] * 4


# ---------------------------------------------------------------------------- how much is launched


class Launches(TorchDispatchMode):
    """Counts operations that do work; views and allocations do none."""

    FREE = (
        "view", "_unsafe_view", "t", "transpose", "permute", "expand", "slice", "select", "unbind",
        "unsqueeze", "squeeze", "detach", "alias", "empty", "new_empty", "empty_like",
        "promote_types",
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, fn: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = fn.__name__.split(".")[0]
        if name not in self.FREE:
            self.seen.append(name)
        return fn(*args, **(kwargs or {}))


def launched(block: nn.Module, x: Tensor) -> list[str]:
    """Of the second call, under autocast."""
    counting = Launches()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        block(x)
        with counting:
            block(x)
    return counting.seen


def test_a_block_launches_little() -> None:
    """In plain operations on a CPU, the twin's nine beside them."""
    x = torch.randn(1, 16, 32, 32).bfloat16().to(memory_format=torch.channels_last)
    own, twin = stack(), stack("explicit")
    frozen: Any = eq.nn.frozen_copy(own)
    found = launched(frozen.stages[1], x)
    assert "flip" not in found
    assert found.count("mm") == 2  # rows times M: of the energies and of the message
    assert len(found) <= 90
    assert len(found) < len(launched(own.stages[1], x)) - 25  # type: ignore[index]
    assert len(launched(twin.stages[1], x)) == 9  # type: ignore[index]


def test_a_block_launches_little_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of a GPU on a CPU: each Triton kernel is a stub, and counts as one."""
    pytest.importorskip("triton")
    from equilibria.ops import (
        gaussian_patches,
        gaussian_steps,
        gaussian_triton,
        pointwise_triton,
    )

    kernels = dict.fromkeys(("message", "energies", "norms", "judge", "rate"), 0)

    def counted(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            kernels[name] += 1
            return fn(*args, **kwargs)

        return run

    def judged(z: Tensor, *_: Any) -> tuple[Tensor, ...]:
        kinds = (torch.int8, torch.float32, torch.float32, torch.int8, torch.int32)
        return tuple(torch.empty(len(z), dtype=kind) for kind in kinds)

    monkeypatch.setattr(gaussian_patches, "can_fuse", lambda *_: True)
    monkeypatch.setattr(gaussian_steps, "can_fuse", lambda *_: True)
    monkeypatch.setattr(gaussian_steps, "_vectors", lambda *_: True)
    stubs = (
        (gaussian_triton, "forward", "message", lambda a, c, *_: torch.empty_like(c)),
        (gaussian_triton, "energies", "energies", lambda c, *_: torch.empty(len(c), 9)),
        (pointwise_triton, "residual_norms", "norms", lambda f, z: f.new_empty(1, 4, 2)),
        (pointwise_triton, "judge", "judge", judged),
        (pointwise_triton, "mean_rate", "rate", lambda e, *_: torch.empty(len(e))),
    )
    for module, attribute, name, fn in stubs:
        monkeypatch.setattr(module, attribute, counted(name, fn))
    x = torch.randn(1, 16, 32, 32).bfloat16().to(memory_format=torch.channels_last)
    frozen: Any = eq.nn.frozen_copy(stack())
    launched(frozen.stages[1], x)  # the first call may do more
    kernels = dict.fromkeys(kernels, 0)
    found = launched(frozen.stages[1], x)
    assert kernels == dict.fromkeys(kernels, 2)  # one for each of the two calls inside
    # Norm, cast and convolution of U, the start, the step (one kernel of cuDNN), the skip.
    assert found == [
        "native_batch_norm", "_to_copy", "convolution", "new_zeros", "convolution", "relu_", "add"
    ]  # fmt: skip
