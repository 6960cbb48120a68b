"""Frozen copies: the same answers as the network's, from weights that are made ready once."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode

import equilibria as eq
from equilibria.engine.result import Result
from equilibria.problems import ConvOperator
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


def right(frozen: nn.Module, x: Tensor) -> Tensor:
    """The answer of the same weights, from nothing that was kept."""
    twin = copy.deepcopy(frozen)
    for module in twin.modules():
        if isinstance(module, eq.nn.GEQ):
            module._kept = None
    answer: Tensor = twin(x)
    return answer


class Scaled(eq.nn.GEQ):
    factor = 1.0

    def operator(self) -> ConvOperator:
        return ConvOperator(self.factor * self.W.weight)  # type: ignore[operator]


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "gamma": (layer, lambda f: setattr(f, "gamma", eq.FixedGamma(2.0))),
    "patch": (layer, lambda f: setattr(f, "patch", eq.Patches(channels=1, size=4))),
    "W": (layer, lambda f: setattr(f, "W", nn.Conv2d(8, 8, 3, padding=1, bias=False))),
    "data": (layer, lambda f: setattr(f.W.weight, "data", 0.3 * f.W.weight)),
    "rate": (LAYERS["learned rate"], lambda f: f.log_gamma.add_(1.0)),
    "assigned": (
        layer,
        lambda f: f.load_state_dict({k: 0.5 * v for k, v in f.state_dict().items()}, assign=True),
    ),
    "own operator": (
        lambda: Scaled(8, 8, in_channels=5, patch=PATCH, hidden=8),
        lambda f: setattr(f, "factor", 0.2),
    ),
}


@pytest.mark.parametrize("kind", CHANGES)
@torch.no_grad()
def test_changes_are_seen(kind: str) -> None:
    make, change = CHANGES[kind]
    frozen, x = eq.nn.frozen_copy(make()), images()
    before = frozen(x)
    change(frozen)
    assert torch.equal(frozen(x), right(frozen, x))
    assert not torch.equal(frozen(x), before)


@torch.no_grad()
def test_a_constraint_put_on_a_frozen_layer() -> None:
    frozen: Any = eq.nn.frozen_copy(layer())
    x = images()
    frozen(x)
    eq.nn.constrain(frozen.W, "weight", eq.nn.NormBounded(bound=0.3))
    for _ in range(2):
        assert torch.equal(frozen(x), right(frozen, x))
        frozen.W.parametrizations.weight[0].bound = 0.1


@pytest.mark.parametrize("fused", [False, True])
def test_training_a_frozen_copy(fused: bool) -> None:
    """Fused optimizers do not count as changes in place."""
    frozen, x = eq.nn.frozen_copy(layer()), images()
    with torch.no_grad():
        frozen(x)
    frozen.requires_grad_(True)
    optimizer = torch.optim.AdamW(frozen.parameters(), lr=0.05, fused=fused)
    for _ in range(2):
        optimizer.zero_grad()
        frozen(x).square().sum().backward()
        optimizer.step()
        with torch.no_grad():
            assert torch.equal(frozen(x), right(frozen, x))
    frozen.requires_grad_(False)
    with torch.no_grad():
        assert torch.equal(frozen(x), right(frozen, x))


@torch.inference_mode()
def test_weights_of_inference_mode() -> None:
    """Tensors made there do not count their changes."""
    frozen, x = eq.nn.frozen_copy(layer()), images()
    assert not any(p.is_inference() for p in frozen.parameters())
    frozen.double()
    before = frozen(x.double())
    frozen.W.weight.mul_(0.3)
    frozen.W_h.weight.mul_(0.5)  # type: ignore[union-attr,operator]
    assert torch.equal(frozen(x.double()), right(frozen, x.double()))
    assert not torch.equal(frozen(x.double()), before)


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("kind", ["bounded", "learned rate", "wide"])
def test_problems_of_a_frozen_layer_after_inference_mode(kind: str, cast: bool) -> None:
    """What was kept in inference mode serves autograd."""
    if kind == "wide":  # by Winograd's form
        torch.manual_seed(0)
        made: Any = eq.nn.GEQ(64, 64, in_channels=5, patch=PATCH, hidden=8).eval()
        x = torch.randn(1, 5, 24, 24).to(memory_format=torch.channels_last)
    else:
        made, x = LAYERS[kind]().eval(), images()
    frozen = eq.nn.frozen_copy(made)
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        with torch.inference_mode():
            frozen(x)
        with torch.no_grad():
            z = made(x)
            problems = [m.problem(x) for m in (frozen, made)]
        found = []
        for problem in problems:
            at = z.clone().requires_grad_()
            found += torch.autograd.grad(problem.objective(at).sum(), at)
    assert torch.equal(*found)


@torch.no_grad()
def test_copies_and_files_leave_behind_what_is_kept() -> None:
    frozen, x = eq.nn.frozen_copy(layer()), images()
    sizes = []
    for _ in range(2):
        file = io.BytesIO()
        torch.save(frozen, file)
        sizes.append(file.tell())
        before = frozen(x)
    assert sizes[0] == sizes[1]
    file.seek(0)
    for twin in (torch.load(file, weights_only=False), copy.deepcopy(frozen)):
        assert twin._kept == ()
        assert torch.equal(twin(x), before)
        assert twin._kept


@torch.no_grad()
def test_a_frozen_envelope_loads_the_state_of_another() -> None:
    made: list[Any] = [LAYERS["envelope"]() for _ in range(2)]
    made[0].layer.W.parametrizations.weight.original.mul_(0.3)
    one, other = map(eq.nn.frozen_copy, made)
    other.load_state_dict(one.state_dict())
    assert torch.equal(one(images()), other(images()))


@torch.no_grad()
def test_constraints_are_evaluated_in_full_precision() -> None:
    free = nn.Linear(6, 6)
    made = nn.utils.parametrizations.orthogonal(free, orthogonal_map="cayley").eval()
    with torch.autocast("cpu", torch.bfloat16):
        frozen = eq.nn.frozen_copy(made)
    assert torch.equal(frozen.weight, made.weight)  # type: ignore[arg-type]


def test_a_file_of_a_frozen_copy_that_could_not_be_loaded_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="frozen_copy"):
        eq.models.save(eq.nn.frozen_copy(stack()), tmp_path / "a.safetensors")
    assert not list(tmp_path.iterdir())


@torch.no_grad()
def test_an_operator_keeps_one_version_of_its_weight() -> None:
    weight = 0.05 * torch.randn(8, 8, 3, 3)
    operator = ConvOperator(weight)
    for _ in range(3):
        weight.mul_(0.9)
        assert torch.equal(operator.laid_out(torch.contiguous_format)[0], weight)
    assert len(operator._laid) == 1
    with torch.inference_mode():  # where changes are not counted
        operator = ConvOperator(weight.clone())
        operator.laid_out(torch.contiguous_format)
        operator.weight.mul_(2.0)
        assert torch.equal(operator.laid_out(torch.contiguous_format)[0], operator.weight)


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
